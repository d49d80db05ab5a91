"""Networks for classes in `opvi.tracker`, beside `opvi.classifier`: `python -m benchmarks.class_networks`.

Streams of 2,000 rows of five N(0, 1) inputs in batches of 20; their labels depend on the inputs by straight lines, by a
random network, or not at all. Seeds 0 and 1 were used to choose settings; others are reported.
"""

import argparse
import math
from pathlib import Path

import jax
import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.parallel import finished, keep
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


def losses(head: str, network: tuple[str, str] | None, labels: str, seeds: tuple[int, ...]) -> dict[int, float]:
    """Return the log loss of a network, or of the classifier, for every seed."""
    classes = HEADS[head]
    sampler = opvi.tracker(target(head, *network)) if network else opvi.classifier(COLUMNS, classes)
    return {seed: loss(sampler, rows(labels, classes, seed), seed) for seed in seeds}


def name_of(network: tuple[str, str]) -> str:
    """Return a network's name in the table."""
    return ", ".join(network)


def main() -> None:
    """Measure, and write `class-networks.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for class-networks.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--labels", nargs="+", default=list(LABELS))
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, each on one core")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    networks = [None, *((activation, layers) for layers in LAYERS for activation in ACTIVATIONS)]
    tasks = [
        (head, network, labels, tuple(options.seeds))
        for network in networks
        for head in HEADS
        for labels in options.labels
    ]
    found: dict[tuple, dict[int, float]] = {}
    for (head, network, labels, _), of_seeds in finished(losses, tasks, options.jobs):
        found[head, network, labels] = of_seeds
        print(head, network, labels, of_seeds, flush=True)
        write(options.out / "class-networks.json", found, f"{COMMAND} {' '.join(map(str, options.seeds))}")


def write(file: Path, found: dict[tuple, dict[int, float]], command: str) -> None:
    """Write what has been measured so far: networks whose classifier beside them is known."""
    results = [
        {
            **{"head": head, "network": name_of(network), "labels": labels, "seed": seed},
            **{"log loss": value, "classifier": found[head, None, labels][seed]},
        }
        for (head, network, labels), of_seeds in sorted(found.items(), key=str)
        if network and (head, None, labels) in found
        for seed, value in of_seeds.items()
    ]
    made = {
        "command": command,
        "machine": machine("python -m benchmarks.class_networks"),
        "sources": stamp(*SOURCES),
        "tables": [table(results)],
    }
    keep(file, {**made, "results": results})


if __name__ == "__main__":
    main()
