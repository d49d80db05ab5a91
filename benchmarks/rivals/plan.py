"""Which rivals run on which data, how each is tuned, and one piece of that work at a time."""

import itertools
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import machine
from benchmarks.rivals import networks
from benchmarks.rivals.scoring import judged, judged_classes, scaled
from paper import classification, regression
from paper.results import Record

NETS, NETS_TUNED = 20, 5  # of an ensemble, and of one that is being tuned
TUNING_SEED = 99  # of a stream's order and of starting weights
TUNING_ROWS = 10_000  # of a regression's training rows, at most
# Validation rows are the last tenth of the training rows of splits that are not reported.
VALIDATION = {"kin8nm": (5, 6), "protein-tertiary-structure": (3,)}
USUAL_VALIDATION = (5, 6, 7, 8, 9)
LAST_PART = 0.8  # with test rows kept aside, a setting is judged on the stream from here on

SCORED_BY = {
    "regression": "log predictive density of validation rows, mean over splits",
    "classification": "minus the log loss before learning; where there are test rows, of the last fifth of the stream",
}

MOTIONS = [(0, 1), (0, 0.9998), (0, 0.9995), (1e-5, 1), (1e-4, 1)]  # wandering a row, memory a row
STEPS = list(itertools.product((1e-3, 3e-3, 1e-2), (1, 5), (0, 1)))  # rate, repeats, whether it decays
ONE_PASS_STEPS = [(rate, min(repeats, 2), decays) for rate, repeats, decays in STEPS]  # 3,000 rounds of a large network


def _steps(steps: list[tuple[float, int, int]]) -> list[Record]:
    return [dict(zip(("rate", "repeats", "decays"), step, strict=True)) for step in steps]


# Where the best of a first grid lay on its edge, settings beyond it were added.
FILTER_GRID = [
    {"noise": noise, "prior": prior, "wandering": wandering, "memory": memory}
    for noise, prior, (wandering, memory) in [
        *itertools.product((0.01, 0.03, 0.1, 0.3), (0.3, 1, 3), MOTIONS),
        *itertools.product((0.001, 0.003), (0.3, 1), (*MOTIONS[1:2], *MOTIONS[3:], (1e-3, 1))),
        (0.01, 1, (1e-3, 1)),
    ]
]
ENSEMBLE_GRID = [
    {**step, "activation": activation}
    for step, activation in itertools.product(
        _steps(
            [*STEPS, *itertools.product((3e-2,), (1, 5), (0, 1)), *itertools.product((1e-3, 3e-3, 1e-2), (25,), (0, 1))]
        ),
        ("tanh", "relu"),
    )
]
LINEAR_GRID = [
    {"wandering": wandering, "prior_variance": prior}
    for wandering, prior in [
        *itertools.product((1e-5, 1e-4, 1e-3, 1e-2), (0.1, 1)),
        *itertools.product((3e-2, 1e-1), (0.1, 1)),
        (0, 0.1),
    ]
]


class Rival(NamedTuple):
    """A method on a data set."""

    data: str
    method: str
    task: str  # "regression" or "classification"
    repeats: int
    grid: list[Record]  # settings to choose among; empty: it runs as its makers ship it

    @property
    def name(self) -> str:
        """The name of its row of results."""
        return f"{self.data}: {self.method}"

    @property
    def tuning(self) -> str:
        """The name of the row of its validation scores."""
        return f"{self.name}, tuning"


