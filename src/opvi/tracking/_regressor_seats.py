r"""How columns of a regressor change seats, and how networks begin again once it is known which columns help."""

from typing import cast

import jax
import jax.numpy as jnp

from opvi.filters import _covariance as covariance
from opvi.filters._covariance import when
from opvi.tracking import _metric as metrics
from opvi.tracking import _pace as pacing
from opvi.tracking import _seats as seats
from opvi.tracking._calibration import USUAL_ROWS
from opvi.tracking._memory import Memory
from opvi.tracking._regressor_types import Networks, RegressorState, prior_variance
from opvi.tracking._seats import Seats
from opvi.types import Array

SAME = 0.9  # of the rows so far must be remembered, or networks do not begin again: there was a jump

# The state, what was said of each chunk, which one is next, which one to learn again or -1, and if it is of those kept.
Turn = tuple[RegressorState, Array, Array, Array, Array]


def reseated(sampler: Networks, state: RegressorState, own: Seats, factor: Array) -> RegressorState:
    """Return the state after a column that has faded lost its seat to one that helps, whose weights begin at 0."""
    chosen, changed = seats.moved(own, factor)
    leaves = jnp.repeat(changed, sampler.hidden[0])
    leaves = jnp.pad(leaves, (0, sampler.network.dim - len(leaves)))

    def move(own: tuple[Array, Array | None, Array]) -> tuple[Array, Array | None, Array]:
        particles, trail, matrices = own
        stays = jnp.where(leaves, jnp.zeros((), factor.dtype), 1)
        fresh = covariance.start(prior_variance(sampler, factor) * (1 - stays)[None, None]).matrices
        matrices = matrices * (stays[:, None] * stays[None])[None, None] + fresh
        return particles * stays[None], None if trail is None else trail * stays[None], matrices

    particles, trail, matrices = when(changed.any(), move, (state.particles, state.trail, state.past.matrices))
    past, new = state.past._replace(matrices=matrices), own._replace(chosen=chosen)
    return state._replace(particles=particles, trail=trail, past=past, seats=new)


def _begin_again(
    sampler: Networks, state: RegressorState, factor: Array, memory: Memory, may: Array
) -> tuple[RegressorState, Array]:
    """Return networks that have learnt nothing, if what is known of the columns has changed, and whether it has."""
    rows, own = state.moments.seen, cast("Seats", state.seats)
    due = may & seats.due(own, factor, rows) & (memory.seen.astype(rows.dtype) >= SAME * rows)

    prior = prior_variance(sampler, factor)
    matrices = when(due, lambda _: covariance.start(prior).matrices, state.past.matrices)
    new = state._replace(
        particles=jnp.where(due, state.begin, state.particles),
        past=state.past._replace(matrices=matrices),
        error=jnp.where(due, 1, state.error),
        seats=jax.tree.map(lambda a, b: jnp.where(due, a, b), seats.settled(own, factor, rows), own),
        memory=memory._replace(metric=metrics.begun_again(memory.metric, due)),
    )
    return new, due


def rows_again(state: RegressorState, chunk: Array, back: Array, old: Array) -> tuple[Array, Array | None]:
    """Return rows to learn, and how many rounds of rows remembered came before them, -1 if they are not such rows.

    Args:
        state: the state before.
        chunk: X, y and weights, unless rows remembered are being learnt again.
        back: the number of the chunk, if it has been learnt before, or -1.
        old: whether it is one of rows remembered.
    """
    memory, size = state.memory, len(chunk)
    if state.seats is None or memory is None:
        return chunk, None
    x, facts = (jax.lax.dynamic_slice_in_dim(a, back * size, size) for a in (memory.x, memory.facts))
    here = back * size + jnp.arange(size) < memory.seen
    rows = jnp.concatenate([x, facts[:, :1], jnp.where(here[:, None], facts[:, 3:4], 0)], 1)
    rounds = jnp.where(old, back.astype(x.dtype) * (size / USUAL_ROWS), -1)
    return jnp.where(old, rows, chunk), rounds


def after_rows(
    sampler: Networks, state: RegressorState, again: Array, old: Array, following: Array
) -> tuple[RegressorState, Array, Array, Array]:
    """Return the state after some rows, whether more of those remembered follow, and whether networks begin again.

    Args:
        sampler: the settings.
        state: the state after learning.
        again: whether the rows had been learnt before.
        old: whether they were rows remembered.
        following: the number of the row that follows, among these.
    """
    own, gates, memory = state.seats, state.gates, state.memory
    if own is None or gates is None or memory is None:
        return state, jnp.zeros((), bool), jnp.zeros((), bool), old
    more = old & (following < memory.seen)
    if state.pace is not None:  # nothing is known of how the new networks move
        last, fresh = old & ~more, state._replace(pace=pacing.without_trail(state.pace), trail=state.particles)
        pace, trail = (jnp.where(last, getattr(fresh, name), getattr(state, name)) for name in ("pace", "trail"))
        state = state._replace(pace=pace, trail=trail)
    state = reseated(sampler, state, own, gates.factor)
    may = ~again & (state.scaled_at > 0)
    state, due = _begin_again(sampler, state, gates.factor, memory, may)
    return state, more, due, more | due
