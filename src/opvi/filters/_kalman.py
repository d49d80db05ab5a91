r"""The Kalman update of every particle's covariance, full or in blocks, however the particle is then moved."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._factors import diagonal, root_inverse
from opvi.filters import _covariance as covariance
from opvi.filters._covariance import Covariance, exactly
from opvi.types import Array

SMALLEST_SURPRISE = 0.5  # a row's predictive variance over its noise: 1 or more, but for rounding


class Gain(NamedTuple):
    r"""The information in weighted rows A of a Jacobian: $S = A C A^\top + I = L L^\top$."""

    surprise: Array  # [n, R]: the diagonal of S, each row's predictive variance over its noise
    inverse: Array  # [n, R, R]: of L; [n, 0, 0] where `in_turn` never made it
    rows: Array  # [n, K, R, D]: Z = L⁻¹ A C, with C' = C - ZᵀZ


class Absorbed(NamedTuple):
    """What an update did to every particle."""

    move: Array  # [n, K, D]
    past: Covariance
    good: Array  # [n]: False: the particle sat this update out


@exactly
def times(rows: Array, C: Covariance) -> Array:
    """Return the product of rows `[n, K, R, D]` with the covariances."""
    return rows @ C.matrices


@exactly
def gain(A: Array, AC: Array) -> Gain:
    """Return the gain of rows `[n, K, R, D]`, whose product with the covariances is known."""
    S = jnp.einsum("nkrd,nksd->nrs", AC, A)
    S = S + jnp.eye(S.shape[-1], dtype=S.dtype)[None]
    inverse = root_inverse(S)  # and a product: on a CPU several times faster than solving for d columns
    Z = jnp.einsum("nrs,nksd->nkrd", inverse, AC)
    return Gain(diagonal(S), inverse, Z)


@exactly
def move_by_score(new: Gain, score: Array, product: Array) -> Array:
    r"""Return $C' g = C g - Z^\top Z g$, from the score g `[n, K, D]` and its product with the covariances."""
    along = jnp.einsum("nkrd,nkd->nr", new.rows, score)
    return product - jnp.einsum("nkrd,nr->nkd", new.rows, along)


@exactly
def move_by_residuals(new: Gain, residual: Array, limit: float) -> Array:
    r"""Return $C A^\top S^{-1} e$, with each residual e clipped at `limit` of its standard deviations.

    Args:
        new: the gain of the rows.
        residual: e, weighted like the rows of A: `[n, R]`.
        limit: residuals are clipped at this many standard deviations of the prediction.
    """
    largest = limit * jnp.sqrt(new.surprise)
    surprise = jnp.einsum("nrs,ns->nr", new.inverse, jnp.clip(residual, -largest, largest))
    return jnp.einsum("nkrd,nr->nkd", new.rows, surprise)


class Look(NamedTuple):
    """Rows of a Jacobian at some weights, each divided by its noise: A, A C and the residuals."""

    A: Array  # [n, K, R, D]
    AC: Array
    residual: Array  # [n, R]


