"""What the estimators cost: rows one at a time beside River's own models, and calls beside the bare compiled step."""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from river import forest, linear_model, preprocessing
from threadpoolctl import threadpool_limits

import opvi
from benchmarks.machine import machine
from benchmarks.measure import Result, Timing, interleave
from opvi.adapters import river
from paper import data

BATCH, SEED = 20, 0
ARF_ROWS = 5000  # the forest slows down as its trees grow; more rows would flatter us
KEY = jax.random.key(SEED)


def elec2() -> tuple[list[dict[str, float]], list[int]]:
    X, y = data.elec2()
    names = [f"x{i}" for i in range(X.shape[1])]
    return [dict(zip(names, map(float, row), strict=True)) for row in X], [int(label) for label in y]


def stream(model: Any, rows: list[dict[str, float]], labels: list[int]) -> tuple[float, float]:
    """Microseconds per row, predicted then learnt; and the share of rows predicted right."""
    right, start = 0, time.perf_counter()
    for x, y in zip(rows, labels, strict=True):
        p = model.predict_proba_one(x)
        right += bool(p) and max(p, key=p.get) == y
        model.learn_one(x, y)
    return 1e6 * (time.perf_counter() - start) / len(rows), right / len(rows)


def one_row_at_a_time() -> Iterator[Result]:
    """elec2, 45,312 rows, after a short stream that compiles."""
    rows, labels = elec2()
    models: dict[str, tuple[Callable[[], Any], int, float | None]] = {
        "River classifier, linear": (lambda: river.Classifier(hidden=(), seed=SEED), len(rows), 1e6 / 5000),
        "River classifier, linear, buffer=1": (
            lambda: river.Classifier(hidden=(), buffer=1, seed=SEED),
            len(rows),
            None,
        ),
        "River classifier, default": (lambda: river.Classifier(seed=SEED), len(rows), 1e6 / 1500),
        "River's adaptive random forest": (lambda: forest.ARFClassifier(seed=SEED), ARF_ROWS, None),
        "River's logistic regression": (
            lambda: preprocessing.StandardScaler() | linear_model.LogisticRegression(),
            len(rows),
            None,
        ),
    }
    for name, (make, count, target) in models.items():
        stream(make(), rows[:100], labels[:100])
        cost, right = stream(make(), rows[:count], labels[:count])
        extra = {"rows_a_second": 1e6 / cost, "accuracy": right}
        yield Result(name, f"elec2, {count:,} rows", cost, "µs per row", target, {}, extra)


def overhead(what: str, calls: dict[str, Callable[[], Any]], control: Callable[[], Any] | None = None) -> Result:
    """Microseconds by which the first call's median exceeds the second's.

    If a control is given, a second bare step timed in the same turns, its distance from the first shows the noise of a
    difference: an overhead smaller than that is not resolved.
    """
    timings = interleave({**calls, **({"control": control} if control else {})}, seconds=8.0, at_least=50, at_most=2000)
    ours, bare, *rest = (1e3 * timing.median for timing in timings.values())
    extra = {"µs": ours, "bare µs": bare, **({"control - bare µs": rest[0] - bare} if rest else {})}
    return Result(what, f"{BATCH} rows", ours - bare, "µs", 150.0, timings, extra)


class Bare:
    """The tracker's compiled step, continuing from a state as an estimator does."""

    def __init__(self, tracker: Any, state: Any, batch: opvi.Batch):
        self.tracker, self.state, self.batch = tracker, state, batch

    def __call__(self) -> Any:
        self.state, _ = self.tracker.step(KEY, self.state, self.batch)
        return self.state


def over_the_step() -> Iterator[Result]:
    """`partial_fit` of 20 rows, and `predict` of one, beside the tracker's own compiled functions."""
    rng = np.random.default_rng(SEED)
    X = rng.standard_normal((BATCH, 8))
    X32, one = X.astype(np.float32), np.ones(BATCH, np.float32)
    for name, hidden in (("linear", ()), ("network", (50,))):
        for kind, make in (("regressor", opvi.OPVIRegressor), ("classifier", opvi.OPVIClassifier)):
            model = make(hidden=hidden, random_state=SEED)
            y = X.sum(1) if kind == "regressor" else (X.sum(1) > 0).astype(int)
            model.partial_fit(X, y, **({} if kind == "regressor" else {"classes": [0, 1]}))
            target = y.astype(np.float32 if kind == "regressor" else np.int32)
            batch = opvi.Batch((X32, target), one)
            bare, again = (Bare(model.tracker_, model.state_, batch) for _ in range(2))

            def learn(model: Any = model, y: Any = y) -> Any:
                return model.partial_fit(X, y).state_

            yield overhead(f"{kind}.partial_fit, {name}", {"estimator": learn, "bare step": bare}, again)
            program = jax.jit(lambda state, x, tracker=model.tracker_: summary(tracker.predict(state, x)))

            def say(model: Any = model) -> Any:
                return model.predict(X[:1])

            def bare_say(program: Any = program, state: Any = model.state_) -> Any:
                return jax.device_get(program(state, X32[:1]))

            yield overhead(f"{kind}.predict of 1 row, {name}", {"estimator": say, "bare": bare_say})


def summary(predictive: opvi.Predictive) -> Any:
    first = predictive.log_probabilities() if hasattr(predictive.components, "logits") else predictive.mean()
    return first, *predictive.uncertainty()


def river_over_the_step() -> Iterator[Result]:
    """20 calls of `learn_one`, the last of which learns, beside the bare step: the cost of a call is a 20th."""
    rows, labels = elec2()
    rows, labels = rows[:BATCH], labels[:BATCH]
    for name, hidden in (("linear", ()), ("default", (100,))):
        model = river.Classifier(hidden=hidden, seed=SEED)
        for x, y in zip(rows, labels, strict=True):
            model.learn_one(x, y)
        table = np.array([list(row.values()) for row in rows], np.float32)
        batch = opvi.Batch((table, np.array(labels, np.int32)), np.ones(BATCH, np.float32))
        bare, again = (Bare(model._tracker(model._sizes), model._state, batch) for _ in range(2))

        def learn(model: Any = model) -> Any:
            for x, y in zip(rows, labels, strict=True):
                model.learn_one(x, y)
            return model._state

        yield overhead(f"20 × river learn_one, {name}", {"model": learn, "bare step": bare}, again)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimators", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for estimators.json")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    threadpool_limits(limits=1)  # as `python -m paper measure` does: several threads are slower for matrices this small
    about, done = machine("python -m benchmarks.estimators"), []
    for source in (over_the_step, river_over_the_step, one_row_at_a_time):
        for result in source():
            done.append({**result.summary(), "timings": {k: _short(t) for k, t in result.timings.items()}})
            against = (
                "" if result.target is None else f" (target ≤ {result.target:.0f}: {'met' if result.met else 'missed'})"
            )
            extra = {name: round(value, 3) for name, value in result.extra.items()}
            print(f"{result.what:40s} {result.size:20s} {result.value:8.1f} {result.unit}{against} {extra}", flush=True)
    report = {"machine": about, "results": done}
    (folder / "estimators.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def _short(timing: Timing) -> dict[str, Any]:
    """Return the results without the hundreds of repeats."""
    return {name: value for name, value in timing.summary().items() if name != "repeats"}


if __name__ == "__main__":
    main()
