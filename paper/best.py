"""The learners behind `--mode best`: what `opvi.tracker` picks. To try another on all experiments, replace it here."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import opvi
from opvi.types import Array


class Learner(NamedTuple):
    """A tracker, and what a results file says about it."""

    tracker: opvi.types.Sampler
    settings: dict[str, Any]


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"ReLU": jax.nn.relu, "tanh": jnp.tanh}
WEIGHT_SPREAD = {"ReLU": math.sqrt(2), "tanh": 1.0}


def regressor(features: int, activation: str, *, hidden: int, particles: int) -> Learner:
    """Return the learner for kin8nm."""
    target = opvi.mlp(features, (hidden,), activation=ACTIVATIONS[activation], prior_variance=None, bias_spread=0.5)
    settings = {
        "activation": activation,
        "hidden": hidden,
        "prior": "variance 1/(inputs + 1), 1 for the last bias",
        "start": "weights N(0, 1/(inputs + 1)), hidden biases N(0, .25)",
    }
    return _learner(opvi.tracker(target, particles=particles), settings)


def classifier(features: int, classes: int, activation: str, *, hidden: int, particles: int) -> Learner:
    """Return the learner for MNIST."""
    spread = WEIGHT_SPREAD[activation]
    target = opvi.mlp(
        features,
        (hidden,),
        opvi.categorical(),
        outputs=classes,
        activation=ACTIVATIONS[activation],
        prior_variance=None,
        weight_spread=spread,
    )
    settings = {
        "activation": activation,
        "hidden": hidden,
        "prior": f"variance {spread**2:.0f}/(inputs + 1), 1 for the last bias",
        "start": "from the prior, biases 0",
    }
    return _learner(opvi.tracker(target, particles=particles), settings)


def mixture(variance: float, particles: int) -> Learner:
    """Return the learner for the two-parameter mixture."""
    tracker = opvi.tracker(opvi.gaussian_mixture(variance), particles=particles)
    return _learner(tracker, {"start": "from the prior"})


def _learner(tracker: opvi.types.Sampler, settings: dict[str, Any]) -> Learner:
    return Learner(tracker, {"tracker": tracker.about, **settings})
