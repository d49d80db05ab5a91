"""Ten million rows through one small model: does memory grow, does accuracy hold? `python -m benchmarks.endless`."""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import opvi
from benchmarks.machine import machine

CHUNK = 100_000
NOISE = 0.1


def rows(total: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pieces of a stream that is never in memory as a whole."""
    rng = np.random.default_rng(seed)
    for start in range(0, total, CHUNK):
        x = rng.standard_normal((min(CHUNK, total - start), 2), dtype=np.float32)
        y = np.tanh(x[:, 0]) + 0.5 * np.sin(2 * x[:, 1]) + NOISE * rng.standard_normal(len(x), dtype=np.float32)
        yield x, y.astype(np.float32)


def resident() -> float:
    """MB in use now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measure(name: str, total: int) -> dict[str, Any]:
    tracker = opvi.regressor(2, hidden=(8,), particles=10, half_life=None if name == "automatic" else 1e9)
    state, points, start = tracker.init(jax.random.key(0)), [], time.perf_counter()
    for done, (x, y) in enumerate(rows(total), 1):
        state, history = opvi.run(tracker, opvi.stream((x, y), 20), 0, state=state)
        sound = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
        points.append(
            {
                "rows": int(state.rows),
                "rmse": float(np.sqrt(np.mean(history.info.squared_error[1:]))),
                "log_predictive": float(np.mean(history.info.log_predictive[1:])),
                "resident_mb": resident(),
                "finite": sound,
            }
        )
        if sys.stderr.isatty() or done % 10 == 0:
            print(f"{name}: {points[-1]}", file=sys.stderr, flush=True)
    return {"points": points, "seconds": time.perf_counter() - start, "about": tracker.about}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endless", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=Path("bench-output"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    runs = {name: measure(name, options.rows) for name in ("automatic", "never forgets")}
    report = {"machine": machine("python -m benchmarks.endless"), "noise": NOISE, "runs": runs}
    path = options.out / "endless.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for name, run in runs.items():
        first, last = run["points"][1 if len(run["points"]) > 1 else 0], run["points"][-1]
        print(
            f"{name}: RMSE {first['rmse']:.4f} → {last['rmse']:.4f} (noise {NOISE}), memory "
            f"{first['resident_mb']:.0f} → {last['resident_mb']:.0f} MB; {last['rows']:,} rows, {run['seconds']:.0f} s"
        )


if __name__ == "__main__":
    main()
