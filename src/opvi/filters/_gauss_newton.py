r"""Gauss–Newton particles: each remembers the past as a covariance, and absorbs a batch like a Kalman filter."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import (
    Clock,
    StepInfo,
    TargetSampler,
    compiled,
    mean_over,
    predicted_rows,
    root_mean_square,
    stand_ins,
    tick,
)
from opvi.filters import _covariance as covariance
from opvi.filters import _kalman as kalman
from opvi.filters._covariance import Blocks, Covariance, exactly, within
from opvi.filters._gauss_newton_report import Diagnosis, diagnose
from opvi.filters._looking import AdaptiveNoise, Seen, believed, held_back, look
from opvi.filters._prior import GaussianPrior, distribution, gaussian_prior, jacobian, linear_outputs
from opvi.filters._robust import checked_robust
from opvi.filters._spread import averaged, spread_out
from opvi.predictive import Distribution, Predictive
from opvi.targets import Target, cast, check_batch
from opvi.types import Array, Batch, Key, Particles, Predicted, Scalar, Schedule, Seed, Start, State, Tree, at_round

SMALLEST_SHARE = 1e-12  # of a prior's variance: a smaller one of a linear model is rounding error
ROWS = 32  # whose class probabilities are averaged at once: their derivatives take much more room than they do
LARGEST_STEP = 1e3  # of a parameter of a curved model, in deviations of the largest variance that forgetting allows


class GaussNewtonState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    past: Covariance  # the posterior's, of each particle, whole or in blocks
    error: Array  # [n]: running mean squared error of each particle's predictions; regression only
    log_evidence: Scalar  # of all rows so far, by the particles' mean; exact for linear models with Gaussian noise
    round: Array
    rows: Array


@dataclass(frozen=True)
class GaussNewton(TargetSampler):
    """Settings of `gauss_newton`."""

    forgetting: Schedule
    half_life: Schedule | None
    noise: AdaptiveNoise | None
    largest_growth: float
    budget: float
    # Whether noise that adapts, and a half-life that follows the rows seen, are for curved models alone: a linear
    # one needs neither.
    eased: bool = field(default=False, kw_only=True)
    robust: float | None = field(default=None, kw_only=True)

    def init(self, key: Key, particles: Start = None) -> GaussNewtonState:
        """Return the state before any row."""
        w = self.drawn(key, particles)
        prior, blocks = _prior(self.target), _blocks(self, w)
        if prior.covariance is None:
            past = covariance.start(_variances(prior, blocks, w))
        elif len(blocks.order) == 1:
            whole = jnp.asarray(prior.covariance, w.dtype)
            past = Covariance(jnp.tile(whole[None, None], (len(w), 1, 1, 1)), jnp.zeros((), jnp.int32))
        else:
            raise ValueError(
                f"the prior's {self.target.dim} parameters are correlated, but their covariances do not fit "
                f"`budget={self.budget:g}` as a whole. Give more, or fewer `particles`."
            )
        zero = jnp.zeros((), jnp.int32)
        return GaussNewtonState(w, past, jnp.ones(len(w), w.dtype), jnp.zeros((), w.dtype), zero, zero)

    @compiled
    @exactly
    @exactly
    def step(self, key: Key, state: GaussNewtonState, batch: Batch) -> tuple[GaussNewtonState, StepInfo]:
        """Learn from a batch."""
        w, target = state.particles, self.target
        batch = cast(batch, w.dtype)
        check_batch(target, w[0], batch)
        clock = tick(state, batch)
        if linear_outputs(target, batch.data[0]):
            return _linear_step(self, state, batch, clock)
        blocks, gamma = _blocks(self, w), _gamma(self, batch, clock)
        largest = self.largest_growth * _variances(_prior(target), blocks, w)
        seen = look(self.target, self.noise, w, state.error, batch, clock, self.robust)
        log_predictive, predicted = predicted_rows(batch, seen.log_density)
        rows = jnp.moveaxis(blocks.gather(seen.rows), 1, 2)  # [n, K, R + 1, D]
        fade = covariance.fading(state.past, gamma, largest)
        product = covariance.faded_times(rows, state.past, fade)
        seen, rows, product = believed(self.noise, seen, rows, product, clock, self.robust)
        new = kalman.gain(rows[:, :, :-1], product[:, :, :-1])
        move = kalman.move_by_score(new, rows[:, :, -1], product[:, :, -1])
        move = move * held_back(seen, rows, move)[:, None, None]
        if seen.regression is None:
            new, move = _again(self, state, fade, blocks, seen, move, clock)
        learnt = ~jnp.isnan(log_predictive)  # otherwise the rows are bad, and not the particles
        good = (new.surprise > kalman.SMALLEST_SURPRISE).all(1)
        good &= jnp.isfinite(move.sum((1, 2)) + (new.rows**2).sum((1, 2, 3)) + seen.error)
        # A step far beyond what the prior thinks possible overflows in the next pass: such a particle is lost already.
        good &= (jnp.abs(move) <= LARGEST_STEP * jnp.sqrt(largest)).all((1, 2))
        good = jnp.where(learnt, good, False)
        still = covariance.Fading(
            *(jnp.where(good[:, None, None], a, b) for a, b in zip(fade, (1.0, 0.0), strict=True))
        )
        past = covariance.faded_shed(state.past, still, jnp.where(good[:, None, None, None], new.rows, 0), largest)
        moved = w + blocks.scatter(jnp.where(good[:, None, None], move, 0))
        info = StepInfo(clock.rows, log_predictive, root_mean_square(moved - w), good.any(), predicted)
        evidence = state.log_evidence + jnp.where(good.any(), (predicted.log_density * seen.batch.weight).sum(), 0)
        past = covariance.without_correlations(past, jnp.broadcast_to(learnt & ~good.any(), good.shape))
        # One bad particle does not end the run: it takes the place of another.
        info = info._replace(restarted=jnp.where(learnt & good.any(), (~good).sum(), 0))
        which = stand_ins(jax.random.fold_in(key, clock.round), good)
        error = jnp.where(good, seen.error, state.error)[which]

        def replaced(matrices: Array) -> Array:
            return matrices[which]

        past = past._replace(matrices=covariance.when(~good.all() & good.any(), replaced, past.matrices))
        return GaussNewtonState(moved[which], past, error, evidence, clock.round, clock.rows), info

    def log_evidence(self, state: GaussNewtonState) -> float:
        """Return `state.log_evidence`, log p(rows so far); with a half-life, the sum of log predictive densities."""
        return float(state.log_evidence)

    def _draws(self, state: GaussNewtonState, key: Key, n: int) -> Particles:  # type: ignore[override]
        """Return n draws: pick a particle, then draw from its covariance."""
        return _draws(self, state, key, n)

    def diagnosis(self, state: GaussNewtonState, key: Seed = 0) -> Diagnosis:
        """Return what is known of how far draws are from the posterior; nothing in it is random."""
        blocks = _blocks(self, state.particles)
        adapts = (
            None
            if self.eased and self.target.architecture is not None and len(self.target.architecture.mlp.shapes) == 1
            else self.noise
        )
        variance = blocks.scatter(covariance.variances(state.past))
        whole = len(blocks.order) == 1
        x, rows = state.particles, int(state.rows)
        return diagnose(self.target, adapts, self.robust is None, whole, x, variance, state.error, rows)

    @exactly
    def predict(self, state: State, x: Tree) -> Predictive:
        """Return the posterior predictive at inputs x, including each particle's uncertainty from its covariance."""
        return spread_out(*_outputs(self, state, x))  # type: ignore[arg-type]

    def averaged(self, state: GaussNewtonState, x: Tree) -> Predictive:
        """Return the same for classes, with one component per particle, in little memory."""
        return Predictive(_averaged(self, state, x))


