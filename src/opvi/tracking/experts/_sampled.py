"""Any sampler that predicts numbers, as an expert."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi.predictive import Predictive
from opvi.tracking.experts._expert import BaseExpert, Belief, Context, Rows, Units
from opvi.types import Array, Batch, Key, Sampler, Scalar, State

LARGEST_INPUT = 10.0  # standard deviations


class SampledState(NamedTuple):
    """A sampler's state, and the units in which it learns: those of the first rows."""

    inner: State
    begin: State  # before any row
    shift: Array  # [F + 1]: what the sampler sees is shift + ratio times the rows of today
    ratio: Array  # [F + 1]


@dataclass(frozen=True)
class Sampled(BaseExpert):
    """Settings of `sampled`."""

    sampler: Sampler

    def init(self, key: Key, columns: int, dtype: Any) -> SampledState:
        """Return the state before any row."""
        begin, zero = self.sampler.init(key), jnp.zeros(columns + 1, dtype)
        return SampledState(begin, begin, zero, zero + 1)

    def predict(self, state: SampledState, rows: Rows) -> Belief:
        """Return the sampler's posterior predictive, by its mean and the two parts of its variance."""
        said: Predictive = self.sampler.predict(state.inner, _seen(state, rows)[0])  # type: ignore[assignment]
        variance, by = said.uncertainty(), state.ratio[-1]
        mean = (said.mean() - state.shift[-1]) / by
        return Belief(mean, variance.epistemic / by**2, noise=variance.aleatoric / by**2)

    def learn(self, key: Key, state: SampledState, rows: Rows, context: Context) -> SampledState:
        """Let the sampler take a step."""
        batch = Batch(_seen(state, rows), rows.weight * context.trust)
        return state._replace(inner=self.sampler.step(key, state.inner, batch)[0])

    def rescale(self, state: SampledState, units: Units) -> SampledState:
        """Return the same sampler, in its own units."""
        by = units.output_ratio
        shift, ratio = jnp.append(units.shift, -units.output_shift / by), jnp.append(units.ratio, 1 / by)
        return state._replace(shift=state.shift + state.ratio * shift, ratio=state.ratio * ratio)

    def forget(self, state: SampledState, keep: Scalar) -> SampledState:
        """Return the sampler as it is, or as before any row if nothing is kept."""
        fresh = SampledState(state.begin, state.begin, jnp.zeros_like(state.shift), jnp.ones_like(state.ratio))
        return jax.tree.map(lambda a, b: jnp.where(keep > 0, a, b), state, fresh)

    def widen(self, state: SampledState, fresh: SampledState) -> SampledState:
        """Return the fresh sampler, which has more columns: what the old one learnt is lost."""
        return fresh


def sampled(sampler: Sampler) -> Sampled:
    """Make an expert of a sampler that predicts numbers, such as `opvi.tracker(target)` of your own model.

    It learns standardised rows, in the units of the first ones, and each row by as much as it is trusted.
    """
    return Sampled(sampler)


def _seen(state: SampledState, rows: Rows) -> tuple[Array, Array]:
    """Return inputs and targets in the units in which the sampler learns."""
    z = jnp.clip(rows.z, -LARGEST_INPUT, LARGEST_INPUT)
    return state.shift[None, :-1] + state.ratio[None, :-1] * z, state.shift[-1] + state.ratio[-1] * rows.y
