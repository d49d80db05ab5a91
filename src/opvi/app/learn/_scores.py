"""How well every batch was predicted before it was learnt, added up on the host.

All sums are taken batch by batch, so they do not depend on where a run was cut.
"""

from typing import NamedTuple

import numpy as np

from opvi.app.report._contents import CONFIDENCE_BINS, PIT_BINS, Histogram, Stretch, calibration_error
from opvi.running import Fed
from opvi.types import Predicted

STRETCHES = 200  # of the learning curve
COVERAGE = 0.9
MOST_ALARMS = 1000  # kept; the count continues


class Scored(NamedTuple):
    """Sums over the rows of each of k batches."""

    sums: np.ndarray  # [k, 4]: rows; minus log predictive density; squared error, or wrong labels; rows inside
    bins: np.ndarray  # [k, 20] rows by P(Y ≤ y), or [k, 15] by confidence
    confidence: np.ndarray  # [k, 15], of a classification
    right: np.ndarray  # [k, 15]


def score(task: str, predicted: Predicted, y: np.ndarray, there: np.ndarray) -> Scored:
    """Return the sums of k batches: predictions, y and whether a row counts, each `[k, B, …]`."""
    if task == "regression":
        level, mean = np.asarray(predicted.level, float), np.asarray(predicted.mean, float)
        half = (1 - COVERAGE) / 2
        error: np.ndarray = (mean - y) ** 2
        inside = (level >= half) & (level <= 1 - half)
        bins = _into(level, there, PIT_BINS)
        confidence = right = np.zeros((len(y), CONFIDENCE_BINS))
    else:
        p = np.asarray(predicted.probabilities)
        sure, named = p.max(2), p.argmax(2)
        error, inside = named != y, np.zeros(y.shape, bool)
        bins = _into(sure, there, CONFIDENCE_BINS)
        confidence = _into(sure, np.where(there, sure, 0), CONFIDENCE_BINS)
        right = _into(sure, there & (named == y), CONFIDENCE_BINS)
    each = there, -np.asarray(predicted.log_density, float), error, inside
    sums = np.stack([np.where(there, a, 0).sum(1, dtype=float) for a in each], 1)
    return Scored(sums, bins, confidence, right)


def _into(share: np.ndarray, weight: np.ndarray, bins: int) -> np.ndarray:
    """Sum weights `[k, B]` by the bin of [0, 1] that each share falls into: `[k, bins]`."""
    place = np.clip((np.nan_to_num(share) * bins).astype(int), 0, bins - 1) + bins * np.arange(len(share))[:, None]
    return np.bincount(place.ravel(), weight.ravel(), bins * len(share)).reshape(-1, bins)


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
    unsound: np.ndarray  # [2]: rows whose prediction was not finite: of all, and of the last batch
    probability: np.ndarray | float  # that the data have jumped, after the last batch


def start(task: str, classes: int) -> Scores:
    """Return the sums before any row."""
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
        np.zeros(2, np.int64),
        np.zeros(()),
    )


def counted(fed: Fed) -> np.ndarray:
    """Return which rows were predicted; those whose prediction is not finite count by themselves, see `unsound`."""
    return predictable(fed) & _finite(fed)


def unsound(fed: Fed) -> np.ndarray:
    """Return which rows were predicted as something that is not finite."""
    return predictable(fed) & ~_finite(fed)


def predictable(fed: Fed) -> np.ndarray:
    """Return which rows could be predicted; the first batch cannot be."""
    first = (fed.info.rows == (fed.weight > 0).sum(1))[:, None]
    return (fed.weight > 0) & ~first


def _finite(fed: Fed) -> np.ndarray:
    said = fed.info.predicted
    sound: np.ndarray = np.isfinite(said.log_density)
    return sound if said.mean is None else sound & np.isfinite(said.mean)


def add(scores: Scores, task: str, fed: Fed) -> Scores:
    """Return the sums after some more batches."""
    info, (_, y) = fed.info, fed.data
    rows = info.rows.astype(np.int64)
    scored = score(task, info.predicted, y, counted(fed))
    at = 0
    while at < len(rows):
        room = int(STRETCHES * scores.width - scores.batches)
        if room == 0:  # the curve is full: stretches become twice as long
            pairs = scores.curve.reshape(-1, 2, 4)
            curve = np.concatenate([pairs[:, 0] + pairs[:, 1], np.zeros((STRETCHES // 2, 4))])
            ends = np.concatenate([scores.ends[1::2], np.zeros(STRETCHES // 2, np.int64)])
            scores = scores._replace(width=scores.width * 2, curve=curve, ends=ends)
            continue
        part = slice(at, at + room)
        place = (scores.batches + np.arange(len(rows[part]))) // scores.width
        curve, ends = scores.curve.copy(), scores.ends.copy()
        np.add.at(curve, place, scored.sums[part])
        np.maximum.at(ends, place, rows[part])
        scores = scores._replace(batches=scores.batches + len(place), curve=curve, ends=ends)
        at += len(place)
    changed = rows[info.changed]
    odd = unsound(fed).sum(1)
    return _baseline(scores, task, y, fed.weight)._replace(
        bins=added(scores.bins, scored.bins),
        confidence=added(scores.confidence, scored.confidence),
        right=added(scores.right, scored.right),
        alarms=np.concatenate([scores.alarms, changed])[-MOST_ALARMS:],
        alarm_count=scores.alarm_count + len(changed),
        refused=scores.refused + (~info.finite).sum(),
        unsound=np.array([scores.unsound[0] + odd.sum(), odd[-1]]) if len(rows) else scores.unsound,
        probability=np.asarray(info.probability[-1], float) if len(rows) else scores.probability,
    )


def added(total: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Add batches one after the other, so that the result does not depend on how they are cut."""
    return np.add.accumulate(np.concatenate([total[None], parts]), 0)[-1]


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
    return scores._replace(seen=totals[-1], baseline=added(scores.baseline, told))


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
    unsound: int  # rows whose prediction was not finite; they are in none of the other figures
    broken: bool  # whether the last batch had such rows
    probability: float  # that the data have jumped by now


def summary(scores: Scores, task: str) -> Summary:
    """Return the figures from the sums."""
    used = int(-(-scores.batches // scores.width))
    sums, ends = list(scores.curve[:used]), list(scores.ends[:used])
    if used > 1 and sums[-1][0] < sums[-2][0] / 5:  # a few rows at the end are no stretch of their own
        few = sums.pop()
        sums[-1], ends[-2:] = sums[-1] + few, ends[-1:]
    curve = [_stretch(part, end, task) for part, end in zip(sums, ends, strict=True)]
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
        int(scores.unsound[0]),
        bool(scores.unsound[1]),
        float(scores.probability),
    )


def _stretch(sums: np.ndarray, end: int, task: str) -> Stretch:
    count = sums[0]
    loss, error, covered = (sums[1:] / count).tolist() if count else (np.nan,) * 3
    if task == "regression":
        return Stretch(int(end), int(count), loss, float(np.sqrt(error)), covered)
    return Stretch(int(end), int(count), loss, error)
