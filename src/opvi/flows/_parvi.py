r"""Particle flows: one algorithm, `parvi`, of which OPVI, SVGD, Blob, GFSD and GFSF are settings."""

from dataclasses import dataclass
from typing import NamedTuple, Required, TypedDict, Unpack

import jax.numpy as jnp

from opvi._steps import TargetSampler, compiled, keep_if_finite, root_mean_square, tick, weigh
from opvi.flows import fields
from opvi.flows._acceleration import Acceleration
from opvi.flows._optimizer import Optimizer, as_optimizer, optimizer
from opvi.flows.kernels import Bandwidth, Kernel
from opvi.flows.schedules import batch_sum, seen, vanishing
from opvi.targets import Target, cast
from opvi.types import (
    Array,
    Batch,
    Field,
    Key,
    LikelihoodScale,
    Particles,
    Predicted,
    Scalar,
    Schedule,
    Start,
    Tree,
    as_schedule,
    at_round,
)


class ParVIState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    optimizer: Tree
    ahead: Tree  # accelerated flows: where the next field is evaluated; otherwise ()
    round: Array  # rounds done
    rows: Array  # rows seen


class ParVIInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array  # rows seen, this batch included
    log_predictive: Scalar  # mean log predictive density of the batch, before learning from it
    drift: Scalar  # root mean square over particles and coordinates
    repulsion: Scalar  # likewise, before its weight
    bandwidth: Scalar
    finite: Array  # False: the update was not finite and the particles stayed where they were
    predicted: Predicted | None = None  # for each row, before learning


@dataclass(frozen=True)
class ParVI(TargetSampler):
    """Settings of `parvi`."""

    field: Field
    optimizer: Optimizer
    prior_weight: Schedule
    repulsion: Schedule
    likelihood_scale: LikelihoodScale
    acceleration: Acceleration | None

    def init(self, key: Key, particles: Start = None) -> ParVIState:
        """Return the state before any row."""
        x = self.drawn(key, particles, at_least=2)
        zero = jnp.zeros((), jnp.int32)
        return ParVIState(x, self.optimizer.init(x), x if self.acceleration else (), zero, zero)

    @compiled
    def step(self, key: Key, state: ParVIState, batch: Batch) -> tuple[ParVIState, ParVIInfo]:
        """Learn from a batch."""
        x = state.particles
        batch = cast(batch, x.dtype)
        clock = tick(state, batch)
        y = state.ahead if self.acceleration else x
        scores, log_predictive, predicted = weigh(
            self.target, y, batch, clock, self.likelihood_scale, self.prior_weight
        )
        u, r, h = self.field(y, scores)
        v = u + at_round(self.repulsion, clock.t) * r
        move, optimizer_state = self.optimizer.update(-v, state.optimizer, y)
        x_new = y + move
        ahead = self.acceleration.look_ahead(clock.t, x_new, x, y, move) if self.acceleration else ()
        moved = ParVIState(x_new, optimizer_state, ahead, clock.round, clock.rows)
        kept, finite = keep_if_finite(moved, state, x_new, log_predictive)
        info = ParVIInfo(clock.rows, log_predictive, root_mean_square(u), root_mean_square(r), h, finite, predicted)
        return kept._replace(round=clock.round, rows=clock.rows), info


class Settings(TypedDict, total=False):
    """Arguments that all flows have in common; see `parvi`."""

    step: Required[Schedule | Optimizer]
    likelihood_scale: LikelihoodScale
    acceleration: Acceleration | None


def parvi(
    target: Target,
    field: Field,
    *,
    step: Schedule | Optimizer,
    prior_weight: Schedule = 1.0,
    repulsion: Schedule = 1.0,
    likelihood_scale: LikelihoodScale = batch_sum,
    acceleration: Acceleration | None = None,
) -> ParVI:
    r"""Move particles along a smoothed Wasserstein gradient, one batch per round.

    $$x_i \gets x_i + \alpha_t\,(u_i + \lambda_t r_i), \qquad (u, r) = \mathrm{field}(x, s), \quad
      s = \kappa_t \nabla \ell_t(x) + \eta_t \nabla \log p_0(x)$$

    Args:
        target: the posterior to follow.
        field: `fields.svgd()`, `fields.blob()`, `fields.gfsd()`, `fields.gfsf()`, or your own function of
            particles and scores that returns a `FieldValue`.
        step: $\alpha_t$ as a number, a schedule, or any optax optimizer (which then sees $-(u + \lambda r)$).
        prior_weight: $\eta_t$; 1 is the plain posterior, `schedules.vanishing` the paper's $6/(\pi^2 t^2)$.
        repulsion: $\lambda_t$; 1 is the field as published, 0 moves every particle to a mode.
        likelihood_scale: $\kappa_t$; `batch_sum` (the paper's), `dataset(N)` or `seen`.
        acceleration: `wag()` or `wnes()`.
    """
    weights = as_schedule(prior_weight), as_schedule(repulsion)
    return ParVI(target, field, as_optimizer(step), *weights, likelihood_scale, acceleration)


