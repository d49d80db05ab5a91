"""How well every batch was predicted before it was learnt: compiled into the loop, added up on the host.

All sums are taken in the order of the batches, so that they do not depend on where a run was cut.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.app.report import Histogram, Stretch
from opvi.app.report._contents import CONFIDENCE_BINS, PIT_BINS, calibration_error
from opvi.types import Array, Batch, Tracker

STRETCHES = 200  # of the learning curve
COVERAGE = 0.9
MOST_ALARMS = 1000  # kept; the count goes on


class Scored(NamedTuple):
    """Sums over the rows of one batch."""

    rows: Array
    loss: Array  # minus the log predictive density
    error: Array  # squared, or 1 for a wrong label
    covered: Array  # rows inside the 90 % interval
    bins: Array  # [20] rows by P(Y ≤ y), or [15] by confidence
    confidence: Array  # [15], of a classification
    right: Array  # [15]


@lru_cache(8)  # one function a tracker: it is part of what a compiled loop is known by
def score(tracker: Tracker, task: str) -> Callable[[Any, Any, Batch], Scored]:
    """A function for the compiled loop: what the state before a batch said about it."""

    def regression(predictive: Any, y: Array, there: Array) -> tuple[Array, Array, Array, Array, Array]:
        level = predictive.cdf(y)
        half = (1 - COVERAGE) / 2
        bins = _into(level, there, PIT_BINS)
        inside = (level >= half) & (level <= 1 - half)
        nothing = jnp.zeros(CONFIDENCE_BINS, level.dtype)
        return (predictive.mean() - y) ** 2, inside.astype(level.dtype), bins, nothing, nothing

    def classification(predictive: Any, y: Array, there: Array) -> tuple[Array, Array, Array, Array, Array]:
        p = predictive.probabilities()
        confidence, named = p.max(1), p.argmax(1)
        right = (named == y).astype(p.dtype)
        bins = _into(confidence, there, CONFIDENCE_BINS)
        sure = _into(confidence, there * confidence, CONFIDENCE_BINS)
        return 1 - right, jnp.zeros_like(right), bins, sure, _into(confidence, there * right, CONFIDENCE_BINS)

    how = regression if task == "regression" else classification

    def scored(before: Any, after: Any, batch: Batch) -> Scored:
        x, y = batch.data
        dtype = before.particles.dtype
        predictive = tracker.predict(before, x.astype(dtype))
        loss = -predictive.log_density(y)
        # Before the first batch there is nothing to predict with.
        there = jnp.where(jnp.isfinite(loss) & (batch.weight > 0) & (before.rows > 0), 1, 0).astype(dtype)
        error, covered, bins, confidence, right = how(predictive, y, there)

        def total(a: Array) -> Array:
            return jnp.where(there > 0, a, 0).sum()

        return Scored(there.sum(), total(loss), total(error), total(covered), bins, confidence, right)

    return jax.named_call(scored, name="score")


def _into(share: Array, weight: Array, bins: int) -> Array:
    place = jnp.clip((jnp.nan_to_num(share) * bins).astype(jnp.int32), 0, bins - 1)
    return (jax.nn.one_hot(place, bins, dtype=weight.dtype) * weight[:, None]).sum(0)


class Scores(NamedTuple):
    """The sums of a run so far; plain arrays, saved with every checkpoint."""

    batches: np.ndarray  # scored so far
    width: np.ndarray  # batches in a stretch of the curve
    curve: np.ndarray  # [STRETCHES, 4]: count, loss, error, covered
    ends: np.ndarray  # [STRETCHES]: rows learnt at the end of each
    bins: np.ndarray
    confidence: np.ndarray
    right: np.ndarray
    seen: np.ndarray  # of the baseline: [2] rows and sum of y; or [C] rows of each class
    baseline: np.ndarray  # [2]: rows, and the sum of its errors
    alarms: np.ndarray  # rows at which the alarm sounded
    alarm_count: np.ndarray
    refused: np.ndarray  # batches whose update was not finite


def start(task: str, classes: int) -> Scores:
    """Nothing scored."""
    zero = np.zeros((), np.int64)
    bins = PIT_BINS if task == "regression" else CONFIDENCE_BINS
    return Scores(
        zero,
        np.ones((), np.int64),
        np.zeros((STRETCHES, 4)),
        np.zeros(STRETCHES, np.int64),
        np.zeros(bins),
        np.zeros(CONFIDENCE_BINS),
        np.zeros(CONFIDENCE_BINS),
        np.zeros(2 if task == "regression" else classes),
        np.zeros(2),
        np.zeros(0, np.int64),
        zero,
        zero,
    )


def add(scores: Scores, task: str, scored: Scored, info: Any, y: np.ndarray, weight: np.ndarray) -> Scores:
    """The sums after some more batches: leaves `[k, …]`, y and weight `[k, B]`."""
    each = np.stack([np.asarray(a, float) for a in (scored.rows, scored.loss, scored.error, scored.covered)], 1)
    rows = np.asarray(info.rows, np.int64)
    at = 0
    while at < len(each):
        room = int(STRETCHES * scores.width - scores.batches)
        if room == 0:  # the curve is full: stretches become twice as long
            pairs = scores.curve.reshape(-1, 2, 4)
            curve = np.concatenate([pairs[:, 0] + pairs[:, 1], np.zeros((STRETCHES // 2, 4))])
            ends = np.concatenate([scores.ends[1::2], np.zeros(STRETCHES // 2, np.int64)])
            scores = scores._replace(width=scores.width * 2, curve=curve, ends=ends)
            continue
        part = slice(at, at + room)
        place = (scores.batches + np.arange(len(each[part]))) // scores.width
        curve, ends = scores.curve.copy(), scores.ends.copy()
        np.add.at(curve, place, each[part])
        np.maximum.at(ends, place, rows[part])
        scores = scores._replace(batches=scores.batches + len(place), curve=curve, ends=ends)
        at += len(place)
    changed = rows[np.asarray(info.changed)]
    sums = {name: _added(getattr(scores, name), getattr(scored, name)) for name in ("bins", "confidence", "right")}
    return _baseline(scores, task, y, weight)._replace(
        alarms=np.concatenate([scores.alarms, changed])[-MOST_ALARMS:],
        alarm_count=scores.alarm_count + len(changed),
        refused=scores.refused + (~np.asarray(info.finite)).sum(),
        **sums,
    )


def _added(total: np.ndarray, parts: Any) -> np.ndarray:
    """One after the other, not in pairs: the result is the same however they are cut."""
    return np.add.accumulate(np.concatenate([total[None], np.asarray(parts, float)]), 0)[-1]


def _baseline(scores: Scores, task: str, y: np.ndarray, weight: np.ndarray) -> Scores:
    """The errors of predicting the mean so far, or the most frequent label so far."""
    there = (weight > 0).astype(float)
    if task == "regression":
        y = np.asarray(y, float)
        sums = np.stack([there.sum(1), (there * y).sum(1)], 1)
    else:
        sums = (there[..., None] * (y[..., None] == np.arange(len(scores.seen)))).sum(1)
    totals = np.add.accumulate(np.concatenate([scores.seen[None], sums]), 0)
    before = totals[:-1]
    counted = before.sum(1) > 0 if task != "regression" else before[:, 0] > 0
    if task == "regression":
        guess = before[:, 1] / np.maximum(before[:, 0], 1)
        errors = (there * (y - guess[:, None]) ** 2).sum(1)
    else:
        errors = (there * (y != before.argmax(1)[:, None])).sum(1)
    told = np.stack([there.sum(1), errors], 1) * counted[:, None]
    return scores._replace(seen=totals[-1], baseline=_added(scores.baseline, told))


# --- what people read -------------------------------------------------------------------------


class Summary(NamedTuple):
    """The figures of a run so far."""

    total: Stretch
    recent: Stretch  # about the last tenth of the curve
    baseline: float
    curve: list[Stretch]
    calibration: Histogram
    calibration_error: float  # of the stated probabilities (ECE); how far from 90 % the interval is, for a regression
    alarms: list[int]
    alarm_count: int
    refused: int


def summary(scores: Scores, task: str) -> Summary:
    """Means of the sums."""
    used = int(-(-scores.batches // scores.width))
    curve = [_stretch(scores.curve[i], scores.ends[i], task) for i in range(used)]
    last = max(0, used - max(1, used // 10))
    end = scores.ends[used - 1] if used else 0
    counts = scores.bins
    per = np.maximum(counts[: len(scores.confidence)], 1)
    bins = Histogram([int(c) for c in counts])
    if task == "classification":
        bins = bins._replace(confidence=(scores.confidence / per).tolist(), accuracy=(scores.right / per).tolist())
    total = _stretch(scores.curve.sum(0), end, task)
    rows, errors = scores.baseline
    baseline = errors / rows if rows else np.nan
    return Summary(
        total,
        _stretch(scores.curve[last:used].sum(0), end, task),
        float(np.sqrt(baseline) if task == "regression" else baseline),
        curve,
        bins,
        abs(total.covered - COVERAGE) if task == "regression" else calibration_error(bins),
        [int(row) for row in scores.alarms],
        int(scores.alarm_count),
        int(scores.refused),
    )


def _stretch(sums: np.ndarray, end: Any, task: str) -> Stretch:
    count = sums[0]
    loss, error, covered = (sums[1:] / count).tolist() if count else (np.nan,) * 3
    if task == "regression":
        return Stretch(int(end), int(count), loss, float(np.sqrt(error)), covered)
    return Stretch(int(end), int(count), loss, error)
