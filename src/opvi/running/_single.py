"""One row at a time, the shortest way through Python and JAX: no padding, and nothing is read that nobody asked for.

Matrices are so small that BLAS uses one thread by itself.
"""

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, Protocol

import jax
import numpy as np

from opvi._cpu import compiler_options, inline
from opvi._forks import refuse_forked
from opvi.running._engine import Engine
from opvi.running._kept import Program
from opvi.running._packed import Layout, Packed, layout_of, on_host, opened, packed
from opvi.running._rows import as_rows
from opvi.types import Array, ArrayLike, Batch, Data, Info, Key, Tree


class Looks(Protocol):
    """A sampler whose look at a row both answers a question and teaches."""

    answers: Callable[..., Array]  # which question, of those that a predictive answers
    lasting: str  # the part of a state that rows do not change
    shares: bool  # whether a state shares arrays with others, and so must not be overwritten

    def look(self, state: Tree, x: Array) -> tuple[Tree, Array]:
        """Return what is said of rows, and the answer."""

    def teach(self, key: Key, state: Tree, row: Batch, looked: Tree) -> tuple[Tree, Info]:
        """Learn a row, given what `look` returned."""

    def predict(self, state: Tree, x: Array) -> Tree:
        """Return the predictive at rows."""


def placed(tree: Tree) -> Tree:
    """Return copies of arrays where single rows are learnt: in the calling thread, which on a CPU is the fastest."""
    return inline(jax.tree.map(np.array, tree))


def _whole(sampler: Looks, layout: Layout, held: Packed, lasting: Tree) -> Tree:
    return opened(layout, held)._replace(**{sampler.lasting: lasting})


def looked(sampler: Looks, layout: Layout, held: Packed, lasting: Tree, x: Array) -> tuple[Tree, Array]:
    """Return what `sampler.look` says of a row, and its answer."""
    return sampler.look(_whole(sampler, layout, held, lasting), x)


def taught(
    sampler: Looks, layout: Layout, key: Key, held: Packed, data: Data, weight: Array, seen: Tree
) -> tuple[Packed, Array | None]:
    """Return the state after a row that was looked at, and how probable a jump is, if the sampler says that."""
    state, info = sampler.teach(key, opened(layout, held), Batch(data, weight), seen)
    return packed(layout, state), getattr(info, "probability", None)


def said(
    sampler: Looks,
    layout: Layout,
    what: Callable[..., Tree],
    static: tuple[Hashable, ...],
    held: Packed,
    lasting: Tree,
    x: Array,
) -> Tree:
    """Return a function of the predictive at a row."""
    return what(sampler.predict(_whole(sampler, layout, held, lasting), x), *static)


@cache
def program(function: Callable[..., Tree], settings: int, in_place: int | None = None) -> Program:
    """Compile a function of one row, whose first arguments are settings; one argument may be overwritten."""
    return Program(function, settings, compiler_options(False, small=True), in_place)


class Single:
    """A sampler that learns one row per call. Unlike an `Engine`, it may not be asked while it learns.

    It looks at a row when it is asked about it, and not again when it is learnt. Its state is kept in few arrays.
    Unless its sampler shares it with others, it is overwritten by the next row, apart from what rows do not change.

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
        """What predictions are made from; small arrays are copies, in NumPy."""
        return _whole(self.sampler, self.layout, on_host(self.held), self._lasting)

    @state.setter
    def state(self, state: Tree) -> None:
        part = self.sampler.lasting
        rest, lasting = state._replace(**{part: None}), getattr(state, part)
        self.layout = layout_of(rest)
        held = packed(self.layout, rest, np)
        self.begin(held._replace(small=placed(held.small)), lasting)
        self._found: dict[Hashable, Callable[..., Tree]] = {}  # programs for states of these shapes, by those of rows

    def begin(self, held: Packed, lasting: Tree) -> None:
        """Continue from a state of the same shapes, packed but for what rows do not change."""
        self.held, self._lasting = held, lasting
        self._seen: tuple[bytes, Tree] | None = None  # the row looked at last, and what it said

    def feed(self, data: Data, weight: ArrayLike | None) -> Array | None:
        """Learn from one row `(x, y)`; return how probable a jump is, if the sampler says that."""
        data = as_rows(data, self._dtype)
        count = np.ones(1, self._dtype) if weight is None else np.asarray(weight, self._dtype)
        given = self.key, self.held, data, count, self._look(data[0])
        kind = data[0].shape, data[0].dtype, data[1].dtype
        teach = self._found.get(kind)
        if teach is None:
            made = program(taught, 2, None if self.sampler.shares else 3)
            teach = self._found[kind] = made.ready(self.sampler, self.layout, *given)
        self.held, probability = teach(*given)
        self._seen = None
        return probability

    def ask(self, x: Tree, what: Callable[..., Tree], *static: Hashable) -> Tree:
        """Apply a function to the predictive at some rows, as `Engine.ask` does."""
        refuse_forked()
        x = as_rows(x, self._dtype)
        if len(x) > 1:
            return self.engine().ask(x, what, *static)
        if what is self.sampler.answers:
            return np.asarray(self._look(x)[1])
        found = program(said, 4)(self.sampler, self.layout, what, static, self.held, self._lasting, x)
        return jax.tree.map(np.asarray, found)

    def _look(self, x: np.ndarray) -> Tree:
        row = x.tobytes()
        if self._seen is None or self._seen[0] != row:
            given, kind = (self.held, self._lasting, x), (x.shape, x.dtype)
            look = self._found.get(kind)
            if look is None:
                look = self._found[kind] = program(looked, 2).ready(self.sampler, self.layout, *given)
            self._seen = row, look(*given)
        return self._seen[1]

    def engine(self) -> Engine:
        """Return an engine with this sampler and state."""
        return Engine(self.sampler, self.key, batch=1, state=self.state)

    def __getstate__(self) -> dict[str, Any]:
        return {"engine": self.engine()}  # which knows how to be pickled

    def __setstate__(self, held: dict[str, Any]) -> None:
        engine = held["engine"]
        self.__init__(engine.sampler, engine.key, engine.state)  # type: ignore[misc]
