r"""IBIS: particles with weights, and all rows stored, so that a stream in any order ends in the same posterior."""

import math
from dataclasses import dataclass
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
    dealt,
    keep_if_finite,
    layout_of,
    predicted_rows,
    root_mean_square,
    tick,
)
from opvi.filters._covariance import exactly
from opvi.filters._evidence import joined, log_mass, warn_if_uncertain
from opvi.filters._prior import gaussian_prior
from opvi.filters.ibis._draws import memory_limit, sweep_chains, sweeps_for
from opvi.filters.ibis._rejuvenation import (
    FIRST_STEP,
    Density,
    Gaussian,
    Past,
    effective_number,
    rejuvenate,
)
from opvi.filters.ibis._reports import (
    LOOKED_AT,
    Diagnosis,
    concerns_of_memory,
    evidence_ratios,
    look_at_rows,
    lost_of,
    measures_of,
)
from opvi.filters.ibis._storage import (
    Storage,
    faded,
    keep,
    leave,
    limits_of,
    no_storage,
    overflows,
    room_needed,
    rows_of,
    stands_for,
    with_room,
    write_beyond,
)
from opvi.filters.ibis._sums import IMPOSSIBLE, Quadratic, row_likelihoods
from opvi.predictive import Predictive
from opvi.targets import Target, cast, check_batch
from opvi.targets._prior import draw_gaussian
from opvi.types import Array, Batch, Data, Key, Particles, Scalar, Seed, Start, Tree, as_key

MEMORY = 64e6  # bytes
PARTICLES = 512
MANY_PARAMETERS, FEW_PARTICLES = 50, 128  # above so many parameters, fewer particles: curvature tells more than they do
FREE_PLACES = 64  # for a batch, in room that is made before the first one
EFFECTIVE = 0.5  # share of the particles: with fewer effective ones they are resampled and moved
HALVINGS = 20  # of a batch's share, to find how much of it is enough at once
SMALLEST_SHARE = 1e-4
EVIDENCE_DRAWS = 2048


class IBISState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    log_weights: Array  # [n]
    log_likelihood: Array  # [n]: of all rows at each particle, weighted as they are now, up to a constant
    storage: Storage
    step: Scalar  # of trajectories
    accepted: Scalar  # share of the trajectories, at the last move
    remembered: Scalar  # correlation of particles with where they began, after the last moves
    round: Array
    rows: Array
    rejuvenations: Array  # so far
    moves: Array  # so far


