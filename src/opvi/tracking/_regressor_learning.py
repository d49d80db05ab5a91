r"""How the regressor learns: Kalman updates of networks whose units follow the stream."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import compiled, root_mean_square, tick
from opvi.filters import _covariance as covariance
from opvi.filters import _kalman as kalman
from opvi.filters._covariance import Blocks, Covariance, exactly, when, within
from opvi.targets import MLP, Layer, cast
from opvi.tracking import _calibration as calibration
from opvi.tracking import _chunks as chunks
from opvi.tracking import _gates as gates
from opvi.tracking import _guard as guard
from opvi.tracking import _layers as layers
from opvi.tracking import _memory as memories
from opvi.tracking import _neighbours as neighbours
from opvi.tracking import _scaling as scaling
from opvi.tracking._calibration import USUAL_ROWS, Calibration, Combined, Scored
from opvi.tracking._gates import Gates
from opvi.tracking._memory import Memory
from opvi.tracking._regressor_types import RegressorInfo, Settings
from opvi.tracking._scaling import Moments, Scale
from opvi.types import Array, Batch, Key, Particles, Predicted, Scalar

LARGEST_GROWTH = 4.0  # forgetting never lets a variance exceed this many times the prior's
ERROR_ROUNDS = 20.0  # of the usual size, over which a particle's squared error is averaged
PAIR = 5  # rows learnt at once; in so few steps as this, too, while warming up
LARGEST_SURPRISE = 5.0  # standard deviations; an outlier teaches no more than this
LARGEST_TARGET = 1e4  # standard deviations
SCALE_MEMORY = 50_000.0  # rows
SCALE_OFF = 0.25  # in deviations, or in their logarithm: the scale in use is out of date
EARLY_SCALE_OFF = 0.03  # while warming up
GATED_ABOVE = 12  # columns


class RegressorState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles  # [n, d]
    past: Covariance
    error: Array  # [n]: running squared error of each particle, y standardised
    calibration: Calibration
    moments: Moments  # of the columns of X, then y
    scale: Scale  # in use; it follows the moments, at first closely
    scaled_at: Scalar  # rows seen when it last did
    round: Array
    rows: Array
    gates: Gates | None = None  # of tables with many columns
    memory: Memory | None = None  # rows beside the networks
    surprised: Array | float = 0.0  # [2]: shares of the last few rows that were far above and far below


@dataclass(frozen=True)
class Networks:
    """The settings of `regressor`: networks that differ in `settings`, each with a covariance."""

    features: int
    hidden: tuple[int, ...]
    particles: int
    half_life: float | None
    warm_up: int
    budget: float
    settings: Settings
    # None: what `neighbours.kept` says; an older opvi had none.
    memory_rows: int | None = field(default=None, metadata={"off": 0})

    @cached_property
    def network(self) -> MLP:
        """The layers of one particle."""
        return MLP((self.features, *self.hidden, 1), bias_spread=0.5)

    @property
    def gated(self) -> bool:
        """Whether columns fade that do not help; a linear model's own shrinkage is exact."""
        return bool(self.hidden) and self.features > GATED_ABOVE

    @property
    def remembered(self) -> int:
        """How many rows are kept beside the networks."""
        return neighbours.kept(self.memory_rows, self.features, memories.FACTS, bool(self.hidden))

    @cached_property
    def blocks(self) -> Blocks:
        """How a particle's covariance is cut to fit the budget."""
        return within(*self.network.units, self.budget / 4 / self.particles)

    def each(self, name: str, like: Array) -> Array:
        """Return one of the settings as an array `[n]`."""
        return jnp.asarray(getattr(self.settings, name), like.dtype)


def prior_variance(sampler: Networks, like: Array) -> Array:
    """Return the prior variances `[n, K, D]`; 1 in the padding.

    They are 1/(inputs + 1), for hidden biases a multiple of that, and 1 for the last bias.
    """
    network, variances = sampler.network, sampler.network.prior_variances

    def one(bias: Scalar) -> Array:
        hidden = [Layer(jnp.full_like(bias, v.weights), bias * v.bias) for v in variances[:-1]]
        last = Layer(jnp.full_like(bias, variances[-1].weights), jnp.full_like(bias, variances[-1].bias))
        return network.join([*hidden, last])

    gathered = sampler.blocks.gather(jax.vmap(one)(sampler.each("bias", like)))
    return jnp.where(gathered > 0, gathered, 1)


