"""Medians of a few rows, and shares of the last few."""

import jax
import jax.numpy as jnp
import numpy as np

from opvi.types import Array, Scalar

NORMAL = 1.4826  # a Gaussian's standard deviation over its median absolute deviation
HALF_LIFE = 7.5  # rows, of the memory of shares


@jax.jit
def median(values: Array, weight: Array) -> Scalar:
    """Return the median of the values with a weight; 0 if there is none."""
    some, order = weight > 0, np.arange(len(weight))
    values = jnp.where(some, values, jnp.inf)
    # Rows are few: to count those below each takes less to compile than to sort.
    below = (values[:, None] > values[None]) | ((values[:, None] == values[None]) & (order[:, None] > order[None]))
    rank, middle = below.sum(1, dtype=values.dtype), (some.sum(dtype=values.dtype) - 1) / 2
    central = some & (jnp.abs(rank - middle) < 0.75)  # one row, or two
    return jnp.where(central, values, 0).sum() / jnp.maximum(central.sum(dtype=values.dtype), 1)


def recent(share: Array, of: Array, weight: Array) -> Array:
    """Return the shares of the last few rows for which conditions hold, including a batch `[B, K]`."""
    rows = weight.sum()
    keep = 0.5 ** (rows / HALF_LIFE)
    return keep * share + (1 - keep) * jnp.where(of, weight[:, None], 0).sum(0) / jnp.maximum(rows, 1e-30)
