r"""Columns that do not help fade: a factor for each input, learnt from predictions made before learning.

Let $g_j = z_j\, \partial f / \partial z_j$ be what column j adds to a prediction, and e the error of that prediction.
$\sum e g_j$ is 0 for a column whose part is right, and $-\sum g_j^2$ for one that adds nothing but noise. The factor
follows the regression of e on $g_j$, and so returns when the column begins to help.
"""

from typing import NamedTuple

import jax.numpy as jnp

from opvi.types import Array, Scalar

MEMORY = 0.98  # of the sums, for 20 rows
RATE = 0.03  # of the factors, for 20 rows: slow, so that an effect that is learnt late is not lost
USUAL_ROWS = 20.0
SMALLEST = 0.05  # from where a column can still return
CAUTION = 1.0  # squared errors that a column's part must add up to before it is judged


class Gates(NamedTuple):
    """A factor for each column, and the discounted sums behind it."""

    factor: Array  # [F]
    product: Array  # [F]: of errors and contributions
    square: Array  # [F]: of contributions
    error: Scalar  # squared errors
    seen: Scalar  # rows


def start(columns: int, dtype: jnp.dtype) -> Gates:
    """Every column counts fully."""
    zero = jnp.zeros(columns, dtype)
    return Gates(jnp.ones(columns, dtype), zero, zero, jnp.zeros((), dtype), jnp.zeros((), dtype))


def through(gates: Gates | None, z: Array) -> Array:
    """The inputs, faded."""
    return z if gates is None else z * gates.factor[None]


def update(gates: Gates, contributions: Array, error: Array, weight: Array) -> Gates:
    """The factors after a batch, from what each column added to its predictions `[B, F]` and the errors of these."""
    rows = weight.sum()
    share = rows / USUAL_ROWS
    keep = MEMORY**share
    product = keep * gates.product + (contributions * (error * weight)[:, None]).sum(0)
    square = keep * gates.square + (contributions**2 * weight[:, None]).sum(0)
    squared, seen = keep * gates.error + (error**2 * weight).sum(), keep * gates.seen + rows
    slope = product / (square + CAUTION * squared / jnp.maximum(seen, 1))
    factor = jnp.clip(gates.factor * jnp.exp(RATE * share * jnp.clip(slope, -1, 1)), SMALLEST, 1)
    new = Gates(factor, product, square, squared, seen)
    good = jnp.isfinite(factor.sum() + product.sum() + square.sum() + squared)
    return Gates(*(jnp.where(good, a, b) for a, b in zip(new, gates, strict=True)))
