"""How far particles of `opvi.kfac` are from the posterior, where that is known: `python -m benchmarks.kronecker`.

Linear regression with five inputs and a bias, noise .5, prior variance 1, batches of 20, 20 particles. Nothing was
tuned.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

import opvi
from benchmarks.parallel import keep
from benchmarks.stamp import stamp

COMMAND = "python -m benchmarks.kronecker --out docs/results"
INPUTS, NOISE, BATCH, PARTICLES, SEEDS = 5, 0.5, 20, 20, range(5)


def exact(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the posterior's means and sds."""
    a = np.column_stack([x, np.ones(len(x))]).astype(float)
    precision = a.T @ a / NOISE + np.eye(a.shape[1])
    return np.linalg.solve(precision, a.T @ y / NOISE), np.sqrt(np.diag(np.linalg.inv(precision)))


def trial(rows: int, wander: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many sds the particles' means are off, and their sds in units of the posterior's."""
    rng = np.random.default_rng(seed)
    w, x = rng.normal(size=INPUTS + 1), rng.normal(size=(rows, INPUTS)).astype(np.float32)
    y = (x @ w[:-1] + w[-1] + np.sqrt(NOISE) * rng.normal(size=rows)).astype(np.float32)
    target = opvi.mlp(INPUTS, (), opvi.gaussian(NOISE), prior_variance=1.0)
    sampler = opvi.kfac(target, wander=wander)
    state, _ = opvi.run(sampler, opvi.stream((x, y), BATCH), seed, particles=PARTICLES)
    layer = jax.vmap(target.unravel)(state.particles)
    found = np.concatenate([np.asarray(leaf).reshape(PARTICLES, -1) for leaf in jax.tree.leaves(layer)], 1)
    mean, sd = exact(x, y)
    return np.abs(found.mean(0) - mean) / sd, found.std(0) / sd


def main() -> None:
    """Measure, and write `kronecker.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for kronecker.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    done = {}
    for wander in (False, True):
        for rows in (40, 200, 2000):
            off, ratio = (np.concatenate(part) for part in zip(*(trial(rows, wander, s) for s in SEEDS), strict=True))
            name = f"{'wandering' if wander else 'fading'}, {rows} rows"
            done[name] = {"sds off": round(float(off.mean()), 2), "worst": round(float(off.max()), 1)}
            done[name] |= {"sd": round(float(ratio.mean()), 2), "largest": round(float(ratio.max()), 1)}
            print(name, done[name], flush=True)
    sources = stamp("src/opvi/filters/_kfac.py", "benchmarks/kronecker.py")
    keep(options.out / "kronecker.json", {"command": COMMAND, "sources": sources, "results": done})


if __name__ == "__main__":
    main()
