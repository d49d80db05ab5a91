"""A network's activations, and how its weights and covariances change when the units of X and y do."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.filters._covariance import Blocks
from opvi.targets import MLP, Layer, Passed, backward, forward, jacobian
from opvi.tracking.experts._expert import Units
from opvi.types import Array, Scalar

TANH, RELU, SINE = 0.0, 1.0, 2.0


def checked_widths(hidden: Sequence[int]) -> tuple[int, ...]:
    """Return the widths of hidden layers; refuse any that are not whole numbers. An empty tuple is a linear model."""
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
    passed = _passed(layers, kind, x)
    slopes = backward(layers, passed, jnp.ones_like(passed.outputs))
    return passed.outputs[:, 0], jacobian(passed, slopes)


def output(network: MLP, w: Array, kind: Scalar, x: Array) -> Array:
    """Return the outputs `[B]` of one network at x `[B, F]`."""
    return _passed(network.split(w), kind, x).outputs[:, 0]


def _passed(layers: Sequence[Layer[Array]], kind: Scalar, x: Array) -> Passed:
    return forward(layers, x, lambda z: _activation(z, kind))


def _activation(z: Array, kind: Scalar) -> tuple[Array, Array]:
    """Return the activation of this kind, and its slope; the kind may be traced, so that particles differ in it."""
    bent = jnp.tanh(z)
    # Sine and cosine in one array: XLA then computes each once, and not for every weight of the Jacobian again.
    sine, cosine = jnp.sin(jnp.stack([z, z + math.pi / 2]))
    value = jnp.where(kind == RELU, jnp.maximum(z, 0), jnp.where(kind == SINE, sine, bent))
    slope = jnp.where(kind == RELU, (z > 0).astype(z.dtype), jnp.where(kind == SINE, cosine, 1 - bent**2))
    return value, slope


class Change(NamedTuple):
    """How inputs and outputs in the old units become those in the new: linear in a network's first and last layer."""

    ratio: Array  # [F]: of the new deviation to the old
    shift: Array  # [F]: of the mean, in old deviations
    output_ratio: Scalar  # of the old deviation of y to the new
    output_shift: Scalar


def bounded_change(units: Units, doubt: Array | None) -> Change:
    r"""Return the change of units as it is made to weights.

    The network remains the same function: a weight grows with the deviation of its column. In a column that keeps
    rising, such as a date, weights that have learnt nothing yet would grow without bound. With `doubt` v, a weight
    grows by at most $\max(1, v^{-1/2})$, so that it stays within its prior, and the network remains the same only
    where the column is now.

    Args:
        units: the change.
        doubt: `[F]`: variance of the first layer's weights, as a share of the prior's.
    """
    ratio, shift = units.ratio, units.shift
    if doubt is not None:
        grown = jnp.minimum(ratio, jnp.maximum(1, jax.lax.rsqrt(jnp.maximum(doubt, 1e-30))))
        shift, ratio = shift + (ratio - grown) * units.now, grown
    return Change(ratio, shift, units.output_ratio, units.output_shift)


def change(network: MLP, units: Change, w: Array) -> Array:
    """Apply the linear part of the change to a vector of weights."""
    features, width = network.shapes[0]
    weights, end = w[: features * width].reshape(features, width), (features + 1) * width
    shifted = (weights * units.shift[:, None]).sum(0)
    return (w + _padded(shifted, features * width, len(w) - end)) * _scale(network, units, w.dtype)


def _padded(values: Array, before: int, after: int, apart: int = 0, axis: int = 0) -> Array:
    """Return values with zeros before and after them along an axis, and so many between each two."""
    room = [(0, 0, 0)] * values.ndim
    room[axis] = (before, after, apart)
    return jax.lax.pad(values, jnp.zeros((), values.dtype), room)


def _scale(network: MLP, units: Change, dtype: jnp.dtype) -> Array:
    """Return the factor `[d]` by which the change multiplies each weight."""
    one = jnp.ones((), dtype)
    factors = [Layer(units.ratio[:, None], one), *[Layer(one, one)] * (len(network.shapes) - 1)]
    factors[-1] = Layer(*(part * units.output_ratio for part in factors[-1]))
    return network.join(factors)


def re_express(network: MLP, units: Change, w: Array, begins: Array | None = None) -> Array:
    """Return the weights with which the network is the same function in the new units.

    Args:
        network: the layers.
        units: the old and the new units.
        w: the weights.
        begins: `[F]`: columns that were constant and begin to move. Their weights, not learnt, become 0.
    """
    w = change(network, units, w)
    w = w + jnp.where(np.arange(len(w)) == len(w) - 1, units.output_shift, 0)
    if begins is None:
        return w
    features, width = network.shapes[0]
    stays = jnp.broadcast_to((1 - begins.astype(w.dtype))[:, None], (features, width))
    return w * jnp.append(stays.reshape(-1), np.ones(len(w) - features * width, w.dtype))


