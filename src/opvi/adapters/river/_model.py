"""What both River models share: a table of features, rows that wait, and compiled programs."""

import math
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opvi.adapters.river._features import Columns
from opvi.types import Array, Batch, Tracker

LARGEST_BUFFER = 32  # rows that the trackers learn from at once
PREDICT_ROWS = 256

Row = Mapping[Hashable, Any]


def _filled(state: Any, x: Array) -> Array:
    """The running mean of a column where a number is missing."""
    return jnp.where(jnp.isnan(x), state.moments.mean[None, : x.shape[1]], x)


@lru_cache(128)
def _programs(tracker: Tracker) -> dict[str, Any]:
    """What a model calls, compiled: small arrays in, small arrays out."""

    def learn(key: Any, state: Any, x: Array, y: Array, weight: Array) -> Any:
        # Info is returned as well, though nobody reads it: leaving it out would let XLA change the step, and its bits.
        return tracker.step(key, state, Batch((_filled(state, x), y), weight))

    def predict(state: Any, x: Array) -> Any:
        return tracker.predict(state, _filled(state, x))

    return {
        "learn": jax.jit(learn),
        "components": jax.jit(lambda state, x: predict(state, x).components),
        "mean": jax.jit(lambda state, x: predict(state, x).mean()),
        "probabilities": jax.jit(lambda state, x: predict(state, x).probabilities()),
    }


class OnlineModel:
    """What both models share: a table of features, rows that wait, and a tracker that is found by its settings."""

    hidden: Any
    n_particles: int
    half_life: float | None
    buffer: int
    max_features: int
    seed: int | None

    def _start(self, *sizes: int) -> None:
        """No rows, no model; settings are refused where they are given, by making the smallest tracker."""
        for name, largest in (("buffer", LARGEST_BUFFER), ("max_features", math.inf), ("n_particles", math.inf)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= largest:
                raise ValueError(f"`{name}` is {value!r}, but must be a whole number from 1 to {largest}.")
        self._tracker(sizes)
        self._columns = Columns(self.max_features)
        self._waiting: list[tuple[dict[Hashable, Any], Any, float]] = []
        self._state: Any = None
        self._sizes: tuple[int, ...] = ()
        self._number = np.random.default_rng(self.seed).integers(2**31 - 1).item()
        self.n_rows_seen = 0  # learnt from; rows that wait are not among them

    def _get_params(self) -> dict[str, Any]:
        """As River does, which looks into tuples and stumbles over an empty one."""
        params = super()._get_params()  # type: ignore[misc]
        return {**params, "hidden": list(params["hidden"])}

    def _tracker(self, sizes: tuple[int, ...]) -> Tracker:
        raise NotImplementedError

    def _widened(self, fresh: Any) -> Any:
        raise NotImplementedError

    def _targets(self, y: list[Any]) -> np.ndarray:
        raise NotImplementedError

    def _program(self, name: str) -> Any:
        return _programs(self._tracker(self._sizes))[name]

    def _wait(self, x: Row, y: Any, w: float) -> None:
        if not 0 <= w < math.inf:
            raise ValueError(f"`w` is {w}, but a row counts a finite number of times, at least 0.")
        if w:
            self._waiting.append((dict(x), y, float(w)))
            if len(self._waiting) >= self.buffer:
                self.flush()

    def flush(self) -> None:
        """Learn from the rows that wait, however few there are."""
        if not self._waiting:
            return
        rows, targets, weights = zip(*self._waiting, strict=True)
        self._waiting = []
        y = self._targets(list(targets))
        self._make_room(rows)
        x = self._columns.table(rows)
        missing = self.buffer - len(x)
        if missing:
            x, y = (np.concatenate([a, np.repeat(a[:1], missing, 0)]) for a in (x, y))
        weight = np.array((*weights, *(0.0,) * missing), np.float32)
        self._state, _ = self._program("learn")(_key(self._number), self._state, x, y, weight)
        self.n_rows_seen += len(rows)

    def _needed(self) -> tuple[int, ...]:
        """Columns, and classes where there are some, that the model must have now."""
        return (max(1, self._columns.count),)

    def _make_room(self, rows: tuple[Any, ...]) -> None:
        """A model wide enough for these rows; one that has learnt already is carried over."""
        fresh = self._columns.meet(rows)
        sizes = self._needed()
        if self._state is None:
            self._sizes = sizes
            self._state = self._tracker(sizes).init(_key(self._number))
        elif any(need > size for need, size in zip(sizes, self._sizes, strict=True)):
            # Twice as wide at least: every width compiles anew.
            grown = (
                size if need <= size else 1 << (need - 1).bit_length()
                for need, size in zip(sizes, self._sizes, strict=True)
            )
            self._sizes = tuple(grown)
            self._state = self._widened(self._tracker(self._sizes).init(_key(self._number)))
        if fresh or len(self._columns.blank) != self._sizes[0]:
            self._columns.widen(self._sizes[0])
        if fresh:
            self._introduce(fresh, self._columns.table(rows))

    def _introduce(self, fresh: list[int], x: np.ndarray) -> None:
        """The moments of new columns as if they had always been what they are in these rows."""
        mean, square = (np.array(a) for a in (self._state.moments.mean, self._state.moments.square))
        seen = float(self._state.moments.seen)
        for column in fresh:
            there = ~np.isnan(x[:, column])
            values = x[there, column]
            if len(values) and (seen or not there.all()):  # the first rows need no help, but for the gaps among them
                mean[column], square[column] = values.mean(), values.var() * seen
        self._state = self._state._replace(
            moments=self._state.moments._replace(mean=jnp.asarray(mean), square=jnp.asarray(square))
        )

    def _one(self, name: str, x: Row) -> Any:
        """What a program says about one row."""
        return self._program(name)(self._state, np.array([self._columns.row(x)], np.float32))

    def _many(self, name: str, rows: list[Row]) -> np.ndarray:
        """What a program says about many, a row each."""
        program, parts = self._program(name), []
        for start in range(0, len(rows), PREDICT_ROWS):
            x = self._columns.table(rows[start : start + PREDICT_ROWS])
            room = 1 << (len(x) - 1).bit_length()
            padded = np.concatenate([x, np.repeat(x[:1], room - len(x), 0)])
            parts.append(np.asarray(program(self._state, padded))[: len(x)])
        return np.concatenate(parts)


@lru_cache(1024)
def _key(seed: int) -> Any:
    return jax.random.key(seed)


def rows_of(X: Any) -> list[Row]:
    """The rows of a pandas or polars data frame."""
    return X.to_dicts() if hasattr(X, "to_dicts") else X.to_dict("records")


def series_like(X: Any, values: Any) -> Any:
    """Values as a series of the library that X comes from."""
    if hasattr(X, "to_dicts"):
        import polars

        return polars.Series(values)
    import pandas

    return pandas.Series(values, index=X.index)
