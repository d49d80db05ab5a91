r"""The Kalman update of every particle's covariance, whole or in blocks, however the particle is then moved."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.filters import _covariance as covariance
from opvi.filters._covariance import Covariance, exactly
from opvi.types import Array

SMALLEST_SURPRISE = 0.5  # a row's predictive variance over its noise: 1 or more, but for rounding


class Gain(NamedTuple):
    r"""What weighted rows A of a Jacobian say beside what is known: $S = A C A^\top + I = L L^\top$."""

    surprise: Array  # [n, R]: the diagonal of S, each row's predictive variance over its noise
    inverse: Array  # [n, R, R]: of L
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
    """Return what rows `[n, K, R, D]`, whose product with the covariances is known, have to say."""
    S = jnp.einsum("nkrd,nksd->nrs", AC, A)
    identity = jnp.eye(S.shape[-1], dtype=S.dtype)[None]
    S = S + identity
    # The small inverse and a product: on a CPU several times faster than solving for d columns.
    root = jnp.linalg.cholesky(S)
    inverse = jax.scipy.linalg.solve_triangular(root, jnp.broadcast_to(identity, S.shape), lower=True)
    Z = jnp.einsum("nrs,nksd->nkrd", inverse, AC)
    return Gain(jnp.diagonal(S, axis1=1, axis2=2), inverse, Z)


@exactly
def move_by_score(new: Gain, score: Array, product: Array) -> Array:
    r"""Return $C' g = C g - Z^\top Z g$, from the score g `[n, K, D]` and its product with the covariances."""
    along = jnp.einsum("nkrd,nkd->nr", new.rows, score)
    return product - jnp.einsum("nkrd,nr->nkd", new.rows, along)


@exactly
def move_by_residuals(new: Gain, residual: Array, limit: float) -> Array:
    r"""Return $C A^\top S^{-1} e$, no row's residual e taken for more than `limit` of its standard deviations.

    Args:
        new: what the rows say.
        residual: e, weighted as the rows of A are: `[n, R]`.
        limit: so many standard deviations of its prediction are the most that a row may be off.
    """
    largest = limit * jnp.sqrt(new.surprise)
    surprise = jnp.einsum("nrs,ns->nr", new.inverse, jnp.clip(residual, -largest, largest))
    return jnp.einsum("nkrd,nr->nkd", new.rows, surprise)


def absorb(
    past: Covariance, new: Gain, move: Array, gamma: Array, largest: Array, trusted: Array | None = None
) -> Absorbed:
    r"""Return $(C - Z^\top Z)/\gamma$ and the moves, both for the particles alone whose update is in order.

    A particle whose update is not finite sits it out, and forgets its correlations: they are the cause. So does one
    that holds a negative variance for a prediction, which the update would make more negative still.

    Args:
        past: the covariances.
        new: what the rows say.
        move: each particle's, `[n, K, D]`.
        gamma: forgetting, one number for all or `[n]`; 1 forgets nothing.
        largest: the largest variances, `[n, K, D]`.
        trusted: `[n]`; False where the rows themselves are bad: such a particle sits the update out and keeps its
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
