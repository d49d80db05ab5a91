r"""SL-OPVI: some rows are kept exactly, all others as a polynomial and in the weights of the kept rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import (
    Layout,
    StepInfo,
    TargetSampler,
    blank_rows,
    check_example,
    checked_count,
    compiled,
    dealt_by_weight,
    keep_if_finite,
    layout_of,
    predicted_rows,
    tick,
)
from opvi.filters._covariance import exactly
from opvi.filters._diagnosis import Diagnosis, concerns_of_surrogates, concerns_of_weights
from opvi.filters._evidence import DRAWS, Ratios, added, joined, log_mass, ratios, warn_if_uncertain
from opvi.filters._measures import AtDraws, measured
from opvi.filters._modes import large_modes
from opvi.filters._moves import Moved, moved, remembered_limit
from opvi.filters._pool import Pool, Weights, merged, reweighted, weighted_sum
from opvi.filters._surrogates import LARGEST_DEGREE, Frame, Polynomial, Surrogate, fit, frame, nothing
from opvi.filters._whitening import Pace, Whitening, follow, some
from opvi.flows.kernels import centred
from opvi.predictive import Normal, Predictive, StudentT
from opvi.targets import Target, cast, check_batch
from opvi.types import Array, Batch, Data, Key, Particles, Scalar, Seed, Start, State, Tree, as_key

WARM_UP = 20  # looks of the first round at the prior, before the data come in
WIDER_START = 1.0  # times the spread of the starting particles: what holds them together where the prior does not
AT_THE_START = 0.05  # share of `settled` that the first round must reach: what it misses, later rounds inherit

CHAINS = 400  # of draws, at most
FIRST_MOVES = 60  # of draws, before the first is taken; more where chains have not arrived
APART = 3  # moves between two draws of a chain
LOOK_CHAINS = 200  # of a diagnosis
EARLY_LOOK, FIRST_LOOK = 6, 40  # its moves before those that are looked at; the first if sure
LOOK_MOVES = 2  # that are looked at
FEWEST_CHAINS = 100  # of draws, however few are wanted: with fewer, nothing is known of what they remember
POINTS = 32  # at which what a surrogate misses is measured
IMPOSSIBLE = 1e30  # nats: a log likelihood that is not finite counts as this far below
BEYOND = 2.0  # times the largest squared distance of a particle: what surrogates are asked about at most


class LinearisedState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    past: Surrogate  # of the rows that are gone
    kept: Data  # [memory_rows, ...]: rows that stay; () where none do
    weight: Weights  # [memory_rows]: how many rows each of them stands for
    log_weights: Array  # [n]: of the particles; all the same where there is one mode
    round: Array
    rows: Array
    lost: Array  # [d]: mean square of what the surrogate missed of rows gone, over the particles' variances of then
    constant: Array = math.nan  # type: ignore[assignment]  # [2]: what it lacks of their log likelihood, and rounding


@dataclass(frozen=True)
class SLOPVI(TargetSampler):
    """Settings of `sl_opvi`."""

    layout: Layout | None  # of the rows kept
    memory_rows: int
    half_life: float | None
    pace: Pace

    def init(self, key: Key, particles: Start = None) -> LinearisedState:
        """Return the state before any row."""
        x = self.drawn(key, particles, at_least=2)
        zero = jnp.zeros((), jnp.int32)
        even = jnp.full(len(x), -math.log(len(x)), x.dtype)
        kept: Data = ()
        weight: Weights = ()
        past = nothing(x, LARGEST_DEGREE if self.layout is None else 2)
        if self.layout is not None:
            kept = blank_rows(self.layout, self.memory_rows, x.dtype)
            weight = jnp.zeros(self.memory_rows, x.dtype)
        lost, constant = jnp.zeros_like(x[0]), jnp.zeros(2, x.dtype)
        return LinearisedState(x, past, kept, weight, even, zero, zero, lost, constant)

    @compiled
    @exactly
    def step(self, key: Key, state: LinearisedState, batch: Batch) -> tuple[LinearisedState, StepInfo]:
        """Learn from a batch."""
        x, past, target, pace = state.particles, state.past, self.target, self.pace
        batch = cast(batch, x.dtype)
        if isinstance(batch.data, list) and isinstance(state.kept, tuple):
            batch = batch._replace(data=tuple(batch.data))
        check_batch(target, x[0], batch)
        clock = tick(state, batch)
        said = jax.vmap(lambda v: _likelihood(target, v, batch.data))(x)
        log_predictive, predicted = predicted_rows(batch, said, state.log_weights)
        gamma = jnp.ones((), x.dtype)
        if self.half_life is not None:
            gamma = jnp.exp2(-batch.weight.sum() / self.half_life)
        if self.memory_rows:
            check_example(state.kept, batch.data)
        pool = merged(batch, state.kept, state.weight, gamma)
        # The first round spreads the particles evenly over the prior, held together by where they started (a prior
        # may be flat), and lets go of that as it turns to the data.
        first = (state.round == 0).astype(x.dtype)
        centre, variance = x.mean(0), jnp.var(x, 0)
        variance = jnp.where(variance > 0, variance, 1) * WIDER_START**2  # all biases may start at 0
        of_rows = weighted_sum(partial(_likelihood, target), pool.data, pool.before, pool.after - pool.before)

        def log_density(v: Array, beta: Scalar) -> Array:
            start = first * (1 - beta) * ((v - centre) ** 2 / variance).sum() / 2
            prior = target.log_prior(target.unravel(v)) - start
            return prior + of_rows(v, beta) + (1 + beta * (gamma - 1)) * past.value(v)

        settled = pace.settled * jnp.where(state.round == 0, AT_THE_START, 1).astype(x.dtype)
        warm_up = jnp.where(state.round == 0, min(WARM_UP, pace.looks // 2), 0)
        key = jax.random.fold_in(key, clock.round)
        x, log_weights, W, size = follow(key, log_density, x, state.log_weights, pace, settled, warm_up)
        before, key = past.scaled(gamma), jax.random.fold_in(key, pace.looks)
        past, kept, weight = _absorb(self, key, x, W, before, pool)
        around = x[:: -(-len(x) // POINTS)]
        around = around + jax.random.normal(key, around.shape, x.dtype) @ W.back
        missed, constant = _missed(self, around, before, past, pool, weight)
        missed = missed / jnp.maximum(jnp.var(x, 0), jnp.finfo(x.dtype).tiny)
        lost = jnp.nan_to_num(gamma**2 * state.lost + missed)  # of a row of 1e15 it would be infinite
        constant = added(jnp.where(_fitted(state.past), state.constant, 0), constant)
        new = LinearisedState(x, past, kept, weight, log_weights, clock.round, clock.rows, lost, constant)
        new, finite = keep_if_finite(new, state, (x, past, weight), log_predictive)
        info = StepInfo(clock.rows, log_predictive, size, finite, predicted)
        return new._replace(round=clock.round, rows=clock.rows), info

    def predict(self, state: State, x: Tree) -> Predictive:
        """Return the posterior predictive at inputs x, each particle with its weight."""
        return super().predict(state, x)._replace(log_weights=state.log_weights)  # type: ignore[attr-defined]

    def draws(self, state: LinearisedState, key: Key, n: int) -> Particles:  # type: ignore[override]
        """Return n draws from the posterior: particles picked by weight, moved by a kernel that leaves it invariant."""
        count = checked_count(n)
        chains = min(max(count, FEWEST_CHAINS), CHAINS)
        last = 1 << (-(-count // chains) - 1).bit_length()  # few programs, however many draws
        places = _moves(self, chains, FIRST_MOVES, APART * last, key, state).places[APART - 1 :: APART]
        return places.reshape(-1, places.shape[-1])[:count]

    def stored_rows(self, state: LinearisedState) -> tuple[Data, Array]:
        """Return the rows that are stored and how many rows each stands for; places of weight 0 hold none."""
        return state.kept, jnp.zeros(0) if isinstance(state.weight, tuple) else state.weight

    def diagnosis(self, state: LinearisedState, key: Seed = 0) -> Diagnosis:
        """Return how far the posterior can be trusted; `diagnosis.concerns()` says what to do where it cannot."""
        return _diagnosis(self, as_key(key), state)

    def log_evidence(self, state: LinearisedState, key: Seed = 0) -> float:
        r"""Return $\log p(\text{rows so far})$, in nats, from draws and the rows stored; it may be asked at any time.

        Densities of rows must be normalised, and that of the prior too unless it is Gaussian. It is nan with a
        half-life, because rows that fade have no such density, and where surrogates of rows that are gone miss too
        much of them (`concerns(state)` says so).
        """
        if self.half_life is not None or concerns_of_surrogates(_lost(state), int(state.rows), _stored(state)):
            return math.nan
        one, two = jax.random.split(as_key(key))
        draws = self.draws(state, one, DRAWS).reshape(-1, 2, CHAINS // 2, self.target.dim)
        found = joined(_ratios(self, two, state, draws))
        warn_if_uncertain(found)
        gone = float(np.asarray(state.constant, float).sum()) if _fitted(state.past) else 0.0
        return found.value + gone - log_mass(self.target)

    def concerns(self, state: LinearisedState) -> list[str]:
        """Return the concerns that can be found at no cost: rows represented by a surrogate, particles of no weight."""
        of_rows = concerns_of_surrogates(_lost(state), int(state.rows), _stored(state))
        return of_rows + concerns_of_weights(_effective(state), len(state.particles))


def sl_opvi(
    target: Target,
    *,
    example: Data = None,
    memory_rows: int = 500,
    half_life: float | None = None,
    pace: Pace | None = None,
) -> SLOPVI:
    r"""Track the running posterior of a target with few parameters, multimodal or not, in bounded memory.

    $$\log p_t(x) = \log p_0(x) + q_t(x) + \sum_{r \le W} w_r\, \ell_r(x)$$

    W rows are kept with exact likelihoods. When there are more, those with the smallest weights leave, and
    $\ell = \sum_{\mathrm{gone}} w_o \ell_o$ is replaced, by least squares over the particles, by a polynomial $q$ and
    small changes of the weights that stay: $\ell \approx q + \sum_r \Delta_r \ell_r$ with the least
    $\sum_r \Delta_r^2 / w_r$. Likelihoods that are quadratic, as in conjugate Gaussian models, are carried exactly.
    Forgetting multiplies $q$ and $w$ by $\gamma = 2^{-\mathrm{rows}/\mathrm{half\,life}}$. Between rounds the particles
    follow $p_t$ by a Stein flow with repulsion 1, whitened by the mean curvature, through densities between
    $p_{t-1}$ and $p_t$ that are near enough to one another.

    Args:
        target: a target with up to about 50 parameters; gradients and Hessians come from autodiff.
        example: rows in the form the stream will have (a batch's `data`; one row is enough). Only shapes and
            dtypes matter, and only if `memory_rows` is not 0.
        memory_rows: W, the most rows kept. 0 keeps none: the past is then a polynomial alone, of degree up to 6 in few
            dimensions, which follows two modes as well.
        half_life: rows after which a row counts half; None never forgets.
        pace: how long the flow runs in a round.
    """
    if memory_rows < 0:
        raise ValueError(f"`memory_rows` is {memory_rows}, but must be a number of rows of at least 0.")
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be a number of rows above 0, or None to never forget.")
    if memory_rows and example is None:
        raise ValueError(
            f"`example` is missing, but to keep {memory_rows} rows their shapes must be known. Give a batch's data, "
            "e.g. `example=(X[:1], y[:1])`, or keep no rows: `memory_rows=0`."
        )
    layout = layout_of(example) if memory_rows else None
    return SLOPVI(target, layout, memory_rows, half_life, Pace() if pace is None else pace)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), static_argnames="early")
@exactly
def _moves(
    sampler: SLOPVI, chains: int, first: int, moves: int, key: Key, state: LinearisedState, early: int = 0
) -> Moved:
    """Return positions of chains that start at particles and move within what the sampler believes."""
    x = state.particles
    own = frame(x)
    which = dealt_by_weight(jnp.arange(len(x)), state.log_weights, jax.random.fold_in(key, 0), chains)
    log_density = _believed(sampler, state, own)
    same = large_modes(own.into(x))[which][:, which]
    same = same / same.sum(1, keepdims=True)
    return moved(jax.random.fold_in(key, 1), log_density, x[which], own, first, moves, same, early)


def _fitted(past: Surrogate) -> Array:
    """Return whether a surrogate stands for any rows."""
    return jnp.stack([(leaf != 0).any() for leaf in past[1:]]).any()


def _believed(sampler: SLOPVI, state: LinearisedState, own: Frame) -> Callable[[Array], Array]:
    """Return the log density that is tracked, up to a constant."""
    target, x = sampler.target, state.particles
    # A polynomial that stands for rows gone means nothing far from the particles it was fitted to.
    far = jnp.where(_fitted(state.past), BEYOND * (own.into(x) ** 2).sum(1).max(), jnp.inf)
    stored = None
    if not isinstance(state.weight, tuple):
        stored = weighted_sum(partial(_likelihood, target), state.kept, state.weight)

    def log_density(v: Array) -> Array:
        total = target.log_prior(target.unravel(v)) + state.past.value(v)
        total = total if stored is None else total + stored(v)
        return jnp.where((own.into(v) ** 2).sum() <= far, total, -jnp.inf)

    return log_density


@partial(jax.jit, static_argnums=0)
@exactly
def _ratios(sampler: SLOPVI, key: Key, state: LinearisedState, draws: Particles) -> tuple[Ratios, Ratios]:
    halves = jnp.moveaxis(draws, 1, 0).reshape(2, -1, draws.shape[-1])  # of the chains
    believed = _believed(sampler, state, frame(state.particles))
    return ratios(key, believed, jax.vmap(believed), halves)


def _diagnosis(sampler: SLOPVI, key: Key, state: LinearisedState) -> Diagnosis:
    there = _moves(sampler, LOOK_CHAINS, FIRST_LOOK, LOOK_MOVES, key, state, early=EARLY_LOOK)
    places = np.asarray(there.places, float).reshape(-1, sampler.target.dim)
    x, w = np.asarray(state.particles, float), _weights(state)
    mean = w @ x
    ratio = np.sqrt(w @ (x - mean) ** 2) / places.std(0)
    shift = (np.abs(places.mean(0) - mean) / places.std(0)).max()
    return Diagnosis(
        effective=_effective(state),
        shift=float(shift),
        narrow=float(ratio.min()),
        wide=float(ratio.max()),
        accepted=float(there.accepted),
        remembered=float(there.arrival.remembered),
        most=remembered_limit(LOOK_CHAINS),
        off=float(there.arrival.off),
        travelled=float(there.arrival.travelled),
        lost=_lost(state),
        particles=len(w),
        rows=int(state.rows),
        stored=_stored(state),
        **measured(there.places[-1], _at_draws(sampler, state, there.places[-1])),
    )


@partial(jax.jit, static_argnums=0)
@exactly
def _at_draws(sampler: SLOPVI, state: LinearisedState, x: Particles) -> AtDraws:
    """Return what draws say of the density that is tracked and of the rows that are stored."""
    target, kept = sampler.target, state.kept
    score = jax.vmap(jax.grad(_believed(sampler, state, frame(state.particles))))(x)
    if isinstance(state.weight, tuple):
        return AtDraws(score, None, None, None)
    stored, below = state.weight > 0, None
    kept = jax.tree.map(lambda a: jnp.where(stored.reshape(-1, *[1] * (a.ndim - 1)), a, a[:1]), kept)
    rows = jax.vmap(lambda v: _likelihood(target, v, kept))(x)
    if target.predict is not None and isinstance(kept, tuple) and len(kept) == 2:
        said = jax.vmap(lambda v: target.predict(target.unravel(v), kept[0]))(x)  # type: ignore[misc]
        if isinstance(said, Normal | StudentT):
            below = said.cdf(kept[1][None].astype(x.dtype)).mean(0)
    return AtDraws(score, rows, below, stored)


def _weights(state: LinearisedState) -> np.ndarray:
    """Return the particles' weights, which sum to 1."""
    w = np.exp(np.asarray(state.log_weights, float))
    return w / w.sum()


def _effective(state: LinearisedState) -> float:
    """Return the number of particles, by their weights."""
    return float(1 / (_weights(state) ** 2).sum())


def _lost(state: LinearisedState) -> float:
    """Return how far surrogates may have moved a mean, in standard deviations; errors add up as if random."""
    variance = np.asarray(state.particles, float).var(0)
    return float(np.sqrt(np.asarray(state.lost, float) * variance).max())


def _stored(state: LinearisedState) -> int:
    """Return how many rows are stored."""
    return 0 if isinstance(state.weight, tuple) else int((np.asarray(state.weight) > 0).sum())


def _likelihood(target: Target, x: Array, data: Data) -> Array:
    return target.log_likelihood(target.unravel(x), data)


def _absorb(
    sampler: SLOPVI, key: Key, x: Particles, W: Whitening, past: Surrogate, pool: Pool
) -> tuple[Surrogate, Data, Weights]:
    """Return the surrogate with the rows of smallest weight added, and the other rows with new weights."""
    target, most = sampler.target, sampler.memory_rows
    kept, gone = (jax.tree.map(lambda a, part=part: a[part], pool) for part in (slice(most), slice(most, None)))
    stay = (kept.data, kept.after) if most else ((), ())
    if not isinstance(past, Polynomial):
        return past.plus(lambda v: _likelihood(target, v, gone.data) @ gone.after, x, some(x)), *stay
    new = frame(x)
    if not most:  # nothing else carries the past: let the polynomial hold beyond the outermost particles too
        x = jnp.concatenate([x, x + jax.random.normal(key, x.shape, x.dtype) @ W.back])
    past, least_squares = past.within(new), fit(new.into(x), past.degree)
    values = centred(_possible(_weighed(target, x, gone)[:, None]))[:, 0]
    if most:
        basis = centred(_possible(jax.vmap(lambda v: _likelihood(target, v, kept.data))(x)))
        weight = reweighted(least_squares.residual(basis), kept.after, least_squares.residual(values))
        values = values - basis @ (weight - kept.after)
        stay = (kept.data, weight)
    past = past._replace(coefficients=past.coefficients + least_squares.coefficients(values))
    return past.trimmed(x), *stay


def _missed(
    sampler: SLOPVI, x: Particles, before: Surrogate, after: Surrogate, pool: Pool, weight: Weights
) -> tuple[Array, Array]:
    """Return the variance and mean of what replacing rows took off the log density, at points around the particles."""
    change = pool.after if isinstance(weight, tuple) else pool.after.at[: len(weight)].add(-weight)

    def error(v: Array) -> Array:
        rows = jnp.where(change == 0, 0, _likelihood(sampler.target, v, pool.data))
        return rows @ change + before.value(v) - after.value(v)

    def found() -> tuple[Array, Array]:
        errors = jax.vmap(error)(x)
        errors = jnp.where(jnp.isfinite(errors), errors, jnp.nan)
        mean = jnp.nan_to_num(jnp.nanmean(errors), nan=-IMPOSSIBLE).clip(-IMPOSSIBLE, IMPOSSIBLE)
        return jnp.nan_to_num(jnp.nanvar(errors)), mean

    # A polynomial loses its constant whenever it is written in the particles' new frame, though no row may leave.
    changed, zero = (pool.after[sampler.memory_rows :] > 0).any() | _fitted(before), jnp.zeros((), x.dtype)
    return jax.lax.cond(changed, found, lambda: (zero, zero))


def _weighed(target: Target, x: Particles, rows: Pool) -> Array:
    """Return each particle's log likelihood of the rows that leave; rows of weight 0 do not count."""
    return jax.vmap(lambda v: jnp.where(rows.after > 0, _likelihood(target, v, rows.data), 0) @ rows.after)(x)


def _possible(values: Array) -> Array:
    """Return log likelihoods `[n, m]`, with those of impossible rows set to the lowest of the others."""
    known = jnp.isfinite(values)
    lowest = jnp.where(known, values, jnp.inf).min(0, keepdims=True)
    return jnp.where(known, values, jnp.where(jnp.isfinite(lowest), lowest, 0))
