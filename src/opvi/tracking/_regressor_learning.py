r"""How the regressor learns: Kalman updates of networks whose units follow the stream."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import compiled, pieces, root_mean_square, tick
from opvi.filters import _covariance as covariance
from opvi.filters import _kalman as kalman
from opvi.filters._covariance import Blocks, Covariance, when, within
from opvi.targets import MLP, Layer, cast
from opvi.tracking import _calibration as calibration
from opvi.tracking import _layers as layers
from opvi.tracking import _scaling as scaling
from opvi.tracking._calibration import USUAL_ROWS, Calibration
from opvi.tracking._scaling import Moments, Scale
from opvi.types import LARGEST_VALUE, Array, Batch, Key, Particles, Predicted, Scalar

LARGEST_GROWTH = 4.0  # forgetting never lets a variance exceed this many times the prior's
ERROR_ROUNDS = 20.0  # of the usual size, over which a particle's squared error is averaged
EARLY_CHUNK = 2  # rows learnt at once while warming up
CHUNK = 32  # and afterwards
LARGEST_SURPRISE = 5.0  # standard deviations; an outlier teaches no more than this
LARGEST_TARGET = 1e4  # standard deviations
SCALE_MEMORY = 50_000.0  # rows
SCALE_OFF = 0.25  # in deviations, or in their logarithm: the scale in use is out of date


class Settings(NamedTuple):
    """What sets one particle apart from another: a number for each particle."""

    kind: tuple[float, ...]  # of the activation: `layers.TANH`, `RELU` or `SINE`
    share: tuple[float, ...]  # the noise taken in learning, as a share of the particle's own squared error
    smallest: tuple[float, ...]  # and its floor
    bias: tuple[float, ...]  # prior variance of the hidden biases, relative to that of the weights
    forgetting: tuple[float, ...]  # the factor for every USUAL_ROWS rows


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


class RegressorInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array
    log_predictive: Scalar  # mean log predictive density of the batch, before learning from it
    squared_error: Scalar  # mean squared error of the predictions, before learning
    drift: Scalar
    finite: Array
    predicted: Predicted | None = None  # for each row, before learning


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

    @cached_property
    def network(self) -> MLP:
        """The layers of one particle."""
        return MLP((self.features, *self.hidden, 1), bias_spread=0.5)

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
    outputs = jax.vmap(lambda w, kind: layers.outputs(sampler.network, w, kind, z))
    mean, jacobian = outputs(state.particles, sampler.each("kind", z))
    J = jnp.moveaxis(sampler.blocks.gather(jacobian), 1, 2)
    JC = kalman.times(J, state.past)
    return Linearised(mean, jnp.maximum((JC * J).sum((1, 3)), 0), J, JC)


def absorb(
    sampler: Networks, state: RegressorState, seen: Linearised, target: Array, weight: Array, forgetting: Array
) -> RegressorState:
    """Return the state after one Kalman update of every particle, each with noise of its own."""
    R = jnp.maximum(sampler.each("share", target) * state.error, sampler.each("smallest", target))
    root = jnp.sqrt(weight[None] / R[:, None])
    A, AC = (rows * root[:, None, :, None] for rows in (seen.J, seen.JC))
    gain = kalman.gain(A, AC)
    move = kalman.move_by_residuals(gain, (target[None] - seen.mean) * root, LARGEST_SURPRISE)
    largest = LARGEST_GROWTH * prior_variance(sampler, target)
    done = kalman.absorb(state.past, gain, move, forgetting, largest)
    return state._replace(particles=state.particles + sampler.blocks.scatter(done.move), past=done.past)


# --- units that follow the stream ---------------------------------------------------------------


def standardised(scale: Scale, x: Array, y: Array) -> tuple[Array, Array]:
    """Return x and y in the units of the networks."""
    target = (y - scale.mean[-1]) / scaling.divisor(scale)[-1]
    z = scaling.standardise(Scale(scale.mean[:-1], scale.sd[:-1]), x)
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


def rescaled(sampler: Networks, state: RegressorState, always: Array) -> RegressorState:
    """Return the state on the scale of its moments, where the one in use is out of date."""
    new, old = scaling.scale_of(state.moments), state.scale
    moved = jnp.abs(new.mean - old.mean) > SCALE_OFF * scaling.divisor(old)
    grown = jnp.abs(jnp.log(scaling.divisor(new) / scaling.divisor(old))) > SCALE_OFF
    off = ((new.sd > 0) & (moved | grown | (old.sd == 0))).any()
    doubled = state.moments.seen >= 2 * state.scaled_at
    first = state.scaled_at == 0
    due = ~first & (always | off | doubled)
    scale = jax.tree.map(lambda a, b: jnp.where(first, a, b), new, old)
    state = state._replace(scale=scale, scaled_at=jnp.where(first, state.moments.seen, state.scaled_at))
    return when(due, lambda s: to_new_scale(sampler, s, new), state)


# --- a batch ------------------------------------------------------------------------------------


def _learn_errors(
    state: RegressorState, seen: Linearised, one: calibration.Combined, z: Array, target: Array, weight: Array
) -> RegressorState:
    """Return the state with what the errors of predictions teach, made before learning from the rows."""
    # The first batch meets particles that have seen nothing, on a scale that is not yet one: never scored.
    begun, rows = state.scaled_at > 0, weight.sum()
    scored = jnp.where(begun, weight, 0)
    known = calibration.learn(state.calibration, one, seen.mean, seen.variance, z, target, scored)
    gain = jnp.minimum(1, rows / USUAL_ROWS / jnp.minimum(1 + 0.5 * state.calibration.rounds, ERROR_ROUNDS))
    error = ((target[None] - seen.mean) ** 2 * weight[None]).sum(1) / jnp.maximum(rows, 1e-30)
    error = jnp.where(begun & (rows > 0), (1 - gain) * state.error + gain * error, state.error)
    return state._replace(calibration=known, error=error)


def _learn_pairs(
    sampler: Networks, state: RegressorState, x: Array, y: Array, weight: Array, forgetting: Array
) -> RegressorState:
    """Return the state after learning rows two by two, as long as they change much."""
    z, target = standardised(state.scale, x, y)
    (z, target), weight = pieces((z, target), weight, EARLY_CHUNK)
    each = forgetting ** (1 / len(weight))

    def pair(state: RegressorState, rows: tuple[Array, ...]) -> tuple[RegressorState, None]:
        z, target, weight = rows
        return absorb(sampler, state, linearise(sampler, state, z), target, weight, each), None

    return jax.lax.scan(pair, state, (z, target, weight))[0]


def _learn_chunk(
    sampler: Networks, state: RegressorState, chunk: tuple[Array, ...]
) -> tuple[RegressorState, tuple[Predicted, Scalar]]:
    """Predict some rows, then learn from them."""
    x, y, weight = chunk
    z, target = standardised(state.scale, x, y)
    seen = linearise(sampler, state, z)
    one = calibration.combine(state.calibration, seen.mean, seen.variance, z)
    unit, centre = scaling.divisor(state.scale)[-1], state.scale.mean[-1]
    predicted = Predicted(
        calibration.log_predictive(state.calibration, one, target) - jnp.log(unit),
        one.mean * unit + centre,
        calibration.level(state.calibration, one, target),
    )
    state = _learn_errors(state, seen, one, z, target, weight)
    moments = scaling.update(state.moments, jnp.concatenate([x, y[:, None]], 1), weight, SCALE_MEMORY)
    state = state._replace(moments=moments)
    forgetting = sampler.each("forgetting", target) ** (weight.sum() / USUAL_ROWS)
    # There is no scale before the first batch.
    early = (moments.seen <= sampler.warm_up) | (state.scaled_at == 0)
    before = state.particles
    late_weight, late_forgetting = jnp.where(early, 0, weight), jnp.where(early, 1, forgetting)
    learnt = rescaled(sampler, absorb(sampler, state, seen, target, late_weight, late_forgetting), early)
    state = when(early, lambda s: _learn_pairs(sampler, s, x, y, weight, forgetting), learnt)
    return state, (predicted, root_mean_square(state.particles - before))


def _cut(sampler: Networks, batch: Batch, dtype: jnp.dtype) -> tuple[tuple[Array, ...], Array, Array]:
    """Return the batch in chunks, its weights, and whether it is finite: a poisoned batch becomes an empty one."""
    x, y = _checked(sampler, batch)
    x, y = x.astype(dtype), y.astype(dtype)
    finite = (jnp.abs(x) <= LARGEST_VALUE).all() & (jnp.abs(y) <= LARGEST_VALUE).all()
    weight = jnp.where(finite, batch.weight, 0)
    x, y = jnp.where(finite, x, 0), jnp.where(finite, y, 0)
    (xs, ys), weights = pieces((x, y), weight, -(-len(y) // -(-len(y) // CHUNK)))
    return (xs, ys, weights), weight, finite


def _checked(sampler: Networks, batch: Batch) -> tuple[Array, Array]:
    """Return X and y, refused by their shapes."""
    rows, features = len(batch.weight), sampler.features
    try:
        x, y = batch.data
    except (TypeError, ValueError):
        raise ValueError("a regressor learns from batches `(X, y)`.") from None
    if x.shape != (rows, features) or y.shape != (rows,):
        raise ValueError(
            f"the batch holds X of shape {x.shape} and y of shape {y.shape}, but this regressor takes "
            f"({rows}, {features}) and ({rows},)."
        )
    return x, y


@compiled
def step(sampler: Networks, key: Key, state: RegressorState, batch: Batch) -> tuple[RegressorState, RegressorInfo]:
    """Predict a batch, and learn from it."""
    batch = cast(batch, state.particles.dtype)
    chunks, weight, finite = _cut(sampler, batch, state.particles.dtype)
    clock = tick(state, batch)
    if len(chunks[1]) == 1:
        state, (said, drift) = _learn_chunk(sampler, state, jax.tree.map(lambda leaf: leaf[0], chunks))
    else:
        state, (said, drift) = jax.lax.scan(lambda s, chunk: _learn_chunk(sampler, s, chunk), state, chunks)
    said = jax.tree.map(lambda leaf: jnp.where(finite, leaf.reshape(-1)[: len(weight)], jnp.nan), said)
    total = weight.sum()

    def mean(values: Array) -> Scalar:
        return jnp.where(total > 0, (values * weight).sum() / jnp.maximum(total, 1e-30), jnp.nan)

    squared = (batch.data[1].astype(weight.dtype) - said.mean) ** 2
    rows = jnp.where(finite, clock.rows, state.rows)
    info = RegressorInfo(rows, mean(said.log_density), mean(squared), drift.mean(), finite, said)
    return state._replace(round=clock.round, rows=rows), info


@compiled
def relearn(sampler: Networks, key: Key, state: RegressorState, batch: Batch) -> RegressorState:
    """Learn from rows seen before: they teach the parameters, and nothing else."""
    batch = cast(batch, state.particles.dtype)
    begun = state.scaled_at > 0
    batch = batch._replace(weight=jnp.where(begun, batch.weight, 0))

    def again(state: RegressorState, chunk: tuple[Array, ...]) -> tuple[RegressorState, None]:
        x, y, weight = chunk
        z, target = standardised(state.scale, x, y)
        forgetting = sampler.each("forgetting", z) ** (weight.sum() / USUAL_ROWS)
        return absorb(sampler, state, linearise(sampler, state, z), target, weight, forgetting), None

    return jax.lax.scan(again, state, _cut(sampler, batch, state.particles.dtype)[0])[0]


def start(sampler: Networks, w: Particles) -> RegressorState:
    """Return the state of networks with these weights before any row."""
    dtype, zero = w.dtype, jnp.zeros((), jnp.int32)
    moments = scaling.start(sampler.features + 1, dtype)
    return RegressorState(
        w,
        covariance.start(prior_variance(sampler, w)),
        jnp.ones(len(w), dtype),
        calibration.start(len(w), sampler.features, dtype),
        moments,
        scaling.scale_of(moments),
        jnp.zeros((), dtype),
        zero,
        zero,
    )
