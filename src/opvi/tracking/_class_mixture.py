"""What the trackers of a classifier say together: their mixture, calibrated, and its components."""

import math
from functools import partial
from typing import Any, Protocol

import jax.numpy as jnp
from jax.scipy.special import logsumexp

from opvi.filters import LinearState
from opvi.filters._linear_ekf import predict_linear
from opvi.tracking import _class_memory as memories
from opvi.tracking import _temperature as temperature
from opvi.tracking._probabilities import in_pieces
from opvi.tracking._wrappers import _scaling as scaling
from opvi.types import Array

LARGEST_INPUT = 2.5  # standard deviations; rare values of a feature would drown the others


class Mixed(Protocol):
    """What is needed of a classifier's state."""

    @property
    def moments(self) -> scaling.Moments: ...
    @property
    def linear(self) -> LinearState | None: ...
    @property
    def log_weights(self) -> Array: ...
    @property
    def exponents(self) -> temperature.Exponents: ...
    @property
    def memory(self) -> memories.ClassMemory | None: ...


def scaled(moments: scaling.Moments, x: Array) -> Array:
    """Return inputs as the trackers see them."""
    return _within(scaling.scale_of(moments), x)


def _within(scale: scaling.Scale, x: Array) -> Array:
    return jnp.clip(scaling.readable(scale, x), -LARGEST_INPUT, LARGEST_INPUT)


def members(sampler: Any, state: Mixed, z: Array, networks: Array | None) -> tuple[Array, Array]:
    """Return log probabilities of every particle `[n, B, C]` and every tracker `[K, B, C]` at scaled inputs.

    Args:
        sampler: the classifier.
        state: its state.
        z: scaled inputs, `[B, F]`.
        networks: log probabilities of the networks, `[K, n, B, C]`, if there are any.
    """
    lines = [] if state.linear is None else [predict_linear(state.linear, z, sampler.classes).log_probabilities()]
    memory = state.memory
    if memory is not None:
        view = partial(_within, scaling.scale_of(state.moments))
        kept = sampler.remembered, sampler.half_life
        lines.insert(0, in_pieces(lambda some: memories.recall(memory, view, some, *kept))(z))
    if networks is None:
        return jnp.concatenate(lines), jnp.concatenate(lines)
    log_k = logsumexp(networks, axis=1) - math.log(networks.shape[1])
    log_p = networks.reshape(-1, *networks.shape[2:])
    return jnp.concatenate([log_p, *lines]), jnp.concatenate([log_k, *lines])


def with_mixture(state: Mixed, log_k: Array) -> Array:
    """Return the mixture's log probabilities, then the trackers': `[1 + K, B, C]`."""
    return jnp.concatenate([logsumexp(state.log_weights[:, None, None] + log_k, axis=0)[None], log_k])


def components(state: Mixed, log_p: Array, log_k: Array) -> tuple[Array, Array]:
    """Return components and log weights that add up to the calibrated probabilities."""
    both = with_mixture(state, log_k)
    others = memories.MEMBERS * (state.memory is not None)
    others += 0 if state.linear is None else len(state.linear.particles)
    groups = len(log_k) - others
    n = (len(log_p) - others) // max(groups, 1)
    own = jnp.concatenate([jnp.repeat(state.log_weights[:groups] - math.log(max(n, 1)), n), state.log_weights[groups:]])
    # Every component is moved by the same factor as the mixture; what it gains or loses in all is its weight.
    moved = log_p + (temperature.pool(state.exponents, both) - both[0])[None]
    size = logsumexp(moved, axis=-1)
    return moved - size[..., None], own[:, None] + size
