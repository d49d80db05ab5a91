r"""Learning from some rows again: a bounded, uniform sample of the stream beside any sampler."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import check_example, compiled, tick
from opvi.targets import cast
from opvi.types import Algorithm, Array, Batch, Data, Key, Particles


class ReplayState(NamedTuple):
    """A sampler's state, and the rows it may see again."""

    inner: Any
    kept: Data  # leaves [rows, ...]
    filled: Array  # rows of them in use
    round: Array
    rows: Array

    @property
    def particles(self) -> Particles:
        """The sampler's."""
        return self.inner.particles


def replay(algorithm: Algorithm, example: Data, *, rows: int = 1000, steps: int = 5) -> Algorithm:
    r"""Every batch followed by `steps - 1` batches of the same size, drawn from a reservoir of rows seen.

    The reservoir is a uniform sample of all rows so far (each enters with probability rows/seen, in place of a
    random one). It helps first-order samplers most. Under drift it holds them back, and a sampler that adds up
    what it has seen, such as `gauss_newton`, counts a replayed row again.

    Args:
        algorithm: the sampler.
        example: data of at least one row, to know its shape.
        rows: size of the reservoir.
        steps: the sampler's steps a round, the one on new rows included.
    """
    if rows < 1 or steps < 1:
        raise ValueError(f"`rows` and `steps` are {rows} and {steps}, but each must be at least 1.")

    def init(key: Key, particles: Any) -> ReplayState:
        inner = algorithm.init(key, particles)
        dtype = inner.particles.dtype
        one = jax.tree.map(lambda a: jnp.asarray(a)[:1], cast(Batch(example, jnp.ones(1)), dtype).data)
        kept = jax.tree.map(lambda a: jnp.repeat(a, rows, 0), one)
        zero = jnp.zeros((), jnp.int32)
        return ReplayState(inner, kept, zero, zero, zero)

    def keep(key: Key, state: ReplayState, batch: Batch) -> tuple[Data, Array]:
        """The reservoir after this batch."""

        def one(i: Array, carry: tuple[Data, Array, Array]) -> tuple[Data, Array, Array]:
            kept, filled, seen = carry
            here = (batch.weight[i] > 0).astype(seen.dtype)
            place = jax.random.randint(jax.random.fold_in(key, i), (), 0, seen + 1)
            place = jnp.where(seen < rows, seen, place)
            place = jnp.where(here > 0, place, rows)  # past the end: dropped
            kept = jax.tree.map(lambda a, b: a.at[place].set(b[i], mode="drop"), kept, batch.data)
            return kept, jnp.minimum(filled + here, rows), seen + here

        kept, filled, _ = jax.lax.fori_loop(0, len(batch.weight), one, (state.kept, state.filled, state.rows))
        return kept, filled

    @compiled
    def step_(key: Key, state: ReplayState, batch: Batch) -> tuple[ReplayState, Any]:
        batch = cast(batch, state.particles.dtype)
        check_example(state.kept, batch.data)
        clock = tick(state, batch)
        mine = jax.random.fold_in(key, clock.round)
        inner, info = algorithm.step(key, state.inner, batch)
        kept, filled = keep(jax.random.fold_in(mine, 0), state, batch)
        weight = jnp.ones_like(batch.weight)

        def again(i: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            inner, finite = carry
            drawn = jax.random.randint(jax.random.fold_in(mine, i), weight.shape, 0, jnp.maximum(filled, 1))
            old = Batch(jax.tree.map(lambda a: a[drawn], kept), weight)
            inner, told = algorithm.step(key, inner, old)
            return inner, finite & told.finite

        # A refused batch is neither kept nor followed by others.
        kept, filled = jax.tree.map(
            lambda a, b: jnp.where(info.finite, a, b), (kept, filled), (state.kept, state.filled)
        )
        last = jnp.where(info.finite & (filled > 0), steps, 1)
        inner, finite = jax.lax.fori_loop(1, last, again, (inner, info.finite))
        info = info._replace(rows=clock.rows, finite=finite)
        return ReplayState(inner, kept, filled, clock.round, clock.rows), info

    return Algorithm(init, step_)