@dataclass(frozen=True)
class IBIS(TargetSampler):
    """Settings of `ibis`."""

    memory: float  # bytes
    half_life: float | None
    layout: Layout | None = None  # of the rows, where an example was given

    def init(self, key: Key, particles: Start = None) -> IBISState:
        """Return the state before any row."""
        x = self.drawn(key, particles, at_least=2)
        zero, none = jnp.zeros((), x.dtype), jnp.zeros((), jnp.int32)
        even = jnp.full(len(x), -math.log(len(x)), x.dtype)
        storage = no_storage(self.target.dim, x.dtype)
        if self.layout is not None:
            rows = blank_rows(self.layout, 1, x.dtype)
            limits = limits_of(self.memory, self.half_life, rows)
            storage = with_room(storage, rows, room_needed(limits, rows, 0, 0, FREE_PLACES))
        step = jnp.asarray(FIRST_STEP, x.dtype)
        return IBISState(x, even, jnp.zeros_like(even), storage, step, zero, zero, none, none, none, none)

    def make_room(self, state: IBISState, batch: Batch, rounds: int = 1) -> IBISState:
        """Return the state with room for so many batches of this shape.

        `opvi.run` and `step` ask for it by themselves. Call it before a loop of your own that is compiled as a whole.
        """
        storage = state.storage
        size = len(batch.weight)
        if isinstance(storage.arrived, jax.core.Tracer) and len(storage.weight):
            if len(storage.weight) <= size:
                raise ValueError(
                    f"the state has room for {len(storage.weight)} rows, but a batch has {size}. Before a loop that is "
                    "compiled as a whole, ask for room: `state = sampler.make_room(state, batch, rounds)`."
                )
            return state
        count = 0 if isinstance(storage.arrived, jax.core.Tracer) else int(storage.arrived)
        room = room_needed(limits_of(self.memory, self.half_life, batch.data), batch.data, count, size * rounds, size)
        return state._replace(storage=with_room(storage, batch.data, room))

    def step(self, key: Key, state: IBISState, batch: Batch) -> tuple[IBISState, StepInfo]:
        """Learn from a batch."""
        batch = cast(batch, state.particles.dtype)
        if isinstance(batch.data, list) and isinstance(state.storage.data, tuple) and len(state.storage.weight):
            batch = batch._replace(data=tuple(batch.data))
        if len(state.storage.weight):
            check_example(state.storage.data, batch.data)
        check_batch(self.target, state.particles[0], batch)
        return _step(self, key, self.make_room(state, batch), batch)

    def predict(self, state: IBISState, x: Tree) -> Predictive:  # type: ignore[override]
        """Return the posterior predictive at inputs x, each particle with its weight."""
        return super().predict(state, x)._replace(log_weights=state.log_weights)

    def draws(self, state: IBISState, key: Seed, n: int) -> Particles:  # type: ignore[override]
        """Return n draws from the posterior: particles by weight, moved until they have forgotten where they began."""
        count, key = checked_count(n), as_key(key)
        if not len(state.storage.weight):
            return _prior_draws(self.target, key, state.particles, count)
        drawn = sweep_chains(
            self.target,
            sweeps_for(count, len(state.particles)),
            key,
            state.particles,
            state.log_weights,
            posterior_density(self, state),
            state.step,
        )
        places = drawn.places.reshape(-1, drawn.places.shape[-1])
        return places[:count]

    def stored_rows(self, state: IBISState) -> tuple[Data, Array]:
        """Return the rows that are stored, and how many rows each of them is: 0 where there is none."""
        return state.storage.data, state.storage.weight

    def diagnosis(self, state: IBISState, key: Seed = 0) -> Diagnosis:
        """Return how far the posterior can be trusted; `diagnosis.concerns()` says what to do where it cannot."""
        stored = np.flatnonzero(np.asarray(state.storage.weight) > 0)
        if not len(stored):
            raise ValueError("there is nothing to diagnose yet: no row was learnt.")
        density = posterior_density(self, state)
        key = as_key(key)
        drawn = sweep_chains(self.target, 1, key, state.particles, state.log_weights, density, state.step)
        draws = np.asarray(drawn.places[0], float)
        picked = stored[np.unique(np.linspace(0, len(stored) - 1, LOOKED_AT).astype(int))]
        there = look_at_rows(self.target, density, drawn.places[0], jnp.asarray(picked, jnp.int32))
        x, w = np.asarray(state.particles, float), np.exp(np.asarray(state.log_weights, float))
        mean = w @ x / w.sum()
        sd = draws.std(0)
        ratio = np.sqrt(w @ (x - mean) ** 2 / w.sum()) / sd
        return Diagnosis(
            effective=float(w.sum() ** 2 / (w**2).sum()),
            shift=float((np.abs(draws.mean(0) - mean) / sd).max()),
            narrow=float(ratio.min()),
            wide=float(ratio.max()),
            accepted=float(drawn.accepted),
            remembered=float(drawn.remembered),
            limit=memory_limit(len(x)),
            lost=_lost(state, draws, float(there.misfit)),
            misfit=float(there.misfit),
            rows=int(state.rows),
            stored=len(stored),
            particles=len(x),
            **measures_of(there),
        )

    def concerns(self, state: IBISState) -> list[str]:
        """Return the concerns that can be found at no cost: rows that did not fit into the memory."""
        stored = int((np.asarray(state.storage.weight) > 0).sum())
        return concerns_of_memory(_lost(state, np.asarray(state.particles, float), 0.0), int(state.rows), stored)

    def log_evidence(self, state: IBISState, key: Seed = 0) -> float:
        r"""Return $\log p(\text{rows so far})$, in nats, from draws and the rows stored; it may be asked at any time.

        Densities of rows must be normalised, and that of the prior too unless it is Gaussian. It is nan with a
        half-life, because rows that fade have no such density.
        """
        if self.half_life is not None or not len(state.storage.weight):
            return 0.0 if self.half_life is None else math.nan
        one, two = jax.random.split(as_key(key))
        density = posterior_density(self, state)
        sweeps = sweeps_for(EVIDENCE_DRAWS, len(state.particles))
        drawn = sweep_chains(self.target, sweeps, one, state.particles, state.log_weights, density, state.step)
        halves = jnp.stack(jnp.split(drawn.places.reshape(sweeps, 2, -1, self.target.dim), 2, 1))[:, :, 0]
        found, constant = evidence_ratios(self.target, two, density, halves.reshape(2, -1, self.target.dim))
        evidence = joined(found)
        warn_if_uncertain(evidence)
        return evidence.value + float(np.asarray(constant, float).sum()) - log_mass(self.target)


