"""Which parameters share a covariance matrix: all of them, or those of a block, where memory is short."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from opvi.types import Array


class Blocks(NamedTuple):
    """A partition of a vector's places."""

    order: np.ndarray  # [K, D]: places in the vector; d where a block is padded
    dim: int

    def gather(self, vectors: Array) -> Array:
        """Vectors `[..., d]` as blocks `[..., K, D]`, padding 0."""
        if len(self.order) == 1:
            return vectors[..., None, :]
        padded = jnp.concatenate([vectors, jnp.zeros((*vectors.shape[:-1], 1), vectors.dtype)], -1)
        return padded[..., self.order]

    def scatter(self, blocks: Array) -> Array:
        """Blocks `[..., K, D]` as vectors `[..., d]`."""
        if len(self.order) == 1:
            return blocks[..., 0, :]
        empty = jnp.zeros((*blocks.shape[:-2], self.dim + 1), blocks.dtype)
        return empty.at[..., self.order].set(blocks)[..., :-1]

    @property
    def numbers(self) -> int:
        """In the matrices of one particle."""
        return self.order.size * self.order.shape[1]


def within(places: np.ndarray, unit: int, largest: float) -> Blocks:
    """The fewest blocks whose matrices together hold at most `largest` numbers.

    Args:
        places: the vector's places, related ones side by side.
        unit: so many of them belong together (a hidden unit's weights); blocks hold whole units where they can.
        largest: numbers that the matrices of one particle may hold.
    """
    d = len(places)
    if d * d <= largest:
        return Blocks(np.arange(d)[None], d)
    size = max(1, int(largest // d))
    if size > unit:
        size = (size - 1) // unit * unit + 1  # whole units, and room for what belongs to none
        size = max(size, unit)
    order = np.full((-(-d // size), size), d)
    order.ravel()[:d] = places
    return Blocks(order, d)
