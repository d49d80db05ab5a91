"""Gradient boosting by LightGBM, refitted to all rows from time to time."""

from typing import Any

import lightgbm
import numpy as np

from arena.methods import Task

FIRST, EVERY = (100, 300), 1000  # rows at which it is fitted


class _Refit:
    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed, self.booster = task, seed, None
        self.X, self.y = np.zeros((0, task.columns)), np.zeros(0)

    def predict(self, X: np.ndarray) -> np.ndarray:
        classes = self.task.classes
        if self.booster is not None:
            said = self.booster.predict(X)
            return np.column_stack([1 - said, said]) if classes == 2 else said
        if classes:
            shares = np.bincount(self.y.astype(int), minlength=classes) + 1.0
            return np.tile(shares / shares.sum(), (len(X), 1))
        return np.full(len(X), self.y.mean() if len(self.y) else 0.0)

    def learn(self, X: np.ndarray, y: np.ndarray) -> None:
        before = len(self.y)
        self.X, self.y = np.concatenate([self.X, X]), np.concatenate([self.y, y])
        now = len(self.y)
        if before // EVERY < now // EVERY or any(before < at <= now for at in FIRST):
            self._fit()

    def _fit(self) -> None:
        classes = self.task.classes
        kind = {"objective": "regression" if not classes else "binary" if classes == 2 else "multiclass"}
        if classes > 2:
            kind["num_class"] = classes
        settings = {**kind, "verbose": -1, "num_threads": 1, "seed": self.seed}
        self.booster = lightgbm.train(settings, lightgbm.Dataset(self.X, self.y), 100)

    def state(self) -> Any:
        return self.booster, self.X, self.y


regression = classes = _Refit
