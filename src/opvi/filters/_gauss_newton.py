r"""Gauss–Newton particles: each remembers the past as a covariance, and absorbs a batch like a Kalman filter."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import StepInfo, compiled, log_predictive_of, root_mean_square, tick
from opvi.filters import _covariance as covariance
from opvi.filters import _kalman as kalman
from opvi.filters._blocks import Blocks, within
from opvi.filters._covariance import Covariance
from opvi.predictive import Distribution, Normal
from opvi.targets import Target, as_particles, cast, check_batch
from opvi.types import Algorithm, Array, Batch, Key, Particles, Schedule, at_round

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


def gauss_newton(
    target: Target,
    *,
    forgetting: Schedule = 0.99,
    half_life: float | Callable[[Array], Any] | None = None,
    noise: AdaptiveNoise | None = None,
    largest_growth: float = 4.0,
    memory: float = 2e9,
) -> Algorithm:
    r"""Recursive Gauss–Newton with a full covariance a particle, for targets with a distribution head.

    With outputs $f$, their Jacobian $J$, the head's gradient $g = \nabla_f \log p(y \mid f)$ and
    $H = \sum_r L_r L_r^\top$ its curvature, $A = L^\top J$:

    $$C' = C - C A^\top (I + A C A^\top)^{-1} A C, \qquad w \gets w + C' J^\top g, \qquad C \gets C' / \gamma_t$$

    which is the extended Kalman filter. It starts from the Gaussian prior of the target. The covariances take
    $n d^2$ numbers; where `memory` is short they are cut into blocks, which for an MLP hold whole hidden units.

    Args:
        target: a network or regression with a Gaussian prior and a Gaussian, Bernoulli or categorical
            head; batches are pairs `(X, y)`.
        forgetting: $\gamma_t$, applied once a round; 1 never forgets. Below 1 the last $1/(1-\gamma)$ rounds count.
        half_life: in rows, instead of `forgetting`: data older than that count half. May be a function of the
            rows seen.
        noise: for a Gaussian head, noise that adapts instead of the head's own variance.
        largest_growth: forgetting never lets a variance exceed this many times the prior's.
        memory: bytes that the covariances of all particles may take.
    """
    if target.predict is None:
        raise TypeError("Gauss–Newton needs the outputs of a model: a target with `predict`, e.g. `opvi.mlp(...)`.")
    if not callable(forgetting) and not 0 < forgetting <= 1:
        raise ValueError(f"`forgetting` is {forgetting!r}, but must lie in (0, 1]; 1 never forgets.")
    if half_life is not None and not callable(half_life) and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life!r}, but must be a number of rows greater than 0, or None.")
    predict = target.predict
    units = _units(target)

    def outputs(w: Array, x: Any) -> Array:
        """One row's outputs, [C]."""
        return _outputs(predict(target.unravel(w), jax.tree.map(lambda a: a[None], x)))[0]

    def prior(blocks: Blocks, like: Array) -> Array:
        """The prior variances of one particle, [K, D]; 1 in the padding."""
        variance = blocks.gather(_prior_variance(target, like))
        return jnp.where(variance > 0, variance, 1)

    def init(key: Key, particles: Any) -> GaussNewtonState:
        w = as_particles(target, key, particles)
        if not has_gaussian_prior(target):
            raise ValueError(
                "this target's prior is not a Gaussian with known variances, but Gauss–Newton starts from one. "
                "Give `prior_variance` and `noise` as numbers (or None), not as `Gamma` priors; `AdaptiveNoise` learns "
                "noise."
            )
        variance = prior(within(*units, memory / len(w) / w.dtype.itemsize), w[0])
        past = covariance.start(jnp.tile(variance[None], (len(w), 1, 1)))
        zero = jnp.zeros((), jnp.int32)
        return GaussNewtonState(w, past, jnp.ones(len(w), w.dtype), zero, zero)

    def linearise(w: Array, dist: Distribution, data: Any, weight: Array) -> tuple[Array, Array]:
        """One particle's rows of curvature A, [B·K, d], and the gradient $J^T g$, [d]."""
        x, y = data
        J = jax.vmap(jax.jacrev(outputs), (None, 0))(w, x)  # [B, C, d]
        g, L = dist.curvature(y)  # [B, C], [B, C, K]
        A = jnp.einsum("bck,bcd->bkd", L * jnp.sqrt(weight)[:, None, None], J).reshape(-1, len(w))
        return A, jnp.einsum("bcd,bc->d", J, g * weight[:, None])

    @compiled
    def step_(key: Key, state: GaussNewtonState, batch: Batch) -> tuple[GaussNewtonState, StepInfo]:
        w = state.particles
        blocks = within(*units, memory / len(w) / w.dtype.itemsize)
        batch = cast(batch, w.dtype)
        check_batch(target, w[0], batch)
        clock = tick(state, batch)
        x, y = batch.data
        dist = jax.vmap(lambda v: predict(target.unravel(v), x))(w)
        log_predictive = log_predictive_of(jax.vmap(lambda p: p.log_density(y))(dist), batch)
        error = state.error
        if isinstance(dist, Normal) and noise is not None:
            squared = ((dist.mean - y[None]) ** 2 * batch.weight[None]).sum(1) / jnp.maximum(batch.weight.sum(), 1e-30)
            gain = 1 / jnp.minimum(clock.t, MEMORY_OF_ERRORS)
            error = (1 - gain) * error + gain * squared
            R = jnp.maximum(noise.share * error, noise.smallest)
            dist = dist._replace(variance=jnp.broadcast_to(R[:, None], dist.variance.shape))
        A, gradient = jax.vmap(linearise, (0, 0, None, None))(w, dist, batch.data, batch.weight)
        rows = jnp.moveaxis(blocks.gather(jnp.concatenate([A, gradient[:, None]], 1)), 1, 2)  # [n, K, R + 1, D]
        product = kalman.times(rows, state.past)
        new = kalman.gain(rows[:, :, :-1], product[:, :, :-1])
        move = kalman.move_by_score(new, rows[:, :, -1], product[:, :, -1])
        if half_life is None:
            gamma = at_round(forgetting, clock.t)
        else:
            gamma = jnp.exp2(-batch.weight.sum() / at_round(half_life, clock.seen_rows))
        largest = jnp.tile(largest_growth * prior(blocks, w[0])[None], (len(w), 1, 1))
        trusted = jnp.isfinite(gradient.sum(1) + error) & ~jnp.isnan(log_predictive)
        done = kalman.absorb(state.past, new, move, gamma, largest, trusted)
        move = blocks.scatter(done.move)
        info = StepInfo(clock.rows, log_predictive, root_mean_square(move), done.good.all())
        error = jnp.where(done.good, error, state.error)
        return GaussNewtonState(w + move, done.past, error, clock.round, clock.rows), info

    return Algorithm(init, step_)


