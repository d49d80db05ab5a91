"""River's forests: they need no scaling."""

from typing import Any

import numpy as np
from river import ensemble, forest

from arena.methods import Task

NUMBERS = {"ARF": forest.ARFRegressor, "AMF": forest.AMFRegressor, "SRP": ensemble.SRPRegressor}
CLASSES = {"ARF": forest.ARFClassifier, "AMF": forest.AMFClassifier, "SRP": ensemble.SRPClassifier}


class _Rows:
    def __init__(self, model: Any, task: Task) -> None:
        self.model, self.classes, self.names = model, task.classes, list(range(task.columns))

    def _dicts(self, X: np.ndarray) -> list[dict[int, float]]:
        return [dict(zip(self.names, row, strict=True)) for row in X.tolist()]

    def predict(self, X: np.ndarray) -> np.ndarray:
        if not self.classes:
            return np.array([self.model.predict_one(x) or 0.0 for x in self._dicts(X)], float)
        p = np.zeros((len(X), self.classes))
        for row, x in zip(p, self._dicts(X), strict=True):
            for label, share in self.model.predict_proba_one(x).items():
                row[label] = share
        total = p.sum(1, keepdims=True)
        return np.where(total > 0, p / np.where(total > 0, total, 1), 1 / self.classes)

    def learn(self, X: np.ndarray, y: np.ndarray) -> None:
        for x, target in zip(self._dicts(X), y.tolist(), strict=True):
            self.model.learn_one(x, target)

    def state(self) -> Any:
        return self.model


def regression(task: Task, seed: int, kind: str) -> _Rows:
    """Return a forest of regression trees."""
    return _Rows(NUMBERS[kind](seed=seed), task)


def classes(task: Task, seed: int, kind: str) -> _Rows:
    """Return a forest of classification trees."""
    return _Rows(CLASSES[kind](seed=seed), task)
