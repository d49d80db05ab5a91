r"""Gauss–Newton particles: each remembers the past as a covariance, and absorbs a batch like a Kalman filter."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import Clock, StepInfo, TargetSampler, compiled, predicted_rows, root_mean_square, tick
from opvi.filters import _covariance as covariance
from opvi.filters import _kalman as kalman
from opvi.filters._covariance import Blocks, Covariance, exactly, within
from opvi.predictive import Distribution, Normal
from opvi.targets import Target, cast, check_batch
from opvi.types import Array, Batch, Data, Key, Particles, Schedule, Start, Tree, at_round

MEMORY_OF_ERRORS = 20.0  # rounds over which a particle's squared prediction error is averaged


class GaussNewtonState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    past: Covariance  # of each particle, whole or in blocks
    error: Array  # [n]: running mean squared error of each particle's predictions; regression only
    round: Array
    rows: Array


class AdaptiveNoise(NamedTuple):
    r"""Observation noise $R = \max(c\,\bar e, R_{\min})$ from a particle's own running squared error $\bar e$.

    The noise must be smaller than the error while the network still learns, hence a share $c < 1$.
    """

    share: float = 0.3
    smallest: float = 0.01


@dataclass(frozen=True)
class GaussNewton(TargetSampler):
    """Settings of `gauss_newton`."""

    forgetting: Schedule
    half_life: Schedule | None
    noise: AdaptiveNoise | None
    largest_growth: float
    budget: float

    def init(self, key: Key, particles: Start = None) -> GaussNewtonState:
        """Return the state before any row."""
        w = self.drawn(key, particles)
        if not has_gaussian_prior(self.target):
            raise ValueError(
                "this target's prior is not a Gaussian with known variances, but Gauss–Newton starts from one. "
                "Give `prior_variance` and `noise` as numbers (or None), not as `Gamma` priors; `AdaptiveNoise` learns "
                "noise."
            )
        past = covariance.start(_prior(self.target, _blocks(self, w), w))
        zero = jnp.zeros((), jnp.int32)
        return GaussNewtonState(w, past, jnp.ones(len(w), w.dtype), zero, zero)

    @compiled
    @exactly
    def step(self, key: Key, state: GaussNewtonState, batch: Batch) -> tuple[GaussNewtonState, StepInfo]:
        """Learn from a batch."""
        w, target = state.particles, self.target
        batch = cast(batch, w.dtype)
        check_batch(target, w[0], batch)
        clock = tick(state, batch)
        x, y = batch.data
        dist = jax.vmap(lambda v: _distribution(target, v, x))(w)
        log_predictive, predicted = predicted_rows(batch, jax.vmap(lambda p: p.log_density(y))(dist))
        error = state.error
        if isinstance(dist, Normal) and self.noise is not None:
            error = _running_error(dist, error, batch, clock)
            R = jnp.maximum(self.noise.share * error, self.noise.smallest)
            dist = dist._replace(variance=jnp.broadcast_to(R[:, None], dist.variance.shape))
        A, gradient = jax.vmap(partial(_linearise, target), (0, 0, None, None))(w, dist, batch.data, batch.weight)
        blocks = _blocks(self, w)
        rows = jnp.moveaxis(blocks.gather(jnp.concatenate([A, gradient[:, None]], 1)), 1, 2)  # [n, K, R + 1, D]
        product = kalman.times(rows, state.past)
        new = kalman.gain(rows[:, :, :-1], product[:, :, :-1])
        move = kalman.move_by_score(new, rows[:, :, -1], product[:, :, -1])
        trusted = jnp.isfinite(gradient.sum(1) + error) & ~jnp.isnan(log_predictive)
        largest = self.largest_growth * _prior(target, blocks, w)
        done = kalman.absorb(state.past, new, move, _gamma(self, batch, clock), largest, trusted)
        move = blocks.scatter(done.move)
        info = StepInfo(clock.rows, log_predictive, root_mean_square(move), done.good.all(), predicted)
        error = jnp.where(done.good, error, state.error)
        return GaussNewtonState(w + move, done.past, error, clock.round, clock.rows), info


def gauss_newton(
    target: Target,
    *,
    forgetting: Schedule = 0.99,
    half_life: Schedule | None = None,
    noise: AdaptiveNoise | None = None,
    largest_growth: float = 4.0,
    budget: float = 2e9,
) -> GaussNewton:
    r"""Recursive Gauss–Newton with a full covariance per particle, for targets with a distribution head.

    With outputs $f$, their Jacobian $J$, the head's gradient $g = \nabla_f \log p(y \mid f)$ and
    $H = \sum_r L_r L_r^\top$ its curvature, $A = L^\top J$:

    $$C' = C - C A^\top (I + A C A^\top)^{-1} A C, \qquad w \gets w + C' J^\top g, \qquad C \gets C' / \gamma_t$$

    which is the extended Kalman filter. It starts from the Gaussian prior of the target. The covariances take
    $n d^2$ numbers; where the `budget` is short they are cut into blocks, which for an MLP hold whole hidden units.

    Args:
        target: a network or regression with a Gaussian prior and a Gaussian, Bernoulli or categorical
            head; batches are pairs `(X, y)`.
        forgetting: $\gamma_t$, applied once per round; 1 never forgets. Below 1 the last $1/(1-\gamma)$ rounds count.
        half_life: in rows, instead of `forgetting`: data older than that count half. May be a function of the
            rows seen.
        noise: for a Gaussian head, noise that adapts instead of the head's own variance.
        largest_growth: forgetting never lets a variance exceed this many times the prior's.
        budget: bytes that the covariances of all particles may take.
    """
    if target.predict is None:
        raise TypeError("Gauss–Newton needs the outputs of a model: a target with `predict`, e.g. `opvi.mlp(...)`.")
    if not callable(forgetting) and not 0 < forgetting <= 1:
        raise ValueError(f"`forgetting` is {forgetting!r}, but must lie in (0, 1]; 1 never forgets.")
    if half_life is not None and not callable(half_life) and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life!r}, but must be a number of rows greater than 0, or None.")
    if not budget > 0:
        raise ValueError(f"`budget` is {budget!r}, but must be a number of bytes greater than 0.")
    return GaussNewton(target, forgetting, half_life, noise, largest_growth, budget)


def _running_error(dist: Normal, error: Array, batch: Batch, clock: Clock) -> Array:
    """Return each particle's squared error, averaged over the last rounds: `[n]`."""
    _, y = batch.data
    squared = ((dist.mean - y[None]) ** 2 * batch.weight[None]).sum(1) / jnp.maximum(batch.weight.sum(), 1e-30)
    gain = 1 / jnp.minimum(clock.t, MEMORY_OF_ERRORS)
    return (1 - gain) * error + gain * squared


