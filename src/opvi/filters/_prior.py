"""A target as Gauss–Newton sees it: whether its outputs are linear, and their derivatives."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Distribution, Normal
from opvi.targets import Target
from opvi.targets._prior import GaussianPrior as GaussianPrior
from opvi.targets._prior import gaussian_prior as gaussian_prior
from opvi.types import Array, Data, Tree

TRIALS = 3  # random triples of points at which linearity is tried
LINEAR = 1e-3  # of the outputs' own changes: a larger second difference is a bend


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
