"""What every particle says about some rows."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.filters._blocks import within
from opvi.predictive import Normal, StudentT
from opvi.targets import MLP
from opvi.tracking._calibration import DOF, NOISE, SPREAD, TILT
from opvi.tracking._layers import outputs as network_outputs
from opvi.tracking._regressor import BUDGET, RegressorState, default_settings
from opvi.tracking._scaling import Scale, divisor, standardise
from opvi.types import Array, Tracker

ROWS = 64  # that are averaged over


class Said(NamedTuple):
    """The predictions of n particles for B rows, which come in groups of 64."""

    values: np.ndarray  # [n, B, outputs]: a number, or the probabilities of the classes
    weights: np.ndarray  # [n, B], adding up to 1
    doubt: np.ndarray  # [n, B / 64]: a particle's own standard deviation of its average over a group, where it is told


def innermost(state: Any) -> Any:
    """The state of the regressor or classifier itself, without its watch and its memory."""
    while hasattr(state, "inner"):
        state = state.inner
    return state


def confirmed(state: RegressorState) -> Array:
    """The multiple of the particles' own variances that predictions made before learning have confirmed.

    Filters that forget can be far too modest about what the data do not tell.
    """
    scores = jax.nn.softmax(state.calibration.scores).reshape(len(DOF), len(NOISE), len(SPREAD), len(TILT))
    return scores.sum((0, 1, 3)) @ jnp.asarray(SPREAD, scores.dtype)


def said(tracker: Tracker, state: Any, x: np.ndarray, hidden: Sequence[int] | None) -> Said:
    """What the particles predict for the rows x `[B, k]`, B a multiple of 64; compiled once for a tracker and a B.

    A regressor predicts with the weighted mean of its networks; their own outputs are computed here, where `hidden`
    tells their form. Of other trackers the components of the predictive are the particles.
    """
    inner = innermost(state)
    if isinstance(inner, RegressorState) and hidden is not None:
        kinds = jnp.asarray(default_settings(len(inner.particles)).kind, inner.particles.dtype)
        out = _networks((x.shape[1], *hidden, 1))(inner, kinds, x)
    else:
        out = _components(tracker)(state, x)
    return Said(*(np.asarray(part, float) for part in out))


@lru_cache(8)
def _networks(sizes: tuple[int, ...]) -> Callable[..., tuple[Array, Array, Array]]:
    r"""With $\bar J$ the mean Jacobian of a group's rows and C a particle's covariance, its doubt is
    $\sqrt{s \bar J C \bar J^\top}$, with s from `confirmed`.
    """
    network = MLP(sizes)

    @jax.jit
    def outputs(state: RegressorState, kinds: Array, x: Array) -> tuple[Array, Array, Array]:
        scale, matrices = state.scale, state.past.matrices
        blocks = within(*network.units, BUDGET / 4 / len(state.particles))
        z = standardise(Scale(scale.mean[:-1], scale.sd[:-1]), x.astype(scale.mean.dtype))

        def one(particle: tuple[Array, Array, Array]) -> tuple[Array, Array]:  # one by one: Jacobians are large
            w, kind, C = particle
            y, jacobian = network_outputs(network, w, kind, z)
            J = jnp.moveaxis(blocks.gather(jacobian.reshape(-1, ROWS, network.dim).mean(1)), 0, 1)  # [K, groups, D]
            return y, jnp.sqrt(jnp.maximum(((J @ C) * J).sum((0, 2)), 0))

        y, doubt = jax.lax.map(one, (state.particles, kinds, matrices))
        unit = divisor(scale)[-1]
        weights = jnp.broadcast_to(state.calibration.weights[:, None], y.shape)
        return (y * unit + scale.mean[-1])[..., None], weights, doubt * unit * jnp.sqrt(confirmed(state))

    return outputs


@lru_cache(8)
def _components(tracker: Tracker) -> Callable[..., tuple[Array, Array, Array]]:
    """The doubts of a group's rows are taken as moving together."""

    @jax.jit
    def outputs(state: Any, x: Array) -> tuple[Array, Array, Array]:
        predictive = tracker.predict(state, x)
        head = predictive.components
        values = head.mean[..., None] if isinstance(head, Normal | StudentT) else jnp.exp(head.log_probabilities())
        own = jnp.sqrt(jnp.maximum(head.spread, 0)) if isinstance(head, StudentT) else jnp.zeros_like(values[..., 0])
        weights = jnp.broadcast_to(jnp.exp(predictive.log_mixture_weights()), values.shape[:2])
        return values, weights, own.reshape(len(own), -1, ROWS).mean(2)

    return outputs
