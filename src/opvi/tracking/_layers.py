"""A network's activations, and what becomes of its weights and covariances when the units of X and y change."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.filters._blocks import Blocks
from opvi.targets import MLP, Layer, backward, forward, jacobian
from opvi.tracking._scaling import Scale, divisor
from opvi.types import Array, Scalar

TANH, RELU, SINE = 0.0, 1.0, 2.0


def checked_widths(hidden: Sequence[int]) -> tuple[int, ...]:
    """Return the widths of hidden layers, refused unless they are whole numbers of units; none: a linear model."""
    widths = tuple(hidden) if isinstance(hidden, Sequence) and not isinstance(hidden, str) else (0,)
    if not all(isinstance(width, int) and width > 0 for width in widths):
        raise ValueError(
            f"`hidden` is {hidden!r}, but must be the width of each hidden layer, e.g. `hidden=(50,)`, or `()` for a "
            "linear model."
        )
    return widths


def outputs(network: MLP, w: Array, kind: Scalar, x: Array) -> tuple[Array, Array]:
    """Return the outputs `[B]` of one network at x `[B, F]`, and their Jacobian `[B, d]`."""
    layers = network.split(w)
    passed = forward(layers, x, lambda z: _activation(z, kind))
    slopes = backward(layers, passed, jnp.ones_like(passed.outputs))
    return passed.outputs[:, 0], jacobian(passed, slopes)


def _activation(z: Array, kind: Scalar) -> tuple[Array, Array]:
    """Return the activation of this kind, and its slope; the kind may be traced, so that particles differ in it."""
    bent = jnp.tanh(z)
    value = jnp.where(kind == RELU, jnp.maximum(z, 0), jnp.where(kind == SINE, jnp.sin(z), bent))
    slope = jnp.where(kind == RELU, (z > 0).astype(z.dtype), jnp.where(kind == SINE, jnp.cos(z), 1 - bent**2))
    return value, slope


# --- a change of units --------------------------------------------------------------------------


class Units(NamedTuple):
    """How inputs and outputs in the old units become those in the new: linear in a network's first and last layer."""

    ratio: Array  # [F]: of the new deviation to the old
    shift: Array  # [F]: of the mean, in old deviations
    output_ratio: Scalar  # of the old deviation of y to the new
    output_shift: Scalar


def between(old: Scale, new: Scale) -> Units:
    """Return the change from one scale of (X, y) to another; columns without a deviation stay as they are."""
    known = (old.sd > 0) & (new.sd > 0)
    ratio = jnp.where(known, new.sd / divisor(old), 1)
    shift = jnp.where(old.sd > 0, (new.mean - old.mean) / divisor(old), 0)
    back = jnp.where(known[-1], old.sd[-1] / divisor(new)[-1], 1)
    return Units(ratio[:-1], shift[:-1], back, (old.mean - new.mean)[-1] / divisor(new)[-1])


def change(network: MLP, units: Units, w: Array) -> Array:
    """Return the linear part of the change, of a vector of weights."""
    first, *rest = network.split(w)
    layers = [Layer(first.weights * units.ratio[:, None], first.bias + units.shift @ first.weights), *rest]
    layers[-1] = Layer(*(part * units.output_ratio for part in layers[-1]))
    return network.join(layers)


def re_express(network: MLP, units: Units, w: Array) -> Array:
    """Return the weights with which the network is the same function in the new units."""
    return change(network, units, w).at[-1].add(units.output_shift)


def covariances_in(network: MLP, blocks: Blocks, units: Units, matrices: Array) -> Array:
    r"""Return $T C T^\top$, T the change of units, for matrices `[n, K, D, D]`; what is between blocks stays 0."""
    rows = _whole_rows if len(blocks.order) == 1 else _block_rows
    return rows(network, blocks, units, rows(network, blocks, units, matrices).mT)


def _whole_rows(network: MLP, blocks: Blocks, units: Units, matrices: Array) -> Array:
    return jax.vmap(jax.vmap(jax.vmap(lambda v: change(network, units, v))))(matrices)


def _block_rows(network: MLP, blocks: Blocks, units: Units, matrices: Array) -> Array:
    """Return every row after T, block by block: biases of the first layer get their share of the shift, all a scale."""
    unmoved = units._replace(shift=jnp.zeros_like(units.shift))
    scale = jnp.append(change(network, unmoved, jnp.ones(network.dim, matrices.dtype)), 1)[blocks.order]

    def one(matrix: Array, scale: Array, bias: Array, weights: Array) -> Array:
        padded = jnp.pad(matrix, ((0, 0), (0, 1)))
        added = jnp.einsum("rmf,f->rm", padded[:, weights], units.shift)
        return matrix.at[:, bias].add(added, mode="drop") * scale[None]

    places = [jnp.asarray(where) for where in _first_layer(network, blocks)]
    return jax.vmap(jax.vmap(one), (0, None, None, None))(matrices, scale, *places)


def _first_layer(network: MLP, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Return where the first layer's biases are in each block `[K, m]`, and their weights `[K, m, F]`; D: not there."""
    (count, size), (features, width) = blocks.order.shape, network.shapes[0]
    weights, biases = np.split(np.arange((features + 1) * width), [features * width])
    weights = weights.reshape(features, width).T
    inside = blocks.order < network.dim
    places = np.zeros((2, network.dim), int)  # of each parameter: its block, and where in it
    places[:, blocks.order[inside]] = np.nonzero(inside)
    block, at = places
    mine = [np.flatnonzero(block[biases] == k) for k in range(count)]
    bias_at = np.full((count, max(map(len, mine))), size)
    weights_at = np.full((*bias_at.shape, features), size)
    for k, units in enumerate(mine):
        bias_at[k, : len(units)] = at[biases[units]]
        weights_at[k, : len(units)] = np.where(block[weights[units]] == k, at[weights[units]], size)
    return bias_at, weights_at
