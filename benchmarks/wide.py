"""`opvi learn` on a wide CSV, on one core: seconds, peak memory and first figures. `python -m benchmarks.wide`.

The command runs twice, each time in a process of its own: with an empty folder of compiled programs, and again with a
full one. Then the cost of a row and the memory of a model, with 20 and with 200 columns, as in `make bench`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import width
from benchmarks.machine import machine

COLUMNS, ROWS, SEED = 200, 12_000, 31
LIMITS = {"seconds": 60.0, "peak MB": 1000.0}
FIGURES = "learning ("  # how a line of figures begins


def write(path: Path, columns: int, rows: int) -> None:
    """Friedman's function of the first five columns."""
    rng = np.random.default_rng(SEED)
    X = rng.uniform(size=(rows, columns))
    y = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    table = np.column_stack([X, y + rng.normal(size=rows)])
    names = [*(f"x{j}" for j in range(columns)), "y"]
    np.savetxt(path, table, "%.7g", ",", header=",".join(names), comments="")


def learnt(table: Path, run: Path, core: int, programs: Path) -> dict[str, Any]:
    """Learn the table by the command, and return what that took."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "opvi.app.cli", "learn", str(table), "--target", "y"]
    where = {**os.environ, "OPVI_PROGRAMS": str(programs)}
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    began = time.perf_counter()
    process = subprocess.Popen([*command, "--run", str(run)], **pipes, text=True, env=where)
    assert process.stderr is not None
    first, said = None, []
    for line in process.stderr:
        said.append(line)
        if first is None and line.startswith(FIGURES):
            first = {"after": time.perf_counter() - began, "line": line.strip()}
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    if status:
        raise RuntimeError("".join(said))
    metrics = json.loads((run / "metrics.json").read_text())
    return {
        "seconds": seconds,
        "processor seconds": used.ru_utime + used.ru_stime,
        "peak MB": used.ru_maxrss * 1024 / 1e6,
        "first figures": first,
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, int | float)},
    }


def csv() -> dict[str, Any]:
    """The command on the table, compiling and then with compiled programs."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "wide.csv", COLUMNS, ROWS)
        for when in ("empty", "again"):
            core = min(os.sched_getaffinity(0))
            found[when] = learnt(folder / "wide.csv", folder / when, core, folder / "programs")
    return {"columns": COLUMNS, "rows": ROWS, "limits": LIMITS, "programs": found}


def model() -> dict[str, Any]:
    """The cost of a row and the memory of a model, by its columns."""
    return {str(columns): width.alone(columns, min(os.sched_getaffinity(0))) for columns in width.LIMITS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wide", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for wide.json")
    parser.add_argument("--only", choices=("csv", "model"), help="measure one part; the other stays as it is")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "wide.json"
    report = json.loads(path.read_text()) if options.only and path.exists() else {}
    for name, part in (("csv", csv), ("model", model)):
        if options.only in (None, name):
            report[name] = {"machine": machine("python -m benchmarks.wide"), **part()}
            print(name, json.dumps(report[name]), flush=True)
            path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
