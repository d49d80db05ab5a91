"""River's models on the same rows: forests, trees and linear models, with their default settings."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from river import forest, linear_model, preprocessing, tree

from benchmarks.rivals.scoring import Forecast, Scaled
from paper.classification import BATCH, Stream

REGRESSORS: dict[str, Callable[[int], Any]] = {
    "River's forest": lambda seed: forest.ARFRegressor(seed=seed),
    "River's linear": lambda seed: linear_model.BayesianLinearRegression(),
}
CLASSIFIERS: dict[str, Callable[[int, int], Any]] = {
    "River's forest": lambda seed, classes: forest.ARFClassifier(seed=seed),
    "River's tree": lambda seed, classes: tree.HoeffdingAdaptiveTreeClassifier(seed=seed),
    "River's linear": lambda seed, classes: (
        preprocessing.StandardScaler()
        | (linear_model.LogisticRegression() if classes == 2 else linear_model.SoftmaxRegression())
    ),
}


def _dicts(X: np.ndarray) -> list[dict[str, float]]:
    names = [f"x{i}" for i in range(X.shape[1])]
    return [dict(zip(names, row, strict=True)) for row in X.tolist()]


def regress(name: str, split: Scaled, seed: int) -> tuple[Forecast, Forecast, float]:
    """Predict every row, then learn it."""
    model = REGRESSORS[name](seed)
    states_variance = name == "River's linear"

    def say(x: dict[str, float]) -> tuple[float, float]:
        if not states_variance:
            return model.predict_one(x), 0.0
        found = model.predict_one(x, with_dist=True)
        return found.mu, found.sigma**2

    rows, begun = [], time.process_time()
    for x, y in zip(_dicts(split.X), split.y.tolist(), strict=True):
        rows.append(say(x))
        model.learn_one(x, y)
    seconds = time.process_time() - begun
    before, test = np.array(rows).T, np.array([say(x) for x in _dicts(split.X_test)]).T
    zero = np.zeros_like
    own = test[1] if states_variance else None
    return Forecast(before[:1], zero(before[:1])), Forecast(test[:1], zero(test[:1]), own), seconds


def classify(name: str, stream: Stream, seed: int) -> tuple[np.ndarray, None, float]:
    """Predict twenty rows, then learn them one by one."""
    model = CLASSIFIERS[name](seed, stream.classes)
    count = len(stream.y) // BATCH * BATCH
    rows, labels = _dicts(stream.X[:count]), stream.y[:count].tolist()
    p = np.zeros((count, stream.classes))
    begun = time.process_time()
    for start in range(0, count, BATCH):
        for i in range(start, start + BATCH):
            for label, share in model.predict_proba_one(rows[i]).items():
                p[i, int(label)] = share
        for i in range(start, start + BATCH):
            model.learn_one(rows[i], labels[i])
    seconds = time.process_time() - begun
    total = p.sum(1, keepdims=True)
    return np.where(total > 0, p / np.where(total > 0, total, 1), 1 / stream.classes), None, seconds
