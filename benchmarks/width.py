"""Error, cost and memory of the default regressor by the number of columns: `python -m benchmarks.width`.

Friedman's function of five columns among noise columns, still and drifting, beside gradient boosting that is fitted
again every 1,000 rows. Errors are of predictions made before learning, over the second half of the stream. The seeds
were not used for choosing settings.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.measure import Result
from opvi.running import Engine

WIDTHS = (5, 10, 20, 50, 100, 200, 500)
SEEDS = (11, 12, 13)
ROWS, REFIT = 6000, 1000
TIMED = 1000  # rows, of the first and of later ones
LIMITS, LIMIT_MB = {20: 1.0, 200: 3.33}, 512.0  # processor milliseconds per row by columns; above the imports


def drawn(columns: int, seed: int, drifting: bool) -> tuple[np.ndarray, np.ndarray]:
    """Friedman's first function; if it drifts, the sizes of its four terms swing."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(ROWS, columns))
    terms = np.stack([10 * np.sin(np.pi * X[:, 0] * X[:, 1]), 20 * (X[:, 2] - 0.5) ** 2, 10 * X[:, 3], 5 * X[:, 4]])
    time_ = np.arange(ROWS) / 4000
    swing = np.stack([np.cos(2 * np.pi * (time_ + k / 4)) for k in range(4)]) if drifting else np.ones_like(terms)
    return X.astype(np.float32), ((terms * swing).sum(0) + rng.normal(size=ROWS)).astype(np.float32)


def ours(columns: int, seed: int, drifting: bool) -> dict[str, float]:
    """One pass of the default regressor."""
    X, y = drawn(columns, seed, drifting)
    made = opvi.regressor(columns)
    _, history = opvi.run(made, opvi.stream((X, y), 20), seed)
    half = len(history.info.squared_error) // 2
    return {
        "rmse": float(np.sqrt(history.info.squared_error[half:].mean())),
        "log density": float(history.info.log_predictive[half:].mean()),
    }


def boosting(columns: int, seed: int, drifting: bool) -> dict[str, float]:
    """Gradient boosting on all rows so far, or where they drift on the last 1,000, whichever did better before."""
    from sklearn.ensemble import HistGradientBoostingRegressor as Boosting

    X, y = drawn(columns, seed, drifting)
    errors: dict[str, list[np.ndarray]] = {"all": [], "last": []}
    for start in range(REFIT, ROWS, REFIT):
        new = slice(start, start + REFIT)
        for name, rows in (("all", slice(start)), ("last", slice(start - REFIT, start))):
            model = Boosting(random_state=0).fit(X[rows], y[rows])
            errors[name].append((model.predict(X[new]) - y[new]) ** 2)
    later = {name: np.concatenate(found)[ROWS // 2 - REFIT :].mean() for name, found in errors.items()}
    return {"rmse": float(np.sqrt(min(later.values())))}


def cost(columns: int) -> dict[str, float]:
    """Processor milliseconds per row of the first 1,000 rows and of later ones, and memory above the imports.

    They are those of the engine behind the estimators, River and `opvi learn`; the memory includes compiling, and
    predicting as many rows. `opvi.run` compiles otherwise, with more memory.
    """
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    X, y = drawn(columns, 1, False)
    made, spent = opvi.regressor(columns), []
    Engine(made, 0).feed((X[:TIMED], y[:TIMED]))  # compiles
    engine = Engine(made, 0)
    for part in (slice(TIMED), slice(TIMED, 2 * TIMED)):
        began = time.process_time()
        engine.feed((X[part], y[part]))
        jax.block_until_ready(engine.state)
        spent.append((time.process_time() - began) / TIMED * 1e3)
    made.predict(engine.state, X[: 2 * TIMED]).mean().block_until_ready()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"first, ms per row": spent[0], "later, ms per row": spent[1], "MB above the imports": peak - imported}


def results() -> Iterator[Result]:
    """Rates and memory at 20 and 200 columns on one core, for `make bench`."""
    for columns, limit in LIMITS.items():
        found, size = alone(columns, min(os.sched_getaffinity(0))), f"{columns} columns, one core"
        yield Result("default regressor, a row", size, found["later, ms per row"], "ms", limit, extra=found)
        yield Result("default regressor, memory", size, found["MB above the imports"], "MB", LIMIT_MB, extra=found)


def summary(found: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return mean and standard deviation over the seeds."""
    values = {key: [one[key] for one in found] for key in found[0]}
    return {key: {"mean": float(np.mean(seeds)), "sd": float(np.std(seeds))} for key, seeds in values.items()}


def measured(columns: int, drifting: bool, seed: int) -> dict[str, dict[str, float]]:
    """One stream: ours, and boosting."""
    return {"opvi": ours(columns, seed, drifting), "boosting": boosting(columns, seed, drifting)}


def alone(columns: int, core: int) -> dict[str, float]:
    """The cost of a width, in a process and on a core of its own."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.width", "--cost", str(columns)]
    where = {**os.environ, "OPVI_PROGRAMS": "off"}  # it compiles, and that takes memory
    root = Path(__file__).parent.parent
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root, env=where)
    return json.loads(done.stdout.splitlines()[-1])


