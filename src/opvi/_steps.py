"""What all samplers share: counting rounds and rows, weighting the batch, and surviving a bad update."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.lax import optimization_barrier
from jax.scipy.special import logsumexp

from opvi._cpu import compiler_options
from opvi._forks import Unforked, refuse_forked
from opvi.posterior import Posterior
from opvi.predictive import Predictive, predict
from opvi.targets import Target, as_particles, score
from opvi.types import (
    Array,
    ArrayLike,
    Batch,
    Data,
    Key,
    LikelihoodScale,
    Particles,
    Predicted,
    Scalar,
    Schedule,
    Seed,
    Start,
    State,
    StoresRows,
    Tree,
    as_key,
    at_round,
    shapes_of,
)

Step = TypeVar("Step", bound=Callable[..., Tree])
Kept = TypeVar("Kept", bound=State)


def compiled(step: Step) -> Step:
    """Return the step as a compiled function that gives the same bits wherever it is called from.

    `step(sampler, key, state, batch)` is a sampler's method, or a function of a module; the sampler is static, so
    samplers with equal settings share their programs, and jit's own cache is the only one.

    XLA would inline it into a surrounding scan, drop what the caller does not use, fuse the rest differently and so
    round differently. On a CPU the inner call is marked as not to be inlined, and a barrier keeps all it returns:
    by hand, in a scan or in `run`, it is one program. On a GPU XLA fuses nothing inside such a call, which is six
    times slower there; barriers around the step isolate it, and `run` gives the same bits however it
    is cut.
    """
    inner = jax.jit(step, static_argnums=0)

    @functools.wraps(step)
    def outer(sampler: Hashable, *arrays: Tree) -> Tree:
        if jax.default_backend() == "cpu":
            first, *others = (leaves := jax.tree.flatten(inner(sampler, *arrays)))[0]
            marked = [set_xla_metadata(first, inlineable="false"), *others]  # which marks the call, once
            return optimization_barrier(jax.tree.unflatten(leaves[1], marked))
        return optimization_barrier(inner(sampler, *optimization_barrier(arrays)))

    usual = jax.jit(outer, static_argnums=0)

    @functools.cache
    def with_inner_loops() -> Callable[..., Tree]:
        options = compiler_options(False, inner_loops=True)  # asks JAX for its devices
        return jax.jit(outer, static_argnums=0, compiler_options=options)

    @functools.wraps(outer)
    def called(sampler: Hashable, *arrays: Tree, **named: Tree) -> Tree:
        refuse_forked()
        traced = any(map(isinstance, jax.tree.leaves((arrays, named)), itertools.repeat(jax.core.Tracer)))
        alone = isinstance(sampler, StoresRows) and not traced  # a program of others has options of its own
        return (with_inner_loops() if alone else usual)(sampler, *arrays, **named)

    return cast(Step, called)


Init = TypeVar("Init", bound=Callable[..., Tree])


def in_one_program(init: Init) -> Init:
    """Return a sampler's `init` compiled as a whole; op by op, starting a network takes sixty small programs."""
    program = jax.jit(init, static_argnums=(0, 2))

    @functools.wraps(init)
    def start(sampler: Hashable, key: Key, particles: Start = None) -> State:
        refuse_forked()
        if particles is None or isinstance(particles, int):
            return program(sampler, key, particles)
        return init(sampler, key, particles)

    return cast(Init, start)


LARGEST_COUNT = 2**31 - 1  # counters stop here instead of turning negative on an endless stream
LARGEST_BATCH = 2.0**30
NOT_THE_POSTERIOR = "not the posterior:"  # how `about` begins where a sampler approximates it, and how well is unknown
PARTICLES = 100  # drawn by a sampler of a target if nobody says how many


