r"""Target encoding: what a model's errors were, on average, where a column had the same value before.

An ID, a shop or a day of the week may come as a number. Its values have an order that means little, and a network needs
many rows for each of them. So every column has a table of values; of each it keeps discounted means of the errors
made at its rows, with a short and a long memory,

$$u_j(v) = \frac{\sum_i \lambda^{k_i} r_i}{\sum_i \lambda^{k_i} + s}, \qquad x_{ij} = v,$$

where $k_i$ counts the rows with that value since row i. Columns of measurements hardly ever repeat a value, and
have levels of 0.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.tracking._placed import placed
from opvi.tracking.experts._expert import BaseExpert, Belief, Context, Rows, Units
from opvi.tracking.experts._nearest import scattered
from opvi.types import Array, Key, Scalar

SLOTS = 1024  # values of a column; two that fall into one slot take turns
RATES = (0.6, 0.95)  # λ
SHRINKAGE = 0.5  # rows, that the means are drawn towards 0 by
WIDEST = 64  # columns, up to which it is recommended
FACTS = 2 + 2 * len(RATES)  # of a value: itself, when it last came, sums of errors, sums of weights


class LevelsState(NamedTuple):
    """Tables of the columns' values."""

    table: Array  # [F, SLOTS, FACTS]
    clock: Scalar  # weights of all rows so far


@dataclass(frozen=True)
class Levels(BaseExpert):
    """Settings of the levels of values."""

    stage: ClassVar[int] = 1

    half_life: float | None = None  # of the rows' weights, in rows; None for no fading but that of `RATES`

    def init(self, key: Key, columns: int, dtype: Any) -> LevelsState:
        """Return empty tables: a value of 0 that never came has a level of 0, as all others."""
        return LevelsState(jnp.zeros((columns, SLOTS, FACTS), dtype), jnp.zeros((), dtype))

    def predict(self, state: LevelsState, rows: Rows) -> Belief:
        """Return the levels of each column's value: corrections of which a stack takes the few that help."""
        place, columns = _places(rows.x), jnp.arange(len(state.table))
        known = state.table[columns[None], jnp.minimum(place, SLOTS - 1)]
        sums, counts = _faded(known, rows.x, state.clock, self.half_life)
        level = sums / (counts + SHRINKAGE)  # [B, F, rates]
        variance = 1 / (counts.max((1, 2)) + 1)
        return Belief(jnp.moveaxis(level.reshape(len(place), -1), 0, 1), variance, work=place)

    def learn(self, key: Key, state: LevelsState, rows: Rows, context: Context) -> LevelsState:
        """Return the tables after the residuals of some rows."""
        weight = context.scored * context.trust
        given = context.belief.work, rows.x, context.residual, weight, state.clock
        return LevelsState(_learn(state.table, *given, self.half_life), state.clock + weight.sum())

    def rescale(self, state: LevelsState, units: Units) -> LevelsState:
        """Return the tables with residuals in new units."""
        by = jnp.where(np.isin(np.arange(FACTS), np.arange(2, 2 + len(RATES))), units.output_ratio, 1)
        return state._replace(table=state.table * by[None, None])

    def forget(self, state: LevelsState, keep: Scalar) -> LevelsState:
        """Return empty tables."""
        return LevelsState(jnp.zeros_like(state.table), jnp.zeros_like(state.clock))

    def widen(self, state: LevelsState, fresh: LevelsState) -> LevelsState:
        """Return the tables of more columns."""
        return state._replace(table=placed(fresh.table, np.s_[: len(state.table)], state.table))


def _learn(
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
