r"""The fully connected network: starting weights, priors, and one pass forward and back, layer by layer."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from opvi.types import Array, Key

Activation = Callable[[Array], Array]
Bent = Callable[[Array], tuple[Array, Array]]  # an activation and its slope


Part = TypeVar("Part")


class Layer(NamedTuple, Generic[Part]):
    """One affine map, or a number for each of its two parts."""

    weights: Part  # [inputs, outputs]
    bias: Part  # [outputs]


Layers = Sequence[Layer[Array]]


class Passed(NamedTuple):
    """One particle's activations for a batch at each layer, first layer first."""

    inputs: tuple[Array, ...]  # [B, inputs] of each layer
    sums: tuple[Array, ...]  # [B, outputs] of each layer, before the activation
    bends: tuple[Array, ...]  # [B, outputs] of each hidden layer: the activation's slope

    @property
    def outputs(self) -> Array:
        """The network's outputs, `[B, C]`."""
        return self.sums[-1]


def activation_and_slope(activation: Activation) -> Bent:
    """Return the function that gives an activation's value and slope."""
    return lambda z: jax.jvp(activation, (z,), (jnp.ones_like(z),))


def forward(layers: Layers, x: Array, activate: Bent) -> Passed:
    """Pass x `[B, F]` through the layers of one particle; `activate(z)` returns the activation and its slope.

    Inputs that differ from unit to unit are `[B, F, outputs of the first layer]`.
    """
    inputs: list[Array] = [x]
    sums: list[Array] = []
    bends: list[Array] = []
    for index, layer in enumerate(layers):
        if index:
            value, bend = activate(sums[-1])
            inputs.append(value)
            bends.append(bend)
        sums.append(_affine(layer, inputs[-1]))
    return Passed(tuple(inputs), tuple(sums), tuple(bends))


def backward(layers: Layers, passed: Passed, slope: Array) -> tuple[Array, ...]:
    """Return the gradient at every layer's outputs, `[B, o]`, first layer first, from that at the last, `[B, C]`."""
    slopes = [slope]
    for layer, bend in zip(reversed(layers[1:]), reversed(passed.bends), strict=True):
        slopes.append((slopes[-1] @ layer.weights.T) * bend)
    return tuple(reversed(slopes))


def jacobian(passed: Passed, slopes: Sequence[Array]) -> Array:
    """Return each row's gradient in all parameters, `[B, d]`, from the gradients at the layers' outputs.

    Parameters are ordered as in `MLP.join`. For a network with one output and `slopes` propagated from 1 this is the
    Jacobian.
    """
    parts = []
    for a, slope in zip(passed.inputs, slopes, strict=True):
        parts += [((a[:, :, None] if a.ndim == 2 else a) * slope[:, None, :]).reshape(len(a), -1), slope]
    return jnp.concatenate(parts, 1)


def _affine(layer: Layer[Array], x: Array) -> Array:
    sums = x @ layer.weights if x.ndim == 2 else (x * layer.weights[None]).sum(1)
    return sums + layer.bias[None, :]


