r"""The rows of a stream, stored as far as memory allows; those that leave are replaced by their quadratics."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import Layout, blank_rows
from opvi.filters.ibis._sums import BLOCK, Quadratic, Rows, all_rows, expand, no_quadratic
from opvi.targets import Target
from opvi.types import Array, Batch, Data, Key, Scalar

FADED = 1e-3  # rows of a smaller weight leave
FIRST_ROOM = 16_384  # rows that there is room for at first; a multiple of `BLOCK`
FIRST_BYTES = 4_000_000  # that they may take
GROWTH = 4  # of the room, whenever it is used up: each size is another program


class Storage(NamedTuple):
    """Stored rows, and what is known of those that are not stored any more."""

    data: Data  # leaves [room, ...]; () before the first batch
    weight: Array  # [room]: how many rows each one is; 0 where there is none
    inclusion: Array  # [room]: the probability with which a row of its age is stored; 1 as long as all are
    arrived: Array  # rows stored so far, those that have left included
    gone: Quadratic  # the log likelihood of the rows that left
    doubt: Array  # [d, d]: the covariance of the error of its gradient


class Limits(NamedTuple):
    """How many rows are stored at most, and which leave."""

    rows: int
    half_life: float | None

    @property
    def most(self) -> int:
        """The number of rows stored at most."""
        return self.rows if self.half_life is None else min(self.rows, self.faded_after)

    @property
    def faded_after(self) -> int:
        """The number of rows after which a row has faded."""
        return math.ceil(math.log2(1 / FADED) * self.half_life)  # type: ignore[operator]

    @property
    def cyclic(self) -> bool:
        """Whether a row is stored until it has faded, and then makes room for the newest one."""
        return self.half_life is not None and self.faded_after <= self.rows


def no_storage(dim: int, dtype: jnp.dtype) -> Storage:
    """Return storage without room; its rows' shapes are those of the first batch."""
    none = jnp.zeros(0, dtype)
    return Storage((), none, none, jnp.zeros((), jnp.int32), no_quadratic(dim, dtype), jnp.zeros((dim, dim), dtype))