def gauss_newton(
    target: Target,
    *,
    forgetting: Schedule = 0.99,
    half_life: Schedule | None = None,
    noise: AdaptiveNoise | None = None,
    largest_growth: float = 4.0,
    budget: float = 2e9,
    robust: float | None = None,
) -> GaussNewton:
    r"""Recursive Gauss–Newton with a full covariance per particle, for targets with a distribution head.

    With outputs $f$, their Jacobian $J$, the head's gradient $g = \nabla_f \log p(y \mid f)$ and
    $H = \sum_r L_r L_r^\top$ its curvature, $A = L^\top J$:

    $$C \gets C / \gamma_t, \qquad C \gets C - C A^\top (I + A C A^\top)^{-1} A C, \qquad w \gets w + C J^\top g$$

    which is the extended Kalman filter. It starts from the Gaussian prior of the target. The covariances take
    $n d^2$ numbers; where the `budget` is short they are cut into blocks, which for an MLP hold whole hidden units.
    The covariances stored are the posterior's; forgetting is applied before the next batch. The posterior is
    `sampler.draws(state, key, n)`, a particle and then a draw from its covariance, never the particles alone.

    **Models that are linear in their parameters** have one posterior mode, and all particles equal its mean, wherever
    they start: the prior enters by its density alone. Forgetting gives back to the prior what it takes from the data,
    $p_t \propto p_{t-1}^{\gamma}\, p_0^{1-\gamma}\, p(D_t)$. With Gaussian noise all of this is exact, and so is
    `state.log_evidence`. The particles of networks start apart, each with the prior's covariance around it.

    Args:
        target: a network or regression with a Gaussian prior and a Gaussian, Bernoulli or categorical
            head; batches are pairs `(X, y)`.
        forgetting: $\gamma_t$, applied once per round; 1 never forgets. Below 1 the last $1/(1-\gamma)$ rounds count.
        half_life: in rows, instead of `forgetting`: data older than that count half. May be a function of the
            rows seen.
        noise: adaptive noise for a Gaussian head, instead of the head's own variance.
        largest_growth: forgetting never lets a variance of a network's weights exceed this many times the prior's.
        budget: bytes that the covariances of all particles may take.
        robust: None believes every row: what is learnt is the posterior. A number c, in standard deviations of the
            prediction: the likelihood of a row whose error r is larger gets the power $(c/r)^2$, so that garbage
            teaches little; a label predicted with probability p has $r^2 = (1-p)/p$. Rows within c count as ever.
            `state.log_evidence` is then that of the weighted rows.
    """
    if target.predict is None:
        raise TypeError("Gauss–Newton needs the outputs of a model: a target with `predict`, e.g. `opvi.mlp(...)`.")
    if not callable(forgetting) and not 0 < forgetting <= 1:
        raise ValueError(f"`forgetting` is {forgetting!r}, but must lie in (0, 1]; 1 never forgets.")
    if half_life is not None and not callable(half_life) and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life!r}, but must be a number of rows greater than 0, or None.")
    if not budget > 0:
        raise ValueError(f"`budget` is {budget!r}, but must be a number of bytes greater than 0.")
    robust = checked_robust(robust)
    return GaussNewton(target, forgetting, half_life, noise, largest_growth, budget, robust=robust)


