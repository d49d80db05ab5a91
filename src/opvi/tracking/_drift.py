r"""Watches a sampler: the posterior probability that the data have jumped, and an alarm when it is large."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from opvi._steps import compiled
from opvi.tracking._wrapped import Wrapped, WrappedInfo, Wrapper, wrapped_info
from opvi.tracking._wrappers import _jumps as jumps
from opvi.types import Array, Batch, Key, Sampler, Scalar, State

SHIFT = 1.0  # standard deviations that the mean loss of a block rises by in a jump
LARGEST_EXCESS = 4.0  # standard deviations; one bad block alone must not be an alarm
BLOCK = 20.0  # rows; losses of single rows are too skewed to be Gaussian
WARM_UP = 30  # blocks after a start or an alarm
MEMORY = 200.0  # blocks behind the mean and deviation that the loss is held against


class Detector(NamedTuple):
    """What is known about the loss since the last change."""

    mean: Scalar  # running mean of the loss of blocks
    variance: Scalar
    excess: Scalar  # log odds of a jump, in units of its probability at each row
    batches: Array  # blocks since the last change
    changes: Array  # alarms so far
    loss: Scalar | float = 0.0  # sum over the rows since the last block
    rows: Scalar | float = 0.0  # their number


def start(dtype: jnp.dtype) -> Detector:
    """Return a detector that has seen nothing."""
    zero, none = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    return Detector(zero, zero, zero, none, none, zero, zero)


def update(detector: Detector, loss: Scalar, rows: Scalar) -> tuple[Detector, Scalar]:
    r"""Return the detector after a batch, and the posterior probability of a jump.

    Rows are taken together in blocks of at least 20. Before a jump, which comes with probability h at every row, the
    mean loss of a block is Gaussian, with mean and deviation those of the blocks before; after it, it is one deviation
    higher.
    With $z = \min((\ell - \bar\ell)/\mathrm{sd}(\ell), 4)$ and n rows, the odds of a jump are

    $$o \gets (o + n h)\, e^{z - 1/2}.$$

    Args:
        detector: its state.
        loss: the mean loss of the batch, e.g. minus its log predictive density; ignored if not finite.
        rows: the number of rows in the batch.
    """
    good = jnp.isfinite(loss) & (rows > 0)
    total, rows = detector.loss + loss * rows, detector.rows + rows
    full = rows >= BLOCK
    batches, loss = detector.batches + 1, total / jnp.maximum(rows, 1)
    warm = batches > WARM_UP
    z = (loss - detector.mean) / jnp.sqrt(jnp.maximum(detector.variance, 1e-30))
    z = jnp.clip(z, -LARGEST_EXCESS, LARGEST_EXCESS)
    excess = jnp.where(warm, jnp.logaddexp(detector.excess, jnp.log(rows)) + SHIFT * z - SHIFT**2 / 2, 0)
    odds = jumps.HAZARD * jnp.exp(excess)
    probability = jnp.where(good & full, odds / (1 + odds), _probability(detector))
    # What is far out moves the mean no further than the clipped value would: a change must not hide itself.
    seen = jnp.where(warm, detector.mean + z * jnp.sqrt(detector.variance), loss)
    gain = 1 / jnp.minimum(batches.astype(loss.dtype), MEMORY)
    apart = seen - detector.mean
    mean = detector.mean + gain * apart
    variance = (1 - gain) * (detector.variance + gain * apart**2)
    none = jnp.zeros_like(total)
    quiet = Detector(mean, variance, excess, batches, detector.changes, none, none)
    fresh = start(loss.dtype)._replace(changes=detector.changes + 1)
    waiting = detector._replace(loss=total, rows=rows)
    new = _either(probability > jumps.ALARM, fresh, quiet)
    return _either(good, _either(full, new, waiting), detector), probability


def _probability(detector: Detector) -> Scalar:
    """Return the probability of a jump, as far as whole blocks say."""
    odds = jumps.HAZARD * jnp.exp(detector.excess)
    return odds / (1 + odds)


def _either(flag: Array, a: Detector, b: Detector) -> Detector:
    return Detector(*(jnp.where(flag, one, other) for one, other in zip(a, b, strict=True)))


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
        told = wrapped_info(info)
        if told.probability is None:
            # The first batch was predicted from nothing: its loss says nothing about later ones.
            loss = jnp.where(state.rows > 0, -info.log_predictive, jnp.nan)
            detector, probability = update(state.own, loss, batch.weight.sum())
            told = told._replace(probability=probability, changed=probability > jumps.ALARM)
        elif told.changed is None:  # the sampler itself knows
            changed = told.probability > jumps.ALARM
            told = told._replace(changed=changed)
            detector = state.own._replace(changes=state.own.changes + changed.astype(jnp.int32))
        else:
            detector = state.own
        return Wrapped(inner, detector, inner.round, inner.rows), told

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""
        return super().about + ("" if self.renews else "; jumps of the data are reported, and nothing else is done")


def watched(sampler: Sampler) -> Watched:
    """Return the same sampler, whose Info reports the `probability` that the data have jumped, and when they `changed`.

    An alarm, `changed`, is a probability of more than 0.95. `opvi.regressor` acts on it by itself, watched or not: it
    forgets most of the past, unless it was given a half-life. Around other samplers nothing but the report is added,
    and `about` says so.
    """
    return Watched(sampler)
