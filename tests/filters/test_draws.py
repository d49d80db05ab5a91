"""What a sampler believes, as draws: against closed forms of linear models, at sizes where particles are one point."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi import _steps

KEY = jax.random.key(0)
NOISE = 0.25
DRAWS = 20_000


def model(dim, mean=0.0, precision=None):
    """A linear model whose starts have nothing to do with its prior."""
    precision = jnp.eye(dim) if precision is None else jnp.asarray(precision, jnp.float32)

    def predict(v, x):
        return opvi.Normal(x @ v, jnp.full(x.shape[:1], NOISE, x.dtype))

    return opvi.target(
        log_prior=lambda v: -(v - mean) @ precision.astype(v.dtype) @ (v - mean) / 2,
        log_likelihood=lambda v, data: predict(v, data[0]).log_density(data[1]),
        init=lambda key: jax.random.normal(key, (dim,)),
        predict=predict,
    )


def rows(dim, count, mean=0.0, sd=1.0, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, dim)).astype(np.float32)
    w = mean + sd * rng.normal(size=dim)
    return X, (X @ w + math.sqrt(NOISE) * rng.normal(size=count)).astype(np.float32)


def exact(data, batch, half_life, mean, precision):
    """The posterior with the prior whole, and batch k counting γ of every later round; the evidence, if none fades."""
    X, y = (np.asarray(a, float) for a in data)
    A, b, evidence = np.zeros_like(precision), np.zeros(len(precision)), 0.0
    for i in range(0, len(X), batch):
        x, t = X[i : i + batch], y[i : i + batch]
        gamma = 2 ** (-len(x) / half_life)
        C = np.linalg.inv(precision + A)
        S = x @ C @ x.T + NOISE * np.eye(len(x))
        r = t - x @ (C @ (precision @ np.full(len(A), mean) + b))
        evidence -= 0.5 * (r @ np.linalg.solve(S, r) + np.linalg.slogdet(2 * math.pi * S)[1])
        A, b = gamma * A + x.T @ x / NOISE, gamma * b + x.T @ t / NOISE
    C = np.linalg.inv(precision + A)
    return C @ (precision @ np.full(len(A), mean) + b), C, evidence


def check(sampler, state, mean, C, tracker=None):
    draws = np.asarray(sampler.draws(state, jax.random.key(1), DRAWS), float)
    sd = np.sqrt(np.diag(C))
    assert (np.abs(draws.mean(0) - mean) / sd).max() < 5 / math.sqrt(DRAWS)
    assert np.abs(draws.std(0) / sd - 1).max() < 5 / math.sqrt(2 * DRAWS)
    x = np.random.default_rng(9).normal(size=(6, len(mean))).astype(np.float32)
    epistemic = np.asarray(sampler.predict(state, x).uncertainty().epistemic)
    np.testing.assert_allclose(epistemic, np.einsum("bi,ij,bj->b", x, C, x), rtol=0.01)


@pytest.mark.parametrize(
    ("dim", "count", "batch", "half_life", "mean", "variance"),
    [
        pytest.param(60, 1000, 20, math.inf, 0.0, 1.0, marks=pytest.mark.slow),
        (60, 40, 20, math.inf, 2.0, 0.09),  # fewer rows than parameters: the prior decides
        pytest.param(200, 600, 100, 50.0, 2.0, 0.09, marks=pytest.mark.slow),
    ],
)
def test_draws_of_gauss_newton_are_the_posteriors(dim, count, batch, half_life, mean, variance):
    data = rows(dim, count, mean, math.sqrt(variance))
    sampler = opvi.gauss_newton(model(dim, mean, np.eye(dim) / variance), half_life=half_life)
    state, history = opvi.run(sampler, opvi.stream(data, batch), KEY, particles=2)
    m, C, evidence = exact(data, batch, half_life, mean, np.eye(dim) / variance)
    check(sampler, state, m, C)
    if half_life == math.inf:
        assert float(state.log_evidence) == pytest.approx(evidence, abs=0.1)
        assert history.info.rows[-1] == count


def test_a_correlated_prior_enters_whole():
    rng = np.random.default_rng(3)
    root = rng.normal(size=(60, 60)) / 8
    precision = np.eye(60) + root @ root.T
    data = rows(60, 30, mean=1.0, sd=0.5)
    sampler = opvi.gauss_newton(model(60, 1.0, precision), half_life=40.0)
    state, _ = opvi.run(sampler, opvi.stream(data, 10), KEY, particles=2)
    check(sampler, state, *exact(data, 10, 40.0, 1.0, precision)[:2])


@pytest.mark.slow
@pytest.mark.parametrize("dim", [50, 51])
def test_there_is_no_cliff_where_the_tracker_changes_its_method(dim):
    X, y = rows(dim - 1, 600)
    tracker = opvi.tracker(opvi.linear_regression(dim - 1, noise=NOISE))
    state, _ = opvi.run(tracker, opvi.stream((X, y), 100), KEY)
    C = np.linalg.inv(
        np.eye(dim) + np.column_stack([X, np.ones(600)]).T.astype(float) @ np.column_stack([X, np.ones(600)]) / NOISE
    )
    sd = np.asarray(tracker.draws(state, KEY, 4000)).std(0)
    assert abs(np.mean(sd / np.sqrt(np.diag(C))) - 1) < 0.03


def test_before_any_row_draws_are_the_priors():
    sampler = opvi.gauss_newton(model(60, 2.0, np.eye(60) / 0.09))
    draws = np.asarray(sampler.draws(sampler.init(KEY, 3), KEY, DRAWS))
    assert np.abs(draws.mean(0) - 2).max() < 5 * 0.3 / math.sqrt(DRAWS)
    np.testing.assert_allclose(draws.std(0), 0.3, rtol=5 / math.sqrt(2 * DRAWS))


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3])
def test_class_probabilities_are_averaged_over_the_covariance(classes):
    """Against two hundred thousand draws of the parameters themselves."""
    target = opvi.logistic_regression(4) if classes == 2 else opvi.softmax_regression(4, classes)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 4)).astype(np.float32), rng.integers(0, classes, 30)
    sampler = opvi.gauss_newton(target, forgetting=1.0)
    state, _ = opvi.run(sampler, opvi.stream((X, y), 10), KEY, particles=2)
    by_draws = jax.jit(lambda draws: opvi.predict(target, draws, X[:5]).probabilities())
    found = jax.jit(lambda state: sampler.predict(state, X[:5]).probabilities())
    drawn = sampler.draws(state, KEY, 200_000)
    np.testing.assert_allclose(found(state), by_draws(drawn), atol=0.004 if classes == 2 else 0.03)


def test_every_sampler_has_draws():
    target = opvi.linear_regression(2)
    tracker = opvi.tracker(target)  # whose draws move on from the particles
    moved = np.asarray(tracker.draws(tracker.init(KEY, 4), KEY, 10))
    assert moved.shape == (10, 3)
    assert len(np.unique(moved, axis=0)) == 10
    for sampler in (opvi.svgd(target, step=0.1), opvi.calibrated(opvi.kfac(target), target)):
        state = sampler.init(KEY, 4)
        draws = np.asarray(sampler.draws(state, KEY, 10))
        assert draws.shape == (10, 3)
        counts = [(draws == particle).all(1).sum() for particle in np.asarray(state.particles)]
        assert sorted(counts) == [2, 2, 3, 3]  # each as often as the others, as far as 10 can be divided


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (opvi.mlp(8, (10,)), {}),
        (opvi.mlp(300, (40,), opvi.categorical(), outputs=3, prior_variance=None), {"budget": 1e6}),  # KFAC
        (opvi.mlp(8, (150,), prior_variance=opvi.targets.Gamma()), {}),  # first-order
        (opvi.linear_regression(2), {"memory": 0}),  # SL-OPVI
    ],
)
def test_draws_that_are_not_the_posteriors_say_so_once(monkeypatch, target, options):
    _steps.warn_that_it_is_not_the_posterior.cache_clear()
    for kind in (_steps.TargetSampler, opvi.filters.GaussNewton, opvi.filters.SLOPVI):
        monkeypatch.setattr(kind, "_draws", lambda self, state, key, n: state.particles[:n])
    tracker = opvi.tracker(target, particles=4, **options)
    state = tracker.init(KEY)
    with pytest.warns(UserWarning, match="these draws are not the posterior: .*`opvi.ibis") as said:
        assert tracker.draws(state, 0, 2).shape == (2, target.dim)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracker.draws(state, 1, 2)
        opvi.tracker(target, particles=4, **options).draws(state, 0, 2)
        opvi.gauss_newton(opvi.linear_regression(2)).draws(state, 0, 2)  # which claims nothing


@pytest.mark.parametrize("n", [0, -1, 2.5])
def test_a_number_of_draws_is_a_whole_number(n):
    for sampler in (opvi.gauss_newton(opvi.linear_regression(2)), opvi.langevin(opvi.linear_regression(2), step=0.1)):
        with pytest.raises(ValueError, match="the number of draws must be a whole number of at least 1"):
            sampler.draws(sampler.init(jax.random.key(0), 3), jax.random.key(1), n)
