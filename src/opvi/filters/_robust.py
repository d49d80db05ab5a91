r"""How far a row is trusted, given its distance from the prediction.

A row's likelihood is raised to the power

$$w = \min\bigl(1, (c / r)^2\bigr)$$

with r its error in standard deviations of its prediction: a Gaussian row of weight w has 1/w times the noise. That is
WoLF's inverse multiquadric weight (arXiv 2405.05646) for large r, at no loss for errors below c. A label that was
predicted with probability p has $r^2 = (1 - p) / p$, its squared Pearson residual.
"""

import math

import jax.numpy as jnp

from opvi.predictive import Distribution
from opvi.types import Array


def trust(squared: Array, largest: float) -> Array:
    """Return the power w of each row's likelihood, from its squared error r² and the largest r that costs nothing."""
    return jnp.minimum(1, largest**2 / jnp.maximum(squared, 1e-30))


def trust_in_targets(y: Array, mean: Array, variance: Array, largest: float) -> Array:
    """Return the powers for targets `[B]` that particles predicted by means and variances `[n, B]`."""
    centre = mean.mean(0)
    spread = ((mean - centre[None]) ** 2).mean(0) + variance.mean(0)
    return trust((y - centre) ** 2 / jnp.maximum(spread, 1e-30), largest)


def trust_in_labels(log_probability: Array, largest: float) -> Array:
    """Return the powers for labels `[B]` that were predicted with these log probabilities."""
    return trust(jnp.expm1(-log_probability), largest)


def unweighable(dist: Distribution) -> str:
    """Return what is said of heads whose rows have no such weight."""
    return (
        f"`robust` weighs rows of Gaussian and class heads, but this target's head is {type(dist).__name__}. Leave it "
        "out, or give the model noise with heavy tails, e.g. `opvi.targets.student_t`."
    )


def checked_robust(robust: float | None) -> float | None:
    """Return the setting `robust`; refuse it unless it is None or a finite number greater than 0."""
    if robust is None:
        return None
    if isinstance(robust, bool) or not isinstance(robust, float | int) or not 0 < robust < math.inf:
        raise ValueError(
            f"`robust` is {robust!r}, but must be None, which believes every row, or a number of standard deviations "
            "greater than 0 from which on a row counts for less, e.g. 4."
        )
    return float(robust)
