"""A bounded, uniform sample of all rows so far, as a pure function of the rows and a key."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import LARGEST_COUNT, blank_rows
from opvi._steps import Layout as Layout
from opvi._steps import layout_of as layout_of
from opvi.types import Array, Batch, Data, Key, Tree

OWN_KEYS = 2**32 - 1  # folded into a sampler's key: a number that no round has


class Reservoir(NamedTuple):
    """The rows kept."""

    rows: Data  # leaves [size, ...]
    seen: Array  # rows there were to choose from

    @property
    def size(self) -> int:
        """The number of rows that fit."""
        return len(jax.tree.leaves(self.rows)[0])

    @property
    def filled(self) -> Array:
        """The number of rows in use."""
        return jnp.minimum(self.seen, self.size)


def pairs(columns: int) -> Layout:
    """Return the layout of rows `(x, y)` with this many columns and one number y."""
    return layout_of((np.zeros((1, columns), np.float32), np.zeros(1, np.float32)))


def empty(layout: Layout, size: int, dtype: jnp.dtype) -> Reservoir:
    """Return a reservoir without rows; floating-point leaves get the dtype given."""
    return Reservoir(blank_rows(layout, size, dtype), jnp.zeros((), jnp.int32))


def keys(key: Key) -> tuple[Key, Key]:
    """Return keys for `offer` and `draw`, independent of those of the sampler's rounds."""
    offering, drawing = jax.random.split(jax.random.fold_in(key, OWN_KEYS))
    return offering, drawing


def offer(key: Key, reservoir: Reservoir, batch: Batch, good: Array) -> Reservoir:
    """Return the reservoir after a batch: the s-th row enters with probability size/s, in place of a random one.

    Padded rows do not enter, nor does any row of a batch that is not `good`. What is drawn for a row depends on its
    number alone, so pass the same key every time: the sample is the same however rows are cut into batches.
    """
    size = reservoir.size
    here = (batch.weight > 0) & good
    ones = here.astype(jnp.int32)
    number = reservoir.seen + jnp.cumsum(ones) - ones  # rows before each
    drawn = jax.vmap(lambda n: jax.random.randint(jax.random.fold_in(key, n), (), 0, n + 1))(number)
    place = jnp.where(here, jnp.where(number < size, number, drawn), size)  # past the end: dropped
    order = jnp.arange(len(here), dtype=jnp.int32)
    last = jnp.zeros(size, jnp.int32).at[place].max(order, mode="drop")  # of the rows drawn to one place
    place = jnp.where(last[jnp.minimum(place, size - 1)] == order, place, size)
    rows = jax.tree.map(lambda old, new: old.at[place].set(_as(old, new), mode="drop"), reservoir.rows, batch.data)
    seen = reservoir.seen + jnp.minimum(ones.sum(), LARGEST_COUNT - 1 - reservoir.seen)
    return Reservoir(rows, seen)


def _as(old: Array, new: Array) -> Array:
    """Return new rows in the dtype of old ones; integers may become floats, but not the reverse."""
    if jnp.issubdtype(new.dtype, jnp.floating) and not jnp.issubdtype(old.dtype, jnp.floating):
        raise TypeError(
            f"rows are {new.dtype}, but the example's are {old.dtype}. Give an example of the stream's rows."
        )
    return new.astype(old.dtype)


def draw(key: Key, reservoir: Reservoir, count: int) -> Data:
    """Return rows drawn uniformly at random; undefined while the reservoir is empty."""
    drawn = jax.random.randint(key, (count,), 0, jnp.maximum(reservoir.filled, 1))
    return jax.tree.map(lambda leaf: leaf[drawn], reservoir.rows)


def kept_rows(state: Tree) -> Data:
    """Return the rows kept by `remembering` or `replay`: of several reservoirs in a state, the outermost one's.

    Leaves have as many rows as have been kept so far.
    """
    while hasattr(state, "inner") and not isinstance(state.own, Reservoir):
        state = state.inner
    if hasattr(state, "inner"):
        filled = int(state.own.filled)
        return jax.tree.map(lambda leaf: leaf[:filled], state.own.rows)
    raise TypeError("this state keeps no rows. Make its sampler with `opvi.remembering(sampler, memory_rows)`.")
