"""The recommended classifier as a scikit-learn estimator."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, column_or_1d

from opvi.adapters.sklearn._base import OnlineEstimator
from opvi.predictive import Predictive, Uncertainty
from opvi.tracking import classifier
from opvi.types import Array, ArrayLike, Sampler, Seed


def _summary(predictive: Predictive) -> tuple[Array, Array, Array]:
    return predictive.log_probabilities(), *predictive.uncertainty()


def _numbers(y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The classes' numbers."""
    try:
        index = np.searchsorted(classes, y).clip(max=len(classes) - 1)
        known = classes[index] == y
    except TypeError:  # text among numbers, or the reverse
        known = np.zeros(len(y), bool)
    if not known.all():
        check_classification_targets(y)
        raise ValueError(
            f"y holds {np.unique(y[~known])[:5]}, but the classes named at first are {classes[:20]}. Name all classes "
            "in the first call: `partial_fit(X, y, classes=...)`."
        )
    return index.astype(np.int32)


class OPVIClassifier(ClassifierMixin, OnlineEstimator):
    """Online Bayesian classification: `opvi.classifier` as a scikit-learn estimator.

    It learns from each row once, in batches of 20, whatever the size of a call; X may have any units. Probabilities
    are calibrated by predicting each batch before learning from it.

    Args:
        hidden: width of each hidden layer; `()` for linear models.
        n_particles: how many networks: a multiple of 4, or of 2 if a half-life is given.
        half_life: in rows; data older than that count half. None determines how fast to forget.
        memory_rows: keep a uniform sample of so many rows, and learn from some of them again with every batch.
        n_epochs: passes of `fit`. Passes after the first teach the parameters, not the calibration.
        shuffle: whether `fit` goes through the rows in random order. False for rows in the order of time.
        random_state: a seed, or what scikit-learn makes one of.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (100,),
        n_particles: int = 20,
        half_life: float | None = None,
        memory_rows: int = 0,
        n_epochs: int = 1,
        shuffle: bool = True,
        random_state: Seed = None,
    ):
        self.hidden = hidden
        self.n_particles = n_particles
        self.half_life = half_life
        self.memory_rows = memory_rows
        self.n_epochs = n_epochs
        self.shuffle = shuffle
        self.random_state = random_state

    def _made(self, *sizes: int) -> Sampler:
        return classifier(*sizes, **self._settings())

    def _start(self, X: ArrayLike, classes: np.ndarray) -> None:
        self.classes_ = classes
        self._begin(X.shape[1], max(2, len(classes)))  # of a single class there is nothing to learn, and no harm

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike = None) -> Self:
        """Forget everything, and learn from these rows in `n_epochs` passes."""
        X, y = self._checked_pair(X, y, reset=True, numeric=False)
        check_classification_targets(y)
        self._start(X, np.unique(y))
        return self._learn(X, _numbers(y, self.classes_), sample_weight, passes=self.n_epochs, fitting=True)

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike = None, sample_weight: ArrayLike = None
    ) -> Self:
        """Learn from these rows, in their order, on top of all before. The first call names all classes."""
        first = not hasattr(self, "_engine")
        if first and (classes is None or not len(classes)):
            raise ValueError("classes must be passed on the first call to partial_fit, e.g. `classes=[0, 1]`.")
        X, y = self._checked_pair(X, y, reset=first, numeric=False)
        named = self.classes_ if classes is None else np.unique(classes)
        if first:
            check_classification_targets(named)
        elif classes is not None and not np.array_equal(named, self.classes_):
            raise ValueError(
                f"`classes` is {named}, but the first call to partial_fit named {self.classes_}. Leave it out, or "
                "begin anew with `fit`."
            )
        numbers = _numbers(y, named)
        if first:
            self._start(X, named)
        return self._learn(X, numbers, sample_weight)

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Log probabilities, `[rows, classes]`, in the order of `classes_`."""
        log_p = self._predicted(_summary, X)[0].astype(float)[:, : len(self.classes_)]
        return log_p - np.logaddexp.reduce(log_p, axis=1, keepdims=True)

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities, `[rows, classes]`, in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of each row."""
        index = self.predict_log_proba(X).argmax(1)
        return self.classes_[index]

    def decompose(self, X: ArrayLike) -> Uncertainty:
        """The entropy of each row's prediction in two parts, in nats: what more data would take away, and the rest."""
        return Uncertainty(*self._predicted(_summary, X)[1:])

    def log_predictive_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """The log probability of each row's label."""
        X = self._checked(X)
        y = column_or_1d(y)
        check_consistent_length(X, y)
        return self.predict_log_proba(X)[np.arange(len(y)), _numbers(y, self.classes_)]

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: int = 0) -> np.ndarray:
        """Draws of the label of each row, `[rows, n_samples]`."""
        below = np.cumsum(self.predict_proba(X), axis=1)[:, None, :-1]
        level = np.random.default_rng(random_state).random((len(below), n_samples, 1))
        return self.classes_[(level > below).sum(2)]
