r"""What Gauss–Newton particles remember of the past: covariances, whole or in blocks, that shed rank-one pieces."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from opvi.types import Array

SYMMETRISE_EVERY = 16  # times that rows were taken off; a transpose is slow
SMALLEST_SHARE = 1e-6  # of the largest variance allowed: below it a variance is rounding error


Tree = TypeVar("Tree")


def when(flag: Array, change: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """`change(tree)` if the flag is set, otherwise the tree as it is.

    A loop of at most one turn: unlike a conditional, XLA lets it change large arrays in place and leave them
    untouched, where a conditional copies them either way.
    """
    go = jnp.asarray(flag)
    return jax.lax.while_loop(lambda c: c[0], lambda c: (jnp.zeros_like(go), change(c[1])), (go, tree))[1]


class Covariance(NamedTuple):
    r"""$s s^\top \odot (C_0 - Z^\top Z)$ for every particle and block.

    Taking the rows of Z off a matrix costs a pass over memory. They are kept beside it and taken off many at a time.
    """

    base: Array  # [n, K, D, D]: C₀
    pending: Array  # [n, K, R, D]: Z, 0 where no row is waiting
    scale: Array  # [n, K, D]: s, what forgetting has multiplied since the rows were last taken off
    variance: Array  # [n, K, D]: the diagonal of C₀ - ZᵀZ
    waiting: Array  # rows of Z in use
    settled: Array  # how often they were taken off


def start(variance: Array, room: int) -> Covariance:
    """Diagonal covariances from variances `[n, K, D]`, with room for this many waiting rows."""
    base = variance[..., None] * jnp.eye(variance.shape[-1], dtype=variance.dtype)[None, None]
    pending = jnp.zeros((*variance.shape[:2], room, variance.shape[2]), variance.dtype)
    return Covariance(
        base, pending, jnp.ones_like(variance), variance, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    )


def times(C: Covariance, A: Array) -> Array:
    """A C for rows A `[n, K, R, D]`."""
    A = A * C.scale[:, :, None]
    late = jnp.einsum("nkrd,nksd->nkrs", A, C.pending)
    return (A @ C.base - late @ C.pending) * C.scale[:, :, None]


def variances(C: Covariance) -> Array:
    """The diagonal, `[n, K, D]`."""
    return C.variance * C.scale**2


def matrices(C: Covariance) -> Array:
    """The covariances themselves, `[n, K, D, D]`."""
    base = C.base - jnp.einsum("nkrd,nkre->nkde", C.pending, C.pending)
    return base * (C.scale[..., :, None] * C.scale[..., None, :])


def shed(C: Covariance, Z: Array, gamma: Array, largest: Array) -> Covariance:
    r"""$(C - Z^\top Z)/\gamma$, scaled back where a variance would exceed `largest`.

    Args:
        C: the covariance.
        Z: rows to take off, `[n, K, R, D]`.
        gamma: forgetting, one number a particle; 1 forgets nothing.
        largest: the largest variances, `[n, K, D]`.
    """
    Z = Z / C.scale[:, :, None]
    rows, room = Z.shape[2], C.pending.shape[2]
    zero = jnp.zeros((), jnp.int32)
    floor = SMALLEST_SHARE * largest / C.scale**2
    variance = jnp.maximum(C.variance - (Z**2).sum(2), floor)
    grown = variance * C.scale**2 / gamma[:, None, None]
    scale = C.scale * jnp.sqrt(jnp.minimum(1, largest / grown) / gamma[:, None, None])
    if rows > room:  # no room for one batch: nothing waits, ever
        return settle(C._replace(scale=scale, variance=variance, pending=Z), largest)._replace(pending=C.pending)
    pending = jax.lax.dynamic_update_slice(C.pending, Z, (zero, zero, C.waiting, zero))
    # Rows of padding come last and are 0: they need no room.
    used = jnp.where((Z != 0).any((0, 1, 3)), 1 + jnp.arange(rows, dtype=jnp.int32), 0).max()
    C = Covariance(C.base, pending, scale, variance, C.waiting + used, C.settled)
    return when(C.waiting + rows > room, lambda C: settle(C, largest), C)


def settle(C: Covariance, largest: Array) -> Covariance:
    """The same covariance with no row waiting, and with no variance below the floor."""
    base = matrices(C)
    short = jnp.maximum(SMALLEST_SHARE * largest - jnp.diagonal(base, axis1=2, axis2=3), 0)
    places = jnp.arange(short.shape[-1])
    base = base.at[..., places, places].add(short)
    # Rounding makes matrices lopsided, and forgetting would let that grow without bound.
    lopsided = C.settled % SYMMETRISE_EVERY == SYMMETRISE_EVERY - 1
    base = when(lopsided, lambda base: (base + base.mT) / 2, base)
    variance = jnp.diagonal(base, axis1=2, axis2=3)
    settled = (C.settled + 1) % SYMMETRISE_EVERY
    return Covariance(
        base, jnp.zeros_like(C.pending), jnp.ones_like(C.scale), variance, jnp.zeros_like(C.waiting), settled
    )


def without_correlations(C: Covariance, which: Array) -> Covariance:
    """The covariances of the particles in `which` cut down to their diagonals: a way out of a matrix gone bad."""

    def cut(C: Covariance) -> Covariance:
        pick = which[:, None, None]
        diagonal = variances(C)[..., None] * jnp.eye(C.base.shape[-1], dtype=C.base.dtype)[None, None]
        return Covariance(
            jnp.where(pick[..., None], diagonal, C.base),
            jnp.where(pick[..., None], 0, C.pending),
            jnp.where(pick, 1, C.scale),
            jnp.where(pick, variances(C), C.variance),
            C.waiting,
            C.settled,
        )

    return when(which.any(), cut, C)
