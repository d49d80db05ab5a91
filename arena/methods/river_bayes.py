"""River's Bayesian linear regression; the noise is learnt from past errors, because the model states none."""

from typing import Any

import numpy as np
from river import linear_model

from arena.methods import Task
from arena.posteriors import NOISE, Problem
from arena.scaling import Units


class regression:  # noqa: N801  # a factory
    """Return a regressor on columns and targets scaled by the rows so far, with a constant column."""

    def __init__(self, task: Task, seed: int) -> None:
        self.model, self.units = linear_model.BayesianLinearRegression(), Units(task.columns, 0)

    def predict(self, X: np.ndarray) -> np.ndarray:
        said = np.array([self.model.predict_one(x) for x in _dicts(self.units.inputs(X))])
        return self.units.back(said, said).mean

    def learn(self, X: np.ndarray, y: np.ndarray) -> None:
        x, target = self.units.learn(X, y)
        for row, value in zip(_dicts(x), target[:, 0].tolist(), strict=True):
            self.model.learn_one(row, value)

    def state(self) -> Any:
        return self.model, self.units


def _dicts(X: np.ndarray) -> list[dict[int, float]]:
    return [dict(enumerate([1.0, *row])) for row in X.tolist()]


class posterior:  # noqa: N801  # a factory
    """Return the exact posterior of a linear model with known noise."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.model = linear_model.BayesianLinearRegression(beta=1 / NOISE)
        self.rng, self.d = np.random.default_rng(seed), problem.target.dim

    def learn(self, rows: Any) -> None:
        for x, y in zip(*rows, strict=True):
            self.model.learn_one(dict(enumerate(x.tolist())), float(y))

    def draws(self, n: int) -> np.ndarray:
        units = np.eye(self.d)
        mean = np.array([self.model.predict_one(dict(enumerate(unit))) for unit in units.tolist()])
        covariance = self.model._ss_inv_arr[: self.d, : self.d]
        return self.rng.multivariate_normal(mean, covariance, n)

    def state(self) -> Any:
        return self.model
