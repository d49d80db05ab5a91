r"""The recommended online classifier: networks and linear models with long and short memory, mixed and calibrated."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import logsumexp

from opvi._steps import LARGEST_COUNT, compiled, made_once
from opvi.filters._kfac import KFACState, kfac
from opvi.filters._linear_ekf import LinearState, linear_ekf, predict_linear
from opvi.predictive import Categorical, Predictive
from opvi.targets import Target, cast, categorical, mlp
from opvi.tracking import _scaling as scaling
from opvi.tracking import _temperature as temperature
from opvi.tracking._bank import start as even_weights
from opvi.tracking._bank import update as reweigh
from opvi.tracking._layers import checked_widths
from opvi.types import Array, Batch, Key, Particles, Scalar, Tracker, shapes_of

ROWS = 20  # learnt from at once; larger batches are cut
LARGEST_WHOLE = 32  # rows of a batch that is not cut
HALF_LIVES = (30_000.0, 600.0)  # rows, where nobody says how fast to forget
WANDERING = (3e-2, 1e-3, 1e-4)  # of the linear filters
LINEAR_VARIANCE = 0.1  # of their weights, before any row
LINEAR_WORK = 1.25e6  # classes · parameters², up to which linear filters are affordable
LARGEST_INPUT = 2.5  # standard deviations; rare values of a feature would drown the others


class ClassifierState(NamedTuple):
    """What the next round needs, and nothing else."""

    moments: scaling.Moments
    networks: tuple[KFACState, ...]
    linear: LinearState | None
    log_weights: Array  # [K]: of the trackers
    exponents: temperature.Exponents  # of their mixture, and of each
    round: Array
    rows: Array

    @property
    def particles(self) -> Particles:
        """The networks' weights, `[n, d]`; those of the linear filters where there are no networks."""
        parts = [state.particles for state in self.networks or (self.linear,) if state is not None]
        return jnp.concatenate(parts)


class ClassifierInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array  # rows seen, this batch included
    log_predictive: Scalar  # mean log probability of the labels, before learning from them
    drift: Scalar  # root mean square of the networks' moves
    finite: Array  # False: rows were refused, or an update was not finite
    weights: Array  # [K]: of the trackers in the mixture, after the batch


