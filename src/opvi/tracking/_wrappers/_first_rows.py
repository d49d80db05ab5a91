r"""How a stream begins: the first rows are kept, and all of them are learnt again whenever another joins them.

Units that follow every row, and covariances learnt in the wrong units, do lasting damage if rows come one
by one. So a model learns the first 20 rows in the units of all rows there are, however they arrived.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi._forks import Unforked
from opvi.filters._covariance import when
from opvi.tracking._mixing._layer import Forecast, Nested
from opvi.tracking._placed import placed
from opvi.tracking._wrappers import _columns as columns
from opvi.tracking._wrappers._columns import ENOUGH
from opvi.tracking._wrappers._robust import among_themselves
from opvi.tracking.experts._nearest import put
from opvi.types import Array, Key, Scalar

CHUNK = 32  # rows that are learnt at once, at most
ROOM = ENOUGH - 1 + CHUNK


class Said(NamedTuple):
    """What was predicted for some rows before they were learnt, in their own units, and what was found."""

    log_density: Array  # [B]
    mean: Array  # [B]
    level: Array  # [B]
    probability: Scalar  # that the data have changed


@dataclass(frozen=True)
class FirstRows(Unforked):
    """A model in units, whose first rows are learnt together."""

    inner: Any

    def init(self, key: Key, features: int, dtype: Any) -> Nested:
        """Return the state before any row, with room for X, y, weights, and weights in learning."""
        return Nested(jnp.zeros((ROOM, features + 3), dtype), self.inner.init(key, features, dtype))

    def rows(self, state: Nested, x: Array, y: Array, weight: Array) -> Any:
        """Return rows in the units in use."""
        return self.inner.rows(state.inner, x, y, weight)

    def predict(self, state: Nested, rows: Any) -> Forecast:
        """Return the inner forecast."""
        return self.inner.predict(state.inner, rows)

    def distribution(self, state: Nested, forecast: Forecast) -> Any:
        """Return the components of the predictive."""
        return self.inner.distribution(state.inner, forecast)

    def learn(self, key: Key, state: Nested, x: Array, y: Array, weight: Array) -> tuple[Nested, Said]:
        """Predict some rows, then learn them; the first ones with all those before them, from the beginning."""
        size = len(weight)
        early = (count(state.own) < ENOUGH) & (weight > 0).any()
        held = joined(state.own, (x, y, weight))
        chunks = jnp.pad(jnp.concatenate([held[:, :-2], held[:, -1:]], 1), ((0, size), (0, 0)))
        rows = jnp.concatenate([x, y[:, None], weight[:, None]], 1)
        turns = jnp.where(early, 1 + -(-count(held) // size), 1)

        def begin(inner: Any) -> Any:
            fresh = self.inner.forget(inner, jnp.zeros((), x.dtype))
            values = columns.among_themselves(held[:, :-3], held[:, -2])
            return self.inner.fit(fresh, values, among_themselves(held[:, -3], held[:, -2])[1], held[:, -2])

        def turn(carry: tuple[Array, Any, Said]) -> tuple[Array, Any, Said]:
            """Learn a chunk; of the first rows, the first turn only predicts the new ones."""
            i, inner, said = carry
            inner = when(early & (i == 1), begin, inner)
            again = jax.lax.dynamic_slice_in_dim(chunks, jnp.maximum(i - 1, 0) * size, size)
            here = jnp.where(i == 0, rows, again)
            here = here.at[:, -1].multiply(jnp.where(early & (i == 0), 0, 1).astype(x.dtype))
            inner, new = self._learn(key, inner, here, ~early)
            return i + 1, inner, jax.tree.map(lambda a, b: jnp.where(i == 0, a, b), new, said)

        zero = jnp.zeros_like(y)
        start = jnp.zeros((), jnp.int32), state.inner, Said(zero, zero, zero, jnp.zeros((), x.dtype))
        _, inner, said = jax.lax.while_loop(lambda carry: carry[0] < turns, turn, start)
        return Nested(jnp.where(early, held, state.own), inner), said

    def _learn(self, key: Key, inner: Any, here: Array, begun: Array) -> tuple[Any, Said]:
        x, y, weight = here[:, :-2], here[:, -2], here[:, -1]
        rows = self.inner.rows(inner, x, y, weight)
        forecast = self.inner.predict(inner, rows)
        outcome = self.inner.score(inner, forecast, rows.y)
        said = self.inner.said(inner, outcome)
        inner, report = self.inner.learn(key, inner, rows, y, forecast, outcome, begun)
        return inner, Said(said[0], said[1], said[2], report.probability)

    def relearn(self, key: Key, state: Nested, x: Array, y: Array, weight: Array) -> Nested:
        """Learn from rows seen before, which teach the experts and nothing else."""
        rows = self.inner.rows(state.inner, x, y, jnp.where(count(state.own) > 0, weight, 0))
        return state._replace(inner=self.inner.relearn(key, state.inner, rows))

    def widen(self, state: Nested, fresh: Nested) -> Nested:
        """Return the state with more columns."""
        features, wide = state.own.shape[1] - 3, fresh.own.shape[1]
        there = jnp.r_[0:features, wide - 3 : wide]
        return Nested(placed(fresh.own, (slice(None), there), state.own), self.inner.widen(state.inner, fresh.inner))


def count(held: Array) -> Array:
    """Return how many of the first rows are held."""
    return (held[:, -2] > 0).sum(dtype=jnp.int32)


def joined(held: Array, rows: tuple[Array, ...]) -> Array:
    """Return the rows held followed by those of a chunk; wild targets weigh less in the last column."""
    x, y, weight = rows
    here = weight > 0
    number = count(held) + jnp.cumsum(here, dtype=jnp.int32)
    place = jnp.where(here, number - 1, ROOM)
    held = put(held, place, jnp.concatenate([x, jnp.stack([y, weight, weight], 1)], 1))
    trust = among_themselves(held[:, -3], held[:, -2])[0]
    return jnp.concatenate([held[:, :-1], (held[:, -2] * trust)[:, None]], 1)
