"""A target's prior, if it is Gaussian: its mean and variances, and draws from it."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.targets._target import Target
from opvi.types import DType, Key, Particles

LARGEST_CORRELATED = 2000  # parameters up to which a prior's correlations are looked for


class GaussianPrior(NamedTuple):
    """The mean of a Gaussian prior, its variances, and its covariance where parameters are correlated."""

    mean: np.ndarray  # [d]
    variance: np.ndarray  # [d]
    covariance: np.ndarray | None  # [d, d]; None: independent


@cache
def gaussian_prior(target: Target) -> GaussianPrior | None:
    """Return the target's prior if it is Gaussian (its gradient is linear and points to the mean), otherwise None."""
    gradient = jax.grad(lambda v: target.log_prior(target.unravel(v)))
    # Correlations show along a direction without a pattern: signs alone may all be the same.
    rng = np.random.default_rng(0)
    way = rng.choice([-1.0, 1.0], target.dim) * rng.uniform(0.5, 1.5, target.dim)
    points = np.stack([0 * way, np.ones(target.dim), np.full(target.dim, 2.0), way, 2 * way])
    with jax.ensure_compile_time_eval():
        dtype = jnp.zeros(()).dtype  # that of particles
        found = np.asarray(jax.jit(jax.vmap(gradient))(points.astype(dtype)))
    zero, one, two, along, twice = found
    size = np.abs(one - zero).max()
    linear = np.allclose(two - one, one - zero, rtol=1e-3, atol=1e-4 * size)
    linear &= np.allclose(twice - zero, 2 * (along - zero), rtol=1e-3, atol=1e-4 * size)
    if not linear:
        return None
    if np.allclose(along - zero, way * (one - zero), rtol=1e-3) and (zero > one).all():
        variance = np.asarray(1 / (zero - one), float)
        return GaussianPrior(np.asarray(zero, float) * variance, variance, None)
    if target.dim > LARGEST_CORRELATED:
        return None
    with jax.ensure_compile_time_eval():
        precision = -np.asarray(jax.jit(jax.jacfwd(gradient))(points[0].astype(dtype)), float)
    precision = (precision + precision.T) / 2
    if not np.isfinite(precision).all() or np.linalg.eigvalsh(precision)[0] <= 0:
        return None
    covariance = np.linalg.inv(precision)
    return GaussianPrior(covariance @ np.asarray(zero, float), np.diag(covariance).copy(), covariance)


def draw_gaussian(prior: GaussianPrior, key: Key, n: int, dtype: DType) -> Particles:
    """Return n draws from a Gaussian prior, `[n, d]`."""
    z = jax.random.normal(key, (n, len(prior.mean)), dtype)
    if prior.covariance is None:
        return jnp.asarray(prior.mean, dtype)[None] + z * jnp.asarray(np.sqrt(prior.variance), dtype)[None]
    return jnp.asarray(prior.mean, dtype)[None] + z @ jnp.asarray(np.linalg.cholesky(prior.covariance).T, dtype)