def _outputs(dist: Distribution) -> Array:
    """What the head was made of: [B, C]."""
    if isinstance(dist, Normal):
        return dist.mean[:, None]
    values = dist[0]
    return values[:, None] if values.ndim == 1 else values


def _prior_variance(target: Target, like: Array) -> Array:
    """The variances of a factorised Gaussian prior, from the slope of its gradient."""
    gradient = jax.grad(lambda v: target.log_prior(target.unravel(v)))
    return 1 / (gradient(jnp.zeros_like(like)) - gradient(jnp.ones_like(like)))


def _units(target: Target) -> tuple[np.ndarray, int]:
    """The places of the parameters, those of one hidden unit of an MLP side by side, and how many a unit has."""
    return target.architecture.mlp.units if target.architecture else (np.arange(target.dim), 1)


def blocks_for(target: Target, particles: int, memory: float, dtype: Any) -> tuple[Blocks, int]:
    """How `gauss_newton` would cut the covariances, and how many parameters a hidden unit has."""
    places, unit = _units(target)
    return within(places, unit, memory / particles / np.dtype(dtype).itemsize), unit


def has_gaussian_prior(target: Target) -> bool:
    """Whether the prior is Gaussian with independent parts: with a gradient that is linear and points home."""
    gradient = jax.grad(lambda v: target.log_prior(target.unravel(v)))
    with jax.ensure_compile_time_eval():  # a question about the target alone, also where particles are traced
        zero, one, two = (gradient(jnp.full(target.dim, value)) for value in (0.0, 1.0, 2.0))
        # Correlations show along a direction without a pattern.
        signs = jax.random.rademacher(jax.random.key(0), (target.dim,), one.dtype)
        linear = jnp.allclose(two - one, one - zero, rtol=1e-3)
        apart = jnp.allclose(gradient(signs) - zero, signs * (one - zero), rtol=1e-3)
        return bool(linear & apart & (zero > one).all())
