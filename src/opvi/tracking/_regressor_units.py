r"""The units of a regressor's networks, which follow the stream."""

import jax
import jax.numpy as jnp

from opvi.filters._covariance import when
from opvi.tracking import _calibration as calibration
from opvi.tracking import _columns as columns
from opvi.tracking import _gates as gates
from opvi.tracking import _layers as layers
from opvi.tracking import _scaling as scaling
from opvi.tracking import _seats as seats
from opvi.tracking._regressor_types import Networks, RegressorState, first_doubt
from opvi.tracking._scaling import Scale
from opvi.types import Array, Tree

IN_UNITS = ("particles", "trail", "past", "error", "calibration", "gates", "scale", "scaled_at")  # parts of a state
LARGEST_TARGET = 1e4  # standard deviations
SCALE_OFF = 0.25  # in deviations, or in their logarithm: the scale in use is out of date
EARLY_SCALE_OFF = 0.03  # while warming up
SOON, SOON_SCALE_OFF = 2.5, 0.06  # and from then on until so many times as many rows


def standardised(state: RegressorState, x: Array, y: Array) -> tuple[Array, Array]:
    """Return x and y in the units of the networks, with useless columns faded."""
    scale = state.scale
    target = (y - scale.mean[-1]) / scaling.divisor(scale)[-1]
    z = gates.through(state.gates, scaling.readable(scaling.of_inputs(scale), x))
    return z, jnp.clip(target, -LARGEST_TARGET, LARGEST_TARGET)


def to_new_scale(
    sampler: Networks, state: RegressorState, scale: Scale, now: Array | None = None, awake: Array | bool = False
) -> RegressorState:
    """Return the same functions, errors and beliefs in new units.

    Args:
        sampler: the settings.
        state: in the old units.
        scale: the new one.
        now: current values of the columns.
        awake: whether columns that have faded get their full size back.
    """
    doubt = first_doubt(sampler, state) if sampler.hidden and now is not None else None
    units = layers.between(state.scale, scale, doubt, now)
    faded = jnp.ones_like(units.shift) if state.gates is None else state.gates.factor
    units = units._replace(shift=units.shift * faded * seats.spread(state.seats))  # of columns as the networks see them
    begins = (state.scale.sd == 0) & (scale.sd > 0) & (state.scaled_at >= scaling.TRUSTED_COUNT)
    width = sampler.network.shapes[0][1]
    seated = units._replace(
        ratio=seats.of(state.seats, units.ratio, width, 1), shift=seats.of(state.seats, units.shift, width, 0)
    )
    matrices = layers.covariances_in(sampler.network, sampler.blocks, seated, state.past.matrices)
    if state.gates is not None:
        # Weights become as small as the columns were; their variances do not, so that they can be learnt again.
        back = seats.of(state.seats, jnp.where(awake, faded, 1), width, 1)
        seated = seated._replace(ratio=seated.ratio * back)
        fresh = gates.start(len(faded), faded.dtype)
        state = state._replace(gates=jax.tree.map(lambda a, b: jnp.where(awake, a, b), fresh, state.gates))
    begins = seats.of(state.seats, begins[:-1], width, 0)
    express = jax.vmap(lambda w: layers.re_express(sampler.network, seated, w, begins))
    return state._replace(
        particles=express(state.particles),
        trail=None if state.trail is None else express(state.trail),
        past=state.past._replace(matrices=matrices),
        error=state.error * units.output_ratio**2,
        calibration=calibration.rescale(state.calibration, units.output_ratio),
        scale=scale,
        scaled_at=state.moments.seen,
    )


def rescaled(
    sampler: Networks,
    state: RegressorState,
    age: Array,
    may: Array,
    waits: Array,
    rows: tuple[Array, Array],
    anew: Array,
) -> tuple[RegressorState, Array]:
    """Return the state on the scale of its moments, if that is allowed and due, and whether it changed.

    While the first rows wait nothing has been learnt, and the scale is simply theirs. It follows smaller changes while
    few rows, the `age`, have been learnt. `rows` are the latest ones. With `anew`, most of the past is to be forgotten,
    and with it which columns did not help.
    """
    x, weight = rows
    now = (x * weight[:, None]).sum(0) / jnp.maximum(weight.sum(), 1e-30)
    new, old = scaling.scale_of(state.moments), state.scale
    later = jnp.where(age <= SOON * sampler.warm_up, SOON_SCALE_OFF, SCALE_OFF)
    tolerance = jnp.where(age <= sampler.warm_up, EARLY_SCALE_OFF, later)
    moved = jnp.abs(new.mean - old.mean) > tolerance * scaling.divisor(old)
    grown = jnp.abs(jnp.log(scaling.divisor(new) / scaling.divisor(old))) > tolerance
    off = ((new.sd > 0) & (moved | grown | (old.sd == 0))).any()
    doubled = state.moments.seen >= 2 * state.scaled_at
    due = may & (off | doubled) | anew
    scale = jax.tree.map(lambda a, b: jnp.where(waits, a, b), new, old)
    state = state._replace(scale=scale)

    def change(parts: dict[str, Tree]) -> dict[str, Tree]:
        changed = to_new_scale(sampler, state._replace(**parts), new, now, anew)
        return {name: getattr(changed, name) for name in parts}

    # Only what changes goes through the loop.
    return state._replace(**when(due, change, {name: getattr(state, name) for name in IN_UNITS})), due


def with_levels(state: RegressorState, odd: Array, x: Array, weight: Array) -> RegressorState:
    """Return the state with new levels for columns that have moved for good, or moved back; networks keep their shape.

    Args:
        state: the state before.
        odd: the shares of the last few rows that are far off, column by column.
        x: the latest rows.
        weight: the weights of values that are far off, `[B, F]`.
    """
    odd, shift = columns.moved(odd, state.scale.mean[:-1], x, weight)
    more = jnp.append(shift, 0)
    return state._replace(
        odd=odd,
        moments=state.moments._replace(mean=state.moments.mean + more),
        scale=state.scale._replace(mean=state.scale.mean + more),
    )
