"""What rows remembered beside the networks cost, by the number of rows: `python -m benchmarks.neighbours`."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from benchmarks.machine import machine
from opvi.types import Batch, Sampler

COLUMNS, BATCH, ROUNDS = 10, 20, 50
KEPT = (0, 16_000, 65_536)
TARGET = 0.25  # ms per row that 16,000 rows may cost


def filled(tracker: Sampler, rows: int) -> tuple[Any, Batch]:
    """A state that has learnt a little, with all its places in use, and batches to learn."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(max(rows, BATCH * ROUNDS), COLUMNS)).astype(np.float32)
    y = (X[:, 0] > 0).astype(np.float32)
    state, _ = opvi.run(tracker, opvi.stream((X[: BATCH * ROUNDS], y[: BATCH * ROUNDS]), BATCH), 0)
    memory = state.memory  # type: ignore[attr-defined]
    if memory is not None:
        seen = jnp.asarray(rows, jnp.int32)
        kept = memory.all if hasattr(memory, "all") else memory
        room = len(kept.x)
        full = kept._replace(x=jnp.asarray(np.resize(X, (room, COLUMNS))), facts=jnp.ones_like(kept.facts))
        memory = memory._replace(all=full) if hasattr(memory, "all") else full
        state = state._replace(memory=memory._replace(seen=seen))  # type: ignore[attr-defined]
    batches = X[: BATCH * ROUNDS].reshape(ROUNDS, BATCH, COLUMNS), y[: BATCH * ROUNDS].reshape(ROUNDS, BATCH)
    return state, Batch(batches, np.ones((ROUNDS, BATCH), np.float32))


def cost(make: Callable[[int], Sampler], rows: int, repeats: int) -> dict[str, float]:
    """Milliseconds of processor time per row, and the size of the state."""
    tracker = make(rows)
    state, batches = filled(tracker, rows)

    def learn(state: Any, batches: Batch) -> Any:
        return jax.lax.scan(lambda s, b: (tracker.step(jax.random.key(0), s, b)[0], None), state, batches)[0]

    program = jax.jit(learn)
    jax.block_until_ready(program(state, batches))
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        jax.block_until_ready(program(state, batches))
        times.append(1e3 * (time.process_time() - begun) / (BATCH * ROUNDS))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(getattr(state, "memory", None)))
    return {"ms": statistics.median(times), "memory_mb": size / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neighbours", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[int], Sampler]] = {
        "regressor": lambda rows: opvi.regressor(COLUMNS, memory_rows=rows, warm_up=0),
        "classifier": lambda rows: opvi.classifier(COLUMNS, 2, memory_rows=rows),
    }
    results: dict[str, Any] = {}
    for name, make in makers.items():
        found = {rows: cost(make, rows, options.repeats) for rows in KEPT}
        plain = found[0]["ms"]
        results[name] = {
            "without_ms": plain,
            "rows": {str(rows): {**one, "more_ms": one["ms"] - plain} for rows, one in found.items() if rows},
        }
        for rows, one in found.items():
            print(
                f"{name}, {rows:,} rows: {one['ms']:.3f} ms per row ({one['ms'] - plain:+.3f}), "
                f"{one['memory_mb']:.1f} MB"
            )
    report = {
        "machine": machine("python -m benchmarks.neighbours"),
        "columns": COLUMNS,
        "batch": BATCH,
        "target_ms": TARGET,
        "results": results,
    }
    (options.out / "neighbours.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
