"""Two engines for rows that come one by one: batches teach whole models, and between them each row a part at once."""

from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opvi.running._engine import Engine, program
from opvi.running._learners import one_learner, without_mark
from opvi.running._rows import joined, row_count, taken
from opvi.running._single import Single
from opvi.types import Array, ArrayLike, Data, Info, Sampler, Seed, State, Tree

USUAL = 20  # rows of a batch


def followed(between: Any, state: Tree, before: Tree) -> Tree:
    """Return what learns from the next rows: models after a batch, and what the rows `before` taught beside them."""
    return jax.tree.map(jnp.copy, between.follow(state, before))


def _copied(leaf: Array) -> Array:
    return jax.device_put(np.array(leaf))


def _never(info: Tree) -> bool:
    return False


class RowByRow:
    """A sampler that learns batches, and until the next one is full, from each row what `sampler.between` can.

    Predictions know of every row. The models after a batch are those of `Engine`, bit for bit, unless a jump is found:
    then the rows that wait are learnt one by one. Unlike an `Engine`, it may not be asked while it learns. Until the
    first batch is full, a copy of the models learns each row, unless single rows can do without.

    Args:
        sampler: what learns batches; its `between` learns single rows.
        key: a JAX key or an integer seed.
        state: where to resume; the sampler's usual start if omitted.
    """

    def __init__(self, sampler: Any, key: Seed, *, state: State | None = None):
        own = [None if state is None else jax.tree.map(_copied, state) for _ in range(2)]  # which are overwritten
        self.whole, first = (Engine(sampler, key, batch=USUAL, state=one, in_place=True) for one in own)
        self.ahead: Engine | Single = first
        self.waiting: list[tuple[Data, ArrayLike]] = []  # rows and their weights, fewer than a batch
        self._follow()

    @property
    def engines(self) -> tuple[Engine, Engine | Single]:
        """Both engines."""
        return self.whole, self.ahead

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
        for at in range(row_count(data)):
            one = slice(at, at + 1)
            row, count = taken(data, one), None if weight is None else taken(weight, one)
            info = self._learn(row, count)
            self.waiting.append((row, np.ones(1, np.float32) if count is None else count))
            if len(self.waiting) == USUAL:
                self.settle()
            elif info is not None and getattr(self.sampler, "startled", _never)(info):
                self.settle(1)

    def _learn(self, row: Data, count: ArrayLike | None) -> Info | None:
        """Learn a row at once; return the Info, if there is one."""
        if isinstance(self.ahead, Single):
            return self.ahead.feed(row, count)
        self.ahead.feed(row, count, last=True)
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
        if isinstance(self.ahead, Single):
            return self.ahead.ask(x, what, *static)
        between = self.whole.sampler.between  # type: ignore[attr-defined]  # so that there is one program for answers
        state = program(followed, 1, False, 2)(between, self.ahead.state, None)
        return Single(between, self.ahead.key, state).ask(x, what, *static)

    def _follow(self) -> None:
        """Let single rows be learnt by what whole models have learnt, as soon as they are ready."""
        between = self.whole.sampler.between  # type: ignore[attr-defined]
        if between.ready(self.whole.state):
            before = self.ahead.state if self.ahead.sampler == between else None
            if hasattr(between, "look"):  # what it holds is shared, not copied
                state = between.follow(self.whole.state, before)
            else:
                state = program(followed, 1, False, 2)(between, self.whole.state, before)
            self.ahead = Single(between, self.whole.key, state)

    def __getstate__(self) -> dict[str, Any]:
        return without_mark(self.__dict__)
