r"""Rows remembered beside the networks of a classifier: the labels of the nearest ones, and of the last ones.

Four more trackers for the bank, which weights them as it does the networks:

1. the labels of the 8 nearest of all rows kept, $p(c) \propto \sum_i w_i [y_i = c] + s\, \pi_c$, with $\pi$ the running
   shares of the classes,
2. the same among the last 1,024 rows, which fade,
3. the labels of the last rows, wherever they were, with half-lives of 5 and of 20 rows: many streams repeat.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import LARGEST_COUNT
from opvi.tracking.experts import _metric as metrics
from opvi.tracking.experts import _nearest as neighbours
from opvi.tracking.experts._metric import Metric
from opvi.types import Array, Scalar

MEMBERS = 4
FACTS = 3  # numbers kept of a row beside its inputs
SHRINKAGE = 0.3  # rows at x itself, that probabilities are drawn towards the shares of the classes by
RECENT = neighbours.TILE  # rows of the short memory
RECENT_HALF_LIFE = 300.0  # rows
LAST_HALF_LIVES = (5.0, 20.0)  # rows
LAST_SHARE = 0.95  # of the last labels in their member; the rest follows the shares of the classes
SHARES_MEMORY = 5000.0  # rows
SMALLEST = 1e-6  # probability


class Kept(NamedTuple):
    """Stored rows."""

    x: Array  # [room, F], as they came; NaN where a column did not exist yet
    facts: Array  # [room, FACTS]: label, weight, when it came


class ClassMemory(NamedTuple):
    """Rows and labels."""

    all: Kept  # a sample of all rows
    recent: Kept  # the last ones
    seen: Array  # rows there have been
    clock: Scalar  # their weights, added up
    shares: Array  # [C]: of the classes
    last: Array  # [2, C]: of the classes among the last rows
    metric: Metric


def start(rows: int, features: int, classes: int, dtype: jnp.dtype) -> ClassMemory:
    """Return a memory without rows."""

    def empty(room: int) -> Kept:
        return Kept(jnp.zeros((room, features), dtype), jnp.zeros((room, FACTS), dtype))

    even, zero = jnp.full(classes, 1 / classes, dtype), jnp.zeros((), dtype)
    last = jnp.tile(even[None], (len(LAST_HALF_LIVES), 1))
    every, seen = empty(neighbours.room(rows)), jnp.zeros((), jnp.int32)
    return ClassMemory(every, empty(RECENT), seen, zero, even, last, metrics.start(features, dtype))


def recall(
    memory: ClassMemory,
    view: Callable[[Array], Array],
    z: Array,
    rows: int,
    half_life: float | None,
) -> Array:
    """Return the log probabilities of the members at scaled inputs z, `[MEMBERS, B, C]`.

    Args:
        memory: rows and labels.
        view: scales rows given in their original units.
        z: the inputs to predict at, `[B, F]`.
        rows: how many are remembered.
        half_life: the half-life of the rows' weights, in rows; None fades only the short memory.
    """

    def placed(x: Array) -> Array:
        return metrics.through(memory.metric, view(x))

    asked = metrics.through(memory.metric, z)
    short = RECENT_HALF_LIFE if half_life is None else min(half_life, RECENT_HALF_LIFE)

    def votes(kept: Kept, filled: Array, fade: float | None) -> Array:
        found = neighbours.near(kept.x, filled, placed, asked)
        label, weight, born = jnp.moveaxis(kept.facts[found.place], -1, 0)
        if fade is not None:
            weight = weight * jnp.exp2((born - memory.clock) / fade)
        named = jax.nn.one_hot(label.astype(jnp.int32), len(memory.shares), dtype=z.dtype)
        p = ((found.closeness * weight)[..., None] * named).sum(1) + SHRINKAGE * memory.shares[None]
        return p / p.sum(1, keepdims=True)

    last = LAST_SHARE * memory.last + (1 - LAST_SHARE) * memory.shares[None]
    every = votes(memory.all, jnp.minimum(memory.seen, rows), half_life)
    p = jnp.stack([every, votes(memory.recent, jnp.minimum(memory.seen, RECENT), short)])
    p = jnp.concatenate([p, jnp.broadcast_to(last[:, None], (len(last), *p.shape[1:]))])
    return jnp.log(jnp.maximum(p, SMALLEST))


def learn(memory: ClassMemory, x: Array, y: Array, weight: Array, slope: Array, rows: int) -> ClassMemory:
    """Return the memory with a batch in it.

    Args:
        memory: the memory before.
        x: rows in their original units, `[B, F]`.
        y: their labels.
        weight: the weights of the rows; 0 for padding.
        slope: gradients that distances follow, `[B, F]`.
        rows: how many are remembered.
    """
    total = weight.sum()
    here = weight > 0
    facts = jnp.stack([y.astype(x.dtype), weight, jnp.broadcast_to(memory.clock + total, weight.shape)], 1)
    number = memory.seen + jnp.cumsum(here, dtype=jnp.int32) - 1
    ring = jnp.where(here, number % RECENT, RECENT)  # past the end: dropped
    seen = memory.seen + jnp.minimum(here.sum(dtype=jnp.int32), LARGEST_COUNT - 1 - memory.seen)

    def put(kept: Kept, where: Array) -> Kept:
        return Kept(kept.x.at[where].set(x, mode="drop"), kept.facts.at[where].set(facts, mode="drop"))

    named = jax.nn.one_hot(y, len(memory.shares), dtype=x.dtype)

    def mean(weight: Array) -> Array:
        return (weight[:, None] * named).sum(0) / jnp.maximum(weight.sum(), 1e-30)

    gain = total / jnp.minimum(memory.clock + total + 2, jnp.maximum(SHARES_MEMORY, total))
    after = total - jnp.cumsum(weight)  # rows of the batch after each
    last = []
    for half_life, old in zip(LAST_HALF_LIVES, memory.last, strict=True):
        keep = jnp.exp2(-total / half_life)
        last.append(keep * old + (1 - keep) * mean(weight * jnp.exp2(-after / half_life)))
    return ClassMemory(
        put(memory.all, neighbours.places(memory.seen, here, rows)[0]),
        put(memory.recent, ring),
        seen,
        memory.clock + total,
        (1 - gain) * memory.shares + gain * mean(weight),
        jnp.stack(last),
        metrics.update(memory.metric, slope, weight),
    )
