r"""Rows that are kept, with weights, and new ones: which stay, and what they then weigh."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.filters._surrogates import RIDGE
from opvi.types import Array, Batch, Data, Scalar, Tree

TOGETHER = 64  # rows whose likelihoods are evaluated at a time, at most

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


def weighted_sum(
    of_rows: Callable[[Array, Data], Array], rows: Data, weight: Array, change: Array | None = None
) -> Callable[..., Array]:
    r"""Return $(v, \beta) \mapsto \sum_r (w_r + \beta c_r)\, \ell_r(v)$; rows after the last that counts cost nothing.

    Args:
        of_rows: $\ell_r(v)$ of some rows, `[rows]`.
        rows: what is stored.
        weight: w, at least 0.
        change: c, where there is a beta.
    """
    several = -(-len(weight) // TOGETHER)
    size = -(-len(weight) // several)
    lacking = several * size - len(weight)

    def parted(a: Array) -> Array:
        if lacking:  # a row that is known to be one: no log or division then meets an invented value
            a = jnp.concatenate([a, jnp.broadcast_to(a[:1], (lacking, *a.shape[1:]))])
        return a.reshape(several, size, *a.shape[1:])

    counts = jnp.ones(size * several, bool).at[len(weight) :].set(False).reshape(several, size)
    parts, weights = jax.tree.map(parted, rows), jnp.where(counts, parted(weight), 0)
    changes = jnp.zeros_like(weights) if change is None else jnp.where(counts, parted(change), 0)
    used = jnp.where(((weights != 0) | (changes != 0)).any(1), jnp.arange(1, several + 1), 0).max()

    def part(i: Array, v: Array, *beta: Scalar) -> Array:
        pick = partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
        some, w, c = jax.tree.map(pick, (parts, weights, changes))
        found = jnp.where((w != 0) | (c != 0), of_rows(v, some), 0)
        return found @ (w + beta[0] * c if beta else w)

    def summed(of_part: Callable[[Array], Tree], zero: Tree) -> Tree:
        return jax.lax.fori_loop(0, used, lambda i, found: jax.tree.map(jnp.add, found, of_part(i)), zero)

    @jax.custom_jvp
    def total(*at: Array) -> Array:
        return summed(lambda i: part(i, *at), jnp.zeros((), at[0].dtype))

    def total_and_change(at: tuple[Array, ...], d: tuple[Array, ...]) -> tuple[Array, Array]:
        """Return the value and its change: gradients are summed, as a loop of unknown length has no transpose."""
        both = jax.value_and_grad(part, tuple(range(1, len(at) + 1)))
        value, gradient = summed(lambda i: both(i, *at), (jnp.zeros((), at[0].dtype), jax.tree.map(jnp.zeros_like, at)))
        return value, sum((a * b).sum() for a, b in zip(gradient, d, strict=True))

    total.defjvp(total_and_change)
    return total
