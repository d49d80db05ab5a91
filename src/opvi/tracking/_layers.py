"""A network's activations, and how its weights and covariances change when the units of X and y do."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.filters._covariance import Blocks
from opvi.targets import MLP, Layer, Passed, backward, forward, jacobian
from opvi.tracking._scaling import Scale, divisor, of_inputs, readable
from opvi.tracking._seats import Seen
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


def outputs(network: MLP, w: Array, kind: Scalar, x: Array | Seen) -> tuple[Array, Array]:
    """Return the outputs `[B]` of one network at x `[B, F]`, or as units see it, and their Jacobian `[B, d]`."""
    layers = network.split(w)
    passed = _passed(layers, kind, x)
    slopes = backward(layers, passed, jnp.ones_like(passed.outputs))
    if isinstance(x, Seen):
        slopes = (x.merged(slopes[0]), *slopes[1:])
    return passed.outputs[:, 0], jacobian(passed, slopes)


def output(network: MLP, w: Array, kind: Scalar, x: Array | Seen) -> Array:
    """Return the outputs `[B]` of one network at x `[B, F]`, or as units see it."""
    return _passed(network.split(w), kind, x).outputs[:, 0]


def _passed(layers: Sequence[Layer[Array]], kind: Scalar, x: Array | Seen) -> Passed:
    """Pass x through the layers; units that have seats together act as one, of one hidden layer."""
    if isinstance(x, Seen):
        return forward(layers, x.z, lambda z: _activation(x.merged(z), kind))
    return forward(layers, x, lambda z: _activation(z, kind))


def _activation(z: Array, kind: Scalar) -> tuple[Array, Array]:
    """Return the activation of this kind, and its slope; the kind may be traced, so that particles differ in it."""
    bent = jnp.tanh(z)
    # Sine and cosine in one array: XLA then computes each once, and not for every weight of the Jacobian again.
    sine, cosine = jnp.sin(jnp.stack([z, z + math.pi / 2]))
    value = jnp.where(kind == RELU, jnp.maximum(z, 0), jnp.where(kind == SINE, sine, bent))
    slope = jnp.where(kind == RELU, (z > 0).astype(z.dtype), jnp.where(kind == SINE, cosine, 1 - bent**2))
    return value, slope


class Units(NamedTuple):
    """How inputs and outputs in the old units become those in the new: linear in a network's first and last layer."""

    ratio: Array  # [F], or [S, units] by seat: of the new deviation to the old
    shift: Array  # the same: of the mean, in old deviations
    output_ratio: Scalar  # of the old deviation of y to the new
    output_shift: Scalar


def between(old: Scale, new: Scale, doubt: Array | None = None, now: Array | None = None) -> Units:
    r"""Return the change from one scale of (X, y) to another; columns without a deviation stay as they are.

    The network remains the same function: a weight grows with the deviation of its column. In a column that keeps
    rising, such as a date, weights that have learnt nothing yet would grow without bound. With `doubt` v, a weight
    grows by at most $\max(1, v^{-1/2})$, so that it stays within its prior, and the network remains the same only
    where the column is `now`.

    Args:
        old: the scale before.
        new: the scale after.
        doubt: `[F]`: variance of the first layer's weights, as a share of the prior's.
        now: `[F]`: current values of the columns, in their own units.
    """
    known = (old.sd > 0) & (new.sd > 0)
    ratio = jnp.where(known, new.sd / divisor(old), 1)
    shift = jnp.where(old.sd > 0, (new.mean - old.mean) / divisor(old), 0)
    back = jnp.where(known[-1], old.sd[-1] / divisor(new)[-1], 1)
    output_shift = (old.mean - new.mean)[-1] / divisor(new)[-1]
    ratio, shift = ratio[:-1], shift[:-1]
    if doubt is not None and now is not None:
        grown = jnp.minimum(ratio, jnp.maximum(1, jax.lax.rsqrt(jnp.maximum(doubt, 1e-30))))
        away = readable(of_inputs(new), now[None])[0]  # as the network sees it: within bounds
        shift, ratio = shift + jnp.where(known[:-1], (ratio - grown) * away, 0), grown
    return Units(ratio, shift, back, output_shift)


def change(network: MLP, units: Units, w: Array) -> Array:
    """Apply the linear part of the change to a vector of weights."""
    features, width = network.shapes[0]
    weights, end = w[: features * width].reshape(features, width), (features + 1) * width
    shifted = (weights * _by_unit(units.shift)).sum(0)
    return (w + _padded(shifted, features * width, len(w) - end)) * _scale(network, units, w.dtype)


