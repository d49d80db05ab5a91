"""Rows taken back, against the posterior that never saw them."""

import jax
import numpy as np
import pytest

import opvi
from opvi.filters import AdaptiveNoise, withdraw

TARGET = opvi.linear_regression(2, noise=0.5, prior_variance=3.0)
SAMPLER = opvi.gauss_newton(TARGET, forgetting=1.0)


def rows(count: int = 24, seed: int = 0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((count, 2)).astype(np.float32)
    return X, (X @ [1.0, -2.0] + 0.5 + 0.7 * rng.standard_normal(count)).astype(np.float32)


def learnt(data):
    return opvi.run(SAMPLER, opvi.stream(data, 8), key=0, particles=2)[0]


def some(data, at):
    return data[0][at], data[1][at]


def same(one, other):
    np.testing.assert_allclose(one.particles, other.particles, atol=2e-5)
    np.testing.assert_allclose(one.past.matrices, other.past.matrices, atol=1e-5)
    np.testing.assert_allclose(one.log_evidence, other.log_evidence, rtol=1e-5)
    assert int(one.rows) == int(other.rows)


def test_the_posterior_is_that_of_the_other_rows():
    data = rows()
    same(withdraw(SAMPLER, learnt(data), some(data, slice(16, 24))), learnt(some(data, slice(16))))
    # by dense matrices, of rows anywhere, and learning goes on
    state = withdraw(SAMPLER, learnt(data), some(data, [0, 7, 20]))
    X, y = some(data, np.delete(np.arange(24), [0, 7, 20]))
    A = np.column_stack([X, np.ones(21)]).astype(float)
    precision = A.T @ A / 0.5 + np.eye(3) / 3
    np.testing.assert_allclose(state.particles[1], np.linalg.solve(precision, A.T @ y / 0.5), atol=1e-5)
    np.testing.assert_allclose(state.past.matrices[0, 0], np.linalg.inv(precision), atol=1e-6)
    again, _ = SAMPLER.step(jax.random.key(0), state, opvi.batch(some(data, [0, 7, 20])))
    same(again, learnt(data))


def test_all_rows_taken_back_leave_the_prior_and_weights_count():
    data = rows(8)
    left = withdraw(SAMPLER, learnt(data), data)
    np.testing.assert_allclose(left.particles, 0, atol=1e-3)  # of what float32 has kept
    np.testing.assert_allclose(left.past.matrices[0, 0], 3 * np.eye(3), atol=1e-3)
    np.testing.assert_allclose(left.log_evidence, 0, atol=1e-3)
    twice = SAMPLER.step(jax.random.key(0), SAMPLER.init(jax.random.key(0), 2), opvi.batch(data, np.full(8, 3.0)))[0]
    same(withdraw(SAMPLER, twice, data, np.full(8, 2.0)), learnt(data))


def test_what_was_not_learnt_is_not_withdrawn():
    data = rows()
    state = learnt(data)
    with pytest.raises(ValueError, match="did not learn them"):
        withdraw(SAMPLER, state, (10 * rows(4, 1)[0], rows(4, 1)[1]))
    with pytest.raises(ValueError, match="25 rows are to be withdrawn, but the state has learnt 24"):
        withdraw(SAMPLER, state, rows(25))
    with pytest.raises(ValueError, match="`weight` has shape"):
        withdraw(SAMPLER, state, some(data, [0]), [1.0, 2.0])


def test_rows_of_x_and_y_must_match():
    state = SAMPLER.init(jax.random.key(0), 1)
    with pytest.raises(ValueError, match="3 rows of X and 2 of y"):
        opvi.filters.withdraw(SAMPLER, state, (np.zeros((3, 2), np.float32), np.zeros(2, np.float32)))


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (opvi.gauss_newton(TARGET, forgetting=0.99), "forgets"),
        (opvi.gauss_newton(TARGET, forgetting=1.0, robust=4.0), "nothing exact"),
        (opvi.gauss_newton(TARGET, forgetting=1.0, noise=AdaptiveNoise()), "not one Gaussian"),
        (opvi.gauss_newton(opvi.logistic_regression(2), forgetting=1.0), "not a linear model"),
        (opvi.gauss_newton(opvi.mlp(2, (2,), opvi.gaussian(1.0)), forgetting=1.0), "not a linear model"),
        (opvi.svgd(TARGET, step=0.1), "not one Gaussian"),
    ],
)
def test_models_that_do_not_know_what_a_row_did_are_refused(sampler, said):
    with pytest.raises((TypeError, ValueError), match=said):
        withdraw(sampler, sampler.init(jax.random.key(0), 2), rows(4))
