"""A target that is always positive: its logarithm is learnt, and what is said about it holds on its own scale."""

from dataclasses import dataclass
from typing import cast

import jax.numpy as jnp

from opvi._steps import compiled
from opvi.predictive import Normal, Predictive, StudentT
from opvi.tracking._wrapped import Wrapped, WrappedInfo, Wrapper, wrapped_info
from opvi.types import Array, Batch, Key, Predicted, State

LARGEST = 40.0  # of a logarithm: beyond e^40 nothing is a number that anybody measured


def positive_moments(predictive: Predictive) -> tuple[Array, Array]:
    r"""Return mean and standard deviation of $Y = e^Z$, where the predictive is of $Z$.

    $$E[Y] = \sum_i w_i\, e^{m_i + v_i/2}, \qquad E[Y^2] = \sum_i w_i\, e^{2 m_i + 2 v_i}$$

    with the means and variances of the components, taken as normal ones: the exponential of a Student-t has no mean.
    """
    head = predictive.components
    assert isinstance(head, Normal | StudentT)
    weights = jnp.exp(predictive.log_mixture_weights())
    mean = (weights * jnp.exp(jnp.minimum(head.mean + head.variance / 2, LARGEST))).sum(0)
    square = (weights * jnp.exp(jnp.minimum(2 * (head.mean + head.variance), 2 * LARGEST))).sum(0)
    return mean, jnp.sqrt(jnp.maximum(square - mean**2, 0))


@dataclass(frozen=True)
class Positive(Wrapper):
    """The same sampler of a logarithm, whose Info says what was predicted for the number itself."""

    def beginning(self, inner: State) -> tuple[()]:
        """Return nothing: no state is needed."""
        return ()

    @compiled
    def step(self, key: Key, state: Wrapped, batch: Batch) -> tuple[Wrapped, WrappedInfo]:
        """Learn from a batch of logarithms; what was predicted is said on the scale of y, with its density."""
        x, z = batch.data
        mean, _ = positive_moments(cast("Predictive", self.sampler.predict(state.inner, x)))
        inner, info = self.sampler.step(key, state.inner, batch)
        told = wrapped_info(info)
        predicted = cast("Predicted", told.predicted)
        predicted = predicted._replace(mean=mean, log_density=predicted.log_density - z)
        return Wrapped(inner, (), inner.round, inner.rows), told._replace(predicted=predicted)
