r"""Rows kept beside a model, whose nearest correct its predictions where it bends too little.

$$\hat y = m(x) + \beta_1 u(x) + \beta_2 (v(x) - c(x)\, m(x))$$

$u$ is the mean error that m made at the 8 rows nearest to x, $v$ the mean of their targets, each weighted by closeness
and drawn towards 0 as if half a row at x itself had error 0; $c \le 1$ is the mass that leaves to v. A stack learns
$\beta \ge 0$ from predictions made before learning. Distances are those of `_metric`, by the gradients of m.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from opvi.tracking._mixing._members import USUAL_ROWS
from opvi.tracking._placed import placed
from opvi.tracking.experts import _metric as metrics
from opvi.tracking.experts import _nearest as nearest
from opvi.tracking.experts._expert import BaseExpert, Belief, Context, Rows, Units
from opvi.tracking.experts._metric import Metric
from opvi.types import Array, Key, Scalar

SHRINKAGE = 0.5  # rows at x itself, that the means are drawn towards 0 by
LARGEST_INPUT = 10.0  # standard deviations
FACTS = 5  # numbers kept of a row beside its inputs
REACH_ROUNDS = 50.0  # batches of the usual size, over which the usual distance is averaged


class NeighboursState(NamedTuple):
    """Rows, and how far the nearest usually are; standardised."""

    z: Array  # [room, F]
    facts: Array  # [room, FACTS]: target, error, squared error expected, weight, when it came
    seen: Array  # rows there have been
    clock: Scalar  # their weights, added up
    metric: Metric
    error: Scalar  # mean squared error of the stack
    reach: Scalar  # running mean of the log distance to the nearest rows
    rounds: Scalar  # batches of the usual size behind it


@dataclass(frozen=True)
class Neighbours(BaseExpert):
    """Settings of rows that are remembered."""

    stage: ClassVar[int] = 1

    kept: int  # rows
    half_life: float | None = None  # of their weights, in rows

    def init(self, key: Key, columns: int, dtype: Any) -> NeighboursState:
        """Return a memory without rows."""
        return _start(self.kept, columns, dtype)

    def predict(self, state: NeighboursState, rows: Rows) -> Belief:
        """Return what the nearest rows say: two corrections."""

        def view(z: Array) -> Array:
            return metrics.through(state.metric, z)

        found = nearest.near(state.z, jnp.minimum(state.seen, self.kept), view, view(_inputs(rows.z)))
        y, residual, noise, weight, born = jnp.moveaxis(state.facts[found.place], -1, 0)
        if self.half_life is not None:
            weight = weight * jnp.exp2((born - state.clock) / self.half_life)
        closeness = found.closeness * weight
        precision = jnp.where(found.closeness > 0, 1 / jnp.maximum(noise, 1e-30), 0)
        trusted = closeness * precision / jnp.maximum(precision.max(1, keepdims=True), 1e-30)
        mass = trusted.sum(1)
        mean = (trusted * residual).sum(1) / (mass + SHRINKAGE)
        spread = (trusted * (residual - mean[:, None]) ** 2).sum(1)
        whole = closeness.sum(1) + SHRINKAGE
        target = ((closeness * y).sum(1) - closeness.sum(1) * rows.base) / whole
        distance = 0.5 * jnp.log(found.squared)
        known = found.some & (state.rounds > 1)
        return Belief(
            jnp.stack([mean, target]),
            (spread + state.error) / (mass + 1),
            novelty=jnp.where(known, distance - state.reach, 0),
            work=jnp.where(found.some, distance, 0),
        )

    def learn(self, key: Key, state: NeighboursState, rows: Rows, context: Context) -> NeighboursState:
        """Return the memory with rows added."""
        weight, known = rows.weight * context.trust, context.scored > 0
        total, scored = weight.sum(), context.scored * context.trust
        share = scored.sum() / USUAL_ROWS
        # A wrong target must not stay in the neighbourhood forever: what a row teaches is bounded.
        facts = [
            jnp.where(known, rows.base + context.residual, rows.y),
            jnp.where(known, context.residual, 0),
            jnp.where(known, context.error, 1),
            weight,
            jnp.broadcast_to(state.clock + total, weight.shape),
        ]
        place, seen = nearest.places(state.seen, weight > 0, self.kept)
        gain = share / jnp.minimum(state.rounds + share + 1e-30, REACH_ROUNDS)
        distance = (context.belief.work * scored).sum() / jnp.maximum(scored.sum(), 1e-30)
        return NeighboursState(
            state.z.at[place].set(_inputs(rows.z), mode="drop"),
            state.facts.at[place].set(jnp.stack(facts, 1), mode="drop"),
            seen,
            state.clock + total,
            metrics.update(state.metric, context.slope, scored),
            context.error,
            state.reach + jnp.where(share > 0, gain, 0) * (distance - state.reach),
            state.rounds + share,
        )

    def rescale(self, state: NeighboursState, units: Units) -> NeighboursState:
        """Return the same rows in new units."""
        y, residual, noise, *rest = jnp.moveaxis(state.facts, -1, 0)
        by = units.output_ratio
        facts = jnp.stack([by * y + units.output_shift, by * residual, by**2 * noise, *rest], 1)
        z = (state.z - units.shift[None]) / units.ratio[None]
        return state._replace(
            z=z, facts=facts, error=state.error * by**2, metric=metrics.rescale(state.metric, units.ratio)
        )

    def forget(self, state: NeighboursState, keep: Scalar) -> NeighboursState:
        """Return a memory without rows."""
        return _start(self.kept, state.z.shape[1], state.clock.dtype)

    def widen(self, state: NeighboursState, fresh: NeighboursState) -> NeighboursState:
        """Return the same rows with more columns, in which they have their means; a wider memory has room for fewer."""
        count, columns = min(len(state.z), len(fresh.z)), state.z.shape[1]
        return state._replace(
            z=placed(fresh.z, np.s_[:count, :columns], state.z[:count]),
            facts=placed(fresh.facts, np.s_[:count], state.facts[:count]),
            metric=metrics.widen(state.metric, fresh.metric),
        )


def _start(kept: int, columns: int, dtype: Any) -> NeighboursState:
    room, zero = nearest.room(kept), jnp.zeros((), dtype)
    return NeighboursState(
        jnp.zeros((room, columns), dtype),
        jnp.zeros((room, FACTS), dtype),
        jnp.zeros((), jnp.int32),
        zero,
        metrics.start(columns, dtype),
        jnp.ones((), dtype),
        zero,
        zero,
    )


def _inputs(rows: Array) -> Array:
    return jnp.clip(rows, -LARGEST_INPUT, LARGEST_INPUT)
