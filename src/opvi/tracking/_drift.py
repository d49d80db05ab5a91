r"""Detects changes of the data: a Page–Hinkley test on how well batches were predicted before learning."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from opvi._steps import compiled
from opvi.tracking._wrapped import Wrapped, WrappedInfo, Wrapper, wrapped_info
from opvi.types import Array, Batch, Key, Sampler, Scalar, State

ALLOWANCE = 0.5  # standard deviations; smaller rises of the loss are not worth an alarm
THRESHOLD = 12.0  # of the cumulated excess; quiet losses get there once in some 100,000 batches
SINGLE_THRESHOLD = 16.0  # of batches of one to four rows: their losses are skewed, and they are many
FEW = 5  # rows
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


def start(dtype: jnp.dtype) -> Detector:
    """Return a detector that has seen nothing."""
    zero, none = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    return Detector(zero, zero, zero, none, none)


def threshold_of(weight: Array) -> Array:
    """Return the threshold for a batch with these weights."""
    return jnp.where(weight.sum() < FEW, SINGLE_THRESHOLD, THRESHOLD)


def update(detector: Detector, loss: Scalar, threshold: Scalar | float = THRESHOLD) -> tuple[Detector, Array]:
    r"""Return the detector after a batch, and whether it raises the alarm.

    $$e_t = \max(0,\; e_{t-1} + \min(z_t, 4) - \tfrac12), \qquad z_t = (\ell_t - \bar\ell)/\mathrm{sd}(\ell),
      \qquad e_t > 12$$

    Args:
        detector: its state.
        loss: the mean loss of the batch, e.g. minus its log predictive density; ignored if not finite.
        threshold: the value of $e_t$ above which an alarm is raised.
    """
    batches = detector.batches + 1
    warm = batches > WARM_UP
    z = (loss - detector.mean) / jnp.sqrt(jnp.maximum(detector.variance, 1e-30))
    z = jnp.clip(z, -LARGEST_EXCESS, LARGEST_EXCESS)
    excess = jnp.where(warm, jnp.maximum(detector.excess + z - ALLOWANCE, 0), 0)
    alarm = excess > threshold
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


@dataclass(frozen=True)
class Watched(Wrapper):
    """Settings of `watched`."""

    def beginning(self, inner: State) -> Detector:
        """Return a detector that has seen nothing."""
        return start(inner.particles.dtype)

    @compiled
    def step(self, key: Key, state: Wrapped, batch: Batch) -> tuple[Wrapped, WrappedInfo]:
        """Learn from a batch, and report whether the data changed."""
        inner, info = self.sampler.step(key, state.inner, batch)
        # The first batch was predicted from nothing: its loss says nothing about later ones.
        loss = jnp.where(state.rows > 0, -info.log_predictive, jnp.nan)
        detector, changed = update(state.own, loss, threshold_of(batch.weight))
        told = wrapped_info(info)
        changed = changed if told.changed is None else changed | told.changed
        return Wrapped(inner, detector, inner.round, inner.rows), told._replace(changed=changed)


def watched(sampler: Sampler) -> Watched:
    """Return the same sampler, whose Info reports in `changed` when the data changed."""
    return Watched(sampler)
