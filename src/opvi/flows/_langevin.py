"""Langevin dynamics: independent particles moved by the score and fresh noise."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import StepInfo, compiled, keep_if_finite, positive_step, root_mean_square, tick, weigh
from opvi.flows.schedules import batch_sum
from opvi.targets import Target, as_particles, cast
from opvi.types import Algorithm, Array, Batch, Key, LikelihoodScale, Particles, Schedule, at_round


class LangevinState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    round: Array
    rows: Array


def langevin(
    target: Target,
    *,
    step: Schedule,
    temperature: Schedule = 1.0,
    prior_weight: Schedule = 1.0,
    likelihood_scale: LikelihoodScale = batch_sum,
) -> Algorithm:
    r"""Unadjusted (stochastic gradient) Langevin dynamics, one batch a round.

    $$x \gets x + \alpha_t s(x) + \sqrt{2 \alpha_t \tau_t}\, \xi, \qquad
      s = \kappa_t \nabla \ell_t + \eta_t \nabla \log p_0, \quad \xi \sim N(0, I)$$

    Args:
        step: $\alpha_t$, a number or a schedule. Noise and drift are tied, so no optimizer fits here.
        temperature: $\tau_t$; 1 samples, 0 descends.
        prior_weight: $\eta_t$, as in `parvi`.
        likelihood_scale: $\kappa_t$, as in `parvi`.
    """
    if not callable(step):
        positive_step(step)

    def init(key: Key, particles: Any) -> LangevinState:
        zero = jnp.zeros((), jnp.int32)
        return LangevinState(as_particles(target, key, particles), zero, zero)

    @compiled
    def step_(key: Key, state: LangevinState, batch: Batch) -> tuple[LangevinState, StepInfo]:
        x = state.particles
        batch = cast(batch, x.dtype)
        clock = tick(state, batch)
        s, log_predictive = weigh(target, x, batch, clock, likelihood_scale, prior_weight)
        alpha, tau = at_round(step, clock.t), at_round(temperature, clock.t)
        noise = jax.random.normal(jax.random.fold_in(key, clock.round), x.shape, x.dtype)
        x_new = x + alpha * s + jnp.sqrt(2 * alpha * tau) * noise
        kept, finite = keep_if_finite(LangevinState(x_new, clock.round, clock.rows), state, x_new, log_predictive)
        info = StepInfo(clock.rows, log_predictive, root_mean_square(s), finite)
        return kept._replace(round=clock.round, rows=clock.rows), info

    return Algorithm(init, step_)
