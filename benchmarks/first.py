"""What a new process waits for: imports, compilation, first answers. `python -m benchmarks.first --out bench-output`.

Every case runs in a process of its own, with an empty folder of compiled programs and then with a full one. Processor
seconds, and the programs compiled. A stream of River's is learnt twice in each process: "opvi" includes compiling or
loading the programs, "opvi, warm" is a new model that finds them loaded. River's forest learns the same rows after
them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.measure import Result

LIMITS, LIMIT_MB = {"empty": 4.0, "again": 1.5}, 600.0  # processor seconds; of the whole process
STREAMS = ("ChickWeights", "Phishing", "ImageSegments")


class Watch:
    """Processor seconds and programs, step by step."""

    def __init__(self) -> None:
        self.steps: dict[str, Any] = {}
        self.programs: list[tuple[str, float]] = []

    def listen(self) -> None:
        """Count the programs that JAX compiles, or finds compiled, from now on."""
        import jax.monitoring  # its import is one of the things measured

        def hear(name: str, seconds: float, **about: Any) -> None:
            if name.endswith("backend_compile_duration"):
                self.programs.append((str(about.get("fun_name", "?")), round(seconds, 3)))

        jax.monitoring.register_event_duration_secs_listener(hear)

    def __call__(self, name: str, work: Any) -> Any:
        before, began = len(self.programs), time.process_time()
        out = work()
        self.steps[name] = {"seconds": round(time.process_time() - began, 3), "programs": self.programs[before:]}
        return out


def estimator(task: str, watch: Watch) -> None:
    """The first calls of a scikit-learn estimator."""
    watch("import opvi", lambda: __import__("opvi"))
    watch("import jax", lambda: __import__("jax.numpy"))
    watch("import scikit-learn", lambda: __import__("opvi.adapters.sklearn"))
    watch.listen()
    import opvi

    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 8))
    y = np.sin(X[:, 0]) + X[:, 1]
    model = opvi.OPVIRegressor() if task == "regressor" else opvi.OPVIClassifier()
    y = y if task == "regressor" else y > 0
    watch("partial_fit(20)", lambda: model.partial_fit(X[:20], y[:20]))
    watch("predict(20)", lambda: model.predict(X[:20]))
    watch("partial_fit(5)", lambda: model.partial_fit(X[20:25], y[20:25]))
    watch("predict(2000)", lambda: model.predict(X[:2000]))
    watch("partial_fit(333)", lambda: model.partial_fit(X[25:358], y[25:358]))
    watch("partial_fit(1)", lambda: model.partial_fit(X[358:359], y[358:359]))
    watch("rows up to 1,000", lambda: model.partial_fit(X[359:1000], y[359:1000]))
    watch("1,000 rows more", lambda: model.partial_fit(X[1000:2000], y[1000:2000]))
    watch("predict(20) again", lambda: model.predict(X[:20]))
    watch("another question", lambda: (model.predict_interval if task == "regressor" else model.decompose)(X[:20]))
    watch("a third", lambda: model.log_predictive_density(X[:20], y[:20]))


def river(name: str, buffer: int, watch: Watch) -> None:
    """A stream of River's, row by row, beside its forest."""
    from river import datasets, forest, metrics, preprocessing
    from river.evaluate import progressive_val_score

    watch.listen()

    def ours() -> Any:
        from opvi.adapters import river as adapters

        regression = name == "ChickWeights"
        made = adapters.Regressor(buffer=buffer, seed=0) if regression else adapters.Classifier(buffer=buffer, seed=0)
        measure = metrics.MAE() if regression else metrics.Accuracy()
        return progressive_val_score(getattr(datasets, name)(), made, measure).get()

    def theirs() -> Any:
        regression = name == "ChickWeights"
        made = forest.ARFRegressor(seed=0) if regression else forest.ARFClassifier(seed=0)
        measure = metrics.MAE() if regression else metrics.Accuracy()
        return progressive_val_score(getattr(datasets, name)(), preprocessing.StandardScaler() | made, measure).get()

    watch.steps["score"] = watch("opvi", ours)
    assert watch("opvi, warm", ours) == watch.steps["score"]  # a new model, the same programs
    watch.steps["forest's score"] = watch("forest", theirs)


CASES: dict[str, Any] = {
    "regressor": lambda watch: estimator("regressor", watch),
    "classifier": lambda watch: estimator("classifier", watch),
    **{
        f"{name}, buffer={buffer}": (lambda watch, name=name, buffer=buffer: river(name, buffer, watch))
        for name in STREAMS
        for buffer in (20, 1)
    },
}


def case(name: str) -> None:
    """One case, in this process; its steps as JSON on the last line."""
    import resource

    watch, began = Watch(), time.process_time()
    CASES[name](watch)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    whole = time.process_time() - began
    told = {"steps": watch.steps, "process": round(whole, 2), "peak MB": round(peak), "programs": len(watch.programs)}
    print(json.dumps(told))


def measured(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a case in two processes in turn: the first finds no compiled programs, the second finds its programs."""
    with tempfile.TemporaryDirectory() as folder:
        for turn in ("empty", "again"):
            environment = {**os.environ, "OPVI_PROGRAMS": folder, "OPENBLAS_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "benchmarks.first", "--case", name]
            said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            yield turn, json.loads(said.splitlines()[-1])


def results() -> Iterator[Result]:
    """First answers of the estimators, for `make bench`."""
    for name in ("regressor", "classifier"):
        for turn, found in measured(name):
            spent = {step: one["seconds"] for step, one in found["steps"].items() if isinstance(one, dict)}
            size = {"empty": "nothing compiled yet", "again": "second process"}[turn]
            first = spent["partial_fit(20)"] + spent["predict(20)"]
            yield Result(f"first answer of the {name}", size, first, "s", LIMITS[turn], extra=found)
            if turn == "again":
                yield Result(f"the {name}'s process, peak memory", size, found["peak MB"], "MB", LIMIT_MB)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for first.json")
    parser.add_argument("--only", action="append", metavar="WORD", help="cases whose name holds a word")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case(options.case)
        return
    report: dict[str, Any] = {"machine": machine("python -m benchmarks.first")}
    for name in CASES:
        if options.only and not any(word in name for word in options.only):
            continue
        for turn, found in measured(name):
            report.setdefault(name, {})[turn] = found
            short = {step: one["seconds"] for step, one in found["steps"].items() if isinstance(one, dict)}
            print(name, turn, short, f"{found['programs']} programs, {found['peak MB']} MB", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "first.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
