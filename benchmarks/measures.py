"""Other measures of a posterior that might have flagged bad draws; `benchmarks.diagnosis` says whether they would."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Density = Callable[[jax.Array], jax.Array]
POINTS = 300  # draws whose pairs are looked at


def pareto_k(log_weights: np.ndarray) -> float:
    """Return the shape of a generalised Pareto distribution fitted to the largest weights (Zhang, Stephens, 2009)."""
    log_weights = np.sort(np.asarray(log_weights, float))
    n = len(log_weights)
    tail = int(min(0.2 * n, 3 * np.sqrt(n)))
    x = np.exp(log_weights[-tail:] - log_weights[-1]) - np.exp(log_weights[-tail - 1] - log_weights[-1])
    if not x[-1] > 0:
        return -np.inf
    m = 30 + int(np.sqrt(tail))
    theta = 1 / x[-1] + (1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5))) / (3 * x[int(tail / 4 + 0.5) - 1])
    k = np.log1p(-theta[:, None] * x).mean(1)
    profile = tail * (np.log(-theta / k) - k - 1)
    weight = 1 / np.exp(profile[None] - profile[:, None]).sum(1)
    mean = (theta * weight).sum()
    k = np.log1p(-mean * x).mean()
    return float((tail * k + 10 * 0.5) / (tail + 10))  # a weak prior, as in Pareto-smoothed importance sampling


def stein_discrepancy(log_density: Density, draws: np.ndarray) -> float:
    """Return a kernel Stein discrepancy in standard errors: inverse multiquadric, in whitened coordinates."""
    x = draws[:: max(1, len(draws) // POINTS)][:POINTS]
    n, d = x.shape
    root = np.linalg.cholesky(np.cov(draws.T).reshape(d, d) + 1e-9 * np.eye(d))
    score = np.asarray(jax.jit(jax.vmap(jax.grad(log_density)))(jnp.asarray(x, jnp.float32)), float) @ root
    u = np.linalg.solve(root, (x - draws.mean(0)).T).T
    between = u[:, None] - u[None]
    base = 1 + (between**2).sum(-1)
    apart = ((score[:, None] - score[None]) * between).sum(-1)
    k = base**-0.5 * (score @ score.T) + base**-1.5 * (apart + d) - 3 * base**-2.5 * (base - 1)
    pairs = k[~np.eye(n, dtype=bool)]
    return float(pairs.mean() / pairs.std() * np.sqrt(n * (n - 1) / 2))


def uneven(pit: np.ndarray) -> float:
    """Return how far probability integral transforms are from uniform: Kolmogorov's distance times √rows."""
    pit = np.sort(pit)
    rank = np.arange(len(pit) + 1) / len(pit)
    return float(max((rank[1:] - pit).max(), (pit - rank[:-1]).max()) * np.sqrt(len(pit)))


def separation(good: list[float], bad: list[float]) -> float:
    """Return the share of pairs in which the bad case has the larger value: 1/2 says nothing."""
    pairs = np.array(bad)[:, None] - np.array(good)[None]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2) if pairs.size else float("nan")
