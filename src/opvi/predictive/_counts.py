"""Distributions of counts: 0, 1, 2, …"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import betainc, gammaincc, gammaln, xlogy

from opvi.types import Array, Seed, as_key


class Poisson(NamedTuple):
    """y is a count with mean and variance exp(log_rate)."""

    log_rate: Array

    @property
    def mean(self) -> Array:
        """The rate."""
        return jnp.exp(self.log_rate)

    @property
    def variance(self) -> Array:
        """The rate."""
        return jnp.exp(self.log_rate)

    def log_density(self, y: Array) -> Array:
        """Return the log probability of y, row by row; NaN where y is not a count."""
        y = y.astype(self.log_rate.dtype)
        return jnp.where(_is_count(y), y * self.log_rate - self.mean - gammaln(y + 1), jnp.nan)

    def curvature(self, y: Array) -> tuple[Array, Array]:
        """Return the gradient `[B, 1]` in the log rate, and a root `[B, 1, 1]` of the mean curvature."""
        return (y.astype(self.log_rate.dtype) - self.mean)[:, None], jnp.exp(self.log_rate / 2)[:, None, None]

    def cdf(self, y: Array) -> Array:
        """Return P(Y ≤ y), row by row."""
        y, rate = jnp.broadcast_arrays(jnp.floor(y), self.mean)
        return jnp.where(y < 0, 0, gammaincc(jnp.maximum(y, 0) + 1, rate))

    def sample(self, key: Seed) -> Array:
        """Return one draw of y per row."""
        return jax.random.poisson(as_key(key), self.mean)


class NegativeBinomial(NamedTuple):
    """y is a count with mean m = exp(log_mean) and variance m + m² / concentration."""

    log_mean: Array
    concentration: Array

    @property
    def mean(self) -> Array:
        """The mean."""
        return jnp.exp(self.log_mean)

    @property
    def variance(self) -> Array:
        """The variance, which exceeds the mean."""
        return self.mean + self.mean**2 / self.concentration

    def log_density(self, y: Array) -> Array:
        """Return the log probability of y, row by row; NaN where y is not a count."""
        y, c, m = y.astype(self.log_mean.dtype), self.concentration, self.mean
        ways = gammaln(y + c) - gammaln(c) - gammaln(y + 1)
        density = ways - c * jnp.log1p(m / c) + xlogy(y, m / (m + c))
        return jnp.where(_is_count(y), density, jnp.nan)

    def curvature(self, y: Array) -> tuple[Array, Array]:
        """Return the gradient `[B, 1]` in the log mean, and a root `[B, 1, 1]` of the mean curvature."""
        share = self.concentration / (self.concentration + self.mean)
        return ((y.astype(share.dtype) - self.mean) * share)[:, None], jnp.sqrt(self.mean * share)[:, None, None]

    def cdf(self, y: Array) -> Array:
        """Return P(Y ≤ y), row by row."""
        y, c, m = jnp.broadcast_arrays(jnp.floor(y), self.concentration, self.mean)
        return jnp.where(y < 0, 0, betainc(c, jnp.maximum(y, 0) + 1, c / (c + m)))

    def sample(self, key: Seed) -> Array:
        """Return one draw of y per row."""
        one, two = jax.random.split(as_key(key))
        rate = jax.random.gamma(one, self.concentration, self.mean.shape, self.mean.dtype)
        return jax.random.poisson(two, rate * self.mean / self.concentration)


def _is_count(y: Array) -> Array:
    return (y >= 0) & (y == jnp.floor(y))