def opvi(
    target: Target,
    *,
    field: Field | None = None,
    prior_weight: Schedule = vanishing,
    repulsion: Schedule = 0.1,
    **settings: Unpack[Settings],
) -> ParVI:
    r"""The paper's online particle-based variational inference: SVGD's field and three schedules.

    $$v_t(x) = \tfrac1n \sum_j \big[ K(x_j, x) (\kappa_t \nabla \ell_t(x_j) + \eta_t \nabla \log p_0(x_j))
      + \lambda_t \nabla_{x_j} K(x_j, x) \big]$$

    with $\eta_t = 6/(\pi^2 t^2)$ and $\lambda_t = 0.1$. The third schedule, the growing batch
    $B_t = \lceil t^{0.55} \rceil$, belongs to the stream: `opvi.stream(data, opvi.schedules.power(0.55))`.

    Note what this update settles on: with `batch_sum`, the posterior of $B_t/\lambda_t$ rows, not of all
    rows seen. The arguments are those of `parvi`.
    """
    return parvi(target, field or fields.svgd(), prior_weight=prior_weight, repulsion=repulsion, **settings)


def svgd(
    target: Target, *, kernel: Kernel | None = None, bandwidth: Bandwidth | None = None, **settings: Unpack[Settings]
) -> ParVI:
    """Stein variational gradient descent (Liu and Wang, 2016): `parvi` with `fields.svgd(kernel, bandwidth)`."""
    return parvi(target, fields.svgd(kernel, bandwidth), **settings)


def blob(
    target: Target, *, kernel: Kernel | None = None, bandwidth: Bandwidth | None = None, **settings: Unpack[Settings]
) -> ParVI:
    """The Blob flow (Chen et al., 2018): `parvi` with `fields.blob(kernel, bandwidth)`."""
    return parvi(target, fields.blob(kernel, bandwidth), **settings)


def gfsd(
    target: Target, *, kernel: Kernel | None = None, bandwidth: Bandwidth | None = None, **settings: Unpack[Settings]
) -> ParVI:
    """Gradient flow with smoothed density (Liu et al., 2019): `parvi` with `fields.gfsd(kernel, bandwidth)`."""
    return parvi(target, fields.gfsd(kernel, bandwidth), **settings)


def gfsf(
    target: Target, *, kernel: Kernel | None = None, bandwidth: Bandwidth | None = None, **settings: Unpack[Settings]
) -> ParVI:
    """Gradient flow with smoothed test functions (Liu et al., 2019): `parvi` with `fields.gfsf(kernel, bandwidth)`."""
    return parvi(target, fields.gfsf(kernel, bandwidth), **settings)


PEAK, WARM_UP, DECAY_START = 0.03, 25.0, 100.0  # of the first-order step; rounds


def first_order(target: Target, *, peak: float = PEAK) -> ParVI:
    r"""Return OPVI with Nesterov–Adam steps that warm up and then decay without knowing the horizon.

    $$\alpha_t = \alpha \min(1, t/25)\, (1 + t/100)^{-1/2}$$

    Args:
        target: any target.
        peak: $\alpha$.
    """
    import optax  # takes as long to load as half of JAX, and most samplers never need it

    steps = optimizer(optax.nadam, _Rate(float(peak)), b2=0.95)
    return opvi(target, step=steps, prior_weight=1.0, likelihood_scale=seen)


@dataclass(frozen=True)
class _Rate:
    peak: float

    def __call__(self, count: Array) -> Array:
        t = jnp.asarray(count, float) + 1
        return self.peak * jnp.minimum(1, t / WARM_UP) * (1 + t / DECAY_START) ** -0.5
