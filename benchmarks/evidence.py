"""How exact is the evidence? `python -m benchmarks.evidence --out docs/results`.

`log_evidence` of `opvi.ibis`, which stores all rows, and of `opvi.sl_opvi`, which stores none, beside closed forms and
sums over grids, in batches of 1, 5, 20 and 100; and the sum of log densities that the particles gave every batch before
learning it.
"""

import argparse
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm
from scipy import stats
from scipy.special import gammaln, logsumexp

import opvi
from benchmarks.stamp import stamp

SOURCES = "src/opvi/filters", "benchmarks/evidence.py"
ROWS, BATCHES = 100, (1, 5, 20, 100)
Model = Callable[[int], tuple[opvi.Target, object, float]]


def linear(seed: int, d: int = 4) -> tuple[opvi.Target, object, float]:
    """A regression with known noise: rows are Gaussian."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(ROWS, d)).astype(np.float32)
    y = (X @ rng.normal(size=d) + 0.7 * rng.normal(size=ROWS)).astype(np.float32)
    target = opvi.target(
        lambda v: norm.logpdf(v).sum(),
        lambda v, rows: norm.logpdf(rows[1], rows[0] @ v, 0.7),
        lambda key: jax.random.normal(key, (d,)),
    )
    covariance = 0.49 * np.eye(ROWS) + X.astype(float) @ X.T.astype(float)
    return target, (X, y), float(stats.multivariate_normal(np.zeros(ROWS), covariance).logpdf(y.astype(float)))


def mean_and_variance(seed: int) -> tuple[opvi.Target, object, float]:
    """A normal sample under a normal inverse-gamma prior."""
    y = (1 + 2 * np.random.default_rng(seed).normal(size=ROWS)).astype(np.float32)
    a, b, k = 2.0, 3.0, 0.5

    def log_prior(v: jax.Array) -> jax.Array:
        of_variance = a * math.log(b) - math.lgamma(a) - a * v[1] - b * jnp.exp(-v[1])
        return of_variance + norm.logpdf(v[0], 0, jnp.exp(v[1] / 2) / math.sqrt(k))

    def start(key: jax.Array) -> jax.Array:
        one, two = jax.random.split(key)
        variance = b / jax.random.gamma(one, a)
        return jnp.array([jnp.sqrt(variance / k) * jax.random.normal(two), jnp.log(variance)])

    target = opvi.target(log_prior, lambda v, y: norm.logpdf(y, v[0], jnp.exp(v[1] / 2)), start)
    mean, squares = y.astype(float).mean(), ((y.astype(float) - y.astype(float).mean()) ** 2).sum()
    shape, rate = a + ROWS / 2, b + squares / 2 + k * ROWS * mean**2 / (2 * (k + ROWS))
    exact = gammaln(shape) - gammaln(a) + a * np.log(b) - shape * np.log(rate)
    return target, y, float(exact + np.log(k / (k + ROWS)) / 2 - ROWS / 2 * np.log(2 * np.pi))


def coin(seed: int) -> tuple[opvi.Target, object, float]:
    """Heads and tails under a beta prior, by log odds."""
    y = (np.random.default_rng(seed).uniform(size=ROWS) < 0.1).astype(np.float32)
    a, b = 1.0, 2.0
    whole = float(gammaln(a) + gammaln(b) - gammaln(a + b))
    target = opvi.target(
        lambda v: (a * jax.nn.log_sigmoid(v) + b * jax.nn.log_sigmoid(-v)).sum() - whole,
        lambda v, y: jax.nn.log_sigmoid((2 * y - 1) * v[0]),
        lambda key: jax.scipy.special.logit(jax.random.beta(key, a, b, (1,))),
    )
    heads = y.sum()
    return target, y, float(gammaln(a + heads) + gammaln(b + ROWS - heads) - gammaln(a + b + ROWS) - whole)


def over_grid(log_density: Callable[[np.ndarray], np.ndarray], half: float) -> float:
    """Return the log integral of a density of two parameters."""
    at = np.linspace(-half, half, 1201)
    points = np.stack(np.meshgrid(at, at, indexing="ij"), -1).reshape(-1, 2)
    return float(logsumexp(log_density(points)) + 2 * np.log(at[1] - at[0]))


def logistic(seed: int) -> tuple[opvi.Target, object, float]:
    """Two classes, two slopes."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(ROWS, 2)).astype(np.float32)
    y = (rng.uniform(size=ROWS) < 1 / (1 + np.exp(-X @ [2.0, -1.0]))).astype(np.float32)
    target = opvi.target(
        lambda v: norm.logpdf(v, 0, 3).sum(),
        lambda v, rows: jax.nn.log_sigmoid((2 * rows[1] - 1) * (rows[0] @ v)),
        lambda key: 3 * jax.random.normal(key, (2,)),
    )

    def log_density(v: np.ndarray) -> np.ndarray:
        rows = sum(np.logaddexp(0, (1 - 2 * label) * (v @ x)) for x, label in zip(X.astype(float), y, strict=True))
        return stats.norm(0, 3).logpdf(v).sum(1) - rows

    return target, (X, y), over_grid(log_density, 12)


