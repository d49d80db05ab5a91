"""What both scikit-learn estimators share: checked rows, batches, learning, compiled predictions."""

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Self

import jax
import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from opvi.running._stream import batch as padded_batch
from opvi.tracking._names import named_parameters
from opvi.types import LARGEST_VALUE, Batch, Tracker

BATCH = 20  # rows learnt from at once
PREDICT_ROWS = 1024  # at once
ASKED_EVERY = 512  # batches, after which it is looked up whether all were learnt
DENSE_WARNING = 10_000_000  # numbers in a sparse X, zeros included

Named = tuple[tuple[str, Any], ...]


@lru_cache(256)
def _program(factory: Callable[..., Tracker], sizes: tuple[int, ...], named: Named, what: Any, *static: Any) -> Any:
    """`what(tracker, state, x, …)`, compiled."""
    tracker = factory(*sizes, **dict(named))
    return jax.jit(lambda state, *arrays: what(tracker, state, *arrays, *static))


@lru_cache(1024)
def _key(seed: int) -> Any:
    return jax.random.key(seed)


def few_sizes(rows: int, largest: int, ratio: int = 2) -> int:
    """The number of rows to pad to: a power of `ratio`, or the largest."""
    room = 1
    while room < rows:
        room *= ratio
    return min(room, largest)


def whole(name: str, value: Any, least: int) -> int:
    """A setting that must be a whole number."""
    if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"`{name}` is {value!r}, but must be a whole number of at least {least}.")
    return int(value)


def _dense(X: Any, rows: Any) -> np.ndarray:
    part = X[rows]
    return np.asarray(part.toarray() if issparse(part) else part, np.float32)


def _sound(a: np.ndarray) -> bool:
    """Whether every number is finite, and its square as well."""
    return bool((np.abs(a) <= LARGEST_VALUE).all())


