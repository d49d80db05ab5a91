r"""A classifier between two batches: weights, exponents, the last rows and labels, and linear filters learn each row.

A batch of a network changes all of its factors, which takes as long for one row as for twenty. So whole networks learn
batches, and so does the store of all rows; they are read between two batches, never copied. The rest learns every row
once, in order: the weights of the trackers, the exponents of their mixture, the last 1,024 rows, the last labels and
the linear filters. To learn the last layers of the networks as well, as a regressor does, changed nothing: the linear
filters and the last rows had learnt the same already. It is for classifiers that remember rows; without, networks that
learn each row predict better.

A row is looked at once: what the trackers say of it is both the answer to a question and what the row teaches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp

from opvi._steps import LARGEST_COUNT, compiled, one_more
from opvi.filters import LinearState
from opvi.filters._covariance import exactly
from opvi.predictive import Categorical, Predictive
from opvi.tracking import _class_memory as memories
from opvi.tracking import _class_mixture as mixture
from opvi.tracking._wrappers import _columns as columns
from opvi.tracking._wrappers import _scaling as scaling
from opvi.tracking import _temperature as temperature
from opvi.tracking._bank import update as reweigh
from opvi.tracking._classifier import Classifier, ClassifierInfo, ClassifierState, cut_rows, valid_rows
from opvi.tracking.experts._metric import Metric
from opvi.tracking._probabilities import chosen, of_networks
from opvi.types import Array, ArrayLike, Batch, Key, Particles, Predicted


class Held(NamedTuple):
    """What only batches change."""

    networks: tuple[Particles, ...]
    store: memories.Kept | None
    stored: Array | None  # rows seen when it was filled
    metric: Metric | None


class BetweenState(NamedTuple):
    """What the next row needs, and nothing else."""

    held: Held | None  # None while a row is learnt
    moments: scaling.Moments
    linear: LinearState | None
    log_weights: Array
    exponents: temperature.Exponents
    round: Array
    rows: Array
    memory: memories.ClassMemory | None  # without what is held
    first: Array  # as in `ClassifierState`
    odd: Array

    @property
    def particles(self) -> Particles:
        """The networks' weights, `[n, d]`."""
        return jnp.concatenate(self.held.networks)  # type: ignore[union-attr]


@dataclass(frozen=True)
class ClassifierBetween(Classifier):
    """Settings of a classifier whose networks do not learn."""

    answers: ClassVar[Callable[..., Array]] = staticmethod(Predictive.probabilities)  # what `look` answers
    lasting: ClassVar[str] = "held"  # of a state: what only batches change
    shares: ClassVar[bool] = True  # whether its states share arrays with those of whole networks

    def ready(self, state: ClassifierState) -> bool:
        """Return True: linear filters and the memory learn from the first row on."""
        return True

    def follow(self, state: ClassifierState, before: BetweenState | None) -> BetweenState:
        """Return the state after whole networks learnt a batch, with what was learnt row by row.

        Args:
            state: the state of whole networks; its arrays are shared, not copied.
            before: what learnt the rows of the batch one by one; None at the start.
        """
        memory, held = state.memory, Held(tuple(net.particles for net in state.networks), None, None, None)
        if memory is not None:
            held = held._replace(store=memory.all, stored=memory.seen, metric=memory.metric)
            memory = memory._replace(all=None, metric=None)  # type: ignore[arg-type]
        first, odd = jnp.asarray(state.first), jnp.asarray(state.odd)
        if before is not None:
            return before._replace(held=held, moments=state.moments, first=first, odd=odd)
        mixed = state.linear, state.log_weights, state.exponents, state.round, state.rows
        return BetweenState(held, state.moments, *mixed, memory, first, odd)

    @compiled
    @exactly
    def step(self, key: Key, state: BetweenState, batch: Batch) -> tuple[BetweenState, ClassifierInfo]:  # type: ignore[override]
        """Predict one row, and learn from it."""
        parts, _ = cut_rows(self, state.log_weights.dtype, batch)
        (x, y), weight = jax.tree.map(lambda leaf: leaf[0], parts)
        new, info = self.teach(key, state._replace(held=None), Batch((x, y), weight), self.look(state, x))
        return new._replace(held=state.held), info

    @exactly
    def look(self, state: BetweenState, x: Array) -> tuple[Array, Array]:
        """Return the mixture's and the trackers' log probabilities `[1 + K, B, C]`, and calibrated probabilities."""
        _, log_k = _members(self, state, x)
        both = mixture.with_mixture(state, log_k)
        return both, jnp.exp(temperature.pool(state.exponents, both))

    @exactly
    def teach(
        self, key: Key, state: BetweenState, row: Batch, looked: tuple[Array, Array]
    ) -> tuple[BetweenState, ClassifierInfo]:
        """Learn one row, given what `look` returned. If it is not finite or has no valid class, it is refused."""
        (x, y), weight = row
        both, p = looked
        valid = valid_rows(self, x, y, weight)
        weight, y = jnp.where(valid, weight, 0), jnp.clip(y, 0, self.classes - 1)
        x, both = jnp.where(valid, x, 0), jnp.where(valid, both, 0)
        moments, first, odd = columns.learn(state.moments, state.first, state.odd, x, weight)
        lines, memory = state.linear, state.memory
        if memory is not None:
            memory = memories.remember(memory, x, y, weight, 0)
        if self.filters is not None and lines is not None:
            lines, _ = self.filters.step(key, lines, Batch((mixture.scaled(moments, x), y), weight))
        new = state._replace(
            moments=moments,
            linear=lines,
            log_weights=reweigh(state.log_weights, chosen(both[1:], y), weight),
            exponents=temperature.update(state.exponents, both, y, weight),
            rows=state.rows + jnp.minimum((weight > 0).sum(dtype=jnp.int32), LARGEST_COUNT - state.rows),
            memory=memory,
            first=first,
            odd=odd,
        )
        good = valid & jnp.isfinite(sum(m.sum() for m in moments)) & jnp.isfinite(new.log_weights).all()
        new = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, state)._replace(round=one_more(state.round))
        said = Predicted(jnp.log(chosen(p[None], y)[0]), probabilities=p)
        said = jax.tree.map(lambda leaf: jnp.where(good, leaf, jnp.nan), said)
        still, weights = jnp.zeros((), p.dtype), jnp.exp(new.log_weights)
        return new, ClassifierInfo(new.rows, said.log_density.mean(), still, good, weights, said)

    def predict(self, state: BetweenState, x: ArrayLike) -> Predictive:  # type: ignore[override]
        """Return the posterior predictive at X."""
        log_p, log_weights = _components(self, state, jnp.asarray(x).astype(state.log_weights.dtype))
        return Predictive(Categorical(log_p), log_weights)


def _members(sampler: ClassifierBetween, state: BetweenState, x: Array) -> tuple[Array, Array]:
    """Return log probabilities of every particle `[n, B, C]` and every tracker `[K, B, C]`."""
    z, held = mixture.scaled(state.moments, x), cast(Held, state.held)
    log_p = of_networks([(net.target, w) for net, w in zip(sampler.networks, held.networks, strict=True)], z)
    memory: Any = state.memory
    if memory is not None:
        memory = memory._replace(all=held.store, metric=held.metric)
    return mixture.members(sampler, state._replace(memory=memory), z, log_p, held.stored)


@exactly
def _components(sampler: ClassifierBetween, state: BetweenState, x: Array) -> tuple[Array, Array]:
    """Return components and log weights that add up to the calibrated probabilities."""
    return mixture.components(state, *_members(sampler, state, x))
