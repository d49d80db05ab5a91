"""Online MAP: the point estimate whose dynamic regret the paper bounds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import StepInfo, TargetSampler, compiled, keep_if_finite, root_mean_square, tick, weigh
from opvi.flows._optimizer import Optimizer, as_optimizer
from opvi.flows.schedules import batch_mean, vanishing
from opvi.targets import Target, cast
from opvi.types import Array, ArrayLike, Batch, Key, LikelihoodScale, Particles, Schedule, Start, Tree, as_schedule

Projection = Callable[[Array], Array]  # [d] -> [d]
Bound = float | tuple[float, ...]


class MAPState(NamedTuple):
    """What the next round needs, and nothing else. Every particle is a separate point estimate."""

    particles: Particles
    optimizer: Tree
    round: Array
    rows: Array


@dataclass(frozen=True)
class OnlineMAP(TargetSampler):
    """Settings of `online_map`."""

    optimizer: Optimizer
    prior_weight: Schedule
    likelihood_scale: LikelihoodScale
    projection: Projection | None

    def init(self, key: Key, particles: Start = None) -> MAPState:
        """Return the state before any row."""
        w = self.project(self.drawn(key, particles))
        zero = jnp.zeros((), jnp.int32)
        return MAPState(w, self.optimizer.init(w), zero, zero)

    @compiled
    def step(self, key: Key, state: MAPState, batch: Batch) -> tuple[MAPState, StepInfo]:
        """Learn from a batch."""
        w = state.particles
        batch = cast(batch, w.dtype)
        clock = tick(state, batch)
        s, log_predictive, predicted = weigh(self.target, w, batch, clock, self.likelihood_scale, self.prior_weight)
        move, optimizer_state = self.optimizer.update(-s, state.optimizer, w)
        w_new = self.project(w + move)
        kept, finite = keep_if_finite(
            MAPState(w_new, optimizer_state, clock.round, clock.rows), state, w_new, log_predictive
        )
        info = StepInfo(clock.rows, log_predictive, root_mean_square(s), finite, predicted)
        return kept._replace(round=clock.round, rows=clock.rows), info

    def project(self, w: Particles) -> Particles:
        """Return every particle's projection."""
        return jax.vmap(self.projection)(w) if self.projection else w


def online_map(
    target: Target,
    *,
    step: Schedule | Optimizer,
    prior_weight: Schedule = vanishing,
    likelihood_scale: LikelihoodScale = batch_mean,
    projection: Projection | None = None,
) -> OnlineMAP:
    r"""Projected online gradient descent on the cost of each round's batch.

    $$w_t = \Pi_W \big[ w_{t-1} - \alpha_t ( \nabla \hat c_t(w_{t-1}) + \eta_t \nabla c_0(w_{t-1}) ) \big]$$

    with $\hat c_t$ the batch mean of $-\log p(r \mid w)$ and $c_0 = -\log p_0$.

    Args:
        step: $\alpha_t$ as a number, a schedule, or any optax optimizer.
        prior_weight: $\eta_t$; $6/(\pi^2 t^2)$ by default, so that the prior counts once in all.
        likelihood_scale: `batch_mean` by default.
        projection: $\Pi_W$: `ball(radius)`, `box(lower, upper)`, your own function, or None for no bound.
    """
    return OnlineMAP(target, as_optimizer(step), as_schedule(prior_weight), likelihood_scale, projection)


def ball(radius: float) -> Projection:
    """A projection for `online_map`: onto the ball of that radius around the origin."""
    if not radius > 0:
        raise ValueError(f"`radius` is {radius!r}, but must be greater than 0.")
    return _Ball(float(radius))


@dataclass(frozen=True)
class _Ball:
    radius: float

    def __call__(self, w: Array) -> Array:
        import optax

        return optax.projections.projection_l2_ball(w, self.radius)


def box(lower: ArrayLike, upper: ArrayLike) -> Projection:
    """A projection for `online_map`: onto the box between `lower` and `upper`, numbers or vectors."""
    if not (np.asarray(lower) < np.asarray(upper)).all():
        raise ValueError(f"`lower` is {lower} and `upper` is {upper}, but lower must be below upper everywhere.")
    return _Box(_plain(lower), _plain(upper))


def _plain(bound: ArrayLike) -> Bound:
    values = np.asarray(bound, float).tolist()
    return tuple(values) if isinstance(values, list) else values


@dataclass(frozen=True)
class _Box:
    lower: Bound
    upper: Bound

    def __call__(self, w: Array) -> Array:
        import optax

        return optax.projections.projection_box(w, jnp.asarray(self.lower, w.dtype), jnp.asarray(self.upper, w.dtype))
