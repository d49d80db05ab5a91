r"""The predictive head of a regression: weights, noise, spread and tails, learnt by predicting each batch first."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from opvi._factors import diagonal, solve_positive
from opvi.predictive import StudentT
from opvi.tracking._jumps import SURE, squared_quantile
from opvi.types import Array, Scalar

ERROR_MEMORY = 0.99  # of the cross products of the particles' errors; these discounts count once for USUAL_ROWS rows
SCORE_MEMORY = 0.98  # of the scores of noise, spread and tails
EARLY_MEMORY = 0.25  # at first those scores reach back over this share of the stream
SHAPE_MEMORY = 0.998  # of the regression of the log squared error
USUAL_ROWS = 20.0
ONE_ROUND = 0.99  # but for rounding, in batches of the usual size
ERROR_ROUNDS = 25.0  # over which the squared error is averaged
REACH = 2.0  # no error counts for more than so many of the usual size, in their running mean square
GAUSSIAN_SHARE = 0.9205  # of the mean square of a Gaussian is left by that
RIDGE = 30.0  # pulls the particles' weights together, in units of the best particle's mean squared error
WEIGHT_STEPS = 60
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
TRUSTED = 4  # particles whose own variance counts

NOISE = np.exp(np.linspace(np.log(0.03), np.log(2.0), 14))  # shares of the running mean squared error
SPREAD = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0])  # multiples of the particles' own variance
TILT = np.array([0.0, 0.5, 1.0])  # how far the variance follows the predicted log squared error
DOF = np.array([4.0, 6.0, 10.0, np.inf])
_GRID = [grid.ravel() for grid in np.meshgrid(DOF, NOISE, SPREAD, TILT, indexing="ij")]


class Calibration(NamedTuple):
    """What is known about the errors of predictions made before learning. y is standardised."""

    weights: Array  # [n] of the particles, on the simplex
    products: Array  # [n, n]: discounted cross products of their errors
    seen: Scalar  # discounted rows behind `products`
    error: Scalar  # running mean squared error of the weighted mean
    rounds: Scalar  # batches of the usual size behind `error`; 0: nothing is known
    scores: Array  # [grid]: discounted log scores
    shape: Array  # [k]: regression of the log squared error
    shape_covariance: Array  # [k, k]
    shape_mean: Scalar  # its running mean prediction
    excess: Array | float = 0.0  # discounted sum of squared errors in units of their predicted size, less 1 for each
    missed: Array | float = 0.0  # what targets outside of 90 % intervals add to the logarithm of all sizes


class Combined(NamedTuple):
    """The particles' predictions combined: mean, variance and predicted log squared error, row by row."""

    mean: Array
    variance: Array
    log_shape: Array


class Beside(NamedTuple):
    """What something beside the particles predicts, and its share in the prediction."""

    share: Scalar
    mean: Array
    variance: Array


def start(particles: int, features: int, dtype: Any) -> Calibration:
    """Return what is known before any row: nothing."""
    zero, k = jnp.zeros((), dtype), features + 4
    return Calibration(
        jnp.full(particles, 1 / particles, dtype),
        jnp.zeros((particles, particles), dtype),
        zero,
        jnp.ones((), dtype),
        zero,
        jnp.zeros(len(_GRID[0]), dtype),
        jnp.zeros(k, dtype),
        0.1 * jnp.eye(k, dtype=dtype),
        zero,
        zero,
        zero,
    )


def trusted(known: Calibration) -> Array:
    """Return the few particles with the largest weights, whose uncertainty stands for that of all."""
    return jax.lax.top_k(known.weights, min(TRUSTED, len(known.weights)))[1]


def combine(known: Calibration, mean: Array, variance: Array, x: Array, beside: Beside | None = None) -> Combined:
    """Return one prediction from the means of all particles `[n, B]` and the variances of those in `trusted`.

    Inputs x are standardised, `[B, F]`.
    """
    together = known.weights @ mean
    share = known.weights[trusted(known)]
    spread = share / share.sum() @ variance + known.weights @ (mean - together[None]) ** 2
    if beside is not None:
        g, apart = beside.share, beside.mean - together
        together, spread = together + g * apart, (1 - g) * spread + g * beside.variance + g * (1 - g) * apart**2
    predicted = _features(known, together, spread, x) @ known.shape - known.shape_mean
    return Combined(together, spread, jnp.clip(predicted, -3, 3))


def predictive(known: Calibration, one: Combined) -> StudentT:
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


def scored(known: Calibration, one: Combined, y: Array) -> Scored:
    """Return how every setting scores y, before learning from it."""
    said, more = _at_settings(known, one), stretch(known)
    nearer = (one.mean + (y - one.mean) * jnp.exp(-more))[None]
    return Scored(said.log_density(y[None]), said.log_density(nearer) - more, said.cdf(nearer))


def stretch(known: Calibration) -> Scalar:
    """Return the logarithm of the factor by which the last errors were larger than the scores of settings say.

    Those remember a thousand rows. While errors fall, rise or drift they are late; this is sooner, and else near 0. The
    last term holds the share of targets outside of 90 % intervals at a tenth, as adaptive conformal inference does:
    whenever more of them were, all sizes grow.
    """
    rows = USUAL_ROWS * (1 - STRETCH_MEMORY ** jnp.maximum(known.rounds - 1, 0)) / (1 - STRETCH_MEMORY)
    bound = math.exp(2 * LARGEST_STRETCH)
    more = jnp.log(jnp.clip(1 + known.excess / (STRETCH_DOUBT + rows), 1 / bound, bound)) / 2
    return jnp.sign(more) * jnp.maximum(jnp.abs(more) - DEAD, 0) + known.missed


