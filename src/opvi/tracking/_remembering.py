"""Samplers that keep a bounded, uniform sample of the stream, and learn from some of its rows again."""

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
class Keeping(Wrapper):
    """A sampler with a reservoir of rows beside it."""

    memory_rows: int
    layout: Layout

    def beginning(self, inner: State) -> Reservoir:
        """Return an empty reservoir."""
        return reservoirs.empty(self.layout, self.memory_rows, inner.particles.dtype)


@dataclass(frozen=True)
class Remembering(Keeping):
    """Settings of `remembering`."""

    again: float

    @compiled
    def step(self, key: Key, state: Wrapped, batch: Batch) -> tuple[Wrapped, WrappedInfo]:
        """Learn from a batch, then from rows kept before it; then keep some of its rows."""
        batch = cast(batch, state.particles.dtype)
        inner, info = self.sampler.step(key, state.inner, batch)
        data = tuple(batch.data) if isinstance(batch.data, list) else batch.data
        check_example(state.own.rows, data)
        keep, again = reservoirs.keys(key)
        if self.again:
            count = max(1, round(self.again * len(batch.weight)))
            share = (batch.weight > 0).mean(dtype=batch.weight.dtype)  # a padded batch is followed by fewer
            # A refused batch is neither kept nor followed by others.
            due = info.finite & (state.own.seen > 0) & (jnp.arange(count, dtype=share.dtype) < share * count)
            old = reservoirs.draw(jax.random.fold_in(again, state.round), state.own, count)
            inner = self.sampler.relearn(key, inner, Batch(old, due.astype(share.dtype)))  # type: ignore[attr-defined]
        kept = reservoirs.offer(keep, state.own, batch._replace(data=data), info.finite)
        return Wrapped(inner, kept, inner.round, inner.rows), wrapped_info(info)

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""
        rows = f"{self.memory_rows:,} rows"
        return f"{super().about}; {f'learns again from {rows} kept' if self.again else f'keeps a sample of {rows}'}"


def remembering(sampler: Sampler, memory_rows: int, *, again: float = 1.0, example: Data | None = None) -> Remembering:
    r"""Give a sampler a reservoir of rows, from which it learns again after every batch.

    The reservoir is a uniform sample of all rows so far: the s-th row enters with probability rows/s, in place of a
    random one. Rows learnt again teach the parameters only. Calibration, scaling and counts come from rows as they
    are first seen, because predictions of a row that was learnt before are better than those of a new one.
    `opvi.tracking.kept_rows(state)` returns the rows.

    Args:
        sampler: `opvi.regressor(...)` or `opvi.classifier(...)`, wrapped or not; any sampler if `again` is 0.
        memory_rows: size of the reservoir.
        again: rows learnt again for every new one; 0 only keeps rows.
        example: at least one row in the form the stream will have, if the sampler cannot know its shape.
    """
    if again and not hasattr(sampler, "relearn"):
        raise TypeError(
            "this sampler has no `relearn`; `opvi.regressor` and `opvi.classifier` have. Give `again=0` to keep rows "
            "without learning from them again, or use `opvi.replay`."
        )
    if not isinstance(memory_rows, int) or memory_rows < 1 or not again >= 0:
        raise ValueError(
            f"`memory_rows` and `again` are {memory_rows!r} and {again}, but must be at least 1 and at least 0."
        )
    return Remembering(sampler, memory_rows, _layout(sampler, example), again)


def _layout(sampler: Sampler, example: Data | None) -> Layout:
    """Return the layout of the rows: the example's, or pairs with as many columns as the sampler takes."""
    if example is not None:
        return reservoirs.layout_of(example)
    inner = sampler
    while isinstance(inner, Wrapper):
        inner = inner.sampler
    columns = getattr(inner, "features", None)
    if columns is None:
        raise ValueError("rows can only be kept once their shapes are known: give `example=(X[:1], y[:1])`.")
    return reservoirs.pairs(columns)


@dataclass(frozen=True)
class Replay(Keeping):
    """Settings of `replay`."""

    steps: int

    @compiled
    def step(self, key: Key, state: Wrapped, batch: Batch) -> tuple[Wrapped, WrappedInfo]:
        """Learn from a batch, keep some of its rows, and learn from rows kept."""
        batch = cast(batch, state.particles.dtype)
        check_example(state.own.rows, batch.data)
        clock = tick(state, batch)
        inner, info = self.sampler.step(key, state.inner, batch)
        keep, drawing = reservoirs.keys(key)
        kept = reservoirs.offer(keep, state.own, batch, info.finite)
        mine, weight = jax.random.fold_in(drawing, clock.round), jnp.ones_like(batch.weight)

        def again(i: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            inner, finite = carry
            old = reservoirs.draw(jax.random.fold_in(mine, i), kept, len(weight))
            inner, told = self.sampler.step(key, inner, Batch(old, weight))
            return inner, finite & told.finite

        # A refused batch is neither kept nor followed by others.
        last = jnp.where(info.finite & (kept.seen > 0), self.steps, 1)
        inner, finite = jax.lax.fori_loop(1, last, again, (inner, info.finite))
        told = wrapped_info(info)._replace(rows=clock.rows, finite=finite)
        return Wrapped(inner, kept, clock.round, clock.rows), told


def replay(sampler: Sampler, example: Data, *, memory_rows: int = 1000, steps: int = 5) -> Replay:
    r"""Follow every batch by `steps - 1` batches of the same size, drawn from a reservoir of rows seen.

    The reservoir is a uniform sample of all rows so far (each enters with probability rows/seen, in place of a
    random one). It helps first-order samplers most. Under drift it holds them back, and a sampler that adds up
    what it has seen, such as `gauss_newton`, counts a replayed row again.

    Args:
        sampler: any sampler.
        example: at least one row, to know its shape.
        memory_rows: size of the reservoir.
        steps: the sampler's steps per round, including the one on new rows.
    """
    if memory_rows < 1 or steps < 1:
        raise ValueError(f"`memory_rows` and `steps` are {memory_rows} and {steps}, but each must be at least 1.")
    return Replay(sampler, memory_rows, reservoirs.layout_of(example), steps)
