"""The learners behind `--mode best`. To try another sampler on every experiment, exchange it here."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import opvi
from opvi.experiments.calibration import calibrated, predict_first, tempered
from opvi.types import Array, Key, Particles


class Learner(NamedTuple):
    """A sampler with all that an experiment needs of it."""

    target: opvi.Target
    algorithm: opvi.Algorithm
    start: Callable[[Key, int], Particles]
    # (particles, history, inputs) -> predictive mean and variance of every row; regression only
    predict: Callable[[Particles, opvi.History, Array], tuple[Array, Array]] | None
    settings: dict[str, Any]


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"ReLU": jax.nn.relu, "tanh": jnp.tanh}
HIDDEN_BIAS_SD = 0.5
FORGETTING = {"ReLU": 0.97, "tanh": 0.98}


def regressor(features: int, activation: str, *, hidden: int, rounds: int) -> Learner:
    """For kin8nm: Gauss–Newton particles, and a predictive variance learnt by predicting first."""
    target = opvi.mlp(
        features,
        (hidden,),
        opvi.gaussian(),
        activation=ACTIVATIONS[activation],
        prior_variance=None,
        bias_spread=HIDDEN_BIAS_SD,
    )
    first = FORGETTING[activation]
    algorithm = opvi.gauss_newton(
        target, forgetting=lambda t: first + (1 - first) * t / rounds, noise=opvi.AdaptiveNoise()
    )
    settings = {
        "sampler": "Gauss–Newton particles, full covariance",
        "activation": activation,
        "hidden": hidden,
        "forgetting": f"{first} in round 1, rising linearly to 1 in the last",
        "noise": "max(0.3 · running squared error, 0.01)",
        "prior": "variance 1/(inputs + 1), 1 for the last bias",
        "start": "weights N(0, 1/(inputs + 1)), hidden biases N(0, .25)",
        "predictive": "N(mean, a + b·spread²), (a, b) by a predict-then-update score discounted by .97",
    }
    return Learner(target, predict_first(algorithm, target), partial(opvi.draw, target), calibrated(target), settings)


WEIGHT_SPREAD = {"ReLU": math.sqrt(2), "tanh": 1.0}
DAMPING = 0.03


def classifier(features: int, classes: int, activation: str, *, hidden: int) -> Learner:
    """For MNIST: Kronecker-factored Gauss–Newton particles; no step size and no horizon."""
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
        "sampler": "Kronecker-factored Gauss–Newton particles",
        "activation": activation,
        "hidden": hidden,
        "damping": DAMPING,
        "forgetting": "none",
        "prior": f"variance {spread**2:.0f}/(inputs + 1), 1 for the last bias",
        "start": "from the prior, biases 0",
        "predictive": "temperature among 19 in e^±.9 by a predict-then-update score discounted by .99",
    }
    algorithm = tempered(opvi.kfac(target, damping=DAMPING), target)
    return Learner(target, algorithm, partial(opvi.draw, target), None, settings)


# --- the two-parameter mixture ----------------------------------------------------------------


class Tracker(NamedTuple):
    """A sampler in coordinates of its own, and the way there and back."""

    algorithm: opvi.Algorithm
    enter: Callable[[Particles], Particles]  # from (θ1, θ2)
    leave: Callable[[Particles], Particles]
    settings: dict[str, Any]


GAIN, DELAY = 1.5, 10


def tracker(variance: float, rows: int) -> Tracker:
    r"""A flow of gain $c\,B/N_t$ after the running posterior, in coordinates where its modes are nearly round.

    $$\phi = (\theta_1 + \theta_2/2,\; s\,\theta_2), \qquad
      \alpha_t = \frac{c}{F B\, t (t + 10)}, \quad \lambda = 1 - \frac{1}{2c}$$

    with $F = 1/(\sigma_x^2 + 1/4)$, a row's information on the midpoint; the repulsion weight is the one that
    gives the right spread when the posterior sharpens while the particles follow it.
    """
    mixture = opvi.gaussian_mixture(variance)
    stretch, information = 0.5 / variance, 1 / (variance + 0.25)

    def enter(theta: Particles) -> Particles:
        return jnp.stack([theta[..., 0] + theta[..., 1] / 2, stretch * theta[..., 1]], -1)

    def leave(phi: Particles) -> Particles:
        return jnp.stack([phi[..., 0] - phi[..., 1] / (2 * stretch), phi[..., 1] / stretch], -1)

    def bandwidth(phi: Particles) -> Array:
        # The two modes mirror each other: their distance says nothing about the width of either.
        return opvi.kernels.median()(jnp.stack([phi[:, 0], jnp.abs(phi[:, 1])], 1)) / 2

    target = opvi.target(
        lambda phi: mixture.log_prior(leave(phi)),
        lambda phi, x: mixture.log_likelihood(leave(phi), x),
        lambda key: enter(mixture.init(key)),
    )
    algorithm = opvi.parvi(
        target,
        opvi.fields.gfsd(bandwidth=bandwidth),
        step=lambda t: GAIN / (information * rows * t * (t + DELAY)),
        repulsion=1 - 1 / (2 * GAIN),
        likelihood_scale=opvi.schedules.seen,
    )
    settings = {
        "sampler": "GFSD in the coordinates (m, s δ)",
        "s": stretch,
        "step": f"{GAIN} / (F B t (t + {DELAY})), F = 1/(σ_x² + 1/4)",
        "repulsion": 1 - 1 / (2 * GAIN),
        "likelihood_scale": "rows seen / rows of the batch",
        "prior_weight": 1,
        "kernel": "RBF, half the median bandwidth of the folded particles",
    }
    return Tracker(algorithm, enter, leave, settings)
