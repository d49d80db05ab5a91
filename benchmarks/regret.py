"""What watching costs: a run with a regret watch against the same run without, comparators in closed form."""

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
from benchmarks.measure import Result, interleave

ROUNDS, ROWS, FEATURES = 2000, 20, 8
KEY = jax.random.key(0)


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROUNDS * ROWS, FEATURES), dtype=np.float32)
    return x, x.sum(1) + rng.standard_normal(len(x), dtype=np.float32)


def watched(what: str, size: str, algorithm: opvi.Sampler, particles: int, watch: Any) -> Result:
    """Time with the watch over time without, in turn; and beside it the time of the bare steps in one loop."""
    data = arrays()
    batches = jax.tree.map(lambda a: jnp.asarray(a.reshape(ROUNDS, ROWS, *a.shape[1:])), data)
    start = algorithm.init(KEY, particles)

    @jax.jit
    def loop(state: Any) -> Any:
        def body(i: Any, state: Any) -> Any:
            batch = opvi.Batch(jax.tree.map(lambda a: a[i], batches), jnp.ones(ROWS))
            return algorithm.step(KEY, state, batch)[0]

        return jax.lax.fori_loop(0, ROUNDS, body, state)

    def run(**options: Any) -> Any:
        return opvi.run(algorithm, opvi.stream(data, ROWS), KEY, state=start, **options)[0].particles

    timings = interleave(
        {"watched": lambda: run(callbacks={"regret": watch}), "plain": run, "steps": lambda: loop(start).particles},
        at_least=7,
        at_most=15,
    )
    per_round = {name: timing.each(ROUNDS) for name, timing in timings.items()}
    extra = {"µs_a_round": {name: round(1e3 * timing.median, 2) for name, timing in per_round.items()}}
    cost = per_round["watched"].median - per_round["plain"].median
    extra["watch / bare step"] = round(cost / per_round["steps"].median, 2)
    return Result(what, size, timings["watched"].median / timings["plain"].median, "", 2.0, per_round, extra)


def results() -> Iterator[Result]:
    """Return the results for online MAP and for particles."""
    target = opvi.linear_regression(FEATURES)
    cost = opvi.regret.quadratic(target, np.eye(FEATURES + 1), np.r_[np.ones(FEATURES), 0.0])
    descent = opvi.online_map(target, step=0.1)
    watch = opvi.regret.watch(target, cost)
    yield watched("regret of online MAP, watched / plain", "9 parameters, B=20", descent, 1, watch)
    flow = opvi.opvi(target, step=1e-4)
    tracking = opvi.regret.watch_conjugate(target)
    yield watched("distance to the posterior, watched / plain", "100 particles, B=20", flow, 100, tracking)
    yield watched("regret of particles, watched / plain", "100 particles, B=20", flow, 100, watch)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regret", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for regret.json")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    about, done = machine("python -m benchmarks.regret"), []
    for result in results():
        done.append(result.summary())
        print(
            f"{result.what:45s} {result.size:22s} {result.value:.2f} (target {result.target}) {result.extra}",
            flush=True,
        )
    report = {"machine": about, "results": done}
    (folder / "regret.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
