r"""The recommended online classifier: networks and linear models with long and short memory, mixed and calibrated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._forks import Unforked
from opvi._steps import LARGEST_COUNT, StepInfo, compiled, in_one_program, one_more, pieces
from opvi.filters import LinearState, kfac, linear_ekf
from opvi.filters._covariance import exactly
from opvi.filters._kfac import KFAC, KFACState, in_turn
from opvi.filters._linear_ekf import LinearEKF
from opvi.predictive import Categorical, Predictive
from opvi.targets import Target, as_particles, cast, categorical, mlp
from opvi.tracking import _class_memory as memories
from opvi.tracking import _class_mixture as mixture
from opvi.tracking import _temperature as temperature
from opvi.tracking._bank import start as even_weights
from opvi.tracking._bank import update as reweigh
from opvi.tracking._probabilities import chosen, of_networks, slopes
from opvi.tracking._wrappers import _columns as columns
from opvi.tracking._wrappers import _scaling as scaling
from opvi.tracking.experts import _nearest as neighbours
from opvi.tracking.experts._layers import checked_widths
from opvi.types import Array, ArrayLike, Batch, Key, Particles, Predicted, Scalar, Start, shapes_of

ROWS = 20  # learnt from at once; larger batches are cut
LARGEST_WHOLE = 32  # rows of a batch that is not cut
HALF_LIVES = (30_000.0, 600.0)  # rows, where nobody says how fast to forget
WANDERING = (3e-2, 1e-3, 1e-4)  # of the linear filters
LINEAR_VARIANCE = 0.1  # of their weights, before any row
WIDE = 64  # columns
FEW_COLUMNS, MANY_COLUMNS = (30, 4), (100, 20)  # up to that and above: width of the hidden layer, networks
LINEAR_WORK = 1.25e6  # classes · parameters², up to which linear filters are affordable


class ClassifierState(NamedTuple):
    """What the next round needs, and nothing else."""

    moments: scaling.Moments
    networks: tuple[KFACState, ...]
    linear: LinearState | None
    log_weights: Array  # [K]: of the trackers
    exponents: temperature.Exponents  # of their mixture, and of each
    round: Array
    rows: Array
    memory: memories.ClassMemory | None  # rows beside the networks
    first: Array  # [rows, F + 1]: the first rows and their weights: `_columns`
    odd: Array  # [F]: shares of the last few rows whose value is too far off to be one

    @property
    def particles(self) -> Particles:
        """The networks' weights, `[n, d]`; those of the linear filters if there are no networks."""
        parts = [state.particles for state in self.networks or (self.linear,) if state is not None]
        return jnp.concatenate(parts)


class ClassifierInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array  # rows seen, this batch included
    log_predictive: Scalar  # mean log probability of the labels, before learning from them
    drift: Scalar  # root mean square of the networks' moves
    finite: Array  # False: rows were refused, or an update was not finite
    weights: Array  # [K]: of the trackers in the mixture, after the batch
    predicted: Predicted | None  # for each row, before learning


