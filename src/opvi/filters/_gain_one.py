r"""The flow of gain 1: each batch is used once, preconditioned by all information so far; no row is stored."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import StepInfo, compiled, log_predictive_of, root_mean_square, tick
from opvi.filters._surrogates import positive
from opvi.filters._whitening import some
from opvi.flows.kernels import centred, squared_distances
from opvi.targets import Target, as_particles, cast, check_batch
from opvi.types import Algorithm, Array, Batch, Key, Particles

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


def gain_one(
    target: Target, *, half_life: float | None = None, substeps: int = 8, bandwidth: float | None = None
) -> Algorithm:
    r"""Follow the running posterior by one preconditioned step a batch, with the repulsion that gives the right spread.

    $$x_i \gets x_i + A_t^{-1} \big[\nabla \ell_t(x_i) + (1 - \gamma) \nabla \log p_0(x_i)\big] + \lambda_t\,
      A_t^{-1} F_t\, r_i, \qquad A_t = P_0 + F_t + \gamma F_{t-1} + \dots$$

    with $F_t$ the mean curvature of batch t over the particles. In a step of size $\varepsilon_t$ (here
    $\varepsilon_t = g_t$, the share $g_t = 1 - n_{t-1}/n_t$ of the information that is new: gain 1) deviations must
    shrink by $\sqrt{1 - g_t}$, hence the repulsion

    $$\lambda_t = 1 - (1 - \sqrt{1 - g_t})/\varepsilon_t \approx 1 - g_t/(2 \varepsilon_t),$$

    one half. It is used here as a matrix, so that on a conjugate Gaussian model mean and covariance are exact, if
    the particles start as draws of the prior.

    Args:
        target: with up to some hundred parameters.
        half_life: rows after which a row counts half; None never forgets.
        substeps: parts of a batch's likelihood used one after the other; 1 is enough for quadratic ones.
        bandwidth: of the Gaussian kernel behind $r_i$, in whitened units, for several modes; None takes
            $r_i = x_i - \bar x$, which is exact for one Gaussian mode.
    """
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be a number of rows above 0, or None to never forget.")
    if substeps < 1:
        raise ValueError(f"`substeps` is {substeps}, but must be at least 1.")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"`bandwidth` is {bandwidth}, but must be greater than 0, or None for a single mode.")

    def log_prior(v: Array) -> Array:
        return target.log_prior(target.unravel(v))

    def init(key: Key, particles: Any) -> GainOneState:
        x = as_particles(target, key, particles, at_least=2)
        zero = jnp.zeros((), jnp.int32)
        variance = jnp.var(x, 0)
        floor = FLAT / jnp.where(variance > 0, variance, 1)
        prior = positive(-jax.vmap(jax.hessian(log_prior))(some(x)).mean(0)) + jnp.diag(floor)
        return GainOneState(x, prior, jnp.zeros_like(prior), jnp.zeros((), x.dtype), zero, zero)

    def part(state: GainOneState, batch: Batch, share: Array) -> GainOneState:
        """A share of the batch's likelihood, absorbed."""
        x, P, F = state.particles, state.prior, state.information
        rows = share * batch.weight.sum()
        gamma = jnp.ones((), x.dtype) if half_life is None else jnp.exp2(-rows / half_life)

        def likelihood(v: Array) -> Array:
            return share * (target.log_likelihood(target.unravel(v), batch.data) * batch.weight).sum()

        new = positive(-jax.vmap(jax.hessian(likelihood))(some(x)).mean(0))
        s = jax.vmap(jax.grad(lambda v: likelihood(v) + (1 - gamma) * log_prior(v)))(x)
        L = jnp.linalg.cholesky(P + gamma * F + new)
        back = jax.scipy.linalg.solve_triangular(L, jnp.eye(len(L), dtype=x.dtype), lower=True)  # x = z @ back
        pull = back @ (new + (1 - gamma) * P) @ back.T
        values, V = jnp.linalg.eigh(back @ (P + F) @ back.T)
        root = (V * jnp.sqrt(jnp.maximum(values, 0))[None]) @ V.T  # what deviations should shrink by
        spread = deviations(x @ L) @ (root + pull - jnp.eye(len(L), dtype=x.dtype))
        moved = x + (s @ back.T + spread) @ back
        return state._replace(particles=moved, information=gamma * F + new, worth=gamma * state.worth + rows)

    def deviations(z: Particles) -> Array:
        """What repulsion sees: for a Gaussian with unit covariance, the distance from its mean."""
        z = centred(z)
        if bandwidth is None:
            return z
        K = jnp.exp(-squared_distances(z, z) / (2 * bandwidth))
        return (1 + bandwidth) / bandwidth * (z - (K @ z) / K.sum(1, keepdims=True))

    @compiled
    def step_(key: Key, state: GainOneState, batch: Batch) -> tuple[GainOneState, StepInfo]:
        x = state.particles
        batch = cast(batch, x.dtype)
        check_batch(target, x[0], batch)
        clock = tick(state, batch)
        log_rows = jax.vmap(lambda v: target.log_likelihood(target.unravel(v), batch.data))(x)
        log_predictive = log_predictive_of(log_rows, batch)
        # Parts grow geometrically: each sharpens the posterior in the same proportion.
        before = state.worth + WORTH_OF_PRIOR
        growth = (before + batch.weight.sum()) / before
        edges = (growth ** jnp.linspace(0, 1, substeps + 1, dtype=x.dtype) - 1) / jnp.maximum(growth - 1, 1e-30)
        new, _ = jax.lax.scan(lambda state, share: (part(state, batch, share), None), state, jnp.diff(edges))
        finite = ~jnp.isnan(log_predictive)
        for leaf in (new.particles, new.information):
            finite &= jnp.isfinite((leaf**2).sum())
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        info = StepInfo(clock.rows, log_predictive, root_mean_square(new.particles - x), finite)
        return new._replace(round=clock.round, rows=clock.rows), info

    return Algorithm(init, step_)
