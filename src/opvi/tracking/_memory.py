r"""Rows remembered beside the networks of a regressor: the errors and targets of the nearest ones correct the mean.

Let $m(x)$ be the mean of the networks before learning, $r_i = y_i - m_i(x_i)$ the error that it made at row i when the
row was new, and $w_i(x)$ weights that fall with the distance to x. The corrected mean is

$$m + \beta_1 \frac{\sum_i w_i \rho_i r_i}{\sum_i w_i \rho_i + s}
    + \beta_2 \frac{\sum_i w_i (y_i - m)}{\sum_i w_i + s}$$

over the 8 nearest rows kept, with $\rho_i$ the precision of the mean when row i came. The weights $\beta \ge 0$ are a
Bayesian regression of the errors on the two terms, with a prior around 0, so that memory is used as far as it has
helped. Distances are those of `_metric`, by the gradients of m. Further terms are the levels of values that repeat
(`_levels`): of those that have clearly helped, the best few.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._factors import diagonal
from opvi.tracking import _calibration as calibration
from opvi.tracking import _levels as levels
from opvi.tracking import _metric as metrics
from opvi.tracking import _neighbours as neighbours
from opvi.tracking import _scaling as scaling
from opvi.tracking._calibration import ONE_ROUND, USUAL_ROWS, Beside, Calibration, Combined
from opvi.tracking._gates import Gates, through
from opvi.tracking._levels import Said
from opvi.tracking._metric import Metric
from opvi.tracking._scaling import Scale, divisor
from opvi.types import Array, Scalar

SHRINKAGE = 0.5  # rows at x itself, that the means are drawn towards 0 by
STACK_MEMORY = 0.99  # of the regression of the errors, for 20 rows
EARLY_MEMORY = 0.25  # at first it reaches back over this share of the stream
RIDGE = 10.0  # of that regression: squared terms, in units of the expected squared error
LARGEST_SHARE = 1.25  # of the weights together
LEVELS = 3  # at most, whose weights are not 0
LARGEST_LEVEL = 2.0  # of their weights together
CLEAR = 4.0  # what a level must have explained, in squared errors, and more the more levels there are to choose from
SWEEPS = 30
LARGEST_ERROR = 7.5  # times the median error: what one row may teach, about 5 standard deviations
SIZE_ROUNDS = 50.0  # batches of the usual size, over which median error and usual distance are averaged
FACTS = 5  # numbers kept of a row beside its inputs
EXTRA = 2  # what memory adds to the inputs of the predicted log squared error


class Memory(NamedTuple):
    """Rows, and how useful they have been. Targets, errors and their sizes are in the units of y."""

    x: Array  # [room, F], as they came; NaN where a column did not exist yet
    facts: Array  # [room, FACTS]: target, error, squared error expected, weight, when it came
    seen: Array  # rows there have been
    clock: Scalar  # their weights, added up
    metric: Metric
    products: Array  # [K, K]: discounted, of the two terms, and of levels
    moments: Array  # [K]: of the terms and the errors
    weights: Array  # [K]: β
    typical: Scalar  # running median of absolute errors
    reach: Scalar  # running mean of the log distance to the nearest rows
    rounds: Scalar  # batches of the usual size
    levels: Array | None = None  # tables of the columns' values
    last: Array | None = None  # [2, rates]: sums of the last errors and of their weights, where rows come one by one


class Recalled(NamedTuple):
    """What the nearest rows say, row by row, y standardised."""

    error: Array  # [B]: shrunk mean of their errors
    target: Array  # [B]: shrunk mean of their targets
    mass: Array  # [B]: what that mean is made of, up to 1
    extra: Array  # [B, EXTRA]: log spread of their errors, log distance
    distance: Array  # [B]: log
    levels: Said | None = None  # of the values
    last: Array | None = None  # [rates]: shrunk means of the last errors


def start(rows: int, features: int, dtype: jnp.dtype, repeats: bool = False) -> Memory:
    """Return a memory without rows; it has levels if values may repeat."""
    terms = 2 + (len(levels.RATES) * features if repeats else 0)
    room, zero, each = neighbours.room(rows), jnp.zeros((), dtype), jnp.zeros(terms, dtype)
    return Memory(
        jnp.zeros((room, features), dtype),
        jnp.zeros((room, FACTS), dtype),
        jnp.zeros((), jnp.int32),
        zero,
        metrics.start(features, dtype),
        jnp.zeros((terms, terms), dtype),
        each,
        each,
        zero,
        zero,
        zero,
        levels.start(features, dtype) if repeats else None,
    )


def emptied(memory: Memory | None, rows: int) -> Memory | None:
    """Return the same memory without its rows."""
    return None if memory is None else start(rows, memory.x.shape[1], memory.x.dtype, memory.levels is not None)


def recall(
    memory: Memory | None,
    scale: Scale,
    gates: Gates | None,
    z: Array,
    error: Scalar,
    rows: int,
    half_life: float | None,
    x: Array | None = None,
) -> Recalled | None:
    """Return what the nearest rows say at standardised inputs z `[B, F]`; None without a memory.

    Args:
        memory: the rows.
        scale: the scale in use, of the columns of X, then y.
        gates: the columns' gates.
        z: the inputs to predict at.
        error: running mean squared error of the predictions, y standardised.
        rows: how many are remembered.
        half_life: the half-life of the rows' weights, in rows; None for no fading.
        x: the same inputs as they came, where values that repeat have levels.
    """
    if memory is None:
        return None
    inputs, y_scale = _parts(scale)

    def placed(x: Array) -> Array:
        return metrics.through(memory.metric, through(gates, scaling.readable(inputs, x)))

    asked = metrics.through(memory.metric, z)
    found = neighbours.near(memory.x, jnp.minimum(memory.seen, rows), placed, asked)
    y, residual, noise, weight, born = jnp.moveaxis(memory.facts[found.place], -1, 0)
    if half_life is not None:
        weight = weight * jnp.exp2((born - memory.clock) / half_life)
    closeness = found.closeness * weight
    precision = jnp.where(found.closeness > 0, 1 / jnp.maximum(noise, 1e-30), 0)
    trusted = closeness * precision / jnp.maximum(precision.max(1, keepdims=True), 1e-30)
    unit, centre = divisor(y_scale), y_scale.mean
    residual, y = residual / unit, (y - centre) / unit
    mean = (trusted * residual).sum(1) / (trusted.sum(1) + SHRINKAGE)
    spread = (trusted * (residual - mean[:, None]) ** 2).sum(1)
    log_spread = jnp.log((spread + error) / ((trusted.sum(1) + 1) * error))
    distance, some = 0.5 * jnp.log(found.squared), found.some
    extra = jnp.stack([log_spread, jnp.where(some & (memory.rounds > 1), distance - memory.reach, 0)], 1)
    whole = closeness.sum(1) + SHRINKAGE
    return Recalled(
        mean,
        (closeness * y).sum(1) / whole,
        closeness.sum(1) / whole,
        jnp.clip(extra, -4, 4),
        jnp.where(some, distance, 0),
        None if memory.levels is None or x is None else levels.look(memory.levels, x, memory.clock, half_life, unit),
        None if memory.last is None else memory.last[0] / (memory.last[1] + levels.SHRINKAGE) / unit,
    )


def _terms(recalled: Recalled, mean: Array) -> Array:
    """Return the terms that the weights multiply, `[B, K]`."""
    pair = jnp.stack([recalled.error, recalled.target - recalled.mass * mean], 1)
    parts = [pair] if recalled.levels is None else [pair, recalled.levels.level.reshape(len(mean), -1)]
    if recalled.last is not None:
        parts.append(jnp.broadcast_to(recalled.last[None], (len(mean), len(recalled.last))))
    return jnp.concatenate(parts, 1)


def combine(
    memory: Memory | None,
    recalled: Recalled | None,
    known: Calibration,
    mean: Array,
    doubt: Array,
    z: Array,
    beside: Beside | None,
) -> tuple[Combined, Combined, Array]:
    """Return the combined prediction of the networks and of what is beside them, the same corrected by memory, and the
    features of its errors."""
    if memory is None or recalled is None:
        one = calibration.combine(known, mean, doubt, z, beside)
        return one, one, z
    wide = jnp.concatenate([z, recalled.extra], 1)
    one = calibration.combine(known, mean, doubt, wide, beside)
    return one, one._replace(mean=one.mean + _terms(recalled, one.mean) @ memory.weights), wide


def _parts(scale: Scale) -> tuple[Scale, Scale]:
    """Return the scale of X and that of y."""
    return scaling.of_inputs(scale), Scale(scale.mean[-1], scale.sd[-1])


class Rows(NamedTuple):
    """A batch, and what was predicted for it before learning."""

    x: Array  # [B, F], as it came
    y: Array  # [B]
    weight: Array  # [B]
    target: Array  # [B]: y standardised
    mean: Array  # [B]: of the networks, for it
    slope: Array  # [B, F]: gradients of that mean


def learn(
    memory: Memory | None,
    recalled: Recalled | None,
    rows: Rows,
    scale: Scale,
    error: Scalar,
    begun: Array,
    kept: int,
    half_life: float | None = None,
) -> Memory | None:
    """Return the memory with a batch added and the weights updated by its errors.

    Args:
        memory: the memory before the batch.
        recalled: what it predicted for the batch.
        rows: the batch.
        scale: the scale in use, of the columns of X, then y.
        error: running mean squared error of the predictions, y standardised.
        begun: whether the networks' predictions of this batch mean anything yet.
        kept: how many rows are remembered.
        half_life: the half-life of the rows' weights, in rows; None for no fading.
    """
    if memory is None or recalled is None:
        return None
    y_scale = _parts(scale)[1]
    weight, unit = rows.weight, divisor(y_scale)
    total = weight.sum()
    share = total / USUAL_ROWS
    away = rows.target - rows.mean
    # A wrong target must not stay in the neighbourhood forever: what a row teaches is bounded.
    bound = jnp.maximum(LARGEST_ERROR * memory.typical / unit, jnp.sqrt(error))
    away = jnp.where(memory.rounds > 0, jnp.clip(away, -bound, bound), away)
    scored = jnp.where(begun, weight, 0)
    memory = _restacked(memory, _terms(recalled, rows.mean), away, scored, error, share)
    memory = _sized(memory, recalled, away * unit, scored, share)
    spread = jnp.maximum(((rows.y - y_scale.mean) ** 2 * weight).sum() / jnp.maximum(total, 1e-30), 1e-30)
    facts = [
        jnp.where(begun, y_scale.mean + unit * (rows.mean + away), rows.y),
        jnp.where(begun, unit * away, 0),
        jnp.broadcast_to(jnp.where(begun, error * unit**2, spread), weight.shape),
        weight,
        jnp.broadcast_to(memory.clock + total, weight.shape),
    ]
    place, seen = neighbours.places(memory.seen, weight > 0, kept)
    tables, said = memory.levels, recalled.levels
    if tables is not None and said is not None:
        tables = levels.learn(tables, said.place, rows.x, away * unit, scored, memory.clock, half_life)
    return memory._replace(
        x=memory.x.at[place].set(rows.x, mode="drop"),
        facts=memory.facts.at[place].set(jnp.stack(facts, 1), mode="drop"),
        seen=seen,
        clock=memory.clock + total,
        metric=metrics.update(memory.metric, rows.slope, scored),
        rounds=memory.rounds + jnp.where(begun, share, 0),
        levels=tables,
        last=None if memory.last is None else levels.discounted(memory.last, away * unit, scored),
    )


def following(memory: Memory | None) -> Memory | None:
    """Return the memory with two more terms: means of the last errors, wherever they were."""
    if memory is None or memory.last is not None:
        return memory
    more, dtype = len(levels.LAST_RATES), memory.products.dtype
    return memory._replace(
        products=jnp.pad(memory.products, (0, more)),
        moments=jnp.pad(memory.moments, (0, more)),
        weights=jnp.pad(memory.weights, (0, more)),
        last=jnp.zeros((2, more), dtype),
    )


def _restacked(memory: Memory, terms: Array, away: Array, weight: Array, error: Scalar, share: Scalar) -> Memory:
    """Return the weights after the errors of a batch: non-negative least squares with forgetting and a ridge."""
    keep = jnp.minimum(STACK_MEMORY, 1 - 1 / (2 + EARLY_MEMORY * memory.rounds)) ** share
    known = terms * (weight / error)[:, None]
    products = keep * memory.products + jnp.matmul(known.T, terms, precision="highest")
    moments = keep * memory.moments + jnp.matmul(known.T, away, precision="highest")
    weights = _weights(products + RIDGE * jnp.eye(len(moments), dtype=terms.dtype), moments)
    good = jnp.isfinite(weights.sum() + products.sum() + moments.sum())
    return memory._replace(
        products=jnp.where(good, products, memory.products),
        moments=jnp.where(good, moments, memory.moments),
        weights=jnp.where(good, weights, memory.weights),
    )


def _weights(A: Array, b: Array) -> Array:
    """Return the weights of the two terms, and of the few levels that have clearly helped."""
    if len(b) == 2:
        return _bounded(nonnegative(A, b), LARGEST_SHARE)
    gain = jnp.maximum(b[2:], 0) ** 2 / diagonal(A)[2:]
    most, which = jax.lax.top_k(gain, min(LEVELS, len(gain)))
    clear = most > CLEAR + 2 * math.log(len(gain))
    chosen = jnp.concatenate([jnp.arange(2), 2 + which])
    helps = jnp.concatenate([jnp.ones(2, bool), clear])
    pick = (chosen[:, None] == np.arange(len(b))[None]).astype(b.dtype)  # products with it, unlike lookups, are cheap
    few = partial(jnp.matmul, precision="highest")
    beta = nonnegative(few(few(pick, A), pick.T), jnp.where(helps, few(pick, b), -1e30))
    beta = jnp.concatenate([_bounded(beta[:2], LARGEST_SHARE), _bounded(beta[2:], LARGEST_LEVEL)])
    return few(beta, pick)


def _bounded(weights: Array, most: float) -> Array:
    """Return the weights, made smaller if they add up to more."""
    return weights * jnp.minimum(1, most / jnp.maximum(weights.sum(), 1e-30))


def nonnegative(A: Array, b: Array) -> Array:
    r"""Return the minimum of $\beta^\top A \beta / 2 - b^\top \beta$ over $\beta \ge 0$, coordinate by coordinate."""

    n, eye = len(b), np.eye(len(b), dtype=b.dtype)
    own = diagonal(A)
    others, alone = (A / own[:, None]) * (1 - eye), b / own

    def descend(i: Array, beta: Array) -> Array:
        j = jax.lax.rem(i, jnp.asarray(n, i.dtype)).astype(jnp.uint32)
        row, best = (jax.lax.dynamic_index_in_dim(part, j, keepdims=False) for part in (others, alone))
        return jax.lax.dynamic_update_index_in_dim(beta, jnp.maximum(0, best - (row * beta).sum()), j, 0)

    return jax.lax.fori_loop(0, SWEEPS * n, descend, jnp.zeros_like(b))


def _sized(memory: Memory, recalled: Recalled, away: Array, weight: Array, share: Scalar) -> Memory:
    """Return the median error and the typical distance after a batch; errors in the units of y."""
    total = jnp.maximum(weight.sum(), 1e-30)
    size = jnp.abs(away)
    above = (jnp.sign(size - memory.typical) * weight).sum() / total
    usual = jnp.minimum(1, share / jnp.minimum(1 + memory.rounds, SIZE_ROUNDS))
    gain = jnp.where(memory.rounds < ONE_ROUND, share / (memory.rounds + share + 1e-30), usual)
    moved = jnp.where(memory.rounds > 0, memory.typical * jnp.exp(gain * above), (size * weight).sum() / total)
    reach = memory.reach + gain * ((recalled.distance * weight).sum() / total - memory.reach)
    some = weight.sum() > 0
    return memory._replace(typical=jnp.where(some, moved, memory.typical), reach=jnp.where(some, reach, memory.reach))
