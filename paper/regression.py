r"""The regressor out of the box: one pass, one setting for every data set."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import opvi
from opvi import metrics
from paper import data
from paper.results import Book, Check, Experiment, Record, Row, at_least, no_more_than, summary

BATCH = 20
STAND_IN = "robot arm"  # made up, where no data are to be had
SPLITS = {"yacht": 5, "bostonHousing": 5, "concrete": 5, "kin8nm": 5, "protein-tertiary-structure": 3}
# RMSE and log predictive density to reach.
WANTED = {
    "yacht": (1.95, -1.42),
    "bostonHousing": (3.28, -2.38),
    "concrete": (6.0, -3.15),
    "kin8nm": (0.0757, 1.21),
    "protein-tertiary-structure": (4.26, -2.72),
}


def rows(name: str, smoke: bool, split: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return X, y, X_test, y_test of a split, in order."""
    if smoke:
        arm = data.robot_arm(160, seed=split)
        return arm.X[:120], arm.y[:120], arm.X[120:], arm.y[120:]
    return data.uci_split(name, split)


def trial(name: str, smoke: bool, split: int) -> Record:
    """One pass over the training rows of a split, in their order, and the errors on its test rows."""
    X, y, X_test, test = rows(name, smoke, split)
    tracker = opvi.regressor(X.shape[1])
    begun = time.perf_counter()
    state, _ = opvi.run(tracker, opvi.stream((X, y), BATCH), split)
    seconds = time.perf_counter() - begun
    predictive = tracker.predict(state, X_test)
    y_test = jnp.asarray(test, state.particles.dtype)
    return {
        "rmse": float(metrics.rmse(predictive, y_test)),
        "lpd": float(predictive.log_density(y_test).mean()),
        "coverage_90": float(metrics.coverage(predictive, y_test, 0.9)),
        "crps": float(metrics.crps(predictive, y_test)),
        "rows": int(state.rows),
        "seconds": seconds,
    }


def experiment(smoke: bool = False) -> Experiment:
    """The table of the regressor."""
    names = [STAND_IN] if smoke else list(SPLITS)
    lines = [Row(name, {}, partial(trial, name, smoke), SPLITS.get(name, 1)) for name in names]
    return Experiment(
        "regression" + ("-smoke" if smoke else ""),
        "Regression out of the box, one pass, batches of 20",
        {"tracker": opvi.regressor(8).about, "batch": BATCH, "order": "as in the split", "smoke": smoke},
        lines,
        5,
        ["data", "RMSE", "LPD", "90 % interval covers", "CRPS", "ms per row"],
        _line,
        (lambda book: []) if smoke else _checks,
        _draw,
    )


def _line(name: str, records: list[Record]) -> list[str]:
    per_row = float(np.median([record["seconds"] / record["rows"] for record in records])) * 1e3
    return [
        summary(records, "rmse").text(4),
        summary(records, "lpd").text(3),
        f"{summary(records, 'coverage_90').mean:.3f}",
        f"{summary(records, 'crps').mean:.4g}",
        f"{per_row:.2f}",
    ]


def _checks(book: Book) -> list[Check]:
    out = []
    for name, (rmse, lpd) in WANTED.items():
        records = book.records(name)
        if records:
            out.append(no_more_than(f"{name} RMSE", summary(records, "rmse").mean, rmse))
            out.append(at_least(f"{name} LPD", summary(records, "lpd").mean, lpd))
    return out


def _draw(book: Book, _: Path) -> Any:
    """Draw nothing: the figure of `python -m benchmarks.rivals` has these numbers beside others' on the same rows."""
    return None
