"""What the trackers cost: the kin8nm-sized run, a row of the regressor, and growth with particles and parameters."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.measure import Result, Timing, interleave, milliseconds

ROUNDS, ROWS, FEATURES = 500, 20, 8
KEY = jax.random.key(0)


def arrays(rows: int, features: int = FEATURES) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).standard_normal((rows, features), dtype=np.float32)
    return x, np.sin(x.sum(1))


def results() -> Iterator[Result]:
    """Return the results: whole runs, then the two growth rates."""
    yield gauss_newton_run()
    yield regressor_row()
    yield from growth()


def gauss_newton_run() -> Result:
    """500 rounds of 20 rows, 20 particles of 501 parameters with full covariances, after compilation."""
    target = opvi.mlp(FEATURES, (50,), activation=jnp.tanh, prior_variance=None, bias_spread=0.5)
    algorithm = opvi.gauss_newton(target, noise=opvi.filters.AdaptiveNoise())
    data = arrays(ROUNDS * ROWS)

    def run() -> Any:
        return opvi.run(algorithm, opvi.stream(data, ROWS), 0, particles=20)[0].particles

    timing = interleave({"run": run}, at_least=5, at_most=7)["run"]
    return Result(
        "Gauss–Newton, 500 rounds", "20 particles, 8-50-1, B=20", timing.median / 1e3, "s", 2.0, {"run": timing}
    )


def regressor_row() -> Result:
    """Time one row of the default regressor on 8 features, after its first 1,000 rows."""
    tracker = opvi.regressor(FEATURES)
    x, y = arrays(1100 + 4000)
    begun, _ = opvi.run(tracker, opvi.stream((x[:1100], y[:1100]), ROWS), 0)

    def run() -> Any:
        return opvi.run(tracker, opvi.stream((x[1100:], y[1100:]), ROWS), 0, state=begun)[0].particles

    timing = interleave({"run": run}, at_least=5, at_most=7)["run"].each(4000)
    return Result("default regressor, one row", "20 particles, 8-50-1, B=20", timing.median, "ms", 0.4, {"run": timing})


def one_round(algorithm: opvi.Sampler, particles: int, features: int) -> float:
    """Milliseconds of a round inside a compiled loop, the best of five."""
    x, y = arrays(40 * ROWS, features)
    batches = jax.tree.map(lambda a: jnp.asarray(a.reshape(40, ROWS, *a.shape[1:])), (x, y))
    state = algorithm.init(KEY, particles)

    @jax.jit
    def loop(state: Any) -> Any:
        def body(i: Any, state: Any) -> Any:
            batch = opvi.Batch(jax.tree.map(lambda a: a[i], batches), jnp.ones(ROWS))
            return algorithm.step(KEY, state, batch)[0]

        return jax.lax.fori_loop(0, 40, body, state)

    jax.block_until_ready(loop(state))
    return min(milliseconds(lambda: loop(state)) for _ in range(5)) / 40


def growth() -> Iterator[Result]:
    """The slope of log cost against log size: 1 is a straight line through the origin."""
    target = opvi.mlp(FEATURES, (50,), activation=jnp.tanh, prior_variance=None)
    counts = [10, 20, 40, 80]
    yield line("Gauss–Newton, particles", counts, [one_round(opvi.gauss_newton(target), n, FEATURES) for n in counts])
    # In blocks of one size: memory, and so cost, in proportion to the parameters.
    dims, costs = [], []
    for hidden in (100, 200, 400, 800):
        wide = opvi.mlp(FEATURES, (hidden,), activation=jnp.tanh, prior_variance=None)
        blocks = opvi.gauss_newton(wide, budget=20 * wide.dim * 101 * 4.0)
        dims.append(wide.dim)
        costs.append(one_round(blocks, 20, FEATURES))
    yield line("Gauss–Newton in blocks of 101, parameters", dims, costs)


def line(what: str, sizes: list[int], costs: list[float]) -> Result:
    slope = float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])
    points = dict(zip(map(str, sizes), costs, strict=True))
    timings = {str(size): Timing(cost, [cost]) for size, cost in zip(sizes, costs, strict=True)}
    return Result(what, f"{sizes[0]:,}–{sizes[-1]:,}", slope, "slope", 1.1, timings, {"ms_a_round": points})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trackers", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for trackers.json")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    about, done = machine("python -m benchmarks.trackers"), []
    for result in results():
        done.append(result.summary())
        against = f"{result.value:.3f} {result.unit} (target {result.target})"
        print(f"{result.what:45s} {result.size:30s} {against} {result.extra}", flush=True)
    report = {"machine": about, "results": done}
    (folder / "trackers.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
