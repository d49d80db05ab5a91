"""Whether draws have the density that they should be from: Stein's identity."""

import math

import numpy as np


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
