"""Langevin dynamics: independent particles moved by the score and fresh noise."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import StepInfo, TargetSampler, compiled, keep_if_finite, positive_step, root_mean_square, tick, weigh
from opvi.flows.schedules import batch_sum
from opvi.targets import Target, cast
from opvi.types import Array, Batch, Key, LikelihoodScale, Particles, Schedule, Start, as_schedule, at_round


class LangevinState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    round: Array
    rows: Array


@dataclass(frozen=True)
class Langevin(TargetSampler):
    """Settings of `langevin`."""

    step_size: Schedule
    temperature: Schedule
    prior_weight: Schedule
    likelihood_scale: LikelihoodScale

    def init(self, key: Key, particles: Start = None) -> LangevinState:
        """Return the state before any row."""
        zero = jnp.zeros((), jnp.int32)
        return LangevinState(self.drawn(key, particles), zero, zero)

    @compiled
    def step(self, key: Key, state: LangevinState, batch: Batch) -> tuple[LangevinState, StepInfo]:
        """Learn from a batch."""
        x = state.particles
        batch = cast(batch, x.dtype)
        clock = tick(state, batch)
        s, log_predictive, predicted = weigh(self.target, x, batch, clock, self.likelihood_scale, self.prior_weight)
        alpha, tau = at_round(self.step_size, clock.t), at_round(self.temperature, clock.t)
        noise = jax.random.normal(jax.random.fold_in(key, clock.round), x.shape, x.dtype)
        x_new = x + alpha * s + jnp.sqrt(2 * alpha * tau) * noise
        kept, finite = keep_if_finite(LangevinState(x_new, clock.round, clock.rows), state, x_new, log_predictive)
        info = StepInfo(clock.rows, log_predictive, root_mean_square(s), finite, predicted)
        return kept._replace(round=clock.round, rows=clock.rows), info


def langevin(
    target: Target,
    *,
    step: Schedule,
    temperature: Schedule = 1.0,
    prior_weight: Schedule = 1.0,
    likelihood_scale: LikelihoodScale = batch_sum,
) -> Langevin:
    r"""Unadjusted (stochastic gradient) Langevin dynamics, one batch per round.

    $$x \gets x + \alpha_t s(x) + \sqrt{2 \alpha_t \tau_t}\, \xi, \qquad
      s = \kappa_t \nabla \ell_t + \eta_t \nabla \log p_0, \quad \xi \sim N(0, I)$$

    Args:
        target: the posterior to sample.
        step: $\alpha_t$, a number or a schedule. Noise and drift are tied, so no optimizer fits here.
        temperature: $\tau_t$; 1 samples, 0 descends.
        prior_weight: $\eta_t$, as in `parvi`.
        likelihood_scale: $\kappa_t$, as in `parvi`.
    """
    step = step if callable(step) else positive_step(step)
    return Langevin(target, step, as_schedule(temperature), as_schedule(prior_weight), likelihood_scale)
