"""Models in threads: do they end, with the same bits, and how fast are they? `python -m benchmarks.threads`.

`hangs` runs each case many times with 2 and 4 threads; before matrices were factored one at a time, networks by
`opvi.gauss_newton` never ended. `pairs` lets two models learn after each other and beside each other, in turn, and says
how many cores they kept busy. `soak` lets four threads learn and eight predict. Parts can be run alone: what is in
`threads.json` about the others is kept.
"""

import argparse
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import opvi
from benchmarks.machine import machine
from benchmarks.memory import resident_mb
from opvi.adapters.sklearn import OPVIRegressor
from opvi.predictive import Predictive
from opvi.running import Engine

PATIENCE = 300.0  # seconds without progress that count as a hang
ROWS = 640

_ended: list[float] = []  # seconds of threads that are no more


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a small regression."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 5))
    return X, np.sin(X[:, 0]) + X[:, 1] + rng.normal(size=rows) / 10


def cases() -> dict[str, Callable[[int], np.ndarray]]:
    """Return what used to hang, and similar cases: functions of a seed that learn and return particles."""
    X, y = data()

    def run(sampler: opvi.types.Sampler, size: int, **more: Any) -> Callable[[int], np.ndarray]:
        return lambda seed: np.asarray(opvi.run(sampler, opvi.stream((X, y), size), seed, **more)[0].particles)

    network = opvi.mlp(5, (10,), opvi.gaussian(0.5))
    return {
        "regressor, batches of 32": run(opvi.regressor(5), 32),
        "linear regressor, batches of 100": run(opvi.regressor(5, hidden=()), 100),
        "gauss_newton, 40 networks": run(opvi.gauss_newton(network), 32, particles=40),
        "kfac, 40 networks": run(opvi.kfac(network), 32, particles=40),
        "OPVIRegressor(n_particles=40)": lambda seed: np.asarray(
            OPVIRegressor(n_particles=40, random_state=seed).fit(X, y).state_.particles
        ),
    }


def hangs(runs: int, only: str | None) -> dict[str, Any]:
    """Run each case repeatedly in 2 and in 4 threads."""
    out = {}
    for name, case in cases().items():
        if only and only not in name:
            continue
        expected = [case(seed) for seed in range(4)]
        told: dict[str, Any] = {}
        for threads in (2, 4):
            same = 0
            for _ in range(runs):
                faulthandler.dump_traceback_later(PATIENCE, exit=True)  # a hang ends here, with all stacks
                found = _together([lambda seed=seed, case=case: case(seed) for seed in range(threads)])
                same += all(np.array_equal(a, b) for a, b in zip(found, expected, strict=False))
            told[f"{threads} threads"] = {"runs": runs, "hangs": 0, "same_bits": same}
        faulthandler.cancel_dump_traceback_later()
        out[name] = told
        print(name, told, flush=True)
    return out


def pairs(turns: int, only: str | None) -> dict[str, Any]:
    """Run two models one after the other and in parallel, in turn, so that both see the same load."""
    out = {}
    for name, case in cases().items():
        if only and only not in name:
            continue
        tasks = [lambda seed=seed, case=case: [case(seed) for _ in range(4)] for seed in range(2)]
        _together(tasks)
        after, beside = [], []
        for _ in range(turns):
            after.append(_busy(lambda tasks=tasks: [task() for task in tasks]))
            beside.append(_busy(lambda tasks=tasks: _together(tasks)))
        wall = [one.wall / two.wall for one, two in zip(after, beside, strict=True)]
        out[name] = {
            "turns": turns,
            "times_faster": _middle(wall),
            "times_faster_at_best": round(max(wall), 2),
            "cores_busy_after_each_other": _middle([one.spent / one.wall for one in after]),
            "cores_busy_beside_each_other": _middle([two.spent / two.wall for two in beside]),
            "threads_ready_after_each_other": _middle([one.ready / one.wall for one in after]),
            "threads_ready_beside_each_other": _middle([two.ready / two.wall for two in beside]),
            "processor_time_ratio": _middle([two.spent / one.spent for one, two in zip(after, beside, strict=True)]),
            "share_in_the_calling_thread": _middle([one.own / one.spent for one in after]),
        }
        print(name, out[name], flush=True)
    return {"load": os.getloadavg(), "cases": out}


