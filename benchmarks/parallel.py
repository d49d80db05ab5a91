"""Measurements in several processes, each on one core, reported as they finish."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def pool(jobs: int) -> ProcessPoolExecutor:
    """Return processes that keep to a core each: JAX would start a thread for every core otherwise."""
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    spawned = get_context("spawn")
    return ProcessPoolExecutor(jobs, spawned, alone, (spawned.Value("i", 0),))


def alone(turn: Any) -> None:
    """Keep this process to the next core."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        with turn.get_lock():
            core, turn.value = cores[turn.value % len(cores)], turn.value + 1
        os.sched_setaffinity(0, {core})


def finished(function: Callable[..., Any], tasks: Iterable[tuple], jobs: int) -> Iterator[tuple[tuple, Any]]:
    """Yield tasks with what the function makes of them, in the order in which they finish; begin in that given.

    A task that fails does not keep the others from being made: all failures are named in the end.
    """
    failed = {}
    with pool(jobs) as processes:
        waiting = {processes.submit(function, *task): task for task in tasks}
        for future in as_completed(waiting):
            if error := future.exception():
                failed[waiting[future]] = error
            else:
                yield waiting[future], future.result()
    if failed:
        raise SystemExit("\n".join(f"{task}: {error!r}" for task, error in failed.items()))


def keep(file: Path, made: dict) -> None:
    """Write results so that a process killed meanwhile leaves those before."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(made, indent=1) + "\n")
    part.replace(file)
