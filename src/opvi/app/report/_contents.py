"""What a report shows: plain numbers and strings, taken from a run."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

PIT_BINS = 20  # of the histogram of a regression's calibration
CONFIDENCE_BINS = 15  # of a classification's
NOISE = 0.95  # of the bands that chance alone explains


class Stretch(NamedTuple):
    """How well the rows of a stretch of the stream were predicted before they were learnt."""

    rows: int  # seen at its end
    count: int  # type: ignore[assignment]  # in it
    loss: float  # mean negative log predictive density, in nats
    error: float  # regression: root mean squared error; classification: share of wrong labels
    covered: float = np.nan  # regression: share inside the 90 % interval


class Histogram(NamedTuple):
    """How honest the predictions were.

    Regression: `counts` of the values P(Y ≤ y) in 20 equal bins from 0 to 1, and nothing else. Classification: for 15
    bins of the confidence in the label named, the rows, their mean confidence and the share that was right.
    """

    counts: Sequence[int]
    confidence: Sequence[float] = ()
    accuracy: Sequence[float] = ()


class Effect(NamedTuple):
    """How the prediction changes with one column alone, the others kept as in a sample of rows."""

    feature: str
    kind: Literal["number", "text"]
    values: Sequence[float] | Sequence[str]  # of the column
    mean: Sequence[Sequence[float]]  # [lines][values]: prediction, or probability of a class
    low: Sequence[Sequence[float]]  # the 90 % band over the particles
    high: Sequence[Sequence[float]]
    strength: float  # standard deviation of the prediction over the rows' own values
    lines: Sequence[str] = ("",)  # the classes whose probability is shown; one empty name for a regression
    seen: Sequence[float] = ()  # a number's deciles: where the rows are
    missing: Sequence[tuple[float, float, float]] = ()  # a line's mean, low and high where the number is missing


class Coefficient(NamedTuple):
    """A linear model's weight, with its 90 % interval."""

    name: str
    mean: float
    low: float
    high: float


class Projection(NamedTuple):
    """The particles in the plane that shows most of how they differ."""

    points: Sequence[tuple[float, float]]  # [n]
    explained: tuple[float, float]  # share of all differences along each axis
    weights: Sequence[float]  # [n]: of the particles in predictions, adding up to 1
    groups: Sequence[str]  # [n]: what kind of particle it is
    coefficients: Sequence[Coefficient] = ()  # of a linear model
    unit: str = ""  # what a coefficient is the change of


class ColumnTold(NamedTuple):
    """Statistics of a column of the source."""

    name: str
    kind: str
    inputs: int  # numbers that it became
    gaps: float  # share of the rows
    moved: float  # recent mean against that of the first rows, in their standard deviations; NaN: not known


class Contents(NamedTuple):
    """Everything a page says about a run."""

    title: str
    task: Literal["regression", "classification"]
    target: str
    classes: Sequence[str]
    rows: int  # learnt
    rejected: Mapping[str, int]  # rows by the reason
    filled: int  # missing values filled in
    finished: bool
    total: Stretch  # over all rows
    baseline: float  # error of predicting the mean so far, or the most frequent label so far
    curve: Sequence[Stretch]
    calibration: Histogram
    figures: Mapping[str, object] = {}  # mae, r2, auc, confusion: those there are
    columns: Sequence[ColumnTold] = ()
    alarms: Sequence[int] = ()  # rows at which the drift alarm sounded
    probability: float | None = None  # that the data have jumped by now
    effects: Sequence[Effect] = ()
    posterior: Projection | None = None
    settings: Mapping[str, str] = {}
    versions: Mapping[str, str] = {}
    command: str = ""  # that resumes the run
    notes: Sequence[str] = ()


def calibration_error(bins: Histogram) -> float:
    """Return the mean distance between confidence and accuracy, over all rows (ECE)."""
    counts = np.asarray(bins.counts, float)
    gap = np.abs(np.asarray(bins.confidence, float) - np.asarray(bins.accuracy, float))
    return float((counts * np.nan_to_num(gap)).sum() / counts.sum()) if counts.sum() > 0 else np.nan


def interval_coverage(bins: Histogram) -> tuple[list[float], list[float]]:
    """Return the levels of central intervals (90 %, 80 %, …) and the share of rows inside each."""
    counts = np.asarray(bins.counts, float)
    total, half = counts.sum(), len(counts) // 2
    cuts = range(half - 1, 0, -1)
    promised = [1 - 2 * cut / len(counts) for cut in cuts]
    return promised, [float(counts[cut:-cut].sum() / total) if total > 0 else np.nan for cut in cuts]


def so_far(curve: Sequence[Stretch], *, squared: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return error and loss over all rows up to the end of each stretch; root mean squared errors if `squared`."""
    counts = np.array([s.count for s in curve], float)
    power = 2 if squared else 1

    def average(values: np.ndarray) -> np.ndarray:
        known = np.isfinite(values)
        weight = np.cumsum(np.where(known, counts, 0))
        total = np.cumsum(np.where(known, values, 0) * counts)
        return np.divide(total, weight, out=np.full(len(counts), np.nan), where=weight > 0)

    error = average(np.array([s.error for s in curve], float) ** power) ** (1 / power)
    return error, average(np.array([s.loss for s in curve], float))


def noise_limits(total: float, share: float) -> tuple[float, float]:
    """Return the range of counts into which a bin with this expected share falls 19 times out of 20 by chance."""
    from scipy.special import bdtrik  # only a page needs it, a run does not

    tail = (1 - NOISE) / 2
    low, high = (float(bdtrik(q, total, share)) for q in (tail, 1 - tail))
    return max(0.0, math.floor(low)) if math.isfinite(low) else 0.0, math.ceil(high) if math.isfinite(high) else total