def rivals(smoke: bool = False) -> list[Rival]:
    """Return all rivals, slowest first."""
    if smoke:
        on = partial(Rival, regression.STAND_IN, task="regression", repeats=1)
        classes = partial(Rival, "digits", task="classification", repeats=1)
        found = [on(method="EKF, tuned", grid=FILTER_GRID[:2]), on(method="Adam ensemble", grid=ENSEMBLE_GRID[:2])]
        found += [on(method=method, grid=[]) for method in ("River's forest", "River's linear")]
        found += [classes(method="Adam ensemble", grid=_steps(STEPS[:2]))]
        return found + [classes(method=method, grid=[]) for method in ("River's forest", "River's tree")]
    found = []
    for data in classification.STREAMS:
        seeds = classification.SEEDS
        steps = ONE_PASS_STEPS if data == "MNIST, one pass" else STEPS
        on = partial(Rival, data, task="classification")
        if "MNIST" not in data:  # a covariance of 7,850² and trees of 784 pixels are left out
            ordered = seeds if data == "covertype, shuffled" else 1  # the tree: one seed
            found += [on(method="River's forest", repeats=seeds, grid=[])]
            found += [on(method="River's tree", repeats=ordered, grid=[])]
            found += [on(method="River's linear", repeats=ordered, grid=[])]
            found += [on(method="linear EKF, tuned", repeats=ordered, grid=LINEAR_GRID)]
        found += [on(method="Adam ensemble", repeats=seeds, grid=_steps(steps))]
    for data, splits in regression.SPLITS.items():
        on = partial(Rival, data, task="regression", repeats=splits)
        found += [on(method="River's forest", grid=[]), on(method="River's linear", grid=[])]
        found += [on(method="EKF, tuned", grid=FILTER_GRID), on(method="Adam ensemble", grid=ENSEMBLE_GRID)]
    slow = ["covertype", "MNIST, one", "protein", "MNIST", "kin8nm", "elec2"]
    return sorted(found, key=lambda rival: next((i for i, data in enumerate(slow) if data in rival.data), 9))


# --- one piece of work --------------------------------------------------------------------------


def tune(rival: Rival, index: int, smoke: bool = False) -> Record:
    """The score of one setting; larger is better."""
    setting = rival.grid[index]
    if rival.task == "classification":
        stream = _stream(rival, TUNING_SEED, smoke)
        p, _, _ = _forecast_classes(rival, stream, setting, TUNING_SEED, NETS_TUNED)
        first = 0 if stream.test is None else int(LAST_PART * len(p)) // regression.BATCH * regression.BATCH
        return {"setting": setting, "score": -judged_classes(p[first:], stream.y[first : len(p)])["log_loss"]}
    splits = (1,) if smoke else VALIDATION.get(rival.data, USUAL_VALIDATION)
    scores = []
    for number in splits:
        X, y, _, _ = regression.rows(rival.data, smoke, number)
        cut = len(y) - len(y) // 10
        kept = slice(0, min(cut, TUNING_ROWS))
        split = scaled(X[kept], y[kept], X[cut:], y[cut:])
        before, test, _ = _forecast(rival, split, setting, number, NETS_TUNED)
        scores.append(judged(split, before, test)["lpd"] if np.isfinite(test.mean).all() else -np.inf)
    return {"setting": setting, "score": float(np.mean(scores))}


def trial(rival: Rival, setting: Record, index: int, smoke: bool = False) -> Record:
    """The rival on the rows of a split, or of a seed, of our own experiment."""
    begun = time.perf_counter()
    if rival.task == "classification":
        seed = classification.FIRST_SEED + index
        stream = _stream(rival, seed, smoke)
        p, test, seconds = _forecast_classes(rival, stream, setting, seed, NETS)
        record = judged_classes(p, stream.y, None if test is None else (test, stream.test[1]))
    else:
        split = scaled(*regression.rows(rival.data, smoke, index))
        before, forecast, seconds = _forecast(rival, split, setting, index, NETS)
        record = judged(split, before, forecast)
    return {**record, "cpu_seconds": seconds, "seconds": time.perf_counter() - begun, "ran_on": _ran_on()}


def _stream(rival: Rival, seed: int, smoke: bool) -> classification.Stream:
    stream = (classification._digits if smoke else classification.STREAMS[rival.data])(seed)
    needs_no_test = not rival.method.startswith("Adam")
    return stream._replace(test=None) if needs_no_test else stream


def _forecast(rival: Rival, split: Any, setting: Record, seed: int, nets: int) -> Any:
    if rival.method == "EKF, tuned":
        return networks.filtered(split, setting, seed)
    if rival.method == "Adam ensemble":
        return networks.ensemble(split, setting, seed, nets)
    from benchmarks.rivals import forests

    return forests.regress(rival.method, split, seed)


def _forecast_classes(rival: Rival, stream: Any, setting: Record, seed: int, nets: int) -> Any:
    if rival.method == "linear EKF, tuned":
        return networks.linear_filter(stream, setting, seed)
    if rival.method == "Adam ensemble":
        return networks.class_ensemble(stream, setting, seed, nets)
    from benchmarks.rivals import forests

    return forests.classify(rival.method, stream, seed)


def _ran_on() -> dict[str, Any]:
    about = machine()
    return {"cpu": about["cpu"], "cores": about["cores"], "python": about["python"], "jax": about["versions"]["jax"]}