@made_once
def classifier(
    features: int,
    classes: int,
    *,
    hidden: Sequence[int] = (100,),
    particles: int = 20,
    half_life: float | None = None,
    linear: bool | None = None,
) -> Tracker:
    r"""Classes from raw numbers, one pass, no settings: standardises, forgets and calibrates by itself.

    A bank of trackers learns side by side: networks with ReLU and tanh, each with a long memory and with a short
    one (`opvi.kfac`), and linear filters whose weights wander at several paces. Their mixture
    follows the prequential score (exponentiated gradient, fixed share), and so do exponents that sharpen it and
    extrapolate trends:

    $$\bar p = \sum_k w_k p_k, \qquad p(y) \propto \bar p(y)^{\beta_0} \prod_k p_k(y)^{\beta_k}$$

    Every component of the predictive is one particle, so that its uncertainty falls into an epistemic and an
    aleatoric part. A large batch is learnt 20 rows at a time.

    Args:
        features: columns of X, in any units.
        classes: labels are 0, 1, …, classes - 1.
        hidden: widths of the networks' hidden layers; `()` tracks linear models alone.
        particles: networks in all.
        half_life: in rows; None tracks with a long and a short memory and finds out; `math.inf` never forgets.
        linear: whether to track linear models too; None does so where they are cheap.
    """
    if features < 1 or classes < 2:
        raise ValueError(f"`features` and `classes` are {features} and {classes}; at least 1 and 2 are needed.")
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be greater than 0 rows, or None to find out.")
    hidden = checked_widths(hidden)
    if not hidden and linear is False:
        raise ValueError("`hidden` is () and `linear` is False, which leaves no model. Give `hidden=(100,)`, say.")
    relu = _network(features, classes, hidden, jax.nn.relu, math.sqrt(2))
    tanh = _network(features, classes, hidden, jnp.tanh, 1.0)
    # Measured on streams with and without drift, ReLU does best with the random walk and tanh with fading.
    if half_life is None:
        long, short = HALF_LIVES
        targets = [relu, tanh, relu, tanh]
        networks = [
            kfac(relu, half_life=long, wander=True),
            kfac(tanh),
            kfac(relu, half_life=0.75 * short, wander=True),
            kfac(tanh, half_life=short),
        ]
    else:
        targets = [relu, tanh]
        networks = [kfac(relu, half_life=half_life, wander=True), kfac(tanh, half_life=half_life)]
    if not hidden:
        targets, networks, linear = [], [], True
    groups = len(targets)
    if groups:
        _share(particles, groups)
    size = classes * (features + 1)
    with_linear = classes * size**2 <= LINEAR_WORK if linear is None else linear
    paces = WANDERING if half_life is None else (LINEAR_VARIANCE * (1 - 2 ** (-ROWS / half_life)),)
    filters = linear_ekf(features, classes, wandering=paces, prior_variance=LINEAR_VARIANCE) if with_linear else None
    trackers = groups + (len(paces) if filters else 0)

    def init(key: Key, count: Any = None) -> ClassifierState:
        each = _share(particles if count is None else count, groups) if groups else 0
        inner = tuple(net.init(jax.random.fold_in(key, i), each) for i, net in enumerate(networks))
        lines = None if filters is None else filters.init(key, None)
        dtype = (inner[0] if inner else lines).particles.dtype  # type: ignore[union-attr]
        zero = jnp.zeros((), jnp.int32)
        return ClassifierState(
            scaling.start(features, dtype),
            inner,
            lines,
            even_weights(trackers, dtype),
            temperature.start(1 + trackers, dtype),
            zero,
            zero,
        )

    def members(state: ClassifierState, z: Array) -> tuple[Array, Array]:
        """Log probabilities of every particle `[n, B, C]`, and of every tracker `[K, B, C]`, at scaled inputs."""
        lines = [] if state.linear is None else [predict_linear(state.linear, z, classes).log_probabilities()]
        if not state.networks:
            return lines[0], lines[0]
        nets = zip(targets, state.networks, strict=True)
        log_p = jnp.stack([_log_probabilities(target, net.particles, z) for target, net in nets])
        log_k = logsumexp(log_p, axis=1) - math.log(log_p.shape[1])
        log_p = log_p.reshape(-1, *log_p.shape[2:])
        return jnp.concatenate([log_p, *lines]), jnp.concatenate([log_k, *lines])

    def mixture(state: ClassifierState, log_k: Array) -> Array:
        return logsumexp(state.log_weights[:, None, None] + log_k, axis=0)

    def scaled(moments: scaling.Moments, x: Array) -> Array:
        return jnp.clip(scaling.standardise(scaling.scale_of(moments), x), -LARGEST_INPUT, LARGEST_INPUT)

    def learn_models(key: Key, state: ClassifierState, batch: Batch) -> tuple[Any, Any, list[Any]]:
        """The networks and the filters after a batch of scaled rows, and what they report."""
        done = [net.step(key, s, batch) for net, s in zip(networks, state.networks, strict=True)]
        lines, infos = state.linear, [info for _, info in done]
        if filters is not None:
            lines, info = filters.step(key, state.linear, batch)
            infos.append(info)
        return tuple(s for s, _ in done), lines, infos

    def learn(key: Key, state: ClassifierState, x: Array, y: Array, weight: Array) -> tuple[ClassifierState, Any]:
        """Predict, score, learn: at most 32 rows. A row that is not finite or has no class refuses them all."""
        valid = (jnp.isfinite(x).all(1) & (y >= 0) & (y < classes)) | (weight == 0)
        y = jnp.clip(y, 0, classes - 1)
        _, log_k = members(state, scaled(state.moments, x))
        both = jnp.concatenate([mixture(state, log_k)[None], log_k])
        log_density = _chosen(temperature.pool(state.exponents, both)[None], y)[0]
        moments = scaling.update(state.moments, x, weight)
        nets, lines, infos = learn_models(key, state, Batch((scaled(moments, x), y), weight))
        drift = jnp.sqrt(jnp.stack([info.drift**2 for info in infos[: groups or 1]]).mean())
        finite = jnp.stack([info.finite for info in infos]).all()
        log_weights = reweigh(state.log_weights, _chosen(log_k, y), weight)
        exponents = temperature.update(state.exponents, both, y, weight)
        new = ClassifierState(moments, nets, lines, log_weights, exponents, state.round, state.rows)
        good = valid.all() & jnp.isfinite(sum(m.sum() for m in moments)) & jnp.isfinite(log_weights).all()
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)
        total = jnp.where(good, weight.sum(), 0)
        return new, (jnp.where(good, (log_density * weight).sum(), 0), total, drift, good & finite)

    @compiled
    def step(key: Key, state: ClassifierState, batch: Batch) -> tuple[ClassifierState, ClassifierInfo]:
        batch = cast(batch, state.log_weights.dtype)
        x, y = _checked(batch, features)
        here = (batch.weight > 0).sum(dtype=jnp.int32)
        parts = _cut((x, y, batch.weight))
        if len(parts[2]) == 1:
            new, (log_density, total, drift, finite) = learn(key, state, *(part[0] for part in parts))
        else:

            def one(state: ClassifierState, part: Any) -> tuple[ClassifierState, Any]:
                nothing = jnp.zeros((), x.dtype)
                skipped = (nothing, nothing, nothing, jnp.array(True))
                rows = (part[2] > 0).any()
                return jax.lax.cond(rows, lambda s: learn(key, s, *part), lambda s: (s, skipped), state)

            new, (log_density, total, drift, finite) = jax.lax.scan(one, state, parts)
            drift = (drift * total).sum() / jnp.maximum(total.sum(), 1e-30)
            log_density, total, finite = log_density.sum(), total.sum(), finite.all()
        rows = state.rows + jnp.minimum(here, LARGEST_COUNT - state.rows)
        new = new._replace(round=optax.safe_increment(state.round), rows=rows)
        log_predictive = jnp.where(total > 0, log_density / jnp.maximum(total, 1e-30), jnp.nan)
        return new, ClassifierInfo(rows, log_predictive, drift, finite, jnp.exp(new.log_weights))

    @compiled
    def relearn(key: Key, state: ClassifierState, batch: Batch) -> ClassifierState:
        batch = cast(batch, state.log_weights.dtype)
        x, y = _checked(batch, features)

        def one(state: ClassifierState, part: Any) -> tuple[ClassifierState, None]:
            x, y, weight = part
            nets, lines, _ = learn_models(key, state, Batch((scaled(state.moments, x), y), weight))
            nets = tuple(new._replace(round=s.round, rows=s.rows) for new, s in zip(nets, state.networks, strict=True))
            return state._replace(networks=nets, linear=lines), None

        good = ((jnp.isfinite(x).all(1) & (y >= 0) & (y < classes)) | (batch.weight == 0)).all() & (state.rows > 0)
        new, _ = jax.lax.scan(one, state, _cut((x, jnp.clip(y, 0, classes - 1), batch.weight)))
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)

    @jax.jit
    def probabilities(state: ClassifierState, x: Array) -> tuple[Array, Array]:
        """Components and their log weights, which add up to the calibrated probabilities."""
        log_p, log_k = members(state, scaled(state.moments, x))
        log_mixture = mixture(state, log_k)
        log_final = temperature.pool(state.exponents, jnp.concatenate([log_mixture[None], log_k]))
        n = sum(len(net.particles) for net in state.networks) // max(groups, 1)
        own = jnp.concatenate(
            [jnp.repeat(state.log_weights[:groups] - math.log(max(n, 1)), n), state.log_weights[groups:]]
        )
        # Every component is moved by the same factor as the mixture; what it gains or loses in all is its weight.
        moved = log_p + (log_final - log_mixture)[None]
        size = logsumexp(moved, axis=-1)
        return moved - size[..., None], own[:, None] + size

    def predict(state: ClassifierState, x: Any) -> Predictive:
        x = jnp.asarray(x).astype(state.log_weights.dtype)
        if x.ndim != 2 or x.shape[1] != features:
            raise ValueError(f"X has shape {x.shape}, but this model takes {features} features: shape (B, {features}).")
        rows = len(x)
        room = 1 << max(rows - 1, 0).bit_length()  # ragged numbers of rows compile few times
        log_p, log_weights = probabilities(state, jnp.pad(x, ((0, room - rows), (0, 0))))
        return Predictive(Categorical(log_p[:, :rows]), log_weights[:, :rows])

    about = _about(features, classes, hidden, particles, half_life, len(paces) if filters else 0)
    return Tracker(init, step, predict, about, relearn)


