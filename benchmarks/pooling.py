"""Many short streams from one population: pooled, separate, and as one model."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

import opvi
from benchmarks.machine import machine

MODELS, NEW, ROWS, FEATURES, NOISE, SPREAD, SEEDS = 1000, 100, 20, 9, 1.0, 0.5, 3


def data(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `[streams, rows, features]` and targets; one extra row per stream, and streams not learnt."""
    rng = np.random.default_rng(seed)
    truth = rng.standard_normal(FEATURES + 1) + SPREAD * rng.standard_normal((MODELS + NEW, FEATURES + 1))
    X = rng.standard_normal((MODELS + NEW, ROWS + 1, FEATURES)).astype(np.float32)
    y = np.einsum("srf,sf->sr", X, truth[:, :-1]) + truth[:, -1:]
    return X, (y + np.sqrt(NOISE) * rng.standard_normal(y.shape)).astype(np.float32)


def followed(X: np.ndarray, y: np.ndarray, ids: np.ndarray, noise: float, pool: bool) -> dict[str, float]:
    """Mean log density of each row before it is learnt, the streams in step; of the next row; and of new streams."""
    sampler = opvi.gauss_newton(opvi.linear_regression(FEATURES, noise=noise), forgetting=1.0)
    fleet, scores = opvi.Fleet(sampler, 0, batch_size=1, particles=1, pool=pool), []

    def asked(some: slice, row: int) -> float:
        return float(np.asarray(fleet.predict(ids[some], X[some, row]).log_density(y[some, row])).mean())

    for row in range(ROWS):
        scores.append(asked(slice(MODELS), row))
        fleet.learn(ids[:MODELS], (X[:MODELS, row], y[:MODELS, row]))
    return {
        "rows": float(np.mean(scores)),
        "next row": asked(slice(MODELS), ROWS),
        "new": asked(slice(MODELS, None), 0),
    }


def measure(seed: int) -> dict[str, float]:
    """Compare the three ways on one draw of the streams."""
    X, y = data(seed)
    A = np.concatenate([X, np.ones_like(X[..., :1])], -1)[:MODELS, :ROWS].reshape(-1, FEATURES + 1).astype(float)
    targets = y[:MODELS, :ROWS].reshape(-1)
    residual = targets - A @ np.linalg.lstsq(A, targets, rcond=None)[0]
    own, one = np.arange(len(X)), np.zeros(len(X), int)
    ways = {
        "pooled": followed(X, y, own, NOISE, True),
        "independent": followed(X, y, own, NOISE, False),
        "common": followed(X, y, one, float(residual.var()), False),  # the noise that suits it best
    }
    return {f"{way}, {what}": value for way, said in ways.items() for what, value in said.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pooling", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for pooling.json")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    trials = [measure(seed) for seed in range(SEEDS)]
    mean = {name: float(np.mean([trial[name] for trial in trials])) for name in trials[0]}
    ahead = {
        f"ahead of {other}, {what}": mean[f"pooled, {what}"] - mean[f"{other}, {what}"]
        for other in ("independent", "common")
        for what in ("rows", "next row", "new")
    }
    smallest = {
        f"smallest lead over {other}": min(trial["pooled, rows"] - trial[f"{other}, rows"] for trial in trials)
        for other in ("independent", "common")
    }
    settings: dict[str, Any] = {"models": MODELS, "rows": ROWS, "parameters": FEATURES + 1, "seeds": SEEDS}
    result = {"machine": machine("python -m benchmarks.pooling"), "settings": settings, **mean, **ahead, **smallest}
    (folder / "pooling.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, value in {**mean, **ahead, **smallest}.items():
        print(f"{name:40s} {value:.3f}")


if __name__ == "__main__":
    main()
