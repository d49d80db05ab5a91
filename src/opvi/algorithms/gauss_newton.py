r"""Gauss–Newton particles: each remembers the past as a covariance, and absorbs a batch like a Kalman filter."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi.algorithms.common import StepInfo, compiled, log_predictive_of, root_mean_square, tick
from opvi.distributions import Distribution, Normal
from opvi.targets import Target, as_particles, cast, check_batch
from opvi.types import Algorithm, Array, Batch, Key, Particles, Schedule, at_round

SYMMETRISE_EVERY = 20  # rounds; rounding makes covariances lopsided, and forgetting would let that grow
MEMORY_OF_ERRORS = 20.0  # rounds over which a particle's squared prediction error is averaged


class GaussNewtonState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    covariance: Array  # [n, d, d]
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
    noise: AdaptiveNoise | None = None,
    largest_growth: float = 4.0,
) -> Algorithm:
    r"""Recursive Gauss–Newton with a full covariance a particle, for targets with a distribution head.

    With outputs $f$, their Jacobian $J$, the head's gradient $g = \nabla_f \log p(y \mid f)$ and
    $H = \sum_r L_r L_r^\top$ its curvature, $A = L^\top J$:

    $$C' = C - C A^\top (I + A C A^\top)^{-1} A C, \qquad w \gets w + C' J^\top g, \qquad C \gets C' / \gamma_t$$

    which is the extended Kalman filter. It starts from the Gaussian prior of the target. Memory is
    $n d^2$: for up to about 2,000 parameters.

    Args:
        target: a network or regression with a Gaussian prior and a Gaussian, Bernoulli or categorical
            head; batches are pairs `(X, y)`.
        forgetting: $\gamma_t$, applied once a round; 1 never forgets. Below 1 the last $1/(1-\gamma)$ rounds count.
        noise: for a Gaussian head, noise that adapts instead of the head's own variance.
        largest_growth: forgetting never lets a variance exceed this many times the prior's.
    """
    if target.predict is None:
        raise TypeError("Gauss–Newton needs the outputs of a model: a target with `predict`, e.g. `opvi.mlp(...)`.")
    if not callable(forgetting) and not 0 < forgetting <= 1:
        raise ValueError(f"`forgetting` is {forgetting!r}, but must lie in (0, 1]; 1 never forgets.")
    predict = target.predict

    def outputs(w: Array, x: Any) -> Array:
        """One row's outputs, [C]."""
        return _outputs(predict(target.unravel(w), jax.tree.map(lambda a: a[None], x)))[0]

    def init(key: Key, particles: Any) -> GaussNewtonState:
        w = as_particles(target, key, particles)
        variance = _checked_prior_variance(target, w[0])
        zero = jnp.zeros((), jnp.int32)
        covariance = jnp.tile(jnp.diag(variance)[None], (len(w), 1, 1))
        return GaussNewtonState(w, covariance, jnp.ones(len(w), w.dtype), zero, zero)

    def absorb(w: Array, C: Array, dist: Distribution, data: Any, weight: Array) -> tuple[Array, Array]:
        """One particle's move, and Z with $C' = C - Z^T Z$."""
        x, y = data
        J = jax.vmap(jax.jacrev(outputs), (None, 0))(w, x)  # [B, C, d]
        g, L = dist.curvature(y)  # [B, C], [B, C, K]
        A = jnp.einsum("bck,bcd->bkd", L * jnp.sqrt(weight)[:, None, None], J).reshape(-1, len(w))
        score = jnp.einsum("bcd,bc->d", J, g * weight[:, None])
        AC = jnp.concatenate([A, score[None]]) @ C
        AC, C_score = AC[:-1], AC[-1]
        identity = jnp.eye(len(A), dtype=w.dtype)
        root = jnp.linalg.cholesky(AC @ A.T + identity)
        # The small inverse and a product: on a CPU several times faster than solving for d columns.
        Z = jax.scipy.linalg.solve_triangular(root, identity, lower=True) @ AC
        return C_score - Z.T @ (Z @ score), Z

    def forget(C: Array, Z: Array, gamma: Array, variance: Array) -> Array:
        """$(C - Z^T Z) / \\gamma$, scaled back where a variance would outgrow the prior."""
        inflated = jnp.maximum(jnp.diagonal(C) - (Z**2).sum(0), 1e-9) / gamma
        scale = jnp.sqrt(jnp.minimum(1, largest_growth * variance / inflated) / gamma)
        return (C - Z.T @ Z) * scale[:, None] * scale[None, :]

    @compiled
    def step_(key: Key, state: GaussNewtonState, batch: Batch) -> tuple[GaussNewtonState, StepInfo]:
        w, C = state.particles, state.covariance
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
        move, Z = jax.vmap(absorb, (0, 0, 0, None, None))(w, C, dist, batch.data, batch.weight)
        # A particle whose update is not finite sits this round out; the others learn.
        good = (
            jnp.isfinite(move).all(1) & jnp.isfinite(Z).all((1, 2)) & jnp.isfinite(error) & ~jnp.isnan(log_predictive)
        )
        move = jnp.where(good[:, None], move, 0)
        Z = jnp.where(good[:, None, None], Z, 0)
        error = jnp.where(good, error, state.error)
        gamma = jnp.where(good, at_round(forgetting, clock.t), 1)
        C = jax.vmap(forget, (0, 0, 0, None))(C, Z, gamma, _prior_variance(target, w[0]))
        C = jax.lax.cond(clock.round % SYMMETRISE_EVERY == 0, lambda C: (C + C.mT) / 2, lambda C: C, C)
        info = StepInfo(clock.rows, log_predictive, root_mean_square(move), good.all())
        return GaussNewtonState(w + move, C, error, clock.round, clock.rows), info

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


def _checked_prior_variance(target: Target, like: Array) -> Array:
    """The same, refused unless the prior is Gaussian: a gradient that is linear and points home."""
    gradient = jax.grad(lambda v: target.log_prior(target.unravel(v)))
    zero, one, two = (gradient(jnp.full_like(like, value)) for value in (0.0, 1.0, 2.0))
    linear = jnp.allclose(two - one, one - zero, rtol=1e-3)
    if not bool(linear & (zero > one).all()):
        raise ValueError(
            "this target's prior is not a Gaussian with known variances, but Gauss–Newton starts from one. Give "
            "`prior_variance` and `noise` as numbers (or None), not as `Gamma` priors; `AdaptiveNoise` learns noise."
        )
    return _prior_variance(target, like)
