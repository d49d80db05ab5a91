"""What a model says about y given x: the conditional distributions that heads produce.

Each is a NamedTuple of arrays whose last batch axis is rows, so a set of particles is the same type
with one more leading axis.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betainc, gammaln
from jax.scipy.stats import norm

from opvi.predictive._counts import NegativeBinomial, Poisson
from opvi.types import Array, Seed, as_key


class Normal(NamedTuple):
    """y ~ N(mean, variance), one number per row."""

    mean: Array
    variance: Array

    def log_density(self, y: Array) -> Array:
        """Return the log density of y, row by row."""
        return -0.5 * ((y - self.mean) ** 2 / self.variance + jnp.log(2 * math.pi * self.variance))

    def curvature(self, y: Array) -> tuple[Array, Array]:
        """Return the gradient `[B, 1]` of the log density in the output, and a root `[B, 1, 1]` of its curvature."""
        return ((y - self.mean) / self.variance)[:, None], jax.lax.rsqrt(self.variance)[:, None, None]

    def cdf(self, y: Array) -> Array:
        """Return P(Y ≤ y), row by row."""
        return norm.cdf((y - self.mean) / jnp.sqrt(self.variance))

    def sample(self, key: Seed) -> Array:
        """Return one draw of y per row."""
        noise = jax.random.normal(as_key(key), self.mean.shape, self.mean.dtype)
        return self.mean + jnp.sqrt(self.variance) * noise


LARGEST_EVEN = 10  # degrees of freedom up to which even ones have a distribution function that is a short polynomial


class StudentT(NamedTuple):
    """A heavy-tailed y, by its mean and variance.

    The degrees of freedom are greater than 2, or infinite: the normal distribution. Even ones up to 10 are quickest.
    """

    mean: Array
    variance: Array
    dof: Array  # constants if they are NumPy's, and the mean is JAX's
    spread: Array  # the part of the variance that comes from not knowing the parameters

    def _standard(self, y: Array) -> tuple[Array, Array, Array]:
        """Return the residual over the scale, the scale, and degrees of freedom that are safe to compute with."""
        ours = np if self._constant() else jnp  # of constants, constants
        finite = ours.where(ours.isinf(self.dof), LARGEST_EVEN, self.dof).astype(self.dof.dtype)
        scale = jnp.sqrt(self.variance * ours.where(ours.isinf(self.dof), 1, (finite - 2) / finite))
        return (y - self.mean) / scale, scale, finite

    def log_density(self, y: Array) -> Array:
        """Return the log density of y, row by row."""
        z, scale, nu = self._standard(y)
        tails = _log_constant(nu) - (nu + 1) / 2 * jnp.log1p(z**2 / nu)
        normal = -0.5 * z**2 - 0.5 * math.log(2 * math.pi)
        return jnp.where(self._normal(), normal, tails) - jnp.log(scale)

    def _normal(self) -> Array:
        ours: Any = np if self._constant() else jnp
        return ours.isinf(self.dof)

    def _constant(self) -> bool:
        return isinstance(self.dof, np.ndarray) and not isinstance(self.mean, np.ndarray)

    def curvature(self, y: Array) -> tuple[Array, Array]:
        """Return the gradient `[B, 1]` of the log density in the mean, and a root `[B, 1, 1]` of its mean curvature."""
        z, scale, nu = self._standard(y)
        known = jnp.isinf(self.dof)
        gradient = jnp.where(known, z, (nu + 1) * z / (nu + z**2)) / scale
        return gradient[:, None], (jnp.sqrt(jnp.where(known, 1, (nu + 1) / (nu + 3))) / scale)[:, None, None]

    def cdf(self, y: Array) -> Array:
        """Return P(Y ≤ y), row by row."""
        z, _, nu = self._standard(y)
        short = ((nu % 2 == 0) & (nu <= LARGEST_EVEN)).all()
        if isinstance(nu, np.ndarray):
            tails = _even_cdf(z, nu) if short else _any_cdf(z, jnp.broadcast_to(nu, z.shape))
        else:
            tails = jax.lax.cond(short, _even_cdf, _any_cdf, z, jnp.broadcast_to(nu, z.shape))
        return jnp.where(self._normal(), jax.lax.erfc(-math.sqrt(0.5) * z) / 2, tails)

    def sample(self, key: Seed) -> Array:
        """Return one draw of y per row."""
        one, two = jax.random.split(as_key(key))
        z = jax.random.normal(one, self.mean.shape, self.mean.dtype)
        _, scale, nu = self._standard(self.mean)
        chi_square = 2 * jax.random.gamma(two, nu / 2, self.mean.shape, self.mean.dtype)
        tails = jnp.where(jnp.isinf(self.dof), 1, jnp.sqrt(nu / chi_square))
        return self.mean + scale * z * tails


def _log_constant(nu: Array) -> Array:
    """Return the logarithm of the constant in Student's density."""
    if not isinstance(nu, np.ndarray):
        return gammaln((nu + 1) / 2) - gammaln(nu / 2) - 0.5 * jnp.log(nu * math.pi)
    each = [math.lgamma((v + 1) / 2) - math.lgamma(v / 2) - 0.5 * math.log(v * math.pi) for v in nu.ravel().tolist()]
    return np.array(each, nu.dtype).reshape(nu.shape)


