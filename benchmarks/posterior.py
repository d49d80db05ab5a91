"""How right posteriors are, against closed forms: `python -m benchmarks.posterior --out docs/results`.

Linear-Gaussian models of 60 and 500 parameters by `opvi.tracker`, and a stream whose two modes change places.
"""

import argparse
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from benchmarks.parallel import finished, keep
from benchmarks.stamp import stamp

COMMAND = "python -m benchmarks.posterior --out docs/results --seeds"
SOURCES = "src/opvi/filters", "benchmarks/posterior.py"
NOISE = 0.25
DRAWS = 20_000
CASES = [  # parameters, rows, batch, half-life, the prior's mean and variance
    (60, 1000, 1, math.inf, 0.0, 1.0),
    (60, 1000, 5, math.inf, 0.0, 1.0),
    (60, 1000, 20, math.inf, 0.0, 1.0),
    (60, 1000, 100, math.inf, 0.0, 1.0),
    (60, 1000, 100, 50.0, 0.0, 1.0),
    (60, 40, 20, math.inf, 2.0, 0.09),
    (500, 2000, 100, math.inf, 0.0, 1.0),
    (500, 2000, 100, 50.0, 2.0, 0.09),
]


def linear(dim: int, rows: int, batch: int, half_life: float, mean: float, variance: float, seed: int) -> dict:
    """Draws of the tracker beside the closed form, in its standard deviations."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, dim)).astype(np.float32)
    w = mean + math.sqrt(variance) * rng.normal(size=dim)
    y = (X @ w + math.sqrt(NOISE) * rng.normal(size=rows)).astype(np.float32)

    def predict(v: jax.Array, x: jax.Array) -> opvi.Normal:
        return opvi.Normal(x @ v, jnp.full(x.shape[:1], NOISE, x.dtype))

    target = opvi.target(
        lambda v: -((v - mean) ** 2).sum() / (2 * variance),
        lambda v, data: predict(v, data[0]).log_density(data[1]),
        lambda key: jax.random.normal(key, (dim,)),  # not the prior
        predict,
    )
    tracker = opvi.tracker(target, half_life=half_life)
    state, _ = opvi.run(tracker, opvi.stream((X, y), batch), seed)
    draws = np.asarray(tracker.draws(state, jax.random.key(seed), DRAWS), float)
    age = (rows - 1 - np.arange(rows)) // batch * batch
    a = X.astype(float) * (2.0 ** (-age / half_life))[:, None] / NOISE
    C = np.linalg.inv(np.eye(dim) / variance + X.T.astype(float) @ a)
    exact, sd = C @ (mean / variance + a.T @ y.astype(float)), np.sqrt(np.diag(C))
    ratio = draws.std(0) / sd
    return {
        "worst mean, sd": float(np.abs(draws.mean(0) - exact).max() / sd[np.abs(draws.mean(0) - exact).argmax()]),
        "smallest sd ratio": float(ratio.min()),
        "largest sd ratio": float(ratio.max()),
    }


def modes(seed: int) -> dict:
    """Two mirrored modes whose log odds go from 0 to 5 and to -5: how far the weight is off."""
    rng = np.random.default_rng(seed)
    per_row = np.repeat([0, 5 / 400, 0, -10 / 800, 0], [200, 400, 200, 800, 200])
    rows = (3 + rng.normal(size=1800)).astype(np.float32), per_row.astype(np.float32)

    def log_likelihood(v: jax.Array, data: tuple[jax.Array, jax.Array]) -> jax.Array:
        return -((data[0] - jnp.abs(v[0])) ** 2) / 2 + data[1] * jnp.tanh(4 * v[0]) / 2

    target = opvi.target(lambda v: -(v**2).sum() / 18, log_likelihood, lambda key: 3 * jax.random.normal(key, (1,)))
    _, history = opvi.run(
        opvi.tracker(target),
        opvi.stream(rows, 20),
        seed,
        record=lambda s, i, b: jnp.where(s.particles[:, 0] > 0, jnp.exp(s.log_weights), 0).sum(),
    )
    off = np.abs(np.asarray(history.record) - 1 / (1 + np.exp(-np.cumsum(per_row)))[19::20])
    return {
        "worst": float(off.max()),
        "mean": float(off.mean()),
        "at the stops": float(max(off[30:40].max(), off[-10:].max())),
    }


def measured(case: int, seed: int) -> dict:
    """Return what is measured of a linear model by its place in `CASES`, or of the two modes, -1."""
    return modes(seed) if case < 0 else linear(*CASES[case], seed)


def main() -> None:
    """Measure, and write `posterior.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for posterior.json")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, each on one core")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = ("parameters", "rows", "batch", "half_life", "prior_mean", "prior_variance")
    found: dict[int, dict[str, dict]] = {}
    tasks = [(case, seed) for case in reversed(range(-1, len(CASES))) for seed in range(options.seeds)]
    for (case, seed), one in finished(measured, tasks, options.jobs):
        found.setdefault(case, {})[str(seed)] = one
        print(CASES[case] if case >= 0 else "modes", seed, one, flush=True)
        done: dict[str, list] = {"linear": [], "modes": []}
        for number, trials in sorted(found.items()):
            trials = dict(sorted(trials.items()))
            if number < 0:
                done["modes"].append({"trials": trials})
                continue
            values = (str(value) if value == math.inf else value for value in CASES[number])
            done["linear"].append({**dict(zip(names, values, strict=True)), "trials": trials})
        made = {"command": f"{COMMAND} {options.seeds}", "sources": stamp(*SOURCES), "results": done}
        keep(options.out / "posterior.json", made)


if __name__ == "__main__":
    main()