def ibis(
    target: Target,
    *,
    memory: float = MEMORY,
    half_life: float | None = None,
    particles: int | None = None,
    example: Data = None,
) -> IBIS:
    r"""Track the posterior of all rows by iterated batch importance sampling (IBIS; Chopin, 2002).

    $$p_t(v) \propto p_0(v) \prod_{r \le t} p(r \mid v)^{\gamma^{t - r}}, \qquad
    w_i \gets w_i\, \frac{p_t(v_i)}{p_{t-1}(v_i)}$$

    Rows are stored, and particles carry weights. Where fewer than half of the particles are effective, they are
    resampled and moved by Hamiltonian trajectories that leave the posterior of all rows invariant; a batch that is too
    much at once is tempered. Trajectories follow a difference estimator, from a sample of the rows; whether they are
    accepted is decided by all rows. So the posterior does not depend on the order of the rows.

    When the memory is full, a uniform sample of the rows stays (algorithm R). The others are known by the quadratic of
    their likelihood around the particles' mean, which follows the particles as that of the sample does.

    Args:
        target: any target; a row costs about (particles · parameters · some hundred) operations on a stream that stands
            still, more where it changes.
        memory: bytes for rows, at most; room for them grows with the stream.
        half_life: rows after which a row counts half, $\gamma = 2^{-1/\mathrm{half\,life}}$; None never forgets.
            Rows that count less than a thousandth leave.
        particles: how many; 512 for up to 50 parameters, otherwise 128 if omitted.
        example: rows in the form the stream will have, to have room for them from the start, as loops need that are
            compiled as a whole; otherwise the first batch shows their form.
    """
    if not memory > 0:
        raise ValueError(f"`memory` is {memory}, but must be a number of bytes above 0.")
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be a number of rows above 0, or None to never forget.")
    half_life = None if half_life is None or math.isinf(half_life) else float(half_life)
    count = (FEW_PARTICLES if target.dim > MANY_PARAMETERS else PARTICLES) if particles is None else particles
    layout = None if example is None else layout_of(example)
    return IBIS(target, float(memory), half_life, layout, particles=count)


def posterior_density(sampler: IBIS, state: IBISState) -> Density:
    """Return the density that a state's particles represent."""
    storage, x = state.storage, state.particles
    limits = limits_of(sampler.memory, sampler.half_life, storage.data)
    one, nothing = jnp.ones((), x.dtype), jnp.zeros(0, x.dtype)
    rows = rows_of(storage, nothing, jnp.minimum(storage.arrived, limits.most), one, one)
    past = None
    if overflows(storage, limits, 1):
        past = Past(storage.gone, storage.doubt, stands_for(storage, 0), one)
    return Density(rows, one, _start(sampler.target, x), past)


