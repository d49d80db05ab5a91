r"""Relevance of columns: a factor for each input of an expert, learnt from predictions made before learning.

Let $g_j = z_j\, \partial f / \partial z_j$ be what column j adds to a prediction, and e the error of that prediction.
$\sum e g_j$ is 0 for a column whose part is right, and $-\sum g_j^2$ for one that adds nothing but noise. The factor
follows the regression of e on $g_j$, and returns when the column begins to help. A column that errors correlate with,
or with its square, does not fade and returns: networks need many rows to learn from it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from opvi.tracking._mixing._layer import Nested
from opvi.tracking._mixing._members import USUAL_ROWS
from opvi.tracking._placed import placed
from opvi.tracking.experts._expert import BaseExpert, Belief, Context, Rows, Units
from opvi.types import Array, Key, Scalar

MEMORY = 0.98  # of the sums, for 20 rows
RATE = 0.2  # of the factors, for 20 rows
TOLERANCE = 0.25  # of a column's part may be too much, as it is in any network that has seen few rows
LARGEST_INPUT = 10.0  # standard deviations
LARGEST = 2.5  # of an input, in what is learnt about it
SMALLEST = 0.05  # from where a column can still return
CLEAR = 4.5  # standard deviations: of a sum that chance does not explain, in any of many columns
FEW = 10  # columns: in narrower tables one only fades if predictions are better without it
FEW_TOLERANCE = 0.5  # half of its part may be too much: with more, predictions without it are better
FEW_CLEAR = 1.0  # standard deviations by which they must be
FEW_SMALLEST = 0.2
CAUTION = 1.0  # squared errors that a column's part must add up to before it is judged


class Gates(NamedTuple):
    """A factor for each column, and the discounted sums behind it."""

    factor: Array  # [F]
    product: Array  # [F]: of errors and contributions
    square: Array  # [F]: of contributions
    error: Scalar  # squared errors
    seen: Scalar  # rows
    linear: Array  # [F]: of errors and inputs
    bent: Array  # [F]: of errors and squared inputs


@dataclass(frozen=True)
class Relevance(BaseExpert):
    """An expert whose useless columns fade."""

    expert: Any

    def init(self, key: Key, columns: int, dtype: Any) -> Nested:
        """Return the state before any row: every column counts fully."""
        return Nested(_start(columns, dtype), self.expert.init(key, columns, dtype))

    def predict(self, state: Nested, rows: Rows) -> Belief:
        """Return what the expert says of the faded inputs."""
        belief = self.expert.predict(state.inner, _faded(state, rows))
        return belief if belief.slope is None else belief._replace(slope=belief.slope * state.own.factor[None])

    def learn(self, key: Key, state: Nested, rows: Rows, context: Context) -> Nested:
        """Learn which columns help, and let the expert learn the rows."""
        weight, belief = context.scored * context.trust, context.belief
        slope = jnp.zeros_like(rows.z) if belief.slope is None else belief.slope
        own = _learn(state.own, rows.z, rows.z * slope, rows.y - belief.mean, weight)
        return Nested(own, self.expert.learn(key, state.inner, _faded(state, rows), context))

    def relearn(self, state: Nested, rows: Rows) -> Nested:
        """Let the expert learn from rows seen before."""
        return state._replace(inner=self.expert.relearn(state.inner, _faded(state, rows)))

    def rescale(self, state: Nested, units: Units) -> Nested:
        """Return the same expert in new units."""
        factor = state.own.factor
        return state._replace(inner=self.expert.rescale(state.inner, _scaled(units, factor)))

    def forget(self, state: Nested, keep: Scalar) -> Nested:
        """Return the expert with less of its past, and columns that had faded at their full size."""
        factor, zero = state.own.factor, jnp.zeros_like(state.own.factor)
        awake = Units(zero, factor, zero > 1, zero, jnp.ones_like(factor[0]), jnp.zeros_like(factor[0]))
        inner = self.expert.forget(self.expert.rescale(state.inner, awake), keep)
        return Nested(_start(len(factor), factor.dtype), inner)

    def widen(self, state: Any, fresh: Nested) -> Nested:
        """Return the state with more columns, which count fully; narrow tables may have had no relevance."""
        if not isinstance(state, Nested):
            return Nested(fresh.own, self.expert.widen(state, fresh.inner))
        some = np.s_[: len(state.own.factor)]
        parts = zip(state.own, fresh.own, strict=True)
        own = Gates(*(placed(new, some, old) if new.ndim else old for old, new in parts))
        return Nested(own, self.expert.widen(state.inner, fresh.inner))


def _faded(state: Nested, rows: Rows) -> Rows:
    return rows._replace(z=jnp.clip(rows.z, -LARGEST_INPUT, LARGEST_INPUT) * state.own.factor[None])


def _scaled(units: Units, factor: Array) -> Units:
    return units._replace(shift=units.shift * factor, now=units.now * factor)


def _start(columns: int, dtype: Any) -> Gates:
    zero = jnp.zeros(columns, dtype)
    return Gates(jnp.ones(columns, dtype), zero, zero, jnp.zeros((), dtype), jnp.zeros((), dtype), zero, zero)


def _learn(gates: Gates, z: Array, contributions: Array, error: Array, weight: Array) -> Gates:
    """Return the factors after a batch.

    Args:
        gates: the factors before the batch.
        z: inputs `[B, F]`, not faded.
        contributions: what each column added to the predictions `[B, F]`.
        error: the errors of the predictions.
        weight: the weights of the rows.
    """
    rows = weight.sum()
    share = rows / USUAL_ROWS
    keep = MEMORY**share
    product = keep * gates.product + (contributions * (error * weight)[:, None]).sum(0)
    square = keep * gates.square + (contributions**2 * weight[:, None]).sum(0)
    squared, seen = keep * gates.error + (error**2 * weight).sum(), keep * gates.seen + rows
    slope = product / (square + CAUTION * squared / jnp.maximum(seen, 1))
    whole, known = jnp.clip(z, -LARGEST, LARGEST), (error * weight)[:, None]
    linear = keep * gates.linear + (whole * known).sum(0)
    bent = keep * gates.bent + ((whole**2 - 1) / jnp.sqrt(2.0) * known).sum(0)
    clear = jnp.maximum(jnp.abs(linear), jnp.abs(bent)) > CLEAR * jnp.sqrt(squared)
    down = _down(slope, product, square, squared / jnp.maximum(seen, 1))
    push = jnp.clip(jnp.maximum(slope, 0) + down, -1, 1)
    push = jnp.where(clear, 1, push)
    smallest = FEW_SMALLEST if len(slope) <= FEW else SMALLEST
    factor = jnp.clip(gates.factor * jnp.exp(RATE * share * push), smallest, 1)
    new = Gates(factor, product, square, squared, seen, linear, bent)
    good = jnp.isfinite(factor.sum() + product.sum() + square.sum() + squared + linear.sum() + bent.sum())
    return Gates(*(jnp.where(good, a, b) for a, b in zip(new, gates, strict=True)))


def _down(slope: Array, product: Array, square: Array, error: Scalar) -> Array:
    r"""Return how fast columns fade, none above 0.

    Without its part a column's squared errors would be larger by $\sum (e + g_j)^2 - e^2 = 2 \sum e g_j + \sum g_j^2$.
    Where columns are few, most of them help sooner or later, and one fades only if that is clearly below 0.
    """
    if len(slope) > FEW:
        return jnp.minimum(slope + TOLERANCE, 0)
    harm = -(product + FEW_TOLERANCE * square)
    return jnp.where(harm > FEW_CLEAR * jnp.sqrt(square * error), jnp.minimum(slope + FEW_TOLERANCE, 0), 0)
