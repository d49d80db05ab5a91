"""What a Gaussian process beside the networks changes while rows are few: `python -m benchmarks.process`.

The default regressor with and without it, on made tables, in batches of 20 that are predicted before they are learnt.
Settings were chosen on the same tables under seeds 1 and 2.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np

import opvi
from benchmarks.additions import TABLES
from benchmarks.machine import machine
from benchmarks.stamp import stamp
from opvi.adapters.sklearn._frames import encoded, understood
from opvi.tracking import _process as processes

NAMES = ("made: friedman", "made: arm", "made: strength", "made: dense", "energy")
SEEDS = (21, 22, 23)
ROWS, BATCH = 2000, 20
WINDOWS = ((20, 100), (100, 200), (200, 500), (500, 1000), (1000, 2000))
SOURCES = "benchmarks/process.py", "benchmarks/additions.py", "src/opvi/tracking", "src/opvi/filters"


def _said(state: Any, info: Any, batch: Any) -> dict[str, jax.Array]:
    share = jax.numpy.zeros(()) if state.process is None else processes.share(state.process)
    return {"mean": info.predicted.mean, "log density": info.predicted.log_density, "share": share}


def measured(name: str, process: bool, seed: int) -> list[dict[str, float]]:
    """Errors, log density and the process's share, window by window."""
    frame, y = TABLES[name](np.random.default_rng(seed))
    frame, y = frame[:ROWS], y[:ROWS].astype(np.float32)
    X = encoded(frame, understood(frame))
    made = opvi.regressor(X.shape[1], process=process)
    _, history = opvi.run(made, opvi.stream((X, y), BATCH), seed, record=_said)
    said = {key: np.asarray(leaf, float) for key, leaf in history.record.items()}
    mean, density = said["mean"].ravel(), said["log density"].ravel()
    return [
        {
            "rmse": float(np.sqrt(np.mean((y[a:b] - mean[a:b]) ** 2))),
            "log density": float(density[a:b].mean()),
            "share": float(said["share"][a // BATCH : b // BATCH].mean()),
        }
        for a, b in WINDOWS
        if b <= len(mean)
    ]


def compared(without: list[list[dict[str, float]]], beside: list[list[dict[str, float]]]) -> dict[str, Any]:
    """Means over the seeds, window by window: the ratio of the errors, and the difference in log density."""
    found = {}
    for at, window in enumerate(WINDOWS[: len(without[0])]):
        pairs = [(a[at], b[at]) for a, b in zip(without, beside, strict=True)]
        found["{} to {}".format(*window)] = {
            "rmse without": float(np.mean([a["rmse"] for a, _ in pairs])),
            "rmse": float(np.mean([b["rmse"] for _, b in pairs])),
            "ratio": float(np.mean([b["rmse"] / a["rmse"] for a, b in pairs])),
            "ratio, sd": float(np.std([b["rmse"] / a["rmse"] for a, b in pairs], ddof=1)),
            "gain in log density": float(np.mean([b["log density"] - a["log density"] for a, b in pairs])),
            "share": float(np.mean([b["share"] for _, b in pairs])),
        }
    return found


def main() -> None:
    """Measure, and write `process.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder for process.json")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        waiting = {
            name: [[pool.submit(measured, name, process, seed) for seed in SEEDS] for process in (False, True)]
            for name in NAMES
        }
        tables = {name: compared(*([job.result() for job in jobs] for jobs in both)) for name, both in waiting.items()}
    command = "python -m benchmarks.process"
    rows = [
        [name.removeprefix("made: "), window, *(f"{one[key]:.2f}" for key in ("ratio", "gain in log density", "share"))]
        for name, table in tables.items()
        for window, one in table.items()
    ]
    report = {
        "command": command,
        "machine": machine(command),
        "sources": stamp(*SOURCES),
        "seeds": list(SEEDS),
        "tables": [{"header": ["data", "rows", "RMSE, ratio", "log density, gain", "share"], "rows": rows}],
        "results": tables,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "process.json").write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(*row, sep=" | ")


if __name__ == "__main__":
    main()