@dataclass(frozen=True)
class Classifier(Unforked):
    """Settings of `classifier`."""

    features: int
    classes: int
    hidden: tuple[int, ...]
    particles: int
    half_life: float | None
    with_linear: bool
    memory_rows: int | None  # None: what `neighbours.kept` says

    @property
    def networks(self) -> tuple[KFAC, ...]:
        """The trackers of networks."""
        if not self.hidden:
            return ()
        # The last layer starts with spread 1 whatever the activation.
        make = partial(mlp, self.features, self.hidden, categorical(), outputs=self.classes, prior_variance=None)
        relu = make(activation=jax.nn.relu, weight_spread=math.sqrt(2), output_spread=1.0)
        tanh = make(activation=jnp.tanh)
        # Measured on streams with and without drift, ReLU does best with the random walk and tanh with fading.
        if self.half_life is not None:
            return kfac(relu, half_life=self.half_life, wander=True), kfac(tanh, half_life=self.half_life)
        long, short = HALF_LIVES
        return (
            kfac(relu, half_life=long, wander=True),
            kfac(tanh),
            kfac(relu, half_life=0.75 * short, wander=True),
            kfac(tanh, half_life=short),
        )

    @property
    def remembered(self) -> int:
        """How many rows are kept beside the networks."""
        return neighbours.kept(self.memory_rows, self.features, memories.FACTS, bool(self.hidden))

    @property
    def paces(self) -> tuple[float, ...]:
        """How fast the weights of each linear filter drift."""
        if not self.with_linear:
            return ()
        return WANDERING if self.half_life is None else (LINEAR_VARIANCE * (1 - 2 ** (-ROWS / self.half_life)),)

    @property
    def filters(self) -> LinearEKF | None:
        """The linear filters."""
        if not self.with_linear:
            return None
        return linear_ekf(self.features, self.classes, wandering=self.paces, prior_variance=LINEAR_VARIANCE)

    @in_one_program
    def init(self, key: Key, particles: Start = None) -> ClassifierState:
        """Return the state before any row."""
        networks, filters = self.networks, self.filters
        each = _share(self.particles if particles is None else particles, len(networks)) if networks else 0
        inner = tuple(net.init(key, start) for net, start in zip(networks, _starts(networks, key, each), strict=True))
        lines = None if filters is None else filters.init(key)
        dtype = (inner[0] if inner else lines).particles.dtype  # type: ignore[union-attr]
        kept, zero = self.remembered, jnp.zeros((), jnp.int32)
        trackers = len(networks) + len(self.paces) + (memories.MEMBERS if kept else 0)
        weights, exponents = even_weights(trackers, dtype), temperature.start(1 + trackers, dtype)
        memory = memories.start(kept, self.features, self.classes, dtype) if kept else None
        moments, first = scaling.start(self.features, dtype), columns.no_rows(LARGEST_WHOLE, self.features, dtype)
        odd = jnp.zeros(self.features, dtype)
        return ClassifierState(moments, inner, lines, weights, exponents, zero, zero, memory, first, odd)

    @compiled
    @exactly
    def step(self, key: Key, state: ClassifierState, batch: Batch) -> tuple[ClassifierState, ClassifierInfo]:
        """Predict a batch `(X, y)`, and learn from it."""
        parts, rows = cut_rows(self, state.log_weights.dtype, batch)
        here = (batch.weight > 0).sum(dtype=jnp.int32)
        if len(parts.weight) == 1:
            new, done = _learn(self, key, state, jax.tree.map(lambda leaf: leaf[0], parts))
            done = jax.tree.map(lambda leaf: leaf[None], done)
        else:

            def one(state: ClassifierState, part: Batch) -> tuple[ClassifierState, _Learnt]:
                learn = partial(_learn, self, key)
                return jax.lax.cond((part.weight > 0).any(), learn, partial(_skip, self), state, part)

            new, done = jax.lax.scan(one, state, parts)
        weight, total = done.weight, done.weight.sum()
        said = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:rows], done.predicted)
        log_density = jnp.where(weight > 0, done.predicted.log_density * weight, 0).sum()
        drift = (done.drift * weight.sum(1)).sum() / jnp.maximum(total, 1e-30)
        seen = state.rows + jnp.minimum(here, LARGEST_COUNT - state.rows)
        new = new._replace(round=one_more(state.round), rows=seen)
        log_predictive = jnp.where(total > 0, log_density / jnp.maximum(total, 1e-30), jnp.nan)
        return new, ClassifierInfo(seen, log_predictive, drift, done.finite.all(), jnp.exp(new.log_weights), said)

    @compiled
    @exactly
    def relearn(self, key: Key, state: ClassifierState, batch: Batch) -> ClassifierState:
        """Learn from rows seen before, which teach the models and nothing else."""
        parts, _ = cut_rows(self, state.log_weights.dtype, batch)
        (x, y), weight = parts

        def one(state: ClassifierState, part: Batch) -> tuple[ClassifierState, None]:
            (x, y), weight = part
            rows = Batch((mixture.scaled(state.moments, x), jnp.clip(y, 0, self.classes - 1)), weight)
            nets, lines, _ = _learn_models(self, key, state, rows)
            nets = tuple(new._replace(round=s.round, rows=s.rows) for new, s in zip(nets, state.networks, strict=True))
            return state._replace(networks=nets, linear=lines), None

        good = valid_rows(self, x.reshape(-1, x.shape[-1]), y.reshape(-1), weight.reshape(-1)) & (state.rows > 0)
        new, _ = jax.lax.scan(one, state, parts)
        return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)

    def predict(self, state: ClassifierState, x: ArrayLike) -> Predictive:
        """Return the posterior predictive at X."""
        x = jnp.asarray(x).astype(state.log_weights.dtype)
        if x.ndim != 2 or x.shape[1] != self.features:
            raise ValueError(f"X has rows of shape {x.shape[1:]}, but this model takes ({self.features},).")
        rows = len(x)
        room = 1 << max(rows - 1, 0).bit_length()  # ragged numbers of rows compile few times
        log_p, log_weights = _components(self, state, jnp.pad(x, ((0, room - rows), (0, 0))))
        return Predictive(Categorical(log_p[:, :rows]), log_weights[:, :rows])

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""
        lines = f"{len(self.paces)} linear filter{'s' if len(self.paces) > 1 else ''}"
        if not self.hidden:
            return f"classifier: {lines}, mixed and calibrated by prequential scores"
        sizes = "-".join(map(str, (self.features, *self.hidden, self.classes)))
        memory = "with long and short memory" if self.half_life is None else f"half-life {self.half_life:g} rows"
        kept = f", the nearest of {self.remembered:,} rows" if self.remembered else ""
        return (
            f"classifier: {self.particles} networks {sizes} (ReLU and tanh, {memory}; Kronecker-factored "
            f"Gauss–Newton){f' and {lines}' if self.paces else ''}{kept}, mixed and calibrated by their scores"
        )

    def __str__(self) -> str:
        return self.about


