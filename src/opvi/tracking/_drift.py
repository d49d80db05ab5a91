r"""When did the data change? A Page–Hinkley test on how well batches were predicted before learning from them."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from opvi._steps import compiled
from opvi.types import Array, Batch, Key, Particles, Scalar, Tracker

ALLOWANCE = 0.5  # standard deviations; smaller rises of the loss are not worth an alarm
THRESHOLD = 12.0  # of the cumulated excess; quiet losses get there once in some 100,000 batches
LARGEST_EXCESS = 4.0  # standard deviations; one bad batch alone must not be an alarm
WARM_UP = 30  # batches after a start or an alarm
MEMORY = 200.0  # batches behind the mean and deviation that the loss is held against


class Detector(NamedTuple):
    """What is known about the loss since the last change."""

    mean: Scalar  # running mean of the loss
    variance: Scalar
    excess: Scalar  # cumulated, never below 0
    batches: Array  # since the last change
    changes: Array  # alarms so far


def start(dtype: Any) -> Detector:
    """Nothing seen."""
    zero, none = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    return Detector(zero, zero, zero, none, none)


def update(detector: Detector, loss: Scalar) -> tuple[Detector, Array]:
    r"""The detector after a batch, and whether it sounds the alarm.

    $$e_t = \max(0,\; e_{t-1} + \min(z_t, 4) - \tfrac12), \qquad z_t = (\ell_t - \bar\ell)/\mathrm{sd}(\ell),
      \qquad e_t > 12$$

    Args:
        detector: its state.
        loss: mean loss of the batch, e.g. minus its log predictive density; not finite: ignored.
    """
    batches = detector.batches + 1
    warm = batches > WARM_UP
    z = (loss - detector.mean) / jnp.sqrt(jnp.maximum(detector.variance, 1e-30))
    z = jnp.clip(z, -LARGEST_EXCESS, LARGEST_EXCESS)
    excess = jnp.where(warm, jnp.maximum(detector.excess + z - ALLOWANCE, 0), 0)
    alarm = excess > THRESHOLD
    # What is far out moves the mean no further than the clipped value would: a change must not hide itself.
    sd = jnp.sqrt(detector.variance)
    seen = jnp.where(warm, detector.mean + z * sd, loss)
    gain = 1 / jnp.minimum(batches.astype(loss.dtype), MEMORY)
    apart = seen - detector.mean
    mean = detector.mean + gain * apart
    variance = (1 - gain) * (detector.variance + gain * apart**2)
    quiet = Detector(mean, variance, excess, batches, detector.changes)
    fresh = start(loss.dtype)._replace(changes=detector.changes + 1)
    good = jnp.isfinite(loss)
    alarm = alarm & good
    new = Detector(*(jnp.where(alarm, a, b) for a, b in zip(fresh, quiet, strict=True)))
    return Detector(*(jnp.where(good, a, b) for a, b in zip(new, detector, strict=True))), alarm


class WatchedState(NamedTuple):
    """A tracker's state and its detector."""

    inner: Any
    detector: Detector

    @property
    def particles(self) -> Particles:
        """The tracker's."""
        return self.inner.particles

    @property
    def round(self) -> Array:
        """The tracker's."""
        return self.inner.round

    @property
    def rows(self) -> Array:
        """The tracker's."""
        return self.inner.rows


class WatchedInfo(NamedTuple):
    """The tracker's own Info in short, and whether the data changed."""

    rows: Array
    log_predictive: Scalar
    drift: Scalar
    finite: Array
    changed: Array  # True at a batch where the detector sounded the alarm
    inner: Any


def watched(tracker: Tracker) -> Tracker:
    """The same tracker, whose Info says when the data changed."""

    def init(key: Key, particles: Any = None) -> WatchedState:
        inner = tracker.init(key, particles)
        return WatchedState(inner, start(inner.particles.dtype))

    @compiled
    def step(key: Key, state: WatchedState, batch: Batch) -> tuple[WatchedState, WatchedInfo]:
        inner, info = tracker.step(key, state.inner, batch)
        # The first batch was predicted from nothing: its loss says nothing about later ones.
        loss = jnp.where(state.inner.rows > 0, -info.log_predictive, jnp.nan)
        detector, changed = update(state.detector, loss)
        told = WatchedInfo(info.rows, info.log_predictive, info.drift, info.finite, changed, info)
        return WatchedState(inner, detector), told

    return Tracker(init, step, lambda state, x: tracker.predict(state.inner, x), tracker.about)
