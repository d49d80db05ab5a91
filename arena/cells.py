"""One cell: a stream, a method, a seed. Every row is predicted before it is learnt; the result is a small JSON file."""

import json
import math
import os
import pickle
import time
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from arena import scores
from arena.forecasts import Band
from arena.methods import METHODS, Task, make
from arena.streams import STREAMS, Source, Stream, slug
from benchmarks.machine import machine

FIRST = 20  # rows that are learnt, but not scored: nobody knows their units
DRAWS = 1000  # from a posterior at every look


def sources() -> dict[str, Source]:
    """Return all streams by name; those with a posterior need JAX, so they are only described here."""
    from arena.posteriors import POSTERIORS

    return STREAMS | POSTERIORS


def path(folder: Path, stream: str, method: str, seed: int) -> Path:
    """Return where a cell is kept."""
    return folder / "cells" / f"{slug(stream)}--{slug(method)}--{seed}.json"


class Clock:
    """Processor seconds spent by the method, scoring excluded; the first answer is counted separately."""

    def __init__(self) -> None:
        self.total, self.first, self.rows = 0.0, 0.0, 0

    def spend(self, call: Any, *arguments: Any) -> Any:
        """Call a function, and count its processor time."""
        began = time.process_time()
        result = call(*arguments)
        self.total += time.process_time() - began
        return result

    def answered(self, rows: int) -> None:
        """Record the first informed answer, after this many rows."""
        if not self.first:
            self.first, self.rows = self.total, rows

    def per_row(self, rows: int) -> float:
        """Return milliseconds per row after the first answer; NaN if that was the last row."""
        return 1e3 * (self.total - self.first) / (rows - self.rows) if rows > self.rows else math.nan


def play_table(stream: Stream, method: str, seed: int) -> dict[str, Any]:
    """Return the measures of a pass over a table."""
    rows, kind = len(stream.y), "classes" if stream.classes else "regression"
    clock, band, learnt = Clock(), Band(), 0
    task = Task(stream.X.shape[1], stream.classes, stream.batch, rows)
    player = clock.spend(make, method, kind, task, seed)
    waiting: deque[tuple[slice, Any]] = deque()
    losses: list[dict[str, np.ndarray]] = []
    for start in range(0, rows, stream.batch):
        part = slice(start, min(start + stream.batch, rows))
        said = clock.spend(player.predict, stream.X[part])
        if learnt:
            clock.answered(part.stop)
        point = None
        if isinstance(said, np.ndarray) and not stream.classes:
            point, said = said if learnt else None, band.around(said)
        score = scores.class_losses if stream.classes else scores.number_losses
        losses.append(score(said, stream.y[part]))
        waiting.append((part, point))
        while waiting and waiting[0][0].stop + stream.delay <= part.stop:
            old, point = waiting.popleft()
            if not stream.classes:
                band.learn(point, stream.y[old])
            clock.spend(player.learn, stream.X[old], stream.y[old])
            learnt = old.stop
    joined = {name: np.concatenate([one[name] for one in losses]) for name in losses[0]}
    counted = np.arange(rows) >= FIRST + stream.delay
    if stream.garbage is not None:
        counted &= ~stream.garbage
    at, curve = scores.curve(joined["log"], counted)
    found = scores.summary(joined, counted, stream.changes)
    return _record(found, clock, rows, player, {"rows": at, "log score": curve})


def play_posterior(problem: Any, method: str, seed: int) -> dict[str, Any]:
    """Return the distance to the posterior at every checkpoint, and its mean."""
    import jax

    clock, rows = Clock(), len(jax.tree.leaves(problem.rows)[0])
    player = clock.spend(make, method, "posterior", problem, seed)
    found: list[float] = []
    for start in range(0, rows, problem.batch):
        stop = min(start + problem.batch, rows)
        clock.spend(player.learn, jax.tree.map(lambda a, part=slice(start, stop): a[part], problem.rows))
        if stop in problem.looks:
            draws = clock.spend(player.draws, DRAWS)
            clock.answered(stop)
            found.append(scores.distance(problem.view(draws), problem.exact(stop)))
    curve = {"rows": list(problem.looks), "distance": [round(value, 4) for value in found]}
    return _record({"distance": float(np.mean(found))}, clock, rows, player, curve)


def _record(found: dict[str, float], clock: Clock, rows: int, player: Any, curve: dict[str, Any]) -> dict[str, Any]:
    costs = {"ms per row": clock.per_row(rows), "first answer": clock.first}
    costs["bytes"] = float(len(pickle.dumps(player.state())))
    measures = {name: value if math.isfinite(value) else None for name, value in (found | costs).items()}
    return {"rows": rows, "seconds": clock.total, "measures": measures, "curve": curve}


def run(folder: str, stream: str, method: str, seeds: list[int], rows: int | None = None) -> list[str]:
    """Run the cells of a stream and a method, one file each; return the errors.

    Only the first cell in a process measures the time to the first answer, because it compiles the programs.
    """
    import_module(f"arena.methods.{METHODS[method].module}")  # before the clock
    source, wrong, cpu = sources()[stream], [], machine()["cpu"]
    for index, seed in enumerate(seeds):
        made = source.make(seed, min(rows or source.rows, source.rows))
        file = path(Path(folder), stream, method, seed)
        try:
            record = (play_posterior if source.kind == "posterior" else play_table)(made, method, seed)
        except Exception as error:  # a method that fails is a result, and must not end the others
            record = {"error": f"{type(error).__name__}: {error}"[:300]}
            wrong.append(f"{stream}, {method}, seed {seed}: {record['error']}")
        if index and "measures" in record:
            record["measures"]["first answer"] = None
        record = {"stream": stream, "method": method, "seed": seed, "cpu": cpu, **record}
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.tmp")
        partial.write_text(json.dumps(record) + "\n", encoding="utf-8")
        partial.replace(file)  # a cell is there as a whole, or not at all
    return wrong
