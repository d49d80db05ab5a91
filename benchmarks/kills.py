"""A run of `opvi learn` killed again and again ends with the bits of an undisturbed run.

`python -m benchmarks.kills --rows 100000 --kills 50 --out bench-output`
"""

import argparse
import json
import os
import random
import signal
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

OPTIONS = ["--target", "y", "--save-every", "0.02"]


def write_table(path: Path, rows: int, seed: int = 0) -> None:
    """Numbers, a text, gaps, and now and then a row that breaks the schema."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3))
    colour = rng.choice(["red", "green", "blue"], rows)
    y = 3 * np.sin(x[:, 0]) + x[:, 1] + 2 * (colour == "red") + 0.3 * rng.normal(size=rows)
    with path.open("w") as file:
        file.write("a,b,c,colour,y\n")
        for i in range(rows):
            b = "" if i % 97 == 5 else f"{x[i, 1]:.5f}"
            c = "broken" if i % 1009 == 1008 else f"{x[i, 2]:.5f}"
            file.write(f"{x[i, 0]:.5f},{b},{c},{colour[i]},{y[i]:.5f}\n")


def start(table: Path, folder: Path, more: list[str], cache: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "opvi.app.cli",
        "learn",
        str(table),
        "--run",
        str(folder),
        "--resume",
        *OPTIONS,
        *more,
    ]
    # Programs are kept, so that a process that starts again need neither trace nor compile them again.
    environment = {**os.environ, "OPVI_PROGRAMS": str(cache)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"opvi learn ended with {process.returncode}: {errors.decode()[-2000:]}")


def result(table: Path, folder: Path) -> dict[str, Any]:
    """Return everything that must be equal: the last checkpoint, the rejected rows, the figures, predictions."""
    from opvi.adapters._tables import open_source
    from opvi.app.learn import RunDirectory, predict
    from opvi.app.learn._predict import learnt

    known = learnt(RunDirectory(folder))
    tree = {name: part for name, part in known.tree.items() if name != "saves"}
    with open_source(table) as source:
        predicted = [columns["mean"] for columns, _ in predict(known, source)]
    return {
        "tree": tree,
        "rejected": (folder / "rejected.jsonl").read_bytes(),
        "metrics": (folder / "metrics.json").read_bytes(),
        "predictions": np.concatenate(predicted),
    }


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Bit for bit."""
    texts = all(a[name] == b[name] for name in ("rejected", "metrics"))
    leaves = zip(
        jax.tree.leaves((a["tree"], a["predictions"])), jax.tree.leaves((b["tree"], b["predictions"])), strict=True
    )
    return texts and all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


def newest(folder: Path) -> str:
    return max((path.name for path in (folder / "checkpoints").glob("*.opvi")), default="")


def trial(
    table: Path, work: Path, kills: int, more: list[str], within: float = 0.3, seed: int = 0, cache: Path | None = None
) -> dict[str, Any]:
    """Compare an undisturbed run with one killed `kills` times, at random moments `within` seconds after a save."""
    whole, killed, cache = work / "whole", work / "killed", cache or work / "programs"
    finish(start(table, whole, more, cache))
    chance = random.Random(seed)
    done = early = 0
    while done < kills:
        process = start(table, killed, more, cache)
        before = newest(killed)
        # Some kills come while the process still starts; most once it has saved something new.
        wait = chance.random() < 0.9
        while wait and newest(killed) == before and process.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.random() * within)
        if process.poll() is not None:
            process.communicate()
            early += 1
            if early > 3:
                raise RuntimeError(f"the run ended after {done} kills: give it more rows.")
            continue
        process.send_signal(signal.SIGKILL)
        process.communicate()
        done += 1
    finish(start(table, killed, more, cache))
    return {"kills": done, "same_bits": same(result(table, whole), result(table, killed))}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--linear", action="store_true", help="no hidden layer")
    parser.add_argument("--name", default="kills", help="name of the results file")
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for it")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_table(work / "table.csv", options.rows)
        found = trial(work / "table.csv", work, options.kills, ["--hidden", "none"] if options.linear else [])
    found |= {"rows": options.rows, "opvi": opvi.__version__}
    print(found)
    path = options.out / f"{options.name}.json"
    path.write_text(
        json.dumps({"machine": machine(), "command": " ".join(sys.argv[1:]), "result": found}, indent=1) + "\n"
    )
    print(f"Written: {path}")
    sys.exit(not found["same_bits"])


if __name__ == "__main__":
    main()
