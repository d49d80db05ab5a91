r"""The head of a regression: noise, spread and tails of the predictive, learnt by predicting each batch first."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from opvi._factors import diagonal, solve_positive
from opvi.predictive import StudentT
from opvi.tracking._mixing._members import USUAL_ROWS
from opvi.tracking._mixing._quantiles import SURE, squared_quantile
from opvi.tracking._mixing._running import ONE_ROUND, running_mean
from opvi.tracking._placed import placed
from opvi.types import Array, Scalar

SCORE_MEMORY = 0.98  # of the scores of noise, spread and tails; discounts count once for USUAL_ROWS rows
EARLY_MEMORY = 0.25  # at first those scores reach back over this share of the stream
SHAPE_MEMORY = 0.998  # of the regression of the log squared error
ERROR_ROUNDS = 25.0  # over which the squared error is averaged
REACH = 2.0  # no error counts for more than so many of the usual size, in their running mean square
GAUSSIAN_SHARE = 0.9205  # of the mean square of a Gaussian is left by that
COMPONENTS = 64  # of the predictive mixture
STRETCH_MEMORY = 0.933  # of how far errors were off their own predicted size: a half-life of 200 rows
STRETCH_DOUBT = 200.0  # rows that the size predicted counts for
STRETCH_REACH = 6.0  # no squared error counts for more, in units of its predicted size
REACH_SHARE = 0.95  # of the mean square is left by that
DEAD = 0.01  # a smaller change of the logarithm of all sizes is none
LARGEST_STRETCH = 0.5  # of that logarithm
MISSED = 0.1  # of the targets should lie outside of the 90 % interval
MISS_GAIN = (
    0.015  # times 0.9: what each that does adds to the logarithm of all sizes; the others take off a ninth of it
)
MISS_MEMORY = 0.95  # of that sum
LARGEST_MISS = 0.3  # of it

NOISE = np.exp(np.linspace(np.log(0.03), np.log(2.0), 14))  # shares of the running mean squared error
SPREAD = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0])  # multiples of the particles' own variance
TILT = np.array([0.0, 0.5, 1.0])  # how far the variance follows the predicted log squared error
DOF = np.array([4.0, 6.0, 10.0, np.inf])
_GRID = [grid.ravel() for grid in np.meshgrid(DOF, NOISE, SPREAD, TILT, indexing="ij")]


class NumbersState(NamedTuple):
    """What is known about the errors of predictions made before learning. y is standardised."""

    error: Scalar  # running mean squared error of the mean
    rounds: Scalar  # batches of the usual size behind `error`; 0: nothing is known
    scores: Array  # [grid]: discounted log scores
    shape: Array  # [k]: regression of the log squared error
    shape_covariance: Array  # [k, k]
    shape_mean: Scalar  # its running mean prediction
    excess: Scalar  # discounted sum of squared errors in units of their predicted size, less 1 for each
    missed: Scalar  # what targets outside of 90 % intervals add to the logarithm of all sizes


class Combined(NamedTuple):
    """What experts say together: mean, variance and predicted log squared error, row by row."""

    mean: Array
    variance: Array
    log_shape: Array


def start(features: int, dtype: Any) -> NumbersState:
    """Return what is known before any row: nothing; errors may depend on so many features."""
    zero, k = jnp.zeros((), dtype), features + 4
    return NumbersState(
        jnp.ones((), dtype),
        zero,
        jnp.zeros(len(_GRID[0]), dtype),
        jnp.zeros(k, dtype),
        0.1 * jnp.eye(k, dtype=dtype),
        zero,
        zero,
        zero,
    )


def describe(known: NumbersState, mean: Array, variance: Array, features: Array) -> Combined:
    """Return a prediction with the size of its error, which may depend on features `[B, k]`."""
    predicted = _features(known, mean, variance, features) @ known.shape - known.shape_mean
    return Combined(mean, variance, jnp.clip(predicted, -3, 3))


def predictive(known: NumbersState, one: Combined) -> StudentT:
    """Return the predictive mixture, `[COMPONENTS, B]`: settings drawn systematically by their scores."""
    share = jax.nn.softmax(known.scores)
    levels = (jnp.arange(COMPONENTS, dtype=share.dtype) + 0.5) / COMPONENTS
    pick = jnp.searchsorted(jnp.cumsum(share), levels * share.sum()).clip(max=len(share) - 1)
    chosen, wider = _at_settings(known, one, pick), jnp.exp(2 * stretch(known))
    chosen = chosen._replace(variance=wider * chosen.variance, spread=wider * chosen.spread)
    return chosen._replace(dof=jnp.broadcast_to(chosen.dof, chosen.mean.shape))


class Scored(NamedTuple):
    """The scores of every setting on the grid."""

    density: Array  # [grid, B]: log densities
    stretched: Array  # [grid, B]: the same, of what is predicted: all errors larger by one factor
    below: Array  # [grid, B]: P(Y ≤ y) of that


def scored(known: NumbersState, one: Combined, y: Array) -> Scored:
    """Return how every setting scores y, before learning from it."""
    said, more = _at_settings(known, one), stretch(known)
    nearer = (one.mean + (y - one.mean) * jnp.exp(-more))[None]
    return Scored(said.log_density(y[None]), said.log_density(nearer) - more, said.cdf(nearer))


def stretch(known: NumbersState) -> Scalar:
    """Return the logarithm of the factor by which the last errors were larger than the scores of settings say.

    Those remember a thousand rows. While errors fall, rise or drift they are late; this is sooner, and else near 0. The
    last term holds the share of targets outside of 90 % intervals at a tenth, as adaptive conformal inference does:
    whenever more of them were, all sizes grow.
    """
    rows = USUAL_ROWS * (1 - STRETCH_MEMORY ** jnp.maximum(known.rounds - 1, 0)) / (1 - STRETCH_MEMORY)
    bound = math.exp(2 * LARGEST_STRETCH)
    more = jnp.log(jnp.clip(1 + known.excess / (STRETCH_DOUBT + rows), 1 / bound, bound)) / 2
    return jnp.sign(more) * jnp.maximum(jnp.abs(more) - DEAD, 0) + known.missed


def log_density(known: NumbersState, scores: Scored) -> Array:
    """Return the log predictive density, row by row."""
    return logsumexp(scores.stretched + jax.nn.log_softmax(known.scores)[:, None], axis=0)


def level(known: NumbersState, scores: Scored) -> Array:
    """Return P(Y ≤ y) under the predictive mixture, row by row."""
    return jax.nn.softmax(known.scores) @ scores.below


def learn(known: NumbersState, one: Combined, scores: Scored, features: Array, y: Array, weight: Array) -> NumbersState:
    """Learn from the errors of a batch; `one` was predicted before seeing y."""
    rows = weight.sum()
    some, share = rows > 0, rows / USUAL_ROWS
    squared = (y - one.mean) ** 2
    # A tenth of garbage moves this mean little; that of Gaussian errors is right.
    bounded = jnp.minimum(squared, REACH**2 * known.error) / GAUSSIAN_SHARE
    batch_error = (bounded * weight).sum() / jnp.maximum(rows, 1e-30)
    error_known = known.rounds >= ONE_ROUND
    # While errors fall, their running mean is too large, and small shares of it win: no good guide to what comes later.
    memory = jnp.minimum(SCORE_MEMORY, 1 - 1 / (2 + EARLY_MEMORY * known.rounds))
    total = memory**share * known.scores + jnp.where(error_known, scores.density @ weight, 0)
    shaped = _learn_shape(known, one, features, squared, jnp.where(error_known, weight, 0), share)
    error = running_mean(known.error, batch_error, known.rounds, share, ERROR_ROUNDS)
    within = jnp.clip(level(known, scores), SURE, 1 - SURE)  # rounding may make it more than 1
    sizes = jnp.exp(2 * stretch(known)) * squared_quantile(within)
    sizes = jnp.minimum(sizes, STRETCH_REACH) / REACH_SHARE
    excess = STRETCH_MEMORY**share * known.excess + jnp.where(error_known, ((sizes - 1) * weight).sum(), 0)
    off = jnp.where(jnp.abs(within - 0.5) > (1 - MISSED) / 2, 1 - MISSED, -MISSED)
    missed = MISS_MEMORY**share * known.missed + MISS_GAIN * jnp.where(error_known, (off * weight).sum(), 0)
    learnt = shaped._replace(
        error=jnp.maximum(error, 1e-12),
        rounds=known.rounds + share,
        scores=total,
        excess=excess,
        missed=jnp.clip(missed, -LARGEST_MISS, LARGEST_MISS),
    )
    good = some & jnp.isfinite(sum(jnp.sum(leaf) for leaf in learnt))
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), learnt, known)


def rescale(known: NumbersState, ratio: Scalar) -> NumbersState:
    """Return the same knowledge after y's unit grew by `1 / ratio`."""
    return known._replace(error=known.error * ratio**2)


