r"""SL-OPVI: particles follow the posterior, and a polynomial fitted to them stands for all rows before."""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import (
    StepInfo,
    TargetSampler,
    compiled,
    dealt_by_weight,
    keep_if_finite,
    predicted_rows,
    tick,
)
from opvi.filters._covariance import exactly
from opvi.filters._evidence import DRAWS, Ratios, added, joined, log_mass, ratios, warn_if_uncertain
from opvi.filters._measures import stein_discrepancy
from opvi.filters.sl_opvi._mode_weights import large_modes
from opvi.filters.sl_opvi._reports import Diagnosis, concerns_of_surrogate, concerns_of_weights, effective_number
from opvi.filters.sl_opvi._stein_flow import Pace, Whitening, follow, some
from opvi.filters.sl_opvi._surrogates import Frame, Polynomial, Surrogate, empty_surrogate, fit, frame
from opvi.filters.sl_opvi._trajectories import Moved, moved, remembered_limit
from opvi.flows.kernels import centred
from opvi.predictive import Predictive
from opvi.targets import Target, cast, check_batch
from opvi.types import Array, Batch, Key, Particles, Scalar, Seed, Start, State, Tree, as_key

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


class SLOPVIState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    past: Surrogate  # of all rows so far
    log_weights: Array  # [n]: of the particles; all the same where there is one mode
    round: Array
    rows: Array
    lost: Array  # [d]: mean square of what the surrogate missed, over the particles' variances of then
    constant: Array  # [2]: what the surrogate lacks of the rows' log likelihood, and what rounding left out of that