@dataclass(frozen=True)
class TargetSampler(Unforked):
    """What the samplers of a target share: how many particles they draw, and how these predict."""

    target: Target
    particles: int = field(default=PARTICLES, kw_only=True)  # drawn by `init` if it is not told otherwise
    about: str = field(default="", kw_only=True, compare=False)  # one line: what was chosen, and why

    def drawn(self, key: Key, particles: Start, *, at_least: int = 1) -> Particles:
        """Return the starting particles, `[n, d]`: those given, or as many as the settings say."""
        return as_particles(self.target, key, self.particles if particles is None else particles, at_least=at_least)

    def predict(self, state: State, x: Tree) -> Predictive:
        """Return the posterior predictive at inputs x, as `opvi.predict` does."""
        return predict(self.target, state.particles, x)

    def draws(self, state: State, key: Seed, n: int) -> Particles:
        """Return n draws from the posterior, `[n, d]`, or from what stands for it: the first time, that is said."""
        if self.about.startswith(NOT_THE_POSTERIOR):
            warn_that_it_is_not_the_posterior(self)
        return self._draws(state, as_key(key), checked_count(n))

    def _draws(self, state: State, key: Key, n: int) -> Particles:
        """Return n of the particles, each equally often."""
        return dealt(state.particles, key, n)

    def posterior(self, state: State, key: Seed = 0, n: int = 1000) -> Posterior:
        """Return n draws from the posterior by the names of the model's parameters; `.summary()` is a table of them.

        Args:
            state: where the sampler stands; before any row the posterior is the prior.
            key: a JAX key or an integer seed.
            n: how many draws.
        """
        return posterior_of(self, state, key, n)

    def __str__(self) -> str:
        return self.about or repr(self)


@functools.cache
def warn_that_it_is_not_the_posterior(sampler: TargetSampler) -> None:
    """Warn once per process for samplers of the same settings."""
    warnings.warn(
        f"these draws are {sampler.about}. How far they are from it is not known; `opvi.ibis(target)` stores rows and "
        "draws from the posterior, at a cost per row that grows with the parameters.",
        UserWarning,
        stacklevel=4,  # through `draws` and what guards it against forks
    )


def checked_count(n: int) -> int:
    """Return a number of draws; refuse it unless it is a whole number of at least 1."""
    if not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"`n` is {n!r}, but the number of draws must be a whole number of at least 1.")
    return int(n)