def _lost(state: IBISState, draws: np.ndarray, misfit: float) -> float:
    """Return by how many standard deviations rows that are not stored may have moved a mean."""
    if not np.asarray(state.storage.doubt).any() and not misfit:
        return 0.0
    cov = np.atleast_2d(np.cov(draws.T))
    return lost_of(np.asarray(state.storage.doubt), cov, misfit)


def _prior_draws(target: Target, key: Key, x: Particles, n: int) -> Particles:
    """Return draws from the prior where it is Gaussian, else starting particles, which are as near as is known."""
    prior = gaussian_prior(target)
    return dealt(x, key, n) if prior is None else draw_gaussian(prior, key, n, x.dtype)


class _Tempered(NamedTuple):
    """Particles on their way from one posterior to the next."""

    x: Particles
    log_weights: Array
    old: Array  # [n]: log likelihood of the rows before
    beta: Scalar  # share of the way
    step: Scalar
    accepted: Scalar
    remembered: Scalar
    rejuvenations: Array
    moves: Array
    gone: Quadratic
    doubt: Array


@compiled
@exactly
def _step(sampler: IBIS, key: Key, state: IBISState, batch: Batch) -> tuple[IBISState, StepInfo]:
    target, x = sampler.target, state.particles
    limits = limits_of(sampler.memory, sampler.half_life, batch.data)
    clock = tick(state, batch)
    key = jax.random.fold_in(key, clock.round)
    said = jax.vmap(lambda v: target.log_likelihood(target.unravel(v), batch.data))(x)
    log_predictive, predicted = predicted_rows(batch, said, state.log_weights)
    gamma = jnp.ones((), x.dtype)
    if sampler.half_life is not None:
        gamma = jnp.exp2(-batch.weight.sum() / sampler.half_life)
    top = jnp.minimum(state.storage.arrived, limits.most)
    storage, weight = write_beyond(state.storage, batch, top)
    first = state.round == 0
    start = _start(target, x)
    drawn = start.draws(jax.random.fold_in(key, 0), len(x))
    x = jnp.where(first, drawn, x)

    def density(at: _Tempered) -> Density:
        beta = at.beta
        old = 1 + beta * (gamma - 1)
        rows = rows_of(storage, weight, top, old, beta)
        past = None
        if overflows(storage, limits, len(weight)):
            past = Past(at.gone, at.doubt, stands_for(storage, len(weight)) * old, old)
        return Density(rows, jnp.where(first, beta, 1), start, past)

    def gains(at: _Tempered) -> tuple[Array, Array]:
        """Return how the log density changes on the whole way, and the batch's log likelihood."""
        new = _batch_likelihoods(target, at.x, batch) @ batch.weight
        prior = jax.vmap(lambda v: target.log_prior(target.unravel(v)) - start.log_density(v))(at.x)
        gain = new + (gamma - 1) * at.old + jnp.where(first, prior, 0)
        return jnp.where(jnp.isfinite(gain), gain, -1e30), new

    def advance(at: _Tempered) -> _Tempered:
        gain, _ = gains(at)
        more = _largest_share(at.log_weights, gain, 1 - at.beta)
        beta = jnp.where(more >= 1 - at.beta, 1, at.beta + more)
        at = at._replace(log_weights=jax.nn.log_softmax(at.log_weights + more * gain), beta=beta)
        poor = effective_number(at.log_weights) < EFFECTIVE * len(x)
        return jax.lax.cond(poor | (beta < 1), renewed, lambda at: at, at)

    def renewed(at: _Tempered) -> _Tempered:
        now = jax.random.fold_in(key, 1 + at.rejuvenations)
        chains, frame, here = rejuvenate(target, now, at.x, at.log_weights, density(at), at.step)
        gone, doubt = at.gone._replace(at=frame.centre), at.doubt
        if here.past is not None:
            gone, doubt = here.past.gone, here.past.doubt
        new = _batch_likelihoods(target, chains.x, batch) @ batch.weight
        prior = jax.vmap(lambda v: here.prior_share * target.log_prior(target.unravel(v)))(chains.x)
        held = jnp.where(here.prior_share < 1, (1 - here.prior_share) * jax.vmap(start.log_density)(chains.x), 0)
        old = (chains.value - prior - held - at.beta * new) / (1 + at.beta * (gamma - 1))
        even = jnp.full_like(at.log_weights, -math.log(len(x)))
        return _Tempered(
            chains.x,
            even,
            old - old.mean(),
            at.beta,
            chains.step,
            chains.accepted,
            chains.remembered,
            at.rejuvenations + 1,
            at.moves + chains.moves - 1,
            gone,
            doubt,
        )

    zero = jnp.zeros((), jnp.int32)
    begin = _Tempered(
        x,
        state.log_weights,
        state.log_likelihood,
        jnp.zeros((), x.dtype),
        state.step,
        state.accepted,
        state.remembered,
        zero,
        zero,
        storage.gone,
        storage.doubt,
    )
    end = jax.lax.while_loop(lambda at: at.beta < 1, advance, begin)
    of_batch = _batch_likelihoods(target, end.x, batch) @ batch.weight
    likelihood = gamma * end.old + of_batch
    storage = faded(storage._replace(gone=end.gone, doubt=end.doubt), gamma)
    storage, leaving = keep(jax.random.fold_in(key, 2**20), storage, limits, weight, top)
    if leaving is not None:
        storage = leave(target, storage, leaving, top)
    storage = storage._replace(arrived=storage.arrived + (weight > 0).sum(dtype=jnp.int32))
    new = IBISState(
        end.x,
        end.log_weights,
        likelihood - likelihood.mean(),
        storage,
        end.step,
        end.accepted,
        end.remembered,
        clock.round,
        clock.rows,
        state.rejuvenations + end.rejuvenations,
        state.moves + end.moves,
    )
    fits = top + len(weight) <= len(storage.weight)
    possible = of_batch.max() > IMPOSSIBLE / 2
    sound = jnp.where(fits & possible, 0, jnp.nan)
    new, finite = keep_if_finite(new, state, (end.x, end.log_weights), sound)
    info = StepInfo(clock.rows, log_predictive, root_mean_square(end.x - x), finite, predicted)
    return new._replace(round=clock.round, rows=clock.rows), info


