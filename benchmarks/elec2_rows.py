"""The electricity market row by row, through River's interface: `python -m benchmarks.elec2_rows --out docs/results`.

Every row is predicted before it is learnt. What learns between batches was chosen on other streams and on the first
8,000 rows of this one.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import machine
from benchmarks.stamp import stamp
from opvi.adapters.river import Classifier
from paper import data

TRACKING = ("_classifier", "_class_memory", "_class_mixture")
SOURCES = tuple(f"src/opvi/tracking/{name}.py" for name in TRACKING)
MODELS: dict[str, dict[str, Any]] = {"networks": {}, "linear": {"hidden": ()}}
EVERY = 5000  # rows between two lines on the screen
SMALLEST = 1e-15  # probability, as River's log loss counts


def score(rows: int, seed: int, **settings: Any) -> dict[str, float]:
    """Return the prequential accuracy and log loss over the first rows, and the processor seconds."""
    X, y = data.elec2()
    names = [f"x{column}" for column in range(X.shape[1])]
    model, right, loss, begun = Classifier(buffer=1, seed=seed, **settings), 0, 0.0, time.process_time()
    rows = min(rows, len(y))
    for at in range(rows):
        x, label = dict(zip(names, X[at].tolist(), strict=True)), int(y[at])
        said = model.predict_proba_one(x)
        right += bool(said) and max(said, key=lambda name: said[name]) == label
        loss -= math.log(max(said.get(label, 0.0), SMALLEST)) if said else math.log(0.5)
        model.learn_one(x, label)
        if (at + 1) % EVERY == 0:
            print(at + 1, round(right / (at + 1), 4), f"{time.process_time() - begun:.0f} s", flush=True)
    return {"accuracy": right / rows, "log loss": loss / rows, "seconds": time.process_time() - begun}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.elec2_rows", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for elec2-rows.json")
    parser.add_argument("--rows", type=int, default=45_312, help="the first rows, in order")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", choices=sorted(MODELS), help="models; repeat")
    options = parser.parse_args()
    results = {}
    for name in options.only or MODELS:
        results[name] = score(options.rows, options.seed, **MODELS[name])
        print(name, results[name], flush=True)
    about = machine("python -m benchmarks.elec2_rows")
    report = {"command": about["command"], "machine": about, "sources": stamp(*SOURCES)}
    report |= {"rows": options.rows, "seed": options.seed}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "elec2-rows.json"
    path.write_text(json.dumps({**report, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
