"""What both scikit-learn estimators share: checks of rows, and an engine that learns and predicts."""

import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state, check_X_y
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from opvi.adapters.sklearn._frames import collected, encoded, is_frame, is_plain, left_out, understood
from opvi.running import Engine
from opvi.running._learners import without_mark
from opvi.running._origin import FIRST, origin_of
from opvi.running._rows import joined
from opvi.tracking import remembering
from opvi.tracking._names import named_parameters
from opvi.types import LARGEST_VALUE, ArrayLike, Sampler, State, Tree

if TYPE_CHECKING:
    from opvi.adapters._tables import Schema

BATCH = 20  # rows learnt from at once
QUICK_ROWS = 60  # whoever gives rows by and by gets the first answers sooner, as `Engine` says
BLOCK_BATCHES, BLOCK_BYTES = 256, 1 << 24  # made dense at once for learning, at most
ASK_ROWS = 1024  # of a sparse matrix, made dense at once for predicting
DENSE_WARNING = 10_000_000  # numbers in a sparse X, zeros included


def whole(name: str, value: object, least: int) -> int:
    """Return a setting that must be a whole number."""
    if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"`{name}` is {value!r}, but must be a whole number of at least {least}.")
    return int(value)


def _dense(X: ArrayLike, rows: slice | np.ndarray, origin: np.ndarray) -> np.ndarray:
    part = X[rows]
    part = part.toarray() if issparse(part) else part
    return np.asarray(part - origin if origin.any() else part, np.float32)


def _sound(a: np.ndarray) -> bool:
    """Return whether all numbers and their squares are finite."""
    return bool((np.abs(a) <= LARGEST_VALUE).all())


