"""Online MAP: the point estimate whose dynamic regret the paper bounds."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from opvi._steps import StepInfo, as_optimizer, compiled, keep_if_finite, root_mean_square, tick, weigh
from opvi.flows.schedules import batch_mean, vanishing
from opvi.targets import Target, as_particles, cast
from opvi.types import Algorithm, Array, Batch, Key, LikelihoodScale, Particles, Schedule

Projection = Callable[[Array], Array]  # [d] -> [d]


class MAPState(NamedTuple):
    """What the next round needs, and nothing else. Every particle is a point estimate of its own."""

    particles: Particles
    optimizer: Any
    round: Array
    rows: Array


def ball(radius: float) -> Projection:
    """A projection for `online_map`: onto the ball of that radius around the origin."""
    if not radius > 0:
        raise ValueError(f"`radius` is {radius!r}, but must be greater than 0.")
    return lambda w: optax.projections.projection_l2_ball(w, radius)


def box(lower: Any, upper: Any) -> Projection:
    """A projection for `online_map`: onto the box between `lower` and `upper`, numbers or vectors."""
    if not (jnp.asarray(lower) < jnp.asarray(upper)).all():
        raise ValueError(f"`lower` is {lower} and `upper` is {upper}, but lower must be below upper everywhere.")

    def project(w: Array) -> Array:
        return optax.projections.projection_box(w, jnp.asarray(lower, w.dtype), jnp.asarray(upper, w.dtype))

    return project


def online_map(
    target: Target,
    *,
    step: Schedule | optax.GradientTransformation,
    prior_weight: Schedule = vanishing,
    likelihood_scale: LikelihoodScale = batch_mean,
    projection: Projection | None = None,
) -> Algorithm:
    r"""Projected online gradient descent on the cost of each round's batch.

    $$w_t = \Pi_W \big[ w_{t-1} - \alpha_t ( \nabla \hat c_t(w_{t-1}) + \eta_t \nabla c_0(w_{t-1}) ) \big]$$

    with $\hat c_t$ the batch mean of $-\log p(r \mid w)$ and $c_0 = -\log p_0$.

    Args:
        step: $\alpha_t$ as a number, a schedule, or any optax optimizer.
        prior_weight: $\eta_t$; $6/(\pi^2 t^2)$ by default, so that the prior counts once in all.
        likelihood_scale: `batch_mean` by default.
        projection: $\Pi_W$: `ball(radius)`, `box(lower, upper)`, your own function, or None for no bound.
    """
    optimizer = as_optimizer(step)
    project = jax.vmap(projection) if projection else lambda w: w

    def init(key: Key, particles: Any) -> MAPState:
        w = project(as_particles(target, key, particles))
        zero = jnp.zeros((), jnp.int32)
        return MAPState(w, optimizer.init(w), zero, zero)

    @compiled
    def step_(key: Key, state: MAPState, batch: Batch) -> tuple[MAPState, StepInfo]:
        w = state.particles
        batch = cast(batch, w.dtype)
        clock = tick(state, batch)
        s, log_predictive, _ = weigh(target, w, batch, clock, likelihood_scale, prior_weight)
        move, optimizer_state = optimizer.update(-s, state.optimizer, w)
        w_new = project(w + move)
        kept, finite = keep_if_finite(
            MAPState(w_new, optimizer_state, clock.round, clock.rows), state, w_new, log_predictive
        )
        info = StepInfo(clock.rows, log_predictive, root_mean_square(s), finite)
        return kept._replace(round=clock.round, rows=clock.rows), info

    return Algorithm(init, step_)
