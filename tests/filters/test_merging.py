import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.filters import AdaptiveNoise, merge

TARGET = opvi.linear_regression(2, noise=0.5, prior_variance=3.0)
SAMPLER = opvi.gauss_newton(TARGET, forgetting=1.0)


def rows(count: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((count, 2)).astype(np.float32)
    return X, (X @ [1.0, -2.0] + 0.5 + 0.7 * rng.standard_normal(count)).astype(np.float32)


def learnt(data, sampler=SAMPLER):
    return opvi.run(sampler, opvi.stream(data, 8), key=0, particles=2)[0]


def test_posteriors_learnt_apart_become_the_one_learnt_on_all_rows():
    X, y = rows(40)
    parts = [learnt((X[at], y[at])) for at in (slice(16), slice(16, 24), slice(24, 40))]
    both, whole = merge(SAMPLER, *parts, SAMPLER.init(jax.random.key(1), 2)), learnt((X, y))
    np.testing.assert_allclose(both.particles, whole.particles, atol=1e-5)
    np.testing.assert_allclose(both.past.matrices, whole.past.matrices, atol=1e-6)
    np.testing.assert_allclose(both.log_evidence, whole.log_evidence, rtol=1e-5)
    assert (int(both.rows), int(both.round)) == (40, 5)
    # and by dense matrices
    A = np.concatenate([X, np.ones((40, 1))], 1).astype(float)
    precision = A.T @ A / 0.5 + np.eye(3) / 3
    np.testing.assert_allclose(both.particles[0], np.linalg.solve(precision, A.T @ y / 0.5), atol=1e-5)
    further = [SAMPLER.step(jax.random.key(0), state, opvi.batch(rows(8, 1)))[0].particles for state in (both, whole)]
    np.testing.assert_allclose(further[0], further[1], atol=1e-5)  # learning goes on


def test_one_state_stays_what_it_was():
    state = learnt(rows(16))
    np.testing.assert_allclose(merge(SAMPLER, state).particles, state.particles, atol=1e-6)
    np.testing.assert_allclose(merge(SAMPLER, state).log_evidence, state.log_evidence, rtol=1e-5)


def log_prior(w):
    return -0.5 * (w**2).sum()


def line(w, x):
    return opvi.Normal(x @ w, jnp.ones(len(x), w.dtype))


def wave(w, x):
    return opvi.Normal(jnp.sin(x @ w), jnp.ones(len(x), w.dtype))


def own(predict):
    def log_likelihood(w, batch):
        return predict(w, batch[0]).log_density(batch[1])

    return opvi.gauss_newton(
        opvi.target(log_prior, log_likelihood, lambda key: jax.random.normal(key, (2,)), predict=predict),
        forgetting=1.0,
    )


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (opvi.gauss_newton(TARGET), "this sampler forgets"),
        (opvi.gauss_newton(opvi.logistic_regression(2), forgetting=1.0), "not a linear model"),
        (opvi.gauss_newton(opvi.mlp(2, hidden=(3,)), forgetting=1.0), "not a linear model"),
        (opvi.gauss_newton(TARGET, noise=AdaptiveNoise()), "not one Gaussian"),
        (opvi.svgd(TARGET, step=0.1), "not one Gaussian"),
        (own(line), "give some rows of `inputs`"),
    ],
)
def test_what_is_not_exact_is_refused(sampler, words):
    state = sampler.init(jax.random.key(0), 2)
    with pytest.raises((TypeError, ValueError), match=words):
        merge(sampler, state, state)


def test_targets_of_ones_own_are_tried_at_inputs():
    X, y = rows(8)
    linear, curved = own(line), own(wave)
    state = learnt((X, y), linear)
    np.testing.assert_allclose(merge(linear, state, inputs=X).particles, state.particles, atol=1e-6)
    with pytest.raises(TypeError, match="not a linear model"):
        merge(curved, curved.init(jax.random.key(0), 2), inputs=X)
    with pytest.raises(ValueError, match="at least one"):
        merge(linear, inputs=X)
