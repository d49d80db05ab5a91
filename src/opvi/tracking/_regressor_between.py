r"""A regressor's networks between two batches: of each one the last layer alone learns, row by row.

A batch changes whole covariances, which takes as long for one row as for twenty. So the rows that wait for a batch
teach the last layers, whose covariances are small, and what is learnt from errors. When the batch is full, whole
networks learn it, and what the last layers had learnt from it is dropped.

Half of the last layers have the covariance that whole networks give them, and follow fast. Given the other layers it
is too large; the other half keep one of their own, of all rows so far. The weights of the networks decide.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import compiled, root_mean_square, tick
from opvi.filters._covariance import Blocks, Covariance, exactly
from opvi.predictive import Predictive
from opvi.targets import cast
from opvi.tracking import _calibration as calibration
from opvi.tracking import _chunks as chunks
from opvi.tracking import _gates as gates
from opvi.tracking import _guard as guard
from opvi.tracking import _jumps as jumps
from opvi.tracking import _memory as memories
from opvi.tracking import _pace as pacing
from opvi.tracking import _process as processes
from opvi.tracking import _regressor_learning as learning
from opvi.tracking import _scaling as scaling
from opvi.tracking._calibration import USUAL_ROWS, Combined
from opvi.tracking._regressor import Regressor
from opvi.tracking._regressor_jumps import jump_odds
from opvi.tracking._regressor_types import RegressorInfo, RegressorState, whole_blocks
from opvi.tracking._regressor_units import standardised
from opvi.types import Array, Batch, Key, Predicted

RESET = 0.5  # fewer rounds known than before, in batches of the usual size: a jump was found


class Looked(NamedTuple):
    """What is predicted for some rows, and how it depends on the last layers."""

    z: Array  # the rows, standardised
    seen: learning.Linearised
    recalled: memories.Recalled | None
    plain: Combined  # without the rows remembered
    one: Combined
    depends: Array  # what the sizes of errors may depend on


@dataclass(frozen=True)
class RegressorBetween(Regressor):
    """Settings of a regressor of whose networks only the last layers learn."""

    answers: ClassVar[Callable[..., Array]] = staticmethod(Predictive.mean)  # what `look` answers
    lasting: ClassVar[str] = "process"  # of a state: what only batches change
    shares: ClassVar[bool] = False  # whether its states share arrays with those of whole networks

    @cached_property
    def blocks(self) -> Blocks:
        """The last layer's place among the weights."""
        dim = self.network.dim
        return Blocks(np.arange(dim - self.hidden[-1] - 1, dim)[None], dim)

    def ready(self, state: RegressorState) -> bool:
        """Return whether whole networks have learnt their first rows."""
        return bool(np.asarray(state.scaled_at) > 0)

    @exactly
    def follow(self, state: RegressorState, before: RegressorState | None) -> RegressorState:
        """Return the state after whole networks learnt a batch, with what was learnt from errors row by row.

        Args:
            state: the state of whole networks.
            before: what learnt the rows of the batch one by one; None at the start.
        """
        past = Covariance(last_layers(state.past.matrices, whole_blocks(self), self.blocks), state.past.updates)
        nothing = jnp.zeros((), state.error.dtype)
        state = state._replace(past=past, held=nothing, begin=nothing, trail=None)
        state = state._replace(memory=memories.following(state.memory))
        if before is None:
            return state
        ratio = scaling.divisor(before.scale)[-1] / scaling.divisor(state.scale)[-1]
        known = calibration.rescale(before.calibration, ratio)
        fast = (jnp.arange(self.particles) < self.particles // 2)[:, None, None, None]
        own = past._replace(matrices=jnp.where(fast, past.matrices, before.past.matrices * ratio**2))
        # After a jump, what was learnt before it is of no use.
        jumped = state.calibration.rounds < known.rounds - RESET
        mine = before._replace(error=before.error * ratio**2, calibration=known, past=own)
        kept = jax.tree.map(lambda a, b: jnp.where(jumped, a, b), _from_errors(state), _from_errors(mine))
        return state._replace(**kept)

    def startled(self, probability: Array | None) -> bool:
        """Return whether the rows just learnt look like a jump, given how probable that is."""
        return probability is not None and bool(np.asarray(probability).max() > jumps.ALARM)

    @compiled
    @exactly
    def step(self, key: Key, state: RegressorState, batch: Batch) -> tuple[RegressorState, RegressorInfo]:
        """Predict a few rows, and learn from them."""
        batch = cast(batch, state.particles.dtype)
        return self.teach(key, state, batch, self.look(state, batch.data[0]))

    @exactly
    def look(self, state: RegressorState, x: Array) -> tuple[Looked, Array]:
        """Return what is predicted for rows, with what teaching them needs, and the predictive's mean."""
        known, kept = state.calibration, (self.remembered, self.half_life)
        z, _ = standardised(state, x, jnp.zeros(len(x), x.dtype))
        seen = learning.linearise(self, state, z)
        recalled = memories.recall(state.memory, state.scale, state.gates, z, known.error, *kept, x)
        doubt = seen.variance[calibration.trusted(known)]
        full = gates.at_full_size(state.gates, z)
        beside = processes.beside(state.process, state.scale, x)
        plain, one, depends = memories.combine(state.memory, recalled, known, seen.mean, doubt, full, beside)
        mean = one.mean * scaling.divisor(state.scale)[-1] + state.scale.mean[-1]
        return Looked(z, seen, recalled, plain, one, depends), mean

    @exactly
    def teach(
        self, key: Key, state: RegressorState, row: Batch, looked: tuple[Looked, Array]
    ) -> tuple[RegressorState, RegressorInfo]:
        """Learn rows, given what `look` returned. If they are not finite, they are refused."""
        clock, particles = tick(state, row), state.particles
        cut, weight, finite = chunks.cut(self.features, row, particles.dtype)
        said, probability, state = _learn(self, state, tuple(part[0] for part in cut), *looked)
        total = jnp.maximum(weight.sum(), 1e-30)
        squared = ((row.data[1].astype(weight.dtype) - said.mean) ** 2 * weight).sum() / total
        density = (said.log_density * weight).sum() / total
        drift = root_mean_square(state.particles - particles)
        info = RegressorInfo(clock.rows, density, squared, drift, finite, said, probability)
        return state._replace(round=clock.round, rows=clock.rows), info


def _from_errors(state: RegressorState) -> dict[str, Any]:
    """Return what is learnt row by row, and not with a batch."""
    names = ("error", "calibration", "surprised", "recent", "odds", "memory", "past")
    return {name: getattr(state, name) for name in names}


def last_layers(matrices: Array, whole: Blocks, last: Blocks) -> Array:
    """Return the covariances of the last layers, `[n, 1, D, D]`, out of those of whole networks."""
    first, size = last.order[0, 0], last.order.shape[1]
    if len(whole.order) == 1:
        return matrices[:, :, first:, first:]
    out = jnp.zeros((len(matrices), size, size), matrices.dtype)
    for k, order in enumerate(whole.order):
        here = np.flatnonzero((order >= first) & (order < whole.dim))
        there = order[here] - first
        out = out.at[:, there[:, None], there[None]].set(matrices[:, k][:, here[:, None], here[None]])
    return out[:, None]


def _learn(
    sampler: RegressorBetween, state: RegressorState, rows: tuple[Array, ...], looked: Looked, mean: Array
) -> tuple[Predicted, Array, RegressorState]:
    """Return what was predicted for some rows, the probability of a jump, and the state after them; units stay."""
    x, y, weight = rows
    z, seen, recalled, plain, one, depends = looked
    begun, known, kept = jnp.array(True), state.calibration, (sampler.remembered, sampler.half_life)
    missing = scaling.far(scaling.of_inputs(state.scale), x)
    weight = jnp.where(missing.any(1), learning.PARTIAL * weight, weight)
    target = standardised(state, x, y)[1]
    scores = calibration.scored(known, one, target)
    density = calibration.log_predictive(known, scores) - jnp.log(scaling.divisor(state.scale)[-1])
    level = calibration.level(known, scores)
    said = Predicted(density, mean, level)
    found = guard.believe(known, one, state.scale, (state.surprised, state.recent), (y, weight), begun)
    learnt = jnp.where(found.jump, 0, weight)
    if state.memory is not None:
        slope = learning.slopes(sampler, state, z, seen.first)
        noted = memories.Rows(x, y, learnt * found.trust, target, plain.mean, slope)
        memory = memories.learn(state.memory, recalled, noted, state.scale, known.error, begun, *kept)
        state = state._replace(memory=memory)
    state = learning.learn_errors(state, seen.mean, one, scores, (depends, target, learnt), found.trust, begun)
    new = jnp.concatenate([jnp.where(missing, state.scale.mean[None, :-1], x), found.y[:, None]], 1)
    moments = scaling.update(state.moments, new, weight, scaling.SCALE_MEMORY)
    state = state._replace(moments=moments, surprised=found.surprised, recent=found.recent)
    odds, probability = jump_odds(state, known, recalled, found, level, learnt * found.trust)
    state = state._replace(odds=odds)
    forgetting = sampler.each("forgetting", target) ** (weight.sum() / USUAL_ROWS * pacing.faster(state.pace))
    now, no = (z, target, weight * found.trust), jnp.array(False)
    return said, probability, learning.absorb(sampler, state, seen, now, forgetting, no, no)
