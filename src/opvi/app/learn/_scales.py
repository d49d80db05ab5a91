"""Positive targets and counts: learnt on another scale, reported on their own."""

from dataclasses import dataclass
from typing import cast

import jax.numpy as jnp

from opvi._steps import compiled
from opvi.adapters._tables import COUNT_BEND, COUNT_SHIFT
from opvi.predictive import Normal, Predictive, StudentT
from opvi.tracking._wrapped import Wrapped, WrappedInfo, Wrapper, wrapped_info
from opvi.types import Array, Batch, Key, Predicted, State

LOST = 1e-5  # a difference of two numbers near 1 has no digits below this
LARGEST = 40.0  # of a logarithm: beyond e^40 nothing is a number that anybody measured


def positive_moments(predictive: Predictive) -> tuple[Array, Array]:
    r"""Return mean and standard deviation of $Y = e^Z$, where the predictive is of $Z$.

    $$E[Y] = \sum_i w_i\, e^{m_i + v_i/2}, \qquad E[Y^2] = \sum_i w_i\, e^{2 m_i + 2 v_i}$$

    with the means and variances of the components, taken as normal: the exponential of a Student-t has no mean.
    """
    head = predictive.components
    assert isinstance(head, Normal | StudentT)
    weights = jnp.exp(predictive.log_mixture_weights())
    mean = (weights * jnp.exp(jnp.minimum(head.mean + head.variance / 2, LARGEST))).sum(0)
    square = (weights * jnp.exp(jnp.minimum(2 * (head.mean + head.variance), 2 * LARGEST))).sum(0)
    return mean, jnp.sqrt(jnp.maximum(square - mean**2, 0))


@dataclass(frozen=True)
class Rescaled(Wrapper):
    """A sampler of targets on another scale, whose Info reports predictions for the targets themselves."""

    def beginning(self, inner: State) -> tuple[()]:
        """Return None: no state is needed."""
        return ()

    def told(self, said: Predictive, z: Array, predicted: Predicted) -> Predicted:
        """Return the predictions for targets z in their own units, from those on the other scale."""
        raise NotImplementedError

    @compiled
    def step(self, key: Key, state: Wrapped, batch: Batch) -> tuple[Wrapped, WrappedInfo]:
        """Learn from a batch of targets on the other scale."""
        x, z = batch.data
        said = cast("Predictive", self.sampler.predict(state.inner, x))
        inner, info = self.sampler.step(key, state.inner, batch)
        about = wrapped_info(info)
        predicted = self.told(said, z, cast("Predicted", about.predicted))
        return Wrapped(inner, (), inner.round, inner.rows), about._replace(predicted=predicted)


@dataclass(frozen=True)
class Positive(Rescaled):
    """A sampler of logarithms."""

    def told(self, said: Predictive, z: Array, predicted: Predicted) -> Predicted:
        """Return the mean of the numbers themselves, and their density."""
        return predicted._replace(mean=positive_moments(said)[0], log_density=predicted.log_density - z)


# --- counts ---------------------------------------------------------------------------------------


def log_probability(predictive: Predictive, k: Array) -> Array:
    r"""Return $\log P(Y = k)$ of counts, where the predictive is of $Z = g(Y)$, `count_scale`.

    $$P(Y = k) = F(g(k + 1/2)) - F(g(k - 1/2)), \qquad g(-1/2) = -\infty$$

    with the distribution function F of Z: the counts divide the whole line among them, so these add up to 1. Where the
    difference is lost in rounding, it is the density in the middle times the width.
    """
    upper, lower = _scaled(k + 0.5), _scaled(jnp.maximum(k - 0.5, 0))
    mass = predictive.cdf(upper) - jnp.where(k > 0, predictive.cdf(lower), 0)
    middle = predictive.log_density(_scaled(k)) + jnp.log(upper - jnp.where(k > 0, lower, 0))
    return jnp.where(mass > LOST, jnp.log(jnp.maximum(mass, LOST)), middle)


def _scaled(k: Array) -> Array:
    return jnp.arcsinh(jnp.sqrt((k + COUNT_SHIFT) / COUNT_BEND))


def count_moments(predictive: Predictive) -> tuple[Array, Array]:
    r"""Return mean and standard deviation of $Y = b \sinh^2 Z - 3/8$, the components taken as normal.

    $$E[\sinh^2 Z] = \tfrac12 (e^{2v} \cosh 2m - 1), \qquad
      E[\sinh^4 Z] = \tfrac18 (e^{8v} \cosh 4m - 4 e^{2v} \cosh 2m + 3)$$
    """
    head = predictive.components
    assert isinstance(head, Normal | StudentT)
    weights = jnp.exp(predictive.log_mixture_weights())
    m, v = jnp.clip(head.mean, -LARGEST / 4, LARGEST / 4), jnp.minimum(head.variance, 1.0)
    two, four = jnp.exp(2 * v) * jnp.cosh(2 * m), jnp.exp(8 * v) * jnp.cosh(4 * m)
    mean = (weights * (two - 1)).sum(0) / 2
    square = (weights * (four - 4 * two + 3)).sum(0) / 8
    sd = COUNT_BEND * jnp.sqrt(jnp.maximum(square - mean**2, 0))
    return jnp.maximum(COUNT_BEND * mean - COUNT_SHIFT, 0), sd


def count_quantiles(predictive: Predictive, levels: Array) -> Array:
    r"""Return the smallest k with $P(Y \le k) = F(g(k + 1/2))$ of at least each level."""
    edge = COUNT_BEND * jnp.sinh(jnp.maximum(predictive.quantile(levels), 0)) ** 2 - COUNT_SHIFT
    return jnp.maximum(jnp.ceil(edge - 0.5), 0)


@dataclass(frozen=True)
class Counts(Rescaled):
    """A sampler of counts on `count_scale`."""

    def told(self, said: Predictive, z: Array, predicted: Predicted) -> Predicted:
        """Return the mean of the counts, and their probability."""
        k = jnp.round(COUNT_BEND * jnp.sinh(jnp.clip(z, 0, LARGEST / 2)) ** 2 - COUNT_SHIFT)
        probability = jnp.where(jnp.isfinite(z), log_probability(said, k), jnp.nan)
        return predicted._replace(mean=count_moments(said)[0], log_density=probability)
