"""What a row costs a tracker, now and in an older commit: `python -m benchmarks.step_cost --before COMMIT`.

The older sources come from git; both are measured in turn, in processes of their own, by processor time after
compiling.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm

import opvi
from benchmarks.machine import machine
from benchmarks.stamp import stamp

BEFORE = "d18cd35"  # the last commit before draws, weights of modes and the diagnosis
SOURCES = "src/opvi/filters", "benchmarks/step_cost.py"
ROWS = 2000
ROOT = Path(__file__).resolve().parent.parent
HERE = "src"


def cases() -> dict[str, tuple[Any, Any, int]]:
    """Return trackers with rows and the size of their batches; both commits know what these call."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 3)).astype(np.float32)
    y = (rng.uniform(size=ROWS) < 1 / (1 + np.exp(-x @ np.array([1.0, -0.5, 0.0])))).astype(np.float32)
    logistic = opvi.target(
        lambda v: norm.logpdf(v).sum(),
        lambda v, rows: -jnp.logaddexp(0.0, jnp.where(rows[1] > 0.5, -1.0, 1.0) * (rows[0] @ v)),
        lambda key: jax.random.normal(key, (3,)),
    )
    middle = np.where(rng.uniform(size=ROWS) < 0.5, 0.0, 1.0)
    values = (middle + np.sqrt(2) * rng.normal(size=ROWS)).astype(np.float32)
    mixture = opvi.gaussian_mixture(2.0)
    return {
        "logistic, batches of 20": (opvi.tracker(logistic, example=(x[:1], y[:1])), (x, y), 20),
        "logistic, batches of 1": (opvi.tracker(logistic, example=(x[:1], y[:1])), (x[:500], y[:500]), 1),
        "mixture, batches of 20": (opvi.tracker(mixture, example=values[:1]), values, 20),
        "mixture, half-life 500": (opvi.tracker(mixture, example=values[:1], half_life=500.0), values, 20),
    }


def measured() -> dict[str, float]:
    """Return milliseconds of processor time per row of every case, after compiling."""
    found = {}
    for name, (tracker, rows, batch) in cases().items():
        for _ in range(2):  # the first run compiles
            begun = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                state, _history = opvi.run(tracker, opvi.stream(rows, batch), 0)
            jax.block_until_ready(state)
            spent = time.process_time() - begun
        found[name] = 1000 * spent / len(jax.tree.leaves(rows)[0])
    return found


def elsewhere(source: Path) -> dict[str, float]:
    """Return what a process finds that imports opvi from a folder."""
    paths = os.pathsep.join([str(source), str(ROOT)])
    alone = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.step_cost", "--measure"],
        env={**os.environ, **alone, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = json.loads(child.stdout.splitlines()[-1])
    if Path(said["source"]).parent.parent != source:
        raise RuntimeError(f"opvi was imported from {said['source']}, but {source} was to be measured.")
    return said["found"]


def main() -> None:
    """Measure both commits, or one in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for step-cost.json")
    parser.add_argument("--before", default=BEFORE, help="the commit to compare with")
    parser.add_argument("--times", type=int, default=3, help="processes for each of the two")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps({"source": opvi.__file__, "found": measured()}))
        return
    archive = subprocess.run(["git", "-C", ROOT, "archive", options.before, HERE], stdout=subprocess.PIPE, check=True)
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as sources:
            sources.extractall(folder, filter="data")
        pairs = [(elsewhere(Path(folder) / HERE), elsewhere(ROOT / HERE)) for _ in range(options.times)]
    results = {}
    for name in pairs[0][0]:
        before, now = (statistics.median(pair[i][name] for pair in pairs) for i in (0, 1))
        results[name] = {"ms per row before": before, "ms per row": now, "ratio": now / before}
        print(f"{name:26s} {before:8.3f} {now:8.3f} ms per row, {now / before:.2f} times", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.step_cost --before {options.before} --times {options.times}"
    about = {"command": command, "before": options.before, "sources": stamp(*SOURCES)}
    made = {**about, "machine": machine("python -m benchmarks.step_cost"), "results": results}
    (options.out / "step-cost.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
