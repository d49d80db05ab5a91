r"""A tracker that learns from some of the rows again: a bounded, uniform sample of the stream."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import compiled
from opvi.targets import cast
from opvi.types import Array, Batch, Key, Particles, Tracker

AGAIN = 1.0  # rows learnt again for every new one


class RememberingState(NamedTuple):
    """A tracker's state, and the rows it may see again."""

    inner: Any
    x: Array  # [rows, F]
    y: Array  # [rows]
    filled: Array  # rows of them in use

    @property
    def particles(self) -> Particles:
        """The tracker's."""
        return self.inner.particles

    @property
    def round(self) -> Array:
        """The tracker's."""
        return self.inner.round

    @property
    def rows(self) -> Array:
        """The tracker's."""
        return self.inner.rows


def remembering(tracker: Tracker, features: int, rows: int, *, again: float = AGAIN) -> Tracker:
    r"""The tracker with a reservoir of rows, from which it learns again after every batch.

    The reservoir is a uniform sample of all rows so far: the s-th row enters with probability rows/s, in place of a
    random one. Rows learnt again teach the parameters only. Calibration, scaling and counts come from rows as they
    are first seen, because predictions of a row that was learnt before are better than those of a new one.

    Args:
        tracker: `opvi.regressor(...)` or `opvi.classifier(...)`.
        features: columns of X.
        rows: size of the reservoir.
        again: rows learnt again for every new one.
    """
    relearn = tracker.relearn
    if relearn is None:
        raise TypeError("this tracker has no `relearn`; rows can be kept for `opvi.regressor` and `opvi.classifier`.")
    if not isinstance(rows, int) or rows < 1 or not again > 0:
        raise ValueError(f"`rows` and `again` are {rows!r} and {again}, but at least 1 and more than 0 are needed.")

    def init(key: Key, particles: Any = None) -> RememberingState:
        inner = tracker.init(key, particles)
        x = jnp.zeros((rows, features), inner.particles.dtype)
        return RememberingState(inner, x, x[:, 0], jnp.zeros((), jnp.int32))

    def keep(key: Key, state: RememberingState, batch: Batch) -> RememberingState:
        here = batch.weight > 0
        before = state.rows + jnp.cumsum(here) - 1  # rows seen before each
        draw = jax.random.randint(key, here.shape, 0, jnp.maximum(before + 1, 1))
        place = jnp.where(before < rows, before, draw)
        place = jnp.where(here, place, rows)  # past the end: dropped
        x, y = batch.data
        return state._replace(
            x=state.x.at[place].set(x, mode="drop"),
            y=state.y.at[place].set(y.astype(state.y.dtype), mode="drop"),
            filled=jnp.minimum(state.rows + here.sum(dtype=jnp.int32), rows),
        )

    @compiled
    def step(key: Key, state: RememberingState, batch: Batch) -> tuple[RememberingState, Any]:
        batch = cast(batch, state.particles.dtype)
        mine = jax.random.fold_in(key, state.round)
        inner, info = tracker.step(key, state.inner, batch)
        count = max(1, round(again * len(batch.weight)))
        share = (batch.weight > 0).mean(dtype=batch.weight.dtype)  # a padded batch is followed by fewer
        drawn = jax.random.randint(jax.random.fold_in(mine, 0), (count,), 0, jnp.maximum(state.filled, 1))
        due = (state.filled > 0) & (jnp.arange(count, dtype=share.dtype) < share * count)
        weight = jnp.where(due, 1, 0).astype(batch.weight.dtype)
        weight = jnp.where(info.finite, weight, 0)  # a refused batch is neither kept nor followed by others
        old = Batch((state.x[drawn], state.y[drawn]), weight)
        kept = keep(jax.random.fold_in(mine, 1), state, batch)
        kept = jax.tree.map(lambda a, b: jnp.where(info.finite, a, b), kept, state)
        return kept._replace(inner=relearn(key, inner, old)), info

    def again_(key: Key, state: RememberingState, batch: Batch) -> RememberingState:
        return state._replace(inner=relearn(key, state.inner, batch))

    about = f"{tracker.about}; learns again from {rows:,} rows kept"
    return Tracker(init, step, lambda state, x: tracker.predict(state.inner, x), about, again_)
