"""How far out a target was, from the level of its predictive that it came at."""

import jax.numpy as jnp
from jax.lax import erf_inv

from opvi.types import Array

SURE = 1e-6  # levels nearer to 0 or 1 are this


def squared_quantile(level: Array) -> Array:
    r"""Return the squares of standard normal quantiles, at levels not nearer to 0 and 1 than `SURE`."""
    return 2 * erf_inv(2 * jnp.clip(level, SURE, 1 - SURE) - 1) ** 2