def draw(report: dict[str, Any], path: Path) -> None:
    """Error and cost by width."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    widths = [int(width) for width in report["widths"]]
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for ax, name in zip(axes, ("still", "drifting"), strict=False):
        for who in ("opvi", "boosting"):
            errors = [report["widths"][str(width)][name][who]["rmse"] for width in widths]
            ax.errorbar(widths, [e["mean"] for e in errors], [e["sd"] for e in errors], marker="o", label=who)
        ax.axhline(1, color="grey", lw=0.8, ls=":")
        ax.set(xscale="log", xlabel="columns", title=f"RMSE, {name}")
        ax.legend(frameon=False)
    for key in ("first, ms per row", "later, ms per row"):
        axes[2].plot(widths, [report["widths"][str(w)]["cost"][key] for w in widths], marker="o", label=key)
    axes[2].set(xscale="log", yscale="log", xlabel="columns", title="processor time")
    axes[2].legend(frameon=False)
    figure.savefig(path, dpi=110)


def errors(widths: Sequence[int], jobs: int) -> dict[int, dict[str, Any]]:
    """Errors on still and on drifting streams."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting = {
            (columns, drifting): [pool.submit(measured, columns, drifting, seed) for seed in SEEDS]
            for columns in reversed(widths)  # the longest first
            for drifting in (False, True)
        }
        found: dict[int, dict[str, Any]] = {columns: {} for columns in widths}
        for columns in widths:
            for name, drifting in (("still", False), ("drifting", True)):
                seeds = [one.result() for one in waiting[columns, drifting]]
                found[columns][name] = {who: summary([seed[who] for seed in seeds]) for who in ("opvi", "boosting")}
            print(columns, json.dumps(found[columns]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.width", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for width.json and width.png")
    parser.add_argument("--jobs", type=int, default=1, help="streams measured at once")
    parser.add_argument("--part", choices=("errors", "costs"), help="measure one part; the file keeps the other")
    parser.add_argument("--columns", type=int, nargs="+", choices=WIDTHS, help="measure these; the file keeps others")
    parser.add_argument("--cost", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        print(json.dumps(cost(options.cost)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "width.json"
    some = path.exists() and (options.part or options.columns)
    report = json.loads(path.read_text()) if some else {"machine": {}, "widths": {}}
    parts = [options.part] if options.part else ["errors", "costs"]
    measures, widths = options.columns or WIDTHS, report["widths"]
    if "errors" in parts:
        for columns, found in errors(measures, options.jobs).items():
            widths.setdefault(str(columns), {}).update(found, chosen=opvi.regressor(columns).about)
    if "costs" in parts:  # after the errors: they are measured on an idle machine
        core = min(os.sched_getaffinity(0))
        for columns in measures:
            widths[str(columns)]["cost"] = alone(columns, core)
            print(columns, json.dumps(widths[str(columns)]["cost"]), flush=True)
    report["machine"].update({part: machine("python -m benchmarks.width") for part in parts})
    path.write_text(json.dumps(report, indent=1) + "\n")
    draw(report, options.out / "width.png")


if __name__ == "__main__":
    main()
