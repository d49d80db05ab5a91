r"""How a stream begins: the first rows are kept, and all of them are learnt again whenever another joins them.

Units that follow every row, and covariances learnt in the wrong units, do lasting damage if rows come one
by one. So the networks learn the first 20 rows in the units of all rows there are, however they arrived.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.tracking import _columns as columns
from opvi.tracking import _guard as guard
from opvi.tracking import _scaling as scaling
from opvi.tracking._chunks import CHUNK
from opvi.tracking._columns import ENOUGH
from opvi.tracking._neighbours import put
from opvi.tracking._scaling import Moments
from opvi.types import Array

ROOM = ENOUGH - 1 + CHUNK


def nothing(features: int, dtype: jnp.dtype) -> Array:
    """Return room for rows: X, y, their weights, and their weights in learning."""
    return jnp.zeros((ROOM, features + 3), dtype)


def count(held: Array) -> Array:
    """Return how many rows there are."""
    return (held[:, -2] > 0).sum(dtype=jnp.int32)


class First(NamedTuple):
    """The first rows, including those of a chunk."""

    held: Array  # wild targets weigh less in the last column
    y: Array  # [ROOM]: wild ones moved in
    enough: Array  # whether they are


def joined(held: Array, rows: tuple[Array, ...]) -> First:
    """Return the rows followed by those of a chunk."""
    x, y, weight = rows
    here = weight > 0
    number = count(held) + jnp.cumsum(here, dtype=jnp.int32)
    place = jnp.where(here, number - 1, ROOM)
    held = put(held, place, jnp.concatenate([x, jnp.stack([y, weight, weight], 1)], 1))
    trust, moved = guard.among_themselves(held[:, -3], held[:, -2])
    held = jnp.concatenate([held[:, :-1], (held[:, -2] * trust)[:, None]], 1)
    return First(held, moved, number[-1] >= ENOUGH)


def chunk(held: Array, at: Array, size: int) -> Array:
    """Return X, y and weights of a chunk of the rows."""
    rows = jax.lax.dynamic_slice_in_dim(jnp.pad(held, ((0, size), (0, 0))), at * size, size)
    return jnp.concatenate([rows[:, :-2], rows[:, -1:]], 1)


def instead(
    waits: Array, first: First, moments: Moments, rows: tuple[Array, Array]
) -> tuple[Moments, tuple[Array, Array]]:
    """Return what the moments are updated from: old moments and a chunk, or none and the first rows while they wait."""
    weight = first.held[:, -2]
    values = columns.among_themselves(first.held[:, :-3], weight)
    x, chunk_weight = (jnp.pad(a, [(0, ROOM - len(a)), *[(0, 0)] * (a.ndim - 1)]) for a in rows)
    mine = jnp.concatenate([values, first.y[:, None]], 1), weight
    begin = scaling.start(x.shape[1], x.dtype)
    return jax.tree.map(lambda a, b: jnp.where(waits, a, b), (begin, mine), (moments, (x, chunk_weight)))
