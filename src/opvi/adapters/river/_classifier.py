"""The recommended classifier as a River model."""

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
from river import base

from opvi.adapters.river._model import Frame, OnlineModel, Row, Series, rows_of, series_like
from opvi.predictive import Predictive
from opvi.tracking import classifier
from opvi.tracking._widening import widened_classifier
from opvi.types import Sampler, State, Tree

FIRST = 8  # rows whose labels say how many classes there are
MANY = 20  # rows that show nearly all of them


class Classifier(OnlineModel, base.MiniBatchClassifier):
    """Online Bayesian classification: `opvi.classifier` as a River model.

    Features may have any units; new features and new classes may appear at any time. None, NaN and a key that is
    missing now and then count as the feature's running mean; a key that is often left out counts as 0. Strings become
    indicators; dates become hour, weekday and, after a year of them, season. Learning waits until `buffer` rows are
    there; predictions never see the rows they predict.

    Parameters
    ----------
    hidden
        Width of each hidden layer; `()` for linear models.
    n_particles
        The number of networks: a multiple of 4, or of 2 if a half-life is given.
    half_life
        In rows; data older than that count half. None determines how fast to forget.
    neighbour_rows
        Rows kept beside the networks; the nearest take part in predictions. None keeps what fits in 16 MB, none for
        linear models; 0 for none.
    buffer
        Rows learnt from at once, from 1 to 32. Learning begins with the 8th row or later: the labels of the first rows
        say how many classes to make room for, and every other number of classes would have to be compiled.
    max_features
        The most columns; further features share them by hashing.
    seed
        Seed of the starting networks.

    Examples
    --------
    >>> from river import datasets, evaluate, metrics
    >>> from opvi.adapters.river import Classifier
    >>> model = Classifier(hidden=(), seed=0)
    >>> print(evaluate.progressive_val_score(datasets.Phishing(), model, metrics.Accuracy()))  # doctest: +SKIP

    """

    def __init__(
        self,
        hidden: tuple[int, ...] = (30,),
        n_particles: int = 4,
        half_life: float | None = None,
        buffer: int = 20,
        max_features: int = 256,
        seed: int | None = None,
        neighbour_rows: int | None = None,
    ):
        self.neighbour_rows = neighbour_rows
        self._start((1, 2), hidden, n_particles, half_life, buffer, max_features, seed)
        self._labels: dict[Hashable, int] = {}

    _first = FIRST

    @property
    def _multiclass(self) -> bool:
        return True

    def _sampler(self, sizes: tuple[int, ...]) -> Sampler:
        return classifier(
            *sizes,
            hidden=self.hidden,
            particles=self.n_particles,
            half_life=self.half_life,
            memory_rows=self.neighbour_rows,
        )

    def _widened(self, state: Tree, fresh: Tree) -> State:
        return widened_classifier(state, fresh)

    def _needed(self) -> tuple[int, ...]:
        return (*super()._needed(), max(2, len(self._labels)))

    def _room(self, sizes: tuple[int, ...], rows: int) -> tuple[int, ...]:
        columns, classes = sizes
        return columns, classes if rows >= MANY else 1 << (classes - 1).bit_length()

    def _targets(self, y: list[Any]) -> np.ndarray:
        return np.array([self._labels[label] for label in y], np.int32)

    def learn_one(self, x: Row, y: Hashable, w: float = 1.0) -> None:
        """Learn from a row, or keep it until there are `buffer` of them. It counts `w` times."""
        if y not in self._labels:
            if y is None or y != y:
                raise ValueError(f"`y` is {y}, but must be a label. Leave the row out.")
            self._labels[y] = len(self._labels)
        self._wait(x, y, w)

    def _spread(self, p: list[float]) -> dict[Hashable, float]:
        """Return probabilities by label; a label that the model has no room for yet counts as one row among all."""
        rare = 1 / (self.n_rows_seen + 2)
        p = p[: len(self._labels)] + [rare] * (len(self._labels) - len(p))
        total = math.fsum(p)
        return {label: value / total for label, value in zip(self._labels, p, strict=True)}

    def _guess(self) -> list[float]:
        """Return the shares of the waiting labels, before anything is learnt."""
        counts = [1.0] * len(self._labels)
        for _, label, w in self._waiting:
            counts[self._labels[label]] += w
        return counts

    def predict_proba_one(self, x: Row, **kwargs: Any) -> dict[Any, float]:
        """Return the probability of every label seen so far."""
        p = self._guess() if self._engine is None else self._asked(Predictive.probabilities, [x])[0].tolist()
        return self._spread(p)

    def _each(self, rows: list[Row]) -> list[dict[Hashable, float]]:
        """Return the probabilities of each row."""
        known = self._engine is not None and rows
        return [
            self._spread(p)
            for p in (self._asked(Predictive.probabilities, rows).tolist() if known else [self._guess()] * len(rows))
        ]

    def predict_proba_many(self, X: Frame) -> Frame:
        """Return the probability of every label seen so far, one column each, for the rows of a data frame."""
        each = self._each(rows_of(X))
        if hasattr(X, "to_dicts"):
            import polars

            return polars.DataFrame([{str(label): value for label, value in p.items()} for p in each])
        import pandas

        return pandas.DataFrame(each, index=X.index, columns=list(self._labels))

    def predict_many(self, X: Frame) -> Series:
        """Return the most probable label of each row of a data frame."""
        return series_like(X, [max(p, key=p.get) if p else None for p in self._each(rows_of(X))])  # type: ignore[arg-type]