# --- linear models ------------------------------------------------------------------------------


def _linear_step(
    sampler: GaussNewton, state: GaussNewtonState, batch: Batch, clock: Clock
) -> tuple[GaussNewtonState, StepInfo]:
    """Learn with a model that is linear in its parameters: one Gaussian, the same for every particle."""
    n, dtype = state.particles.shape[0], state.particles.dtype
    prior, blocks = _prior(sampler.target), _blocks(sampler, state.particles)
    mean, variance = (blocks.gather(jnp.asarray(a, dtype)) for a in (prior.mean, prior.variance))  # [K, D]
    variance = jnp.where(variance > 0, variance, 1)
    w = jnp.where(state.round == 0, mean[None], blocks.gather(state.particles[:1]))  # [1, K, D]
    C = state.past.matrices[:1]
    if not _never_forgets(sampler):
        gamma = _gamma(sampler, batch, clock)
        identity = jnp.eye(C.shape[-1], dtype=dtype)[None]
        precision = identity / variance[..., None]
        if prior.covariance is not None:
            precision = jnp.asarray(np.linalg.inv(prior.covariance), dtype)[None]
        C, w = covariance.restored(C, w, gamma, mean, precision)
    at = blocks.scatter(w)
    noise = None if sampler.eased else sampler.noise
    seen = look(sampler.target, noise, at, state.error[:1], batch, clock, sampler.robust)
    rows = jnp.moveaxis(blocks.gather(seen.rows), 1, 2)  # [1, K, R + 1, D]
    product = rows @ C
    predicted = Predicted(_marginal(seen, rows, product, batch))
    log_predictive = mean_over(batch, predicted.log_density)
    seen, rows, product = believed(noise, seen, rows, product, clock, sampler.robust)
    new = kalman.gain(rows[:, :, :-1], product[:, :, :-1])
    if seen.regression is None:
        move = kalman.move_by_score(new, rows[:, :, -1], product[:, :, -1])
    else:  # the same, with fewer rounding errors
        move = jnp.einsum("nkrd,r->nkd", new.rows, seen.regression.surprise(new, seen.batch))
    evidence = _batch_evidence(seen, new)
    Z = new.rows
    C = C - jnp.einsum("nkrd,nkre->nkde", Z, Z)
    C = (C + C.mT) / 2
    diagonal = jnp.eye(C.shape[-1], dtype=dtype)[None, None]
    least = jnp.maximum(jnp.diagonal(C, axis1=2, axis2=3), SMALLEST_SHARE * variance[None])
    C = C * (1 - diagonal) + least[..., None] * diagonal
    moved = blocks.scatter(w + move)
    good = jnp.isfinite(moved.sum() + C.sum() + evidence + seen.error.sum()) & ~jnp.isnan(log_predictive)
    new_state = GaussNewtonState(
        jnp.broadcast_to(moved, state.particles.shape),
        Covariance(jnp.broadcast_to(C, (n, *C.shape[1:])), state.past.updates),
        jnp.broadcast_to(seen.error, (n,)),
        state.log_evidence + evidence,
        state.round,
        state.rows,
    )
    kept = jax.tree.map(lambda a, b: jnp.where(good, a, b), new_state, state)
    info = StepInfo(clock.rows, log_predictive, root_mean_square(moved - at), good, predicted)
    return kept._replace(round=clock.round, rows=clock.rows), info


