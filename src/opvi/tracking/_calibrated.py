"""Any sampler of a model with a distribution head, with predictions calibrated along the stream."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import compiled, mean_over
from opvi.filters._covariance import exactly
from opvi.filters._gauss_newton import GaussNewton
from opvi.predictive import Classes, Normal, Predictive
from opvi.predictive import predict as predict_with
from opvi.targets import Target, cast, check_batch
from opvi.tracking import _temperature as temperature
from opvi.tracking._mixing import _members as members
from opvi.tracking._mixing import _numbers as numbers
from opvi.tracking._mixing._members import Members
from opvi.tracking._mixing._numbers import Combined, NumbersState
from opvi.tracking._temperature import Exponents
from opvi.tracking._wrapped import Wrapped, WrappedInfo, Wrapper, wrapped_info
from opvi.types import Array, Batch, Key, Predicted, Sampler, Start, State, Tree


class Known(NamedTuple):
    """What was learnt from errors."""

    members: Members  # how particles are weighed, in regressions
    errors: NumbersState  # of their weighted mean
    exponents: Exponents  # used by classes


@dataclass(frozen=True)
class Calibrated(Wrapper):
    """Settings of `calibrated`."""

    target: Target
    particles: int | None  # drawn by `init` if it is not told otherwise
    about: str = field(default="", kw_only=True, compare=False)

    def init(self, key: Key, particles: Start = None) -> Wrapped:
        """Return the state before any row."""
        return super().init(key, self.particles if particles is None else particles)

    def beginning(self, inner: State) -> Known:
        """Return what is known before any error."""
        n, dtype = len(inner.particles), inner.particles.dtype
        return Known(members.start(n, dtype), numbers.start(0, dtype), temperature.start(1, dtype))

    @compiled
    @exactly
    def step(self, key: Key, state: Wrapped, batch: Batch) -> tuple[Wrapped, WrappedInfo]:
        """Predict a batch, learn from the errors, and only then from the batch."""
        batch = cast(batch, state.particles.dtype)
        check_batch(self.target, state.particles[0], batch)
        learnt, predicted = _learn(self, state, batch)
        inner, info = self.sampler.step(key, state.inner, batch)
        known = jax.tree.map(lambda new, old: jnp.where(info.finite, new, old), learnt, state.own)
        told = wrapped_info(info)._replace(log_predictive=mean_over(batch, predicted.log_density), predicted=predicted)
        return Wrapped(inner, known, inner.round, inner.rows), told

    def predict(self, state: Wrapped, x: Tree) -> Predictive:
        """Return the calibrated posterior predictive at inputs x."""
        plain = _plain(self, state, x)
        if isinstance(plain.components, Normal):
            return Predictive(numbers.predictive(state.own.errors, _combined(state.own, plain.components.mean)))
        if not isinstance(plain.components, Classes):
            return plain
        return plain._replace(temperature=temperature.temperature(state.own.exponents))


def calibrated(sampler: Sampler, target: Target, *, particles: int | None = 20, about: str = "") -> Calibrated:
    r"""Calibrate a sampler: predict each batch, learn from the errors, and only then from the batch.

    Regression: the particles' means are combined by weights on the simplex, and noise, the particles' spread and
    the tails are weighted by their discounted log scores. Classes: a temperature. Other heads: nothing. No row is held
    out.

    Args:
        sampler: any sampler of the target, wrapped or not.
        target: with a Gaussian, Bernoulli or categorical head; batches are pairs `(X, y)`, with y of about unit
            size for a Gaussian head.
        particles: the number that `init` draws; None leaves it to the sampler.
        about: what the tracker says about itself; the sampler's own words if omitted.
    """
    if target.predict is None:
        raise TypeError("predictions need a model of y: a target with `predict`, e.g. `opvi.mlp(...)`.")
    return Calibrated(sampler, target, particles, about=about or getattr(sampler, "about", ""))


def _plain(sampler: Calibrated, state: Wrapped, x: Tree) -> Predictive:
    """Return what is to be calibrated: class probabilities include what each particle's covariance leaves open."""
    plain = predict_with(sampler.target, state.particles, x)
    if isinstance(plain.components, Classes) and isinstance(sampler.sampler, GaussNewton):
        return sampler.sampler.averaged(state.inner, x)  # type: ignore[arg-type]
    return plain


def _combined(known: Known, means: Array) -> Combined:
    """Return the particles' means combined into one prediction."""
    together, spread = members.combine(known.members, means, jnp.zeros_like(means))
    return numbers.describe(known.errors, together, spread, _nothing(means))


def _nothing(means: Array) -> Array:
    return jnp.zeros((means.shape[1], 0), means.dtype)


def _learn(sampler: Calibrated, state: Wrapped, batch: Batch) -> tuple[Known, Predicted]:
    """Return what is known after the errors on this batch, and what was predicted for it."""
    known: Known = state.own
    x, y = batch.data
    plain = _plain(sampler, state, x)
    if isinstance(plain.components, Normal):
        means = plain.components.mean
        one = _combined(known, means)
        scores = numbers.scored(known.errors, one, y)
        weights = members.learn(known.members, means - y[None], batch.weight)
        errors = numbers.learn(known.errors, one, scores, _nothing(means), y, batch.weight)
        told = numbers.log_density(known.errors, scores), one.mean, numbers.level(known.errors, scores)
        return known._replace(members=weights, errors=errors), Predicted(*told)
    if not isinstance(plain.components, Classes):
        return known, Predicted(plain.log_density(y), plain.mean())
    log_p = plain.log_probabilities()[None]
    exponents = temperature.update(known.exponents, log_p, y.astype(jnp.int32), batch.weight)
    said = plain._replace(temperature=temperature.temperature(known.exponents))
    return known._replace(exponents=exponents), Predicted(said.log_density(y), probabilities=said.probabilities())
