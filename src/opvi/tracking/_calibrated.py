r"""Any sampler of a model with a distribution head, with predictions calibrated as the stream goes by."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import compiled
from opvi.predictive import Normal, Predictive
from opvi.predictive import predict as predict_with
from opvi.targets import Target, cast, check_batch
from opvi.tracking import _calibration as calibration
from opvi.tracking import _temperature as temperature
from opvi.tracking._calibration import Calibration, Combined
from opvi.tracking._temperature import Exponents
from opvi.types import Algorithm, Array, Batch, Key, Particles, Scalar, Tracker


class CalibratedState(NamedTuple):
    """A sampler's state, and what its errors have taught."""

    inner: Any
    errors: Calibration  # used by regressions
    exponents: Exponents  # used by classes

    @property
    def particles(self) -> Particles:
        """The sampler's."""
        return self.inner.particles

    @property
    def round(self) -> Array:
        """The sampler's."""
        return self.inner.round

    @property
    def rows(self) -> Array:
        """The sampler's."""
        return self.inner.rows


class CalibratedInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array
    log_predictive: Scalar  # mean log predictive density of the batch, calibrated, before learning from it
    drift: Scalar
    finite: Array
    inner: Any


def calibrated(algorithm: Algorithm, target: Target, *, particles: Any = 20, about: str = "") -> Tracker:
    r"""The sampler as a tracker that predicts each batch, learns from its errors, and only then from the batch.

    Regression: the particles' means are combined by weights on the simplex, and noise, the particles' spread and
    the tails are weighed by their discounted log scores. Classes: a temperature. No row is held out.

    Args:
        algorithm: any sampler of the target.
        target: with a Gaussian, Bernoulli or categorical head; batches are pairs `(X, y)`, with y of about unit
            size for a Gaussian head.
        particles: the number that `init` draws, or the particles themselves.
        about: what the tracker says about itself.
    """
    if target.predict is None:
        raise TypeError("predictions need a model of y: a target with `predict`, e.g. `opvi.mlp(...)`.")

    def init(key: Key, particles_: Any = None) -> CalibratedState:
        inner = algorithm.init(key, particles if particles_ is None else particles_)
        n, dtype = len(inner.particles), inner.particles.dtype
        return CalibratedState(inner, calibration.start(n, 0, dtype), temperature.start(1, dtype))

    def combined(state: CalibratedState, means: Array) -> tuple[Combined, Array]:
        """The particles' means as one prediction, and the features of its errors: none."""
        nothing = jnp.zeros((means.shape[1], 0), means.dtype)
        return calibration.combine(state.errors, means, jnp.zeros_like(means), nothing), nothing

    def predict(state: CalibratedState, x: Any) -> Predictive:
        plain = predict_with(target, state.particles, x)
        if not isinstance(plain.components, Normal):
            return plain._replace(temperature=temperature.temperature(state.exponents))
        return Predictive(calibration.predictive(state.errors, combined(state, plain.components.mean)[0]))

    def learn(state: CalibratedState, batch: Batch) -> tuple[CalibratedState, Array]:
        """The state with what the errors on this batch teach, and the log predictive density of each row."""
        x, y = batch.data
        plain = predict_with(target, state.particles, x)
        if isinstance(plain.components, Normal):
            means = plain.components.mean
            one, nothing = combined(state, means)
            errors = calibration.learn(state.errors, one, means, jnp.zeros_like(means), nothing, y, batch.weight)
            return state._replace(errors=errors), calibration.log_predictive(state.errors, one, y)
        log_p = plain.log_probabilities()[None]
        exponents = temperature.update(state.exponents, log_p, y.astype(jnp.int32), batch.weight)
        return state._replace(exponents=exponents), predict(state, x).log_density(y)

    @compiled
    def step(key: Key, state: CalibratedState, batch: Batch) -> tuple[CalibratedState, CalibratedInfo]:
        dtype = state.particles.dtype
        batch = cast(batch, dtype)
        check_batch(target, state.particles[0], batch)
        learnt, log_density = learn(state, batch)
        inner, info = algorithm.step(key, state.inner, batch)
        state = jax.tree.map(lambda a, b: jnp.where(info.finite, a, b), learnt, state)._replace(inner=inner)
        score = (log_density * batch.weight).sum() / jnp.maximum(batch.weight.sum(), 1e-30)
        return state, CalibratedInfo(info.rows, score, info.drift, info.finite, info)

    return Tracker(init, step, predict, about)