def classifier(
    features: int,
    classes: int,
    *,
    hidden: Sequence[int] | None = None,
    particles: int | None = None,
    half_life: float | None = None,
    linear: bool | None = None,
    memory_rows: int | None = None,
) -> Classifier:
    r"""Predict classes from raw numbers in one pass; it standardises, forgets and calibrates by itself.

    A bank of trackers learns in parallel: networks with ReLU and tanh, each with a long memory and with a short
    one (`opvi.kfac`), and linear filters whose weights drift at several rates. Their mixture
    follows the prequential score (exponentiated gradient, fixed share), and so do exponents that sharpen it and
    extrapolate trends:

    $$\bar p = \sum_k w_k p_k, \qquad p(y) \propto \bar p(y)^{\beta_0} \prod_k p_k(y)^{\beta_k}$$

    Every component of the predictive is one particle, so its uncertainty splits into an epistemic and an
    aleatoric part. A large batch is learnt 20 rows at a time.

    Args:
        features: columns of X, in any units.
        classes: labels are 0, 1, …, classes - 1.
        hidden: widths of the networks' hidden layers; `()` tracks linear models alone. If omitted, so many as suit the
            columns, as are `particles`: 4 networks of 30 units, or 20 of 100 for more than 64 columns.
        particles: the total number of networks.
        half_life: in rows; None tracks with long and short memory and learns which to trust; `math.inf` never forgets.
        linear: whether to track linear models too; None does so if they are cheap.
        memory_rows: rows kept beside the networks; the labels of the nearest and of the last ones are four more
            trackers. If omitted, as many as fit in 16 MB, at most 65,536, and none for linear models or for more than
            400 columns; 0 for none.
    """
    if features < 1 or classes < 2:
        raise ValueError(f"`features` and `classes` are {features} and {classes}; at least 1 and 2 are needed.")
    if half_life is not None and not half_life > 0:
        raise ValueError(
            f"`half_life` is {half_life}, but must be greater than 0 rows, or None to determine it online."
        )
    width, count = chosen_sizes(features)
    widths, particles = (
        (width,) if hidden is None else checked_widths(hidden),
        count if particles is None else particles,
    )
    if not widths and linear is False:
        raise ValueError("`hidden` is () and `linear` is False, which leaves no model. Give `hidden=(100,)`, say.")
    cheap = classes * (classes * (features + 1)) ** 2 <= LINEAR_WORK
    lines = not widths or (cheap if linear is None else linear)
    made = Classifier(features, classes, widths, particles, half_life, lines, neighbours.checked_rows(memory_rows))
    if widths:
        _share(particles, len(made.networks))
    return made


