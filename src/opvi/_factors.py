"""Matrices factored one at a time inside compiled programs, because batches of LAPACK calls can hang.

Up to jaxlib 0.10, a batch of LAPACK calls on a CPU is shared among XLA's threads, one of which waits for the rest. If
two programs do so at once, in two user threads, all threads can wait for each other forever. A call for a single
matrix runs in its own thread; for the sizes that occur (2 to 100) a loop of such calls takes as long as the batch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from opvi.types import Array, Tree


def one_by_one(function: Callable[..., Tree], *arrays: Array) -> Tree:
    """Return a function mapped over the common leading axes of its matrices; it also works inside `jax.vmap`.

    On several devices it is batched, because a loop would gather data from the others.
    """
    alone = jax.default_backend() == "cpu" and jax.device_count() == 1
    each = sequential_vmap(function) if alone else function
    lead = arrays[0].shape[:-2]
    if not lead:
        return each(*arrays)
    flat = (array.reshape(-1, *array.shape[len(lead) :]) for array in arrays)
    return jax.tree.map(lambda out: out.reshape(*lead, *out.shape[1:]), jax.vmap(each)(*flat))


def cholesky(S: Array) -> Array:
    """Return lower roots of symmetric matrices `[..., R, R]`; NaN where one is not positive definite."""
    return one_by_one(jnp.linalg.cholesky, S)


def root_inverse(S: Array) -> Array:
    """Return the inverses of the lower roots of symmetric matrices `[..., R, R]`."""
    return one_by_one(_root_inverse, S)


def solve(M: Array, columns: Array) -> Array:
    r"""Return $M^{-1}$ times columns, for matrices `[..., R, R]` and `[..., R, C]`."""
    return one_by_one(jnp.linalg.solve, M, columns)


def solve_positive(S: Array, columns: Array) -> Array:
    """Return the same for symmetric positive definite matrices."""
    return one_by_one(_solve_positive, S, columns)


def inverse(M: Array) -> Array:
    """Return the inverses of matrices `[..., R, R]`."""
    return one_by_one(jnp.linalg.inv, M)


def eigenvectors(S: Array) -> tuple[Array, Array]:
    """Return eigenvalues and eigenvectors of symmetric matrices `[..., R, R]`."""
    return one_by_one(_eigenvectors, S)


def diagonal(M: Array) -> Array:
    """Return the diagonals `[..., R]` of matrices `[..., R, R]`: cut out, not looked up, which costs less."""
    lead, size = M.shape[:-2], M.shape[-1]
    flat = M.reshape(*lead, size * size)
    return jax.lax.slice(flat, (0,) * flat.ndim, flat.shape, (1,) * len(lead) + (size + 1,))


def _lower(S: Array) -> Array:
    return jax.lax.linalg.cholesky(S, symmetrize_input=False)


def _root_inverse(S: Array) -> Array:
    identity = jnp.eye(S.shape[-1], dtype=S.dtype)
    return jax.lax.linalg.triangular_solve(_lower(S), identity, left_side=True, lower=True)


def _solve_positive(S: Array, columns: Array) -> Array:
    root = _lower(S)
    half = jax.lax.linalg.triangular_solve(root, columns, left_side=True, lower=True)
    return jax.lax.linalg.triangular_solve(root, half, left_side=True, lower=True, transpose_a=True)


def _eigenvectors(S: Array) -> tuple[Array, Array]:
    values, V = jnp.linalg.eigh(S)
    return values, V
