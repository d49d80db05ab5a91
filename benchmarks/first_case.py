"""One case of `benchmarks.first`, in a process that has imported nothing yet: `python -m benchmarks.first_case NAME`.

It prints its steps as JSON: processor seconds of each, the programs compiled or read by JAX, and at the end the whole
process, imports included, and its peak memory.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

STREAMS = ("ChickWeights", "Phishing", "ImageSegments")
FIRST_ROWS, NEXT_ROWS = "a new model's first 1,000 rows", "its next 1,000 rows"  # all programs are loaded
SINGLE = 60  # rows learnt one at a time


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

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        before, began = len(self.programs), time.process_time()
        out = work()
        self.steps[name] = {"seconds": round(time.process_time() - began, 3), "programs": self.programs[before:]}
        return out


def peak() -> int:
    """Return this process's peak memory so far, in MB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def one_by_one(X: Any, y: Any, start: int) -> list[tuple[Any, Any]]:
    """Return some rows as tables of one row each."""
    return [(X[i : i + 1], y[i : i + 1]) for i in range(start, start + SINGLE)]


def estimator(task: str, watch: Watch, **settings: Any) -> None:
    """The first calls of a scikit-learn estimator, then those of one with other settings."""
    watch("import opvi", lambda: __import__("opvi"))
    watch("import JAX", lambda: __import__("jax.numpy"))
    watch("import scikit-learn", lambda: __import__("sklearn.base"))
    watch("import the estimators", lambda: __import__("opvi.adapters.sklearn"))
    watch.listen()
    import numpy as np

    import opvi

    rng = np.random.default_rng(0)
    X = rng.normal(size=(5000, 8))
    y = np.sin(X[:, 0]) + X[:, 1]
    y = y if task == "regressor" else y > 0
    made = opvi.OPVIRegressor if task == "regressor" else opvi.OPVIClassifier
    model = made(**settings)
    watch("partial_fit(20)", lambda: model.partial_fit(X[:20], y[:20]))
    watch("predict(20)", lambda: model.predict(X[:20]))
    if settings:
        return
    watch("partial_fit(5)", lambda: model.partial_fit(X[20:25], y[20:25]))
    watch("predict(2000)", lambda: model.predict(X[:2000]))
    watch("partial_fit(333)", lambda: model.partial_fit(X[25:358], y[25:358]))
    watch("partial_fit(1)", lambda: model.partial_fit(X[358:359], y[358:359]))
    watch("rows up to 1,000", lambda: model.partial_fit(X[359:1000], y[359:1000]))
    watch("1,000 rows more", lambda: model.partial_fit(X[1000:2000], y[1000:2000]))
    watch(f"partial_fit(1), {SINGLE} times", lambda: [model.partial_fit(*row) for row in one_by_one(X, y, 2000)])
    watch("predict(20) again", lambda: model.predict(X[:20]))
    watch("predict(333)", lambda: model.predict(X[:333]))
    watch("predict(5000)", lambda: model.predict(X))
    told = len(watch.programs)
    watch("another question", lambda: (model.predict_interval if task == "regressor" else model.decompose)(X[:20]))
    watch("a third", lambda: model.log_predictive_density(X[:20], y[:20]))
    watch.steps["programs to learn and predict"], watch.steps["peak MB"] = told, peak()
    for _ in range(2):  # the second finds all programs loaded
        model = made(**settings)
        watch(FIRST_ROWS, lambda model=model: model.partial_fit(X[:1000], y[:1000]))
        watch(NEXT_ROWS, lambda model=model: model.partial_fit(X[1000:2000], y[1000:2000]))


def river(name: str, buffer: int, watch: Watch) -> None:
    """A stream of River's, row by row, beside its forest."""

    def imported() -> None:
        import river.datasets
        import river.evaluate
        import river.forest
        import river.metrics
        import river.preprocessing  # noqa: F401

    watch("import River", imported)
    watch("import JAX", lambda: __import__("jax.numpy"))
    watch.listen()
    from river import datasets, forest, metrics, preprocessing
    from river.evaluate import progressive_val_score

    regression = name == "ChickWeights"

    def scored(model: Any) -> float:
        measure = metrics.MAE() if regression else metrics.Accuracy()
        return progressive_val_score(getattr(datasets, name)(), model, measure).get()

    def ours() -> float:
        from opvi.adapters import river as adapters

        return scored((adapters.Regressor if regression else adapters.Classifier)(buffer=buffer, seed=0))

    def theirs() -> float:
        return scored(
            preprocessing.StandardScaler() | (forest.ARFRegressor if regression else forest.ARFClassifier)(seed=0)
        )

    watch.steps["score"] = watch("opvi", ours)
    watch.steps["process"] = round(time.process_time(), 3)  # with its imports
    warm = []
    for _ in range(3):  # new models, the same programs
        assert watch("opvi, warm", ours) == watch.steps["score"]
        warm.append(watch.steps["opvi, warm"])
    watch.steps["opvi, warm"] = sorted(warm, key=lambda step: step["seconds"])[1]
    watch.steps["forest's score"] = watch("forest", theirs)


OTHERS = {"half_life": 500.0, "n_particles": 12, "hidden": (40,)}  # settings, changed one at a time
CASES: dict[str, Callable[[Watch], None]] = {
    "regressor": lambda watch: estimator("regressor", watch),
    "classifier": lambda watch: estimator("classifier", watch),
    **{
        f"{task}, {name}={value}": (lambda watch, task=task, own={name: value}: estimator(task, watch, **own))
        for task in ("regressor", "classifier")
        for name, value in OTHERS.items()
    },
    **{
        f"{name}, buffer={buffer}": (lambda watch, name=name, buffer=buffer: river(name, buffer, watch))
        for name in STREAMS
        for buffer in (20, 1)
    },
}


def main() -> None:
    watch = Watch()
    CASES[sys.argv[1]](watch)
    whole = round(time.process_time(), 2)
    print(json.dumps({"steps": watch.steps, "process": whole, "peak MB": peak(), "programs": len(watch.programs)}))


if __name__ == "__main__":
    main()