def _gamma(sampler: GaussNewton, batch: Batch, clock: Clock) -> Array:
    """Return what this round leaves of the past's information."""
    if sampler.half_life is None:
        return at_round(sampler.forgetting, clock.t)
    return jnp.exp2(-batch.weight.sum() / at_round(sampler.half_life, clock.seen_rows))


def _linearise(target: Target, w: Array, dist: Distribution, data: Data, weight: Array) -> tuple[Array, Array]:
    """Return one particle's rows of curvature A, `[B·K, d]`, and the gradient $J^T g$, `[d]`."""

    def outputs(w: Array, x: Tree) -> Array:
        """One row's, `[C]`."""
        return _outputs(_distribution(target, w, jax.tree.map(lambda a: a[None], x)))[0]

    x, y = data
    J = jax.vmap(jax.jacrev(outputs), (None, 0))(w, x)  # [B, C, d]
    g, L = dist.curvature(y)  # [B, C], [B, C, K]
    L = L * jnp.sqrt(weight)[:, None, None]
    A = jnp.einsum("bck,bcd->bkd", L, J).reshape(-1, len(w))
    return A, jnp.einsum("bcd,bc->d", J, g * weight[:, None])


def _distribution(target: Target, w: Array, x: Tree) -> Distribution:
    """Return what one particle says of y."""
    return target.predict(target.unravel(w), x)  # type: ignore[misc]  # `gauss_newton` takes no target without


def _outputs(dist: Distribution) -> Array:
    """What the head was made of: [B, C]."""
    if isinstance(dist, Normal):
        return dist.mean[:, None]
    values = dist[0]
    return values[:, None] if values.ndim == 1 else values


def _prior(target: Target, blocks: Blocks, w: Particles) -> Array:
    """Return the variances of a factorised Gaussian prior, from the slope of its gradient: `[n, K, D]`, padding 1."""
    gradient = jax.grad(lambda v: target.log_prior(target.unravel(v)))
    variance = blocks.gather(1 / (gradient(jnp.zeros_like(w[0])) - gradient(jnp.ones_like(w[0]))))
    return jnp.tile(jnp.where(variance > 0, variance, 1)[None], (len(w), 1, 1))


def blocks_for(target: Target, particles: int, budget: float, dtype: np.dtype) -> tuple[Blocks, int]:
    """Return how `gauss_newton` would cut the covariances, and how many parameters a hidden unit has."""
    places, unit = target.architecture.mlp.units if target.architecture else (np.arange(target.dim), 1)
    return within(places, unit, budget / particles / dtype.itemsize), unit


def _blocks(sampler: GaussNewton, w: Particles) -> Blocks:
    return blocks_for(sampler.target, len(w), sampler.budget, w.dtype)[0]


def has_gaussian_prior(target: Target) -> bool:
    """Whether the prior is Gaussian with independent parts: with a gradient that is linear and points home."""
    gradient = jax.grad(lambda v: target.log_prior(target.unravel(v)))
    with jax.ensure_compile_time_eval():
        zero, one, two = (gradient(jnp.full(target.dim, value)) for value in (0.0, 1.0, 2.0))
        # Correlations show along a direction without a pattern.
        signs = jax.random.rademacher(jax.random.key(0), (target.dim,), one.dtype)
        linear = jnp.allclose(two - one, one - zero, rtol=1e-3)
        apart = jnp.allclose(gradient(signs) - zero, signs * (one - zero), rtol=1e-3)
        return bool(linear & apart & (zero > one).all())