class OnlineEstimator(BaseEstimator):
    """Rows in, batches out; the state is arrays, and the tracker is found again by its settings."""

    _factory: Callable[..., Tracker]

    # --- the tracker and its state ------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """The hyper-parameters as the tracker's factory names them."""
        whole("n_epochs", self.n_epochs, 1)
        hidden = self.hidden
        if isinstance(hidden, list | tuple | np.ndarray):
            hidden = tuple(int(width) if isinstance(width, np.integer) else width for width in hidden)
        return {
            "hidden": hidden,
            "particles": whole("n_particles", self.n_particles, 1),
            "half_life": None if self.half_life is None else float(self.half_life),
            "memory_rows": whole("memory_rows", self.memory_rows, 0),
        }

    def _begin(self, *sizes: int) -> None:
        """An untouched state for data of these sizes: columns, and classes where there are some."""
        self._sizes, self._named = sizes, tuple(self._settings().items())
        random = self.random_state
        seed = random if isinstance(random, int | np.integer) else check_random_state(random).randint(2**31 - 1)
        self._seed = int(seed)
        self.state_ = self.tracker_.init(_key(self._seed))
        self.n_rows_seen_ = 0

    @property
    def tracker_(self) -> Tracker:
        """The sampler behind the estimator: `tracker_.predict(estimator.state_, X)` gives its `Predictive`."""
        if not hasattr(self, "_sizes"):  # scikit-learn's own check takes longer than the rest of a call
            check_is_fitted(self)
        return type(self)._factory(*self._sizes, **dict(self._named))

    @property
    def posterior_(self) -> dict[str, np.ndarray]:
        """The particles by the names of their parameters, `[n_particles, …]`, for standardised X (and y)."""
        check_is_fitted(self)
        return named_parameters(self.state_, dict(self._named)["hidden"])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # --- rows ---------------------------------------------------------------------------------

    def _plain(self, X: Any) -> bool:
        """Whether X needs no further check: one row at a time, scikit-learn's own would take longer than learning."""
        return (
            type(X) is np.ndarray
            and X.ndim == 2
            and X.dtype.kind == "f"
            and len(X) > 0
            and X.shape[1] == getattr(self, "n_features_in_", -1)
            and not hasattr(self, "feature_names_in_")
            and _sound(X)
        )

    def _checked(self, X: Any) -> Any:
        """X to predict at, dense or sparse, as scikit-learn checks it."""
        if not hasattr(self, "state_"):
            check_is_fitted(self)
        if self._plain(X):
            return X
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=(np.float64, np.float32))
        return self._bounded(X)

    def _checked_pair(self, X: Any, y: Any, reset: bool, numeric: bool) -> tuple[Any, np.ndarray]:
        plain_y = type(y) is np.ndarray and (not numeric or (y.dtype.kind in "fiu" and _sound(y)))
        if not reset and plain_y and y.shape == np.shape(X)[:1] and self._plain(X):
            return X, y
        X, y = validate_data(
            self, X, y, reset=reset, accept_sparse="csr", dtype=(np.float64, np.float32), y_numeric=numeric
        )
        y = y.astype(np.float64) if numeric else y  # texts are refused here
        if numeric and not _sound(y):
            raise ValueError(f"y holds a number beyond {LARGEST_VALUE:g}, whose square overflows. Rescale y.")
        return self._bounded(X), y

    def _bounded(self, X: Any) -> Any:
        if not _sound(X.data if issparse(X) else X):
            raise ValueError(f"X holds a number beyond {LARGEST_VALUE:g}, whose square overflows. Rescale the column.")
        if issparse(X) and np.prod(X.shape, dtype=float) > DENSE_WARNING:
            warnings.warn(
                f"X is sparse and has shape {X.shape}; it is made dense {BATCH} rows at a time, so memory stays small, "
                "but every zero costs as much as any number. Choose or hash columns if that is too slow.",
                UserWarning,
                stacklevel=4,
            )
        return X

    # --- learning -----------------------------------------------------------------------------

    def _learn(self, X: Any, y: np.ndarray, weight: Any, *, passes: int = 1, fitting: bool = False) -> Self:
        """Batches of 20 rows, in order; passes after the first teach the parameters only."""
        weight = np.ones(len(y), np.float32) if weight is None else _check_sample_weight(weight, X, dtype=np.float32)
        if not (weight >= 0).all():
            raise ValueError("`sample_weight` holds a negative number, but a row counts at least 0 times.")
        there = np.flatnonzero(weight)  # a row of weight 0 is not there: it takes no place in a batch either
        order = None if len(there) == len(y) else there
        tracker, key = self.tracker_, _key(self._seed)
        random = np.random.default_rng(self._seed) if fitting and self.shuffle else None
        for turn in range(passes):
            if random is not None:
                order = random.permutation(there)
            told = []
            for rows in _batches(X, y, weight, order, whole=fitting):
                if turn == 0:
                    self.state_, info = tracker.step(key, self.state_, rows)
                    told.append(info.finite)
                else:
                    self.state_ = tracker.relearn(key, self.state_, rows)  # type: ignore[misc]
                if len(told) == ASKED_EVERY:
                    told = _all_finite(told)
            _all_finite(told)
        self.n_rows_seen_ += len(there)
        return self

    # --- predicting ---------------------------------------------------------------------------

    def _predicted(self, what: Callable[..., Any], X: Any, *others: Any, static: tuple[Any, ...] = ()) -> Any:
        """What a compiled function says about the rows of X: arrays `[rows, …]`."""
        X = self._checked(X)
        program = _program(type(self)._factory, self._sizes, self._named, what, *static)
        parts = []
        for start in range(0, X.shape[0], PREDICT_ROWS):
            chunk = slice(start, start + PREDICT_ROWS)
            arrays = (_dense(X, chunk), *(np.asarray(other[chunk]) for other in others))
            rows = len(arrays[0])
            room = few_sizes(rows, PREDICT_ROWS, 4)
            said = program(self.state_, *(_padded(a, room) for a in arrays))
            parts.append(jax.tree.map(lambda a, rows=rows: a[:rows], jax.device_get(said)))
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def _padded(a: np.ndarray, room: int) -> np.ndarray:
    return a if len(a) == room else np.concatenate([a, np.repeat(a[:1], room - len(a), 0)])


def _batches(X: Any, y: np.ndarray, weight: np.ndarray, order: np.ndarray | None, whole: bool) -> Iterator[Batch]:
    """As `opvi.stream((X, y), 20)` makes them; a call of fewer rows than a batch is padded to a power of two."""
    count = len(y) if order is None else len(order)
    if y.dtype.kind == "f":
        y = y.astype(np.float32)
    for start in range(0, count, BATCH):
        rows: Any = slice(start, min(start + BATCH, count))
        rows = rows if order is None else order[rows]
        data = _dense(X, rows), y[rows]
        if len(data[1]) == BATCH:
            yield Batch(data, weight[rows])
        else:
            room = BATCH if whole or count > BATCH else few_sizes(count, BATCH)
            yield padded_batch(data, weight[rows], pad_to=room)


def _all_finite(told: list[Any]) -> list[Any]:
    """An empty list, after a warning where an update was refused."""
    if not all(map(bool, told)):
        warnings.warn(
            "an update was not finite, so some rows taught nothing. The data may be extreme: look at their largest "
            "values and weights.",
            RuntimeWarning,
            stacklevel=4,
        )
    return []