class OnlineEstimator(BaseEstimator):
    """A scikit-learn estimator around an engine."""

    _engine: Engine
    _schema: "Schema | None" = None  # how a data frame becomes numbers
    _means: np.ndarray | None = None  # of the columns of a first data frame of numbers: what later gaps count as
    _origin = np.zeros(1)  # subtracted from X, where it lies far from 0
    _target_origin = 0.0  # and from y

    # --- the sampler and its state ------------------------------------------------------------

    def _made(self, *sizes: int) -> Sampler:
        """Return the sampler for this many columns and, for a classifier, classes."""
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        """Return the hyperparameters under the names of the sampler's factory."""
        hidden = self.hidden
        if isinstance(hidden, list | tuple | np.ndarray):
            hidden = tuple(int(width) if isinstance(width, np.integer) else width for width in hidden)
        half_life = None if self.half_life is None else float(self.half_life)
        particles = None if self.n_particles is None else whole("n_particles", self.n_particles, 1)
        kept = None if self.neighbour_rows is None else whole("neighbour_rows", self.neighbour_rows, 0)
        return {"hidden": hidden, "particles": particles, "half_life": half_life, "memory_rows": kept}

    def _begin(self, *sizes: int, quick: int = 0) -> None:
        """Start over for data of these sizes; `quick` is `Engine`'s."""
        whole("n_epochs", self.n_epochs, 1)
        self._used, self._again = self._settings(), whole("memory_rows", self.memory_rows, 0)
        made = self._made(*sizes)
        self._hidden, sampler = made.hidden, self._remembering(made)  # type: ignore[attr-defined]
        random = self.random_state
        seed = random if isinstance(random, int | np.integer) else check_random_state(random).randint(2**31 - 1)
        self._width, self._seed = sizes[0], int(seed)
        self._engine = Engine(sampler, self._seed, batch=BATCH, quick=quick)
        self._origin, self._target_origin = np.zeros(1), 0.0
        self.n_rows_seen_ = 0

    def _remembering(self, sampler: Sampler) -> Sampler:
        """Return the sampler with the memory chosen when learning began."""
        return remembering(sampler, self._again) if self._again else sampler

    @property
    def tracker_(self) -> Sampler:
        """The sampler behind the estimator: `tracker_.predict(estimator.state_, X)` gives its `Predictive`."""
        self._check_fitted()
        return self._engine.sampler

    @property
    def state_(self) -> State:
        """The sampler's state."""
        self._check_fitted()
        return self._engine.state

    @property
    def posterior_(self) -> dict[str, np.ndarray]:
        """The particles by the names of their parameters, `[n_particles, …]`, for standardised X (and y)."""
        return named_parameters(self.state_, self._hidden)

    def __getstate__(self) -> dict[str, Any]:
        return without_mark(super().__getstate__())

    def _check_fitted(self) -> None:
        if not hasattr(self, "_engine"):  # scikit-learn's own check takes longer than the rest of a call
            check_is_fitted(self)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    # --- rows ---------------------------------------------------------------------------------

    def _plain(self, X: ArrayLike) -> bool:
        """Return whether X needs no further check; for single rows, scikit-learn's checks take longer than learning."""
        return (
            type(X) is np.ndarray
            and X.ndim == 2
            and X.dtype.kind == "f"
            and len(X) > 0
            and X.shape[1] == getattr(self, "n_features_in_", -1)
            and not hasattr(self, "feature_names_in_")
            and _sound(X)
        )

    def _checked(self, X: ArrayLike) -> Any:
        """Return X, dense or sparse, as scikit-learn's checks leave it."""
        self._check_fitted()
        if self._plain(X):
            return X
        X = collected(X) if is_frame(X) else X
        if self._schema is not None:
            return self._encoded(X, reset=False)
        X = validate_data(
            self,
            X,
            reset=False,
            accept_sparse="csr",
            dtype=(np.float64, np.float32),
            ensure_all_finite=self._finite(X),
        )
        return self._bounded(self._filled(X))

    def _checked_pair(
        self, X: ArrayLike, y: ArrayLike, reset: bool, numeric: bool, shuffled: bool = False
    ) -> tuple[Any, np.ndarray]:
        plain_y = type(y) is np.ndarray and (not numeric or (y.dtype.kind in "fiu" and _sound(y)))
        if not reset and plain_y and y.shape == np.shape(X)[:1] and self._plain(X):
            return X, y.astype(np.float64, copy=False) if numeric else y
        X = collected(X) if is_frame(X) else X
        if reset:
            named, self._means = self.encode and is_frame(X), None
            self._schema = understood(X, shuffled) if named and not is_plain(X) else None
        if self._schema is not None:
            made = self._encoded(X, reset)
            if reset and (absent := left_out(X, self._schema)):
                warnings.warn(
                    f"X has columns that are not learnt from: {absent}. Drop them, or give them as numbers, dates or "
                    "strings that repeat.",
                    UserWarning,
                    stacklevel=4,
                )
            X, y = check_X_y(made, y, dtype=(np.float64, np.float32), y_numeric=numeric, estimator=self)
        else:
            X, y = validate_data(
                self,
                X,
                y,
                reset=reset,
                accept_sparse="csr",
                dtype=(np.float64, np.float32),
                ensure_all_finite=self._finite(X),
                y_numeric=numeric,
            )
            if reset and named and not issparse(X):
                self._means = X.mean(0)
            X = self._filled(X)
        y = y.astype(np.float64) if numeric else y  # strings are refused here
        if numeric and not _sound(y):
            raise ValueError(f"y holds a number beyond {LARGEST_VALUE:g}, whose square overflows. Rescale y.")
        return self._bounded(X), y

    def _finite(self, X: ArrayLike) -> bool | str:
        """Return whether scikit-learn's checks refuse NaN: always in arrays, and in frames until means are known."""
        return "allow-nan" if self._means is not None and is_frame(X) else True

    def _filled(self, X: Any) -> Any:
        """Return X with the columns' means where a later frame of numbers has gaps."""
        if self._means is None or issparse(X) or not (gaps := np.isnan(X)).any():
            return X
        return np.where(gaps, self._means.astype(X.dtype), X)

    def _encoded(self, X: ArrayLike, reset: bool) -> np.ndarray:
        """Return a frame as numbers, encoded as the first frame was."""
        if not is_frame(X):
            raise ValueError(
                f"X is of type {type(X).__name__}, but the estimator has learnt from a data frame with strings, dates "
                "or gaps. Give a data frame with the same columns."
            )
        validate_data(self, X, reset=reset, skip_check_array=True)  # the names of the columns
        return encoded(X, self._schema)  # type: ignore[arg-type]

    @property
    def encoded_features_(self) -> list[str]:
        """The names of the features that the columns of a data frame were encoded as."""
        self._check_fitted()
        if self._schema is not None:
            return list(self._schema.features)
        return [str(name) for name in getattr(self, "feature_names_in_", range(self._width))]

    def _bounded(self, X: Any) -> Any:
        if not _sound(X.data if issparse(X) else X):
            raise ValueError(f"X holds a number beyond {LARGEST_VALUE:g}, whose square overflows. Rescale the column.")
        if issparse(X) and np.prod(X.shape, dtype=float) > DENSE_WARNING:
            warnings.warn(
                f"X is sparse and has shape {X.shape}; it is made dense some rows at a time, so memory stays small, "
                "but every zero costs as much as any number. Choose or hash columns if that is too slow.",
                UserWarning,
                stacklevel=4,
            )
        return X

    # --- learning and predicting --------------------------------------------------------------

    def _learn(self, X: Any, y: np.ndarray, weight: ArrayLike, *, passes: int = 1, fitting: bool = False) -> Self:
        """Learn batches of 20 rows in order; passes after the first teach the parameters only."""
        weight = np.ones(len(y), np.float32) if weight is None else _check_sample_weight(weight, X, dtype=np.float32)
        if not (weight >= 0).all():
            raise ValueError("`sample_weight` holds a negative number, but a row counts at least 0 times.")
        order = there = np.flatnonzero(weight)  # a row of weight 0 is not there: it takes no place in a batch either
        if not self.n_rows_seen_ and len(there):
            first = X[there[:FIRST]]
            self._origin = np.zeros(1) if issparse(X) else origin_of(first)
            self._target_origin = float(origin_of(y[there][:, None])[0]) if y.dtype.kind == "f" else 0.0
        y = y - self._target_origin if self._target_origin else y
        random = np.random.default_rng(self._seed) if fitting and self.shuffle else None
        for turn in range(passes if len(there) else 0):
            if random is not None:
                order = random.permutation(there)
            for rows in _blocks(order, X.shape[1]):
                data = _dense(X, rows, self._origin), y[rows]
                if turn:
                    self._engine.relearn(data, weight[rows])
                else:
                    fed = self._engine.feed(data, weight[rows], last=True)
                    if fed is not None and not fed.info.finite.all():
                        warnings.warn(
                            "an update was not finite, so some rows were not learnt. The data may be extreme: look at "
                            "their largest values and weights.",
                            RuntimeWarning,
                            stacklevel=3,
                        )
        self.n_rows_seen_ += len(there)
        return self

    def _predicted(self, what: Callable[..., Tree], X: ArrayLike, *static: object, alone: bool = False) -> Any:
        """Apply a function to the predictive at X; return arrays `[rows, …]`."""
        return self._asked(what, self._checked(X), *static, alone=alone)

    def _asked(
        self,
        what: Callable[..., Tree],
        X: Any,
        *static: object,
        others: tuple[Any, ...] = (),
        alone: bool = False,
    ) -> Any:
        """Do the same for an X that was already checked."""
        size = ASK_ROWS if issparse(X) else X.shape[0]
        parts = (slice(start, start + size) for start in range(0, X.shape[0], size))
        return joined(
            [
                self._engine.ask(
                    _dense(X, part, self._origin), what, *static, others=tuple(a[part] for a in others), alone=alone
                )
                for part in parts
            ]
        )

    def _located(self, values: np.ndarray) -> np.ndarray:
        """Return the model's values of y shifted back to where y lies."""
        return values.astype(np.float64) + self._target_origin if self._target_origin else values

    @property
    def origin_(self) -> tuple[np.ndarray, float]:
        """The offsets subtracted from X and y before `tracker_` sees them, if they lie far from 0; mostly 0."""
        self._check_fitted()
        return np.broadcast_to(self._origin, self._width), self._target_origin


def _blocks(order: np.ndarray, columns: int) -> Iterator[np.ndarray]:
    """Yield blocks of whole batches, as many as are made dense at once; a short last batch joins the others."""
    rows = BATCH * max(1, min(BLOCK_BATCHES, BLOCK_BYTES // (4 * BATCH * columns)))
    ends = [*range(rows, len(order) - BATCH + 1, rows), len(order)]
    for start, end in zip([0, *ends], ends, strict=False):
        yield order[start:end]
