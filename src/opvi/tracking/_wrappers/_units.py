r"""Units: a model learns standardised rows, by means and deviations of the rows so far, and follows when these move.

$$z_j = (x_j - \bar x_j) / s_j, \qquad y' = (y - \bar y) / s_y$$

Rows are predicted and learnt in the units before them. A value more than 100 deviations off stands for "none", such as
-999, and counts as missing. When the scale in use is out of date, everything inside is re-expressed in new units.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi._forks import Unforked
from opvi.filters._covariance import when
from opvi.tracking._mixing._layer import Forecast, Lesson, Nested, Outcome, Report
from opvi.tracking._mixing._members import USUAL_ROWS
from opvi.tracking._placed import placed
from opvi.tracking._wrappers import _columns as columns
from opvi.tracking._wrappers import _scaling as scaling
from opvi.tracking._wrappers._medians import recent
from opvi.tracking._wrappers._scaling import SCALE_MEMORY, Moments, Scale
from opvi.tracking.experts._expert import Rows
from opvi.tracking.experts._expert import Units as Change
from opvi.types import Array, Key, Scalar

LARGEST_TARGET = 1e6  # standard deviations
PARTIAL = 0.1  # what a row weighs in which values are missing
SCALE_OFF = 0.25  # in deviations, or in their logarithm: the scale in use is out of date
EARLY_SCALE_OFF = 0.03  # while warming up
SOON, SOON_SCALE_OFF = 2.5, 0.06  # and from then on until so many times as many rows
OUTSIDE = 3.0  # deviations of a column, from which a row is far outside; twice as many: entirely
RENEWED = 20.0  # rows that the past of y counts for after a jump that is not one of its level or unit


class UnitsState(NamedTuple):
    """Means and deviations."""

    moments: Moments  # of the columns of X, then y
    scale: Scale  # in use; it follows the moments, at first closely
    scaled_at: Scalar  # rows seen when it last did
    odd: Array  # [F]: shares of the last few rows whose value is too far off to be one


@dataclass(frozen=True)
class Units(Unforked):
    """A stack in units that follow the stream."""

    inner: Any
    warm_up: int  # rows until which the scale follows small changes

    def init(self, key: Key, features: int, dtype: Any) -> Nested:
        """Return the state before any row."""
        moments = scaling.start(features + 1, dtype)
        own = UnitsState(moments, scaling.scale_of(moments), jnp.zeros((), dtype), jnp.zeros(features, dtype))
        return Nested(own, self.inner.init(key, features, dtype))

    def rows(self, state: Nested, x: Array, y: Array, weight: Array) -> Rows:
        """Return rows in the units in use."""
        scale: Scale = state.own.scale
        inputs = scaling.of_inputs(scale)
        z = scaling.readable(inputs, x)
        weight = jnp.where(scaling.far(inputs, x).any(1), PARTIAL * weight, weight)
        y = jnp.clip((y - scale.mean[-1]) / scaling.divisor(scale)[-1], -LARGEST_TARGET, LARGEST_TARGET)
        away = jnp.where((x == 0) | (x == 1), 0, jnp.abs(z)).max(1)  # a rare level's indicator is not far outside
        return Rows(x, z, y, weight, jnp.zeros_like(y), jnp.clip(jnp.log2(jnp.maximum(away, OUTSIDE) / OUTSIDE), 0, 1))

    def predict(self, state: Nested, rows: Rows) -> Forecast:
        """Return the inner forecast."""
        return self.inner.predict(state.inner, rows)

    def distribution(self, state: Nested, forecast: Forecast) -> Any:
        """Return the components of the predictive, in the units of y."""
        said, unit = self.inner.distribution(state.inner, forecast), scaling.divisor(state.own.scale)[-1]
        mean = said.mean * unit + state.own.scale.mean[-1]
        return said._replace(mean=mean, variance=said.variance * unit**2, spread=said.spread * unit**2)

    def score(self, state: Nested, forecast: Forecast, y: Array) -> Outcome:
        """Return how a forecast did."""
        return self.inner.score(state.inner, forecast, y)

    def said(self, state: Nested, outcome: Outcome) -> tuple[Array, Array, Array]:
        """Return log density, mean and level of what was predicted, in the units of y."""
        unit = scaling.divisor(state.own.scale)[-1]
        mean = outcome.mean * unit + state.own.scale.mean[-1]
        return outcome.log_density - jnp.log(unit), mean, outcome.level

    def learn(
        self, key: Key, state: Nested, rows: Rows, raw: Array, forecast: Forecast, outcome: Outcome, begun: Array
    ) -> tuple[Nested, Report]:
        """Learn rows, then let the units follow them.

        Args:
            key: for the experts.
            state: before the rows.
            rows: in the units in use.
            raw: the targets as they came.
            forecast: what was predicted for them.
            outcome: and how that did.
            begun: whether they are not among the first rows, whose errors and moments do not count.
        """
        weight = jnp.where(begun, rows.weight, 0)
        lesson = Lesson(jnp.ones_like(weight), weight, jnp.array(False))
        inner, report = self.inner.learn(key, state.inner, rows, forecast, outcome, lesson)
        own = _jumped(state.own, rows, raw, weight, report)
        unit, centre = scaling.divisor(state.own.scale)[-1], state.own.scale.mean[-1]
        believed = outcome.mean + report.trust * (rows.y - outcome.mean)  # an outlier moves towards its prediction
        followed, x = _followed(own, rows, jnp.where(report.trust < 1, believed * unit + centre, raw), weight)
        due, now = self._due(own, followed, x, weight, begun & report.renew)
        own = followed

        def change(parts: tuple[UnitsState, Any]) -> tuple[UnitsState, Any]:
            return self._rescaled(*parts, now)

        return Nested(*when(due, change, (own, inner))), report

    def fit(self, state: Nested, x: Array, y: Array, weight: Array) -> Nested:
        """Return the state in the units of these rows."""
        fresh = scaling.start(x.shape[1] + 1, x.dtype)
        moments = scaling.update(fresh, jnp.concatenate([x, y[:, None]], 1), weight, SCALE_MEMORY)
        own = state.own._replace(moments=moments, scale=scaling.scale_of(moments), scaled_at=moments.seen)
        return state._replace(own=own)

    def relearn(self, key: Key, state: Nested, rows: Rows) -> Nested:
        """Learn from rows seen before, which teach the experts and nothing else."""
        return state._replace(inner=self.inner.relearn(key, state.inner, rows))

    def forget(self, state: Nested, keep: Scalar) -> Nested:
        """Return the same units, and what is inside with a share of its past."""
        return state._replace(inner=self.inner.forget(state.inner, keep))

    def widen(self, state: Nested, fresh: Nested) -> Nested:
        """Return the state with more columns, which have been constant so far."""
        features, wide = len(state.own.odd), len(fresh.own.odd)
        both = jnp.r_[0:features, wide]
        (seen, mean, square), scale = state.own.moments, state.own.scale
        new: UnitsState = fresh.own
        own = state.own._replace(
            moments=Moments(seen, placed(new.moments.mean, both, mean), placed(new.moments.square, both, square)),
            scale=Scale(placed(new.scale.mean, both, scale.mean), placed(new.scale.sd, both, scale.sd)),
            odd=placed(new.odd, slice(features), state.own.odd),
        )
        return Nested(own, self.inner.widen(state.inner, fresh.inner))

    def _due(self, old: UnitsState, new: UnitsState, x: Array, weight: Array, anew: Array) -> tuple[Array, Array]:
        """Return whether the scale should follow the moments now, and the current values of the columns."""
        seen = new.moments.seen
        now = (x * weight[:, None]).sum(0) / jnp.maximum(weight.sum(), 1e-30)
        there, scale = scaling.scale_of(new.moments), new.scale
        later = jnp.where(seen <= SOON * self.warm_up, SOON_SCALE_OFF, SCALE_OFF)
        tolerance = jnp.where(seen <= self.warm_up, EARLY_SCALE_OFF, later)
        moved = jnp.abs(there.mean - scale.mean) > tolerance * scaling.divisor(scale)
        grown = jnp.abs(jnp.log(scaling.divisor(there) / scaling.divisor(scale))) > tolerance
        off = ((there.sd > 0) & (moved | grown | (scale.sd == 0))).any()
        # Units change as often, however the rows come; a count that has reached its memory stands still.
        turned = jnp.floor(seen / USUAL_ROWS) > jnp.floor(old.moments.seen / USUAL_ROWS)
        turned |= seen > SCALE_MEMORY - USUAL_ROWS
        due = turned & (off | (seen >= 2 * new.scaled_at))
        return (due | anew) & (new.scaled_at > 0), now

    def _rescaled(self, own: UnitsState, inner: Any, now: Array) -> tuple[UnitsState, Any]:
        """Return the scale of the moments, and everything inside in its units."""
        old, new = own.scale, scaling.scale_of(own.moments)
        # A target that stands still keeps its unit: with a smaller one, all that was learnt would have to grow.
        new = new._replace(sd=scaling.with_last(new.sd, jnp.where(new.sd[-1] > 0, new.sd[-1], old.sd[-1])))
        known = (old.sd > 0) & (new.sd > 0)
        ratio = jnp.where(known, new.sd / scaling.divisor(old), 1)
        shift = jnp.where(old.sd > 0, (new.mean - old.mean) / scaling.divisor(old), 0)
        begins = (old.sd == 0) & (new.sd > 0)
        change = Change(
            shift[:-1],
            ratio[:-1],
            begins[:-1],
            scaling.readable(scaling.of_inputs(new), now[None])[0],
            jnp.where(known[-1], old.sd[-1] / scaling.divisor(new)[-1], 1),
            (old.mean - new.mean)[-1] / scaling.divisor(new)[-1],
        )
        return own._replace(scale=new, scaled_at=own.moments.seen), self.inner.rescale(inner, change)


def _jumped(own: UnitsState, rows: Rows, y: Array, weight: Array, report: Report) -> UnitsState:
    """Return the units after a jump: y has a new level or unit, or its past is of no use."""
    moments, old = own.moments, own.scale
    unit = scaling.divisor(old)[-1]
    mean = old.mean[-1] + report.shift * unit
    centre = mean + report.ratio * (moments.mean[-1] - old.mean[-1])
    fade = jnp.where(report.renew, jnp.minimum(1, RENEWED / jnp.maximum(moments.seen, 1)), 1)
    square = scaling.with_last(moments.square, moments.square[-1] * report.ratio**2)
    return own._replace(
        moments=Moments(moments.seen * fade, scaling.with_last(moments.mean, centre), square * fade),
        scale=Scale(scaling.with_last(old.mean, mean), scaling.with_last(old.sd, old.sd[-1] * report.ratio)),
        scaled_at=jnp.minimum(own.scaled_at, moments.seen * fade),
    )


def _followed(own: UnitsState, rows: Rows, y: Array, weight: Array) -> tuple[UnitsState, Array]:
    """Return the moments with some rows in them, and their inputs with means where values are missing.

    Columns that have moved for good, or moved back, get new means.
    """
    inputs = scaling.of_inputs(own.scale)
    missing = scaling.far(inputs, rows.x)
    odd = jnp.where(weight.sum() > 0, recent(own.odd, missing, weight), own.odd)
    odd, shift = columns.moved(odd, inputs.mean, rows.x, jnp.where(missing, weight[:, None], 0))
    more = jnp.append(shift, 0)
    moments = own.moments._replace(mean=own.moments.mean + more)
    scale = own.scale._replace(mean=own.scale.mean + more)
    x = jnp.where(missing, scale.mean[None, :-1], rows.x)
    new = scaling.update(moments, jnp.concatenate([x, y[:, None]], 1), weight, SCALE_MEMORY)
    good = jnp.isfinite(sum(leaf.sum() for leaf in new))
    new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, moments)
    return own._replace(moments=new, scale=scale, odd=odd), x
