r"""Softmax regression tracked by an extended Kalman filter whose weights wander: for streams that drift."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import StepInfo, compiled, log_predictive_of, root_mean_square, tick
from opvi.predictive import Categorical
from opvi.targets import cast
from opvi.types import Algorithm, Array, Batch, Key, Particles

ROUND = 20  # rows that `wandering` refers to
PIECE = 5  # rows absorbed at once: fast weights change within a batch, and so does the curvature
PROBIT = math.pi / 8  # a logistic function is nearly a normal distribution function of this scale


class LinearState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles  # [n, C·(F+1)]: one filter each
    covariance: Array  # [n, C·(F+1), C·(F+1)]
    round: Array
    rows: Array


def linear_ekf(
    features: int,
    classes: int,
    *,
    wandering: float | Sequence[float] = 1e-3,
    prior_variance: float = 0.1,
    largest_variance: float = 1.0,
    largest_change: float = 0.2,
) -> Algorithm:
    r"""Extended Kalman filters of softmax regression, one for each pace at which the weights may wander.

    $$w_t = w_{t-1} + N(0, qI), \qquad P(y = c) = \mathrm{softmax}(W x)_c$$

    `init` takes no particles: there is one filter for each q. Batches are pairs `(X, y)`, with X standardised.

    Args:
        features: columns of X.
        classes: number of classes.
        wandering: q, the variance that each weight gains in 20 rows, or several; 0 never forgets.
        prior_variance: of each weight before any row.
        largest_variance: wandering stops here, so that a feature that is never seen does not grow without bound.
        largest_change: bound on the mean KL divergence between predictions before and after a step.
    """
    if features < 1 or classes < 2:
        raise ValueError(f"`features` and `classes` are {features} and {classes}; at least 1 and 2 are needed.")
    paces = np.atleast_1d(np.asarray(wandering, float))
    if not (paces >= 0).all() or not prior_variance > 0 or not largest_change > 0:
        raise ValueError(
            f"`wandering`, `prior_variance` and `largest_change` are {wandering}, {prior_variance}, {largest_change}; "
            "the first must be at least 0, the others greater than 0."
        )
    width = features + 1
    size = classes * width

    def init(key: Key, particles: Any = None) -> LinearState:
        w = jnp.zeros((len(paces), size))
        zero = jnp.zeros((), jnp.int32)
        covariance = jnp.tile(prior_variance * jnp.eye(size, dtype=w.dtype)[None], (len(w), 1, 1))
        return LinearState(w, covariance, zero, zero)

    def absorb(w: Array, P: Array, a: Array, y: Array, weight: Array, pace: Array) -> tuple[Array, Array]:
        """One filter's move and covariance after a batch with inputs a `[B, F+1]`."""
        dist = Categorical(a @ w.reshape(classes, width).T)
        slope, root = dist.curvature(y)  # [B, C], [B, C, K]
        root = root * jnp.sqrt(weight)[:, None, None]
        J = (root.transpose(0, 2, 1)[:, :, :, None] * a[:, None, None, :]).reshape(-1, size)
        gradient = ((slope * weight[:, None]).T @ a).reshape(-1)
        JP = J @ P
        small = jnp.linalg.cholesky(JP @ J.T + jnp.eye(len(J), dtype=w.dtype))
        Z = jax.scipy.linalg.solve_triangular(small, jnp.eye(len(J), dtype=w.dtype), lower=True) @ JP
        move = P @ gradient
        move = move - Z.T @ (Z @ gradient)
        total = weight.sum()
        moved = J @ move
        scale = jnp.minimum(1, jnp.sqrt(largest_change * jnp.maximum(total, 1e-30) / (0.5 * (moved**2).sum() + 1e-9)))
        return scale * move, P - Z.T @ Z + jnp.diag(jnp.full(size, pace * total / ROUND))

    def bounded(P: Array) -> Array:
        """Symmetric, with no variance above the largest."""
        shrink = jnp.sqrt(jnp.minimum(1, largest_variance / jnp.maximum(jnp.diagonal(P), 1e-30)))
        return (P + P.T) / 2 * shrink[:, None] * shrink[None, :]

    @compiled
    def step(key: Key, state: LinearState, batch: Batch) -> tuple[LinearState, StepInfo]:
        w, P = state.particles, state.covariance
        batch = cast(batch, w.dtype)
        clock = tick(state, batch)
        x, y = batch.data
        log_density = predict_linear(state, x, classes).log_density(y)
        log_predictive = log_predictive_of(log_density, batch)

        def one(carry: tuple[Array, Array], piece: Any) -> tuple[tuple[Array, Array], None]:
            w, P = carry
            a, y, weight = piece
            move, P = jax.vmap(absorb, (0, 0, None, None, None, 0))(w, P, a, y, weight, jnp.asarray(paces, w.dtype))
            return (w + move, P), None

        (new_w, new_P), _ = jax.lax.scan(one, (w, P), _pieces((_with_one(x), y, batch.weight)))
        new_P = jax.vmap(bounded)(new_P)
        good = jnp.isfinite(new_w).all(1) & jnp.isfinite(new_P).all((1, 2)) & ~jnp.isnan(log_predictive)
        move = jnp.where(good[:, None], new_w - w, 0)
        P = jnp.where(good[:, None, None], new_P, P)
        info = StepInfo(clock.rows, log_predictive, root_mean_square(move), good.all())
        return LinearState(w + move, P, clock.round, clock.rows), info

    return Algorithm(init, step)


def predict_linear(state: LinearState, x: Array, classes: int) -> Categorical:
    r"""Each filter's class probabilities, `[n, B, C]`, with its own doubt in them: $z / \sqrt{1 + \pi v / 8}$."""
    a = _with_one(x)
    width = a.shape[1]

    def one(w: Array, P: Array) -> Array:
        logits = a @ w.reshape(classes, width).T
        blocks = P.reshape(classes, width, classes, width)
        covariance = jnp.einsum("bi,ciej,bj->bce", a, blocks, a)
        # Only differences between logits count: the variance of each one's distance from their mean.
        own = jnp.diagonal(covariance, axis1=1, axis2=2) - 2 * covariance.mean(2) + covariance.mean((1, 2))[:, None]
        centred = logits - logits.mean(1, keepdims=True)
        return centred * jax.lax.rsqrt(1 + PROBIT * jnp.maximum(own, 0) * classes / (classes - 1))

    return Categorical(jax.vmap(one)(state.particles, state.covariance))


def _pieces(rows: Any) -> Any:
    """Arrays of rows cut into `[m, 5, …]`, the last piece padded with weight 0."""
    a, y, weight = rows
    size = min(PIECE, len(weight))
    missing = -len(weight) % size

    def cut(rows: Array) -> Array:
        padded = jnp.concatenate([rows, jnp.broadcast_to(rows[:1], (missing, *rows.shape[1:]))]) if missing else rows
        return padded.reshape(-1, size, *rows.shape[1:])

    return cut(a), cut(y), jnp.pad(weight, (0, missing)).reshape(-1, size)


def _with_one(x: Array) -> Array:
    """The inputs with a 1 for the bias."""
    return jnp.concatenate([x, jnp.ones((len(x), 1), x.dtype)], 1)
