"""What a model says about y given x: the three conditional distributions that heads produce.

Each is a NamedTuple of arrays whose last batch axis is rows, so a set of particles is the same type
with one more leading axis.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.types import Array, Key


class Normal(NamedTuple):
    """y ~ N(mean, variance), one number a row."""

    mean: Array
    variance: Array

    def log_density(self, y: Array) -> Array:
        """The log density of y, row by row."""
        return -0.5 * ((y - self.mean) ** 2 / self.variance + jnp.log(2 * math.pi * self.variance))

    def curvature(self, y: Array) -> tuple[Array, Array]:
        """Gradient `[B, 1]` of the log density in the output, and a root `[B, 1, 1]` of its curvature."""
        return ((y - self.mean) / self.variance)[:, None], jax.lax.rsqrt(self.variance)[:, None, None]

    def sample(self, key: Key) -> Array:
        """One draw of y a row."""
        noise = jax.random.normal(key, self.mean.shape, self.mean.dtype)
        return self.mean + jnp.sqrt(self.variance) * noise


class Bernoulli(NamedTuple):
    """y is 1 with probability sigmoid(logit), else 0."""

    logit: Array

    def log_density(self, y: Array) -> Array:
        """The log density of y, row by row; NaN where y is neither 0 nor 1."""
        y = y.astype(self.logit.dtype)
        density = y * jax.nn.log_sigmoid(self.logit) + (1 - y) * jax.nn.log_sigmoid(-self.logit)
        return jnp.where((y == 0) | (y == 1), density, jnp.nan)

    def curvature(self, y: Array) -> tuple[Array, Array]:
        """Gradient `[B, 1]` of the log density in the logit, and a root `[B, 1, 1]` of its curvature."""
        p = jax.nn.sigmoid(self.logit)
        return (y.astype(p.dtype) - p)[:, None], jnp.sqrt(p * (1 - p))[:, None, None]

    def log_probabilities(self) -> Array:
        """Log probabilities of the classes, on a last axis."""
        return jnp.stack([jax.nn.log_sigmoid(-self.logit), jax.nn.log_sigmoid(self.logit)], -1)

    def sample(self, key: Key) -> Array:
        """One draw of y a row."""
        return jax.random.bernoulli(key, jax.nn.sigmoid(self.logit)).astype(jnp.int32)


class Categorical(NamedTuple):
    """y is one of the classes 0, 1, …, C - 1, with probabilities softmax(logits)."""

    logits: Array  # [..., C]

    def log_density(self, y: Array) -> Array:
        """The log density of y, row by row; NaN where y is no class."""
        log_p = self.log_probabilities()
        label = jnp.broadcast_to(y.astype(jnp.int32), log_p.shape[:-1])
        known = (label >= 0) & (label < log_p.shape[-1])
        chosen = jnp.take_along_axis(log_p, jnp.where(known, label, 0)[..., None], -1)[..., 0]
        return jnp.where(known, chosen, jnp.nan)

    def curvature(self, y: Array) -> tuple[Array, Array]:
        """Gradient `[B, C]` of the log density in the logits, and a root `[B, C, C]` of its curvature."""
        p = jax.nn.softmax(self.logits, -1)
        root = jnp.sqrt(p)
        chosen = jax.nn.one_hot(y, p.shape[-1], dtype=p.dtype)
        return chosen - p, jnp.eye(p.shape[-1], dtype=p.dtype)[None] * root[:, None, :] - p[:, :, None] * root[
            :, None, :
        ]

    def log_probabilities(self) -> Array:
        """Log probabilities of the classes, on a last axis."""
        return jax.nn.log_softmax(self.logits, -1)

    def sample(self, key: Key) -> Array:
        """One draw of y a row."""
        return jax.random.categorical(key, self.logits)


Distribution = Normal | Bernoulli | Categorical
