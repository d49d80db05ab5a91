"""What both River models share: a table of features, waiting rows and an engine."""

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from opvi.adapters.river._features import Columns, Dates, Held, Row, paired, unpaired
from opvi.running import Engine
from opvi.running._learners import one_learner, sole_learner, without_mark
from opvi.tracking._inside import find, replaced
from opvi.tracking._wrappers._scaling import Moments
from opvi.tracking.experts._layers import checked_widths
from opvi.types import ArrayLike, Sampler, State, Tree

LARGEST_BUFFER = 32  # rows that the samplers learn from at once

Frame = Any  # a data frame of pandas or polars
Series = Any  # of the same library


class OnlineModel:
    """What both models share: a table of features, waiting rows and, once rows were learnt, an engine."""

    _first = 1  # rows before the engine begins, at least

    def _start(
        self,
        sizes: tuple[int, ...],
        hidden: tuple[int, ...],
        n_particles: int,
        half_life: float | None,
        buffer: int,
        max_features: int,
        seed: int | None,
    ) -> None:
        """Start without rows or a model; wrong settings are refused here, by making the smallest sampler."""
        self.hidden, self.n_particles, self.half_life = checked_widths(hidden), n_particles, half_life
        self.buffer, self.max_features, self.seed = buffer, max_features, seed
        for name, largest in (("buffer", LARGEST_BUFFER), ("max_features", math.inf), ("n_particles", math.inf)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= largest:
                raise ValueError(f"`{name}` is {value!r}, but must be a whole number from 1 to {largest}.")
        self._sampler(sizes)
        self._columns, self._dates = Columns(self.max_features), Dates()
        self._waiting: list[tuple[dict[Hashable, Any], Any, float]] = []
        self._engine: Engine | None = None
        self._sizes: tuple[int, ...] = ()
        self._number = np.random.default_rng(self.seed).integers(2**31 - 1).item()
        self.n_rows_seen = 0  # learnt from; rows that wait are not among them

    def _get_params(self) -> dict[str, Any]:
        """Return the parameters as River does, but accept an empty tuple."""
        params = super()._get_params()  # type: ignore[misc]
        return {**params, "hidden": list(params["hidden"])}

    def _sampler(self, sizes: tuple[int, ...]) -> Sampler:
        raise NotImplementedError

    def _widened(self, state: Tree, fresh: Tree) -> State:
        raise NotImplementedError

    def _targets(self, y: list[Any]) -> np.ndarray:
        raise NotImplementedError

    @property
    def _state(self) -> Any:
        return None if self._engine is None else self._engine.state

    @one_learner
    def _wait(self, x: Row, y: Any, w: float) -> None:
        if not 0 <= w < math.inf:
            raise ValueError(f"`w` is {w}, but a row counts a finite number of times, at least 0.")
        if w:
            self._waiting.append((dict(self._dates.numbers(x, learn=True)), y, float(w)))
            if len(self._waiting) >= (self.buffer if self._engine else max(self.buffer, self._first)):
                self.flush()

    @one_learner
    def learn_many(self, X: Frame, y: Series) -> None:
        """Learn from the rows of a data frame, in their order."""
        for row, target in zip(rows_of(X), y.to_list(), strict=True):
            self.learn_one(row, target)  # type: ignore[attr-defined]

    @property
    def _turn(self) -> threading.RLock:
        """Hold the lock: columns and model change together, so predictions wait while a batch is learnt."""
        return self.__dict__.setdefault("_lock", threading.RLock())

    def __getstate__(self) -> Held:
        held = {name: value for name, value in without_mark(self.__dict__).items() if name != "_lock"}
        return {**paired(held), "_waiting": [([[*pair] for pair in row.items()], y, w) for row, y, w in self._waiting]}

    def __setstate__(self, state: Held) -> None:
        vars(self).update({**unpaired(state), "_waiting": [(dict(row), y, w) for row, y, w in state["_waiting"]]})

    def flush(self) -> None:
        """Learn from the waiting rows, however few they are."""
        with sole_learner(self), self._turn:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows, targets, weights = zip(*self._waiting, strict=True)
        self._waiting = []
        y = self._targets(list(targets))
        self._make_room(rows)
        x, w = self._filled(rows), np.array(weights, np.float32)
        for begin in range(0, len(rows), self.buffer):  # more only at the start
            some = slice(begin, begin + self.buffer)
            self._engine.feed((x[some], y[some]), w[some], last=True)  # type: ignore[union-attr]
        self.n_rows_seen += len(rows)

    def _filled(self, rows: Sequence[Row]) -> np.ndarray:
        """Return rows as a table, with a column's running mean where a number is missing."""
        x = self._columns.table(rows)
        gaps = np.isnan(x)
        return np.where(gaps, np.array(moments_of(self._state).mean)[: x.shape[1]], x) if gaps.any() else x

    def _needed(self) -> tuple[int, ...]:
        """Return the columns, and classes if any, that the model now needs."""
        return (max(1, self._columns.count),)

    def _room(self, sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Return how wide to begin, given what the first rows need."""
        return sizes

    def _make_room(self, rows: Sequence[Row]) -> None:
        """Make the model wide enough for these rows, keeping what was learnt."""
        columns, known = self._columns, self._columns.count
        sparse = len(columns.sparse)
        fresh = columns.meet(rows)
        sizes = self._needed()
        grows = self._engine and any(need > size for need, size in zip(sizes, self._sizes, strict=True))
        if self._engine is None:
            self._sizes = self._room(sizes, len(rows))
            self._engine = self._begun(None)
        elif grows:
            # Twice as wide at least: every width compiles anew.
            grown = (
                size if need <= size else 1 << (need - 1).bit_length()
                for need, size in zip(sizes, self._sizes, strict=True)
            )
            self._sizes = tuple(grown)
            old = jax.tree.map(np.asarray, self._engine.state)
            fresh_state = Engine(self._sampler(self._sizes), self._number).state
            self._engine = self._begun(self._widened(old, fresh_state))
        if columns.count > known or len(columns.sparse) > sparse or len(columns.blank) < self._sizes[0]:
            columns.widen(self._sizes[0])
            columns.settle(rows, known)
        if fresh:
            self._introduce(fresh, columns.table(rows))

    def _begun(self, state: State | None) -> Engine:
        sampler = self._sampler(self._sizes)
        return Engine(sampler, self._number, batch=self.buffer, state=state, singly=True, in_place=self.buffer == 1)

    def _introduce(self, fresh: list[int], x: np.ndarray) -> None:
        """Set the moments of new columns as if they had always been as in these rows."""
        assert self._engine is not None
        moments = moments_of(self._engine.state)
        mean, square, seen = np.array(moments.mean), np.array(moments.square), float(moments.seen)
        for column in fresh:
            there = ~np.isnan(x[:, column])
            values = x[there, column]
            if len(values) and (seen or not there.all()):  # the first rows need no help, but for the gaps
                mean[column], square[column] = values.mean(), values.var() * seen
        new = moments._replace(mean=mean, square=square)  # type: ignore[arg-type]
        self._engine.state = replaced(self._engine.state, Moments, lambda _: new)

    def _asked(self, what: Callable[..., Tree], rows: Sequence[Row]) -> Any:
        """Apply a function to the predictive at some rows; return arrays `[rows, …]`."""
        with self._turn:
            rows = [self._dates.numbers(x) for x in rows]
            return self._engine.ask(self._filled(rows), what)  # type: ignore[union-attr]

    @property
    def _raw_memory_usage(self) -> int:
        """Return memory as River counts it, plus the model's arrays, which River cannot see."""
        arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))
        return super()._raw_memory_usage + arrays  # type: ignore[misc]


def moments_of(state: Tree) -> Moments:
    """Return the moments of a model's columns."""
    found = find(state, Moments)
    assert found is not None
    return found


def rows_of(X: Frame) -> list[Row]:
    """Return the rows of a pandas or polars data frame."""
    return X.to_dicts() if hasattr(X, "to_dicts") else X.to_dict("records")


def series_like(X: Frame, values: ArrayLike) -> Series:
    """Return values as a series of X's own library."""
    if hasattr(X, "to_dicts"):
        import polars

        return polars.Series(values)
    import pandas

    return pandas.Series(values, index=X.index)
