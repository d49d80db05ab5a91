"""Where particles start, and keys that are integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.targets import as_particles


def stays(log_prior):
    """A target whose `init` ignores its key."""
    return opvi.target(log_prior, lambda v, y: -((y - v[0]) ** 2) / 2, lambda key: jnp.zeros(2))


LAPLACE = stays(lambda v: -jnp.abs(v).sum())


@pytest.mark.parametrize(
    "sampler",
    [opvi.svgd(LAPLACE, step=0.1), opvi.gain_one(LAPLACE), opvi.sl_opvi(LAPLACE)],
    ids=["svgd", "gain_one", "sl_opvi"],
)
def test_an_init_that_always_returns_the_same_is_refused(sampler):
    with pytest.raises(
        ValueError, match=r"`init` of this target returned the same.*from the prior.*\(2,\).*online_map"
    ):
        sampler.init(0)
    apart = jnp.arange(6.0).reshape(3, 2)
    np.testing.assert_array_equal(sampler.init(0, apart).particles, apart)


def test_a_point_estimate_may_start_anywhere():
    assert opvi.online_map(LAPLACE, step=0.1).init(0).particles.shape[1] == 2
    assert as_particles(LAPLACE, 0, 5).shape == (5, 2)  # nobody said that they must differ


def test_with_a_gaussian_prior_they_are_drawn_from_it():
    precision = np.array([[2.0, 0.6], [0.6, 1.0]], np.float32)
    target = stays(lambda v: -(v - 1) @ precision @ (v - 1) / 2)
    x = np.asarray(opvi.svgd(target, step=0.1).init(0, 4000).particles, float)
    # Standard errors of a mean and of a covariance, five of each.
    np.testing.assert_allclose(x.mean(0), 1, atol=5 * 1.1 / 4000**0.5)
    np.testing.assert_allclose(np.cov(x.T), np.linalg.inv(precision), atol=5 * 2**0.5 * 1.3 / 4000**0.5)


def test_gain_one_starts_at_the_prior_and_so_ends_at_the_posterior():
    """A linear model whose biases start at 0 in `init`: they have the closed form's spread all the same."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(30, 2)).astype(np.float32)
    y = (X @ [1.0, -1.0] + 0.5 * rng.normal(size=30)).astype(np.float32)
    sampler = opvi.gain_one(opvi.linear_regression(2, noise=0.25))
    state, _ = opvi.run(sampler, opvi.stream((X, y), 10), 0, particles=2000)
    design = np.column_stack([X, np.ones(30)]).astype(float)
    cov = np.linalg.inv(np.eye(3) + design.T @ design / 0.25)
    x = np.asarray(state.particles, float)
    np.testing.assert_allclose(x.std(0), np.sqrt(np.diag(cov)), rtol=5 / 4000**0.5)
    np.testing.assert_allclose((x.mean(0) - cov @ design.T @ y / 0.25) / np.sqrt(np.diag(cov)), 0, atol=5 / 2000**0.5)


SAMPLERS = [
    opvi.svgd(opvi.gaussian_mixture(), step=0.1),
    opvi.gain_one(opvi.gaussian_mixture()),
    opvi.gauss_newton(opvi.linear_regression(1)),
    opvi.linear_ekf(1, 2),
    opvi.kfac(opvi.mlp(1, (2,), head=opvi.bernoulli())),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda sampler: type(sampler).__name__)
def test_integers_are_keys(sampler):
    X, y = np.ones((3, 1), np.float32), np.ones(3, int if sampler == SAMPLERS[3] else np.float32)
    rows = opvi.batch(X[:, 0] if sampler in SAMPLERS[:2] else (X, y))

    def learn(key):
        state = sampler.init(key)
        return sampler.step(key, state, rows)[0].particles

    np.testing.assert_array_equal(learn(3), learn(jax.random.key(3)))
    if hasattr(sampler, "draws"):
        state = sampler.init(key=np.int32(3))
        np.testing.assert_array_equal(sampler.draws(state, 3, 2), sampler.draws(state, jax.random.key(3), n=2))


def test_integers_are_keys_of_predictions():
    said = opvi.Predictive(opvi.Normal(jnp.zeros((2, 3)), jnp.ones((2, 3))))
    np.testing.assert_array_equal(said.sample(1, 4), said.sample(jax.random.key(1), 4))
    np.testing.assert_array_equal(opvi.targets.sample_mixture(1, 4), opvi.targets.sample_mixture(jax.random.key(1), 4))
