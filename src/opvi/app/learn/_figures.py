"""Figures that people expect besides the scores: mean absolute error, R², the confusion matrix, AUC.

All sums are taken batch by batch, so they do not depend on where a run was cut.
"""

from typing import NamedTuple, Self

import numpy as np

from opvi.adapters._tables import Json
from opvi.app.learn._scores import added, counted
from opvi.running import Fed

RANKS = 1000  # bins of a probability, from which the area under ROC is found


class Figures(NamedTuple):
    """Sums over the rows that were predicted before they were learnt; plain arrays, saved with every checkpoint."""

    sums: np.ndarray  # [5] of a regression: rows, |error|, error², y - shift, (y - shift)²
    shift: np.ndarray  # the first y, so that squares of large numbers do not cancel
    confusion: np.ndarray  # [C, C] of a classification: rows by their class and by the class predicted
    ranks: np.ndarray  # [2, RANKS] of two classes: rows of each by the probability of the second

    @classmethod
    def start(cls, classes: int) -> Self:
        """Return nothing counted."""
        return cls(np.zeros(5), np.full((), np.nan), np.zeros((classes, classes)), np.zeros((2, RANKS)))

    def widened(self, classes: int) -> Self:
        """Return the same with room for more classes."""
        confusion = np.zeros((classes, classes))
        confusion[: len(self.confusion), : len(self.confusion)] = self.confusion
        return self._replace(confusion=confusion)

    def add(self, task: str, fed: Fed) -> Self:
        """Return the sums after some more batches."""
        there, y, said = counted(fed), np.asarray(fed.data[1]), fed.info.predicted
        if not there.any():
            return self
        if task == "regression":
            y = y.astype(float)
            shift = np.array(y[there][0]) if np.isnan(self.shift) else self.shift
            error = np.asarray(said.mean, float) - y
            each = np.ones_like(y), np.abs(error), error**2, y - shift, (y - shift) ** 2
            sums = np.stack([np.where(there, part, 0).sum(1) for part in each], 1)
            return self._replace(sums=added(self.sums, sums), shift=shift)
        p, size = np.asarray(said.probabilities), len(self.confusion)
        pairs = y[there] * size + np.minimum(p.argmax(2)[there], size - 1)
        confusion = self.confusion + np.bincount(pairs, minlength=size**2).reshape(size, size)
        if p.shape[2] > 2:
            return self._replace(confusion=confusion)
        place = np.clip((p[..., 1][there] * RANKS).astype(int), 0, RANKS - 1) + RANKS * y[there]
        ranks = self.ranks + np.bincount(place, minlength=2 * RANKS).reshape(2, RANKS)
        return self._replace(confusion=confusion, ranks=ranks)

    def told(self, task: str, classes: list[str]) -> Json:
        """Return the figures as plain values; None for those that do not exist."""
        if task == "regression":
            rows, absolute, square, apart, apart2 = self.sums.tolist()
            around = apart2 - apart**2 / rows if rows else 0.0  # of y around its mean
            return {"mae": absolute / rows if rows else None, "r2": 1 - square / around if around > 0 else None}
        out: Json = {}
        if len(classes) == 2:
            out["auc"] = area_under_roc(self.ranks)
        counts = self.confusion[: len(classes), : len(classes)].astype(int)
        named = zip(classes, counts.tolist(), strict=True)
        return {**out, "confusion": {name: dict(zip(classes, row, strict=True)) for name, row in named}}


def area_under_roc(ranks: np.ndarray) -> float | None:
    """Return how often a row of the second class has the higher probability; ties within a bin count half."""
    negative, positive = ranks
    pairs = negative.sum() * positive.sum()
    below = np.cumsum(negative) - negative / 2
    return float((positive * below).sum() / pairs) if pairs else None
