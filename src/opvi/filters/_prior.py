"""A target as Gauss–Newton sees it: whether its prior is Gaussian and its outputs linear, and their derivatives."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Distribution, Normal
from opvi.targets import Target
from opvi.types import Array, Data, Tree

LARGEST_CORRELATED = 2000  # parameters up to which a prior's correlations are looked for
TRIALS = 3  # random triples of points at which linearity is tried
LINEAR = 1e-3  # of the outputs' own changes: a larger second difference is a bend


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


def distribution(target: Target, w: Array, x: Tree) -> Distribution:
    """Return one particle's distribution of y."""
    return target.predict(target.unravel(w), x)  # type: ignore[misc]  # asked only of targets that predict


def outputs(dist: Distribution) -> Array:
    """Return the outputs behind the head: `[B, C]`."""
    if isinstance(dist, Normal):
        return dist.mean[:, None]
    values = dist[0]
    return values[:, None] if values.ndim == 1 else values


def jacobian(target: Target, w: Array, x: Tree) -> Array:
    """Return the derivatives of a particle's outputs in its parameters: `[B, C, d]`."""

    def one_row(w: Array, x: Tree) -> Array:
        return outputs(distribution(target, w, jax.tree.map(lambda a: a[None], x)))[0]

    return jax.vmap(jax.jacrev(one_row), (None, 0))(w, x)


def linearise(target: Target, w: Array, dist: Distribution, data: Data, weight: Array) -> tuple[Array, Array]:
    """Return one particle's rows of curvature A, `[B·K, d]`, and the gradient $J^T g$, `[d]`."""
    x, y = data
    J = jacobian(target, w, x)
    g, L = dist.curvature(y)  # [B, C], [B, C, K]
    L = L * jnp.sqrt(weight)[:, None, None]
    A = jnp.einsum("bck,bcd->bkd", L, J).reshape(-1, len(w))
    return A, jnp.einsum("bcd,bc->d", J, g * weight[:, None])


def linear_outputs(target: Target, x: Tree) -> bool:
    """Return whether the model's outputs are linear in its parameters, for inputs of x's shapes.

    They are tested at random inputs, and their noise must not depend on the parameters. The answer is known while
    a step is traced.
    """
    if target.architecture is not None:
        return len(target.architecture.mlp.shapes) == 1
    leaves, structure = jax.tree.flatten(x)
    return _tried(target, tuple((np.shape(leaf)[1:], np.dtype(leaf.dtype)) for leaf in leaves), structure)


@cache
def _tried(target: Target, rows: tuple[tuple[tuple[int, ...], np.dtype], ...], structure: Tree) -> bool:
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        leaves = [
            jnp.asarray(rng.normal(size=(8, *shape)) if dtype.kind == "f" else np.zeros((8, *shape)), dtype)
            for shape, dtype in rows
        ]
        x = structure.unflatten(leaves)

        def at(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            said = distribution(target, jnp.asarray(w, jnp.float32), x)
            noise = said.variance if isinstance(said, Normal) else jnp.zeros(())
            return np.asarray(outputs(said), float), np.asarray(noise, float)

        try:
            for _ in range(TRIALS):
                a, b, c = rng.normal(size=(3, target.dim))
                (fa, na), (fb, nb), (fc, _), (fd, _) = at(a), at(b), at(c), at(a + b - c)
                scale = np.abs(fa - fc).max() + np.abs(fb - fc).max()
                if not np.abs(fa + fb - fc - fd).max() <= LINEAR * scale or not np.allclose(na, nb):
                    return False
        except (TypeError, ValueError, IndexError):  # inputs that the model does not take: nothing is known of it
            return False
    return True
