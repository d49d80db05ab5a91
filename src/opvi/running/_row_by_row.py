"""Two engines for rows that come one by one: batches teach whole models, and between them each row a part at once."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from opvi.running._engine import Engine, program
from opvi.running._learners import one_learner, without_mark
from opvi.running._packed import Layout, Packed, opened, packed
from opvi.running._rows import joined, row_count, taken
from opvi.running._single import Looks, Single, placed
from opvi.types import Array, ArrayLike, Data, Sampler, Seed, State, Tree

USUAL = 20  # rows of a batch
MORE = 0.5  # times the first rows: after so many new ones, a copy of the models learns them


class Follows(Looks, Protocol):
    """What learns single rows between batches."""

    def follow(self, state: Tree, before: Tree) -> Tree:
        """Return its state after the models' batch: with what rows have taught beside them, if there were any."""


def followed(between: Follows, state: Tree) -> Tree:
    """Return what learns from the next rows, after models have learnt their first ones."""
    return jax.tree.map(jnp.copy, between.follow(state, None))


def followed_on(between: Follows, layout: Layout, state: Tree, held: Packed) -> tuple[Packed, Tree]:
    """Return the same after a batch, packed: with what its rows have taught beside the models, which is `held`."""
    new = between.follow(state, opened(layout, held))
    rest = new._replace(**{between.lasting: None})
    return packed(layout, jax.tree.map(jnp.copy, rest)), jax.tree.map(jnp.copy, getattr(new, between.lasting))


def _never(probability: Array | None) -> bool:
    return False


class RowByRow:
    """A sampler that learns batches, and until the next one is full, from each row what `sampler.between` can.

    Predictions know of every row. The models after a batch are those of `Engine`, bit for bit, unless a jump is found:
    then the rows that wait are learnt one by one. Unlike an `Engine`, it may not be asked while it learns. Until the
    first batch is full, a copy of the models learns the first rows: each of the first three, then whenever there are
    half as many again. Single rows can do without where `between` is ready from the start.

    Args:
        sampler: what learns batches; its `between` learns single rows.
        key: a JAX key or an integer seed.
        state: where to resume; the sampler's usual start if omitted.
    """

    first: Engine | None = None  # a copy of the models, until they are ready
    copied = 0  # of the rows that wait, what it has learnt

    def __init__(self, sampler: Any, key: Seed, *, state: State | None = None):
        own = None if state is None else placed(state)  # which is overwritten
        self.whole = Engine(sampler, key, batch=USUAL, state=own, in_place=True)
        self.waiting: list[tuple[Data, ArrayLike]] = []  # rows and their weights, fewer than a batch
        self.ahead: Single
        self._follow()

    @property
    def engines(self) -> tuple[Engine | Single, ...]:
        """What learns batches, what learns single rows, and at first a copy of the models."""
        return (self.whole, self.ahead) if self.first is None else (self.whole, self.ahead, self.first)

    @property
    def sampler(self) -> Sampler:
        """What predicts now."""
        return self.ahead.sampler

    @property
    def state(self) -> Tree:
        """What predictions are made from."""
        return self.ahead.state

    @one_learner
    def feed(self, data: Data, weight: ArrayLike | None = None, *, last: bool = True) -> None:
        """Learn from rows, in order, each at once."""
        rows = row_count(data)
        weight = np.ones(rows, np.float32) if weight is None else weight
        for at in range(rows):
            row, count = (data, weight) if rows == 1 else taken((data, weight), slice(at, at + 1))
            odds = self._learn(row, count)
            if len(self.waiting) == USUAL:
                self.settle()
            elif self.first is None and getattr(self.sampler, "startled", _never)(odds):
                self.settle(1)

    def _learn(self, row: Data, count: ArrayLike) -> Array | None:
        """Learn a row at once; return how probable a jump is, if that is known."""
        self.waiting.append((row, count))
        if self.first is None:
            return self.ahead.feed(row, count)
        new = self.waiting[self.copied :]
        if len(new) < MORE * int(self.first.state.rows):
            return self.ahead.feed(row, count)
        self.first.feed(*joined(new), last=True)
        self.copied = len(self.waiting)
        self.ahead = self._following(self.first.state, None)
        return None

    def settle(self, size: int = USUAL) -> None:
        """Let whole models learn the rows that wait, `size` at a time."""
        rows, self.waiting = self.waiting, []
        if not rows:
            return
        try:
            for start in range(0, len(rows), size):
                self.whole.feed(*joined(rows[start : start + size]), last=True)
        finally:
            self._follow()  # also after an interrupt: what learns single rows may share arrays that are no more

    def ask(self, x: Tree, what: Callable[..., Tree], *static: Hashable) -> Tree:
        """Apply a function to the predictive at some rows, as `Engine.ask` does."""
        return self.ahead.ask(x, what, *static)

    def _follow(self) -> None:
        """Let single rows be learnt by what whole models have learnt; a copy learns them until these are ready."""
        whole = self.whole
        ready = whole.sampler.between.ready(whole.state)  # type: ignore[attr-defined]
        known = ready and self.first is None and hasattr(self, "ahead")
        self.first, self.copied = None, 0
        if not ready:
            self.first = Engine(whole.sampler, whole.key, batch=USUAL, state=placed(whole.state), in_place=True)
        self.ahead = self._following(whole.state, self.ahead if known else None)

    def _following(self, state: Tree, before: Single | None) -> Single:
        """Return what learns single rows, after models in this state; `before` learnt the rows before."""
        between = self.whole.sampler.between  # type: ignore[attr-defined]
        if between.shares:
            return Single(between, self.whole.key, between.follow(state, before and before.state))
        if before is None:
            return Single(between, self.whole.key, program(followed, 1, False)(between, state))
        before.begin(*program(followed_on, 2, False, 3)(between, before.layout, state, before.held))
        return before

    def __getstate__(self) -> dict[str, Any]:
        return without_mark(self.__dict__)

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)
        if isinstance(self.ahead, Engine):  # of an older opvi, before the first batch was full
            self.first, self.copied = self.ahead, len(self.waiting)
            self.ahead = self._following(self.first.state, None)