@dataclass(frozen=True)
class MLP:
    r"""A fully connected network: $N(0, s^2 / (\text{inputs} + 1))$ weights to start with, and the same as their prior.

    Its parameters are a tuple of layers, or a vector that holds them one after the other: the weights, input by
    input, then the bias.
    """

    sizes: tuple[int, ...]  # features, hidden layers, outputs
    activation: Activation = jax.nn.relu  # between layers
    weight_spread: float = 1.0  # s
    bias_spread: float = 0.0  # standard deviation of the hidden layers' starting biases; the last is 0
    output_spread: float | None = None  # s of the last layer, where it differs
    prior_variance: float | None = None  # of all parameters, where it is not that of the starting weights
    wider: tuple[float, float] = (1.0, 1.0)  # prior variances of hidden layers and last weights, over the starting ones

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each layer."""
        return tuple(itertools.pairwise(self.sizes))

    @property
    def dim(self) -> int:
        """The number of parameters."""
        return sum((fan_in + 1) * fan_out for fan_in, fan_out in self.shapes)

    @property
    def spreads(self) -> tuple[Layer[float], ...]:
        """Standard deviations of each layer's starting weights and biases."""
        last = self.weight_spread if self.output_spread is None else self.output_spread
        of_layers = [(self.weight_spread, self.bias_spread)] * (len(self.sizes) - 2) + [(last, 0.0)]
        return tuple(
            Layer(spread / math.sqrt(fan_in + 1), bias)
            for (fan_in, _), (spread, bias) in zip(self.shapes, of_layers, strict=True)
        )

    @property
    def prior_variances(self) -> tuple[Layer[float], ...]:
        """Prior variances of each layer's weights and biases."""
        if self.prior_variance is not None:
            return (Layer(self.prior_variance, self.prior_variance),) * len(self.shapes)
        (hidden, last), variances = self.wider, self.start_variances
        return (*(Layer(hidden * v, hidden * v) for v in variances[:-1]), Layer(last * variances[-1], 1.0))

    @property
    def start_variances(self) -> list[float]:
        """Variances of each layer's starting weights, or of all parameters where one prior variance is given."""
        if self.prior_variance is not None:
            return [self.prior_variance] * len(self.shapes)
        return [spread.weights**2 for spread in self.spreads]

    def init(self, key: Key) -> tuple[Layer[Array], ...]:
        """Draw the starting weights of one network."""
        # All at once: every further draw is a program to compile, or a longer one.
        drawn = self.split(jax.random.normal(key, (self.dim,)))
        return tuple(
            Layer(spread.weights * layer.weights, spread.bias * layer.bias)
            for layer, spread in zip(drawn, self.spreads, strict=True)
        )

    def apply(self, layers: Layers, x: Array) -> Array:
        """Return the outputs `[B, C]` at x `[B, F]`."""
        features = self.sizes[0]
        if x.ndim != 2 or x.shape[1] != features:
            raise ValueError(f"X has shape {x.shape}, but this model takes {features} features: shape (B, {features}).")
        for index, layer in enumerate(layers):
            x = _affine(layer, self.activation(x) if index else x)
        return x

    def split(self, vector: Array) -> tuple[Layer[Array], ...]:
        """Return the layers that a vector `[d]` holds."""
        sizes = [size for fan_in, fan_out in self.shapes for size in (fan_in * fan_out, fan_out)]
        parts = jnp.split(vector, np.cumsum(sizes)[:-1].tolist())
        pairs = zip(parts[::2], parts[1::2], self.shapes, strict=True)
        return tuple(Layer(weights.reshape(shape), bias) for weights, bias, shape in pairs)

    def join(self, layers: Sequence[Layer[Array] | Layer[float]]) -> Array:
        """Return the layers as a vector `[d]`; a number stands for all parameters of its part."""
        parts = []
        for layer, shape in zip(layers, self.shapes, strict=True):
            parts += [jnp.broadcast_to(layer.weights, shape).reshape(-1), jnp.broadcast_to(layer.bias, shape[1:])]
        return jnp.concatenate(parts)

    @property
    def units(self) -> tuple[np.ndarray, int]:
        """Return the indices of a vector, those of one hidden unit side by side, and how many belong to a unit.

        With one hidden layer a unit has its weights in, its bias and its weights out; the last biases belong to none.
        With more, each unit has its weights in and its bias.
        """
        places, ins, outs = np.arange(self.dim), [], []
        for fan_in, fan_out in self.shapes:
            weights, places = np.split(places, [fan_in * fan_out])
            bias, places = np.split(places, [fan_out])
            ins.append(np.concatenate([weights.reshape(fan_in, fan_out).T, bias[:, None]], 1))
            outs.append((weights.reshape(fan_in, fan_out), bias))
        if len(ins) == 1:
            return np.arange(self.dim), 1
        if len(ins) == 2:
            unit = np.concatenate([ins[0], outs[1][0]], 1)
            return np.concatenate([unit.ravel(), outs[1][1]]), unit.shape[1]
        return np.concatenate([layer.ravel() for layer in ins]), ins[0].shape[1]
