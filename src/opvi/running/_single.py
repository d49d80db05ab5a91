"""One row at a time, the shortest way through Python and JAX: no padding, and nothing is read that nobody asked for.

Matrices are so small that BLAS uses one thread by itself.
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax
import numpy as np

from opvi._forks import refuse_forked
from opvi.running._engine import Engine, program
from opvi.running._rows import as_rows
from opvi.types import Array, ArrayLike, Batch, Data, Info, Key, Sampler, Tree


class Looks(Protocol):
    """A sampler whose look at a row both answers a question and teaches."""

    answers: Callable[..., Array]  # which question, of those that a predictive answers
    lasting: str  # the part of a state that rows do not change
    shares: bool  # whether a state shares arrays with others, and so must not be overwritten

    def look(self, state: Tree, x: Array) -> tuple[Tree, Array]:
        """Return what is said of rows, and the answer."""

    def teach(self, key: Key, state: Tree, row: Batch, looked: Tree) -> tuple[Tree, Info]:
        """Learn a row, given what `look` returned."""


def looked(sampler: Looks, state: Tree, x: Array) -> tuple[Tree, Array]:
    """Return what `sampler.look` says of a row, and its answer."""
    return sampler.look(state, x)


def taught(sampler: Looks, key: Key, state: Tree, data: Data, weight: Array, seen: Tree) -> tuple[Tree, Array | None]:
    """Return the state after a row that was looked at, and how probable a jump is, if the sampler says that."""
    state, info = sampler.teach(key, state, Batch(data, weight), seen)
    return state, getattr(info, "probability", None)


def said(sampler: Sampler, what: Callable[..., Tree], static: tuple[Hashable, ...], state: Tree, x: Array) -> Tree:
    """Return a function of the predictive at a row."""
    return what(sampler.predict(state, x), *static)


class Single:
    """A sampler that learns one row per call. Unlike an `Engine`, it may not be asked while it learns.

    It looks at a row when it is asked about it, and not again when it is learnt. Unless its sampler
    shares its state with others, that is overwritten by the next row, apart from what rows do not change.

    Args:
        sampler: what learns, and has `look` and `teach`.
        key: a JAX key.
        state: where to begin.
    """

    def __init__(self, sampler: Any, key: Key, state: Tree):
        self.sampler, self.key = sampler, key
        self.state = state
        self._dtype = np.dtype(state.moments.mean.dtype)

    @property
    def state(self) -> Tree:
        """What predictions are made from."""
        return self._state

    @state.setter
    def state(self, state: Tree) -> None:
        self._state = state
        self._seen: tuple[bytes, Tree] | None = None  # the row looked at last, and what it said
        self._found: dict[Hashable, Callable[..., Tree]] = {}  # programs for states of these shapes, by those of rows

    def feed(self, data: Data, weight: ArrayLike | None) -> Array | None:
        """Learn from one row `(x, y)`; return how probable a jump is, if the sampler says that."""
        data = as_rows(data, self._dtype)
        count = np.ones(1, self._dtype) if weight is None else np.asarray(weight, self._dtype)
        state, part = self._state, self.sampler.lasting
        seen, lasting = self._look(data[0]), getattr(state, part)
        given = self.key, state._replace(**{part: None}), data, count, seen
        kind = data[0].shape, data[0].dtype, data[1].dtype
        teach = self._found.get(kind)
        if teach is None:
            made = program(taught, 1, False, None if self.sampler.shares else 2)
            teach = self._found[kind] = made.ready(self.sampler, *given)
        new, probability = teach(*given)
        self._state, self._seen = new._replace(**{part: lasting}), None
        return probability

    def ask(self, x: Tree, what: Callable[..., Tree], *static: Hashable) -> Tree:
        """Apply a function to the predictive at some rows, as `Engine.ask` does."""
        refuse_forked()
        x = as_rows(x, self._dtype)
        if len(x) > 1:
            return self.engine().ask(x, what, *static)
        if what is self.sampler.answers:
            return np.asarray(self._look(x)[1])
        found = program(said, 3, False)(self.sampler, what, static, self._state, x)
        return jax.tree.map(np.asarray, found)

    def _look(self, x: np.ndarray) -> Tree:
        row = x.tobytes()
        if self._seen is None or self._seen[0] != row:
            kind = x.shape, x.dtype
            look = self._found.get(kind)
            if look is None:
                look = self._found[kind] = program(looked, 1, False).ready(self.sampler, self._state, x)
            self._seen = row, look(self._state, x)
        return self._seen[1]

    def engine(self) -> Engine:
        """Return an engine with this sampler and state."""
        return Engine(self.sampler, self.key, batch=1, state=self._state)

    def __getstate__(self) -> dict[str, Any]:
        return {"engine": self.engine()}  # which knows how to be pickled

    def __setstate__(self, held: dict[str, Any]) -> None:
        engine = held["engine"]
        self.__init__(engine.sampler, engine.key, engine.state)  # type: ignore[misc]
