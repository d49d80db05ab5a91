r"""Moments of columns in which some values stand for "none", such as -999.

A value more than 100 standard deviations off is taken for missing. The first rows have no standard deviation yet:
they are kept, and judged by their medians. If most of the last few rows are that far off, the column has moved.
"""

import jax
import jax.numpy as jnp

from opvi.tracking._wrappers import _scaling as scaling
from opvi.tracking._wrappers._medians import NORMAL, median, recent
from opvi.tracking._wrappers._scaling import Moments
from opvi.types import Array

ENOUGH = 20  # rows whose moments are good enough to judge others by
MANY = 0.2  # of the first rows: so many that are far from the others, and from each other, are values
GAP = 10.0  # times as far from the middle as all values that are not odd: no value


def among_themselves(values: Array, weight: Array) -> Array:
    """Return the first rows `[B, F]` with a column's median for values that stand for "none", judged by the others."""
    centre = jax.vmap(median, (1, None))(values, weight)[None]
    apart = NORMAL * jax.vmap(median, (1, None))(jnp.abs(values - centre), weight)[None]
    away = jnp.abs(values - centre)
    here = (weight > 0)[:, None]
    odd = here & (apart > 0) & (away > scaling.FAR * apart) & (jnp.abs(values) > scaling.INDICATOR)
    # A long tail leads up to its farthest values; what stands for "none" lies apart from all others.
    tail = jnp.where(here & ~odd, away, 0).max(0, keepdims=True)
    # Many that differ are values: the others, all but equal, are a column at rest.
    many = jnp.where(odd, weight[:, None], 0).sum(0, keepdims=True) > MANY * weight.sum()
    differ = jnp.where(odd, values, -jnp.inf).max(0) > jnp.where(odd, values, jnp.inf).min(0)
    return jnp.where(odd & (away > GAP * tail) & ~(many & differ[None]), centre, values)


def moved(odd: Array, mean: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    """Return the shares of odd values, 0 for columns that have moved for good, and how far those have moved.

    Args:
        odd: the shares of the last few rows that are far off, column by column.
        mean: the columns' means.
        x: the latest rows.
        weight: the weights of values that are far off, `[B, F]`.
    """
    gone = odd > scaling.MISREAD
    centre = (x * weight).sum(0) / jnp.maximum(weight.sum(0), 1e-30)
    return jnp.where(gone, 0, odd), jnp.where(gone & (weight.sum(0) > 0), centre - mean, 0)


def no_rows(room: int, features: int, dtype: jnp.dtype) -> Array:
    """Return room for the first rows and their weights; `room` is that of the largest batch."""
    return jnp.zeros((ENOUGH - 1 + room, features + 1), dtype)


def learn(moments: Moments, first: Array, odd: Array, x: Array, weight: Array) -> tuple[Moments, Array, Array]:
    """Return the moments, the first rows, and the shares of odd values, including those of a batch.

    Args:
        moments: the moments of the columns before.
        first: the first rows, as of `no_rows`.
        odd: the shares of the last few rows that are far off, column by column.
        x: rows `[B, F]`.
        weight: their weights; 0 for padding.
    """
    here, held = weight > 0, (first[:, -1] > 0).sum(dtype=jnp.int32)
    # A state from elsewhere may have seen rows that are not among the first.
    young = (held < ENOUGH) & (moments.seen <= first[:, -1].sum())
    place = jnp.where(here & young, held + jnp.cumsum(here, dtype=jnp.int32) - 1, len(first))
    first = first.at[place].set(jnp.concatenate([x, weight[:, None]], 1), mode="drop")

    missing = scaling.far(scaling.scale_of(moments), x) & ~young
    share, shift = moved(recent(odd, missing, weight), moments.mean, x, jnp.where(missing, weight[:, None], 0))
    mean, more = moments.mean + shift, len(first) - len(x)
    whole = jnp.pad(jnp.where(missing, mean[None], x), ((0, more), (0, 0)))
    rows, weights = first[:, :-1], first[:, -1]
    rows = jax.lax.cond(young, lambda: among_themselves(rows, weights), lambda: whole)
    weights = jnp.where(young, weights, jnp.pad(weight, (0, more)))
    # As long as all rows are there, the moments are theirs.
    before = jax.tree.map(lambda leaf: jnp.where(young, 0, leaf), moments._replace(mean=mean))
    return scaling.update(before, rows, weights), first, share
