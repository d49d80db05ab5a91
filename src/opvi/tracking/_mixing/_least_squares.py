"""Small least squares under constraints: weights on the simplex, and weights that are not negative."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from opvi._factors import diagonal
from opvi.types import Array

SIMPLEX_SWEEPS = 12  # over all pairs of weights; of two weights one is enough
NONNEGATIVE_SWEEPS = 30


def simplex(E: Array, b: Array) -> Array:
    r"""Return the minimum of $w^\top E w - 2 b^\top w$ on the simplex, `[..., K]`, pair by pair of weights."""
    K = E.shape[-1]
    pairs = list(itertools.combinations(range(K), 2))

    def sweep(_: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        w = [*weights]
        for i, j in pairs:
            slope = sum((E[..., i, k] - E[..., j, k]) * w[k] for k in range(K)) - (b[..., i] - b[..., j])
            bend = E[..., i, i] + E[..., j, j] - 2 * E[..., i, j]
            move = jnp.clip(-slope / jnp.maximum(bend, 1e-12), -w[i], w[j])
            w[i], w[j] = w[i] + move, w[j] - move
        return tuple(w)

    start = tuple(jnp.full(b.shape[:-1], 1 / K, E.dtype) for _ in range(K))
    sweeps = 1 if len(pairs) <= 1 else SIMPLEX_SWEEPS
    return jnp.stack(jax.lax.fori_loop(0, sweeps, sweep, start), -1)


def nonnegative(A: Array, b: Array) -> Array:
    r"""Return the minimum of $\beta^\top A \beta / 2 - b^\top \beta$ over $\beta \ge 0$, coordinate by coordinate."""
    n, eye = len(b), np.eye(len(b), dtype=b.dtype)
    own = diagonal(A)
    others, alone = (A / own[:, None]) * (1 - eye), b / own

    def descend(i: Array, beta: Array) -> Array:
        j = jax.lax.rem(i, jnp.asarray(n, i.dtype)).astype(jnp.uint32)
        row, best = (jax.lax.dynamic_index_in_dim(part, j, keepdims=False) for part in (others, alone))
        return jax.lax.dynamic_update_index_in_dim(beta, jnp.maximum(0, best - (row * beta).sum()), j, 0)

    return jax.lax.fori_loop(0, NONNEGATIVE_SWEEPS * n, descend, jnp.zeros_like(b))
