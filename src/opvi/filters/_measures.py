"""What draws say about themselves: weights that leave a row out, Stein's identity, predictions of rows."""

import math

import numpy as np

STRENGTH = 10  # draws that the prior of a tail's shape counts as


def pareto_k(log_weights: np.ndarray) -> np.ndarray:
    """Return the shapes of generalised Pareto distributions fitted to the largest weights (Zhang, Stephens, 2009).

    Args:
        log_weights: `[n, m]`, of m sets of weights.

    Returns:
        `[m]`; -inf for weights that are all the same.
    """
    log_weights = np.sort(np.asarray(log_weights, float), axis=0)
    n = len(log_weights)
    tail = int(min(0.2 * n, 3 * np.sqrt(n)))
    x = np.exp(log_weights[-tail:] - log_weights[-1]) - np.exp(log_weights[-tail - 1] - log_weights[-1])
    uneven = (x[-1] > 0) & (x[int(tail / 4 + 0.5) - 1] > 0)
    x = np.where(uneven, x, np.arange(1, tail + 1)[:, None] / tail)  # [tail, m]
    m = 30 + int(np.sqrt(tail))
    theta = 1 / x[-1] + (1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5)))[:, None] / (3 * x[int(tail / 4 + 0.5) - 1])
    k = np.log1p(-theta[:, None] * x).mean(1)
    profile = tail * (np.log(-theta / k) - k - 1)
    weight = 1 / np.exp(np.minimum(profile[None] - profile[:, None], 700)).sum(1)
    k = np.log1p(-(theta * weight).sum(0) * x).mean(0)
    # A weak prior around 1/2, as in Pareto-smoothed importance sampling.
    return np.where(uneven, (tail * k + STRENGTH / 2) / (tail + STRENGTH), -np.inf)


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


def uneven(pit: np.ndarray) -> float:
    """Return how far probability integral transforms are from uniform: Kolmogorov's distance times √rows."""
    pit = np.sort(pit)
    rank = np.arange(len(pit) + 1) / len(pit)
    return float(max((rank[1:] - pit).max(), (pit - rank[:-1]).max()) * np.sqrt(len(pit)))
