"""Values that stand for "none" (-999) among the columns: `python -m benchmarks.columns`.

Synthetic streams of 2,000 rows, in which a share of all entries is -999. Every row is predicted before it is learnt, in
batches of 20; errors are from row 200 on, on rows without such an entry. "whole rows only" is a stream from which the
others were removed, to show what is lost without them. Classes are whether y is above its median. Settings were chosen
on seeds 0 and 1.
"""

import argparse
import json
from pathlib import Path

import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.robust import predicted, summary
from opvi.running import Engine

SHARES = (0.0, 0.01, 0.05)
SEEDS = (11, 12)
ROWS, BEGIN, NONE = 2000, 200, -999.0


def friedman(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Friedman's function, and three columns without effect."""
    X = rng.uniform(size=(ROWS, 8))
    y = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    return X, y + rng.normal(size=ROWS)


def waves(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Sines of six columns in different units."""
    Z = rng.normal(size=(ROWS, 6))
    y = np.sin(1.5 * Z @ rng.normal(size=(6, 8)) / np.sqrt(6)) @ rng.normal(size=8)
    return Z * np.exp(rng.normal(size=6)), y + 0.1 * rng.normal(size=ROWS)


STREAMS = {"Friedman": friedman, "waves": waves}


def errors(name: str, share: float, seed: int) -> dict[str, float]:
    """One pass over a stream with this share of -999."""
    rng = np.random.default_rng(seed)
    X, y = STREAMS[name](rng)
    bad = rng.random(X.shape) < share
    whole = ~bad.any(1)
    said = predicted(np.where(bad, NONE, X), y, seed)
    scored = whole & (np.arange(ROWS) >= BEGIN)
    alone = predicted(X[whole], y[whole], seed)["mean"]
    late = (np.flatnonzero(whole) >= BEGIN)[: len(alone)]
    inside = (said["level"] > 0.05) & (said["level"] < 0.95)
    return {
        "rmse": float(np.sqrt(np.mean((y - said["mean"])[scored] ** 2))),
        "whole rows only": float(np.sqrt(np.mean((y[whole][: len(alone)] - alone)[late] ** 2))),
        "covered by 90 %": float(inside[scored].mean()),
    }


def losses(name: str, share: float, seed: int) -> dict[str, float]:
    """The same for classes."""
    rng = np.random.default_rng(seed)
    X, y = STREAMS[name](rng)
    labels = (y > np.median(y)).astype(np.int32)
    bad = rng.random(X.shape) < share
    whole = ~bad.any(1)

    def log_loss(X: np.ndarray, labels: np.ndarray) -> np.ndarray:
        engine = Engine(opvi.classifier(X.shape[1], 2), seed)
        fed = engine.feed((X.astype(np.float32), labels), last=True)
        return -np.asarray(fed.info.predicted.log_density).ravel()[: len(labels)]  # type: ignore[union-attr]

    late = np.arange(ROWS) >= BEGIN
    return {
        "log loss": float(log_loss(np.where(bad, NONE, X), labels)[whole & late].mean()),
        "whole rows only": float(log_loss(X[whole], labels[whole])[late[whole]].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    results, classes = (
        {
            name: {f"{share:.0%}": summary([of(name, share, seed) for seed in SEEDS]) for share in SHARES}
            for name in STREAMS
        }
        for of in (errors, losses)
    )
    command = "python -m benchmarks.columns"
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "columns.json"
    report = {"command": command, "machine": machine(command), "streams": results, "classes": classes}
    file.write_text(json.dumps(report, indent=1) + "\n")
    print(file.read_text())


if __name__ == "__main__":
    main()
