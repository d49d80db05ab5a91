r"""Particle flows: one algorithm, `parvi`, of which OPVI, SVGD, Blob, GFSD and GFSF are settings."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from opvi._steps import as_optimizer, compiled, keep_if_finite, root_mean_square, tick, weigh
from opvi.flows import fields
from opvi.flows._acceleration import Acceleration
from opvi.flows.kernels import Bandwidth, Kernel
from opvi.flows.schedules import batch_sum, vanishing
from opvi.targets import Target, as_particles, cast
from opvi.types import Algorithm, Array, Batch, Field, Key, LikelihoodScale, Particles, Scalar, Schedule, at_round


class ParVIState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    optimizer: Any
    ahead: Any  # accelerated flows: where the next field is evaluated; otherwise ()
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


def parvi(
    target: Target,
    field: Field,
    *,
    step: Schedule | optax.GradientTransformation,
    prior_weight: Schedule = 1.0,
    repulsion: Schedule = 1.0,
    likelihood_scale: LikelihoodScale = batch_sum,
    acceleration: Acceleration | None = None,
) -> Algorithm:
    r"""Move particles along a smoothed Wasserstein gradient, one batch a round.

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
    optimizer = as_optimizer(step)

    def init(key: Key, particles: Any) -> ParVIState:
        x = as_particles(target, key, particles, at_least=2)
        zero = jnp.zeros((), jnp.int32)
        return ParVIState(x, optimizer.init(x), x if acceleration else (), zero, zero)

    @compiled
    def step_(key: Key, state: ParVIState, batch: Batch) -> tuple[ParVIState, ParVIInfo]:
        x = state.particles
        batch = cast(batch, x.dtype)
        clock = tick(state, batch)
        y = state.ahead if acceleration else x
        scores, log_predictive, _ = weigh(target, y, batch, clock, likelihood_scale, prior_weight)
        u, r, h = field(y, scores)
        v = u + at_round(repulsion, clock.t) * r
        move, optimizer_state = optimizer.update(-v, state.optimizer, y)
        x_new = y + move
        ahead = acceleration.look_ahead(clock.t, x_new, x, y, move) if acceleration else ()
        moved = ParVIState(x_new, optimizer_state, ahead, clock.round, clock.rows)
        kept, finite = keep_if_finite(moved, state, x_new, log_predictive)
        info = ParVIInfo(clock.rows, log_predictive, root_mean_square(u), root_mean_square(r), h, finite)
        return kept._replace(round=clock.round, rows=clock.rows), info

    return Algorithm(init, step_)


def opvi(
    target: Target,
    *,
    step: Schedule | optax.GradientTransformation,
    field: Field | None = None,
    prior_weight: Schedule = vanishing,
    repulsion: Schedule = 0.1,
    likelihood_scale: LikelihoodScale = batch_sum,
    acceleration: Acceleration | None = None,
) -> Algorithm:
    r"""The paper's online particle-based variational inference: SVGD's field and three schedules.

    $$v_t(x) = \tfrac1n \sum_j \big[ K(x_j, x) (\kappa_t \nabla \ell_t(x_j) + \eta_t \nabla \log p_0(x_j))
      + \lambda_t \nabla_{x_j} K(x_j, x) \big]$$

    with $\eta_t = 6/(\pi^2 t^2)$ and $\lambda_t = 0.1$. The third schedule, the growing batch
    $B_t = \lceil t^{0.55} \rceil$, belongs to the stream: `opvi.stream(data, opvi.schedules.power(0.55))`.

    Note what this update settles on: with `batch_sum`, the posterior of $B_t/\lambda_t$ rows, not of all
    rows seen. The arguments are those of `parvi`.
    """
    return parvi(
        target,
        field or fields.svgd(),
        step=step,
        prior_weight=prior_weight,
        repulsion=repulsion,
        likelihood_scale=likelihood_scale,
        acceleration=acceleration,
    )


def svgd(
    target: Target,
    *,
    step: Schedule | optax.GradientTransformation,
    kernel: Kernel | None = None,
    bandwidth: Bandwidth | None = None,
    likelihood_scale: LikelihoodScale = batch_sum,
    acceleration: Acceleration | None = None,
) -> Algorithm:
    """Stein variational gradient descent (Liu and Wang, 2016): `parvi` with `fields.svgd(kernel, bandwidth)`."""
    field = fields.svgd(kernel, bandwidth)
    return parvi(target, field, step=step, likelihood_scale=likelihood_scale, acceleration=acceleration)


def blob(
    target: Target,
    *,
    step: Schedule | optax.GradientTransformation,
    kernel: Kernel | None = None,
    bandwidth: Bandwidth | None = None,
    likelihood_scale: LikelihoodScale = batch_sum,
    acceleration: Acceleration | None = None,
) -> Algorithm:
    """The Blob flow (Chen et al., 2018): `parvi` with `fields.blob(kernel, bandwidth)`."""
    field = fields.blob(kernel, bandwidth)
    return parvi(target, field, step=step, likelihood_scale=likelihood_scale, acceleration=acceleration)


def gfsd(
    target: Target,
    *,
    step: Schedule | optax.GradientTransformation,
    kernel: Kernel | None = None,
    bandwidth: Bandwidth | None = None,
    likelihood_scale: LikelihoodScale = batch_sum,
    acceleration: Acceleration | None = None,
) -> Algorithm:
    """Gradient flow with smoothed density (Liu et al., 2019): `parvi` with `fields.gfsd(kernel, bandwidth)`."""
    field = fields.gfsd(kernel, bandwidth)
    return parvi(target, field, step=step, likelihood_scale=likelihood_scale, acceleration=acceleration)


def gfsf(
    target: Target,
    *,
    step: Schedule | optax.GradientTransformation,
    kernel: Kernel | None = None,
    bandwidth: Bandwidth | None = None,
    likelihood_scale: LikelihoodScale = batch_sum,
    acceleration: Acceleration | None = None,
) -> Algorithm:
    """Gradient flow with smoothed test functions (Liu et al., 2019): `parvi` with `fields.gfsf(kernel, bandwidth)`."""
    field = fields.gfsf(kernel, bandwidth)
    return parvi(target, field, step=step, likelihood_scale=likelihood_scale, acceleration=acceleration)
