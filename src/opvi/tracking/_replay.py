"""Learning from some rows again: a bounded, uniform sample of the stream beside any sampler."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from opvi._steps import check_example, compiled, tick
from opvi.targets import cast
from opvi.tracking import _reservoir as reservoirs
from opvi.tracking._reservoir import Layout, Reservoir
from opvi.tracking._wrapped import Wrapped, WrappedInfo, Wrapper, wrapped_info
from opvi.types import Array, Batch, Data, Key, Sampler, State


@dataclass(frozen=True)
class Replay(Wrapper):
    """Settings of `replay`."""

    memory_rows: int
    layout: Layout
    steps: int

    def beginning(self, inner: State) -> Reservoir:
        """Return an empty reservoir."""
        return reservoirs.empty(self.layout, self.memory_rows, inner.particles.dtype)

    def step(self, key: Key, state: Wrapped, batch: Batch) -> tuple[Wrapped, WrappedInfo]:
        """Learn from a batch, keep some of its rows, and learn from rows kept."""
        return _step(self, key, state, batch)


def replay(sampler: Sampler, example: Data, *, memory_rows: int = 1000, steps: int = 5) -> Replay:
    r"""Every batch followed by `steps - 1` batches of the same size, drawn from a reservoir of rows seen.

    The reservoir is a uniform sample of all rows so far (each enters with probability rows/seen, in place of a
    random one). It helps first-order samplers most. Under drift it holds them back, and a sampler that adds up
    what it has seen, such as `gauss_newton`, counts a replayed row again.

    Args:
        sampler: any.
        example: data of at least one row, to know its shape.
        memory_rows: size of the reservoir.
        steps: the sampler's steps per round, the one on new rows included.
    """
    if memory_rows < 1 or steps < 1:
        raise ValueError(f"`memory_rows` and `steps` are {memory_rows} and {steps}, but each must be at least 1.")
    return Replay(sampler, memory_rows, reservoirs.layout_of(example), steps)


@compiled
def _step(sampler: Replay, key: Key, state: Wrapped, batch: Batch) -> tuple[Wrapped, WrappedInfo]:
    batch = cast(batch, state.particles.dtype)
    check_example(state.own.rows, batch.data)
    clock = tick(state, batch)
    inner, info = sampler.sampler.step(key, state.inner, batch)
    keep, drawing = reservoirs.keys(key)
    kept = reservoirs.offer(keep, state.own, batch, info.finite)
    mine, weight = jax.random.fold_in(drawing, clock.round), jnp.ones_like(batch.weight)

    def again(i: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
        inner, finite = carry
        old = reservoirs.draw(jax.random.fold_in(mine, i), kept, len(weight))
        inner, told = sampler.sampler.step(key, inner, Batch(old, weight))
        return inner, finite & told.finite

    # A refused batch is neither kept nor followed by others.
    last = jnp.where(info.finite & (kept.seen > 0), sampler.steps, 1)
    inner, finite = jax.lax.fori_loop(1, last, again, (inner, info.finite))
    told = wrapped_info(info)._replace(rows=clock.rows, finite=finite)
    return Wrapped(inner, kept, clock.round, clock.rows), told
