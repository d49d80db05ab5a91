r"""Change points: most of the last rows are surprises, or errors have been too large for too long.

If most of the last few rows are far off, the model is wrong, not the rows. Where y is the old prediction in new units,
because a sensor was moved or replaced, the units follow and nothing is forgotten. Otherwise, or when the posterior
probability of a jump (`_jumps`) is large, most of the past is; the level follows at once all the same.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from opvi.filters._covariance import when
from opvi.tracking._mixing._layer import Forecast, LayerWrapper, Lesson, Nested, Outcome, Report
from opvi.tracking._wrappers import _jumps as jumps
from opvi.tracking._wrappers._medians import HALF_LIFE, median, recent
from opvi.tracking.experts._expert import Rows
from opvi.types import Array, Key, Scalar

SURPRISE = 5.0  # expected errors, from which on a row is a surprise
JUMP = 0.5  # this share of surprising rows among the last few is a jump
ONE_SIDED = 0.9  # this share of the surprising rows on one side is a jump of the level
JUMP_ROUNDS = 3.0  # of 20 rows; sooner after a jump, another one means that the level was not all
AFTER_JUMP = 0.4  # of the share is kept, so that rows that are still far off are noticed soon
UNEVEN = 3.0  # times the usual squared error, left by a jump of the level: it is not all
FITTED = 5.0  # rows, at least, to find out whether y is the old prediction in new units
SAME = 3.0  # times the usual squared error, in the new units: that it is
FARTHEST = 1e6  # units of y: farther errors are no new unit


class ChangeState(NamedTuple):
    """What the last few rows say."""

    surprised: Array  # [2]: shares of them that were far above and far below their prediction
    recent: Array  # [6]: moments of those: `_moments`
    odds: Scalar  # of a jump, against none


class Found(NamedTuple):
    """What was found in some rows."""

    jump: Array  # whether most of the last few are surprises
    shift: Scalar  # of y's level, in the old units
    ratio: Scalar  # of y's unit after it to the one before
    known: Array  # whether these two are all
    renew: Array  # whether they say nothing: the past is of no use


@dataclass(frozen=True)
class Change(LayerWrapper):
    """A stack that follows jumps."""

    renews: bool  # whether most of the past is forgotten

    def begin(self, columns: int, dtype: Any) -> ChangeState:
        """Return the state before any row."""
        return ChangeState(jnp.zeros(2, dtype), jnp.zeros(6, dtype), jnp.zeros((), dtype))

    def learn(
        self, key: Key, state: Nested, rows: Rows, forecast: Forecast, outcome: Outcome, lesson: Lesson
    ) -> tuple[Nested, Report]:
        """Look for a jump; then let the stack learn, with less of its past if there was one."""
        begun = lesson.scored.sum() > 0
        own, found = _found(state.own, rows.y, outcome, lesson.scored, begun)
        scored = jnp.where(found.jump, 0, lesson.scored)  # errors of a jump say nothing of those to come
        tested = jnp.where((outcome.rounds >= jumps.WARM_UP) & (forecast.novelty < jumps.FAR), scored, 0)
        odds = jumps.after(own.odds, jumps.wider(outcome.level, tested), tested.sum())
        probability = jnp.where(found.jump, 1, jumps.probability(odds))
        alarm = probability > jumps.ALARM
        own = own._replace(odds=jnp.where(alarm, 0, odds))
        anew = alarm & ~found.known & self.renews
        kept = jnp.asarray(jumps.KEPT, odds.dtype)
        inner = when(anew, lambda s: self.inner.forget(s, kept), state.inner)
        rows = rows._replace(y=(rows.y - found.shift) / found.ratio)
        told = lesson._replace(scored=scored, renewed=lesson.renewed | anew)
        inner, report = self.inner.learn(key, inner, rows, forecast, outcome, told)
        report = report._replace(probability=probability, shift=found.shift, ratio=found.ratio, renew=found.renew)
        return Nested(own, inner), report

    def forget(self, state: Nested, keep: Scalar) -> Nested:
        """Return a state in which the past counts for a share `keep`."""
        own = ChangeState(*(jnp.where(keep > 0, leaf, 0) for leaf in state.own))
        return Nested(own, self.inner.forget(state.inner, keep))


def _found(own: ChangeState, y: Array, outcome: Outcome, weight: Array, begun: Array) -> tuple[ChangeState, Found]:
    """Return what the last few rows say, including some new ones, and whether there was a jump."""
    error = y - outcome.mean
    surprising = outcome.squared > SURPRISE**2
    sides = surprising[:, None] & jnp.stack([error > 0, error < 0], 1)
    share = jnp.where(begun, recent(own.surprised, sides, weight), 0)
    sums = jnp.where(
        begun, _moments(own.recent, outcome.mean, error, jnp.where(surprising, weight, 0), weight.sum()), 0
    )
    jump = share.sum() > JUMP
    level = share.max() > ONE_SIDED * share.sum()
    shift = jnp.where(jump & level, median(error, jnp.where(surprising, weight, 0)), 0)
    scale = outcome.squared / jnp.maximum(error**2, 1e-30)
    rest = median((error - shift) ** 2 * scale, weight)
    more = jump & (~level | (rest > SURPRISE**2) | (outcome.rounds < JUMP_ROUNDS))
    units = _units(sums, outcome.usual)
    uneven = (rest > UNEVEN) | (units.spread > UNEVEN * outcome.usual)
    same = jump & (more | uneven) & units.same & (outcome.rounds >= JUMP_ROUNDS)
    known, renew = jump & (same | ~uneven), more & ~same
    found = Found(
        jump,
        jnp.where(same, units.shift, shift),
        jnp.where(same, units.ratio, 1),
        known,
        renew,
    )
    new = ChangeState(jnp.where(jump, AFTER_JUMP * share, share), jnp.where(jump, 0, sums), own.odds)
    return new, found


class NewUnits(NamedTuple):
    """Targets in units of the old ones: t = shift + ratio · prediction."""

    shift: Scalar
    ratio: Scalar
    spread: Scalar  # mean square of what a shift alone leaves
    same: Array  # whether that is all that happened


def _units(recent: Array, usual: Scalar) -> NewUnits:
    """Return the line through the last few surprising rows, by least squares."""
    count, m, e, m_e, m_m, e_e = recent
    some = jnp.maximum(count, 1e-30)
    across, along = m_e - m * e / some, jnp.maximum(m_m - m**2 / some, 1e-30)
    more = across / along
    ratio = 1 + more
    left = e_e - e**2 / some
    spread, rest = left / some, (left - more * across) / jnp.maximum(count - 2, 1)
    good = (count >= FITTED) & (ratio > 0) & (rest < SAME * usual * ratio**2)
    return NewUnits((e - more * m) / some, ratio, jnp.where(count >= FITTED, spread, 0), good)


def _moments(old: Array, mean: Array, error: Array, weight: Array, rows: Scalar) -> Array:
    """Return the sums of 1, m, e, m e, m² and e² over the last few rows, discounted; e is the error of m."""
    e = jnp.clip(error, -FARTHEST, FARTHEST)
    sums = jnp.stack([jnp.ones_like(e), mean, e, mean * e, mean**2, e**2]) @ weight
    return 0.5 ** (rows / HALF_LIFE) * old + sums
