"""Other measures of a posterior that might have flagged bad draws; `benchmarks.diagnosis` says whether they would."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from opvi import posterior
from opvi.filters import _measures
from opvi.posterior import unevenness as unevenness

Density = Callable[[jax.Array], jax.Array]
POINTS = 300  # draws whose pairs are looked at


def pareto_k(log_weights: np.ndarray) -> float:
    """Return the shape of a generalised Pareto distribution fitted to the largest weights."""
    return float(posterior.pareto_k(np.asarray(log_weights, float)[:, None])[0])


def stein_discrepancy(log_density: Density, draws: np.ndarray) -> float:
    """Return a kernel Stein discrepancy in standard errors."""
    x = draws[:: max(1, len(draws) // POINTS)][:POINTS]
    score = np.asarray(jax.jit(jax.vmap(jax.grad(log_density)))(jnp.asarray(x, jnp.float32)), float)
    return _measures.stein_discrepancy(x, score)


def separation(good: list[float], bad: list[float]) -> float:
    """Return the share of pairs in which the bad case has the larger value: 1/2 says nothing."""
    pairs = np.array(bad)[:, None] - np.array(good)[None]
    return float((pairs > 0).mean() + (pairs == 0).mean() / 2) if pairs.size else float("nan")
