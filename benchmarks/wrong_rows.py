"""Wrong targets and labels, with the setting `robust` and without: `python -m benchmarks.wrong_rows`.

Synthetic streams, each learnt in one pass in batches of 20, with none or a tenth of the rows wrong: targets replaced by
50 or -50 (the others have unit size), labels by another class. Reported are errors on test rows that are not wrong. The
thresholds were chosen on seeds from 100 on.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.robust import summary
from benchmarks.stamp import stamp

SEEDS = (1, 2, 3, 4, 5)
ROWS, TEST, BATCH, PARTICLES = 3000, 1000, 20, 10
SHARES = (0.0, 0.1)
FAR, NOISE = 50.0, 0.1
COLUMNS, CLASSES = 6, 3
TARGETS, LABELS = 4.0, 3.0  # the thresholds reported
SOURCES = tuple(f"src/opvi/filters/_{name}.py" for name in ("gauss_newton", "looking", "robust", "linear_ekf", "kfac"))


def targets(seed: int, share: float, curved: bool) -> tuple[Any, Any]:
    """A linear or a wavy function of six columns with noise of sd .1; and test rows without noise."""
    rng = np.random.default_rng(seed)
    w, v = rng.normal(size=(2, COLUMNS)) / np.sqrt(COLUMNS)
    X = rng.normal(size=(ROWS + TEST, COLUMNS))
    f = np.sin(2 * X @ w) * 0.8 + np.tanh(X @ v) * 0.6 if curved else X @ w
    y = f + NOISE * rng.normal(size=len(f))
    wrong = rng.random(len(f)) < share
    y = np.where(wrong, rng.choice([-FAR, FAR], len(f)), y)
    return ((X[:ROWS], y[:ROWS]), (X[ROWS:], f[ROWS:]))


def labels(seed: int, share: float, curved: bool) -> tuple[Any, Any]:
    """Three classes by softmax of linear or wavy functions of six columns, mostly certain; test labels are right."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(ROWS + TEST, COLUMNS))
    z = X @ rng.normal(size=(COLUMNS, CLASSES)) * 2
    if curved:
        z = 6 * np.sin(z / 2 + rng.normal(size=CLASSES))
    y = (z + rng.gumbel(size=z.shape)).argmax(1)
    wrong = rng.random(len(y)) < share
    wrong[ROWS:] = False
    y = np.where(wrong, (y + rng.integers(1, CLASSES, len(y))) % CLASSES, y)
    return (X[:ROWS], y[:ROWS]), (X[ROWS:], y[ROWS:])


def learnt(sampler: Any, rows: Any, seed: int, particles: int | None) -> Any:
    """The state after one pass."""
    X, y = rows
    stream = opvi.stream((X.astype(np.float32), y.astype(np.float32 if y.dtype.kind == "f" else np.int32)), BATCH)
    return opvi.run(sampler, stream, seed, particles=particles)[0]


def error(sampler: Any, state: Any, test: Any) -> dict[str, float]:
    """Of the predictive mean."""
    X, f = test
    mean = np.asarray(sampler.predict(state, X.astype(np.float32)).mean(), float)
    return {"rmse": float(np.sqrt(np.mean((mean - f) ** 2)))}


def loss(sampler: Any, state: Any, test: Any) -> dict[str, float]:
    """Accuracy and log loss."""
    X, y = test
    p = np.asarray(sampler.predict(state, X.astype(np.float32)).probabilities(), float)
    chosen = np.clip(p[np.arange(len(y)), y], 1e-12, 1)
    return {"accuracy": float((p.argmax(1) == y).mean()), "log loss": float(-np.log(chosen).mean())}


LINE = opvi.linear_regression(COLUMNS, noise=NOISE**2, prior_variance=1.0)
CURVE = opvi.mlp(COLUMNS, (20,), opvi.gaussian(NOISE**2), activation=jnp.tanh, prior_variance=None)
GROUPS = opvi.mlp(COLUMNS, (20,), opvi.categorical(), outputs=CLASSES, activation=jnp.tanh, prior_variance=None)


class Case:
    """A stream, a sampler by its threshold, and a measure."""

    def __init__(self, make: Callable[..., Any], data: Any, curved: bool, measure: Any, particles: int | None):
        self.make, self.data, self.curved, self.measure, self.particles = make, data, curved, measure, particles

    def run(self, robust: float | None, share: float, seed: int) -> dict[str, float]:
        """One pass."""
        rows, test = self.data(seed, share, self.curved)
        sampler = self.make(robust=robust)
        return self.measure(sampler, learnt(sampler, rows, seed, self.particles), test)


def _line(robust: float | None) -> Any:
    return opvi.gauss_newton(LINE, forgetting=1.0, robust=robust)


def _network(robust: float | None) -> Any:
    return opvi.gauss_newton(CURVE, forgetting=0.999, noise=opvi.filters.AdaptiveNoise(), robust=robust)


def _known_noise(robust: float | None) -> Any:
    return opvi.gauss_newton(CURVE, forgetting=0.999, robust=robust)


def _kfac(robust: float | None) -> Any:
    return opvi.kfac(CURVE, robust=robust)


def _softmax(robust: float | None) -> Any:
    return opvi.linear_ekf(COLUMNS, CLASSES, wandering=1e-4, robust=robust)


def _classes(robust: float | None) -> Any:
    return opvi.kfac(GROUPS, robust=robust)


CASES = {
    "gauss_newton, linear": Case(_line, targets, False, error, 1),
    "gauss_newton, network, adaptive noise": Case(_network, targets, True, error, PARTICLES),
    "gauss_newton, network, known noise": Case(_known_noise, targets, True, error, PARTICLES),
    "kfac, regression": Case(_kfac, targets, True, error, PARTICLES),
    "linear_ekf": Case(_softmax, labels, False, loss, None),
    "kfac, classes": Case(_classes, labels, True, loss, PARTICLES),
}


def main() -> None:
    """Measure every case; with `--choose`, several thresholds on other seeds, which are printed and not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    seeds = (101, 102) if args.choose else SEEDS
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        if args.only not in name:
            continue
        best = TARGETS if case.data is targets else LABELS
        for robust in (None, 2.0, 3.0, 4.0, 6.0, 10.0) if args.choose else (None, best):
            said = "every row believed" if robust is None else f"robust={robust:g}"
            for share in SHARES:
                found = summary([case.run(robust, share, seed) for seed in seeds])
                results.setdefault(name, {}).setdefault(said, {})[f"{share:.0%} wrong"] = found
                print(name, said, f"{share:.0%}", {k: round(v["mean"], 4) for k, v in found.items()}, flush=True)
    if args.choose or args.only:
        return
    command = "python -m benchmarks.wrong_rows"
    about = {"command": command, "machine": machine(command), "sources": stamp(*SOURCES)}
    (args.out / "wrong-rows.json").write_text(json.dumps({**about, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
