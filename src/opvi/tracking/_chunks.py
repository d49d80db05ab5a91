r"""Batches `(X, y)` cut into pieces that are learnt at once."""

import jax.numpy as jnp

from opvi._steps import pieces
from opvi.types import LARGEST_VALUE, Array, Batch

CHUNK = 32  # rows


def cut(features: int, batch: Batch, dtype: jnp.dtype) -> tuple[tuple[Array, ...], Array, Array]:
    """Return the batch in chunks, its weights, and whether it is finite; a batch that is not becomes empty."""
    x, y = _checked(features, batch)
    x, y = x.astype(dtype), y.astype(dtype)
    finite = (jnp.abs(x) <= LARGEST_VALUE).all() & (jnp.abs(y) <= LARGEST_VALUE).all()
    weight = jnp.where(finite, batch.weight, 0)
    x, y = jnp.where(finite, x, 0), jnp.where(finite, y, 0)
    (xs, ys), weights = pieces((x, y), weight, -(-len(y) // -(-len(y) // CHUNK)))
    return (xs, ys, weights), weight, finite


def _checked(features: int, batch: Batch) -> tuple[Array, Array]:
    """Return X and y; refuse wrong shapes."""
    rows = len(batch.weight)
    try:
        x, y = batch.data
    except (TypeError, ValueError):
        raise ValueError("a regressor learns from batches `(X, y)`.") from None
    if x.shape != (rows, features) or y.shape != (rows,):
        raise ValueError(
            f"the batch holds X of shape {x.shape} and y of shape {y.shape}, but this regressor takes "
            f"({rows}, {features}) and ({rows},)."
        )
    return x, y
