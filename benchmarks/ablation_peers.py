"""River's forests row by row, and boosted trees refitted, on the streams of `benchmarks.ablation`."""

import time
from typing import Any

import numpy as np

from benchmarks.ablation_streams import Stream

EVERY, EARLY = 500, (50, 100, 200, 350)  # rows after which the boosted trees are fitted again
SMALLEST = 1e-12


def score(peer: str, stream: Stream, seed: int) -> dict[str, float]:
    """Return the scores of a peer."""
    return forest(stream, seed) if peer.startswith("River") else boosted(stream, seed)


def forest(stream: Stream, seed: int) -> dict[str, float]:
    """Return the scores of River's adaptive random forest, which predicts a row and then learns it."""
    from river import forest as forests

    model: Any = forests.ARFClassifier(seed=seed) if stream.classes else forests.ARFRegressor(seed=seed)
    names = [f"x{column}" for column in range(stream.X.shape[1])]
    half, predicted, begun = len(stream.y) // 2, [], time.process_time()
    for row, (x, y) in enumerate(zip(stream.X.tolist(), stream.y.tolist(), strict=True)):
        if row == half:
            begun = time.process_time()
        named = dict(zip(names, x, strict=True))
        predicted.append(ask(model, named, stream.classes))
        model.learn_one(named, y)
    spent = 1e3 * (time.process_time() - begun) / max(len(stream.y) - half, 1)
    found = scored(np.array(predicted), stream.truth, stream.scored, stream)
    for name, (X, y) in stream.tests.items():
        there = np.array([ask(model, dict(zip(names, x, strict=True)), 0) for x in X.tolist()])
        extra = "" if name == "test" else f", {name}"
        found |= {f"{k}{extra}": v for k, v in scored(there, y, np.ones(len(y), bool), stream).items()}
    return {**found, "ms per row": spent}


def ask(model: Any, x: dict[str, float], classes: int) -> Any:
    """Return a prediction, or the probabilities of all classes."""
    if not classes:
        return model.predict_one(x) or 0.0
    said = model.predict_proba_one(x)
    return [said.get(label, 0.0) for label in range(classes)] if said else [1 / classes] * classes


def boosted(stream: Stream, seed: int) -> dict[str, float]:
    """Return the scores of boosted trees, refitted on all rows so far; LightGBM where it is installed."""
    try:
        from lightgbm import LGBMClassifier as Classifier  # type: ignore[import-not-found]
        from lightgbm import LGBMRegressor as Regressor

        settings: dict[str, Any] = {"random_state": seed, "n_jobs": 1, "verbose": -1}
    except ImportError:
        from sklearn.ensemble import HistGradientBoostingClassifier as Classifier
        from sklearn.ensemble import HistGradientBoostingRegressor as Regressor

        settings = {"random_state": seed}
    shape = (len(stream.y), stream.classes) if stream.classes else (len(stream.y),)
    predicted = np.full(shape, 1 / stream.classes if stream.classes else 0.0)
    model, half, begun = None, len(stream.y) // 2, time.process_time()
    ends = sorted({*EARLY, *range(EVERY, len(stream.y), EVERY), len(stream.y)})
    ends = [end for end in ends if end <= len(stream.y)]
    for low, high in zip([0, *ends[:-1]], ends, strict=True):
        if low <= half < high:
            begun = time.process_time()
        if model is not None:
            predicted[low:high] = told(model, stream.X[low:high], stream.classes)
        if len(np.unique(stream.y[:high])) > 1:  # there is something to tell apart
            model = (Classifier if stream.classes else Regressor)(**settings).fit(stream.X[:high], stream.y[:high])
    spent = 1e3 * (time.process_time() - begun) / max(len(stream.y) - half, 1)
    found = scored(predicted, stream.truth, stream.scored, stream)
    for name, (X, y) in stream.tests.items():
        extra = "" if name == "test" else f", {name}"
        there = scored(told(model, X, 0), y, np.ones(len(y), bool), stream)
        found |= {f"{key}{extra}": value for key, value in there.items()}
    return {**found, "ms per row": spent}


def told(model: Any, X: np.ndarray, classes: int) -> np.ndarray:
    """Return predictions, or probabilities of all classes, some of which the model may not have seen."""
    if not classes:
        return np.asarray(model.predict(X), float)
    out = np.full((len(X), classes), SMALLEST)
    out[:, model.classes_.astype(int)] = model.predict_proba(X)
    return out


def scored(predicted: np.ndarray, truth: np.ndarray, rows: np.ndarray, stream: Stream) -> dict[str, float]:
    """Return RMSE, or accuracy and log loss; peers have no densities."""
    if not stream.classes:
        error = (predicted[rows] - truth[rows]) / stream.unit
        return {"rmse": float(np.sqrt((error**2).mean()))}
    p, y = predicted[rows], truth[rows]
    chosen = np.clip(p[np.arange(len(y)), y], 1e-6, 1.0)
    return {"accuracy": float((p.argmax(1) == y).mean()), "log loss": float(-np.log(chosen).mean())}