def dealt(particles: Particles, key: Key, n: int) -> Particles:
    """Return n of the particles in random order, each equally often, as far as n can be divided."""
    n = checked_count(n)
    order = jnp.concatenate(
        [jax.random.permutation(jax.random.fold_in(key, i), len(particles)) for i in range(-(-n // len(particles)))]
    )
    return particles[order[:n]]


def dealt_by_weight(particles: Particles, log_weights: Array, key: Key, n: int) -> Particles:
    """Return n of the particles in random order, each in proportion to its weight, up to rounding."""
    n = checked_count(n)
    at, order = jax.random.split(key)
    places = (jnp.arange(n, dtype=log_weights.dtype) + jax.random.uniform(at, (), log_weights.dtype)) / n
    share = jnp.cumsum(jax.nn.softmax(log_weights))
    which = jnp.searchsorted(share / share[-1], places).clip(0, len(particles) - 1)
    return particles[jax.random.permutation(order, which)]


def posterior_draws(sampler: object, state: State, key: Key, n: int) -> Particles:
    """Return n draws from what a sampler believes; for one without `draws`, its particles."""
    found = getattr(sampler, "draws", None)
    return dealt(state.particles, key, n) if found is None else found(state, key, n)


def posterior_of(sampler: object, state: State, key: Seed = 0, n: int = 1000) -> Posterior:
    """Return n named draws from what a sampler believes; of one without a single target, plain `weights`."""
    target = target_of(sampler)
    matrix = posterior_draws(sampler, state, as_key(key), n)
    named = {"weights": matrix} if target is None else target.constrain(matrix)
    axes = {} if target is None else target.axes
    draws = {name: np.asarray(values) for name, values in named.items()}
    return Posterior(draws, matrix, int(state.rows), int(state.round), str(sampler), axes)


def target_of(sampler: object) -> Target | None:
    """Return the target of a sampler or of the samplers it wraps or mixes; None if there is not exactly one."""
    found = getattr(sampler, "target", None)
    if isinstance(found, Target):
        return found
    inner = (sampler.sampler,) if hasattr(sampler, "sampler") else getattr(sampler, "members", ())
    targets = {target_of(one) for one in inner}
    return targets.pop() if len(targets) == 1 else None


class StepInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array  # rows seen, this batch included
    log_predictive: Scalar  # mean log predictive density of the batch, before learning from it
    drift: Scalar  # root mean square of the score, or of the move of second-order particles
    finite: Array  # False: an update was not finite, and what it would have moved stayed where it was
    predicted: Predicted | None = None  # for each row, before learning
    restarted: Array | None = None  # particles whose update was not finite, and which took another's place


class Clock(NamedTuple):
    """The position of a round in the stream, with t and both row counts in the particles' dtype."""

    round: Array  # int32, the new value of state.round
    rows: Array  # int32, the new value of state.rows
    t: Scalar
    batch_rows: Scalar
    seen_rows: Scalar


def one_more(count: Array) -> Array:
    """Return a count plus 1; the largest stays as it is."""
    return jnp.minimum(count, jnp.iinfo(count.dtype).max - 1) + 1


def tick(state: State, batch: Batch) -> Clock:
    """Count this round and its rows; a row of weight k counts as k rows, padding as none."""
    dtype = state.particles.dtype
    total = jnp.asarray(batch.weight).astype(dtype).sum()
    some = (batch.weight > 0).any().astype(jnp.int32)  # rows that weigh little are one row together
    here = jnp.maximum(jnp.minimum(jnp.round(total), LARGEST_BATCH).astype(jnp.int32), some)
    rows = state.rows + jnp.minimum(here, LARGEST_COUNT - state.rows)
    round_ = one_more(state.round)
    batch_rows = jnp.where(total > 0, total, 1)  # a batch of padding alone must not divide by 0
    return Clock(round_, rows, round_.astype(dtype), batch_rows, jnp.maximum(rows.astype(dtype), batch_rows))


class Layout(NamedTuple):
    """What a row looks like. Hashable, so that it may be one of a sampler's settings."""

    shapes: tuple[tuple[int, ...], ...]  # of the leaves, for one row
    dtypes: tuple[str, ...]
    structure: Tree  # jax's description of the pytree


def layout_of(example: Data) -> Layout:
    """Return the layout of data with a leading axis of rows."""
    leaves, structure = jax.tree.flatten(example)
    leaves = [leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for leaf in leaves]  # also where they are traced
    return Layout(tuple(leaf.shape[1:] for leaf in leaves), tuple(str(leaf.dtype) for leaf in leaves), structure)


def blank_rows(layout: Layout, rows: int, dtype: jnp.dtype) -> Data:
    """Return room for rows, all 0; floating-point leaves get the dtype given."""
    dtypes = [
        dtype if jnp.issubdtype(kind, jnp.floating) else jax.dtypes.canonicalize_dtype(kind) for kind in layout.dtypes
    ]
    leaves = [jnp.zeros((rows, *shape), kind) for shape, kind in zip(layout.shapes, dtypes, strict=True)]
    return jax.tree.unflatten(layout.structure, leaves)


def check_example(kept: Data, data: Data) -> None:
    """Refuse, from shapes alone, rows that do not fit the layout a sampler was made for."""

    def row(tree: Tree) -> list[tuple[int, ...]]:
        return [leaf.shape[1:] for leaf in jax.tree.leaves(tree)]

    structures: list[Tree] = [jax.tree.structure(tree) for tree in (kept, data)]  # jax does not export the type
    if structures[0] != structures[1] or row(kept) != row(data):
        raise ValueError(
            f"a batch has leaves of shape {shapes_of(data)}, but the `example` given has rows of shape {row(kept)}. "
            "Make the sampler with an example of the stream's own rows, e.g. `example=(X[:1], y[:1])`."
        )


def pieces(arrays: Tree, weight: Array, size: int) -> tuple[Tree, Array]:
    """Cut rows into pieces: leaves `[m, size, …]` and weights `[m, size]`. Padding repeats row 0 with weight 0."""
    missing = -len(weight) % size

    def cut(leaf: Array) -> Array:
        filler = jnp.broadcast_to(leaf[:1], (missing, *leaf.shape[1:]))
        return jnp.concatenate([leaf, filler]).reshape(-1, size, *leaf.shape[1:])

    return jax.tree.map(cut, arrays), jnp.pad(weight, (0, missing)).reshape(-1, size)


class Weighed(NamedTuple):
    """The score that drives a round, and how well the batch was predicted before learning from it."""

    scores: Array  # [n, d]
    log_predictive: Scalar
    predicted: Predicted


def weigh(
    target: Target, particles: Particles, batch: Batch, clock: Clock, scale: LikelihoodScale, prior_weight: Schedule
) -> Weighed:
    r"""Return the score $s = \kappa_t \nabla \ell_t(x) + \eta_t \nabla \log p_0(x)$ and what was predicted."""
    scored = score(target, particles, batch)
    kappa = scale(clock.batch_rows, clock.seen_rows)
    eta = at_round(prior_weight, clock.t)
    scores = kappa * scored.likelihood + eta * scored.prior
    return Weighed(scores, *predicted_rows(batch, scored.log_likelihood))


def row_densities(log_likelihood: Array, log_weights: Array | None = None) -> Array:
    """Return the log predictive density of each row, from each particle's `[n, B]`, weighted or equally weighted.

    Particles that give NaN do not count; the result is NaN for all rows if no particle is left.
    """
    # Asked for by name: XLA's fused exponential on a CPU can turn a NaN into a number.
    sound = ~jnp.isnan(log_likelihood).any(1)
    weights = jnp.zeros(len(sound), log_likelihood.dtype) if log_weights is None else log_weights
    weights = jnp.where(sound, weights, -jnp.inf)
    rows = logsumexp(jnp.where(sound[:, None], log_likelihood + weights[:, None], -jnp.inf), axis=0)
    rows = rows - logsumexp(jnp.where(sound.any(), weights, 0))
    return jnp.where(sound.any(), rows, jnp.nan)


def predicted_rows(batch: Batch, log_likelihood: Array, log_weights: Array | None = None) -> tuple[Scalar, Predicted]:
    """Return the mean log predictive density of a batch, and `row_densities` as what was predicted for each row."""
    rows = row_densities(log_likelihood, log_weights)
    return mean_over(batch, rows), Predicted(rows)


def mean_over(batch: Batch, rows: Array) -> Scalar:
    """Return the weighted mean of one number per row."""
    return (rows * batch.weight).sum() / jnp.maximum(batch.weight.sum(), 1e-30)


def stand_ins(key: Key, good: Array) -> Array:
    """Return the replacement of every particle: itself if it is good, otherwise a good one at random."""
    n, number = len(good), jnp.cumsum(good, dtype=jnp.int32)  # of the good ones, from 1 on
    drawn = jax.random.uniform(key, (n,), jnp.float32) * number[-1].astype(jnp.float32)
    other = (number[None] <= jnp.minimum(drawn.astype(jnp.int32), number[-1] - 1)[:, None]).sum(1, dtype=jnp.int32)
    return jnp.where(good | ~good.any(), jnp.arange(n, dtype=jnp.int32), other)


def keep_if_finite(new: Kept, old: Kept, moved: Tree, log_predictive: Scalar) -> tuple[Kept, Array]:
    """Return the new state, or the old one if an array of `moved` is not finite, and whether all were.

    A NaN among the batch's log densities counts as well: it may leave the gradient finite but wrong.
    """
    # A sum of squares is NaN or infinite as soon as one number is (or is above 1e19, which is as lost), and
    # on a CPU several times faster to reduce than a matrix of truth values.
    finite = ~jnp.isnan(log_predictive)
    for leaf in jax.tree.leaves(moved):
        finite &= jnp.isfinite((leaf**2).sum())
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old), finite


def root_mean_square(field: Array) -> Scalar:
    """Return the typical size of a field's entries."""
    return jnp.sqrt((field**2).mean())


def positive_step(step: ArrayLike) -> float:
    """Return a step size that is a number greater than 0."""
    try:
        value = float(step)
    except (TypeError, ValueError):
        value = math.nan
    if not value > 0:
        raise ValueError(f"`step` is {step!r}, but must be a number greater than 0, a schedule, or an optax optimizer.")
    return value