def chosen_sizes(features: int) -> tuple[int, int]:
    """Return the width of the hidden layer and the number of networks that suit so many columns."""
    return FEW_COLUMNS if features <= WIDE else MANY_COLUMNS


def _share(particles: Start, groups: int) -> int:
    """Return the number of particles of each group."""
    if not isinstance(particles, int) or particles < groups or particles % groups:
        raise ValueError(
            f"`particles` is {particles!r}, but must be a multiple of {groups}: the same number for each tracker."
        )
    return particles // groups


# --- predicting ---------------------------------------------------------------------------------


def _starts(networks: Sequence[KFAC], key: Key, each: Start) -> list[Start]:
    """Return the starting particles of every network; those of equal targets are drawn together."""
    found: dict[int, Start] = {}
    for target in dict.fromkeys(net.target for net in networks):
        alike = [i for i, net in enumerate(networks) if net.target == target]
        keys = jax.vmap(partial(jax.random.fold_in, key))(np.asarray(alike, np.uint32))
        drawn = jax.vmap(lambda one, target=target: as_particles(target, one, each))(keys)
        found |= {i: drawn[place] for place, i in enumerate(alike)}
    return [found[i] for i in range(len(networks))]


def _pairs(sampler: Classifier, state: ClassifierState) -> list[tuple[Target, Particles]]:
    """Return the networks' targets and particles."""
    return [(net.target, s.particles) for net, s in zip(sampler.networks, state.networks, strict=True)]


def _networks(sampler: Classifier, state: ClassifierState, z: Array) -> Array | None:
    """Return log probabilities of every network `[K, n, B, C]` at scaled inputs."""
    return of_networks(_pairs(sampler, state), z) if state.networks else None


@partial(jax.jit, static_argnums=0)
@exactly
def _components(sampler: Classifier, state: ClassifierState, x: Array) -> tuple[Array, Array]:
    """Return components and log weights that add up to the calibrated probabilities."""
    z = mixture.scaled(state.moments, x)
    return mixture.components(state, *mixture.members(sampler, state, z, _networks(sampler, state, z)))


# --- learning -----------------------------------------------------------------------------------


def _learn_models(
    sampler: Classifier, key: Key, state: ClassifierState, batch: Batch
) -> tuple[tuple[KFACState, ...], LinearState | None, list[StepInfo]]:
    """Return the networks and filters after a batch of scaled rows, and what they report."""
    done = in_turn(sampler.networks, key, state.networks, batch)
    lines, infos = state.linear, [info for _, info in done]
    if sampler.filters is not None and lines is not None:
        lines, info = sampler.filters.step(key, lines, batch)
        infos.append(info)
    return tuple(s for s, _ in done), lines, infos


class _Learnt(NamedTuple):
    """The result of learning some rows."""

    predicted: Predicted
    weight: Array  # of each row; 0 where they were refused
    drift: Scalar
    finite: Array


