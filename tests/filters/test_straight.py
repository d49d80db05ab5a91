"""Coordinates in which funnels are round, and chains that cross them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm

from opvi.filters._straight import straight
from opvi.filters.sl_opvi import _trajectories
from opvi.filters.sl_opvi._surrogates import frame

KEY = jax.random.key(0)
N, SPREAD = 400, 1.0


def funnel(v):
    """Log density: a log scale, two values of that scale, and one that falls as the scale grows."""
    s, rest, fall = v[0], v[1:3], v[3]
    return (
        norm.logpdf(s, 0, SPREAD) + norm.logpdf(rest, 0, jnp.exp(s)).sum() + norm.logpdf(fall * jnp.exp(s), 1, 0.1) + s
    )


def exact(rng, n=N):
    s = SPREAD * rng.normal(size=(n, 1))
    x = np.concatenate([s, np.exp(s) * rng.normal(size=(n, 2)), np.exp(-s) * (1 + 0.1 * rng.normal(size=(n, 1)))], 1)
    return jnp.asarray(x, jnp.float32)


FIT = jax.jit(lambda x: straight(funnel, x))


def test_a_funnel_becomes_round():
    to = FIT(exact(np.random.default_rng(0)))
    fresh = exact(np.random.default_rng(1))
    u = np.asarray(jax.vmap(to.into)(fresh), float)
    np.testing.assert_allclose(u.mean(0), 0, atol=0.2)
    np.testing.assert_allclose(u.std(0), 1, atol=0.15)
    assert (np.abs(u) < 5).all()  # of the parameters, some are 50 sds apart
    log = np.log(u[:, 1:] ** 2)
    assert np.abs(np.corrcoef(log.T, u[:, 0])[-1, :-1]).max() < 0.2
    np.testing.assert_allclose(jax.vmap(to.out)(jnp.asarray(u, jnp.float32))[0], fresh, rtol=1e-3, atol=1e-3)


def test_the_volume_is_that_of_the_map():
    to = FIT(exact(np.random.default_rng(0)))
    u = jax.random.normal(KEY, (5, 4))
    exactly = jax.vmap(lambda v: jnp.linalg.slogdet(jax.jacobian(lambda w: to.out(w)[0])(v))[1])(u)
    volume = jax.vmap(to.out)(u)[1]
    np.testing.assert_allclose(volume - volume[0], exactly - exactly[0], atol=1e-3)


def test_a_normal_posterior_stays_as_it_is():
    rng = np.random.default_rng(2)
    root = np.tril(rng.normal(size=(3, 3)))
    x = jnp.asarray(rng.normal(size=(N, 3)) @ root.T, jnp.float32)
    precision = jnp.asarray(np.linalg.inv(root @ root.T), jnp.float32)
    to = jax.jit(lambda x: straight(lambda v: -v @ precision @ v / 2, x))(x)
    assert not np.asarray(to.steep).any()
    u = np.asarray(jax.vmap(to.into)(x))
    np.testing.assert_allclose(u.T @ u / N, np.eye(3), atol=1e-2)


def test_chains_cross_a_funnel():
    """They begin in its neck, where the density is high and the mass is not."""
    rng = np.random.default_rng(3)
    s = -2 + 0.1 * rng.normal(size=(N, 1))
    x = [s, np.exp(s) * rng.normal(size=(N, 2)), np.exp(-s) * (1 + 0.1 * rng.normal(size=(N, 1)))]
    x = jnp.asarray(np.concatenate(x, 1), jnp.float32)
    same = jnp.full((N, N), 1 / N)
    there = jax.jit(lambda x: _trajectories.moved(KEY, funnel, x, frame(x), 60, 8, same))(x)
    s = np.asarray(there.places[:, :, 0])
    assert there.looks <= 3
    assert abs(s.mean()) < 5 * SPREAD / np.sqrt(N)
    assert abs(s.std() / SPREAD - 1) < 5 / np.sqrt(2 * N)
