r"""The recommended regressor: Gauss–Newton particles on causally scaled data, stacked and calibrated online."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import compiled, made_once, root_mean_square, tick
from opvi.filters import _covariance as covariance
from opvi.filters._blocks import Blocks, within
from opvi.filters._covariance import Covariance, when
from opvi.predictive import Predictive
from opvi.targets import cast
from opvi.tracking import _calibration as calibration
from opvi.tracking import _layers as layers
from opvi.tracking import _scaling as scaling
from opvi.tracking._calibration import USUAL_ROWS, Calibration
from opvi.tracking._layers import Network
from opvi.tracking._scaling import Moments, Scale
from opvi.types import LARGEST_VALUE, Array, Batch, Key, Particles, Scalar, Tracker

LARGEST_GROWTH = 4.0  # forgetting never lets a variance exceed this many times the prior's
ERROR_ROUNDS = 20.0  # of the usual size, over which a particle's squared error is averaged
EARLY_ROWS = 1000  # until then rows are learnt in pairs, and the scale follows every batch
EARLY_CHUNK = 2
CHUNK = 32  # rows learnt at once afterwards
LARGEST_SURPRISE = 5.0  # standard deviations; an outlier teaches no more than this
SMALLEST_SURPRISE = 0.5  # a row's predictive variance over its noise: 1 or more, but for rounding
LARGEST_TARGET = 1e4  # standard deviations
SCALE_MEMORY = 50_000.0  # rows
SCALE_OFF = 0.25  # in deviations, or in their logarithm: the scale in use is out of date
PREDICT_ROWS = 256  # at once
MEMORY = 64e6  # bytes for all covariances


class Settings(NamedTuple):
    """What sets one particle apart from another, `[n]` each."""

    kind: np.ndarray  # of the activation: `layers.TANH`, `RELU` or `SINE`
    share: np.ndarray  # the noise taken in learning, as a share of the particle's own squared error
    smallest: np.ndarray  # and its floor
    bias: np.ndarray  # prior variance of the hidden biases, relative to that of the weights
    memory: np.ndarray  # forgetting for every USUAL_ROWS rows


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


def default_settings(particles: int = 20) -> Settings:
    """Five groups, {tanh, ReLU} × {bold, careful} and bold sine, each with memories from 1,400 to 7,000 rows."""
    bold, careful = (0.3, 0.01, 1.0), (0.05, 0.001, 8.0)
    groups = [(kind, *rest) for kind in (layers.TANH, layers.RELU) for rest in (bold, careful)]
    groups.append((layers.SINE, *bold))
    memories = (0.99, 0.99, 0.995, 0.998)
    rows = [(*group, memory) for memory in memories for group in groups]
    return Settings(*np.array([rows[i % len(rows)] for i in range(particles)], np.float32).T)


@made_once
def regressor(
    features: int,
    *,
    hidden: Sequence[int] = (50,),
    particles: int = 20,
    half_life: float | None = None,
    warm_up: int = EARLY_ROWS,
    memory: float = MEMORY,
    settings: Settings | None = None,
) -> Tracker:
    r"""An online regressor for raw data: nothing to scale, nothing to tune.

    Every particle is a network with a covariance C, and absorbs rows as an extended Kalman filter does:

    $$S = J C J^\top + R_i, \qquad w \gets w + C J^\top S^{-1} (y - f), \qquad
      C \gets (C - C J^\top S^{-1} J C) / \gamma_i$$

    with noise $R_i$ and forgetting $\gamma_i$ of its own. Inputs and outputs are standardised with the rows
    seen so far; weights and covariances follow when that scale moves. The predictive is a mixture of Student-t
    distributions around the weighted mean of the particles, its weights, noise, spread and tails learnt from
    predictions made before learning.

    Args:
        features: columns of X.
        hidden: width of each hidden layer; `()` for linear models.
        particles: how many networks; the groups of `default_settings` take turns.
        half_life: in rows; data older than that count half. None: the particles have memories of different
            length, and the weights find out which to trust.
        warm_up: so many rows at the start are learnt in pairs, on a scale that follows every batch: several times
            slower, and worth it while the model is far off.
        memory: bytes for all covariances. Where the full matrices do not fit they are cut into blocks.
        settings: what sets the particles apart, instead of `default_settings`.
    """
    hidden = layers.checked_widths(hidden)
    _check(features, particles, half_life, warm_up, memory)
    network = Network((features, *hidden, 1))
    chosen = default_settings(particles) if settings is None else settings
    if half_life is not None:
        chosen = chosen._replace(memory=np.full(particles, 0.5 ** (USUAL_ROWS / half_life), np.float32))
    blocks = within(*network.units, memory / 4 / particles)

    def prior(dtype: Any) -> Array:
        """The prior variances, [n, K, D]; 1 in the padding."""
        variance = jax.vmap(network.prior_variance)(jnp.asarray(chosen.bias, dtype))
        gathered = blocks.gather(variance)
        return jnp.where(gathered > 0, gathered, 1)

    def init(key: Key, particles_: Any = None) -> RegressorState:
        if particles_ is None or isinstance(particles_, int):
            if particles_ not in (None, particles):
                raise ValueError(
                    f"`particles` is {particles_}, but this tracker was made for {particles}: give the number to "
                    "`opvi.regressor(..., particles=...)`."
                )
            w = jax.vmap(lambda k: network.draw(k, float))(jax.random.split(key, particles))
        else:
            w = jnp.asarray(particles_)
            if w.shape != (particles, network.dim):
                raise ValueError(f"`particles` has shape {w.shape}, but this tracker's are {(particles, network.dim)}.")
        dtype, zero = w.dtype, jnp.zeros((), jnp.int32)
        moments = scaling.start(features + 1, dtype)
        return RegressorState(
            w,
            covariance.start(prior(dtype)),
            jnp.ones(particles, dtype),
            calibration.start(particles, features, dtype),
            moments,
            scaling.scale_of(moments),
            jnp.zeros((), dtype),
            zero,
            zero,
        )

    outputs = jax.vmap(network.outputs, (0, 0, None))

    def linearise(state: RegressorState, z: Array) -> tuple[Array, Array, Array, Array]:
        """Means [n, B], variances [n, B], the Jacobian in blocks [n, K, B, D] and its product with C."""
        mean, jacobian = outputs(state.particles, jnp.asarray(chosen.kind, z.dtype), z)
        J = jnp.moveaxis(blocks.gather(jacobian), 1, 2)
        JC = J @ state.past.matrices
        return mean, jnp.maximum((JC * J).sum((1, 3)), 0), J, JC

    def absorb(
        state: RegressorState, J: Array, JC: Array, residual: Array, weight: Array, memory: Array
    ) -> RegressorState:
        """One Kalman update of every particle."""
        dtype = residual.dtype
        R = jnp.maximum(jnp.asarray(chosen.share, dtype) * state.error, jnp.asarray(chosen.smallest, dtype))
        root_weight = jnp.sqrt(weight[None] / R[:, None])
        A, AC = J * root_weight[:, None, :, None], JC * root_weight[:, None, :, None]
        identity = jnp.eye(len(weight), dtype=dtype)[None]
        S = jnp.einsum("nkrd,nksd->nrs", AC, A) + identity
        root = jnp.linalg.cholesky(S)
        inverse = jax.scipy.linalg.solve_triangular(root, jnp.broadcast_to(identity, S.shape), lower=True)
        Z = jnp.einsum("nrs,nksd->nkrd", inverse, AC)
        limit = LARGEST_SURPRISE * jnp.sqrt(jnp.diagonal(S, axis1=1, axis2=2))
        surprise = jnp.einsum("nrs,ns->nr", inverse, jnp.clip(residual * root_weight, -limit, limit))
        move = blocks.scatter(jnp.einsum("nkrd,nr->nkd", Z, surprise))
        # A particle whose update is not finite sits it out, and forgets its correlations: they are the cause. So does
        # one that holds a negative variance for a prediction, which the update would make more negative still.
        sound = (jnp.diagonal(S, axis1=1, axis2=2) > SMALLEST_SURPRISE).all(1)
        good = sound & jnp.isfinite(move.sum(1) + (Z**2).sum((1, 2, 3)))
        move = jnp.where(good[:, None], move, 0)
        Z = jnp.where(good[:, None, None, None], Z, 0)
        past = covariance.shed(state.past, Z, jnp.where(good, memory, 1), LARGEST_GROWTH * prior(dtype))
        past = covariance.without_correlations(past, ~good)
        return state._replace(particles=state.particles + move, past=past)

    def to_new_scale(state: RegressorState, scale: Scale) -> RegressorState:
        """The same functions, errors and beliefs in new units."""
        units = layers.between(state.scale, scale)

        def rows_of(matrix: Array) -> Array:
            """The change, on every row of [n, K, D, D]."""
            if len(blocks.order) == 1:
                return jax.vmap(jax.vmap(jax.vmap(lambda v: layers.change(network, units, v))))(matrix)
            each = []
            for k, order in enumerate(blocks.order):
                wide = jnp.zeros((*matrix.shape[:1], matrix.shape[2], network.dim + 1), matrix.dtype)
                wide = wide.at[..., order].set(matrix[:, k])[..., :-1]
                wide = jax.vmap(jax.vmap(lambda v: layers.change(network, units, v)))(wide)
                each.append(jnp.concatenate([wide, jnp.zeros_like(wide[..., :1])], -1)[..., order])
            return jnp.stack(each, 1)

        matrices = rows_of(rows_of(state.past.matrices).mT)
        return state._replace(
            particles=jax.vmap(lambda w: layers.re_express(network, units, w))(state.particles),
            past=state.past._replace(matrices=matrices),
            error=state.error * units.output_ratio**2,
            calibration=calibration.rescale(state.calibration, units.output_ratio),
            scale=scale,
            scaled_at=state.moments.seen,
        )

    def rescaled(state: RegressorState, always: Array) -> RegressorState:
        """The state on the scale of its moments, where the one in use is out of date."""
        new, old = scaling.scale_of(state.moments), state.scale
        moved = jnp.abs(new.mean - old.mean) > SCALE_OFF * scaling.divisor(old)
        grown = jnp.abs(jnp.log(scaling.divisor(new) / scaling.divisor(old))) > SCALE_OFF
        off = ((new.sd > 0) & (moved | grown | (old.sd == 0))).any()
        doubled = state.moments.seen >= 2 * state.scaled_at
        first = state.scaled_at == 0
        due = ~first & (always | off | doubled)
        scale = jax.tree.map(lambda a, b: jnp.where(first, a, b), new, old)
        state = state._replace(scale=scale, scaled_at=jnp.where(first, state.moments.seen, state.scaled_at))
        return when(due, lambda s: to_new_scale(s, new), state)

    def standardised(scale: Scale, x: Array, y: Array) -> tuple[Array, Array]:
        target = (y - scale.mean[-1]) / scaling.divisor(scale)[-1]
        z = scaling.standardise(Scale(scale.mean[:-1], scale.sd[:-1]), x)
        return z, jnp.clip(target, -LARGEST_TARGET, LARGEST_TARGET)

    def learn_chunk(state: RegressorState, chunk: tuple[Array, ...]) -> tuple[RegressorState, Any]:
        """Predict some rows, then learn from them."""
        x, y, weight = chunk
        rows = weight.sum()
        share = rows / USUAL_ROWS
        dtype = state.particles.dtype
        z, target = standardised(state.scale, x, y)
        mean, variance, J, JC = linearise(state, z)
        one = calibration.combine(state.calibration, mean, variance, z)
        unit = jnp.log(scaling.divisor(state.scale)[-1])
        log_density = calibration.log_predictive(state.calibration, one, target) - unit
        squared = (target - one.mean) ** 2 * scaling.divisor(state.scale)[-1] ** 2
        # The first batch meets particles that have seen nothing, on a scale that is not yet one: never scored.
        begun = state.scaled_at > 0
        known = calibration.learn(state.calibration, one, mean, variance, z, target, jnp.where(begun, weight, 0))
        gain = jnp.minimum(1, share / jnp.minimum(1 + 0.5 * state.calibration.rounds, ERROR_ROUNDS))
        error = ((target[None] - mean) ** 2 * weight[None]).sum(1) / jnp.maximum(rows, 1e-30)
        error = jnp.where(begun & (rows > 0), (1 - gain) * state.error + gain * error, state.error)
        moments = scaling.update(state.moments, jnp.concatenate([x, y[:, None]], 1), weight, SCALE_MEMORY)
        state = state._replace(calibration=known, error=error, moments=moments)
        memory = jnp.asarray(chosen.memory, dtype) ** share

        early = (state.moments.seen <= warm_up) | (state.scaled_at == 0)  # there is no scale before the first batch

        def learn_pairs(state: RegressorState) -> RegressorState:
            z, target = standardised(state.scale, x, y)
            pieces = -(-len(y) // EARLY_CHUNK)

            def pair(state: RegressorState, piece: Any) -> tuple[RegressorState, None]:
                z, target, weight = piece
                mean, _, J, JC = linearise(state, z)
                return absorb(state, J, JC, target[None] - mean, weight, memory ** (1 / pieces)), None

            return jax.lax.scan(pair, state, _pieces((z, target, weight), EARLY_CHUNK))[0]

        before = state.particles
        late_weight, late_memory = jnp.where(early, 0, weight), jnp.where(early, 1, memory)
        learnt = absorb(state, J, JC, target[None] - mean, late_weight, late_memory)
        state = when(early, learn_pairs, rescaled(learnt, early))
        drift = root_mean_square(state.particles - before)
        return state, (log_density * weight, squared * weight, drift)

    def cut(batch: Batch, dtype: Any) -> tuple[tuple[Array, ...], Array, Array]:
        """The batch in chunks, its weights, and whether it is finite: a poisoned batch becomes an empty one."""
        x, y = _checked(batch, features, dtype)
        finite = (jnp.abs(x) <= LARGEST_VALUE).all() & (jnp.abs(y) <= LARGEST_VALUE).all()
        weight = jnp.where(finite, batch.weight, 0)
        x, y = jnp.where(finite, x, 0), jnp.where(finite, y, 0)
        return _pieces((x, y, weight), -(-len(y) // -(-len(y) // CHUNK))), weight, finite

    @compiled
    def step_(key: Key, state: RegressorState, batch: Batch) -> tuple[RegressorState, RegressorInfo]:
        batch = cast(batch, state.particles.dtype)
        chunks, weight, finite = cut(batch, state.particles.dtype)
        clock = tick(state, batch)
        if len(chunks[1]) == 1:
            state, out = learn_chunk(state, jax.tree.map(lambda leaf: leaf[0], chunks))
        else:
            state, out = jax.lax.scan(learn_chunk, state, chunks)
        log_density, squared, drift = out
        total = jnp.maximum(weight.sum(), 1e-30)
        info = RegressorInfo(clock.rows, log_density.sum() / total, squared.sum() / total, drift.mean(), finite)
        rows = jnp.where(finite, clock.rows, state.rows)
        return state._replace(round=clock.round, rows=rows), info

    def learn_again(state: RegressorState, chunk: tuple[Array, ...]) -> tuple[RegressorState, None]:
        x, y, weight = chunk
        z, target = standardised(state.scale, x, y)
        mean, _, J, JC = linearise(state, z)
        memory = jnp.asarray(chosen.memory, z.dtype) ** (weight.sum() / USUAL_ROWS)
        return absorb(state, J, JC, target[None] - mean, weight, memory), None

    @compiled
    def relearn(key: Key, state: RegressorState, batch: Batch) -> RegressorState:
        batch = cast(batch, state.particles.dtype)
        begun = state.scaled_at > 0
        batch = batch._replace(weight=jnp.where(begun, batch.weight, 0))
        return jax.lax.scan(learn_again, state, cut(batch, state.particles.dtype)[0])[0]

    @jax.jit
    def components(state: RegressorState, x: Array) -> Any:
        z, _ = standardised(state.scale, x, jnp.zeros(len(x), x.dtype))

        def some(z: Array) -> Any:
            mean, variance, *_ = linearise(state, z)
            return calibration.predictive(state.calibration, calibration.combine(state.calibration, mean, variance, z))

        pieces = _pieces((z,), min(PREDICT_ROWS, len(x)))[0]
        said = jax.lax.map(some, pieces)  # leaves [pieces, components, rows]
        said = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], -1)[:, : len(x)], said)
        unit, centre = scaling.divisor(state.scale)[-1], state.scale.mean[-1]
        return said._replace(
            mean=said.mean * unit + centre, variance=said.variance * unit**2, spread=said.spread * unit**2
        )

    def predict(state: RegressorState, x: Any) -> Predictive:
        x = jnp.asarray(x, state.particles.dtype)
        if x.ndim != 2 or x.shape[1] != features:
            raise ValueError(f"`x` has shape {x.shape}, but this regressor takes (rows, {features}).")
        rows = len(x)
        room = 1 << max(rows - 1, 0).bit_length()  # ragged numbers of rows compile few times
        said = components(state, jnp.pad(x, ((0, room - rows), (0, 0))))
        return Predictive(jax.tree.map(lambda leaf: leaf[:, :rows], said))

    return Tracker(init, step_, predict, _about(network, blocks, particles, half_life, memory), relearn)


def _pieces(arrays: tuple[Array, ...], size: int) -> tuple[Array, ...]:
    """Rows cut into pieces of one size; the last is filled up with rows that repeat row 0 and weigh 0.

    The weights must come last, where there are any.
    """
    rows = len(arrays[0])
    missing = -rows % size

    def cut(leaf: Array) -> Array:
        filler = jnp.broadcast_to(leaf[:1], (missing, *leaf.shape[1:]))
        return jnp.concatenate([leaf, filler]).reshape(-1, size, *leaf.shape[1:])

    *others, last = arrays
    if len(arrays) > 1:
        last = jnp.concatenate([last, jnp.zeros(missing, last.dtype)]).reshape(-1, size)
        return *(cut(leaf) for leaf in others), last
    return (cut(last),)


def _checked(batch: Batch, features: int, dtype: Any) -> tuple[Array, Array]:
    """X and y, refused by their shapes."""
    try:
        x, y = batch.data
    except (TypeError, ValueError):
        raise ValueError("a regressor learns from batches `(X, y)`.") from None
    if x.shape != (len(batch.weight), features) or y.shape != batch.weight.shape:
        raise ValueError(
            f"the batch holds X of shape {x.shape} and y of shape {y.shape}, but this regressor takes "
            f"({len(batch.weight)}, {features}) and ({len(batch.weight)},)."
        )
    return x.astype(dtype), y.astype(dtype)


def _check(features: int, particles: int, half_life: float | None, warm_up: int, memory: float) -> None:
    for name, value in (("features", features), ("particles", particles)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` is {value!r}, but must be a whole number of at least 1.")
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be a number of rows greater than 0, or None.")
    if not warm_up >= 0:
        raise ValueError(f"`warm_up` is {warm_up}, but must be a number of rows of at least 0.")
    if not memory > 0:
        raise ValueError(f"`memory` is {memory}, but must be a number of bytes greater than 0.")


def _about(network: Network, blocks: Blocks, particles: int, half_life: float | None, memory: float) -> str:
    count, size = blocks.order.shape
    used = particles * blocks.numbers * 4 / 1e6
    form = "full covariances" if count == 1 else f"covariances in {count} blocks of {size}"
    drift = "memories of 1,400 to 7,000 rows, weighted online" if half_life is None else f"half-life {half_life:g} rows"
    shape = "-".join(map(str, network.sizes))
    return (
        f"regressor: {particles} Gauss–Newton particles {shape} with {form} "
        f"({network.dim} parameters: {used:.0f} of {memory / 1e6:.0f} MB); {drift}"
    )