def _learn(sampler: Classifier, key: Key, state: ClassifierState, rows: Batch) -> tuple[ClassifierState, _Learnt]:
    """Predict, score and learn at most 32 rows. If one row is not finite or has no valid class, all are refused."""
    (x, y), weight = rows
    valid = valid_rows(sampler, x, y, weight)
    y, z = jnp.clip(y, 0, sampler.classes - 1), mixture.scaled(state.moments, x)
    _, log_k = mixture.members(sampler, state, z, _networks(sampler, state, z))
    memory = state.memory
    if memory is not None:
        there = jnp.where(valid, weight, 0)  # by weight: to choose between two memories would copy them
        memory = memories.learn(memory, x, y, there, slopes(_pairs(sampler, state), z, y), sampler.remembered)
    both = mixture.with_mixture(state, log_k)
    log_p = temperature.pool(state.exponents, both)
    moments, first, odd = columns.learn(state.moments, state.first, state.odd, x, weight)
    nets, lines, infos = _learn_models(sampler, key, state, Batch((mixture.scaled(moments, x), y), weight))
    drift = jnp.sqrt(jnp.stack([info.drift**2 for info in infos[: len(nets) or 1]]).mean())
    finite = jnp.stack([info.finite for info in infos]).all()
    log_weights = reweigh(state.log_weights, chosen(log_k, y), weight)
    exponents = temperature.update(state.exponents, both, y, weight)
    new = ClassifierState(moments, nets, lines, log_weights, exponents, state.round, state.rows, None, first, odd)
    good = valid & jnp.isfinite(sum(m.sum() for m in moments)) & jnp.isfinite(log_weights).all()
    old = state._replace(memory=None)
    new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)._replace(memory=memory)
    said = Predicted(chosen(log_p[None], y)[0], probabilities=jnp.exp(log_p))
    said = jax.tree.map(lambda leaf: jnp.where(good, leaf, jnp.nan), said)
    return new, _Learnt(said, jnp.where(good, weight, 0), drift, good & finite)


def _skip(sampler: Classifier, state: ClassifierState, rows: Batch) -> tuple[ClassifierState, _Learnt]:
    """Do nothing, for rows that are all padding."""
    weight = rows.weight
    p = jnp.full((len(weight), sampler.classes), jnp.nan, weight.dtype)
    said = Predicted(p[:, 0], probabilities=p)
    return state, _Learnt(said, jnp.zeros_like(weight), jnp.zeros((), weight.dtype), jnp.array(True))


def valid_rows(sampler: Classifier, x: Array, y: Array, weight: Array) -> Array:
    """Return whether every row is finite and has a valid class."""
    return ((jnp.isfinite(x).all(1) & (y >= 0) & (y < sampler.classes)) | (weight == 0)).all()


def cut_rows(sampler: Classifier, dtype: jnp.dtype, batch: Batch) -> tuple[Batch, int]:
    """Return the rows in pieces `[m, rows, …]`, one if they are few, otherwise of 20, and the number of rows.

    A label that is not a whole number becomes an invalid class.
    """
    batch = cast(batch, dtype)
    if not isinstance(batch.data, tuple | list) or len(batch.data) != 2:
        raise ValueError(f"a batch has leaves of shape {shapes_of(batch.data)}, but must be a pair `(X, y)`.")
    x, y = batch.data
    rows, features = len(batch.weight), sampler.features
    if x.shape != (rows, features) or y.shape != (rows,):
        raise ValueError(
            f"X and y have shapes {x.shape} and {y.shape}, but this model takes {features} features and one label per "
            f"row: ({rows}, {features}) and ({rows},)."
        )
    if jnp.issubdtype(y.dtype, jnp.floating):
        y = jnp.where(y == jnp.round(y), y, -1)
    y = jnp.clip(y, -1, LARGEST_COUNT // 2).astype(jnp.int32)
    return Batch(*pieces((x, y), batch.weight, rows if rows <= LARGEST_WHOLE else ROWS)), rows