def covariances_in(network: MLP, blocks: Blocks, units: Change, matrices: Array) -> Array:
    r"""Return $T C T^\top$, T the change of units, for symmetric matrices `[n, K, D, D]`; blocks stay apart.

    T scales all weights by S, after each hidden bias has gained the shift of the means times its weights: E. With
    $M = E C + \tfrac12 E C E^\top$, as many rows as there are hidden biases,

    $$T C T^\top = S (C + M + M^\top) S.$$
    """
    scale = jnp.append(_scale(network, units, matrices.dtype), 1)[blocks.order]
    # One particle after the other, in place: its matrices stay in the processor's cache, and nothing is copied.
    shifted = jax.lax.fori_loop(0, len(matrices), _shifting(network, blocks, units), matrices)
    return shifted * (scale[:, :, None] * scale[:, None, :])[None]


def _shifting(network: MLP, blocks: Blocks, units: Change) -> Callable[[Array, Array], Array]:
    """Return a function `(i, matrices)` that adds $M + M^\top$ to the matrices of the i-th particle."""
    (features, width), (count, size) = network.shapes[0], blocks.order.shape
    if count == 1:  # the weights, input by input, then the biases
        return _of_inputs(features, width, units.shift)
    if blocks.aligned and len(network.shapes) == 2:  # unit by unit: its weights, its bias, its weight out
        return _of_units(size // network.units[1], network.units[1], units.shift)
    bias, weights = (jnp.asarray(where) for where in _first_layer(network, blocks))

    def general(C: Array) -> Array:
        """Add the sums of rows `[K, D, D]` to those of the biases."""
        padded = jnp.pad(C, ((0, 0), (0, 1), (0, 0)))
        added = jax.vmap(lambda c, w: (c[w] * units.shift[None, :, None]).sum(1))(padded, weights)
        return jax.vmap(lambda c, b, a: c.at[b].add(a, mode="drop"))(C, bias, added)

    def add(i: Array, matrices: Array) -> Array:
        C = general(jax.lax.dynamic_index_in_dim(matrices, i, keepdims=False))
        return jax.lax.dynamic_update_index_in_dim(matrices, general(C.mT).mT, i, 0)

    return add


def _of_inputs(features: int, width: int, shift: Array) -> Callable[[Array, Array], Array]:
    """Return that function for weights input by input, and biases that follow them."""
    first = features * width

    def add(i: Array, matrices: Array) -> Array:
        _, K, D, _ = matrices.shape
        rows = jax.lax.dynamic_slice(matrices, (i, 0, 0, 0), (1, K, first, D)).reshape(K, features, width, D)
        sums = jnp.einsum("f,kfhd->khd", shift, rows)
        both = jnp.einsum("f,kifh->kih", shift, sums[:, :, :first].reshape(K, width, features, width))
        M = (sums + _padded(both / 2, first, D - first - width, 0, 2))[None]
        for more, place in ((M, (i, 0, first, 0)), (M.mT, (i, 0, 0, first))):
            old = jax.lax.dynamic_slice(matrices, place, more.shape)
            matrices = jax.lax.dynamic_update_slice(matrices, old + more, place)
        return matrices

    return add


def _of_units(count: int, unit: int, shift: Array) -> Callable[[Array, Array], Array]:
    """Return it for units that follow each other, each with its weights, its bias, and so many weights in all."""
    first, used = len(shift), count * unit
    shift = jnp.pad(shift, (0, unit - first))

    def add(i: Array, matrices: Array) -> Array:
        _, K, D, _ = matrices.shape
        C = jax.lax.dynamic_slice_in_dim(matrices, i, 1)
        room = first, D - used + unit - first - 1, unit - 1
        # A product for each unit: of all at once, XLA would first copy the rows into another order.
        sums = (jnp.broadcast_to(shift, (K, count, 1, unit)) @ C[0, :, :used].reshape(K, count, unit, D))[:, :, 0]
        both = jnp.einsum("f,kihf->kih", shift, sums[:, :, :used].reshape(K, count, count, unit))
        M = _padded(sums + _padded(both / 2, *room, 2), *room, 1)[None]
        return jax.lax.dynamic_update_slice_in_dim(matrices, C + M + M.mT, i, 0)

    return add


def _first_layer(network: MLP, blocks: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Return where each block has the first layer's biases, `[K, m]`, and their weights, `[K, m, F]`; D if absent."""
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


def widened_covariances(old: Array, fresh: Array, blocks: tuple[Blocks, Blocks], places: np.ndarray) -> Array:
    """Return fresh matrices `[n, K, D, D]` with the old entries where both blocks have them.

    Args:
        old: the matrices of the narrower networks.
        fresh: those of wider ones before any row.
        blocks: how each of the two are cut.
        places: where each of the old parameters goes.
    """
    before, new = np.asarray(old), np.array(fresh)
    whole = np.zeros((blocks[1].dim + 1,) * 2, new.dtype)  # of one network, in the new places
    there = np.append(np.asarray(places), blocks[1].dim)
    known = np.isin(np.arange(blocks[1].dim + 1), places)
    for network in range(len(before)):
        whole[:] = 0
        for order, matrix in zip(blocks[0].order, before[network], strict=True):
            whole[np.ix_(there[order], there[order])] = matrix
        for k, order in enumerate(blocks[1].order):
            kept = known[order]
            new[network, k][np.ix_(kept, kept)] = whole[np.ix_(order[kept], order[kept])]
    return jnp.asarray(new)