def _at_settings(known: NumbersState, one: Combined, pick: Array | None = None) -> StudentT:
    """Return the predictive of settings on the grid, `[settings, B]`: those picked, or all."""
    dtype = one.mean.dtype
    grids: Any = np.stack(_GRID).astype(dtype)  # constants, of which the distribution makes others
    dof, noise, spread, tilt = grids[:, :, None] if pick is None else jnp.asarray(grids)[:, pick, None]
    shape = jnp.exp(tilt * one.log_shape[None])
    epistemic = spread * one.variance[None] * shape
    variance = noise * known.error * shape + epistemic
    return StudentT(jnp.broadcast_to(one.mean[None], variance.shape), variance, dof, epistemic)


def _features(known: NumbersState, mean: Array, variance: Array, x: Array) -> Array:
    """Return the features that the size of an error may depend on, `[B, k + 4]`."""
    mean = jnp.clip(mean, -4, 4)[:, None]
    doubt = jnp.log(variance / known.error + 1e-4)[:, None]
    return jnp.concatenate([jnp.ones_like(mean), mean, mean**2, doubt, x], 1)


def _learn_shape(
    known: NumbersState, one: Combined, x: Array, squared: Array, weight: Array, share: Scalar
) -> NumbersState:
    """Regress the log squared error by recursive least squares with forgetting and a bounded covariance."""
    features = _features(known, one.mean, one.variance, x)
    root = jnp.sqrt(weight)[:, None]
    A = features * root
    AP = A @ known.shape_covariance
    S = AP @ A.T + 4 * jnp.eye(len(A), dtype=A.dtype)
    gain = solve_positive(S, AP).T
    wanted = jnp.log(squared / known.error + 1e-3)
    before = features @ known.shape
    shape = known.shape + gain @ ((wanted - before) * root[:, 0])
    P = (known.shape_covariance - gain @ AP) / SHAPE_MEMORY**share
    P = (P + P.T) / 2 * jnp.minimum(1, len(P) / diagonal(P).sum())
    now = ((features @ shape) * weight).sum() / jnp.maximum(weight.sum(), 1e-30)
    since = jnp.maximum(known.rounds - 1, 0)
    early = jnp.minimum(since / (since + share + 1e-30), jnp.maximum(1 - share, 0))  # the mean of the last 20 rows
    keep = jnp.where(known.rounds > 20, 0.98**share, early)
    mean = jnp.where(weight.sum() > 0, keep * known.shape_mean + (1 - keep) * now, known.shape_mean)
    return known._replace(shape=shape, shape_covariance=P, shape_mean=mean)


def expected(known: NumbersState, one: Combined) -> Array:
    """Return the squared error expected of each row, which an outlier is measured by."""
    return known.error * jnp.maximum(jnp.exp(one.log_shape), 1) + one.variance


def surprised(known: NumbersState, squared: Scalar) -> NumbersState:
    """Return the same after a change: errors are as large as the latest, and the size of others is soon forgotten."""
    return known._replace(error=jnp.maximum(known.error, squared), rounds=jnp.minimum(known.rounds, 1))


def widen(known: NumbersState, fresh: NumbersState, same: bool) -> NumbersState:
    """Return the same with more features after those there were; if these are not the `same`, their part is fresh."""
    if not same:
        return known._replace(shape=fresh.shape, shape_covariance=fresh.shape_covariance, shape_mean=fresh.shape_mean)
    some = np.s_[: len(known.shape)]
    covariance = placed(fresh.shape_covariance, (some, some), known.shape_covariance)
    return known._replace(shape=placed(fresh.shape, some, known.shape), shape_covariance=covariance)