def _padded(values: Array, before: int, after: int, apart: int = 0, axis: int = 0) -> Array:
    """Return values with zeros before and after them along an axis, and so many between each two."""
    room = [(0, 0, 0)] * values.ndim
    room[axis] = (before, after, apart)
    return jax.lax.pad(values, jnp.zeros((), values.dtype), room)


def _scale(network: MLP, units: Units, dtype: jnp.dtype) -> Array:
    """Return the factor `[d]` by which the change multiplies each weight."""
    one = jnp.ones((), dtype)
    factors = [Layer(_by_unit(units.ratio), one), *[Layer(one, one)] * (len(network.shapes) - 1)]
    factors[-1] = Layer(*(part * units.output_ratio for part in factors[-1]))
    return network.join(factors)


def _by_unit(values: Array) -> Array:
    """Return numbers for each column as `[F, 1]`; those for each seat of each unit as they are."""
    return values if values.ndim == 2 else values[:, None]


def re_express(network: MLP, units: Units, w: Array, begins: Array | None = None) -> Array:
    """Return the weights with which the network is the same function in the new units.

    Args:
        network: the layers.
        units: the old and the new units.
        w: the weights.
        begins: `[F]`, or by seat: columns that were constant and begin to move. Their weights, not learnt, become 0.
    """
    w = change(network, units, w)
    w = w + jnp.where(np.arange(len(w)) == len(w) - 1, units.output_shift, 0)
    if begins is None:
        return w
    features, width = network.shapes[0]
    stays = jnp.broadcast_to(_by_unit(1 - begins.astype(w.dtype)), (features, width))
    return w * jnp.append(stays.reshape(-1), np.ones(len(w) - features * width, w.dtype))


def covariances_in(network: MLP, blocks: Blocks, units: Units, matrices: Array) -> Array:
    r"""Return $T C T^\top$, T the change of units, for matrices `[n, K, D, D]`; entries between blocks stay 0."""
    scale = jnp.append(_scale(network, units, matrices.dtype), 1)[blocks.order]
    both = scale[:, :, None] * scale[:, None, :]
    shifted = _shifted_in_rows(network, blocks, units)

    def one(i: Array, all_: Array) -> Array:
        C = shifted(shifted(jax.lax.dynamic_index_in_dim(all_, i, keepdims=False), 1), 2)
        return jax.lax.dynamic_update_index_in_dim(all_, C * both, i, 0)

    # One particle after the other, in place: its matrices stay in the processor's cache, and nothing is copied.
    return jax.lax.fori_loop(0, len(matrices), one, matrices)


def _shifted_in_rows(network: MLP, blocks: Blocks, units: Units) -> Callable[[Array, int], Array]:
    """Return a function that adds to each hidden bias the shift of the means times its weights, along an axis."""
    (features, width), (count, size) = network.shapes[0], blocks.order.shape
    if count == 1:  # the weights, input by input, then the biases
        parts, where, subscripts = (features, width), (features * width, 0), "f,kfh...->kh..."
        return _adder(parts, where, subscripts.replace("f,", "fh," if units.shift.ndim == 2 else "f,"), units.shift)
    unit = network.units[1]
    if blocks.aligned and len(network.shapes) == 2:  # unit by unit: its weights, its bias, its weight out
        shift = _padded(units.shift, 0, unit - features)
        return _adder((size // unit, unit), (features, unit - 1), "f,khf...->kh...", shift)
    bias, weights = (jnp.asarray(where) for where in _first_layer(network, blocks))

    def general(C: Array, axis: int) -> Array:
        C = jnp.moveaxis(C, axis, 1)
        padded = jnp.pad(C, ((0, 0), (0, 1), (0, 0)))
        added = jax.vmap(lambda c, w: (c[w] * units.shift[None, :, None]).sum(1))(padded, weights)
        C = jax.vmap(lambda c, b, a: c.at[b].add(a, mode="drop"))(C, bias, added)
        return jnp.moveaxis(C, 1, axis)

    return general


def _adder(
    parts: tuple[int, int], where: tuple[int, int], subscripts: str, shift: Array
) -> Callable[[Array, int], Array]:
    """Return a function that adds the shift's product with rows, or columns, from a place on, so many apart."""
    used = parts[0] * parts[1]

    def add(C: Array, axis: int) -> Array:
        if axis == 1:
            rows = C[:, :used].reshape(len(C), *parts, C.shape[2])
            more = jnp.einsum(subscripts, shift, rows)
        else:
            columns = C[:, :, :used].reshape(len(C), C.shape[1], *parts)
            more = jnp.einsum(subscripts.replace("k", "ki").replace("...", ""), shift, columns)
        (before, apart), count = where, more.shape[axis]
        return C + _padded(more, before, C.shape[axis] - before - count - (count - 1) * apart, apart, axis)

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
