"""Bulk rates of fleets beside those of another checkout, in turn: `python -m benchmarks.fleet_base --base FOLDER`."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

PROGRAM = """
import json, time
import numpy as np
import opvi
from threadpoolctl import threadpool_limits
threadpool_limits(limits=1)
line, rng, out = opvi.linear_regression(9), np.random.default_rng(0), {}
samplers = {"OPVI": (opvi.opvi(line, step=0.01), 20), "linear_ekf, 2 classes": (opvi.linear_ekf(9, 2), None)}
for name, (sampler, particles) in samplers.items():
    for size in (1, 20):
        fleet = opvi.Fleet(sampler, 0, particles=particles, batch_size=size)
        X = rng.standard_normal((5000 * size, 9)).astype(np.float32)
        y = X.sum(1) if particles else (X.sum(1) > 0).astype(np.int32)
        ids = rng.permutation(np.arange(5000).repeat(size))
        fleet.learn(ids, (X, y))
        times = []
        for _ in range(6):
            used = time.process_time()
            fleet.learn(ids, (X, y))
            times.append(time.process_time() - used)
        out[f"{name}, batch {size}"] = 1e6 * min(times) / len(ids)
print(json.dumps(out))
"""


def measured(folder: Path) -> dict[str, float]:
    """Return microseconds of processor time per row, by sampler and batch size."""
    given = {**os.environ, "PYTHONPATH": f"{folder}/src"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=given, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_base", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for fleet-base.json")
    parser.add_argument("--base", type=Path, required=True, help="a checkout of another commit")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    here, base = Path(__file__).parents[1], given.base.resolve()
    rounds = [(measured(base), measured(here)) for _ in range(2)]
    best = [{name: min(trial[i][name] for trial in rounds) for name in rounds[0][i]} for i in (0, 1)]
    result: dict[str, Any] = {"base": best[0], "here": best[1]}
    result["ratio"] = {name: best[1][name] / best[0][name] for name in best[0]}
    about = machine("python -m benchmarks.fleet_base")
    about["command"] = "python -m benchmarks.fleet_base --base FOLDER --out docs/results"
    commit = subprocess.run(
        ["git", "-C", str(base), "rev-parse", "HEAD"], stdout=subprocess.PIPE, text=True, check=True
    )
    result = {"machine": about, "base commit": commit.stdout.strip(), "unit": "µs of processor time a row", **result}
    (given.out / "fleet-base.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result["ratio"]))


if __name__ == "__main__":
    main()
