"""Particles by the names of their parameters."""

import itertools
from typing import Any

import numpy as np

from opvi.tracking._layers import Network


def named_parameters(state: Any, hidden: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The parameters of a regressor's or classifier's particles, `[particles, …]`; layers count from 1.

    Weights are `[particles, inputs, outputs]`, biases `[particles, outputs]`, for standardised inputs.
    """
    while hasattr(state, "inner"):
        state = state.inner
    if hasattr(state, "networks"):
        return _of_classifier(state)
    sizes = (len(state.moments.mean) - 1, *hidden, 1)
    out = {}
    ends = np.cumsum([rows * columns for rows, columns in Network(sizes).shapes])[:-1]
    for index, part in enumerate(np.split(np.asarray(state.particles), ends, axis=1), 1):
        layer = part.reshape(len(part), *Network(sizes).shapes[index - 1])
        out[f"weights_{index}"], out[f"bias_{index}"] = layer[:, :, :-1].swapaxes(1, 2), layer[:, :, -1]
    return out


def _of_classifier(state: Any) -> dict[str, np.ndarray]:
    features, out = len(state.moments.mean), {}
    groups = ("relu_long", "tanh_long", "relu_short", "tanh_short") if len(state.networks) == 4 else ("relu", "tanh")
    for group, network in zip(groups, state.networks, strict=False):
        particles = np.asarray(network.particles)
        sizes = (features, *(factor.outputs.shape[-1] for factor in network.factors))
        start = 0
        for index, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
            middle, end = start + inputs * outputs, start + (inputs + 1) * outputs
            out[f"{group}.weights_{index}"] = particles[:, start:middle].reshape(-1, inputs, outputs)
            out[f"{group}.bias_{index}"] = particles[:, middle:end]
            start = end
    if state.linear is not None:
        lines = np.asarray(state.linear.particles)
        lines = lines.reshape(len(lines), -1, features + 1)
        out["linear.weights_1"], out["linear.bias_1"] = lines[:, :, :-1].swapaxes(1, 2), lines[:, :, -1]
    return out
