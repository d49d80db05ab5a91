"""River's bundled streams, row by row, beside River's own models: `python -m benchmarks.river_streams`."""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from river import datasets, ensemble, evaluate, forest, linear_model, metrics, neighbors, optim, preprocessing, tree

from benchmarks.machine import machine
from opvi.adapters.river import Classifier, Regressor

OURS = "opvi"


def _regressors(seed: int) -> dict[str, Callable[[], Any]]:
    def scaled(model: Any) -> Any:
        return preprocessing.StandardScaler() | preprocessing.TargetStandardScaler(regressor=model)

    return {
        OURS: lambda: Regressor(buffer=1, seed=seed),
        "opvi, without memory": lambda: Regressor(buffer=1, seed=seed, neighbour_rows=0),
        "adaptive random forest": lambda: forest.ARFRegressor(seed=seed),
        "aggregated Mondrian forest": lambda: forest.AMFRegressor(seed=seed),
        "streaming random patches": lambda: ensemble.SRPRegressor(seed=seed),
        "nearest neighbours": lambda: preprocessing.StandardScaler() | neighbors.KNNRegressor(),
        "linear": lambda: scaled(linear_model.LinearRegression(optim.SGD(0.01))),
    }


def _classifiers(seed: int) -> dict[str, Callable[[], Any]]:
    def bagged() -> Any:
        return ensemble.LeveragingBaggingClassifier(tree.HoeffdingTreeClassifier(), seed=seed)

    return {
        OURS: lambda: Classifier(buffer=1, seed=seed),
        "opvi, without memory": lambda: Classifier(buffer=1, seed=seed, neighbour_rows=0),
        "adaptive random forest": lambda: forest.ARFClassifier(seed=seed),
        "aggregated Mondrian forest": lambda: forest.AMFClassifier(seed=seed),
        "streaming random patches": lambda: ensemble.SRPClassifier(seed=seed),
        "leveraging bagging": bagged,
        "nearest neighbours": lambda: preprocessing.StandardScaler() | neighbors.KNNClassifier(),
        "linear": lambda: preprocessing.StandardScaler() | linear_model.SoftmaxRegression(),
    }


STREAMS: dict[str, Callable[[], Any]] = {
    name: getattr(datasets, name) for name in ("ChickWeights", "TrumpApproval", "Phishing", "ImageSegments", "Bananas")
}
REGRESSIONS = ("ChickWeights", "TrumpApproval")


def score(stream: str, make: Callable[[], Any]) -> dict[str, float]:
    """Return River's own evaluation, and the processor seconds."""
    begun = time.process_time()
    if stream in REGRESSIONS:
        found = {"MAE": metrics.MAE()}
    else:
        found = {"accuracy": metrics.Accuracy(), "log loss": metrics.CrossEntropy()}
    both = metrics.base.Metrics(list(found.values()))
    evaluate.progressive_val_score(STREAMS[stream](), make(), both)
    seconds = time.process_time() - begun
    return {**{name: metric.get() for name, metric in found.items()}, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.river_streams", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"))
    parser.add_argument("--only", action="append", default=[], help="streams, beside those in the file; repeat")
    parser.add_argument("--model", action="append", default=[], help="models, beside those in the file; repeat")
    parser.add_argument("--seed", type=int, default=0, help="of all models; others than 0 have results of their own")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / (f"river-streams-{options.seed}.json" if options.seed else "river-streams.json")
    results: dict[str, dict[str, Any]] = {}
    if (options.only or options.model) and path.exists():
        results = json.loads(path.read_text())["results"]
    for stream in options.only or STREAMS:
        results[stream] = results.get(stream, {}) if options.model else {}
        models = _regressors if stream in REGRESSIONS else _classifiers
        for name, make in models(options.seed).items():
            if options.model and name not in options.model:
                continue
            found = score(stream, make)
            results[stream][name] = {key: value if math.isfinite(value) else None for key, value in found.items()}
            print(stream, name, *(f"{key} {value:.4f}" for key, value in found.items()), flush=True)
            about = machine("python -m benchmarks.river_streams")
            report = {"machine": about, "seed": options.seed, "results": results}
            path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
