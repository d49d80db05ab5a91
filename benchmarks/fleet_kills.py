"""Kill a learning fleet again and again: rows count once, bits stay the same. `python -m benchmarks.fleet_kills`."""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import opvi
from benchmarks.machine import machine

MODELS, SEED = 300, 0


def fleet(path: Path | None, hot: int) -> opvi.Fleet:
    sampler = opvi.opvi(opvi.linear_regression(4), step=0.01)
    return opvi.Fleet(sampler, SEED, path=path, batch_size=4, particles=5, hot=hot)


def stream(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(SEED)
    X = rng.standard_normal((rows, 4)).astype(np.float32)
    y = X.sum(1) + rng.standard_normal(rows).astype(np.float32)
    return (rng.pareto(0.5, rows) * 3).astype(int).clip(0, MODELS - 1), X, y


def learn(path: Path | None, rows: int, hot: int) -> opvi.Fleet:
    """Learn the stream from where the file's cursor stands, in calls of 1 to 60 rows, saving after each."""
    made, (ids, X, y) = fleet(path, hot), stream(rows)
    at = made.cursor or 0
    print(f"from {at}", flush=True)
    while at < rows:
        end = min(rows, at + 1 + at * 7919 % 60)
        made.learn(ids[at:end], (X[at:end], y[at:end]))
        if path is not None:
            made.save(cursor=end)
        at = end
    return made


def digest(made: opvi.Fleet) -> dict[str, Any]:
    """Return a hash of a fleet's bits, and how many rows were learnt or are waiting."""
    names = sorted(made.ids)
    states = [made.state(name) for name in names]
    bits = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(states)))
    rows = sum(int(state.rows) for state in states) + sum(made.waiting(name) for name in names)
    return {"models": len(names), "rows": rows, "sha256": bits.hexdigest()}


def killed(path: Path, rows: int, hot: int, kills: int) -> list[int]:
    """Learn in processes that are killed at random moments; return where each began."""
    rng, cursors = np.random.default_rng(1), []
    command = [
        sys.executable,
        "-m",
        "benchmarks.fleet_kills",
        "--child",
        str(path),
        "--rows",
        str(rows),
        "--hot",
        str(hot),
    ]
    for life in range(kills + 1):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            cursors.append(int(child.stdout.readline().split()[1]))
            if life < kills:
                time.sleep(rng.uniform(0.0, 0.6))
                child.kill()
        if child.returncode == 0 and life < kills:
            raise RuntimeError(f"the stream ended after {life} kills: give it more rows")
    return cursors


def compare(kills: int, rows: int, hot: int) -> dict[str, Any]:
    """Compare an undisturbed run in memory with one that was killed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fleet"
        cursors = killed(path, rows, hot, kills)
        with fleet(path, hot) as made:
            disturbed = {**digest(made), "cursor": made.cursor}
    calm = digest(learn(None, rows, 10**6))
    same = disturbed["sha256"] == calm["sha256"] and disturbed["rows"] == calm["rows"] == rows
    return {"kills": kills, "cursors": cursors, "disturbed": disturbed, "calm": calm, "same": same}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_kills", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for fleet-kills.json")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--hot", type=int, default=50)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        learn(given.child, given.rows, given.hot)
        return
    given.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine("python -m benchmarks.fleet_kills"), **compare(given.kills, given.rows, given.hot)}
    (given.out / "fleet-kills.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["disturbed"]), json.dumps(result["calm"]), "the same:", result["same"])


if __name__ == "__main__":
    main()
