r"""Outliers: a row far from its prediction is weighted down, as in robust (WoLF) filters.

With r a row's error in units of the errors so far, the row's likelihood is raised to the power
$w = \min(1, (c / r)^2)$, as by `robust` of the filters. Far garbage counts almost nothing, while the tails of heavy
noise still count.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from opvi.filters._robust import trust
from opvi.tracking._mixing._layer import Forecast, LayerWrapper, Lesson, Nested, Outcome, Report
from opvi.tracking._wrappers._medians import NORMAL, median
from opvi.tracking.experts._expert import Rows
from opvi.types import Array, Key, Tree

LARGEST = 10.0  # c, in units of the errors so far; with 5, dirty small tables are better, and clean ones (yacht) worse


@dataclass(frozen=True)
class Robust(LayerWrapper):
    """A stack that trusts outliers less."""

    def begin(self, columns: int, dtype: Any) -> Tree:
        """Return no state of its own."""
        return ()

    def learn(
        self, key: Key, state: Nested, rows: Rows, forecast: Forecast, outcome: Outcome, lesson: Lesson
    ) -> tuple[Nested, Report]:
        """Learn rows, the less the farther they are from what was expected."""
        believed = jnp.where(lesson.scored > 0, trust(outcome.squared, LARGEST), 1)  # none after a change
        told = lesson._replace(trust=lesson.trust * believed)
        inner, report = self.inner.learn(key, state.inner, rows, forecast, outcome, told)
        return state._replace(inner=inner), report


def among_themselves(y: Array, weight: Array) -> tuple[Array, Array]:
    """Return the trust in the first targets, judged against each other, and the targets with outliers clipped."""
    centre = median(y, weight)
    unit = NORMAL * median(jnp.abs(y - centre), weight)
    w = jnp.where(unit > 0, trust(((y - centre) / jnp.where(unit > 0, unit, 1)) ** 2, LARGEST), 1)
    return w, centre + w * (y - centre)
