"""What every particle says about some rows."""

from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Normal, Predictive, StudentT
from opvi.tracking._calibration import DOF, NOISE, SPREAD, TILT
from opvi.tracking._layers import outputs
from opvi.tracking._regressor import Regressor, RegressorState
from opvi.tracking._scaling import Scale, divisor, standardise
from opvi.types import Array, Sampler, State, Tree

ROWS = 64  # that are averaged over


class Said(NamedTuple):
    """The predictions of n particles for B rows, which come in groups of 64."""

    values: np.ndarray  # [n, B, outputs]: a number, or the probabilities of the classes
    weights: np.ndarray  # [n, B], adding up to 1
    doubt: np.ndarray  # [n, B / 64]: a particle's own standard deviation of its mean over a group; 0 where not known


def innermost(sampler: Sampler, state: State) -> tuple[Sampler, Tree]:
    """Return the regressor or classifier itself and its state, without wrappers."""
    while hasattr(state, "inner"):
        sampler, state = sampler.sampler, state.inner  # type: ignore[attr-defined]
    return sampler, state


def confirmed(state: RegressorState) -> Array:
    """Return the multiple of the particles' own variances that predictions made before learning have confirmed.

    Filters that forget can be far too modest about what the data do not show.
    """
    scores = jax.nn.softmax(state.calibration.scores).reshape(len(DOF), len(NOISE), len(SPREAD), len(TILT))
    return scores.sum((0, 1, 3)) @ jnp.asarray(SPREAD, scores.dtype)


def said(sampler: Sampler, state: State, x: np.ndarray) -> Said:
    """Return what the particles predict for the rows x `[B, k]`, B a multiple of 64.

    A regressor predicts with the weighted mean of its networks; their own outputs are computed here. Of other
    samplers the components of the predictive are the particles.
    """
    inner, own = innermost(sampler, state)
    out = _networks(inner, own, x) if isinstance(inner, Regressor) else _components(sampler, state, x)
    return Said(*(np.asarray(part, float) for part in out))


@partial(jax.jit, static_argnums=0)
def _networks(sampler: Regressor, state: RegressorState, x: Array) -> tuple[Array, Array, Array]:
    r"""With $\bar J$ the mean Jacobian of a group's rows and C a particle's covariance, its doubt is
    $\sqrt{s \bar J C \bar J^\top}$, with s from `confirmed`.
    """
    network, scale = sampler.network, state.scale
    z = standardise(Scale(scale.mean[:-1], scale.sd[:-1]), x.astype(scale.mean.dtype))

    def one(particle: tuple[Array, Array, Array]) -> tuple[Array, Array]:  # one by one: Jacobians are large
        w, kind, C = particle
        y, jacobian = outputs(network, w, kind, z)
        J = jnp.moveaxis(sampler.blocks.gather(jacobian.reshape(-1, ROWS, network.dim).mean(1)), 0, 1)  # [K, groups, D]
        return y, jnp.sqrt(jnp.maximum(((J @ C) * J).sum((0, 2)), 0))

    y, doubt = jax.lax.map(one, (state.particles, sampler.each("kind", z), state.past.matrices))
    unit = divisor(scale)[-1]
    weights = jnp.broadcast_to(state.calibration.weights[:, None], y.shape)
    return (y * unit + scale.mean[-1])[..., None], weights, doubt * unit * jnp.sqrt(confirmed(state))


@partial(jax.jit, static_argnums=0)
def _components(sampler: Sampler, state: State, x: Array) -> tuple[Array, Array, Array]:
    """The doubts of a group's rows are taken as moving together."""
    predictive = cast("Predictive", sampler.predict(state, x))
    head = predictive.components
    values = head.mean[..., None] if isinstance(head, Normal | StudentT) else jnp.exp(head.log_probabilities())
    own = jnp.sqrt(jnp.maximum(head.spread, 0)) if isinstance(head, StudentT) else jnp.zeros_like(values[..., 0])
    weights = jnp.broadcast_to(jnp.exp(predictive.log_mixture_weights()), values.shape[:2])
    return values, weights, own.reshape(len(own), -1, ROWS).mean(2)