class Busy(NamedTuple):
    """Wall-clock, processor and ready seconds."""

    wall: float
    spent: float  # of the processor
    own: float  # of the processor, in this thread
    ready: float  # in which threads ran or waited for a processor, summed: what an idle machine could run at once


def _busy(work: Callable[[], Any]) -> Busy:
    began = time.perf_counter(), time.process_time(), time.thread_time(), _ready()
    work()
    now = time.perf_counter(), time.process_time(), time.thread_time(), _ready()
    return Busy(*(b - a for a, b in zip(began, now, strict=True)))


def _ready(only: str = "") -> float:
    """Return the seconds in which threads ran or were ready to run, as counted by Linux; ended threads are included."""
    paths = [Path(only)] if only else [task / "schedstat" for task in Path("/proc/self/task").iterdir()]
    known = sum(sum(map(int, path.read_text().split()[:2])) for path in paths if path.exists()) / 1e9
    return known + (0.0 if only else sum(_ended))


def _middle(values: list[float]) -> float:
    return round(float(np.median(values)), 2)


def _together(tasks: list[Callable[[], Any]]) -> list[Any]:
    out: list[Any] = [None] * len(tasks)

    def work(place: int) -> None:
        out[place] = tasks[place]()
        _ended.append(_ready("/proc/thread-self/schedstat"))

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def soak(minutes: float) -> dict[str, Any]:
    """Let four threads learn a model each and eight predict, counting rows and watching memory."""
    X, y = data(2000)
    engines = [Engine(opvi.regressor(5, hidden=(10,), particles=4), seed) for seed in range(4)]
    stop, fed, asked, memory = threading.Event(), [0] * 4, [0] * 8, []

    def learn(place: int) -> None:
        while not stop.is_set():
            engines[place].feed((X, y))
            fed[place] += len(y)

    def read(place: int) -> None:
        while not stop.is_set():
            said = engines[place % 4].ask(np.ones((1500, 5)), Predictive.mean)
            assert (said == said[0]).all()
            asked[place] += 1
            time.sleep(0.01)

    for engine in engines:
        engine.feed((X, y))
    works = [lambda i=i: learn(i) for i in range(4)] + [lambda i=i: read(i) for i in range(8)]
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        before = sum(fed) + sum(asked)
        time.sleep(min(15.0, 6 * minutes))
        memory.append(round(resident_mb("VmRSS")))
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        assert sum(fed) + sum(asked) > before
    stop.set()
    for thread in threads:
        thread.join()
    faulthandler.cancel_dump_traceback_later()
    exact = [int(engine.state.rows) == rows + 2000 for engine, rows in zip(engines, fed, strict=True)]
    return {"minutes": minutes, "rows": fed, "rows_exact": all(exact), "questions": sum(asked), "memory_mb": memory}


def main() -> None:
    """Measure, and write `threads.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="of each case, with 2 and with 4 threads; 0: none")
    parser.add_argument("--turns", type=int, default=15, help="of two models after and beside each other; 0: none")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the soak; 0: none")
    parser.add_argument("--only", help="cases whose name holds this")
    parser.add_argument("--out", type=Path, help="folder for threads.json")
    options = parser.parse_args()
    path = options.out / "threads.json" if options.out else None
    found: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}
    parts: dict[str, tuple[float, Callable[[], dict[str, Any]]]] = {
        "hangs": (options.runs, lambda: hangs(options.runs, options.only)),
        "pairs": (options.turns, lambda: pairs(options.turns, options.only)),
        "soak": (options.minutes, lambda: soak(options.minutes)),
    }
    for name, (much, measure) in parts.items():
        if much:
            about = {**machine("python -m benchmarks.threads"), "jaxlib": jax.lib.__version__}
            found[name] = {"machine": about, "result": measure()}
            print(name, json.dumps(found[name]["result"]), flush=True)
            if path:
                path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
