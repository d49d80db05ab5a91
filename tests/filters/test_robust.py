"""Rows far from their prediction count for less, by weights that are worked out here by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.filters import AdaptiveNoise, merge

KEY = jax.random.key(0)
LINE = opvi.linear_regression(2, noise=0.25, prior_variance=2.0)


def rows(count: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((count, 2)).astype(np.float32)
    return X, (X @ [1.0, -2.0] + 0.5 + 0.5 * rng.standard_normal(count)).astype(np.float32)


def spoilt(count: int = 8):
    X, y = rows(count)
    y[2], y[5] = 30.0, -7.0
    return X, y


def after(sampler, data, weight=None, particles=2):
    batch = opvi.batch(data) if weight is None else opvi.Batch(data, jnp.asarray(weight, jnp.float32))
    return sampler.step(KEY, sampler.init(KEY, particles), batch)


def test_a_linear_model_learns_the_posterior_of_weighted_rows():
    sampler = opvi.gauss_newton(LINE, forgetting=1.0, robust=3.0)
    state, mean, precision = sampler.init(KEY, 2), np.zeros(3), np.eye(3) / 2
    counted = []
    for seed in range(3):
        X, y = rows(8, seed)
        y[seed], y[seed + 4] = 30.0, -12.0
        A = np.column_stack([X, np.ones(8)]).astype(float)
        variance = 0.25 + np.einsum("bi,ij,bj->b", A, np.linalg.inv(precision), A)
        w = np.minimum(1, 9 * variance / (y - A @ mean) ** 2)
        counted.extend(w)
        density = -0.5 * ((y - A @ mean) ** 2 / variance + np.log(2 * math.pi * variance))
        new = precision + (A * (w / 0.25)[:, None]).T @ A
        mean = np.linalg.solve(new, precision @ mean + A.T @ (w / 0.25 * y))
        precision = new
        state, info = sampler.step(KEY, state, opvi.batch((X, y)))
        np.testing.assert_allclose(info.predicted.log_density, density, rtol=1e-4)  # scores count all of every row
    assert min(counted) < 0.05
    assert max(counted) == 1
    np.testing.assert_allclose(state.particles[1], mean, atol=1e-5)
    np.testing.assert_allclose(state.past.matrices[0, 0], np.linalg.inv(precision), atol=1e-6)


def test_rows_within_the_threshold_count_as_ever():
    plain, wary = (opvi.gauss_newton(LINE, forgetting=1.0, robust=c) for c in (None, 6.0))
    one, other = after(plain, rows(20))[0], after(wary, rows(20))[0]
    np.testing.assert_allclose(one.particles, other.particles, atol=1e-6)
    np.testing.assert_allclose(one.past.matrices, other.past.matrices, atol=1e-6)
    np.testing.assert_allclose(one.log_evidence, other.log_evidence, rtol=1e-6)


def test_a_network_learns_weighted_rows():
    target = opvi.mlp(2, (3,), opvi.gaussian(0.25), prior_variance=None)
    plain, wary = (opvi.gauss_newton(target, forgetting=1.0, robust=c) for c in (None, 2.0))
    X, y = spoilt()
    said = jax.jit(plain.predict)(plain.init(KEY, 4), X).components
    mean, variance = (np.asarray(leaf, float) for leaf in (said.mean, said.variance))
    w = np.minimum(1, 4 * (variance.mean(0) + mean.var(0)) / (y - mean.mean(0)) ** 2)
    assert 0 < w.min() < 0.1
    assert w.max() == 1
    one, other = after(plain, (X, y), w, 4)[0], after(wary, (X, y), None, 4)[0]
    np.testing.assert_allclose(one.particles, other.particles, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(one.past.matrices, other.past.matrices, rtol=1e-3, atol=1e-5)


def test_noise_that_adapts_follows_what_is_believed():
    """Of the first batch: the running error is $\\sum w^2 e^2 / \\sum w^2$, with w in units of the error before, 1."""
    target = opvi.mlp(2, (), opvi.gaussian(1.0), prior_variance=1.0)
    sampler = opvi.gauss_newton(target, forgetting=1.0, noise=AdaptiveNoise(share=0.5, smallest=1e-4), robust=2.0)
    X, y = spoilt()
    A = np.column_stack([X, np.ones(8)]).astype(float)
    w = np.minimum(1, 4 * (1 + (A**2).sum(1)) / y**2)
    error = (w**2 * y**2).sum() / (w**2).sum()
    state, _ = after(sampler, (X, y))
    np.testing.assert_allclose(state.error, error, rtol=1e-4)
    precision = np.eye(3) + (A * (w / (0.5 * error))[:, None]).T @ A
    np.testing.assert_allclose(state.past.matrices[0, 0], np.linalg.inv(precision), atol=1e-5)
    np.testing.assert_allclose(state.particles[0], np.linalg.solve(precision, A.T @ (w * y) / (0.5 * error)), atol=1e-4)


def test_kfac_learns_weighted_targets():
    """As the first step of weights that wander in tests/filters/test_kfac.py, whose closed form has weights here."""
    target = opvi.mlp(2, (), opvi.gaussian(1.0), prior_variance=1.0)
    sampler = opvi.kfac(target, damping=0.1, wander=True, largest_change=1e6, robust=1.5)
    X, y = spoilt()
    state = sampler.init(KEY, 2)
    new, _ = sampler.step(KEY, state, opvi.batch((X, y)))
    A = np.column_stack([X, np.ones(8)]).astype(float)
    said = A @ np.asarray(state.particles, float).T
    w = np.minimum(1, 1.5**2 * (1 + said.var(1)) / (y - said.mean(1)) ** 2)
    assert 0 < w.min() < 0.1
    assert w.max() == 1
    G = (0.01 + 1.0) / 2
    P = np.linalg.inv(np.eye(3) / (G / 0.1) + (A * w[:, None]).T @ A)
    for before, moved in zip(np.asarray(state.particles, float), np.asarray(new.particles, float), strict=True):
        np.testing.assert_allclose(moved - before, P @ A.T @ (w * (y - A @ before)) / (1.1 * G), rtol=2e-3, atol=1e-4)


SOFTMAX = opvi.mlp(2, (), opvi.categorical(), outputs=3, prior_variance=1.0)
LABELS = {
    "linear_ekf": lambda **given: opvi.linear_ekf(2, 3, wandering=0.0, **given),
    "gauss_newton": lambda **given: opvi.gauss_newton(SOFTMAX, forgetting=1.0, **given),
}


@pytest.mark.parametrize("name", LABELS)
def test_labels_thought_impossible_count_for_less(name):
    """A label of probability p counts $c^2 p / (1 - p)$; both samplers start from even probabilities."""
    plain, wary = (LABELS[name](robust=c) for c in (None, 1.0))
    X = rows(5)[0]
    one, other = (
        after(s, (X, np.array([0, 1, 2, 1, 0])), [1, 1, 1, 1, 1] if s is wary else [0.5] * 5) for s in (plain, wary)
    )
    np.testing.assert_allclose(one[0].particles, other[0].particles, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(one[1].predicted.log_density, -math.log(3), rtol=1e-5)


def test_weights_wander_by_the_rows_and_not_by_what_is_believed():
    X, y = rows(5)[0], np.array([0, 1, 2, 1, 0])
    still, moving = (after(opvi.linear_ekf(2, 3, wandering=q, robust=0.1), (X, y))[0] for q in (0.0, 0.01))
    np.testing.assert_allclose(moving.covariance - still.covariance, [0.01 * 5 / 20 * np.eye(9)], atol=1e-6)


def test_kfac_labels():
    target = opvi.mlp(2, (), opvi.categorical(), outputs=3, prior_variance=1.0)
    X, y = rows(5)[0], np.array([0, 1, 2, 1, 0])
    moved = []
    for c in (None, 0.1):
        sampler = opvi.kfac(target, robust=c)
        state = sampler.init(KEY, jnp.zeros((1, 9)))
        moved.append(sampler.step(KEY, state, opvi.batch((X, y)))[0])
    plain, wary = moved
    np.testing.assert_allclose(wary.factors[0].inputs, 0.005 * plain.factors[0].inputs, rtol=1e-4)  # .1² p / (1 - p)


@pytest.mark.parametrize("robust", [0, -1.0, math.nan, math.inf, True, "4"])
def test_a_threshold_is_a_number_above_0(robust):
    for make in (lambda c: opvi.gauss_newton(LINE, robust=c), lambda c: opvi.linear_ekf(2, 3, robust=c)):
        with pytest.raises(ValueError, match="`robust` is .* but must be None"):
            make(robust)


def test_other_heads_are_refused_and_robust_posteriors_are_not_merged():
    counts = opvi.mlp(2, (), opvi.targets.poisson(), prior_variance=1.0)
    for make in (opvi.kfac, opvi.gauss_newton):
        with pytest.raises(TypeError, match="head is Poisson"):
            after(make(counts, robust=4.0), (rows(4)[0], np.arange(4)))
    with pytest.raises(ValueError, match="nothing exact"):
        merge(opvi.gauss_newton(LINE, forgetting=1.0, robust=4.0))
