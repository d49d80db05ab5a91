"""`opvi learn` beside the bare compiled loop, what checkpoints cost, and a long run's memory and speed.

`python -m benchmarks.learning speed --task regression`
`python -m benchmarks.learning soak --rows 5000000`
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from benchmarks.machine import machine
from opvi.adapters._tables import Schema, open_source
from opvi.app.cli._common import prepare
from opvi.app.learn import Learner, RunDirectory, Settings
from opvi.app.learn._learner import BATCH, Stop
from opvi.app.learn._starting import Asked, ready
from opvi.running import Engine
from opvi.types import Sampler

COLUMNS = 10
TURNS = 3  # of the command and the bare loop
WARM = 256 * BATCH  # rows
READ_EVERY = 0.5  # seconds between two readings of the memory


def draw(rng: np.random.Generator, rows: int, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Ten columns; the last nine matter less and less."""
    x = rng.normal(size=(rows, COLUMNS)).astype(np.float32)
    f = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3:] @ (0.5 ** np.arange(COLUMNS - 3)).astype(np.float32)
    noisy = f + 0.5 * rng.normal(size=rows).astype(np.float32)
    return x, noisy if task == "regression" else (noisy > 0).astype(np.int32)


def write_table(file: Any, rows: int, task: str, block: int = 50_000) -> None:
    """A CSV of that many rows, written block by block."""
    rng = np.random.default_rng(0)
    labels = np.array(["no", "yes"])
    file.write(",".join([*(f"x{k}" for k in range(COLUMNS)), "y"]) + "\n")
    for start in range(0, rows, block):
        x, y = draw(rng, min(block, rows - start), task)
        shown = [f"{v:.5g}" for v in y] if task == "regression" else labels[y]
        file.writelines(
            ",".join(row) + "," + label + "\n" for row, label in zip(np.char.mod("%.5g", x), shown, strict=True)
        )


def learnt(table: Path, folder: Path, settings: Settings, save_every: float, show: Any) -> Learner:
    """Run the command in this process."""
    run = RunDirectory(folder)
    asked = Asked(str(table), target="y", settings=settings, save_every=save_every)
    stop = Stop()
    with run.checkpoints as kept:
        made = ready(run, kept, asked, stop)
        made.learner.learn(made.source, made.first, stop, show)
        made.source.close()
    return made.learner


class Clock:
    """Processor seconds from the end of the first chunk (after compilation) to the last."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, int]] = []

    def __call__(self, learner: Learner, share: float | None) -> None:
        self.marks.append((time.process_time(), learner.rows))

    def each(self) -> float:
        """Microseconds per row."""
        (first, before), (last, rows) = self.marks[0], self.marks[-1]
        return (last - first) / (rows - before) * 1e6


def encoded(table: Path, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    """The table's rows as arrays in memory."""
    with open_source(table) as source:
        parts = [schema.encode(block) for block in source.blocks()]
    return np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])


def bare(sampler: Sampler, x: np.ndarray, y: np.ndarray) -> float:
    """Microseconds of processor time per row of `opvi.run` over arrays in memory; nothing is scored, nothing saved."""
    first, rest = (
        opvi.stream((x[:WARM], y[:WARM]), batch_size=BATCH),
        opvi.stream((x[WARM:], y[WARM:]), batch_size=BATCH),
    )
    state, _ = opvi.run(sampler, first, key=0)  # compiled, and no longer warming up
    start = time.process_time()
    state, _ = opvi.run(sampler, rest, key=0, state=state)
    jax.block_until_ready(state)
    return (time.process_time() - start) / (len(y) - WARM) * 1e6


def speed(rows: int, task: str, hidden: tuple[int, ...] | None, work: Path) -> dict[str, Any]:
    """Time the command beside the bare loop of the same sampler over the same rows, in turns."""
    table, settings = work / "table.csv", Settings(hidden=hidden)
    with table.open("w") as file:
        write_table(file, rows, task)
    each: dict[str, list[float]] = {"learn": [], "bare": []}
    for turn in range(TURNS):
        clock = Clock()
        learner = learnt(table, work / f"run-{turn}", settings, 30.0, clock)
        each["learn"].append(clock.each())
        each["bare"].append(bare(learner.engine.sampler, *encoded(table, learner.schema)))
    return {
        "rows": rows,
        "task": task,
        "hidden": hidden,
        "learn, us of processor time per row": each["learn"],
        "bare loop, us of processor time per row": each["bare"],
        "learn / bare": float(np.median(each["learn"]) / np.median(each["bare"])),
        "checkpoints": learner.saves,
        "seconds per checkpoint": learner.pace.took,
    }


