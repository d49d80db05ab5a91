r"""Predictive variance and temperature learnt by predicting each batch before learning from it: no row held out."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi.algorithms.common import compiled
from opvi.predictive import Predictive
from opvi.types import Array, Batch, Key, Particles, Scalar


def normals(target: opvi.Target, particles: Particles, x: Array) -> opvi.Normal:
    """What each particle of a target with a Gaussian head says: leaves `[n, B]`."""
    return cast(opvi.Normal, opvi.predict(target, particles, x).components)


class PredictFirstInfo(NamedTuple):
    """What the round's batch looked like to the particles before they learnt from it."""

    rows: Array
    finite: Array
    log_predictive: Scalar
    error: Array  # [B]: y less the predictive mean
    spread: Array  # [B]: variance of the particles' means
    weight: Array  # [B]


def predict_first(algorithm: opvi.Algorithm, target: opvi.Target) -> opvi.Algorithm:
    """The same sampler, whose Info also holds its predictions of each batch `(X, y)` of a fixed size."""

    @compiled
    def step(key: Key, state: Any, batch: Batch) -> tuple[Any, PredictFirstInfo]:
        x, y = batch.data
        means = normals(target, state.particles, x).mean
        state, info = algorithm.step(key, state, batch)
        error = y.astype(means.dtype) - means.mean(0)
        weight = jnp.asarray(batch.weight, means.dtype)
        return state, PredictFirstInfo(info.rows, info.finite, info.log_predictive, error, means.var(0), weight)

    return opvi.Algorithm(algorithm.init, step)


DISCOUNT = 0.97
NOISE = np.exp(np.linspace(np.log(0.01), np.log(1.5), 32))
SPREAD = np.array([0.0, 0.5, 1, 2, 4, 8, 16])


def choose(info: PredictFirstInfo) -> tuple[float, float]:
    r"""(a, b) of the predictive $N(\bar f, a + b\,\mathrm{var}_i f_i)$ with the best discounted log score.

    Targets are taken to be standardised: the noise variance a is sought between .01 and 1.5.
    """
    a, b = (grid.ravel() for grid in np.meshgrid(NOISE, SPREAD, indexing="ij"))
    age = np.arange(len(info.error))[::-1]
    weight = (np.asarray(info.weight) * (DISCOUNT**age)[:, None]).ravel()
    recent = weight > 1e-6
    error, spread, weight = np.ravel(info.error)[recent], np.ravel(info.spread)[recent], weight[recent]
    variance = a[:, None] + b[:, None] * spread[None, :]
    best = ((-0.5 * np.log(variance) - 0.5 * error**2 / variance) * weight).sum(1).argmax()
    return float(a[best]), float(b[best])


def calibrated(target: opvi.Target) -> Callable[[Particles, opvi.History, Array], tuple[Array, Array]]:
    """Predictive mean and variance from particles, with (a, b) chosen on the run's own history."""

    @jax.jit
    def moments(particles: Particles, x: Array) -> tuple[Array, Array]:
        means = normals(target, particles, x).mean
        return means.mean(0), means.var(0)

    def predict(particles: Particles, history: opvi.History, x: Array) -> tuple[Array, Array]:
        a, b = choose(history.info)
        mean, spread = moments(particles, x)
        return mean, a + b * spread

    return predict


# --- classes ----------------------------------------------------------------------------------

TEMPERATURES = np.exp(np.linspace(-0.9, 0.9, 19)).astype(np.float32)
TEMPERATURE_DISCOUNT = 0.99


class TemperedState(NamedTuple):
    """A sampler's state, and how well each temperature has predicted so far."""

    particles: Particles
    inner: Any
    scores: Array  # [19]: discounted sums of log densities
    round: Array
    rows: Array


def tempered(algorithm: opvi.Algorithm, target: opvi.Target) -> opvi.Algorithm:
    """The same sampler of classes, which also scores temperatures on each batch before learning from it."""

    def init(key: Key, particles: Any) -> TemperedState:
        inner = algorithm.init(key, particles)
        scores = jnp.zeros(len(TEMPERATURES), inner.particles.dtype)
        return TemperedState(inner.particles, inner, scores, inner.round, inner.rows)

    @compiled
    def step(key: Key, state: TemperedState, batch: Batch) -> tuple[TemperedState, Any]:
        x, y = batch.data
        log_p = opvi.predict(target, state.particles, x).log_probabilities()
        each = jax.vmap(lambda t: at_temperature(log_p, t).log_density(y))(jnp.asarray(TEMPERATURES, log_p.dtype))
        scores = TEMPERATURE_DISCOUNT * state.scores + (each * batch.weight[None].astype(log_p.dtype)).sum(1)
        inner, info = algorithm.step(key, state.inner, batch)
        return TemperedState(inner.particles, inner, scores, inner.round, inner.rows), info

    return opvi.Algorithm(init, step)


def at_temperature(log_p: Array, temperature: Scalar) -> Predictive:
    """Class probabilities $p^{1/T}$, normalised: T below 1 sharpens them."""
    return Predictive(opvi.Categorical(log_p[None] / temperature))


def temperature_of(state: TemperedState) -> Scalar:
    """The temperature that has predicted best."""
    return jnp.asarray(TEMPERATURES)[state.scores.argmax()]
