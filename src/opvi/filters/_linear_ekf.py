r"""Softmax regression tracked by an extended Kalman filter with drifting weights, for streams that drift."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._factors import diagonal
from opvi._forks import Unforked
from opvi._steps import StepInfo, compiled, pieces, predicted_rows, root_mean_square, tick
from opvi.filters import _kalman as kalman
from opvi.filters._covariance import Covariance, exactly
from opvi.filters._kfac import with_one
from opvi.filters._robust import checked_robust, trust_in_labels
from opvi.predictive import Categorical, Predictive
from opvi.targets import cast
from opvi.types import Array, ArrayLike, Batch, Key, Particles, Start

ROUND = 20  # rows that `wandering` refers to
PIECE = 5  # rows absorbed at once: fast weights change within a batch, and so does the curvature
PROBIT = math.pi / 8  # a logistic function is nearly a normal distribution function of this scale


class LinearState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles  # [n, C·(F+1)]: one filter each
    covariance: Array  # [n, C·(F+1), C·(F+1)]
    round: Array
    rows: Array


@dataclass(frozen=True)
class LinearEKF(Unforked):
    """Settings of `linear_ekf`."""

    features: int
    classes: int
    wandering: tuple[float, ...]
    prior_variance: float
    largest_variance: float
    largest_change: float
    robust: float | None = field(default=None, kw_only=True)
    about: str = field(default="", kw_only=True, compare=False)  # one line: what was chosen, and why

    def init(self, key: Key, particles: Start = None) -> LinearState:
        """Return the state before any row. There is one filter for each rate; `particles` is ignored."""
        w = jnp.zeros((len(self.wandering), self.classes * (self.features + 1)))
        zero = jnp.zeros((), jnp.int32)
        covariance = jnp.tile(self.prior_variance * jnp.eye(w.shape[1], dtype=w.dtype)[None], (len(w), 1, 1))
        return LinearState(w, covariance, zero, zero)

    @compiled
    @exactly
    def step(self, key: Key, state: LinearState, batch: Batch) -> tuple[LinearState, StepInfo]:
        """Learn from a batch."""
        w, P = state.particles, state.covariance
        batch = cast(batch, w.dtype)
        clock = tick(state, batch)
        x, y = batch.data
        log_predictive, predicted = predicted_rows(batch, predict_linear(state, x, self.classes).log_density(y))

        def one(carry: tuple[Array, Array], piece: tuple[tuple[Array, ...], Array]) -> tuple[tuple[Array, Array], None]:
            (a, y, trust), rows = piece
            return _absorb(self, *carry, a, y, rows * trust, rows.sum()), None

        weight = batch.weight
        trust = jnp.ones_like(weight)
        if self.robust is not None:
            trust = trust_in_labels(predicted.log_density, self.robust)
        cut = pieces((with_one(x), y, trust), weight, min(PIECE, len(weight)))
        (new_w, new_P), _ = jax.lax.scan(one, (w, P), cut)
        # No covariance is larger than the variances that belong to it, so these show whether all are finite.
        variance = diagonal(new_P)
        good = jnp.isfinite(new_w.sum(1) + variance.sum(1)) & ~jnp.isnan(log_predictive)
        move = jnp.where(good[:, None], new_w - w, 0)
        P = jnp.where(good[:, None, None], _bounded(new_P, variance, self.largest_variance), P)
        info = StepInfo(clock.rows, log_predictive, root_mean_square(move), good.all(), predicted)
        return LinearState(w + move, P, clock.round, clock.rows), info

    def predict(self, state: LinearState, x: ArrayLike) -> Predictive:
        """Return the equal-weight mixture of the filters' predictions at inputs x."""
        return Predictive(predict_linear(state, jnp.asarray(x, state.particles.dtype), self.classes))


