r"""The two-parameter Gaussian mixture of Welling and Teh (2011), the paper's synthetic experiment."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from opvi.targets._target import Method, Target, target
from opvi.types import Array, DType, Key, Seed, as_key


def gaussian_mixture(variance: float = 2.0, prior_variance: tuple[float, float] = (10.0, 1.0)) -> Target:
    r"""$x \sim \tfrac12 N(\theta_1, \sigma_x^2) + \tfrac12 N(\theta_1 + \theta_2, \sigma_x^2)$; two mirrored modes.

    Batches are plain arrays of numbers, `[B]`.

    Args:
        variance: $\sigma_x^2$. The paper's text has $\sigma_x = 2$, its authors' code $\sigma_x^2 = 2$.
        prior_variance: the prior variance of $\theta_1$ and $\theta_2$, whose means are 0.
    """
    if not variance > 0 or not min(prior_variance) > 0:
        raise ValueError(f"variances are {variance} and {prior_variance}, but each must be greater than 0.")
    made = _Mixture(float(variance), (float(prior_variance[0]), float(prior_variance[1])))
    return target(*(Method(made, name) for name in ("log_prior", "log_likelihood", "init")))


@dataclass(frozen=True)
class _Mixture:
    """The mixture; its methods are those of its target."""

    variance: float
    prior_variance: tuple[float, float]

    @property
    def example(self) -> np.ndarray:
        """An example row."""
        return np.zeros(1, np.float32)

    def log_prior(self, theta: Array) -> Array:
        return -0.5 * ((theta / self.spread(theta.dtype)) ** 2).sum()

    def log_likelihood(self, theta: Array, x: Array) -> Array:
        # Written around the midpoint of the two components, where the model's symmetry is plain.
        midpoint, gap, variance = theta[0] + theta[1] / 2, theta[1], self.variance
        tilt = (x - midpoint) * gap / (2 * variance)
        bump = -((x - midpoint) ** 2) / (2 * variance) - gap**2 / (8 * variance)
        return bump + jnp.logaddexp(tilt, -tilt) - 0.5 * math.log(8 * math.pi * variance)

    def init(self, key: Key) -> Array:
        draw = jax.random.normal(key, (2,))
        return draw * self.spread(draw.dtype)

    def spread(self, dtype: DType) -> np.ndarray:
        return np.sqrt(np.asarray(self.prior_variance)).astype(dtype)


def sample_mixture(key: Seed, rows: int, theta: tuple[float, float] = (0.0, 1.0), variance: float = 2.0) -> Array:
    """Return rows drawn from the mixture at `theta`."""
    component, spread = jax.random.split(as_key(key))
    noise = jax.random.normal(spread, (rows,))
    second = jax.random.bernoulli(component, 0.5, (rows,)).astype(noise.dtype)
    return theta[0] + theta[1] * second + variance**0.5 * noise
