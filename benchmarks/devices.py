"""The default regressor on a CPU and on a GPU: `python -m benchmarks.devices`, on a machine that has both.

20,000 rows of a smooth function with noise, in batches of 20, then 2,000 rows to test on, the same on both devices,
each in a process of its own. Runs that round differently diverge; what must agree is how well they predict.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import opvi
from benchmarks.machine import machine

ROWS, TEST, BATCH, NOISE = 20_000, 2_000, 20, 0.1
PARTICLES = (20, 100)
FIRST = 1_000  # rows after which predictions are compared row by row, before rounding has had its say


def drawn() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    X = rng.normal(size=(ROWS + TEST, 8))
    y = np.sin(X[:, 0] + X[:, 1]) + 0.5 * X[:, 2] * np.tanh(X[:, 3]) + 0.3 * X[:, 4] + NOISE * rng.normal(size=len(X))
    return X.astype(np.float32), y.astype(np.float32)


def learnt(particles: int) -> dict[str, Any]:
    """Return RMSE and log density on the test rows, and the predictions for them after the first rows."""
    X, y = drawn()
    made = opvi.regressor(8, particles=particles)
    begun = time.perf_counter()
    first, _ = opvi.run(made, opvi.stream((X[:FIRST], y[:FIRST]), BATCH), 0)
    early = np.asarray(made.predict(first, X[ROWS:]).mean())
    state, _ = opvi.run(made, opvi.stream((X[FIRST:ROWS], y[FIRST:ROWS]), BATCH), 0, state=first)
    said = made.predict(state, X[ROWS:])
    return {
        "rmse": float(np.sqrt(np.mean((np.asarray(said.mean()) - y[ROWS:]) ** 2))),
        "log density": float(np.mean(said.log_density(jax.numpy.asarray(y[ROWS:])))),
        "seconds": time.perf_counter() - begun,
        "early": early.tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--one", action="store_true", help="print what this process's device says, and stop")
    args = parser.parse_args()
    if args.one:
        print(json.dumps({"device": jax.devices()[0].device_kind, **{str(n): learnt(n) for n in PARTICLES}}))
        return
    said = {}
    for name in ("cpu", "cuda"):
        output = subprocess.run(
            [sys.executable, "-m", "benchmarks.devices", "--one"],
            env={**os.environ, "JAX_PLATFORMS": name},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        said[name] = json.loads(output.splitlines()[-1])
    result: dict[str, Any] = {
        "command": "python -m benchmarks.devices",
        "machine": machine("python -m benchmarks.devices"),
        "rows": ROWS,
    }
    for n in map(str, PARTICLES):
        cpu, gpu = (np.asarray(said[name][n].pop("early")) for name in said)
        off = np.abs(cpu - gpu).max() / cpu.std()
        result[f"{n} particles"] = {
            **{said[name]["device"]: said[name][n] for name in said},
            "log densities differ by": abs(said["cpu"][n]["log density"] - said["cuda"][n]["log density"]),
            f"predictions after {FIRST} rows differ by, in sd": float(off),
        }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "devices.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