def late_over_early(learner: Learner, early: Any, repeats: int = 15) -> float:
    """Return a chunk's time from the last state over its time from an early one, timed in turns on a shared machine."""
    rows = draw(np.random.default_rng(1), WARM, "classification" if learner.schema.classes else "regression")
    last = learner.engine.state

    def seconds(state: Any) -> float:
        engine = Engine(learner.engine.sampler, 0, batch=BATCH, state=state)
        start = time.perf_counter()
        engine.feed(rows)
        return time.perf_counter() - start

    seconds(early)  # compiled
    return float(np.median([seconds(last) / seconds(early) for _ in range(repeats)]))


def resident() -> float:
    """Return the megabytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def soak(rows: int, task: str, hidden: tuple[int, ...] | None, work: Path) -> dict[str, Any]:
    """Rows through a pipe, so that no disk is filled; memory and speed in ten parts."""
    pipe = work / "rows.csv"
    os.mkfifo(pipe)

    # In a process of its own: what the writer holds is not the learner's.
    words = ["feed", "--rows", str(rows), "--task", task, "--out", str(pipe)]
    writer = subprocess.Popen([sys.executable, "-m", "benchmarks.learning", *words])
    readings: list[tuple[float, int, float, float]] = []
    early: list[Any] = []

    def show(learner: Learner, share: float | None) -> None:
        now = time.perf_counter()
        if not early and learner.rows > 0.1 * rows:
            early.append(jax.tree.map(jnp.copy, learner.engine.state))
        if not readings or now - readings[-1][0] > READ_EVERY:
            readings.append((now, learner.rows, resident(), time.process_time()))
            if len(readings) % 30 == 0:
                print(f"{learner.rows:,} rows, {readings[-1][2]:.0f} MB", file=sys.stderr, flush=True)

    learner = learnt(pipe, work / "run", Settings(hidden=hidden), 30.0, show)
    writer.wait()
    at = np.array(readings)
    warm = at[at[:, 1] > 0.1 * rows]  # a tenth of the rows to warm up
    parts = np.array_split(warm, 5)
    rates = [float((p[-1, 1] - p[0, 1]) / (p[-1, 0] - p[0, 0])) for p in parts]
    cpu = [float((p[-1, 1] - p[0, 1]) / (p[-1, 3] - p[0, 3])) for p in parts]
    memory = [float(np.median(p[:, 2])) for p in parts]
    return {
        "rows": learner.rows,
        "task": task,
        "hidden": hidden,
        "metrics": learner.metrics(),
        "megabytes, fifths after a tenth": memory,
        "growth of memory": memory[-1] / memory[0] - 1,
        "rows/s, fifths after a tenth": rates,
        "slowdown": 1 - rates[-1] / rates[0],
        "a chunk from the last state over one from a tenth": late_over_early(learner, early[0]),
        "rows per second of processor time": cpu,
        "finite": bool(np.isfinite(np.asarray(learner.engine.state.particles)).all()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("what", choices=("speed", "soak", "feed"), help="feed: write rows into a pipe")
    parser.add_argument("--rows", type=int, default=150_000)
    parser.add_argument("--task", choices=("regression", "classification"), default="classification")
    parser.add_argument("--linear", action="store_true", help="no hidden layer")
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for the results, or the pipe")
    options = parser.parse_args()
    if options.what == "feed":
        with options.out.open("w") as file:
            return write_table(file, options.rows, options.task)
    options.out.mkdir(parents=True, exist_ok=True)
    prepare()
    hidden = () if options.linear else None
    with tempfile.TemporaryDirectory() as folder:
        found = {"speed": speed, "soak": soak}[options.what](options.rows, options.task, hidden, Path(folder))
    name = f"learning-{options.what}-{options.task}{'-linear' if options.linear else ''}.json"
    content = {
        "command": "python -m benchmarks.learning " + " ".join(sys.argv[1:]),
        "machine": machine(),
        "result": found,
    }
    (options.out / name).write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
