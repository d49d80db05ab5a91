"""Mode weights follow the evidence of two modes whose log odds are known; particles of a single mode weigh alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.filters.sl_opvi._mode_weights import modes

KEY = jax.random.key(0)


def mirrored():
    """y ~ N(|a|, 1), with modes at ±a; rows also say s, which adds s to the log odds of the positive one."""

    def log_likelihood(v, rows):
        y, s = rows
        return -((y - jnp.abs(v[0])) ** 2) / 2 + s * jnp.tanh(4 * v[0]) / 2

    return opvi.target(lambda v: -(v**2).sum() / 18, log_likelihood, lambda key: 3 * jax.random.normal(key, (1,)))


@pytest.mark.slow
def test_mode_weights_follow_the_evidence():
    """Log odds from 0 to 5, and back to -5: within .05 of the weight at each stop, and not far from it on the way."""
    rng = np.random.default_rng(0)
    per_row = np.repeat([0, 5 / 400, 0, -10 / 800, 0], [200, 400, 200, 800, 200])
    rows = (3 + rng.normal(size=1800)).astype(np.float32), per_row.astype(np.float32)
    tracker = opvi.sl_opvi(mirrored())

    def weight(state, info, batch):
        return jnp.where(state.particles[:, 0] > 0, jnp.exp(state.log_weights), 0).sum()

    state, history = opvi.run(tracker, opvi.stream(rows, 20), 0, record=weight)
    truth = 1 / (1 + np.exp(-np.cumsum(per_row)))[19::20]
    off = np.abs(np.asarray(history.record) - truth)
    assert off.max() < 0.15  # what particles miss of a mode adds up: half a nat of log odds at most
    assert off[30:40].max() < 0.05
    assert off[-10:].max() < 0.05
    draws = np.asarray(tracker.draws(state, KEY, 20_000))
    share = float(history.record[-1])  # by weight, not by count: 400 chains, of which each stays in its mode
    assert abs((draws > 0).mean() - share) < 3 * np.sqrt(share * (1 - share) / 400)
    counts = (np.asarray(state.particles) > 0).mean()
    assert 0.05 < counts < 0.95  # the mode that weighs e^-5 keeps particles: it can come back


@pytest.mark.slow
def test_particles_of_one_mode_weigh_alike():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2)).astype(np.float32)
    tracker = opvi.sl_opvi(opvi.logistic_regression(2))
    state, _ = opvi.run(tracker, opvi.stream((X, (X[:, 0] > 0).astype(np.int32)), 20), KEY, particles=40)
    np.testing.assert_allclose(state.log_weights, -np.log(40), rtol=1e-5)


def found(z, log_density):
    z = jnp.asarray(z, jnp.float32)
    return np.asarray(modes(z, z, jax.vmap(log_density)(z), log_density))


def test_modes_are_what_neighbours_connect():
    rng = np.random.default_rng(1)
    z = np.concatenate([rng.normal(size=(40, 2)), rng.normal(size=(20, 2)) + [12.0, 0.0]])

    def two(v):
        return jnp.logaddexp(-(v**2).sum() / 2, -((v - jnp.array([12.0, 0.0])) ** 2).sum() / 2)

    same = found(z, two)
    assert same[:40, 40:].max() == 0
    assert same[:40, :40].min() == same[40:, 40:].min() == 1


def test_particles_far_apart_share_a_mode_unless_the_density_falls_between_them():
    """In one dimension the outermost particles have no close neighbours, and pairs have one another."""
    pairs = np.repeat(np.random.default_rng(2).normal(size=50), 2) + np.tile([0, 1e-3], 50)
    assert found(pairs[:, None], lambda v: -(v**2).sum() / 2).min() == 1
    apart = np.concatenate([pairs - 5, pairs + 5])[:, None]
    same = found(apart, lambda v: -((jnp.abs(v) - 5) ** 2).sum() / 2)
    assert same[:100, :100].min() == same[100:, 100:].min() == 1
    assert same[:100, 100:].max() == 0
    nowhere = found(apart, lambda v: jnp.where(jnp.abs(v).sum() < 2, -jnp.inf, 0.0))  # impossible in between
    assert nowhere[:100, 100:].max() == 0