def _even_cdf(z: Array, nu: Array) -> Array:
    """Return Student's distribution function for even degrees of freedom."""
    sine = z * jax.lax.rsqrt(nu + z**2)
    total, term = jnp.zeros_like(sine), jnp.ones_like(sine)
    for k in range(LARGEST_EVEN // 2):
        total = total + jnp.where(2 * k < nu, term, 0)
        term = term * (1 - sine**2) * (2 * k + 1) / (2 * k + 2)
    return 0.5 + 0.5 * sine * total


def _any_cdf(z: Array, nu: Array) -> Array:
    """Return Student's distribution function."""
    beyond = betainc(nu / 2, jnp.full_like(nu, 0.5), nu / (nu + z**2)) / 2
    return jnp.where(z > 0, 1 - beyond, beyond)


class Bernoulli(NamedTuple):
    """y is 1 with probability sigmoid(logit), else 0."""

    logit: Array

    def log_density(self, y: Array) -> Array:
        """Return the log density of y, row by row; NaN where y is neither 0 nor 1."""
        y = y.astype(self.logit.dtype)
        density = y * jax.nn.log_sigmoid(self.logit) + (1 - y) * jax.nn.log_sigmoid(-self.logit)
        return jnp.where((y == 0) | (y == 1), density, jnp.nan)

    def curvature(self, y: Array) -> tuple[Array, Array]:
        """Return the gradient `[B, 1]` of the log density in the logit, and a root `[B, 1, 1]` of its curvature."""
        p = jax.nn.sigmoid(self.logit)
        return (y.astype(p.dtype) - p)[:, None], jnp.sqrt(p * (1 - p))[:, None, None]

    def log_probabilities(self) -> Array:
        """Return log probabilities of the classes, on a last axis."""
        return jnp.stack([jax.nn.log_sigmoid(-self.logit), jax.nn.log_sigmoid(self.logit)], -1)

    def sample(self, key: Seed) -> Array:
        """Return one draw of y per row."""
        return jax.random.bernoulli(as_key(key), jax.nn.sigmoid(self.logit)).astype(jnp.int32)


class Categorical(NamedTuple):
    """y is one of the classes 0, 1, …, C - 1, with probabilities softmax(logits)."""

    logits: Array  # [..., C]

    def log_density(self, y: Array) -> Array:
        """Return the log density of y, row by row; NaN where y is not a class."""
        log_p = self.log_probabilities()
        label = jnp.broadcast_to(y.astype(jnp.int32), log_p.shape[:-1])
        known = (label >= 0) & (label < log_p.shape[-1])
        chosen = jnp.take_along_axis(log_p, jnp.where(known, label, 0)[..., None], -1)[..., 0]
        return jnp.where(known, chosen, jnp.nan)

    def curvature(self, y: Array) -> tuple[Array, Array]:
        """Return the gradient `[B, C]` of the log density in the logits, and a root `[B, C, C]` of its curvature."""
        p = jax.nn.softmax(self.logits, -1)
        root = jnp.sqrt(p)
        chosen = jax.nn.one_hot(y, p.shape[-1], dtype=p.dtype)
        return chosen - p, jnp.eye(p.shape[-1], dtype=p.dtype)[None] * root[:, None, :] - p[:, :, None] * root[
            :, None, :
        ]

    def log_probabilities(self) -> Array:
        """Return log probabilities of the classes, on a last axis."""
        return jax.nn.log_softmax(self.logits, -1)

    def sample(self, key: Seed) -> Array:
        """Return one draw of y per row."""
        return jax.random.categorical(as_key(key), self.logits)


Distribution = Normal | StudentT | Poisson | NegativeBinomial | Bernoulli | Categorical  # what a head makes of outputs
Numeric = Normal | StudentT | Poisson | NegativeBinomial
Classes = Bernoulli | Categorical