def linear_ekf(
    features: int,
    classes: int,
    *,
    wandering: float | Sequence[float] = 1e-3,
    prior_variance: float = 0.1,
    largest_variance: float = 1.0,
    largest_change: float = 0.2,
    robust: float | None = None,
) -> LinearEKF:
    r"""Extended Kalman filters of softmax regression, one for each rate at which the weights may drift.

    $$w_t = w_{t-1} + N(0, qI), \qquad P(y = c) = \mathrm{softmax}(W x)_c$$

    `init` takes no particles: there is one filter for each q. Batches are pairs `(X, y)`, with X standardised.

    Args:
        features: columns of X.
        classes: number of classes.
        wandering: q, the variance that each weight gains in 20 rows, or several; 0 never forgets.
        prior_variance: the variance of each weight before any row.
        largest_variance: the drift stops here, so that the weight of a feature never seen does not grow without bound.
        largest_change: bound on the mean KL divergence between predictions before and after a step.
        robust: None believes every label. A number c: a label predicted with probability p, $r^2 = (1-p)/p$, counts
            $(c/r)^2$ where r is larger than c, so that wrong labels teach little; 10 is for labels below 1 %.
    """
    if features < 1 or classes < 2:
        raise ValueError(f"`features` and `classes` are {features} and {classes}; at least 1 and 2 are needed.")
    paces = (float(wandering),) if isinstance(wandering, float | int) else tuple(map(float, wandering))
    if not paces or not min(paces) >= 0 or not prior_variance > 0 or not largest_change > 0:
        raise ValueError(
            f"`wandering`, `prior_variance` and `largest_change` are {wandering}, {prior_variance}, {largest_change}; "
            "the first must be at least 0, the others greater than 0."
        )
    robust = checked_robust(robust)
    return LinearEKF(features, classes, paces, prior_variance, largest_variance, largest_change, robust=robust)


def _absorb(
    sampler: LinearEKF, w: Array, P: Array, a: Array, y: Array, weight: Array, rows: Array
) -> tuple[Array, Array]:
    """Return the filters' weights and covariances after some rows with inputs a `[B, F+1]`; they wander by the rows."""
    n, size = w.shape
    logits = jnp.einsum("bi,nci->nbc", a, w.reshape(n, sampler.classes, -1))
    slope, root = jax.vmap(lambda z: Categorical(z).curvature(y))(logits)  # [n, B, C], [n, B, C, K]
    root = root * jnp.sqrt(weight)[None, :, None, None]
    A = (root.swapaxes(2, 3)[..., None] * a[None, :, None, None, :]).reshape(n, 1, -1, size)
    score = jnp.einsum("nbc,bi->nci", slope * weight[None, :, None], a).reshape(n, 1, size)
    product = kalman.times(jnp.concatenate([A, score[:, :, None]], 2), Covariance(P[:, None], jnp.zeros((), int)))
    new = kalman.gain(A, product[:, :, :-1])
    move = kalman.move_by_score(new, score, product[:, :, -1])[:, 0]
    total = weight.sum()
    moved = (jnp.einsum("nrd,nd->nr", A[:, 0], move) ** 2).sum(1)
    scale = jnp.minimum(1, jnp.sqrt(sampler.largest_change * jnp.maximum(total, 1e-30) / (0.5 * moved + 1e-9)))
    Z = new.rows[:, 0]
    gained = jnp.asarray(sampler.wandering, P.dtype)[:, None, None] * rows / ROUND * jnp.eye(size, dtype=P.dtype)[None]
    # Not `kalman.absorb`: weights that wander gain variance, all alike, where forgetting scales it up.
    return w + scale[:, None] * move, P - jnp.einsum("nrd,nre->nde", Z, Z) + gained


def _bounded(P: Array, variance: Array, largest: float) -> Array:
    """Return the covariances symmetric, with no variance above the largest."""
    shrink = jnp.sqrt(jnp.minimum(1, largest / jnp.maximum(variance, 1e-30)))
    return (P + P.mT) / 2 * shrink[:, :, None] * shrink[:, None, :]


@exactly
def predict_linear(state: LinearState, x: Array, classes: int) -> Categorical:
    r"""Return each filter's class probabilities, `[n, B, C]`, with its own uncertainty: $z / \sqrt{1 + \pi v / 8}$."""
    a = with_one(x)
    rows, width = a.shape

    def one(w: Array, P: Array) -> Array:
        logits = a @ w.reshape(classes, width).T
        half = (P.reshape(-1, width) @ a.T).reshape(classes, width, classes, rows)  # in P's order: nothing is copied
        covariance = jnp.moveaxis((half * a.T[None, :, None]).sum(1), -1, 0)
        # Only differences between logits count: the variance of each one's distance from their mean.
        own = diagonal(covariance) - 2 * covariance.mean(2) + covariance.mean((1, 2))[:, None]
        centred = logits - logits.mean(1, keepdims=True)
        return centred * jax.lax.rsqrt(1 + PROBIT * jnp.maximum(own, 0) * classes / (classes - 1))

    return Categorical(jax.vmap(one)(state.particles, state.covariance))
