r"""What a regressor does when the data jump: how probable that is, and what stays."""

import jax.numpy as jnp

from opvi.filters import _covariance as covariance
from opvi.tracking import _guard as guard
from opvi.tracking import _jumps as jumps
from opvi.tracking import _memory as memories
from opvi.tracking import _pace as pacing
from opvi.tracking import _process as processes
from opvi.tracking import _scaling as scaling
from opvi.tracking._calibration import Calibration
from opvi.tracking._regressor_types import Networks, RegressorState, prior_variance
from opvi.tracking._regressor_units import standardised
from opvi.tracking._scaling import SCALE_MEMORY, Moments, Scale
from opvi.types import Array, Scalar


def jump_odds(
    state: RegressorState,
    known: Calibration,
    recalled: memories.Recalled | None,
    found: guard.Believed,
    level: Array,
    weight: Array,
) -> tuple[Scalar, Scalar]:
    """Return the odds of a jump after some rows, 0 after an alarm, and its probability."""
    tested = jnp.where(known.rounds >= jumps.WARM_UP, weight, 0)
    if recalled is not None:  # errors in places where no row has been say nothing about a jump
        tested = jnp.where(recalled.extra[:, 1] < jumps.FAR, tested, 0)
    odds = jumps.after(state.odds, jumps.wider(level, tested), tested.sum())
    probability = jnp.where(found.jump, 1, jumps.probability(odds))
    return jnp.where(probability > jumps.ALARM, 0, odds), probability


def jumped(
    sampler: Networks, state: RegressorState, found: guard.Believed, rows: tuple[Array, ...], mean: Array, anew: Array
) -> RegressorState:
    """Return the state after a jump: y has a new level or new units, or the past is of no use; errors begin again.

    The networks stay the same in units of y: a sensor that was moved or replaced costs no more than its scale.
    With `anew`, they are reset to what they were before any row.
    """
    x, y, weight = rows
    moments, old, known = state.moments, state.scale, state.calibration
    shifted = scaling.with_last(old.mean, old.mean[-1] + found.shift * scaling.divisor(old)[-1])
    centre, square = shifted[-1] + found.ratio * (moments.mean[-1] - old.mean[-1]), moments.square[-1] * found.ratio**2
    fade = jnp.where(found.renew, jnp.minimum(1, guard.RENEWED / jnp.maximum(moments.seen, 1)), 1)
    there, size = scaling.with_last(moments.mean, centre), scaling.with_last(moments.square, square)
    moments = Moments(moments.seen * fade, there, size * fade)
    new = scaling.scale_of(scaling.update(moments, jnp.concatenate([x, y[:, None]], 1), weight, SCALE_MEMORY))
    scale = Scale(
        jnp.where(found.renew, scaling.with_last(shifted, new.mean[-1]), shifted),
        scaling.with_last(old.sd, jnp.where(found.renew, new.sd[-1], old.sd[-1] * found.ratio)),
    )
    target = standardised(state._replace(scale=scale), x, y)[1]
    squared = ((target[None] - mean) ** 2 * weight[None]).sum(1) / jnp.maximum(weight.sum(), 1e-30)
    prior = covariance.start(prior_variance(sampler, y)).matrices
    return state._replace(
        error=jnp.maximum(state.error, squared),
        calibration=known._replace(
            error=jnp.maximum(known.error, known.weights @ squared), rounds=jnp.minimum(known.rounds, 1)
        ),
        moments=moments,
        scale=scale,
        particles=jnp.where(anew, state.begin, state.particles),
        past=state.past._replace(matrices=jnp.where(found.renew | anew, prior, state.past.matrices)),
        memory=memories.emptied(state.memory, sampler.remembered),
        pace=pacing.without_trail(state.pace),
        process=processes.jumped(state.process, old, scale, found.known & ~anew),
    )
