r"""A network over flat vectors, for trackers: outputs, Jacobian, priors, blocks, and a change of units."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.tracking._scaling import Scale, divisor
from opvi.types import Array, Key, Scalar


def checked_widths(hidden: Any) -> tuple[int, ...]:
    """Hidden layers as the user gave them, refused unless they are whole numbers of units; none: a linear model."""
    widths = tuple(hidden) if isinstance(hidden, Sequence) and not isinstance(hidden, str) else (0,)
    if not all(isinstance(width, int) and width > 0 for width in widths):
        raise ValueError(
            f"`hidden` is {hidden!r}, but must be the width of each hidden layer, e.g. `hidden=(50,)`, or `()` for a "
            "linear model."
        )
    return widths


class Network(NamedTuple):
    """Fully connected, one output. A vector holds each layer as a matrix `[outputs, inputs + 1]`, biases last."""

    sizes: tuple[int, ...]  # features, hidden layers, 1

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the layers' matrices."""
        return [(fan_out, fan_in + 1) for fan_in, fan_out in itertools.pairwise(self.sizes)]

    @property
    def dim(self) -> int:
        """Numbers in a vector."""
        return sum(math.prod(shape) for shape in self.shapes)

    def split(self, w: Array) -> list[Array]:
        """A vector as its layers."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(jnp.split(w, ends), self.shapes, strict=True)]

    def join(self, layers: Sequence[Array]) -> Array:
        """The layers as a vector."""
        return jnp.concatenate([layer.reshape(-1) for layer in layers])

    def draw(self, key: Key, dtype: Any) -> Array:
        """Starting weights N(0, 1/(inputs + 1)); biases N(0, ¼) but for the last, which is 0."""
        layers = []
        for index, shape in enumerate(self.shapes):
            noise = jax.random.normal(jax.random.fold_in(key, index), shape, dtype)
            bias = 0.5 if index < len(self.shapes) - 1 else 0.0
            layers.append(jnp.concatenate([noise[:, :-1] / math.sqrt(shape[1]), bias * noise[:, -1:]], 1))
        return self.join(layers)

    def prior_variance(self, bias: Scalar) -> Array:
        """1/(inputs + 1), for hidden biases `bias` times that, and 1 for the last bias."""
        layers = []
        for index, shape in enumerate(self.shapes):
            last = bias / shape[1] if index < len(self.shapes) - 1 else jnp.ones_like(bias)
            weights = jnp.full((shape[0], shape[1] - 1), 1 / shape[1], bias.dtype)
            layers.append(jnp.concatenate([weights, jnp.broadcast_to(last, (shape[0], 1))], 1))
        return self.join(layers)

    @property
    def units(self) -> tuple[np.ndarray, int]:
        """Places in a vector with those of one hidden unit side by side, and how many a unit has."""
        if len(self.sizes) != 3:
            return np.arange(self.dim), self.sizes[0] + 1
        first, last = np.split(np.arange(self.dim), [math.prod(self.shapes[0])])
        units = np.concatenate([first.reshape(self.shapes[0]), last[:-1, None]], 1)
        return np.append(units.ravel(), last[-1]), units.shape[1]

    def outputs(self, w: Array, kind: Scalar, x: Array) -> tuple[Array, Array]:
        """Outputs `[B]` at x `[B, F]`, and their Jacobian `[B, d]`."""
        inputs, bends = [], []
        for index, layer in enumerate(self.split(w)):
            if index:
                x, bend = _activation(x, kind)
                bends.append(bend)
            inputs.append(jnp.concatenate([x, jnp.ones((len(x), 1), x.dtype)], 1))
            x = inputs[-1] @ layer.T
        slope = jnp.ones_like(x)  # of the output in this layer's outputs
        parts = []
        for layer, a in zip(reversed(self.split(w)), reversed(inputs), strict=True):
            parts.append((slope[:, :, None] * a[:, None, :]).reshape(len(x), -1))
            if bends:
                slope = (slope @ layer[:, :-1]) * bends.pop()
        return x[:, 0], jnp.concatenate(parts[::-1], 1)


TANH, RELU, SINE = 0.0, 1.0, 2.0


def _activation(z: Array, kind: Scalar) -> tuple[Array, Array]:
    """The activation of this kind, and its slope."""
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
    """The change from one scale of (X, y) to another; columns without a deviation stay as they are."""
    known = (old.sd > 0) & (new.sd > 0)
    ratio = jnp.where(known, new.sd / divisor(old), 1)
    shift = jnp.where(old.sd > 0, (new.mean - old.mean) / divisor(old), 0)
    back = jnp.where(known[-1], old.sd[-1] / divisor(new)[-1], 1)
    return Units(ratio[:-1], shift[:-1], back, (old.mean - new.mean)[-1] / divisor(new)[-1])


def change(network: Network, units: Units, w: Array) -> Array:
    """The linear part of the change, on a vector of weights."""
    first, *rest = network.split(w)
    bias = first[:, -1] + first[:, :-1] @ units.shift
    first = jnp.concatenate([first[:, :-1] * units.ratio[None], bias[:, None]], 1)
    layers = [first, *rest]
    layers[-1] = layers[-1] * units.output_ratio
    return network.join(layers)


def re_express(network: Network, units: Units, w: Array) -> Array:
    """The weights with which the network is the same function in the new units."""
    return change(network, units, w).at[-1].add(units.output_shift)
