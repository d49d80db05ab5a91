r"""Forgetting and noise of the filters against closed forms: what a half-life, a share and wandering mean exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.filters import _covariance as covariance
from opvi.filters import _gauss_newton
from opvi.types import Batch

KEY = jax.random.key(0)
NOISE = 0.25
LINEAR = opvi.linear_regression(2, noise=NOISE, prior_variance=4.0)


def batches(rounds, rows, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        x = rng.normal(size=(rows, 2)).astype(np.float32)
        yield x, (x @ [1.0, -2.0] + 0.5 * rng.normal(size=rows)).astype(np.float32)


def discounted(given, gammas, noises, prior=4.0, *, prior_fades=False):
    """Weighted least squares: batch k counts γ of every later round; the prior, whole, or as if it came before all."""
    home = np.eye(3) / prior
    precision, score = home, np.zeros(3)
    for (x, y), gamma, noise in zip(given, gammas, noises, strict=True):
        a = np.concatenate([x, np.ones((len(x), 1))], 1).astype(float)
        precision = gamma * precision + a.T @ a / noise + (0 if prior_fades else (1 - gamma) * home)
        score = gamma * score + a.T @ y / noise
    return np.linalg.solve(precision, score), np.linalg.inv(precision)


def learnt(sampler, given):
    state = sampler.init(KEY, jnp.zeros((1, 3)))
    for x, y in given:
        state, _ = sampler.step(KEY, state, Batch((jnp.asarray(x), jnp.asarray(y)), jnp.ones(len(y))))
    return state


@pytest.mark.parametrize("half_life", [15.0, 60.0])
@pytest.mark.parametrize("rows", [1, 6])
def test_a_half_life_is_weighted_least_squares(half_life, rows):
    given = list(batches(40, rows))
    state = learnt(opvi.gauss_newton(LINEAR, half_life=half_life), given)
    gamma = 2 ** (-rows / half_life)
    mean, spread = discounted(given, [gamma] * 40, [NOISE] * 40)
    np.testing.assert_allclose(state.particles[0], mean, rtol=5e-3, atol=2e-3)
    np.testing.assert_allclose(covariance.variances(state.past)[0, 0], np.diag(spread), rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 6])
def test_curved_models_forget_before_they_learn(rows, monkeypatch):
    """Stored covariances are the posterior's, not yet forgotten; a network's prior fades as the rows do."""
    monkeypatch.setattr(_gauss_newton, "linear_outputs", lambda *_: False)
    given = list(batches(40, rows))
    own = opvi.linear_regression(2, noise=NOISE + 1e-6, prior_variance=4.0)  # nobody has compiled it yet
    state = learnt(opvi.gauss_newton(own, half_life=30.0), given)
    mean, spread = discounted(given, [2 ** (-rows / 30)] * 40, [NOISE] * 40, prior_fades=True)
    np.testing.assert_allclose(state.particles[0], mean, rtol=5e-3, atol=2e-3)
    np.testing.assert_allclose(covariance.variances(state.past)[0, 0], np.diag(spread), rtol=1e-2)


def test_a_forgetting_factor_counts_once_per_round():
    given = list(batches(40, 5))
    state = learnt(opvi.gauss_newton(LINEAR, forgetting=0.9), given)
    mean, spread = discounted(given, [0.9] * 40, [NOISE] * 40)
    np.testing.assert_allclose(state.particles[0], mean, rtol=5e-3, atol=2e-3)
    np.testing.assert_allclose(covariance.variances(state.past)[0, 0], np.diag(spread), rtol=1e-2)


@pytest.mark.parametrize("half_life", [15.0, 60.0])
def test_kronecker_factors_count_rows_by_their_half_life(half_life):
    """A is the discounted sum of the inputs' products; particles go where least squares with these weights is."""
    given = list(batches(40, 6))
    target = opvi.mlp(2, (), opvi.gaussian(NOISE), prior_variance=4.0)
    sampler = opvi.kfac(target, half_life=half_life, damping=1e-3, largest_change=1e6)
    state = learnt(sampler, given)
    gamma = 2 ** (-6 / half_life)
    rows = [np.concatenate([x, np.ones((6, 1))], 1).astype(float) for x, _ in given]
    A = sum(gamma ** (39 - k) * a.T @ a for k, a in enumerate(rows))
    np.testing.assert_allclose(state.factors[0].inputs[0], A, rtol=1e-5, atol=1e-5)
    mean, _ = discounted(given, [gamma] * 40, [NOISE] * 40, prior=4.0 / 1e-3, prior_fades=True)
    np.testing.assert_allclose(state.particles[0], mean, atol=2e-3)


@pytest.mark.parametrize("share", [0.1, 0.8])
def test_adaptive_noise_is_a_share_of_the_running_error(share):
    given = list(batches(25, 8))
    noise = opvi.filters.AdaptiveNoise(share=share, smallest=1e-6)
    state = learnt(opvi.gauss_newton(LINEAR, forgetting=1.0, noise=noise), given)
    error, noises, done = 1.0, [], []
    for t, (x, y) in enumerate(given, start=1):  # the error of each prediction, by the closed form's own means
        mean = discounted(done, [1.0] * len(done), noises)[0]
        squared = ((y - np.concatenate([x, np.ones((len(x), 1))], 1) @ mean) ** 2).mean()
        error += (squared - error) / min(t, 20)
        noises.append(share * error)
        done.append((x, y))
    mean, spread = discounted(done, [1.0] * len(done), noises)
    np.testing.assert_allclose(state.particles[0], mean, atol=2e-3)
    np.testing.assert_allclose(covariance.variances(state.past)[0, 0], np.diag(spread), rtol=1e-2)


@pytest.mark.parametrize("wandering", [0.0, 0.003])
@pytest.mark.parametrize("rows", [1, 20])
def test_weights_of_a_feature_never_seen_wander_by_so_much_in_twenty_rows(wandering, rows):
    """A feature that is always 0 says nothing: its weights' variance is the prior's and what wandering adds."""
    sampler = opvi.linear_ekf(2, 3, wandering=wandering, prior_variance=0.1)
    state, rng = sampler.init(KEY), np.random.default_rng(0)
    for _ in range(40):
        x = np.stack([rng.normal(size=rows), np.zeros(rows)], 1).astype(np.float32)
        y = rng.integers(0, 3, size=rows).astype(np.int32)
        state, _ = sampler.step(KEY, state, Batch((jnp.asarray(x), jnp.asarray(y)), jnp.ones(rows)))
    unseen = jnp.diagonal(state.covariance[0])[1::3]
    np.testing.assert_allclose(unseen, 0.1 + wandering * 40 * rows / 20, rtol=1e-4)
