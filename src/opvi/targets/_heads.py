r"""Heads, which make a distribution of y from a network's outputs, and the prior of a precision."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from opvi.predictive import Bernoulli, Categorical, Distribution, NegativeBinomial, Normal, Poisson, StudentT
from opvi.types import Array, Seed, as_key


@dataclass(frozen=True)
class Gamma:
    """A Gamma prior on a precision, by shape and rate. The paper uses Gamma(1, 0.1): mean 10."""

    shape: float = 1.0
    rate: float = 0.1

    def log_density_of_log(self, log_precision: Array) -> Array:
        """Return the density of the logarithm, Jacobian included, up to a constant."""
        return self.shape * log_precision - self.rate * jnp.exp(log_precision)

    def sample_log(self, key: Seed) -> Array:
        """Return the logarithm of a draw."""
        return jnp.log(jax.random.gamma(as_key(key), self.shape)) - math.log(self.rate)


@dataclass(frozen=True)
class Head:
    """How a network's outputs become a distribution of y."""

    distribution: Callable[[Array, Array | None], Distribution]  # (outputs, log noise precision)
    noise_prior: Gamma | None = None

    @property
    def classes(self) -> bool:
        """Whether y is a class, one of the first whole numbers."""
        return self.distribution in (_bernoulli, _categorical)


def gaussian(noise: float | Gamma = 1.0) -> Head:
    """A head for numbers: y = output + noise. `noise` is its variance, or a Gamma prior on its precision, to infer."""
    if isinstance(noise, Gamma):
        return Head(_Gaussian(None), noise)
    if not noise > 0:
        raise ValueError(f"`noise` is {noise!r}, but a variance must be greater than 0.")
    return Head(_Gaussian(float(noise)))


def bernoulli() -> Head:
    """A head for two classes: y is 0 or 1, and the output is the logit of 1."""
    return Head(_bernoulli)


def categorical() -> Head:
    """A head for several classes: y is a class index, and the outputs are one logit per class."""
    return Head(_categorical)


def student_t(noise: float | Gamma = 1.0, dof: float = 5.0) -> Head:
    """A head for numbers with outliers: y = output + noise. `noise` is its variance, or a Gamma prior on 1/variance."""
    if not dof > 2:
        raise ValueError(f"`dof` is {dof!r}, but a variance needs more than 2 degrees of freedom.")
    given = None if isinstance(noise, Gamma) else float(noise)
    return Head(_StudentT(_Gaussian(given), float(dof)), gaussian(noise).noise_prior)


def poisson() -> Head:
    """A head for counts whose variance is their mean: the output is the logarithm of the rate."""
    return Head(_poisson)


def negative_binomial(concentration: float | Gamma | None = None) -> Head:
    """A head for overdispersed counts: the output is the logarithm of the mean m, the variance is m + m²/c.

    `concentration` is c, or a Gamma prior on it, to infer; Gamma(1, 0.1) if omitted.
    """
    concentration = Gamma() if concentration is None else concentration
    if isinstance(concentration, Gamma):
        return Head(_NegativeBinomial(None), concentration)
    if not concentration > 0:
        raise ValueError(f"`concentration` is {concentration!r}, but must be greater than 0.")
    return Head(_NegativeBinomial(float(concentration)))


@dataclass(frozen=True)
class _Gaussian:
    noise: float | None  # the variance; None: inferred

    def __call__(self, outputs: Array, log_precision: Array | None) -> Normal:
        mean = _one_output(outputs, "gaussian")
        variance = jnp.asarray(self.noise, mean.dtype) if log_precision is None else jnp.exp(-log_precision)
        return Normal(mean, jnp.broadcast_to(variance, mean.shape))


@dataclass(frozen=True)
class _StudentT:
    plain: _Gaussian
    dof: float

    def __call__(self, outputs: Array, log_precision: Array | None) -> StudentT:
        mean, variance = self.plain(outputs, log_precision)
        return StudentT(mean, variance, jnp.full_like(mean, self.dof), jnp.zeros_like(mean))


def _poisson(outputs: Array, _: Array | None) -> Poisson:
    return Poisson(_one_output(outputs, "poisson"))


@dataclass(frozen=True)
class _NegativeBinomial:
    concentration: float | None  # None: inferred

    def __call__(self, outputs: Array, log_concentration: Array | None) -> NegativeBinomial:
        log_mean = _one_output(outputs, "negative binomial")
        own = (
            jnp.asarray(self.concentration, log_mean.dtype) if log_concentration is None else jnp.exp(log_concentration)
        )
        return NegativeBinomial(log_mean, jnp.broadcast_to(own, log_mean.shape))


def _bernoulli(outputs: Array, _: Array | None) -> Bernoulli:
    return Bernoulli(_one_output(outputs, "bernoulli"))


def _categorical(outputs: Array, _: Array | None) -> Categorical:
    if outputs.ndim != 2:
        raise ValueError(f"`apply` returned shape {outputs.shape}, but the categorical head takes (B, classes).")
    return Categorical(outputs)


def _one_output(outputs: Array, head: str) -> Array:
    if outputs.ndim == 2 and outputs.shape[1] == 1:
        return outputs[:, 0]
    if outputs.ndim != 1:
        raise ValueError(
            f"`apply` returned shape {outputs.shape}, but the {head} head takes one output per row: (B,) or (B, 1)."
        )
    return outputs