# --- one Kalman update --------------------------------------------------------------------------


class Linearised(NamedTuple):
    """What every particle predicts, and how that depends on its weights."""

    mean: Array  # [n, B]
    variance: Array  # [n, B]: without noise
    J: Array  # [n, K, B, D]: the Jacobian, in blocks
    JC: Array  # and its product with the covariance


def linearise(sampler: Networks, state: RegressorState, z: Array) -> Linearised:
    """Return what the particles predict at standardised inputs z `[B, F]`."""
    return _linearised(sampler, state.particles, sampler.each("kind", z), state.past, z)


def _linearised(sampler: Networks, particles: Particles, kind: Array, past: Covariance, z: Array) -> Linearised:
    outputs = jax.vmap(lambda w, kind: layers.outputs(sampler.network, w, kind, z))
    mean, jacobian = outputs(particles, kind)
    J = jnp.moveaxis(sampler.blocks.gather(jacobian), 1, 2)
    JC = kalman.times(J, past)
    return Linearised(mean, jnp.maximum((JC * J).sum((1, 3)), 0), J, JC)


def predicted(sampler: Networks, state: RegressorState, z: Array) -> Combined:
    """Return one prediction from all particles, in their units."""
    means = jax.vmap(lambda w, kind: layers.outputs(sampler.network, w, kind, z)[0])
    few = calibration.trusted(state.calibration)
    past = state.past._replace(matrices=state.past.matrices[few])
    kind = sampler.each("kind", z)
    doubt = _linearised(sampler, state.particles[few], kind[few], past, z).variance
    known, mean = state.calibration, means(state.particles, kind)
    kept = sampler.remembered, sampler.half_life
    recalled = memories.recall(state.memory, state.scale, state.gates, z, known.error, *kept)
    return memories.combine(state.memory, recalled, known, mean, doubt, z)[1]


