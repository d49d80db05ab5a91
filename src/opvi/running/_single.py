"""One row at a time, the shortest way through Python and JAX, for samplers that look at a row before it teaches them."""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from opvi._cpu import one_blas_thread
from opvi._forks import refuse_forked
from opvi.predictive import Predictive
from opvi.running._engine import Engine, program
from opvi.running._traced import placed
from opvi.types import Array, ArrayLike, Batch, Data, Key, Tree


def looked(sampler: Any, state: Tree, x: Array) -> tuple[Tree, Array]:
    """Return what `sampler.look` says of one row, and its probabilities."""
    return sampler.look(state, x)


def taught(sampler: Any, key: Key, state: Tree, x: Array, y: Array, weight: Array, seen: Tree) -> Tree:
    """Return the state after a row that was looked at."""
    return sampler.teach(key, state, Batch((x, y), weight), seen)[0]


class Single:
    """A sampler that learns one row per call, in two programs: the first looks at a row, the second learns it.

    A row that was asked about last is not looked at again when it is learnt.

    Args:
        sampler: what learns, with `look` and `teach`; its state has `held`, which rows do not change.
        key: a JAX key.
        state: where to begin.
    """

    def __init__(self, sampler: Any, key: Key, state: Tree):
        self.sampler, self.key, self.state = sampler, key, placed(state)
        self._at: tuple[Tree, bytes, Tree] | None = None  # the state and the row looked at last, and what it said

    def feed(self, data: Data, weight: ArrayLike | None, *, last: bool = True) -> None:
        """Learn from one row `(x, y)`."""
        x, y = data
        x = np.asarray(x, self.dtype)
        count = np.ones(1, self.dtype) if weight is None else np.asarray(weight, self.dtype)
        seen, state = self._look(x), self.state
        with one_blas_thread():
            new = program(taught, 1, False)(
                self.sampler, self.key, state._replace(held=None), x, np.asarray(y, np.int32), count, seen
            )
        self.state, self._at = new._replace(held=state.held), None

    def ask(self, x: Tree, what: Callable[..., Tree], *static: Hashable) -> Tree:
        """Apply a function to the predictive at some rows, as `Engine.ask` does."""
        refuse_forked()
        if what is Predictive.probabilities and len(x) == 1:
            return np.asarray(self._look(np.asarray(x, self.dtype))[1])
        return Engine(self.sampler, self.key, batch=1, state=self.state).ask(x, what, *static)

    @property
    def dtype(self) -> np.dtype:
        """What rows are cast to."""
        return self.state.log_weights.dtype

    def _look(self, x: np.ndarray) -> Tree:
        state, row = self.state, x.tobytes()
        if self._at is None or self._at[0] is not state or self._at[1] != row:
            self._at = state, row, program(looked, 1, False)(self.sampler, state, x)
        return self._at[2]

    def engine(self) -> Engine:
        """Return an engine with this sampler and state."""
        return Engine(self.sampler, self.key, batch=1, state=self.state)

    def __getstate__(self) -> Engine:
        return self.engine()  # which knows how to be pickled

    def __setstate__(self, engine: Engine) -> None:
        self.__init__(engine.sampler, engine.key, engine.state)  # type: ignore[misc]
