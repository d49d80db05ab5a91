"""The recommended classifier as a scikit-learn estimator."""

from collections.abc import Sequence
from typing import Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, column_or_1d

from opvi.adapters._carried import carried, room_for
from opvi.adapters.sklearn._base import BATCH, QUICK_ROWS, OnlineEstimator
from opvi.predictive import Predictive, Uncertainty
from opvi.running import Engine
from opvi.running._learners import one_learner
from opvi.tracking import classifier
from opvi.types import Array, ArrayLike, Sampler, Seed


def _summary(predictive: Predictive) -> tuple[Array, Array, Array]:
    return predictive.log_probabilities(), *predictive.uncertainty()


def _texts(labels: np.ndarray) -> bool:
    return labels.dtype.kind in "US" or (labels.dtype.kind == "O" and any(isinstance(label, str) for label in labels))


class OPVIClassifier(ClassifierMixin, OnlineEstimator):
    """Online Bayesian classification: `opvi.classifier` as a scikit-learn estimator.

    It learns from each row once, in batches of 20, whatever the size of a call; X may have any units. Probabilities
    are calibrated by predicting each batch before learning from it. A class may first appear in any call of
    `partial_fit`.

    Args:
        hidden: width of each hidden layer; `()` for linear models. Chosen from the number of columns if None.
        n_particles: the number of networks, a multiple of 4, or of 2 if a half-life is given; chosen likewise if None.
        half_life: in rows; data older than that count half. None determines how fast to forget.
        memory_rows: keep a uniform sample of this many rows, and learn from some of them again with every batch.
        neighbour_rows: rows kept beside the networks; the nearest take part in predictions. As many as fit in 16 MB
            if None, none for linear models; 0 for none.
        n_epochs: passes of `fit`. Passes after the first teach the parameters, not the calibration.
        shuffle: whether `fit` visits the rows in random order; use False for rows sorted by time.
        random_state: a seed, or anything scikit-learn accepts as one.
        encode: whether a data frame with strings, categories, dates or gaps becomes numbers as in `opvi learn`; arrays
            and frames of numbers stay as they are.
    """

    def __init__(
        self,
        hidden: Sequence[int] | None = None,
        n_particles: int | None = None,
        half_life: float | None = None,
        memory_rows: int = 0,
        neighbour_rows: int | None = None,
        n_epochs: int = 1,
        shuffle: bool = True,
        random_state: Seed = None,
        encode: bool = True,
    ):
        self.hidden = hidden
        self.n_particles = n_particles
        self.half_life = half_life
        self.memory_rows = memory_rows
        self.neighbour_rows = neighbour_rows
        self.n_epochs = n_epochs
        self.shuffle = shuffle
        self.random_state = random_state
        self.encode = encode

    def _made(self, *sizes: int) -> Sampler:
        return classifier(*sizes, **self._settings())

    def _start(self, X: ArrayLike, classes: np.ndarray, quick: int = 0) -> None:
        self._met = self.classes_ = classes
        self._room = max(2, len(classes))  # of a single class there is nothing to learn, and no harm
        self._begin(X.shape[1], self._room, quick=quick)

    def _meet(self, labels: np.ndarray) -> None:
        """Make room for new labels, keeping what was learnt."""
        if _texts(labels) != _texts(self.classes_):
            raise ValueError(f"y holds {labels[:5]}, but the classes so far are {self.classes_[:20]}: text or numbers.")
        fresh = np.setdiff1d(labels, self.classes_)
        if not len(fresh):
            return
        check_classification_targets(fresh)
        met = np.concatenate([self._met, fresh])  # in the order of the model
        if len(met) > self._room:
            room = room_for(len(met))
            sampler = self._remembering(classifier(self._width, room, **self._used))
            engine = Engine(sampler, self._seed, batch=BATCH, quick=self._engine.quick)
            engine.state, self._room = carried(self._engine.state, engine.state), room
            self._engine = engine  # before the classes: whoever predicts meanwhile takes those first
        self._met, self.classes_ = met, np.sort(met)

    def _numbers(self, y: np.ndarray) -> np.ndarray:
        """The classes' numbers in the model."""
        index = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        return np.argsort(self._met)[index].astype(np.int32)

    @one_learner
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike = None) -> Self:
        """Forget everything, and learn from these rows in `n_epochs` passes."""
        X, y = self._checked_pair(X, y, reset=True, numeric=False, shuffled=self.shuffle)
        check_classification_targets(y)
        self._start(X, np.unique(y))
        return self._learn(X, self._numbers(y), sample_weight, passes=self.n_epochs, fitting=True)

    @one_learner
    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike = None, sample_weight: ArrayLike = None
    ) -> Self:
        """Learn from these rows, in order, on top of what was learnt before.

        A label never seen before becomes a new class. `classes` may name classes before their first row.
        """
        first = not hasattr(self, "_engine")
        X, y = self._checked_pair(X, y, reset=first, numeric=False)
        labels = np.unique(y)
        named = labels[:0] if classes is None else np.unique(classes)
        if len(named) and _texts(named) != _texts(labels):
            raise ValueError(f"y holds {labels[:5]}, but `classes` is {named[:20]}: text or numbers.")
        labels = np.unique(np.concatenate([named, labels])) if len(named) else labels
        if first:
            check_classification_targets(labels)
            self._start(X, labels, quick=QUICK_ROWS)
        else:
            self._meet(labels)
        return self._learn(X, self._numbers(y), sample_weight)

    def predict_log_proba(self, X: ArrayLike) -> np.ndarray:
        """Log probabilities, `[rows, classes]`, in the order of `classes_`."""
        return self._log_proba(X)[0]

    def _log_proba(self, X: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Return the same with the classes."""
        self._check_fitted()
        met = self._met
        log_p = self._predicted(_summary, X, alone=True)[0].astype(float)[:, np.argsort(met)]
        return log_p - np.logaddexp.reduce(log_p, axis=1, keepdims=True), np.sort(met)

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities, `[rows, classes]`, in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of each row."""
        log_p, classes = self._log_proba(X)
        return classes[log_p.argmax(1)]

    def decompose(self, X: ArrayLike) -> Uncertainty:
        """Split the entropy of each row's prediction, in nats, into what more data would remove and the rest."""
        return Uncertainty(*self._predicted(_summary, X, alone=True)[1:])

    def log_predictive_density(self, X: ArrayLike, y: ArrayLike) -> np.ndarray:
        """The log probability of each row's label."""
        (log_p, classes), y = self._log_proba(X), column_or_1d(y)
        check_consistent_length(log_p, y)
        known = np.isin(y, classes)
        if not known.all():
            raise ValueError(f"y holds {np.unique(y[~known])[:5]}, but the classes so far are {classes[:20]}.")
        return log_p[np.arange(len(y)), np.searchsorted(classes, y)]

    def sample_y(self, X: ArrayLike, n_samples: int = 1, random_state: int = 0) -> np.ndarray:
        """Draws of the label of each row, `[rows, n_samples]`."""
        log_p, classes = self._log_proba(X)
        below = np.cumsum(np.exp(log_p), axis=1)[:, None, :-1]
        level = np.random.default_rng(random_state).random((len(below), n_samples, 1))
        return classes[(level > below).sum(2)]
