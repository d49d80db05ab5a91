"""What draws say about themselves: weights that leave a row out, Stein's identity, predictions of rows."""

import math
from typing import NamedTuple

import numpy as np

from opvi.posterior import pareto_k, unevenness
from opvi.types import Array


class AtDraws(NamedTuple):
    """The density that is tracked, and the rows that are stored, as draws see them."""

    score: Array  # [n, d]
    rows: Array | None  # [n, memory_rows]: log likelihoods of the rows stored; None where none are
    below: Array | None  # [memory_rows]: P(Y ≤ y); None where there is no such thing
    stored: Array | None  # [memory_rows]: whether there is a row


SUSPECTS = 16  # rows whose log likelihoods vary most over draws: the others' weights have no longer tails


def measured(draws: Array, there: AtDraws) -> dict[str, float]:
    """Return Stein's discrepancy, the largest Pareto k of a row stored, and how uneven predictions of rows are."""
    found = {"stein": stein_discrepancy(np.asarray(draws, float), np.asarray(there.score, float))}
    stored = np.asarray(there.stored) if there.stored is not None else np.zeros(0, bool)
    if there.rows is not None and stored.any():
        rows = np.asarray(there.rows, float)[:, stored]
        rows = rows[:, np.argsort(-rows.var(0), kind="stable")[:SUSPECTS]]
        found["pareto"] = float(pareto_k(-rows).max()) if np.isfinite(rows).all() else math.nan
    if there.below is not None and stored.any():
        found["uneven"] = unevenness(np.asarray(there.below, float)[stored])
    return found


def stein_discrepancy(x: np.ndarray, score: np.ndarray) -> float:
    """Return a kernel Stein discrepancy in standard errors: inverse multiquadric, in whitened coordinates.

    Args:
        x: draws, `[n, d]`.
        score: gradients there of the log density that they should be from.
    """
    n, d = x.shape
    if not (np.isfinite(x).all() and np.isfinite(score).all()):
        return math.nan
    cov = np.cov(x.T).reshape(d, d)
    root = np.linalg.cholesky(cov + 1e-9 * np.diag(np.diag(cov)) + np.finfo(float).tiny ** 0.5 * np.eye(d))
    score = score @ root
    u = np.linalg.solve(root, (x - x.mean(0)).T).T
    size = (u**2).sum(1)
    base = 1 + np.maximum(size[:, None] + size[None] - 2 * u @ u.T, 0)
    own = (score * u).sum(1)
    apart = own[:, None] + own[None] - score @ u.T - u @ score.T
    k = (score @ score.T + (apart + d - 3 * (base - 1) / base) / base) / np.sqrt(base)
    pairs = k[~np.eye(n, dtype=bool)]
    return float(pairs.mean() / max(pairs.std(), np.finfo(float).tiny) * np.sqrt(n * (n - 1) / 2))