def limits_of(memory: float, half_life: float | None, data: Data) -> Limits:
    """Return how many rows like these fit into so many bytes."""
    row = sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in _rows_of(data))
    return Limits(max(1, int(memory // (row + 8))), half_life)  # two numbers of four bytes beside each row


def room_needed(limits: Limits, data: Data, count: int, coming: int, at_once: int) -> int:
    """Return the room for rows that come in batches of at most `at_once`, which pass through free places."""
    needed = min(count + coming, limits.most) + at_once
    row = sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in _rows_of(data))
    room = FIRST_ROOM
    while room > BLOCK and room * row > FIRST_BYTES:
        room //= 2
    while room < needed:
        room *= GROWTH
    largest = limits.most + (1 << (at_once - 1).bit_length())
    return max(needed, min(room, largest))


def with_room(storage: Storage, data: Data, room: int) -> Storage:
    """Return storage with at least so much room; places without a row hold copies of one, for the sake of logs."""
    dtype = storage.weight.dtype
    if not len(storage.weight):
        filled = jax.tree.map(lambda leaf: _repeated(leaf, room), _as_stored(layout_of_shapes(data), data, dtype))
        return storage._replace(data=filled, weight=jnp.zeros(room, dtype), inclusion=jnp.ones(room, dtype))
    more = room - len(storage.weight)
    if more <= 0:
        return storage

    def grown(leaf: Array) -> Array:
        return jnp.concatenate([leaf, _repeated(leaf, more)])

    return storage._replace(
        data=jax.tree.map(grown, storage.data),
        weight=jnp.concatenate([storage.weight, jnp.zeros(more, dtype)]),
        inclusion=jnp.concatenate([storage.inclusion, jnp.ones(more, dtype)]),
    )


def rows_of(storage: Storage, batch_weight: Array, top: Array, old: Scalar, new: Scalar) -> Rows:
    """Return the stored rows and those of a batch beyond them, weighted by shares of the old and the new ones."""
    weight = jnp.where(storage.weight > 0, storage.weight / storage.inclusion, 0) * old
    weight = jax.lax.dynamic_update_slice(weight, batch_weight * new, (top,))
    return Rows(storage.data, weight, top + (batch_weight > 0).sum(dtype=jnp.int32))


def stands_for(storage: Storage, size: int) -> Array:
    """Return how many rows that are not stored any more each stored row stands for; the last `size` places are free."""
    more = jnp.where(storage.weight > 0, storage.weight * (1 / storage.inclusion - 1), 0)
    return jnp.where(jnp.arange(len(more)) < len(more) - size, more, 0)


def write_beyond(storage: Storage, batch: Batch, top: Array) -> tuple[Storage, Array]:
    """Write a batch into the places from `top` on, padding last; return its rows' weights in that order."""
    order = jnp.argsort(batch.weight <= 0, stable=True)

    def write(leaf: Array, new: Array) -> Array:
        new = new[order].astype(leaf.dtype)
        return jax.lax.dynamic_update_slice(leaf, new, (top,) + (0,) * (leaf.ndim - 1))

    return storage._replace(data=jax.tree.map(write, storage.data, batch.data)), batch.weight[order]


def faded(storage: Storage, gamma: Scalar) -> Storage:
    """Return storage in which all rows weigh less; those that have faded leave."""
    weight = storage.weight * gamma
    return storage._replace(
        weight=jnp.where(weight < FADED, 0, weight), gone=storage.gone.scaled(gamma), doubt=storage.doubt * gamma**2
    )


class Kept(NamedTuple):
    """Storage after a batch, and the rows that have left it, which lie in the places from `top` on."""

    storage: Storage
    leaving: Array | None  # [batch]: weights of the rows that leave; None where all stay


def overflows(storage: Storage, limits: Limits, size: int) -> bool:
    """Return whether rows may leave; as long as the room is smaller, all of it is for rows that stay."""
    return len(storage.weight) >= limits.most + size


def leave(target: Target, storage: Storage, leaving: Array, top: Array) -> Storage:
    """Return storage whose quadratic holds the rows that leave."""
    size = len(leaving)

    def cut(leaf: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, top, size)

    rows = Rows(jax.tree.map(cut, storage.data), leaving, jnp.asarray(size, jnp.int32))
    return storage._replace(gone=storage.gone.plus(expand(target, rows, all_rows(rows), storage.gone.at)))


def keep(key: Key, storage: Storage, limits: Limits, weight: Array, top: Array) -> Kept:
    r"""Store the rows of a batch that were written beyond the others, as long as there is room.

    Without room, row i replaces a random one with probability $p_i = M / i$, so that all rows so far are stored with
    the same probability $\pi = M / i$ (algorithm R). With forgetting, p is constant, and $\pi$ falls with a row's age.
    """
    (size,), most = weight.shape, limits.most
    positions = top + jnp.arange(size, dtype=jnp.int32)
    if not overflows(storage, limits, size):
        stored = jax.lax.dynamic_update_slice(storage.weight, weight, (top,))
        return Kept(storage._replace(weight=stored), None)
    new = (weight > 0).sum(dtype=jnp.int32)
    stays = positions < most
    stored = jax.lax.dynamic_update_slice(storage.weight, jnp.where(stays, weight, 0), (top,))
    storage = storage._replace(weight=stored)
    end = (storage.arrived + new).astype(weight.dtype)

    def swap(b: Array, given: tuple[Storage, Array]) -> tuple[Storage, Array]:
        """Let row b of the batch change places with a stored one, or leave."""
        held, leaving = given
        row = held.arrived + b
        draw, place = jax.random.split(jax.random.fold_in(key, b))
        if limits.cyclic:
            enters, chance, where = jnp.ones((), bool), jnp.ones((), weight.dtype), row % most
        else:
            chance = admission(limits, row.astype(weight.dtype))
            enters = jax.random.uniform(draw, (), weight.dtype) < chance
            where = jax.random.randint(place, (), 0, most)
        source = top + b
        to = jnp.where(enters, where, source)

        def swapped(leaf: Array) -> Array:
            one, other = leaf[source], leaf[to]
            return leaf.at[to].set(one).at[source].set(other)

        left = jnp.where(enters, held.weight[to], weight[b])
        stored = jnp.where(enters, held.weight.at[to].set(weight[b]), held.weight)
        age = thinned(limits, row.astype(weight.dtype) + 1, end)
        before = thinned(limits, held.arrived.astype(weight.dtype), end)
        inclusion = jnp.where(enters, held.inclusion.at[to].set(chance * age / before), held.inclusion)
        held = held._replace(data=jax.tree.map(swapped, held.data), weight=stored, inclusion=inclusion)
        return held, leaving.at[b].set(left)

    first = jnp.maximum(most - top, 0)
    storage, leaving = jax.lax.fori_loop(first, new, swap, (storage, jnp.zeros_like(weight)))
    if not limits.cyclic:
        share = thinned(limits, storage.arrived.astype(weight.dtype), end)
        storage = storage._replace(inclusion=storage.inclusion * share)
    return Kept(storage, leaving)


def admission(limits: Limits, row: Scalar) -> Scalar:
    """Return the probability with which a row, counted from 0, is stored when there is no room left."""
    if limits.half_life is None:
        return jnp.minimum(1, limits.most / (row + 1))
    return jnp.full_like(row, min(1.0, limits.most * math.log(2) / limits.half_life))


def thinned(limits: Limits, start: Scalar, end: Scalar) -> Scalar:
    """Return the share of the rows stored after `start` rows that are still stored after `end`."""
    start = jnp.maximum(start, limits.most)
    end = jnp.maximum(end, start)
    if limits.half_life is None:
        return start / end
    return (1 - admission(limits, start) / limits.most) ** (end - start)


def _rows_of(data: Data) -> list[tuple[tuple[int, ...], str]]:
    layout = layout_of_shapes(data)
    return list(zip(layout.shapes, layout.dtypes, strict=True))


def layout_of_shapes(data: Data) -> Layout:
    """Return the layout of data of which only shapes and dtypes are known."""
    leaves, structure = jax.tree.flatten(data)
    kinds = tuple("float32" if jnp.issubdtype(leaf.dtype, jnp.floating) else str(leaf.dtype) for leaf in leaves)
    return Layout(tuple(np.shape(leaf)[1:] for leaf in leaves), kinds, structure)


def _as_stored(layout: Layout, data: Data, dtype: jnp.dtype) -> Data:
    blank = blank_rows(layout, 1, dtype)
    return jax.tree.map(lambda to, leaf: jnp.asarray(leaf[:1]).astype(to.dtype), blank, data)


def _repeated(leaf: Array, times: int) -> Array:
    return jnp.broadcast_to(leaf[:1], (times, *leaf.shape[1:]))
