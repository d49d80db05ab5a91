"""A million models of 1 KB in a file: created, taught, killed and resumed; and what a save costs."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import opvi
from benchmarks.machine import machine

FEATURES, PARTICLES, ROWS, SEED = 11, 10, 10, 0


def fleet(path: Path, hot: int) -> opvi.Fleet:
    sampler = opvi.opvi(opvi.linear_regression(FEATURES), step=0.01)
    return opvi.Fleet(sampler, SEED, path=path, batch_size=ROWS, particles=PARTICLES, hot=hot)


def arrivals(ids: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Ten rows of each model, the rows of all in random order; the same for the same models."""
    rng = np.random.default_rng([SEED, int(ids[0])])
    X = rng.standard_normal((len(ids) * ROWS, FEATURES)).astype(np.float32)
    y = X.sum(1) + rng.standard_normal(len(X)).astype(np.float32)
    return rng.permutation(ids.repeat(ROWS)), (X, y)


def peak(process: int | str) -> int:
    """The most memory that a process has had; `getrusage` would count that of its parent as well."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def learn(path: Path, models: int, chunk: int, hot: int) -> dict[str, Any]:
    """Make and teach the models that the file does not have yet, with a save for each chunk of them."""
    began, used = time.perf_counter(), time.process_time()
    with fleet(path, hot) as made:
        first = made.cursor or 0
        print(f"from {first}", flush=True)
        for begin in range(first, models, chunk):
            made.learn(*arrivals(np.arange(begin, min(models, begin + chunk))))
            made.save(cursor=min(models, begin + chunk))
        size, count = made._keyed.dtype.itemsize, len(made)
        rows = sum(int(made.state(int(name)).rows) for name in np.linspace(0, models - 1, 1000).astype(int))
    return {
        "from": first,
        "models": count,
        "record_bytes": size,
        "rows_of_1000_models": rows,
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - used,
        "peak_bytes": peak("self"),
        "file_bytes": path.stat().st_size,
    }


def killed_and_resumed(path: Path, models: int, chunk: int, hot: int) -> dict[str, Any]:
    """Run a process that is killed half-way, and one that finishes its work."""
    command = [sys.executable, "-m", "benchmarks.keyed", "--child", str(path)]
    command += [f"--models={models}", f"--chunk={chunk}", f"--hot={hot}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        while not path.exists() or (path.stat().st_size < models * 500 and child.poll() is None):
            time.sleep(0.1)
        before = peak(child.pid)
        child.kill()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return {**result, "killed_peak_bytes": before}


def saves(path: Path, models: int) -> dict[str, Any]:
    """Return the seconds of a save after all models changed, and after a hundredth of them did."""
    everyone, few = np.arange(models), np.random.default_rng(1).permutation(models)[: models // 100]
    costs: dict[str, list[tuple[float, float]]] = {"all": [], "1 %": []}
    with fleet(path, models) as made:
        for what, ids in 4 * [("all", everyone), ("1 %", few)]:
            made.learn(*arrivals(ids))
            began, used = time.perf_counter(), time.process_time()
            made.save()
            costs[what].append((time.perf_counter() - began, time.process_time() - used))
    wall, processor = (np.median([costs[what][1:] for what in costs], 1)[:, i] for i in (0, 1))
    return {
        "models": models,
        "all, seconds": float(wall[0]),
        "1 %, seconds": float(wall[1]),
        "share": float(wall[1] / wall[0]),
        "share of processor time": float(processor[1] / processor[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keyed", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for keyed.json")
    parser.add_argument("--models", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=20_000)
    parser.add_argument("--hot", type=int, default=50_000)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(learn(given.child, given.models, given.chunk, given.hot)))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine("python -m benchmarks.keyed")}
    with tempfile.TemporaryDirectory() as folder:
        result["saves"] = saves(Path(folder) / "small", given.models // 10)
        print(result["saves"], flush=True)
        result["million"] = killed_and_resumed(Path(folder) / "large", given.models, given.chunk, given.hot)
        print(result["million"], flush=True)
    (given.out / "keyed.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