@dataclass(frozen=True)
class SLOPVI(TargetSampler):
    """Settings of `sl_opvi`."""

    half_life: float | None
    pace: Pace

    def init(self, key: Key, particles: Start = None) -> SLOPVIState:
        """Return the state before any row."""
        x = self.drawn(key, particles, at_least=2)
        zero = jnp.zeros((), jnp.int32)
        even = jnp.full(len(x), -math.log(len(x)), x.dtype)
        return SLOPVIState(x, empty_surrogate(x), even, zero, zero, jnp.zeros_like(x[0]), jnp.zeros(2, x.dtype))

    @compiled
    @exactly
    def step(self, key: Key, state: SLOPVIState, batch: Batch) -> tuple[SLOPVIState, StepInfo]:
        """Learn from a batch."""
        x, past, target, pace = state.particles, state.past, self.target, self.pace
        batch = cast(batch, x.dtype)
        check_batch(target, x[0], batch)
        clock = tick(state, batch)
        said = jax.vmap(lambda v: target.log_likelihood(target.unravel(v), batch.data))(x)
        log_predictive, predicted = predicted_rows(batch, said, state.log_weights)
        gamma = jnp.ones((), x.dtype)
        if self.half_life is not None:
            gamma = jnp.exp2(-batch.weight.sum() / self.half_life)
        batch = _without_padding(batch)
        # The first round spreads the particles evenly over the prior, held together by where they started (a prior
        # may be flat), and lets go of that as it turns to the data.
        first = (state.round == 0).astype(x.dtype)
        centre, variance = x.mean(0), jnp.var(x, 0)
        variance = jnp.where(variance > 0, variance, 1) * WIDER_START**2  # all biases may start at 0

        def log_density(v: Array, beta: Scalar) -> Array:
            start = first * (1 - beta) * ((v - centre) ** 2 / variance).sum() / 2
            prior = target.log_prior(target.unravel(v)) - start
            return prior + beta * _log_likelihood(target, v, batch) + (1 + beta * (gamma - 1)) * past.value(v)

        settled = pace.settled * jnp.where(state.round == 0, AT_THE_START, 1).astype(x.dtype)
        warm_up = jnp.where(state.round == 0, min(WARM_UP, pace.looks // 2), 0)
        key = jax.random.fold_in(key, clock.round)
        x, log_weights, W, size = follow(key, log_density, x, state.log_weights, pace, settled, warm_up)
        before, key = past.scaled(gamma), jax.random.fold_in(key, pace.looks)
        past = _absorb(target, key, x, W, before, batch)
        around = x[:: -(-len(x) // POINTS)]
        around = around + jax.random.normal(key, around.shape, x.dtype) @ W.back
        missed, constant = _missed(target, around, before, past, batch)
        missed = missed / jnp.maximum(jnp.var(x, 0), jnp.finfo(x.dtype).tiny)
        lost = jnp.nan_to_num(gamma**2 * state.lost + missed)  # of a row of 1e15 it would be infinite
        constant = added(jnp.where(_fitted(state.past), state.constant, 0), constant)
        new = SLOPVIState(x, past, log_weights, clock.round, clock.rows, lost, constant)
        new, finite = keep_if_finite(new, state, (x, past), log_predictive)
        info = StepInfo(clock.rows, log_predictive, size, finite, predicted)
        return new._replace(round=clock.round, rows=clock.rows), info

    def predict(self, state: State, x: Tree) -> Predictive:
        """Return the posterior predictive at inputs x, each particle with its weight."""
        return super().predict(state, x)._replace(log_weights=state.log_weights)  # type: ignore[attr-defined]

    def _draws(self, state: SLOPVIState, key: Key, n: int) -> Particles:  # type: ignore[override]
        """Return n draws: particles picked by weight, moved by a kernel that leaves what is tracked invariant."""
        chains = min(max(n, FEWEST_CHAINS), CHAINS)
        last = 1 << (-(-n // chains) - 1).bit_length()  # few programs, however many draws
        places = run_chains(self.target, chains, FIRST_MOVES, APART * last, key, state).places[APART - 1 :: APART]
        return places.reshape(-1, places.shape[-1])[:n]

    def diagnosis(self, state: SLOPVIState, key: Seed = 0) -> Diagnosis:
        """Return how far the posterior can be trusted; `diagnosis.concerns()` says what to do where it cannot."""
        there = run_chains(self.target, LOOK_CHAINS, FIRST_LOOK, LOOK_MOVES, as_key(key), state, early=EARLY_LOOK)
        places = np.asarray(there.places, float).reshape(-1, self.target.dim)
        x, w = np.asarray(state.particles, float), np.exp(np.asarray(state.log_weights, float))
        mean = w @ x / w.sum()
        ratio = np.sqrt(w @ (x - mean) ** 2 / w.sum()) / places.std(0)
        last = there.places[-1]
        return Diagnosis(
            effective=effective_number(state.log_weights),
            shift=float((np.abs(places.mean(0) - mean) / places.std(0)).max()),
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
            stein=stein_discrepancy(np.asarray(last, float), np.asarray(_scores(self.target, state, last), float)),
        )

    def log_evidence(self, state: SLOPVIState, key: Seed = 0) -> float:
        r"""Return $\log p(\text{rows so far})$, in nats, from draws; it may be asked at any time.

        Densities of rows must be normalised, and that of the prior too unless it is Gaussian. It is nan with a
        half-life, because rows that fade have no such density, and where the polynomial misses too much of the rows
        (`concerns(state)` says so).
        """
        if self.half_life is not None or concerns_of_surrogate(_lost(state), int(state.rows)):
            return math.nan
        one, two = jax.random.split(as_key(key))
        draws = self._draws(state, one, DRAWS).reshape(-1, 2, CHAINS // 2, self.target.dim)
        found = joined(_ratios(self.target, two, state, draws))
        warn_if_uncertain(found)
        gone = float(np.asarray(state.constant, float).sum()) if _fitted(state.past) else 0.0
        return found.value + gone - log_mass(self.target)

    def concerns(self, state: SLOPVIState) -> list[str]:
        """Return the concerns that can be found at no cost: what the polynomial misses, particles of no weight."""
        of_rows = concerns_of_surrogate(_lost(state), int(state.rows))
        return of_rows + concerns_of_weights(effective_number(state.log_weights), len(state.particles))


def sl_opvi(target: Target, *, half_life: float | None = None, pace: Pace | None = None) -> SLOPVI:
    r"""Track the running posterior of a target with few parameters, multimodal or not, without storing rows.

    $$\log p_t(x) = \log p_0(x) + q_t(x), \qquad q_t = \gamma_t\, q_{t-1} + \sum_{r \in \mathrm{batch}} \ell_r$$

    where q is a polynomial in coordinates in which the particles are N(0, I): the batch's log likelihood is added by
    least squares over the particles. Its degree is 6 in few dimensions, which holds two modes, and 2 in more.
    Likelihoods that are quadratic, as in conjugate Gaussian models, are carried exactly; of others,
    `sampler.concerns(state)` says what the polynomial misses. `opvi.ibis` stores rows and misses nothing.
    Between rounds the particles follow $p_t$ by a Stein flow with repulsion 1, whitened by the mean curvature, through
    densities between $p_{t-1}$ and $p_t$ that are near enough to one another.

    Args:
        target: a target with up to about 50 parameters; gradients and Hessians come from autodiff.
        half_life: rows after which a row counts half, $\gamma = 2^{-\mathrm{rows}/\mathrm{half\,life}}$; None never
            forgets.
        pace: how long the flow runs in a round.
    """
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be a number of rows above 0, or None to never forget.")
    return SLOPVI(target, half_life, Pace() if pace is None else pace)


@partial(jax.jit, static_argnums=(0, 1, 2, 3), static_argnames="early")
@exactly
def run_chains(
    target: Target, chains: int, first: int, moves: int, key: Key, state: SLOPVIState, early: int = 0
) -> Moved:
    """Return positions of chains that start at particles and move within the density that is tracked."""
    x = state.particles
    own = frame(x)
    which = dealt_by_weight(jnp.arange(len(x)), state.log_weights, jax.random.fold_in(key, 0), chains)
    same = large_modes(own.into(x))[which][:, which]
    same = same / same.sum(1, keepdims=True)
    density = partial(_tracked_density, target, state, own)
    return moved(jax.random.fold_in(key, 1), density, x[which], own, first, moves, same, early)


def _tracked_density(target: Target, state: SLOPVIState, own: Frame, v: Array) -> Array:
    """Return the log density that is tracked, up to a constant, at one point."""
    # A polynomial that stands for rows means nothing far from the particles it was fitted to.
    far = jnp.where(_fitted(state.past), BEYOND * (own.into(state.particles) ** 2).sum(1).max(), jnp.inf)
    total = target.log_prior(target.unravel(v)) + state.past.value(v)
    return jnp.where((own.into(v) ** 2).sum() <= far, total, -jnp.inf)


@partial(jax.jit, static_argnums=0)
@exactly
def _ratios(target: Target, key: Key, state: SLOPVIState, draws: Particles) -> tuple[Ratios, Ratios]:
    halves = jnp.moveaxis(draws, 1, 0).reshape(2, -1, draws.shape[-1])  # of the chains
    density = partial(_tracked_density, target, state, frame(state.particles))
    return ratios(key, density, jax.vmap(density), halves)


@partial(jax.jit, static_argnums=0)
@exactly
def _scores(target: Target, state: SLOPVIState, draws: Particles) -> Array:
    """Return the gradients of the log density that is tracked, `[n, d]`."""
    return jax.vmap(jax.grad(partial(_tracked_density, target, state, frame(state.particles))))(draws)


def _fitted(past: Surrogate) -> Array:
    """Return whether a surrogate stands for any rows."""
    return jnp.stack([(leaf != 0).any() for leaf in past[1:]]).any()


def _lost(state: SLOPVIState) -> float:
    """Return how far the surrogate may have moved a mean, in standard deviations; errors add up as if random."""
    variance = np.asarray(state.particles, float).var(0)
    return float(np.sqrt(np.asarray(state.lost, float) * variance).max())


def _without_padding(batch: Batch) -> Batch:
    """Return the batch with its first row in the place of padding: no log or division then meets an invented value."""
    counts = batch.weight > 0
    return batch._replace(
        data=jax.tree.map(lambda a: jnp.where(counts.reshape(-1, *[1] * (a.ndim - 1)), a, a[:1]), batch.data)
    )


def _log_likelihood(target: Target, v: Array, batch: Batch) -> Array:
    """Return the log likelihood of a batch at one point; rows of weight 0 do not count."""
    return jnp.where(batch.weight > 0, target.log_likelihood(target.unravel(v), batch.data), 0) @ batch.weight


def _absorb(target: Target, key: Key, x: Particles, W: Whitening, past: Surrogate, batch: Batch) -> Surrogate:
    """Return the surrogate with a batch added."""
    of_batch = partial(_log_likelihood, target, batch=batch)
    if not isinstance(past, Polynomial):
        return past.plus(of_batch, x, some(x))
    new = frame(x)
    # Nothing else carries the past: let the polynomial hold beyond the outermost particles too.
    x = jnp.concatenate([x, x + jax.random.normal(key, x.shape, x.dtype) @ W.back])
    past, least_squares = past.within(new), fit(new.into(x), past.degree)
    values = centred(_possible(jax.vmap(of_batch)(x))[:, None])[:, 0]
    past = past._replace(coefficients=past.coefficients + least_squares.coefficients(values))
    return past.trimmed(x)


def _possible(values: Array) -> Array:
    """Return log likelihoods `[n]`, with those of impossible rows set to the lowest of the others."""
    known = jnp.isfinite(values)
    lowest = jnp.where(known, values, jnp.inf).min()
    return jnp.where(known, values, jnp.where(jnp.isfinite(lowest), lowest, 0))


def _missed(target: Target, x: Particles, before: Surrogate, after: Surrogate, batch: Batch) -> tuple[Array, Array]:
    """Return the variance and mean of what replacing rows took off the log density, at points around the particles."""

    def error(v: Array) -> Array:
        return _log_likelihood(target, v, batch) + before.value(v) - after.value(v)

    def found() -> tuple[Array, Array]:
        errors = jax.vmap(error)(x)
        errors = jnp.where(jnp.isfinite(errors), errors, jnp.nan)
        mean = jnp.nan_to_num(jnp.nanmean(errors), nan=-IMPOSSIBLE).clip(-IMPOSSIBLE, IMPOSSIBLE)
        return jnp.nan_to_num(jnp.nanvar(errors)), mean

    # A polynomial loses its constant whenever it is written in the particles' new frame, though there may be no row.
    changed, zero = (batch.weight > 0).any() | _fitted(before), jnp.zeros((), x.dtype)
    return jax.lax.cond(changed, found, lambda: (zero, zero))
