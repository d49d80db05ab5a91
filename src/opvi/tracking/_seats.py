r"""Seats: networks of a table with more than a few columns, of which the useful ones get all the room.

Each hidden unit has S seats. While it is not known which columns help, m units have their seats together, so that
every column has one, and act as one unit. When at most S columns have not faded (`_gates`), each unit sees those, and
there are m times as many: networks as large as those of a narrow table.

What networks learnt while useless columns were among the inputs is worse than what they would have learnt without.
So when the factors have changed, networks begin again with the rows remembered: early, and at most a few times.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.types import Array, Scalar

LEAVES = 0.5  # factor of a column below which it may lose its seat
ENTERS = 0.7  # and above which it may take one
FIRST = 120.0  # rows: half of those after which networks may begin again; then twice as many, and so on
LAST = 4000.0  # rows after which they do not
CHANGE = 1.0  # of all squared factors together, that is worth it: of a column that has nearly faded little is left


class Seats(NamedTuple):
    """Which columns have seats, and what was known when the networks last began."""

    alone: Array  # whether units are on their own, and see the columns chosen
    chosen: Array  # [S]
    factor: Array  # [F]
    rows: Scalar


class Seen(NamedTuple):
    """Inputs as hidden units see them."""

    z: Array  # [B, S, units]
    alone: Array
    together: int  # m

    def merged(self, sums: Array) -> Array:
        """Return sums `[B, units]` over the units that act as one."""
        whole = sums.reshape(len(sums), -1, self.together).sum(2)
        return jnp.where(self.alone, sums, jnp.repeat(whole, self.together, 1))


def start(columns: int, seats: int, dtype: jnp.dtype) -> Seats:
    """Return seats for every column."""
    one = jnp.ones(columns, dtype)
    return Seats(jnp.zeros((), bool), jnp.arange(seats, dtype=jnp.int32), one, jnp.full((), FIRST, dtype))


def together(columns: int, seats: int) -> int:
    """Return m, how many units have seats for every column."""
    return -(-columns // seats)


def _column(seats: Seats, units: int) -> Array:
    """Return the columns that hidden units see, `[S, units]`; F for none."""
    columns, count = len(seats.factor), len(seats.chosen)
    unit, seat = np.arange(units) % together(columns, count), np.arange(count)[:, None]
    every = np.minimum(unit[None] * count + seat, columns)
    return jnp.where(seats.alone, seats.chosen[:, None], jnp.asarray(every, jnp.int32))


def spread(seats: Seats | None) -> Array | float:
    """Return the factor of all inputs: of more columns each has a smaller prior."""
    if seats is None:
        return 1.0
    small = ((len(seats.chosen) + 1) / (len(seats.factor) + 1)) ** 0.5
    return jnp.where(seats.alone, jnp.ones((), seats.rows.dtype), small)


def seen(seats: Seats | None, z: Array, units: int) -> Array | Seen:
    """Return inputs z `[B, F]` as the hidden units see them; unchanged where each sees all columns."""
    if seats is None:
        return z
    z = jnp.pad(z * spread(seats), ((0, 0), (0, 1)))
    return Seen(z[:, _column(seats, units)], seats.alone, together(len(seats.factor), len(seats.chosen)))


def of(seats: Seats | None, values: Array, units: int, none: float) -> Array:
    """Return values of columns `[F]` by seat, `[S, units]`, `none` at empty ones; unchanged without seats."""
    return values if seats is None else jnp.append(values, jnp.asarray(none, values.dtype))[_column(seats, units)]


def by_column(seats: Seats | None, values: Array) -> Array:
    """Return the mean by column, `[F]`, of values `[S, units]`; 1 for a column without a seat."""
    if seats is None:
        return values.mean(1)
    column, nothing = _column(seats, values.shape[1]), jnp.zeros_like(seats.factor)
    total = nothing.at[column].add(values, mode="drop")
    count = nothing.at[column].add(1, mode="drop")
    return jnp.where(count > 0, total / jnp.maximum(count, 1), 1)


def moved(seats: Seats, factor: Array) -> tuple[Array, Array]:
    """Return the columns chosen after one that has faded lost its seat to one that helps, and which changed, `[S]`."""
    worst = jnp.argmin(factor[seats.chosen])
    best = jnp.argmax(factor.at[seats.chosen].set(-1)).astype(seats.chosen.dtype)
    go = seats.alone & (factor[seats.chosen[worst]] < LEAVES) & (factor[best] > ENTERS)
    changed = (jnp.arange(len(seats.chosen)) == worst) & go
    return jnp.where(changed, best, seats.chosen), changed


def due(seats: Seats, factor: Array, rows: Scalar) -> Array:
    """Return whether networks should begin again, `rows` after the start."""
    changed = jnp.abs(factor**2 - seats.factor**2).sum() > CHANGE
    return changed & (rows >= 2 * seats.rows) & (rows <= LAST)


def settled(seats: Seats, factor: Array, rows: Scalar) -> Seats:
    """Return seats for the columns that have not faded, if there are enough for them, otherwise for all."""
    chosen = jax.lax.top_k(factor, len(seats.chosen))[1]
    return Seats((factor > LEAVES).sum() <= len(chosen), chosen.astype(seats.chosen.dtype), factor, rows)
