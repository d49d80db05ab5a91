"""Networks for classes in `opvi.tracker`, beside `opvi.classifier`: `python -m benchmarks.class_networks`.

Streams of 2,000 rows of five N(0, 1) inputs in batches of 20; their labels depend on the inputs by straight lines, by a
random network, or not at all. Seeds 0 and 1 were used to choose settings; others are reported.
"""

import argparse
import json
import math
from pathlib import Path

import jax
import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.stamp import stamp

COMMAND = "python -m benchmarks.class_networks --out docs/results --seeds"
SOURCES = "src/opvi/filters", "src/opvi/tracking", "src/opvi/targets", "benchmarks/class_networks.py"
ROWS, COLUMNS, BATCH = 2000, 5, 20
LABELS = "lines", "a network", "nothing"
HEADS = {"categorical": 3, "Bernoulli": 2}  # with the number of classes
ACTIVATIONS = {"ReLU": jax.nn.relu, "tanh": jax.numpy.tanh}
LAYERS = {"one layer": (50,), "two layers": (20, 20)}
HEADER = ["head", "network", "runs", "stops", "log loss beside the classifier", "at most"]


def rows(labels: str, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels, drawn with probabilities that depend on the inputs."""
    rng = np.random.default_rng([seed, classes, LABELS.index(labels)])
    X = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    logits = 1.5 * X @ rng.normal(size=(COLUMNS, classes))
    if labels == "a network":
        logits = 3 * np.tanh(X @ rng.normal(size=(COLUMNS, 10)) + rng.normal(size=10)) @ rng.normal(size=(10, classes))
    if labels == "nothing":
        logits = np.zeros((ROWS, classes))
    return X, (logits + rng.gumbel(size=logits.shape)).argmax(1).astype(np.int32)


def loss(sampler: opvi.Sampler, data: tuple[np.ndarray, np.ndarray], seed: int) -> float:
    """Return the mean log loss of rows predicted before they are learnt; NaN if the run stops."""
    try:
        _, history = opvi.run(sampler, opvi.stream(data, BATCH), seed)
    except opvi.DivergedError:
        return math.nan
    return -float(np.mean(history.info.log_predictive))


def target(head: str, activation: str, layers: str) -> opvi.Target:
    """Return a network with default settings."""
    hidden, act = LAYERS[layers], ACTIVATIONS[activation]
    if head == "categorical":
        return opvi.mlp(COLUMNS, hidden, opvi.targets.categorical(), outputs=HEADS[head], activation=act)
    return opvi.mlp(COLUMNS, hidden, opvi.targets.bernoulli(), activation=act)


def table(results: list[dict]) -> dict[str, list]:
    """Return the ratio of log losses for every kind of network: over all labels and seeds, and the worst."""
    lines = []
    for head in HEADS:
        for layers in LAYERS:
            for activation in ACTIVATIONS:
                name = f"{activation}, {layers}"
                found = [one for one in results if (one["head"], one["network"]) == (head, name)]
                if not found:
                    continue
                ratios = [one["log loss"] / one["classifier"] for one in found]
                stops = sum(math.isnan(ratio) for ratio in ratios)
                mean, most = (f"{100 * (v - 1):+.1f} %" for v in (np.mean(ratios), np.max(ratios)))
                lines.append([head, name, str(len(found)), str(stops), mean, most])
    return {"header": HEADER, "rows": lines}


def main() -> None:
    """Measure, and write `class-networks.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for class-networks.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--labels", nargs="+", default=list(LABELS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    command = f"{COMMAND} {' '.join(map(str, options.seeds))}"
    results: list[dict] = []
    for head, classes in HEADS.items():
        streams = [(labels, seed) for labels in options.labels for seed in options.seeds]
        data = {stream: rows(stream[0], classes, stream[1]) for stream in streams}
        classifier = opvi.classifier(COLUMNS, classes)
        beside = {stream: loss(classifier, data[stream], stream[1]) for stream in streams}
        for layers in LAYERS:
            for activation in ACTIVATIONS:
                tracker = opvi.tracker(target(head, activation, layers))
                for stream in streams:
                    found = {
                        **{"head": head, "network": f"{activation}, {layers}", "labels": stream[0], "seed": stream[1]},
                        **{"log loss": loss(tracker, data[stream], stream[1]), "classifier": beside[stream]},
                    }
                    print(found, f"{found['log loss'] / found['classifier'] - 1:+.3f}", flush=True)
                    results.append(found)
    made = {
        "command": command,
        "machine": machine("python -m benchmarks.class_networks"),
        "sources": stamp(*SOURCES),
        "tables": [table(results)],
    }
    (options.out / "class-networks.json").write_text(json.dumps({**made, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