def _never_forgets(sampler: GaussNewton) -> bool:
    """Return whether a linear model with these settings never forgets."""
    if sampler.half_life is None or (sampler.eased and callable(sampler.half_life)):
        return sampler.half_life is not None or sampler.forgetting == 1.0
    return sampler.half_life == math.inf


def _marginal(seen: Seen, rows: Array, product: Array, batch: Batch) -> Array:
    """Return the log predictive density of each row; for classes, at the mean of the parameters."""
    if seen.regression is None:
        return seen.log_density[0]
    residual, noise = (a[0] for a in seen.regression)
    doubt = (rows * product).sum((1, 3))[0, :-1] / jnp.where(batch.weight > 0, batch.weight, 1)
    variance = noise * (1 + doubt)
    return -0.5 * (residual**2 / variance + jnp.log(2 * math.pi * variance))


def _batch_evidence(seen: Seen, new: kalman.Gain) -> Scalar:
    """Return the log density of all rows jointly; for classes, the sum of the predicted ones."""
    weight = seen.batch.weight
    if seen.regression is None:
        return (seen.log_density[0] * weight).sum()
    noise = (weight * jnp.log(2 * math.pi * seen.regression.noise[0])).sum()
    surprise = (seen.regression.surprise(new, seen.batch) ** 2).sum()
    return jnp.log(jnp.diagonal(new.inverse[0])).sum() - (surprise + noise) / 2


# --- curved models ------------------------------------------------------------------------------


def _again(
    sampler: GaussNewton,
    state: GaussNewtonState,
    fade: covariance.Fading,
    blocks: Blocks,
    seen: Seen,
    move: Array,
    clock: Clock,
) -> tuple[kalman.Gain, Array]:
    r"""Return the gain and the move with the model linearised once more, where a first move m has led.

    $$m \gets C' (J^\top g + A^\top A m), \qquad C' = (C^{-1} + A^\top A)^{-1}$$

    is the next step of Gauss–Newton towards the mode of the particle's own Gaussian times the likelihood of the batch.
    """
    move = jnp.where(jnp.isfinite(move).all((1, 2), keepdims=True), move, 0)
    at = state.particles + blocks.scatter(move)
    seen = look(sampler.target, sampler.noise, at, seen.error, seen.batch, clock, None)
    rows = jnp.moveaxis(blocks.gather(seen.rows), 1, 2)  # [n, K, R + 1, D]
    A = rows[:, :, :-1]
    back = jnp.einsum("nkrd,nr->nkd", A, jnp.einsum("nkrd,nkd->nr", A, move))
    rows = rows.at[:, :, -1].add(back)
    product = covariance.faded_times(rows, state.past, fade)
    new = kalman.gain(A, product[:, :, :-1])
    more = kalman.move_by_score(new, rows[:, :, -1], product[:, :, -1]) - move
    return new, move + more * held_back(seen, rows, more)[:, None, None]