def two_modes(seed: int) -> tuple[opvi.Target, object, float]:
    """A mixture whose components may change places: modes twenty standard deviations apart."""
    rng = np.random.default_rng(seed)
    y = (np.where(rng.integers(2, size=ROWS), 2.0, -2.0) + rng.normal(size=ROWS)).astype(np.float32)
    target = opvi.target(
        lambda v: norm.logpdf(v, 0, 3).sum(),
        lambda v, y: jnp.logaddexp(norm.logpdf(y, v[0]), norm.logpdf(y, v[1])) - math.log(2),
        lambda key: 3 * jax.random.normal(key, (2,)),
    )

    def log_density(v: np.ndarray) -> np.ndarray:
        rows = (np.logaddexp(*stats.norm.logpdf(value, v.T)) - math.log(2) for value in y.astype(float))
        return stats.norm(0, 3).logpdf(v).sum(1) + sum(rows)

    return target, y, over_grid(log_density, 8)


MODELS: dict[str, Model] = {
    "linear, 4 slopes": linear,
    "linear, 30 slopes": lambda seed: linear(seed, 30),
    "mean and variance": mean_and_variance,
    "coin": coin,
    "logistic": logistic,
    "two modes": two_modes,
}


def trial(sampler: opvi.Sampler, rows: object, batch: int, seed: int, exact: float) -> dict[str, float]:
    """Return the errors of both estimates, in nats."""
    target, key, total = sampler.target, jax.random.key(seed), 0.0  # type: ignore[attr-defined]
    state = sampler.init(key)
    of_batch = jax.jit(jax.vmap(lambda v, b: target.log_likelihood(target.unravel(v), b.data) @ b.weight, (0, None)))
    for new in opvi.stream(rows, batch):
        total += float(logsumexp(np.asarray(of_batch(state.particles, new) + state.log_weights, float)))
        state, _ = sampler.step(key, state, new)
    return {"off": sampler.log_evidence(state, seed) - exact, "by batches": total - exact}  # type: ignore[attr-defined]


def main() -> None:
    """Measure, and write `evidence.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for evidence.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict] = {}
    for name in options.models:
        for seed in options.seeds:
            target, rows, exact = MODELS[name](seed)
            for stored, sampler in ((ROWS, opvi.ibis(target)), (0, opvi.sl_opvi(target))):
                for batch in BATCHES:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        found = trial(sampler, rows, batch, seed, exact)
                    done.setdefault(name, {}).setdefault(f"{stored} stored", {}).setdefault(str(batch), {})[seed] = (
                        found
                    )
                    print(name, seed, stored, batch, found, flush=True)
            seeds = " ".join(map(str, options.seeds))
            made = {"command": f"python -m benchmarks.evidence --out docs/results --seeds {seeds}"}
            made |= {"sources": stamp(*SOURCES), "results": done}
            (options.out / "evidence.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