def _share(particles: Any, groups: int) -> int:
    """Particles of each group."""
    if not isinstance(particles, int) or particles < groups or particles % groups:
        raise ValueError(f"`particles` is {particles!r}, but must be a multiple of {groups}: as many for each tracker.")
    return particles // groups


def _network(
    features: int, classes: int, hidden: Sequence[int], activation: Callable[[Array], Array], spread: float
) -> Target:
    """An MLP whose last layer starts with spread 1 whatever the activation."""
    return mlp(
        features,
        hidden,
        categorical(),
        outputs=classes,
        activation=activation,
        prior_variance=None,
        weight_spread=spread,
        output_spread=1.0,
    )


def _log_probabilities(target: Target, particles: Particles, z: Array) -> Array:
    """Of every particle, `[n, B, C]`; one after the other where all hidden units at once would take much memory."""

    def one(w: Array) -> Array:
        return target.predict(target.unravel(w), z).log_probabilities()  # type: ignore[misc, union-attr]

    return jax.lax.map(one, particles) if len(z) > 4096 else jax.vmap(one)(particles)


def _chosen(log_p: Array, y: Array) -> Array:
    """The log probabilities `[K, B]` of the labels."""
    return jnp.take_along_axis(log_p, jnp.broadcast_to(y[None, :, None], (*log_p.shape[:2], 1)), 2)[..., 0]