def absorb(
    sampler: Networks,
    state: RegressorState,
    seen: Linearised,
    rows: tuple[Array, Array, Array],
    forgetting: Array,
    renew: Array,
) -> RegressorState:
    """Return the state after a Kalman update of every particle, each with noise of its own.

    Args:
        sampler: the settings.
        state: before the rows.
        seen: what the particles predict for them.
        rows: standardised inputs `[B, F]` and targets, and weights.
        forgetting: a factor for each particle.
        renew: whether to linearise every pair of rows where the pairs before it have moved the particles.
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

    wide = Linearised(
        *(jnp.pad(a, ((0, 0), (0, fill))) for a in (seen.mean, seen.variance)),
        *(jnp.pad(a, ((0, 0), (0, 0), (0, fill), (0, 0))) for a in (seen.J, seen.JC)),
    )
    gain, move = kalman.in_turn(look(wide, target, root), again, renew, LARGEST_SURPRISE, size)
    largest = LARGEST_GROWTH * prior_variance(sampler, target)
    done = kalman.absorb(state.past, gain, move, forgetting, largest)
    return state._replace(particles=state.particles + sampler.blocks.scatter(done.move), past=done.past)


# --- units that follow the stream ---------------------------------------------------------------


def standardised(state: RegressorState, x: Array, y: Array) -> tuple[Array, Array]:
    """Return x and y in the units of the networks, columns that do not help faded."""
    scale = state.scale
    target = (y - scale.mean[-1]) / scaling.divisor(scale)[-1]
    z = gates.through(state.gates, scaling.standardise(Scale(scale.mean[:-1], scale.sd[:-1]), x))
    return z, jnp.clip(target, -LARGEST_TARGET, LARGEST_TARGET)


def to_new_scale(sampler: Networks, state: RegressorState, scale: Scale) -> RegressorState:
    """Return the same functions, errors and beliefs in new units."""
    units = layers.between(state.scale, scale)
    matrices = layers.covariances_in(sampler.network, sampler.blocks, units, state.past.matrices)
    return state._replace(
        particles=jax.vmap(lambda w: layers.re_express(sampler.network, units, w))(state.particles),
        past=state.past._replace(matrices=matrices),
        error=state.error * units.output_ratio**2,
        calibration=calibration.rescale(state.calibration, units.output_ratio),
        scale=scale,
        scaled_at=state.moments.seen,
    )


def rescaled(sampler: Networks, state: RegressorState, early: Array) -> tuple[RegressorState, Array]:
    """Return the state on the scale of its moments, where the one in use is out of date, and whether it was."""
    new, old = scaling.scale_of(state.moments), state.scale
    tolerance = jnp.where(early, EARLY_SCALE_OFF, SCALE_OFF)
    moved = jnp.abs(new.mean - old.mean) > tolerance * scaling.divisor(old)
    grown = jnp.abs(jnp.log(scaling.divisor(new) / scaling.divisor(old))) > tolerance
    off = ((new.sd > 0) & (moved | grown | (old.sd == 0))).any()
    doubled = state.moments.seen >= 2 * state.scaled_at
    first = state.scaled_at == 0
    due = ~first & (off | doubled)
    scale = jax.tree.map(lambda a, b: jnp.where(first, a, b), new, old)
    state = state._replace(scale=scale, scaled_at=jnp.where(first, state.moments.seen, state.scaled_at))
    return when(due, lambda s: to_new_scale(sampler, s, new), state), first | due


# --- a batch ------------------------------------------------------------------------------------


def _learn_errors(
    state: RegressorState, mean: Array, one: Combined, scores: Scored, chunk: tuple[Array, ...], trust: Array
) -> RegressorState:
    """Return the state with what the errors of predictions teach, made before learning from the rows."""
    z, target, weight = chunk
    weight = weight * trust
    # The first batch meets particles that have seen nothing, on a scale that is not yet one: never scored.
    begun, rows = state.scaled_at > 0, weight.sum()
    scored = jnp.where(begun, weight, 0)
    known = calibration.learn(state.calibration, one, scores, mean, z, target, scored)
    gain = jnp.minimum(1, rows / USUAL_ROWS / jnp.minimum(1 + 0.5 * state.calibration.rounds, ERROR_ROUNDS))
    # Not w but w²: w times the squared error would be c² however far the row is off.
    error = ((target[None] - mean) ** 2 * (weight * trust)[None]).sum(1) / jnp.maximum((weight * trust).sum(), 1e-30)
    error = jnp.where(begun & (rows > 0), (1 - gain) * state.error + gain * error, state.error)
    return state._replace(calibration=known, error=error)


def _jumped(
    sampler: Networks, state: RegressorState, found: guard.Believed, rows: tuple[Array, ...], mean: Array
) -> RegressorState:
    """Return the state after a jump: y has a new level, or a new scale and a past that is forgotten.

    The networks stay what they are in units of y: a sensor that was moved or replaced costs no more than its scale.
    """
    x, y, weight = rows
    moments, old, known = state.moments, state.scale, state.calibration
    shifted = old.mean.at[-1].add(found.shift * scaling.divisor(old)[-1])
    fade = jnp.where(found.renew, jnp.minimum(1, guard.RENEWED / jnp.maximum(moments.seen, 1)), 1)
    moments = Moments(moments.seen * fade, moments.mean.at[-1].add(shifted[-1] - old.mean[-1]), moments.square * fade)
    new = scaling.scale_of(scaling.update(moments, jnp.concatenate([x, y[:, None]], 1), weight, SCALE_MEMORY))
    fresh = Scale(shifted.at[-1].set(new.mean[-1]), old.sd.at[-1].set(new.sd[-1]))
    scale = jax.tree.map(lambda a, b: jnp.where(found.renew, a, b), fresh, Scale(shifted, old.sd))
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
        past=state.past._replace(matrices=jnp.where(found.renew, prior, state.past.matrices)),
        memory=None if state.memory is None else memories.start(sampler.remembered, sampler.features, y.dtype),
    )


def _slopes(sampler: Networks, state: RegressorState, z: Array) -> Array:
    r"""Return the gradients of the networks' prediction, $\partial \bar f / \partial z_j$: `[B, F]`."""

    def mean(z: Array) -> Array:
        each = jax.vmap(lambda w, kind: layers.output(sampler.network, w, kind, z))
        return (state.calibration.weights @ each(state.particles, sampler.each("kind", z))).sum()

    return jax.grad(mean)(z)


