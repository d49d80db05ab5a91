"""Measures of a run: errors, log scores, calibration in windows, recovery after a change, distance to a posterior."""

from typing import Any

import numpy as np
from scipy.stats import wasserstein_distance

LEVEL = 0.9  # of the interval whose coverage is counted
WINDOW = 200  # rows in which coverage is counted, and that a change is given
POINTS = 25  # of a curve
FLOOR = 1e-3  # of the probability is spread over all classes, whatever the method says

LESS = "less is better"
MORE = "more is better"
# What a measure means, and which way is better; `cost` measures are shown apart.
MEASURES = {
    "error": ("root mean squared error, or the share of wrong labels", LESS),
    "log score": ("mean log density or log probability of what came, in nats per row", MORE),
    "crps": ("continuous ranked probability score; for classes Brier's", LESS),
    "coverage gap": ("distance of the 90 % interval's coverage from 0.9; for classes the calibration error", LESS),
    "coverage gap, worst window": ("the same in the worst 200 rows", LESS),
    "recovery": ("nats per row lost in the 200 rows after a change, against the 200 before", LESS),
    "regret": ("nats per row behind the method that was best on this stream in hindsight", LESS),
    "distance": ("to the exact posterior: Wasserstein distance of the marginals in its standard deviations", LESS),
    "ms per row": ("processor milliseconds to predict and learn a row", LESS),
    "first answer": (
        "processor seconds from making the method to its first informed prediction, in a new process",
        LESS,
    ),
    "bytes": ("of the pickled state at the end", LESS),
}
COSTS = ("ms per row", "first answer", "bytes")


def floored(p: np.ndarray) -> np.ndarray:
    """Return probabilities bounded away from 0, so that one wrong row cannot decide a stream."""
    return (1 - FLOOR) * p + FLOOR / p.shape[1]


def class_losses(p: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Return each row's error, log probability, Brier score and confidence."""
    p = floored(p)
    hot = np.eye(p.shape[1])[y]
    return {
        "wrong": (p.argmax(1) != y).astype(float),
        "log": np.log(p[np.arange(len(y)), y]),
        "crps": ((p - hot) ** 2).sum(1),
        "confidence": p.max(1),
    }


def number_losses(said: Any, y: np.ndarray) -> dict[str, np.ndarray]:
    """Return each row's squared error, log density, CRPS, and whether the 90 % interval covers it."""
    level = said.cdf(y)
    return {
        "square": (said.point() - y) ** 2,
        "log": said.log_density(y),
        "crps": said.crps(y),
        "inside": (np.abs(level - 0.5) <= LEVEL / 2).astype(float),
    }


def calibration_error(confidence: np.ndarray, right: np.ndarray, bins: int = 15) -> float:
    """Return the gap between confidence and accuracy over bins of confidence, weighted by rows."""
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(index, confidence - right, bins)).sum() / len(right))


def summary(losses: dict[str, np.ndarray], counted: np.ndarray, changes: tuple[int, ...] = ()) -> dict[str, float]:
    """Return the measures over the rows that count.

    Args:
        losses: from `class_losses` or `number_losses`, one number per row of the stream.
        counted: which rows count; the first ones and garbage do not.
        changes: rows at which the stream changed.
    """
    kept = {name: values[counted] for name, values in losses.items()}
    windows = [slice(start, start + WINDOW) for start in range(0, max(len(kept["log"]) - WINDOW, 0) + 1, WINDOW)]
    if "square" in kept:
        error, covered = float(np.sqrt(kept["square"].mean())), kept["inside"]
        gap = abs(float(covered.mean()) - LEVEL)
        worst = max(abs(float(covered[part].mean()) - LEVEL) for part in windows)
    else:
        right = 1 - kept["wrong"]
        error, gap = float(kept["wrong"].mean()), calibration_error(kept["confidence"], right)
        worst = max(abs(float((kept["confidence"] - right)[part].mean())) for part in windows)
    found = {"error": error, "log score": float(kept["log"].mean()), "crps": float(kept["crps"].mean())}
    found |= {"coverage gap": gap, "coverage gap, worst window": worst}
    if changes:
        found["recovery"] = recovery(losses["log"], changes)
    return found


def recovery(log: np.ndarray, changes: tuple[int, ...]) -> float:
    """Return the mean log score in the rows before each change minus that in the rows after it."""
    lost = [log[max(at - WINDOW, 0) : at].mean() - log[at : at + WINDOW].mean() for at in changes]
    return float(np.mean(lost))


def curve(log: np.ndarray, counted: np.ndarray) -> tuple[list[int], list[float]]:
    """Return row numbers, and the mean log score between consecutive ones."""
    rows = np.flatnonzero(counted)
    parts = [part for part in np.array_split(rows, min(POINTS, len(rows))) if len(part)]
    return [int(part[-1]) + 1 for part in parts], [round(float(log[part].mean()), 4) for part in parts]


def distance(draws: np.ndarray, exact: np.ndarray) -> float:
    """Return the mean over parameters of the marginal Wasserstein distance, in the posterior's standard deviations."""
    columns = zip(draws.T, exact.T, strict=True)
    return float(np.mean([wasserstein_distance(found, true) / true.std() for found, true in columns]))


def best_in_hindsight(log_scores: dict[str, float]) -> dict[str, float]:
    """Return how far each method's log score is behind the best one's."""
    best = max(log_scores.values())
    return {name: best - value for name, value in log_scores.items()}
