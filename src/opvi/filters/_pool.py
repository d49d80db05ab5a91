r"""Rows that are kept, with weights, and new ones: which stay, and what they then weigh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.filters._surrogates import RIDGE
from opvi.types import Array, Batch, Data

Weights = Array | tuple[()]  # of the rows kept; () where none are


class Pool(NamedTuple):
    """Kept and new rows, largest weight first."""

    data: Data
    before: Array  # weights in the last round's posterior
    after: Array  # and in this round's


def reweighted(basis: Array, weight: Array, values: Array) -> Array:
    r"""Return weights $w + \Delta \ge 0$ with basis·Δ ≈ values and the least $\sum \Delta^2 / w$; zeros stay."""
    G = (basis * weight[None]) @ basis.T
    ridge = RIDGE * jnp.trace(G) + jnp.finfo(G.dtype).tiny ** 0.5
    multipliers = jnp.linalg.solve(G + ridge * jnp.eye(len(G), dtype=G.dtype), values)
    return jnp.maximum(weight * (1 + basis.T @ multipliers), 0)


def merged(batch: Batch, kept: Data, weight: Weights, gamma: Array) -> Pool:
    """Return one pool of rows, largest weight first; of equal weights, kept rows before new ones."""
    data = new = batch.data
    before, after = jnp.zeros_like(batch.weight), batch.weight
    if not isinstance(weight, tuple):
        # Labels may come as any kind of number; one that is not whole was refused by the likelihood before.
        data = jax.tree.map(lambda a, b: b.astype(a.dtype), kept, data)
        new = data
        data = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), kept, data)
        before = jnp.concatenate([weight, before])
        after = jnp.concatenate([gamma * weight, after])
    order = jnp.argsort(-after, stable=True)
    before, after = before[order], after[order]

    def sort(a: Array, new: Array) -> Array:
        # Places that hold nothing repeat a row of the batch: no log or division then meets an invented value.
        return jnp.where((after > 0).reshape(-1, *[1] * (a.ndim - 1)), a[order], new[:1])

    return Pool(jax.tree.map(sort, data, new), before, after)