def _learn_chunk(
    sampler: Networks, state: RegressorState, chunk: tuple[Array, ...]
) -> tuple[RegressorState, tuple[Predicted, Scalar]]:
    """Predict some rows, then learn from them."""
    x, y, weight = chunk
    z, target = standardised(state, x, y)
    seen = linearise(sampler, state, z)
    doubt = seen.variance[calibration.trusted(state.calibration)]
    known, begun = state.calibration, state.scaled_at > 0
    kept = sampler.remembered, sampler.half_life
    recalled = memories.recall(state.memory, state.scale, state.gates, z, known.error, *kept)
    plain, one, depends = memories.combine(state.memory, recalled, known, seen.mean, doubt, z)
    unit, centre = scaling.divisor(state.scale)[-1], state.scale.mean[-1]
    scores = calibration.scored(state.calibration, one, target)
    predicted = Predicted(
        calibration.log_predictive(state.calibration, scores) - jnp.log(unit),
        one.mean * unit + centre,
        calibration.level(state.calibration, scores),
    )
    found = guard.believe(known, one, state.scale, state.surprised, (y, weight), begun)
    learnt = jnp.where(found.jump, 0, weight)  # errors of the time before a jump say nothing of those to come
    believed = learnt * found.trust
    if state.gates is not None or state.memory is not None:
        slope = _slopes(sampler, state, z)
        rows = memories.Rows(x, y, believed, target, plain.mean, slope)
        memory = memories.learn(state.memory, recalled, rows, state.scale, known.error, begun, sampler.remembered)
        state = state._replace(memory=memory)
    if state.gates is not None:
        scored = jnp.where(begun, believed, 0)
        state = state._replace(gates=gates.update(state.gates, z * slope, target - plain.mean, scored))
    state = _learn_errors(state, seen.mean, one, scores, (depends, target, learnt), found.trust)
    state = when(found.jump, lambda s: _jumped(sampler, s, found, chunk, seen.mean), state)
    state = state._replace(surprised=found.surprised)
    moments = scaling.update(state.moments, jnp.concatenate([x, found.y[:, None]], 1), weight, SCALE_MEMORY)
    state = state._replace(moments=moments)
    forgetting = sampler.each("forgetting", target) ** (weight.sum() / USUAL_ROWS)
    before = state.particles
    early = moments.seen <= sampler.warm_up
    state, renewed = rescaled(sampler, state, early)
    now = *standardised(state, x, y), weight * found.trust
    state = absorb(sampler, state, seen, now, forgetting, early | renewed | found.jump)
    return state, (predicted, root_mean_square(state.particles - before))


@compiled
@exactly
def step(sampler: Networks, key: Key, state: RegressorState, batch: Batch) -> tuple[RegressorState, RegressorInfo]:
    """Predict a batch, and learn from it."""
    batch = cast(batch, state.particles.dtype)
    cut, weight, finite = chunks.cut(sampler.features, batch, state.particles.dtype)
    clock = tick(state, batch)
    if len(cut[1]) == 1:
        state, (said, drift) = _learn_chunk(sampler, state, jax.tree.map(lambda leaf: leaf[0], cut))
    else:
        state, (said, drift) = jax.lax.scan(lambda s, chunk: _learn_chunk(sampler, s, chunk), state, cut)
    said = jax.tree.map(lambda leaf: jnp.where(finite, leaf.reshape(-1)[: len(weight)], jnp.nan), said)
    total = weight.sum()

    def mean(values: Array) -> Scalar:
        return jnp.where(total > 0, (values * weight).sum() / jnp.maximum(total, 1e-30), jnp.nan)

    squared = (batch.data[1].astype(weight.dtype) - said.mean) ** 2
    rows = jnp.where(finite, clock.rows, state.rows)
    info = RegressorInfo(rows, mean(said.log_density), mean(squared), drift.mean(), finite, said)
    return state._replace(round=clock.round, rows=rows), info


@compiled
@exactly
def relearn(sampler: Networks, key: Key, state: RegressorState, batch: Batch) -> RegressorState:
    """Learn from rows seen before: they teach the parameters, and nothing else."""
    batch = cast(batch, state.particles.dtype)
    begun = state.scaled_at > 0
    batch = batch._replace(weight=jnp.where(begun, batch.weight, 0))

    def again(state: RegressorState, chunk: tuple[Array, ...]) -> tuple[RegressorState, None]:
        x, y, weight = chunk
        z, target = standardised(state, x, y)
        forgetting = sampler.each("forgetting", z) ** (weight.sum() / USUAL_ROWS)
        seen = linearise(sampler, state, z)
        return absorb(sampler, state, seen, (z, target, weight), forgetting, jnp.array(False)), None

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
        memories.start(kept, sampler.features, dtype) if kept else None,
        jnp.zeros(2, dtype),
    )
