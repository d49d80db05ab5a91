r"""Probability integral transforms: whether rows look like what a model predicts of them."""

import math
from typing import NamedTuple

import numpy as np

from opvi.posterior._pareto import smooth_weights

COVERAGE = 0.9
LARGEST_UNEVENNESS = 2.0  # Kolmogorov's distance · √rows: by chance, one in 1,500 is larger
SURE = 3.0  # standard errors
LARGEST_DISTANCE = 0.04  # a smaller one shows in many rows, and matters to few questions


class Calibration(NamedTuple):
    """Rows beside what the model, without the row itself, predicts of each."""

    uneven: float  # Kolmogorov's distance · √rows of P(Y ≤ y) from uniform
    inside: float  # share of the rows inside their 90 % intervals
    spread: (
        float  # of P(Y ≤ y) around 1/2, mean square, beside that of uniform ones: above 1, predictions are too narrow
    )
    rows: int


def unevenness(below: np.ndarray, before: np.ndarray | None = None) -> float:
    r"""Return how far probability integral transforms are from uniform: Kolmogorov's distance times √rows.

    A count's transform is spread evenly between P(Y < y) and P(Y ≤ y) (Czado, Gneiting, Held, 2009).

    Args:
        below: P(Y ≤ y) of each row, `[rows]`.
        before: P(Y < y) of each row; the same, for continuous y, if omitted.
    """
    high = np.asarray(below, float)
    low = high if before is None else np.asarray(before, float)
    if not len(high) or not np.isfinite(high + low).all():
        return math.nan
    # The mean of rows' distribution functions is linear between the places at which one of them begins or ends.
    places = np.unique(np.concatenate([low, high]))
    width = high - low
    steps = width <= 0
    order = np.sort(high[steps])
    smooth_low, smooth_width = low[~steps], width[~steps]
    most = 0.0
    for part in np.array_split(places, max(1, len(places) * len(high) // 10**7)):
        ramps = np.clip((part[:, None] - smooth_low) / smooth_width, 0, 1).sum(1) if len(smooth_low) else 0.0
        for side in ("left", "right"):
            share = (np.searchsorted(order, part, side) + ramps) / len(high)
            most = max(most, float(np.abs(share - part).max()))
    return most * math.sqrt(len(high))


def calibration_of(log_likelihood: np.ndarray, below: np.ndarray, before: np.ndarray) -> Calibration:
    """Return how rows that were learnt look beside predictions from which each is left out (PSIS-LOO).

    Args:
        log_likelihood: `[n, rows]`, of each row at each draw.
        below: P(Y ≤ y) of each row by each draw, `[n, rows]`.
        before: P(Y < y); for continuous y the same.
    """
    weight = np.exp(smooth_weights(-np.asarray(log_likelihood, float)).log_weights)
    high, low = (weight * np.asarray(below, float)).sum(0), (weight * np.asarray(before, float)).sum(0)
    edge = (1 - COVERAGE) / 2
    inside = float(((high >= edge) & (low <= 1 - edge)).mean())
    spread = 4 * float(((high - 0.5) ** 2 + (high - 0.5) * (low - 0.5) + (low - 0.5) ** 2).mean())
    return Calibration(unevenness(high, low), inside, spread, len(high))


def concerns_of_predictions(found: Calibration) -> list[str]:
    """Return in what way rows do not look like those that the model predicts, and what to do; nothing if they do.

    It is about the model: its posterior may be right all the same.
    """
    if not found.uneven > max(LARGEST_UNEVENNESS, LARGEST_DISTANCE * math.sqrt(found.rows)):
        return []
    away = SURE * 12 / math.sqrt(180 * found.rows)  # (U - 1/2)² has the variance 1/180
    if found.spread > 1 + away:
        what = "its predictions are too narrow"
        remedy = (
            "counts that vary more want a negative binomial, numbers with outliers a Student-t, groups a level each"
        )
    elif found.spread < 1 - away:
        what, remedy = "its predictions are too wide", "the noise is smaller, or less heavy-tailed, than the model says"
    else:
        what, remedy = "its predictions are off", "look at residuals: a term or a transformation is missing"
    return [
        f"the model does not describe the rows: its {COVERAGE:.0%} intervals hold {found.inside:.0%} of {found.rows:,} "
        f"rows (P(Y ≤ y) is {found.uneven / math.sqrt(found.rows):.2f} from uniform), so {what}. This is about the "
        f"model, not about the posterior: {remedy}."
    ]
