"""The line, against least squares, and in other units."""

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi.tracking.experts._linear import FORGETTING, Linear
from tests.tracking.test_sampled import RNG, Y, Z, changed, rows_of, taught


def test_the_line_is_that_of_least_squares_with_forgetting():
    state = taught(Linear())
    weight = FORGETTING ** (20.0 * np.repeat([2, 1, 0], 20))
    A = np.c_[np.ones(60), Z]
    spread = np.average(Z**2, weights=weight, axis=0) - np.average(Z, weights=weight, axis=0) ** 2
    wanted = np.linalg.solve(A.T @ (A * weight[:, None]) + np.diag([1e-6, *spread]), A.T @ (weight * Y))
    np.testing.assert_allclose(state.weights, wanted, atol=2e-3)
    said = Linear().predict(state, rows_of([[30.0, 0.0]], [0.0]))
    np.testing.assert_allclose(said.mean, wanted @ [1, 30, 0], rtol=1e-3)
    assert float(said.variance[0]) > 100 * float(Linear().predict(state, rows_of([[0.0, 0.0]], [0.0])).variance[0])


def test_an_outlier_hardly_moves_the_line():
    state, y = taught(Linear()), Y[:20].copy()
    y[3] = 1e4
    np.testing.assert_allclose(taught(Linear(), Z[:20], y, state).weights, state.weights, atol=0.15)


def test_in_new_units_it_is_the_same_line():
    expert, (units, move) = Linear(), changed()
    state = taught(expert)
    moved = jax.jit(expert.rescale)(state, units)
    asked, y = RNG.normal(size=(7, 2)), np.zeros(7)
    for old, new in ((state, moved), (taught(expert, state=state), taught(expert, *move(Z, Y), state=moved))):
        before, after = expert.predict(old, rows_of(asked, y)), expert.predict(new, rows_of(*move(asked, y)))
        np.testing.assert_allclose(after.mean, 0.5 * before.mean + 3, rtol=2e-2, atol=5e-3)
        np.testing.assert_allclose(after.noise, 0.25 * before.noise, rtol=0.05)


def test_far_outside_it_follows_the_line():
    """y is a column plus bounded noise; in 20 of 5,000 rows that column is up to 30 deviations out."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(5000, 3))
    far = rng.permutation(5000)[:20]
    X[far, 0] = rng.uniform(3, 30, 20)
    y = X[:, 0] + 0.3 * rng.uniform(-1, 1, 5000)
    state, _ = opvi.run(opvi.regressor(3), opvi.stream((X, y), 20), 0)
    Z = rng.normal(size=(200, 3))
    Z[:, 0] = rng.uniform(10, 30, 200)
    said = opvi.regressor(3).predict(state, Z)
    truth = Z[:, 0] + 0.3 * rng.uniform(-1, 1, 200)
    noise = 0.3 / np.sqrt(3)
    assert np.sqrt(np.mean((np.asarray(said.mean()) - truth) ** 2)) < 3 * noise
    assert float(opvi.metrics.coverage(said, jnp.asarray(truth, jnp.float32), 0.9)) >= 0.85  # of few such rows: more
