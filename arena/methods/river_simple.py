"""River's nearest neighbours and linear models, columns and targets scaled by the rows so far."""

from typing import Any

import numpy as np
from river import linear_model, neighbors, optim

from arena.methods import Task
from arena.methods.river_trees import _Rows
from arena.scaling import Units


class _Scaled(_Rows):
    def __init__(self, model: Any, task: Task) -> None:
        super().__init__(model, task)
        self.units = Units(task.columns, task.classes)

    def predict(self, X: np.ndarray) -> np.ndarray:
        said = super().predict(self.units.inputs(X).astype(float))
        return said if self.classes else self.units.back(said, said).mean

    def learn(self, X: np.ndarray, y: np.ndarray) -> None:
        x, target = self.units.learn(X, y)
        super().learn(x.astype(float), y if self.classes else target[:, 0])

    def state(self) -> Any:
        return self.model, self.units


def regression(task: Task, seed: int, kind: str) -> _Scaled:
    """Return a regressor."""
    linear = linear_model.LinearRegression(optim.SGD(0.01))
    return _Scaled(linear if kind == "linear" else neighbors.KNNRegressor(), task)


def classes(task: Task, seed: int, kind: str) -> _Scaled:
    """Return a classifier."""
    linear = linear_model.SoftmaxRegression()
    return _Scaled(linear if kind == "linear" else neighbors.KNNClassifier(), task)
