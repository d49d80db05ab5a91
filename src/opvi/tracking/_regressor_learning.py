r"""How the regressor learns: Kalman updates of networks whose units follow the stream."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import compiled, root_mean_square, tick
from opvi.filters import _covariance as covariance
from opvi.filters import _kalman as kalman
from opvi.filters._covariance import Covariance, exactly, when
from opvi.targets import cast
from opvi.tracking import _calibration as calibration
from opvi.tracking import _chunks as chunks
from opvi.tracking import _gates as gates
from opvi.tracking import _guard as guard
from opvi.tracking import _jumps as jumps
from opvi.tracking import _layers as layers
from opvi.tracking import _memory as memories
from opvi.tracking import _pace as pacing
from opvi.tracking import _process as processes
from opvi.tracking import _scaling as scaling
from opvi.tracking import _seats as seats
from opvi.tracking import _starting as starting
from opvi.tracking._calibration import USUAL_ROWS, Combined, Scored
from opvi.tracking._regressor_jumps import jump_odds, jumped
from opvi.tracking._regressor_seats import Turn, after_rows, rows_again
from opvi.tracking._regressor_types import Networks, RegressorInfo, RegressorState, prior_variance
from opvi.tracking._regressor_units import rescaled, standardised, with_levels
from opvi.tracking._scaling import SCALE_MEMORY
from opvi.types import Array, Batch, Key, Particles, Predicted, Scalar

LARGEST_GROWTH = 4.0  # forgetting never lets a variance exceed this many times the prior's
ERROR_ROUNDS = 20.0  # of the usual size, over which a particle's squared error is averaged
PAIR = 5  # rows learnt at once; in so few steps as this, too, while warming up
LARGEST_SURPRISE = 5.0  # standard deviations; an outlier teaches no more than this
PARTIAL = 0.1  # what a row weighs in which values are missing


# --- one Kalman update --------------------------------------------------------------------------


class Linearised(NamedTuple):
    """What every particle predicts, and how that depends on its weights."""

    mean: Array  # [n, B]
    variance: Array  # [n, B]: without noise
    J: Array  # [n, K, B, D]: the Jacobian, in blocks
    JC: Array  # and its product with the covariance
    first: Array  # [n, B, units]: the slopes at the first layer's sums


def linearise(sampler: Networks, state: RegressorState, z: Array) -> Linearised:
    """Return what the particles predict at standardised inputs z `[B, F]`."""
    return _linearised(sampler, state.particles, sampler.each("kind", z), state.past, sampler.seen(state.seats, z))


def _linearised(
    sampler: Networks, particles: Particles, kind: Array, past: Covariance, z: Array | seats.Seen
) -> Linearised:
    outputs = jax.vmap(lambda w, kind: layers.outputs(sampler.network, w, kind, z))
    mean, jacobian = outputs(particles, kind)
    J = jnp.moveaxis(sampler.blocks.gather(jacobian), 1, 2)
    JC = kalman.times(J, past)
    inputs, width = sampler.network.shapes[0]
    first = jacobian[:, :, inputs * width : (inputs + 1) * width]  # in its biases
    return Linearised(mean, jnp.maximum((JC * J).sum((1, 3)), 0), J, JC, first)


def means(sampler: Networks, particles: Particles, z: Array, sees: seats.Seats | None) -> Array:
    """Return what each particle predicts at standardised inputs z, `[n, B]`; units see columns by their seats."""
    x = sampler.seen(sees, z)
    each = jax.vmap(lambda w, kind: layers.outputs(sampler.network, w, kind, x)[0])
    return each(particles, sampler.each("kind", z))


def predicted(sampler: Networks, state: RegressorState, z: Array, x: Array) -> Combined:
    """Return one prediction from all particles, in their units; x are the inputs z as they came."""
    few = calibration.trusted(state.calibration)
    past = state.past._replace(matrices=state.past.matrices[few])
    kind = sampler.each("kind", z)
    doubt = _linearised(sampler, state.particles[few], kind[few], past, sampler.seen(state.seats, z)).variance
    known, mean = state.calibration, means(sampler, state.particles, z, state.seats)
    kept = sampler.remembered, sampler.half_life
    recalled = memories.recall(state.memory, state.scale, state.gates, z, known.error, *kept, x)
    beside = processes.beside(state.process, state.scale, x)
    return memories.combine(state.memory, recalled, known, mean, doubt, gates.at_full_size(state.gates, z), beside)[1]


def absorb(
    sampler: Networks,
    state: RegressorState,
    seen: Linearised,
    rows: tuple[Array, Array, Array],
    forgetting: Array,
    renew: Array,
    moved: Array,
) -> RegressorState:
    """Return the state after a Kalman update of every particle, each with its own noise.

    Args:
        sampler: the settings.
        state: before the rows.
        seen: what the particles predict for them.
        rows: standardised inputs `[B, F]` and targets, and weights.
        forgetting: a factor for each particle.
        renew: whether to linearise every few rows at the particles as moved by those before.
        moved: whether the particles have changed since they were `seen`.
    """
    z, target, weight = rows
    size, fill = min(PAIR, len(weight)), -len(weight) % min(PAIR, len(weight))
    z, target, weight = (jnp.pad(a, [(0, fill), *[(0, 0)] * (a.ndim - 1)]) for a in (z, target, weight))
    R = jnp.maximum(sampler.each("share", target) * state.error, sampler.each("smallest", target))
    root = jnp.sqrt(weight[None] / R[:, None])

    def look(seen: Linearised, target: Array, root: Array) -> kalman.Look:
        A, AC = (rows * root[:, None, :, None] for rows in (seen.J, seen.JC))
        return kalman.Look(A, AC, (target[None] - seen.mean) * root)

    def again(p: Array, move: Array) -> kalman.Look:
        here = [jax.lax.dynamic_slice_in_dim(a, p * size, size, axis) for a, axis in ((z, 0), (target, 0), (root, 1))]
        moved = state._replace(particles=state.particles + sampler.blocks.scatter(move))
        return look(linearise(sampler, moved, here[0]), *here[1:])

    some = ((0, 0), (0, fill))
    wide = seen._replace(
        mean=jnp.pad(seen.mean, some),
        **{name: jnp.pad(getattr(seen, name), ((0, 0), *some, (0, 0))) for name in ("J", "JC")},
    )
    filled = jnp.max(jnp.where(weight > 0, jnp.arange(1, len(weight) + 1, dtype=jnp.int32), 0))
    gain, move = kalman.in_turn(look(wide, target, root), again, renew, moved, LARGEST_SURPRISE, size, filled)
    largest = LARGEST_GROWTH * prior_variance(sampler, target)
    done = kalman.absorb(state.past, gain, move, forgetting, largest)
    return state._replace(particles=state.particles + sampler.blocks.scatter(done.move), past=done.past)


# --- a batch ------------------------------------------------------------------------------------


def learn_errors(
    state: RegressorState,
    mean: Array,
    one: Combined,
    scores: Scored,
    chunk: tuple[Array, ...],
    trust: Array,
    begun: Array,
    before: Array | None = None,
) -> RegressorState:
    """Return the state after learning from the errors of predictions made before the rows were learnt.

    Particles that began again also learn the size of their errors, `before` rounds later if that is not -1.
    """
    z, target, weight = chunk
    weight = weight * trust
    rows, scored = weight.sum(), jnp.where(begun, weight, 0)
    known = calibration.learn(state.calibration, one, scores, mean, z, target, scored)
    # Not w but w²: w times the squared error would be c² however far the row is off.
    error = ((target[None] - mean) ** 2 * (weight * trust)[None]).sum(1) / jnp.maximum((weight * trust).sum(), 1e-30)
    rounds = state.calibration.rounds
    if before is not None:
        rounds, begun = jnp.where(before < 0, rounds, before), begun | (before >= 0)
    error = calibration.running(state.error, error, rounds, rows / USUAL_ROWS, ERROR_ROUNDS)
    error = jnp.where(begun & (rows > 0), jnp.maximum(error, 0), state.error)
    return state._replace(calibration=known, error=error)


def slopes(sampler: Networks, state: RegressorState, z: Array, first: Array) -> Array:
    r"""Return the gradients of the networks' prediction, $\partial \bar f / \partial z_j$: `[B, F]`.

    Without seats, they follow from those at the `first` layer's sums.
    """
    if not sampler.seats:
        inputs, width = sampler.network.shapes[0]
        weights = (
            state.particles[:, : inputs * width].reshape(-1, inputs, width) * state.calibration.weights[:, None, None]
        )
        return jnp.einsum("nbh,nfh->bf", first, weights)

    def mean(z: Array) -> Array:
        seen = sampler.seen(state.seats, z)
        each = jax.vmap(lambda w, kind: layers.output(sampler.network, w, kind, seen))
        return (state.calibration.weights @ each(state.particles, sampler.each("kind", z))).sum()

    return jax.grad(mean)(z)


def _learn_chunk(
    sampler: Networks, state: RegressorState, chunk: tuple[Array, ...], again: Array, before: Array | None
) -> tuple[RegressorState, Array]:
    """Predict some rows, then learn from them; the first rows only join those to be learnt `again`.

    Rows remembered, with which networks begin again, teach the networks alone; `before` counts the rounds of those
    before them, -1 for other rows.

    Besides the state, return log density, mean and level of each row, how far the particles moved, and the
    probability of a jump: `[B, 5]`.
    """
    x, y, weight = chunk
    # The first rows meet particles that have seen nothing, on a scale that is not yet one: never scored.
    begun = (state.scaled_at > 0) & ~again
    waits = ~begun & ~again & (weight > 0).any()
    first = starting.joined(jnp.asarray(state.held), chunk)
    state = state._replace(held=jnp.where(waits, first.held, state.held))
    weight = jnp.where(begun | again, weight, 0)
    missing = scaling.far(scaling.of_inputs(state.scale), x)
    odd = jnp.where(begun, guard.recent(state.odd, missing, weight), state.odd)
    weight = jnp.where(missing.any(1), PARTIAL * weight, weight)
    z, target = standardised(state, x, y)
    seen = linearise(sampler, state, z)
    doubt = seen.variance[calibration.trusted(state.calibration)]
    known = state.calibration
    kept = sampler.remembered, sampler.half_life
    recalled = memories.recall(state.memory, state.scale, state.gates, z, known.error, *kept, x)
    full = gates.at_full_size(state.gates, z)
    beside, own = processes.beside(state.process, state.scale, x), known.weights @ seen.mean
    plain, one, depends = memories.combine(state.memory, recalled, known, seen.mean, doubt, full, beside)
    unit, centre = scaling.divisor(state.scale)[-1], state.scale.mean[-1]
    scores = calibration.scored(state.calibration, one, target)
    density, level = calibration.log_predictive(known, scores) - jnp.log(unit), calibration.level(known, scores)
    found = guard.believe(known, one, state.scale, (state.surprised, state.recent), (y, weight), begun)
    learnt = jnp.where(found.jump, 0, weight)  # errors of the time before a jump say nothing of those to come
    believed = learnt * found.trust
    scored = jnp.where(begun, believed, 0)
    if state.gates is not None or state.memory is not None:
        slope = slopes(sampler, state, z, seen.first)
        noted = believed if before is None else jnp.where(before < 0, believed, 0)
        rows = memories.Rows(x, y, noted, target, plain.mean, slope)
        remembered = state.memory, recalled, rows, state.scale, known.error, begun
        state = state._replace(memory=memories.learn(*remembered, *kept))
    if state.gates is not None:
        seated, said = state.seats is not None, processes.vanished(state.process, gates.FEW)
        state = state._replace(gates=gates.update(state.gates, z, z * slope, target - own, scored, seated, said))
    state = learn_errors(state, seen.mean, one, scores, (depends, target, learnt), found.trust, begun, before)
    if state.pace is not None:
        move = own - known.weights @ means(sampler, state.trail, z, state.seats)
        state = state._replace(pace=pacing.learn(state.pace, target - own, move, scored, known.error))
    state = state._replace(process=processes.scored(state.process, beside, own, target, scored, known.error))
    odds, probability = jump_odds(state, known, recalled, found, level, scored)
    state, alarm = state._replace(odds=odds), probability > jumps.ALARM
    state = when(alarm | waits, lambda s: jumped(sampler, s, found, (x, y, weight), seen.mean, waits), state)
    state = with_levels(
        state._replace(surprised=found.surprised, recent=found.recent), odd, x, jnp.where(missing, weight[:, None], 0)
    )
    so_far, whole = state.moments.seen, jnp.where(missing, state.scale.mean[None, :-1], x)
    new = jnp.concatenate([whole, found.y[:, None]], 1), jnp.where(begun, weight, 0)
    old, new = starting.instead(waits, first, state.moments, new)
    moments = scaling.update(old, *new, SCALE_MEMORY)
    state = state._replace(moments=moments)
    forgetting = sampler.each("forgetting", target) ** (weight.sum() / USUAL_ROWS * pacing.faster(state.pace))
    anew = alarm & ~found.known & sampler.renews
    forgetting = jnp.where(anew, jnp.minimum(forgetting, jumps.KEPT), forgetting)
    age = moments.seen if before is None else jnp.where(before < 0, moments.seen, before * USUAL_ROWS)
    particles = state.particles
    # Units change as often, however the rows come; a count that has reached its memory stands still.
    turned = jnp.floor(moments.seen / USUAL_ROWS) > jnp.floor(so_far / USUAL_ROWS)
    turned |= moments.seen > SCALE_MEMORY - USUAL_ROWS
    state, renewed = rescaled(sampler, state, age, begun & turned, waits, (whole, weight), anew)
    now = *standardised(state, x, y), weight * found.trust
    renew = renewed | alarm | ((age <= sampler.warm_up) & (len(weight) > PAIR))  # few rows are all first
    state = _absorbed(sampler, state, seen, now, forgetting, renew, renewed | alarm)
    state = _with_rows(sampler, state, (x, found.y, now[2]), before)
    if state.pace is not None:
        state = state._replace(trail=pacing.follow(state.trail, state.particles, state.pace, scored.sum()))
    state = state._replace(scaled_at=jnp.where(waits & first.enough, moments.seen, state.scaled_at))
    told = root_mean_square(state.particles - particles), probability
    return state, jnp.stack([density, one.mean * unit + centre, level, *(jnp.full_like(y, one) for one in told)], 1)


def _absorbed(
    sampler: Networks,
    state: RegressorState,
    seen: Linearised,
    rows: tuple[Array, Array, Array],
    forgetting: Array,
    renew: Array,
    moved: Array,
) -> RegressorState:
    """Return the state whose networks have learnt the rows; rows that wait move nothing."""

    def learnt(parts: tuple[Particles, Covariance]) -> tuple[Particles, Covariance]:
        here = state._replace(particles=parts[0], past=parts[1])
        here = absorb(sampler, here, seen, rows, forgetting, renew, moved)
        return here.particles, here.past

    particles, past = when((rows[2] > 0).any(), learnt, (state.particles, state.past))
    return state._replace(particles=particles, past=past)


def _with_rows(
    sampler: Networks, state: RegressorState, rows: tuple[Array, Array, Array], before: Array | None
) -> RegressorState:
    """Return the state with rows in its process, unless networks that began again learnt them from memory."""
    x, y, weight = rows
    new = x, y, weight if before is None else jnp.where(before < 0, weight, 0)
    return state._replace(process=processes.learn(state.process, state.scale, new, sampler.half_life))


def _learn_all(
    sampler: Networks, state: RegressorState, cut: tuple[Array, ...]
) -> tuple[RegressorState, tuple[Predicted, Array]]:
    """Learn chunk after chunk; return the state, and for each what was predicted, how far particles moved, and P(jump).

    One loop serves the chunks of a batch and those of the first rows, which are learnt again with each that joins them:
    the learning code is compiled once.
    """
    x, y, weight = cut
    rows = jnp.concatenate([x, jnp.stack([y, weight], 2)], 2)
    count, size, _ = rows.shape

    def turn(carry: Turn) -> Turn:
        state, out, at, back, old = carry
        again = back >= 0
        chunk = jnp.where(again, starting.chunk(jnp.asarray(state.held), back, size), rows[at])
        chunk, before = rows_again(state, chunk, back, old)
        begins = ~again & (state.scaled_at == 0) & (chunk[:, -1] > 0).any()
        state, told = _learn_chunk(sampler, state, (chunk[:, :-2], chunk[:, -2], chunk[:, -1]), again, before)
        told = jnp.where(again & (jnp.arange(told.shape[1]) < 3), out[at], told)  # what was said before learning stays
        following = (back + 1) * size
        state, more, due, then = after_rows(sampler, state, again, old, following)
        more |= again & ~old & (following < starting.count(jnp.asarray(state.held)))
        back = jnp.where(begins | due, 0, jnp.where(more, back + 1, -1))
        out = jax.lax.dynamic_update_index_in_dim(out, told, at, 0)
        return state, out, jnp.where(back >= 0, at, at + 1), back, then

    out = jnp.zeros((count, size, 5), rows.dtype)
    begin = (state, out, jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32), jnp.zeros((), bool))
    state, out, *_ = jax.lax.while_loop(lambda carry: carry[2] < count, turn, begin)
    return state, (Predicted(*jnp.moveaxis(out[..., :3], 2, 0)), out[:, 0, 3:])


@compiled
@exactly
def step(sampler: Networks, key: Key, state: RegressorState, batch: Batch) -> tuple[RegressorState, RegressorInfo]:
    """Predict a batch, and learn from it."""
    batch = cast(batch, state.particles.dtype)
    cut, weight, finite = chunks.cut(sampler.features, batch, state.particles.dtype)
    clock = tick(state, batch)
    state, (said, told) = _learn_all(sampler, state, cut)
    said = jax.tree.map(lambda leaf: jnp.where(finite, leaf.reshape(-1)[: len(weight)], jnp.nan), said)
    total = weight.sum()

    def mean(values: Array) -> Scalar:
        return jnp.where(total > 0, (values * weight).sum() / jnp.maximum(total, 1e-30), jnp.nan)

    squared = (batch.data[1].astype(weight.dtype) - said.mean) ** 2
    rows = jnp.where(finite, clock.rows, state.rows)
    drift, probability = told[:, 0].mean(), told[:, 1].max()
    info = RegressorInfo(rows, mean(said.log_density), mean(squared), drift, finite, said, probability)
    return state._replace(round=clock.round, rows=rows), info


@compiled
@exactly
def relearn(sampler: Networks, key: Key, state: RegressorState, batch: Batch) -> RegressorState:
    """Learn from rows seen before, which teach the parameters and nothing else."""
    batch = cast(batch, state.particles.dtype)
    begun = state.scaled_at > 0
    batch = batch._replace(weight=jnp.where(begun, batch.weight, 0))

    def again(state: RegressorState, chunk: tuple[Array, ...]) -> tuple[RegressorState, None]:
        x, y, weight = chunk
        z, target = standardised(state, x, y)
        forgetting = sampler.each("forgetting", z) ** (weight.sum() / USUAL_ROWS * pacing.faster(state.pace))
        seen, no = linearise(sampler, state, z), jnp.array(False)
        return absorb(sampler, state, seen, (z, target, weight), forgetting, no, no), None

    return jax.lax.scan(again, state, chunks.cut(sampler.features, batch, state.particles.dtype)[0])[0]


def start(sampler: Networks, w: Particles) -> RegressorState:
    """Return the state of networks with these weights before any row."""
    dtype, zero = w.dtype, jnp.zeros((), jnp.int32)
    moments, kept = scaling.start(sampler.features + 1, dtype), sampler.remembered
    return RegressorState(
        w,
        covariance.start(prior_variance(sampler, w)),
        jnp.ones(len(w), dtype),
        calibration.start(len(w), sampler.features + (memories.EXTRA if kept else 0), dtype),
        moments,
        scaling.scale_of(moments),
        jnp.zeros((), dtype),
        zero,
        zero,
        gates.start(sampler.features, dtype) if sampler.gated else None,
        memories.start(kept, sampler.features, dtype, sampler.levels) if kept else None,
        jnp.zeros(2, dtype),
        starting.nothing(sampler.features, dtype),
        w,
        jnp.zeros(sampler.features, dtype),
        pacing.start(dtype) if sampler.half_life is None else None,
        w if sampler.half_life is None else None,
        jnp.zeros(6, dtype),
        jnp.zeros((), dtype),
        processes.start(sampler.features, dtype) if sampler.processed else None,
        seats.start(sampler.features, sampler.seats, dtype) if sampler.seats else None,
    )
