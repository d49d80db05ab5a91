r"""Importance weights whose largest ones are smoothed by a generalised Pareto distribution (PSIS)."""

from typing import NamedTuple

import numpy as np

TAIL_SHARE, TAIL_ROOT = 0.2, 3.0  # the tail has at most a fifth of the weights, and at most 3 √n of them
STRENGTH = 10  # draws that the prior of a tail's shape counts as


class Smoothed(NamedTuple):
    """Importance weights, the largest of them smoothed."""

    log_weights: np.ndarray  # [n, m]: of each set, exp sums to 1
    k: np.ndarray  # [m]: the shape of each tail; above 0.7 what is averaged with these weights is not reliable


def pareto_k(log_weights: np.ndarray) -> np.ndarray:
    """Return the shapes of generalised Pareto distributions fitted to the largest weights (Zhang, Stephens, 2009).

    Args:
        log_weights: `[n, m]`, of m sets of weights.

    Returns:
        `[m]`; -inf for weights that are all the same.
    """
    log_weights = np.sort(np.asarray(log_weights, float), axis=0)
    return _fitted(log_weights - log_weights[-1])[0]


def smooth_weights(log_weights: np.ndarray) -> Smoothed:
    """Return Pareto-smoothed importance weights (Vehtari, Simpson, Gelman, Yao, Gabry, 2024).

    The largest weights are replaced by the quantiles of the distribution that is fitted to them, so that no single draw
    decides.

    Args:
        log_weights: `[n, m]`, of m sets of weights.
    """
    log_weights = np.asarray(log_weights, float)
    order = np.argsort(log_weights, axis=0, kind="stable")
    sorted_ = np.take_along_axis(log_weights, order, 0)
    sorted_ = sorted_ - sorted_[-1]
    k, scale, tail = _fitted(sorted_)
    level = (np.arange(tail) + 0.5)[:, None] / tail
    with np.errstate(all="ignore"):
        quantile = scale * np.expm1(-k * np.log1p(-level)) / k
        smooth = np.minimum(np.log(quantile + np.exp(sorted_[-tail - 1])), 0)
    sorted_[-tail:] = np.where(np.isfinite(smooth), smooth, sorted_[-tail:])
    out = np.empty_like(sorted_)
    np.put_along_axis(out, order, sorted_, 0)
    return Smoothed(out - np.log(np.exp(out).sum(0)), k)


def _fitted(log_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Return shapes and scales of the tails of sorted weights, the largest of them 1, and how long the tails are."""
    n = len(log_weights)
    tail = max(1, int(np.ceil(min(TAIL_SHARE * n, TAIL_ROOT * np.sqrt(n)))))
    x = np.exp(log_weights[-tail:]) - np.exp(log_weights[-tail - 1])
    quarter = max(0, int(tail / 4 + 0.5) - 1)
    differ = (x[-1] > 0) & (x[quarter] > 0)
    x = np.where(differ, x, np.arange(1, tail + 1)[:, None] / tail)  # [tail, m]
    m = 30 + int(np.sqrt(tail))
    theta = 1 / x[-1] + (1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5)))[:, None] / (3 * x[quarter])
    k = np.log1p(-theta[:, None] * x).mean(1)
    profile = tail * (np.log(-theta / k) - k - 1)
    weight = 1 / np.exp(np.minimum(profile[None] - profile[:, None], 700)).sum(1)
    theta = (theta * weight).sum(0)
    k = np.log1p(-theta * x).mean(0)
    scale = np.where(differ, -k / theta, np.nan)
    # A weak prior around 1/2.
    return np.where(differ, (tail * k + STRENGTH / 2) / (tail + STRENGTH), -np.inf), scale, tail