def log_predictive(known: Calibration, scores: Scored) -> Array:
    """Return the log predictive density, row by row."""
    return logsumexp(scores.stretched + jax.nn.log_softmax(known.scores)[:, None], axis=0)


def level(known: Calibration, scores: Scored) -> Array:
    """Return P(Y ≤ y) under the predictive mixture, row by row."""
    return jax.nn.softmax(known.scores) @ scores.below


def learn(
    known: Calibration, one: Combined, scores: Scored, mean: Array, x: Array, y: Array, weight: Array
) -> Calibration:
    """Learn from the errors of a batch; `one` and the particles' `mean` were predicted before seeing y."""
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
    shaped = _learn_shape(known, one, x, squared, jnp.where(error_known, weight, 0), share)
    error = running(known.error, batch_error, known.rounds, share, ERROR_ROUNDS)
    within = jnp.clip(level(known, scores), SURE, 1 - SURE)  # rounding may make it more than 1
    sizes = jnp.exp(2 * stretch(known)) * squared_quantile(within)
    sizes = jnp.minimum(sizes, STRETCH_REACH) / REACH_SHARE
    excess = STRETCH_MEMORY**share * known.excess + jnp.where(error_known, ((sizes - 1) * weight).sum(), 0)
    off = jnp.where(jnp.abs(within - 0.5) > (1 - MISSED) / 2, 1 - MISSED, -MISSED)
    missed = MISS_MEMORY**share * known.missed + MISS_GAIN * jnp.where(error_known, (off * weight).sum(), 0)
    residual = mean - y[None]
    products = ERROR_MEMORY**share * known.products + (residual * weight[None]) @ residual.T
    seen = ERROR_MEMORY**share * known.seen + rows
    learnt = shaped._replace(
        weights=_stack(products, seen),
        products=products,
        seen=seen,
        error=jnp.maximum(error, 1e-12),
        rounds=known.rounds + share,
        scores=total,
        excess=excess,
        missed=jnp.clip(missed, -LARGEST_MISS, LARGEST_MISS),
    )
    good = some & jnp.isfinite(sum(jnp.sum(leaf) for leaf in learnt))
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), learnt, known)


def running(old: Array, new: Array, rounds: Scalar, share: Scalar, longest: float) -> Array:
    """Return a running mean that starts at 1 and forgets that start after one batch of the usual size.

    Args:
        old: the mean before.
        new: the mean of the new rows.
        rounds: the number of batches of the usual size before them.
        share: the size of the new rows, in batches of the usual size.
        longest: the number of batches over which the mean is eventually taken.
    """
    part = jnp.clip(1 - rounds, 0, share)
    gain = jnp.minimum(1, share / jnp.minimum(1 + 0.5 * rounds, longest))
    return jnp.where(rounds < ONE_ROUND, old - part + part * new, (1 - gain) * old + gain * new)


def rescale(known: Calibration, ratio: Scalar) -> Calibration:
    """Return the same knowledge after y's unit grew by `1 / ratio`."""
    return known._replace(error=known.error * ratio**2, products=known.products * ratio**2)


def _at_settings(known: Calibration, one: Combined, pick: Array | None = None) -> StudentT:
    """Return the predictive of settings on the grid, `[settings, B]`: those picked, or all."""
    dtype = one.mean.dtype
    grids: Any = np.stack(_GRID).astype(dtype)  # constants, of which the distribution makes others
    dof, noise, spread, tilt = grids[:, :, None] if pick is None else jnp.asarray(grids)[:, pick, None]
    shape = jnp.exp(tilt * one.log_shape[None])
    epistemic = spread * one.variance[None] * shape
    variance = noise * known.error * shape + epistemic
    return StudentT(jnp.broadcast_to(one.mean[None], variance.shape), variance, dof, epistemic)


def _features(known: Calibration, mean: Array, variance: Array, x: Array) -> Array:
    """Return the features that the size of an error may depend on, `[B, F + 4]`."""
    mean = jnp.clip(mean, -4, 4)[:, None]
    doubt = jnp.log(variance / known.error + 1e-4)[:, None]
    return jnp.concatenate([jnp.ones_like(mean), jnp.clip(x, -4, 4), mean, mean**2, doubt], 1)


def _learn_shape(
    known: Calibration, one: Combined, x: Array, squared: Array, weight: Array, share: Scalar
) -> Calibration:
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


def _stack(products: Array, seen: Scalar) -> Array:
    r"""Return weights on the simplex that nearly minimise $w^\top (E + \text{ridge}) w$, by exponentiated gradients."""
    n = len(products)
    eye = np.eye(n, dtype=products.dtype)
    best = diagonal(products).min() / jnp.maximum(seen, 1e-30)
    E = products + RIDGE * best * eye
    E = E * (-4 / jnp.maximum(jnp.abs(E).max(), 1e-30))

    def descend(_: Any, w: Array) -> Array:
        w = w * jnp.exp(E @ w)  # twice the slopes; what they have in common cancels
        return w / w.sum()

    return jax.lax.fori_loop(0, WEIGHT_STEPS, descend, jnp.full(n, 1 / n, products.dtype))
