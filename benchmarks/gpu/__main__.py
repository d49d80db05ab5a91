"""One GPU: a direction of SVGD beside the tiled form and a float64 reference, its memory, and rounds of a network.

`python -m benchmarks.gpu --out bench-output`
"""

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.measure import Result, interleave

# Particles, dimensions, and the milliseconds that a direction may take.
SIZES = [
    (131_072, 2, 10.0),
    (131_072, 8, 30.0),
    (131_072, 16, 30.0),
    (131_072, 32, None),
    (131_072, 64, 70.0),
    (32_768, 256, None),
    (16_384, 1_024, 9.0),
    (1_048_576, 2, 600.0),
]
LARGEST_ERROR = 1e-5
TILED_BLOCK = 2048  # the fastest of 512, 2,048 and 8,192 at (131,072, 16)
CHECKED = 64  # particles compared with float64
ROUNDS = 1000


def problem(n: int, d: int, shift: float) -> tuple[jax.Array, jax.Array]:
    """Draws of a standard Gaussian and its scores; `shift` 0 is equilibrium, where drift and repulsion cancel."""
    x = jax.random.normal(jax.random.key(n + d), (n, d))
    return x, shift - x


def direction(field: opvi.types.Field, x: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    value = field(x, scores)
    return value.drift + value.repulsion, value.bandwidth


def reference(x: jax.Array, scores: jax.Array, h: float) -> tuple[np.ndarray, np.ndarray]:
    """Drift and repulsion of the first particles in float64, one after another."""
    x, scores = (np.asarray(a, np.float64) for a in (x, scores))
    out = []
    for own in x[:CHECKED]:
        gap = own - x
        K = np.exp(-(gap**2).sum(1) / h)
        out.append((K @ scores / len(x), K @ gap * 2 / h / len(x)))
    drift, repulsion = zip(*out, strict=True)
    return np.array(drift), np.array(repulsion)


def error(value: jax.Array, truth: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(value[:CHECKED], np.float64) - truth) / np.linalg.norm(truth))


def directions() -> Iterator[Result]:
    forms = {"fused": opvi.flows.fields.svgd(), "tiled": opvi.flows.fields.svgd(block=TILED_BLOCK)}
    for n, d, limit in SIZES:
        calls = {name: jax.jit(partial(direction, field)) for name, field in forms.items()}
        extra: dict[str, Any] = {}
        for name, shift in (("equilibrium", 0.0), ("away", 0.3)):
            x, scores = problem(n, d, shift)
            found = {form: call(x, scores) for form, call in calls.items()}
            parts = reference(x, scores, float(found["fused"][1]))
            extra[name] = {form: error(value, sum(parts)) for form, (value, _) in found.items()}
            # What is left if both parts are exact and only rounded to float32, as any field must return them.
            extra[name]["rounded"] = error(sum(part.astype(np.float32).astype(float) for part in parts), sum(parts))
        memory = {form: call.lower(x, scores).compile().memory_analysis() for form, call in calls.items()}
        extra["temporary_megabytes"] = {form: used.temp_size_in_bytes / 1e6 for form, used in memory.items()}
        extra["errors_met"] = all(extra[name]["fused"] <= LARGEST_ERROR for name in ("equilibrium", "away"))
        timings = interleave({form: partial(call, x, scores) for form, call in calls.items()}, seconds=2, at_least=3)
        yield Result("a direction", f"n={n:,}, d={d}", timings["fused"].median, "ms", limit, timings, extra)


def network() -> Result:
    """A round of the first-order sampler on an MNIST-sized network, inside the loop that `run` compiles."""
    target = opvi.mlp(784, (100,), opvi.categorical(), outputs=10, activation=jnp.tanh, prior_variance=1.0)
    algorithm = opvi.tracking.first_order(target)
    rng = np.random.default_rng(0)
    X, y = rng.random((ROUNDS * 20, 784), dtype=np.float32), rng.integers(0, 10, ROUNDS * 20)
    batches = opvi.Batch(
        (jnp.asarray(X.reshape(ROUNDS, 20, 784)), jnp.asarray(y.reshape(ROUNDS, 20))), jnp.ones((ROUNDS, 20))
    )
    state = algorithm.init(jax.random.key(0), 20)

    @jax.jit
    def rounds(state: Any) -> Any:
        return jax.lax.scan(lambda s, b: (algorithm.step(jax.random.key(1), s, b)[0], None), state, batches)[
            0
        ].particles

    timing = interleave({"scan": partial(rounds, state)}, at_least=5, at_most=9)["scan"]
    each = timing.each(ROUNDS)
    extra = {"rounds_per_second": 1e3 / each.median, "parameters": target.dim}
    return Result(
        "a round, first order", "784-100-10, 20 particles, B=20", each.median, "ms", 0.5, {"scan": each}, extra
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for gpu.json")
    folder = parser.parse_args().out
    if jax.default_backend() != "gpu":
        raise SystemExit(
            f"JAX runs on {jax.default_backend()} here, but these benchmarks need a GPU: `pip install 'opvi[gpu]'`."
        )
    folder.mkdir(parents=True, exist_ok=True)
    about, done = machine("python -m benchmarks.gpu"), []
    about["device"] = jax.devices()[0].device_kind

    def results() -> Iterator[Result]:
        yield network()
        yield from directions()

    for result in results():
        done.append(result.summary())
        tiled = f", tiled {result.timings['tiled'].median:.4g}" if "tiled" in result.timings else ""
        limit = "" if result.target is None else f" (at most {result.target:g})"
        print(f"{result.what}, {result.size}: {result.value:.4g} {result.unit}{limit}{tiled}", result.extra, flush=True)
    (folder / "gpu.json").write_text(
        json.dumps({"machine": about, "results": done}, indent=1, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    main()
