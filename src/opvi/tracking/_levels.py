r"""Levels of values that repeat: what a model's errors were, on average, where a column had the same value before.

An ID, a shop or a day of the week may come as a number. Its values have an order that means little, and a network needs
many rows for each of them. So every column has a table of values; of each it keeps discounted means of the errors
made at its rows, with a short and a long memory,

$$u_j(v) = \frac{\sum_i \lambda^{k_i} r_i}{\sum_i \lambda^{k_i} + s}, \qquad x_{ij} = v,$$

where $k_i$ counts the rows with that value since row i. Columns of measurements hardly ever repeat a value, and
have levels of 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.tracking._neighbours import scattered
from opvi.types import Array, Scalar

SLOTS = 1024  # values of a column; two that fall into one slot take turns
RATES = (0.6, 0.95)  # λ
LAST_RATES = (0.2, 0.8)  # λ of the last errors, whatever the values: where neighbours in time are alike
SHRINKAGE = 0.5  # rows, that the means are drawn towards 0 by
WIDEST = 64  # columns: wider tables have no levels
FACTS = 2 + 2 * len(RATES)  # of a value: itself, when it last came, sums of errors, sums of weights


class Said(NamedTuple):
    """What is known about the values of some rows."""

    place: Array  # [B, F]: their slots; past the end for a missing value
    level: Array  # [B, F, rates]: shrunk mean errors, y standardised


def start(columns: int, dtype: jnp.dtype) -> Array:
    """Return empty tables `[F, SLOTS, FACTS]`: a value of 0 that never came has a level of 0, as all others."""
    return jnp.zeros((columns, SLOTS, FACTS), dtype)


def look(table: Array, x: Array, clock: Scalar, half_life: float | None, unit: Scalar | float = 1.0) -> Said:
    """Return the levels of the values of rows `[B, F]`; `clock` is the weight of all rows so far, `unit` that of y."""
    place = _places(x)
    known = table[jnp.arange(table.shape[0])[None], jnp.minimum(place, SLOTS - 1)]
    sums, counts = _faded(known, x, clock, half_life)
    return Said(place, sums / (counts + SHRINKAGE) / unit)


def learn(
    table: Array, place: Array, x: Array, error: Array, weight: Array, clock: Scalar, half_life: float | None
) -> Array:
    """Return the tables after the errors of a batch, row after row.

    Args:
        table: the tables before.
        place: the slots of the values.
        x: the rows, as they came.
        error: the errors of their predictions, in the units of y.
        weight: the weights of the rows.
        clock: the weight of all rows before the batch.
        half_life: the half-life of the rows' weights, in rows; None for no fading but that of `RATES`.
    """
    column, rates = jnp.arange(table.shape[0]), jnp.asarray(RATES, table.dtype)

    def row(b: Array, carry: tuple[Array, Scalar]) -> tuple[Array, Scalar]:
        table, clock = carry
        here, at, w, e = (jax.lax.dynamic_index_in_dim(a, b, keepdims=False) for a in (x, place, weight, error))
        sums, counts = _faded(table[column, jnp.minimum(at, SLOTS - 1)], here, clock, half_life)
        keep, clock = rates[None] ** jnp.minimum(w, 1), clock + w
        sums, counts = keep * sums + w * e, keep * counts + w
        new = jnp.concatenate([here[:, None], jnp.full_like(here, clock)[:, None], sums, counts], 1)
        good = (w > 0) & jnp.isfinite(e)
        return table.at[column, jnp.where(good, at, SLOTS)].set(new, mode="drop"), clock

    return jax.lax.fori_loop(0, len(weight), row, (table, clock))[0]


def discounted(last: Array, error: Array, weight: Array) -> Array:
    """Return sums of the last errors and of their weights, `[2, rates]`, after those of a batch."""
    rates = jnp.asarray(LAST_RATES, last.dtype)
    total = weight.sum()
    since = rates[None] ** (total - jnp.cumsum(weight))[:, None] * weight[:, None]
    return rates[None] ** total * last + jnp.stack([(since * error[:, None]).sum(0), since.sum(0)])


def _faded(known: Array, x: Array, clock: Scalar, half_life: float | None) -> tuple[Array, Array]:
    """Return sums of errors and of weights, `[…, rates]`, where the slot is that of the value; else 0."""
    value, when, sums, counts = jnp.split(known, (1, 2, 2 + len(RATES)), -1)
    kept = jnp.where(value == x[..., None], 1, 0).astype(x.dtype)
    if half_life is not None:
        kept = kept * jnp.exp2(jnp.minimum(when - clock, 0) / half_life)
    return kept * sums, kept * counts


def _places(x: Array) -> Array:
    """Return the slot of each value: a hash of its bits."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0, x).astype(jnp.float32), jnp.uint32)  # -0 is 0
    return jnp.where(jnp.isnan(x), SLOTS, jax.lax.rem(scattered(bits), jnp.uint32(SLOTS)).astype(jnp.int32))
