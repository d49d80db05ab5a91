r"""Distances that follow what a model has learnt: directions in which its output does not move count little.

$$d(a, b)^2 = (a - b)^\top G^{3/4} (a - b), \qquad G = \operatorname{mean} \nabla f \nabla f^\top$$

over the gradients of recent rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.tracking._mixing._members import USUAL_ROWS
from opvi.tracking._placed import placed
from opvi.types import Array, Scalar

POWER = 0.75
FLATTEST = 1e-4  # of the eigenvalues, as a share of their mean
WIDEST = 64  # columns whose directions are told apart; of more, each column by itself
MEMORY = 0.995  # of the gradients, for 20 rows; at first all count alike
EVERY = 16  # batches of the usual size: how often the root is taken anew, after as many at first


class Metric(NamedTuple):
    """The gradients remembered, and the linear map after which distances are Euclidean."""

    slopes: Array  # [F, F], or [F] of many columns: running mean of outer products, of squares
    root: Array  # in the same form
    rounds: Scalar  # batches of the usual size


def start(features: int, dtype: jnp.dtype) -> Metric:
    """Return the Euclidean metric."""
    flat = jnp.eye(features, dtype=dtype) if features <= WIDEST else jnp.ones(features, dtype)
    return Metric(jnp.zeros_like(flat), flat, jnp.zeros((), dtype))


def through(metric: Metric, z: Array) -> Array:
    """Map rows so that Euclidean distances are those of the metric; missing values are put at the mean."""
    z = jnp.where(jnp.isnan(z), 0, z)
    return jnp.matmul(z, metric.root, precision="highest") if metric.root.ndim == 2 else z * metric.root[None]


def update(metric: Metric, slope: Array, weight: Array) -> Metric:
    """Return the metric after a batch with gradients `[B, F]`."""
    total = weight.sum()
    rounds = metric.rounds + total / USUAL_ROWS
    gain = 1 - jnp.minimum(MEMORY, metric.rounds / (1 + metric.rounds)) ** (total / USUAL_ROWS)
    by = slope * (weight / jnp.maximum(total, 1e-30))[:, None]
    outer = jnp.matmul(by.T, slope, precision="highest") if metric.slopes.ndim == 2 else (by * slope).sum(0)
    slopes = metric.slopes + gain * (outer - metric.slopes)
    good = (total > 0) & jnp.isfinite(slopes).all()
    slopes = jnp.where(good, slopes, metric.slopes)
    due = (rounds <= EVERY) | (jnp.floor(rounds / EVERY) > jnp.floor(metric.rounds / EVERY))
    root = jax.lax.cond(good & due, _root, lambda _: metric.root, slopes)
    return Metric(slopes, root, jnp.where(good, rounds, metric.rounds))


def begun_again(metric: Metric, due: Array) -> Metric:
    """Return the metric of networks that begin again if `due`: their next gradients count as much as all before."""
    return metric._replace(rounds=jnp.where(due, jnp.minimum(metric.rounds, 1), metric.rounds))


def rescale(metric: Metric, ratio: Array) -> Metric:
    """Return the metric after columns are measured in units `ratio` times as large, `[F]`."""
    slopes = metric.slopes * (ratio[:, None] * ratio[None] if metric.slopes.ndim == 2 else ratio**2)
    return metric._replace(slopes=slopes, root=jnp.where(metric.rounds > 0, _root(slopes), metric.root))


def widen(metric: Metric, fresh: Metric) -> Metric:
    """Return the metric of more columns, the new ones as in a fresh one."""
    columns = np.s_[: len(metric.root)]
    parts = np.asarray(metric.slopes), np.asarray(metric.root)
    if fresh.root.ndim == 1:  # of many columns, each by itself
        parts = tuple(np.diagonal(a) if a.ndim == 2 else a for a in parts)  # type: ignore[assignment]
    slopes, root = parts
    where = columns if fresh.root.ndim == 1 else (columns, columns)
    return metric._replace(slopes=placed(fresh.slopes, where, slopes), root=placed(fresh.root, where, root))


def _root(slopes: Array) -> Array:
    """Return the square root of the slopes' power."""
    if slopes.ndim == 1:
        size = slopes + FLATTEST * slopes.mean() + 1e-30
        return (size / size.mean()) ** (POWER / 2)
    value, vector = jnp.linalg.eigh(slopes)
    value = jnp.maximum(value, 0) + FLATTEST * jnp.trace(slopes) / len(slopes) + 1e-30
    size = (value / value.mean()) ** (POWER / 2)
    return jnp.matmul(vector * size[None], vector.T, precision="highest")