def _checked(batch: Batch, features: int) -> tuple[Array, Array]:
    """X and integer labels; a label that is no whole number becomes one that is no class."""
    if not isinstance(batch.data, tuple | list) or len(batch.data) != 2:
        raise ValueError(f"a batch has leaves of shape {shapes_of(batch.data)}, but must be a pair `(X, y)`.")
    x, y = batch.data
    rows = len(batch.weight)
    if x.shape != (rows, features) or y.shape != (rows,):
        raise ValueError(
            f"X and y have shapes {x.shape} and {y.shape}, but this model takes {features} features and one label a "
            f"row: ({rows}, {features}) and ({rows},)."
        )
    if jnp.issubdtype(y.dtype, jnp.floating):
        y = jnp.where(y == jnp.round(y), y, -1)
    return x, jnp.clip(y, -1, LARGEST_COUNT // 2).astype(jnp.int32)


def _cut(parts: Any) -> Any:
    """The rows in pieces `[m, rows, …]`: whole if few, else of 20, the last one padded with weight 0."""
    rows = len(parts[2])
    piece = rows if rows <= LARGEST_WHOLE else ROWS
    missing = -rows % piece

    def cut(a: Array) -> Array:
        a = jnp.concatenate([a, jnp.broadcast_to(a[:1], (missing, *a.shape[1:]))]) if missing else a
        return a.reshape(-1, piece, *a.shape[1:])

    x, y, weight = parts
    return cut(x), cut(y), jnp.pad(weight, (0, missing)).reshape(-1, piece)


def _about(
    features: int, classes: int, hidden: Sequence[int], particles: int, half_life: float | None, lines: int
) -> str:
    if not hidden:
        return (
            f"classifier: {lines} linear filter{'s' if lines > 1 else ''}, mixed and calibrated by prequential scores"
        )
    sizes = "-".join(str(size) for size in (features, *hidden, classes))
    memory = "with long and short memory" if half_life is None else f"half-life {half_life:g} rows"
    also = f" and {lines} linear filter{'s' if lines > 1 else ''}" if lines else ""
    return (
        f"classifier: {particles} networks {sizes} (ReLU and tanh, {memory}; Kronecker-factored Gauss–Newton){also}, "
        "mixed and calibrated by their prequential scores"
    )
