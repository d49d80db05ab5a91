"""Rows kept in a fixed number of slots, and a search for the nearest without sorting or work for empty slots."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import LARGEST_COUNT
from opvi.types import Array

LANES = 512  # every LANES-th row competes with the others of its lane; the nearest of each lane stay in the race
TILE = 2 * LANES  # rows measured at once
FARTHEST = 1e37  # squared distance
EMPTY = 0x7F000000  # as an integer: of a lane without rows
MOST_ROWS = 65_536  # unless more are asked for
LARGEST_STORE = 1 << 20  # rows: places of more would take the bits that distances need
MOST_BYTES = 16e6
MOST_COLUMNS = 400
NEAREST = 8
NEARNESS = 0.01  # a row at this share of the mean squared distance has half the weight of one at x itself


def kept(memory_rows: int | None, columns: int, facts: int, networks: bool) -> int:
    """Return how many rows are kept: if omitted, as many as fit in 16 MB, at most 65,536.

    Linear models, which are for streams where speed matters, keep none unless asked; nor do models of more than 400
    columns, where distances say little: measured on MNIST.
    """
    if memory_rows is not None:
        return memory_rows
    return min(MOST_ROWS, int(MOST_BYTES // (4 * (columns + facts)))) if networks and columns <= MOST_COLUMNS else 0


def checked_rows(memory_rows: int | None) -> int | None:
    """Return a number of rows to remember; refuse it unless it is None or a whole number that `nearest` can search."""
    whole = isinstance(memory_rows, int) and not isinstance(memory_rows, bool)
    if memory_rows is None or (whole and 0 <= memory_rows <= LARGEST_STORE):
        return memory_rows
    raise ValueError(
        f"`memory_rows` is {memory_rows!r}, but must be a whole number of rows from 0 to {LARGEST_STORE:,}, or None."
    )


def room(rows: int) -> int:
    """Return the length of an array with slots for this many rows, in whole tiles."""
    return -(-rows // TILE) * TILE


def places(seen: Array, here: Array, rows: int) -> tuple[Array, Array]:
    """Return the slot of each row of a batch, and the number of rows seen after it.

    The first rows fill the slots in turn. Each later one replaces a random row, so that of the rows kept
    nearly all recent ones are there and older ones become rarer: ages fall off geometrically.

    Args:
        seen: the number of rows before the batch.
        here: which rows of the batch are real; padding goes to a slot past the end, where it is dropped.
        rows: how many are kept.
    """
    ones = here.astype(jnp.int32)
    number = seen + jnp.cumsum(ones) - ones
    drawn = jax.lax.rem(scattered(number.astype(jnp.uint32)), jnp.uint32(rows)).astype(jnp.int32)
    place = jnp.where(here, jnp.where(number < rows, number, drawn), LARGEST_COUNT)
    order = jnp.arange(len(here), dtype=jnp.int32)
    taken = (place[:, None] == place[None]) & (order[:, None] < order[None])  # by a later row of the batch
    place = jnp.where(taken.any(1), LARGEST_COUNT, place)
    return place, seen + jnp.minimum(ones.sum(), LARGEST_COUNT - 1 - seen)


def put(rows: Array, place: Array, new: Array) -> Array:
    """Return rows `[R, D]` with finite new ones `[B, D]` in their places, no two in one; dropped past the end.

    As a product of matrices, for few rows: a lookup takes three times as long to compile.
    """
    here = place[None] == np.arange(len(rows))[:, None]
    moved = jnp.matmul(here.astype(new.dtype), new, precision="highest")
    return jnp.where(here.any(1)[:, None], moved, rows)


def scattered(number: Array) -> Array:
    """Return pseudo-random whole numbers, each a hash of one number (the finaliser of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        number = (number ^ (number >> jnp.uint32(shift))) * jnp.uint32(factor)
    return number ^ (number >> jnp.uint32(16))


def nearest(
    stored: Array, filled: Array, view: Callable[[Array], Array], asked: Array, count: int = NEAREST
) -> tuple[Array, Array]:
    """Return the slots of the rows nearest to each query, and whether there are that many: `[B, count]`.

    Distances are Euclidean between `view(rows)` and `asked`. Only tiles with rows in them are searched. Of every
    lane of slots the nearest row is found as the smallest of integers that hold a distance in the upper bits and
    its slot in the lower ones; the nearest lanes follow. Two of the nearest rows in one lane count as one: with 8
    wanted from 512 lanes, about one neighbour in 150 is replaced by a slightly more distant one.

    Args:
        stored: `[room, F]`.
        filled: the number of slots in use, from the first on.
        view: maps rows `[TILE, F]` to the space of distances, `[TILE, D]`.
        asked: `[B, D]`.
        count: neighbours wanted.
    """
    low = (1 << (len(stored) // LANES).bit_length()) - 1
    size = (asked**2).sum(1)

    def look(tile: Array, best: Array) -> Array:
        rows = view(jax.lax.dynamic_slice_in_dim(stored, tile * TILE, TILE))
        cross = jnp.matmul(asked, rows.T, precision="highest")
        squared = jnp.clip(size[:, None] + (rows**2).sum(1)[None] - 2 * cross, 1e-30, FARTHEST)
        place = tile * TILE + jnp.arange(TILE, dtype=jnp.int32)
        whole = jax.lax.bitcast_convert_type(squared.astype(jnp.float32), jnp.int32)
        packed = jnp.where(
            (place < filled)[None], (whole & ~low) | jax.lax.div(place, jnp.asarray(LANES, place.dtype))[None], EMPTY
        )
        return jnp.minimum(best, packed.reshape(len(asked), -1, LANES).min(1))

    begin = jnp.full((len(asked), LANES), EMPTY, jnp.int32)
    tiles = jax.lax.div(filled + TILE - 1, jnp.asarray(TILE, filled.dtype))
    best = jax.lax.fori_loop(0, tiles, look, begin)
    lane = jax.lax.top_k(-jax.lax.bitcast_convert_type(best, jnp.float32), count)[1]
    found = jnp.take_along_axis(best, lane, 1)
    return jnp.where(found < EMPTY, (found & low) * LANES + lane, 0), found < EMPTY


class Near(NamedTuple):
    """The nearest rows of each query."""

    place: Array  # [B, count]
    closeness: Array  # [B, count]: 1 for the nearest, less for others; 0 where there is no such row
    squared: Array  # [B]: mean squared distance
    some: Array  # [B]: whether there is any row


def near(stored: Array, filled: Array, view: Callable[[Array], Array], asked: Array) -> Near:
    """Return the nearest rows, weighted by exact distances relative to their mean."""
    place, there = nearest(stored, filled, view, asked)
    rows = view(stored[place.reshape(-1)]).reshape(*place.shape, -1)
    far = ((rows - asked[:, None]) ** 2).sum(-1)
    squared = jnp.where(there, far, 0).sum(1) / jnp.maximum(there.sum(1, dtype=far.dtype), 1) + 1e-12
    closeness = jnp.where(there, 1 / (far / squared[:, None] + NEARNESS), 0)
    return Near(place, closeness / jnp.maximum(closeness.max(1, keepdims=True), 1e-30), squared, there.any(1))
