r"""The flow of gain 1: each batch is used once, preconditioned by all information so far; no row is stored."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._factors import cholesky, eigenvectors
from opvi._steps import StepInfo, TargetSampler, compiled, keep_if_finite, predicted_rows, root_mean_square, tick
from opvi.filters._covariance import exactly
from opvi.filters.sl_opvi._stein_flow import some
from opvi.filters.sl_opvi._surrogates import positive
from opvi.flows.kernels import centred, squared_distances
from opvi.targets import Target, cast, check_batch
from opvi.targets._prior import draw_gaussian, gaussian_prior
from opvi.types import Array, Batch, Key, Particles, Start

FLAT = 1e-6  # a prior's smallest precision, as a share of the starting particles'
WORTH_OF_PRIOR = 0.1  # rows, where a batch is cut into parts that sharpen the posterior alike


class GainOneState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    prior: Array  # [d, d]: precision of the prior
    information: Array  # [d, d]: of all rows seen, forgetting applied
    worth: Array  # rows that this information is worth
    round: Array
    rows: Array


@dataclass(frozen=True)
class GainOne(TargetSampler):
    """Settings of `gain_one`."""

    half_life: float | None
    substeps: int
    bandwidth: float | None

    def init(self, key: Key, particles: Start = None) -> GainOneState:
        """Return the state before any row."""
        x = self.drawn(key, particles, at_least=2)
        gaussian = gaussian_prior(self.target)
        if gaussian is not None and (particles is None or isinstance(particles, int | np.integer)):
            x = draw_gaussian(gaussian, key, len(x), x.dtype)
        zero = jnp.zeros((), jnp.int32)
        variance = jnp.var(x, 0)
        floor = FLAT / jnp.where(variance > 0, variance, 1)
        curvature = -jax.vmap(jax.hessian(lambda v: _log_prior(self.target, v)))(some(x)).mean(0)
        prior = positive(curvature) + jnp.diag(floor)
        return GainOneState(x, prior, jnp.zeros_like(prior), jnp.zeros((), x.dtype), zero, zero)

    @compiled
    @exactly
    @exactly
    def step(self, key: Key, state: GainOneState, batch: Batch) -> tuple[GainOneState, StepInfo]:
        """Learn from a batch."""
        x, target = state.particles, self.target
        batch = cast(batch, x.dtype)
        check_batch(target, x[0], batch)
        clock = tick(state, batch)
        log_predictive, predicted = predicted_rows(
            batch, jax.vmap(lambda v: target.log_likelihood(target.unravel(v), batch.data))(x)
        )
        # Parts grow geometrically: each sharpens the posterior in the same proportion.
        before = state.worth + WORTH_OF_PRIOR
        growth = (before + batch.weight.sum()) / before
        edges = (growth ** jnp.linspace(0, 1, self.substeps + 1, dtype=x.dtype) - 1) / jnp.maximum(growth - 1, 1e-30)
        new, _ = jax.lax.scan(lambda state, share: (_part(self, state, batch, share), None), state, jnp.diff(edges))
        new, finite = keep_if_finite(new, state, (new.particles, new.information), log_predictive)
        drift = root_mean_square(new.particles - x)
        info = StepInfo(clock.rows, log_predictive, drift, finite, predicted)
        return new._replace(round=clock.round, rows=clock.rows), info


def gain_one(
    target: Target, *, half_life: float | None = None, substeps: int = 8, bandwidth: float | None = None
) -> GainOne:
    r"""Follow the running posterior by one preconditioned step per batch, with repulsion for the right spread.

    $$x_i \gets x_i + A_t^{-1} \big[\nabla \ell_t(x_i) + (1 - \gamma) \nabla \log p_0(x_i)\big] + \lambda_t\,
      A_t^{-1} F_t\, r_i, \qquad A_t = P_0 + F_t + \gamma F_{t-1} + \dots$$

    with $F_t$ the mean curvature of batch t over the particles. In a step of size $\varepsilon_t$ (here
    $\varepsilon_t = g_t$, the share $g_t = 1 - n_{t-1}/n_t$ of the information that is new: gain 1) deviations must
    shrink by $\sqrt{1 - g_t}$, hence the repulsion

    $$\lambda_t = 1 - (1 - \sqrt{1 - g_t})/\varepsilon_t \approx 1 - g_t/(2 \varepsilon_t),$$

    one half. It is used here as a matrix, so that on a conjugate Gaussian model mean and covariance are exact, if
    the particles start as draws of the prior. Where the prior is Gaussian, they do, unless you give them.

    Args:
        target: a target with up to a few hundred parameters.
        half_life: rows after which a row counts half; None never forgets.
        substeps: parts of a batch's likelihood used one after the other; 1 is enough for quadratic ones.
        bandwidth: the bandwidth of the Gaussian kernel behind $r_i$, in whitened units, for several modes; None takes
            $r_i = x_i - \bar x$, which is exact for one Gaussian mode.
    """
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be a number of rows above 0, or None to never forget.")
    if substeps < 1:
        raise ValueError(f"`substeps` is {substeps}, but must be at least 1.")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"`bandwidth` is {bandwidth}, but must be greater than 0, or None for a single mode.")

    return GainOne(target, half_life, substeps, bandwidth)


def _log_prior(target: Target, v: Array) -> Array:
    return target.log_prior(target.unravel(v))


def _part(sampler: GainOne, state: GainOneState, batch: Batch, share: Array) -> GainOneState:
    """Absorb a share of the batch's likelihood."""
    target = sampler.target
    x, P, F = state.particles, state.prior, state.information
    rows = share * batch.weight.sum()
    gamma = jnp.ones((), x.dtype) if sampler.half_life is None else jnp.exp2(-rows / sampler.half_life)

    def likelihood(v: Array) -> Array:
        return share * (target.log_likelihood(target.unravel(v), batch.data) * batch.weight).sum()

    new = positive(-jax.vmap(jax.hessian(likelihood))(some(x)).mean(0))
    s = jax.vmap(jax.grad(lambda v: likelihood(v) + (1 - gamma) * _log_prior(target, v)))(x)
    L = cholesky(P + gamma * F + new)
    identity = jnp.eye(len(L), dtype=x.dtype)
    back = jax.scipy.linalg.solve_triangular(L, identity, lower=True)  # x = z @ back
    pull = back @ (new + (1 - gamma) * P) @ back.T
    values, V = eigenvectors(back @ (P + F) @ back.T)
    root = (V * jnp.sqrt(jnp.maximum(values, 0))[None]) @ V.T  # what deviations should shrink by
    spread = _deviations(x @ L, sampler.bandwidth) @ (root + pull - identity)
    moved = x + (s @ back.T + spread) @ back
    return state._replace(particles=moved, information=gamma * F + new, worth=gamma * state.worth + rows)


def _deviations(z: Particles, bandwidth: float | None) -> Array:
    """Return the deviations that drive repulsion: for a Gaussian with unit covariance, the distance from its mean."""
    z = centred(z)
    if bandwidth is None:
        return z
    K = jnp.exp(-squared_distances(z, z) / (2 * bandwidth))
    return (1 + bandwidth) / bandwidth * (z - (K @ z) / K.sum(1, keepdims=True))
