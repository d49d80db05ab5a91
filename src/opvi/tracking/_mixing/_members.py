"""Weights of members that differ little, such as networks of one kind: on the simplex, by their joint errors."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._factors import diagonal
from opvi.types import Array, Scalar

USUAL_ROWS = 20.0  # a batch of the usual size; discounts count once for so many rows
MEMORY = 0.99  # of the cross products of the members' errors
RIDGE = 30.0  # pulls the weights together, in units of the best member's mean squared error
STEPS = 60


class Members(NamedTuple):
    """The weights of members, and what they follow from."""

    weights: Array  # [n], on the simplex
    products: Array  # [n, n]: discounted cross products of their errors
    seen: Scalar  # discounted rows behind them


def start(members: int, dtype: Any) -> Members:
    """Return equal weights."""
    even = jnp.full(members, 1 / members, dtype)
    return Members(even, jnp.zeros((members, members), dtype), jnp.zeros((), dtype))


def combine(known: Members, mean: Array, variance: Array) -> tuple[Array, Array]:
    """Return the weighted mean of members `[n, B]`, and its variance: their own, and that between them."""
    together = known.weights @ mean
    return together, known.weights @ variance + known.weights @ (mean - together[None]) ** 2


def learn(known: Members, error: Array, weight: Array) -> Members:
    """Return the weights after errors of the members `[n, B]`, made before learning."""
    rows = weight.sum()
    keep = MEMORY ** (rows / USUAL_ROWS)
    products = keep * known.products + (error * weight[None]) @ error.T
    seen = keep * known.seen + rows
    new = Members(_stack(products, seen), products, seen)
    good = (rows > 0) & jnp.isfinite(products.sum())
    return Members(*(jnp.where(good, a, b) for a, b in zip(new, known, strict=True)))


def rescale(known: Members, ratio: Scalar) -> Members:
    """Return the same knowledge after errors have become `ratio` times as large."""
    return known._replace(products=known.products * ratio**2)


def _stack(products: Array, seen: Scalar) -> Array:
    r"""Return weights on the simplex that nearly minimise $w^\top (E + \text{ridge}) w$, by exponentiated gradients."""
    n = len(products)
    eye = np.eye(n, dtype=products.dtype)
    best = diagonal(products).min() / jnp.maximum(seen, 1e-30)
    E = products + RIDGE * best * eye
    E = E * (-4 / jnp.maximum(jnp.abs(E).max(), 1e-30))

    def descend(_: Any, w: Array) -> Array:
        w = w * jnp.exp(E @ w)  # twice the slopes; what they have in common cancels
        return w / w.sum()

    return jax.lax.fori_loop(0, STEPS, descend, jnp.full(n, 1 / n, products.dtype))
