"""False alarms in streams that do not change: `python -m benchmarks.alarms`.

The streams of `benchmarks.coverage` that stay as they are, 10,000 rows each, in batches of 20 and row by row, learnt by
the default regressor, which judges jumps itself, and by a watched classifier of whether y is above its median. An alarm
is a probability of a jump of more than 0.95.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np

import opvi
from benchmarks.coverage import COLUMNS, stream
from benchmarks.machine import machine
from benchmarks.stamp import stamp

STREAMS = ("still", "falling", "uneven", "heavy")
SEEDS, ROWS, BATCHES = (21, 22, 23, 24, 25), 10_000, {"regressor": (20, 1), "classifier": (20,)}
ALARM = 0.95
SOURCES = ("benchmarks/alarms.py", "src/opvi/tracking/_wrappers/_jumps.py", "src/opvi/tracking/_drift.py")


def alarms(task: str, kind: str, batch: int, seed: int) -> int:
    """Return the number of batches after which a jump was more probable than 0.95."""
    X, y = stream(kind, seed, ROWS)
    if task == "regressor":
        sampler: Any = opvi.regressor(COLUMNS)
    else:
        sampler, y = opvi.watched(opvi.classifier(COLUMNS, 2)), (y > np.median(y)).astype(np.int32)
    data = X.astype(np.float32), y.astype(np.float32) if task == "regressor" else y
    _, history = opvi.run(sampler, opvi.stream(data, batch), seed, record=_probability)
    return int((np.asarray(history.record) > ALARM).sum())


def _probability(state: Any, info: Any, batch: Any) -> jax.Array:
    return info.probability


def main() -> None:
    """Count the alarms of every stream."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    args = parser.parse_args()
    cases = [(task, kind, batch) for task, sizes in BATCHES.items() for batch in sizes for kind in STREAMS]
    results: dict[str, Any] = {}
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        waiting = {case: [pool.submit(alarms, *case, seed) for seed in SEEDS] for case in cases}
        for (task, kind, batch), jobs in waiting.items():
            found = results.setdefault(f"{task}, batches of {batch}", {"rows": 0, "alarms": 0, "by stream": {}})
            found["by stream"][kind] = [job.result() for job in jobs]
            found["rows"] += ROWS * len(jobs)
            found["alarms"] += sum(found["by stream"][kind])
            print(task, batch, kind, found["by stream"][kind], flush=True)
    command = "python -m benchmarks.alarms"
    about = {"command": command, "machine": machine(command), "sources": stamp(*SOURCES)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "alarms.json").write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