@exactly
def in_turn(
    first: Look,
    again: Callable[[Array, Array], Look],
    renew: Array,
    moved: Array,
    limit: float,
    size: int,
    filled: Array | int | None = None,
) -> tuple[Gain, Array]:
    r"""Return the gain of many rows and the move they make, a few rows at a time.

    $$Z_p = L_p^{-1} (A_p C - A_p Z^\top Z), \qquad L_p L_p^\top = I + (A_p C - A_p Z^\top Z) A_p^\top$$

    with Z the rows absorbed before. The covariances are only read; no factorisation is larger than `size`.
    If `renew` is False this is the update with all rows at once. If True, every few rows are linearised where those
    before them have moved the particles, which matters while they move far.

    Args:
        first: all rows at the weights before the move; `size` must divide their number.
        again: `again(p, move)` linearises the p-th rows again, at weights moved by `move` `[n, K, D]`.
        renew: whether to linearise again.
        moved: whether weights have changed since `first`, so that its first rows are linearised again, too.
        limit: residuals are clipped at this many standard deviations of the prediction.
        size: rows at a time.
        filled: the number of rows before the padding, whose A is 0 and which takes no time; all if omitted.
    """
    n, K, rows, D = first.A.shape
    whole = _joined(first)
    variance = 1 + (whole.A * whole.AC).sum(2)
    bound = limit * jnp.sqrt(jnp.maximum(variance, SMALLEST_SURPRISE))
    residual = jnp.clip(first.residual, -bound, bound)

    def same(p: Array, move: Array) -> Look:
        A, AC, e = (jax.lax.dynamic_slice_in_dim(a, p * size, size, 1) for a in (whole.A, whole.AC, residual))
        return Look(A, AC, e - (A @ move[:, :, None])[:, :, 0])

    def turn(p: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        move, Z, surprise = carry
        # Not `cond`, which would copy the covariances that `again` reads, at every turn.
        look = partial(covariance.when, renew & (moved | (p > 0)))
        A, AC, e = look(lambda _: _joined(again(p, move.reshape(n, K, D))), same(p, move))
        AC = AC - (A @ Z.mT) @ Z
        S = AC @ A.mT + jnp.eye(size, dtype=A.dtype)[None]
        own = diagonal(S)
        bound = limit * jnp.sqrt(jnp.maximum(own, SMALLEST_SURPRISE))
        e = jnp.where(renew, jnp.clip(e, -bound, bound), e)
        inverse = _root_inverse(S)
        new = inverse @ AC
        move = move + ((inverse @ e[:, :, None]).mT @ new)[:, 0]
        return (
            move,
            jax.lax.dynamic_update_slice_in_dim(Z, new, p * size, 1),
            jax.lax.dynamic_update_slice_in_dim(surprise, own, p * size, 1),
        )

    none = jnp.zeros((n, K * D), variance.dtype), jnp.zeros_like(whole.A), jnp.ones_like(variance)
    turns = rows // size if filled is None else (filled + size - 1) // size
    move, Z, surprise = jax.lax.fori_loop(0, turns, turn, none)
    Z = jnp.moveaxis(Z.reshape(n, rows, K, D), 2, 1)
    return Gain(surprise, jnp.zeros((n, 0, 0), Z.dtype), Z), move.reshape(n, K, D)


def _joined(look: Look) -> Look:
    """Return the same with the blocks of each row joined, A and A C `[n, R, K D]`: products of few large matrices."""
    A, AC = (jnp.moveaxis(rows, 1, 2).reshape(len(rows), rows.shape[2], -1) for rows in (look.A, look.AC))
    return Look(A, AC, look.residual)


def _root_inverse(S: Array) -> Array:
    """Return the inverse of the lower root of small matrices `[n, R, R]`, by elimination.

    LAPACK would be called for every matrix.
    """
    R = S.shape[-1]
    places = jnp.arange(R)

    def eliminate(i: Array, M: Array) -> Array:
        row = jax.lax.dynamic_index_in_dim(M, i, 1)  # [n, 1, 2R]
        column = jax.lax.dynamic_index_in_dim(M, i, 2)  # [n, R, 1]
        pivot = jax.lax.dynamic_index_in_dim(row, i, 2)
        return M - jnp.where((places > i)[None, :, None], column / pivot, 0) * row

    identity = jnp.broadcast_to(jnp.eye(R, dtype=S.dtype)[None], S.shape)
    M = jax.lax.fori_loop(0, R - 1, eliminate, jnp.concatenate([S, identity], 2))
    return M[:, :, R:] * jax.lax.rsqrt(diagonal(M[:, :, :R]))[:, :, None]


def absorb(
    past: Covariance, new: Gain, move: Array, gamma: Array, largest: Array, trusted: Array | None = None
) -> Absorbed:
    r"""Return $(C - Z^\top Z)/\gamma$ and the moves, applied only to particles whose update is valid.

    A particle whose update is not finite skips it and forgets its correlations, which are the cause. So does one
    that holds a negative variance for a prediction, which the update would make more negative still.

    Args:
        past: the covariances.
        new: the gain of the rows.
        move: each particle's move, `[n, K, D]`.
        gamma: forgetting, one number for all or `[n]`; 1 forgets nothing.
        largest: the largest variances, `[n, K, D]`.
        trusted: `[n]`; False where the rows themselves are bad: such a particle skips the update and keeps its
            correlations. None trusts all.
    """
    sound = (new.surprise > SMALLEST_SURPRISE).all(1)
    good = sound & jnp.isfinite(move.sum((1, 2)) + (new.rows**2).sum((1, 2, 3)))
    bad = ~good
    if trusted is not None:
        good, bad = good & trusted, bad & trusted
    move = jnp.where(good[:, None, None], move, 0)
    Z = jnp.where(good[:, None, None, None], new.rows, 0)
    past = covariance.shed(past, Z, jnp.where(good, gamma, 1), largest)
    return Absorbed(move, covariance.without_correlations(past, bad), good)