def _batch_likelihoods(target: Target, x: Particles, batch: Batch) -> Array:
    return jax.vmap(lambda v: jnp.where(batch.weight > 0, row_likelihoods(target, v, batch.data), 0))(x)


def _start(target: Target, x: Particles) -> Gaussian:
    """Return the Gaussian that the first batch begins at: the prior where it is one, else that of the particles."""
    prior = gaussian_prior(target)
    if prior is not None:
        return Gaussian(jnp.asarray(prior.mean, x.dtype), jnp.sqrt(jnp.asarray(prior.variance, x.dtype)))
    sd = x.std(0)
    return Gaussian(x.mean(0), jnp.where(sd > 0, sd, 1))  # all biases may start at 0


def _largest_share(log_weights: Array, gain: Array, left: Scalar) -> Scalar:
    """Return how much of a change can be made at once: all of it, or what leaves half of the particles effective."""
    wanted = EFFECTIVE * len(gain)

    def enough(share: Scalar) -> Array:
        return effective_number(log_weights + share * gain) >= wanted

    def halve(_: int, given: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        low, high = given
        middle = (low + high) / 2
        yes = enough(middle)
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    low, _ = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.zeros_like(left), left))
    all_at_once = effective_number(log_weights + left * gain) >= EFFECTIVE / 2 * len(gain)
    return jnp.where(all_at_once, left, jnp.maximum(low, jnp.minimum(SMALLEST_SHARE, left)))
