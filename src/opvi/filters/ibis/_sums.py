r"""Sums of log likelihoods over stored rows: values, gradients and curvatures, block by block.

Blocks have one size, whatever the room is, and so a sum has the same bits in every room.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.targets import Target
from opvi.types import Array, Data, Particles, Scalar

BLOCK = 256  # rows at once
IMPOSSIBLE = -1e30  # nats: what a log likelihood that is not finite counts as


class Rows(NamedTuple):
    """Rows with weights."""

    data: Data  # leaves [room, ...]
    weight: Array  # [room]
    filled: Array  # places from this one on are not looked at


class Sample(NamedTuple):
    """Some of the rows, and whether sums run over these alone."""

    picked: Array  # [m]: places
    weight: Array  # [m]
    alone: Array  # False: over all rows


class Quadratic(NamedTuple):
    r"""A function $c + g \cdot (v - a) + (v - a)^T H (v - a) / 2$."""

    at: Array  # [d]: a
    value: Array  # [2]: c, and what rounding left out of it
    gradient: Array  # [d]: g
    hessian: Array  # [d, d]: H

    def __call__(self, v: Array) -> Array:
        """Return the value at a point, without c."""
        return self.change(v - self.at)

    def change(self, off: Array) -> Array:
        """Return how the value changes along a way from a."""
        return self.gradient @ off + off @ (self.hessian @ off) / 2

    def scaled(self, factor: Scalar) -> "Quadratic":
        """Return the function times a number."""
        return Quadratic(self.at, self.value * factor, self.gradient * factor, self.hessian * factor)

    def plus(self, other: "Quadratic") -> "Quadratic":
        """Return the sum with a function around the same point."""
        value = add_precisely(self.value, other.value[0] + other.value[1])
        return Quadratic(self.at, value, self.gradient + other.gradient, self.hessian + other.hessian)

    def moved_to(self, at: Array) -> "Quadratic":
        """Return the same function around another point."""
        off = at - self.at
        value = add_precisely(self.value, self.change(off))
        return Quadratic(at, value, self.gradient + self.hessian @ off, self.hessian)


def no_quadratic(dim: int, dtype: jnp.dtype) -> Quadratic:
    """Return the function that is 0 everywhere."""
    zero = jnp.zeros(dim, dtype)
    return Quadratic(zero, jnp.zeros(2, dtype), zero, jnp.zeros((dim, dim), dtype))


def add_precisely(total: Array, value: Array) -> Array:
    """Return a sum and what rounding left out of it, `[2]`, with a value added: beside many rows, one would vanish."""
    value = value + total[1]
    new = total[0] + value
    part = new - total[0]
    return jnp.stack([new, (total[0] - (new - part)) + (value - part)])


def row_likelihoods(target: Target, v: Array, data: Data) -> Array:
    """Return the log likelihood of each row at one point; one that is not finite is as good as impossible."""
    rows = target.log_likelihood(target.unravel(v), data)
    return jnp.where(jnp.isfinite(rows), rows, IMPOSSIBLE)


def sample_rows(key: jax.Array, rows: Rows, size: int) -> Sample:
    """Return a stratified sample, one row out of each of `size` equal parts; all rows if there are hardly more."""
    n = rows.filled.astype(rows.weight.dtype)
    places = (jnp.arange(size, dtype=n.dtype) + jax.random.uniform(key, (size,), n.dtype)) * (n / size)
    picked = jnp.clip(places.astype(jnp.int32), 0, jnp.maximum(rows.filled - 1, 0))
    return Sample(picked, rows.weight[picked] * (n / size), rows.filled > 2 * size)


def block_of(rows: Rows, sample: Sample, k: Array) -> tuple[Data, Array]:
    """Return the k-th block of the rows, or of the sample."""
    places = k * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    inside = jnp.minimum(places, len(sample.picked) - 1)
    at = jnp.where(sample.alone, sample.picked[inside], jnp.minimum(places, len(rows.weight) - 1))
    weight = jnp.where(sample.alone, sample.weight[inside], rows.weight[at])
    here = jnp.where(sample.alone, places < len(sample.picked), places < rows.filled)
    return jax.tree.map(lambda leaf: leaf[at], rows.data), jnp.where(here, weight, 0)


def blocks_in(rows: Rows, sample: Sample) -> Array:
    """Return the number of blocks."""
    count = jnp.where(sample.alone, len(sample.picked), rows.filled)
    return (count + BLOCK - 1) // BLOCK


def sum_values(target: Target, rows: Rows, x: Particles, reference: Array) -> Array:
    """Return the log likelihood of all rows at points `[n, d]`, beside that at a reference point; 0 for no rows."""
    everything = all_rows(rows)

    def add(k: Array, total: Array) -> Array:
        data, weight = block_of(rows, everything, k)
        beside = row_likelihoods(target, reference, data)
        return total + jax.vmap(lambda v: (row_likelihoods(target, v, data) - beside) @ weight)(x)

    return jax.lax.fori_loop(0, blocks_in(rows, everything), add, jnp.zeros(len(x), x.dtype))


def sum_gradients(target: Target, rows: Rows, sample: Sample, x: Particles, reference: Array) -> tuple[Array, Array]:
    """Return the log likelihood of the rows, or of the sample, at points beside a reference; and its gradients."""

    def add(k: Array, total: tuple[Array, Array]) -> tuple[Array, Array]:
        data, weight = block_of(rows, sample, k)
        beside = row_likelihoods(target, reference, data)

        def weighted(v: Array) -> Array:
            return (row_likelihoods(target, v, data) - beside) @ weight

        values, gradients = jax.vmap(jax.value_and_grad(weighted))(x)
        return total[0] + values, total[1] + gradients

    nothing = jnp.zeros(len(x), x.dtype), jnp.zeros_like(x)
    return jax.lax.fori_loop(0, blocks_in(rows, sample), add, nothing)


def expand(target: Target, rows: Rows, sample: Sample, at: Array) -> Quadratic:
    """Return the second-order expansion of the rows' log likelihood, or the sample's, at a point."""

    def add(k: Array, total: Quadratic) -> Quadratic:
        data, weight = block_of(rows, sample, k)

        def weighted(v: Array) -> Array:
            return row_likelihoods(target, v, data) @ weight

        gradient = jax.grad(weighted)

        def column(direction: Array) -> tuple[Array, Array]:
            return jax.jvp(gradient, (at,), (direction,))

        gradients, hessian = jax.vmap(column)(jnp.eye(len(at), dtype=at.dtype))
        value = jnp.stack([weighted(at), jnp.zeros((), at.dtype)])
        return total.plus(Quadratic(at, value, gradients[0], hessian))

    return jax.lax.fori_loop(0, blocks_in(rows, sample), add, no_quadratic(len(at), at.dtype)._replace(at=at))


def all_rows(rows: Rows) -> Sample:
    """Return a sample that stands for all rows."""
    return Sample(jnp.zeros(1, jnp.int32), jnp.zeros(1, rows.weight.dtype), jnp.zeros((), bool))


LogDensity = Callable[[Array], Array]