# --- what all models share ----------------------------------------------------------------------


def _gamma(sampler: GaussNewton, batch: Batch, clock: Clock) -> Array:
    """Return the share of past information that this round keeps."""
    if sampler.half_life is None:
        return at_round(sampler.forgetting, clock.t)
    return jnp.exp2(-batch.weight.sum() / at_round(sampler.half_life, clock.seen_rows))


def _outputs(sampler: GaussNewton, state: GaussNewtonState, x: Tree) -> tuple[Distribution, Array]:
    """Return the particles' heads at inputs x, and the covariances of their outputs: `[n, B, C, C]`."""
    w, past, target = state.particles, state.past, sampler.target
    x = jax.tree.map(lambda a: jnp.asarray(a, w.dtype), x)
    if linear_outputs(target, x):  # the particles of a linear model are one
        mean = jnp.asarray(_prior(target).mean, w.dtype)[None]
        w, past = jnp.where(state.round == 0, mean, w[:1]), past._replace(matrices=past.matrices[:1])
    blocks = _blocks(sampler, state.particles)

    def one(w: Array, C: Array) -> tuple[Distribution, Array]:
        """Return a particle's head, and the covariances of its outputs: `[B, C, C]`."""
        J = blocks.gather(jacobian(target, w, x))  # [B, C, K, D]
        return distribution(target, w, x), jnp.einsum("bckd,kde,bfke->bcf", J, C, J)

    return jax.vmap(one)(w, past.matrices)


@partial(jax.jit, static_argnums=0)
@exactly
def _averaged(sampler: GaussNewton, state: GaussNewtonState, x: Tree) -> Distribution:
    def some(x: Tree) -> Distribution:  # rows, each a batch of its own
        return jax.tree.map(lambda a: a[:, 0], averaged(*_outputs(sampler, state, jax.tree.map(lambda a: a[None], x))))

    found = jax.lax.map(some, x, batch_size=ROWS)
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), found)


@partial(jax.jit, static_argnums=(0, 3))
@exactly
def _draws(sampler: GaussNewton, state: GaussNewtonState, key: Key, n: int) -> Particles:
    pick, noise = jax.random.split(key)
    blocks, dtype = _blocks(sampler, state.particles), state.particles.dtype
    which = jax.random.randint(pick, (n,), 0, len(state.particles))
    z = jax.random.normal(noise, (n, *blocks.order.shape), dtype)
    mean = jnp.asarray(_prior(sampler.target).mean, dtype)
    w = jnp.where(state.round == 0, mean[None], state.particles)  # before any row: the prior, wherever particles start
    L = covariance.roots(state.past)

    def one_particle(total: Array, given: tuple[Array, Array]) -> tuple[Array, None]:
        i, root = given
        mine = jnp.einsum("kde,nke->nkd", root, z)
        return jnp.where((which == i)[:, None, None], mine, total), None

    away, _ = jax.lax.scan(one_particle, jnp.zeros_like(z), (jnp.arange(len(w)), L))
    return w[which] + blocks.scatter(away)


def _prior(target: Target) -> GaussianPrior:
    """Return the target's Gaussian prior, or refuse the target."""
    found = gaussian_prior(target)
    if found is None:
        raise ValueError(
            "this target's prior is not a Gaussian with known variances, but Gauss–Newton starts from one. "
            "Give `prior_variance` and `noise` as numbers (or None), not as `Gamma` priors; `AdaptiveNoise` learns "
            "noise."
        )
    return found


def _variances(prior: GaussianPrior, blocks: Blocks, w: Particles) -> Array:
    """Return the prior's variances, `[n, K, D]`, padding 1."""
    variance = blocks.gather(jnp.asarray(prior.variance, w.dtype))
    return jnp.tile(jnp.where(variance > 0, variance, 1)[None], (len(w), 1, 1))


def blocks_for(target: Target, particles: int, budget: float, dtype: np.dtype) -> tuple[Blocks, int]:
    """Return how `gauss_newton` would cut the covariances, and how many parameters a hidden unit has."""
    places, unit = target.architecture.mlp.units if target.architecture else (np.arange(target.dim), 1)
    return within(places, unit, budget / particles / dtype.itemsize), unit


def _blocks(sampler: GaussNewton, w: Particles) -> Blocks:
    return blocks_for(sampler.target, len(w), sampler.budget, w.dtype)[0]
