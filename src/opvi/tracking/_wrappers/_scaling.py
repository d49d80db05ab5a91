r"""Causal standardisation: means and deviations of the rows seen so far, and what a model does when they change."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from opvi.types import Array, Scalar

FAR = 100.0  # standard deviations; a value farther off stands for "none" (-999), and counts as missing
INDICATOR = 1.0  # values up to this size are never taken for "none": a rare level's indicator is as far off
MISREAD = 0.5  # where more than this share of the last few rows is that far off, the column has moved
LARGEST_JUMP = 100.0  # standard deviations; one wild value must not blind the scale to all the others
SMALLEST_SHARE = 1e-6  # a deviation below this share of the value's size is rounding, not a signal
LONGEST_MEMORY = 1e6  # rows; counts in float32 stop growing by small steps some way above it
SCALE_MEMORY = 50_000.0  # rows, of a model's units
TRUSTED_COUNT = 20.0  # rows after which the deviation so far can call a value wild


class Moments(NamedTuple):
    """Statistics of a stream's rows so far, column by column."""

    seen: Scalar  # weights of the rows, added up
    mean: Array  # [F]
    square: Array  # [F]: squared deviations from the mean, added up


class Scale(NamedTuple):
    """The affine map that a model's inputs or outputs go through."""

    mean: Array  # [F]
    sd: Array  # [F]: 0 where the column has been constant so far


def start(columns: int, dtype: Any) -> Moments:
    """Return the moments before any row."""
    zero = jnp.zeros(columns, dtype)
    return Moments(jnp.zeros((), zero.dtype), zero, zero)


def update(moments: Moments, x: Array, weight: Array, memory: float = LONGEST_MEMORY) -> Moments:
    """Return the moments with the rows of x `[B, F]` included; stable in float32 far from the origin (Chan's formula).

    Rows before the last `memory` fade away. A column that was constant and begins to move is assumed to have moved as
    much before: otherwise its first values would be outliers.
    """
    sd = jnp.sqrt(moments.square / jnp.maximum(moments.seen, 1))
    reach = jnp.where((moments.seen >= TRUSTED_COUNT) & (sd > 0), LARGEST_JUMP * sd, jnp.inf)
    x = jnp.clip(x, (moments.mean - reach)[None], (moments.mean + reach)[None])
    added = weight.sum()
    seen = moments.seen + added
    share = added / jnp.maximum(seen, 1e-30)
    # Relative to a row of the batch: sums of numbers far from the origin would lose their digits.
    origin = x[0]
    shifted = x - origin[None]
    centre = (shifted * weight[:, None]).sum(0) / jnp.maximum(added, 1e-30)
    within = ((shifted - centre[None]) ** 2 * weight[:, None]).sum(0)
    apart = (origin - moments.mean) + centre
    begins = (moments.square == 0) & (moments.seen >= TRUSTED_COUNT)
    before = jnp.where(begins, moments.seen * (within / jnp.maximum(added, 1e-30) + apart**2), moments.square)
    square = before + within + moments.seen * share * apart**2
    fade = jnp.minimum(1, memory / jnp.maximum(seen, 1))
    return Moments(seen * fade, moments.mean + share * apart, square * fade)


def scale_of(moments: Moments) -> Scale:
    """Return the map to mean 0 and standard deviation 1."""
    sd = jnp.sqrt(moments.square / jnp.maximum(moments.seen, 1))
    return Scale(moments.mean, jnp.where(sd > SMALLEST_SHARE * jnp.abs(moments.mean), sd, 0))


def with_last(values: Array, last: Scalar) -> Array:
    """Return `[F]` with another last number, y's."""
    return jnp.where(np.arange(len(values)) == len(values) - 1, last, values)


def of_inputs(scale: Scale) -> Scale:
    """Return the scale of the columns of X, of one whose last column is y."""
    return Scale(scale.mean[:-1], scale.sd[:-1])


def divisor(scale: Scale) -> Array:
    """Return the standard deviations, with 1 for constant columns."""
    return jnp.where(scale.sd > 0, scale.sd, 1)


def readable(scale: Scale, x: Array) -> Array:
    """Return standardised inputs `[B, F]`, with 0 for missing values and in columns that were constant so far."""
    away, size = x - scale.mean[None], scale.sd[None]
    known = (size > 0) & ((jnp.abs(away) <= FAR * size) | (jnp.abs(x) <= INDICATOR))
    return jnp.where(known, jnp.clip(away / jnp.where(size > 0, size, 1), -FAR, FAR), 0)


def far(scale: Scale, x: Array) -> Array:
    """Return which values `[B, F]` are too far off to be real; none in a column that was constant so far."""
    away = jnp.abs(x - scale.mean[None]) > FAR * scale.sd[None]
    return (scale.sd[None] > 0) & away & (jnp.abs(x) > INDICATOR)
