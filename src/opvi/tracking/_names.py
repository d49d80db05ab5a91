"""Particles by the names of their parameters."""

import jax
import numpy as np

from opvi.targets import MLP
from opvi.tracking._classifier import ClassifierState
from opvi.tracking._inside import find
from opvi.tracking._wrappers._units import UnitsState
from opvi.types import Array, State

Named = dict[str, np.ndarray]


def named_parameters(state: State, hidden: tuple[int, ...]) -> Named:
    """Return the parameters of a regressor's or classifier's particles, `[particles, …]`; layers count from 1.

    Weights are `[particles, inputs, outputs]`, biases `[particles, outputs]`, for standardised inputs.
    """
    while hasattr(state, "inner"):
        state = state.inner
    if isinstance(state, ClassifierState):
        return _of_classifier(state)
    units = find(state, UnitsState)
    assert units is not None
    return _layers(state.particles, (len(units.odd), *hidden, 1))


def _layers(particles: Array, sizes: tuple[int, ...], group: str = "") -> Named:
    out = {}
    for index, layer in enumerate(jax.vmap(MLP(sizes).split)(particles), 1):
        out[f"{group}weights_{index}"], out[f"{group}bias_{index}"] = np.asarray(layer.weights), np.asarray(layer.bias)
    return out


def _of_classifier(state: ClassifierState) -> Named:
    features = len(state.moments.mean)
    out: Named = {}
    groups = ("relu_long", "tanh_long", "relu_short", "tanh_short") if len(state.networks) == 4 else ("relu", "tanh")
    for group, network in zip(groups, state.networks, strict=False):
        sizes = (features, *(factor.outputs.shape[-1] for factor in network.factors))
        out |= _layers(network.particles, sizes, f"{group}.")
    if state.linear is not None:
        lines = np.asarray(state.linear.particles)
        lines = lines.reshape(len(lines), -1, features + 1)
        out["linear.weights_1"], out["linear.bias_1"] = lines[:, :, :-1].swapaxes(1, 2), lines[:, :, -1]
    return out
