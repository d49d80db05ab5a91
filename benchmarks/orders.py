"""How far are a sampler's draws from the exact posterior, whatever order the rows come in?

`python -m benchmarks.orders --out docs/results` runs every stream of `order_models` through `opvi.tracker` in batches
of 1, 20 and 100, and compares 1,000 draws with the references of `order_references`. Runs are kept as they finish; the
same command resumes. `python -m benchmarks.orders references` makes the references, `… peers` the figure beside others.

For another sampler: `measure(stream, batch, seed, lambda target, example: my_sampler(target), reference=…)`.
"""

import argparse
import inspect
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.stats import norm

import opvi
from benchmarks import order_references
from benchmarks.machine import machine
from benchmarks.order_models import FAMILIES, Family
from benchmarks.parallel import finished, keep
from benchmarks.stamp import stamp

FILE = "orders.json"
SOURCES = "src/opvi/filters", "src/opvi/tracking/_tracker.py", "benchmarks/order_models.py", "benchmarks/orders.py"
BATCHES, SEEDS, DRAWS = (1, 20, 100), 5, 1000
NEAR, SPREAD = 0.1, 0.05  # of a mean, in sds, and of an sd: what is asked for
COMPILED = 0.05  # share of a run: above, it is made again for its time
COMPILING = "/jax/core/compile/"
Factory = Callable[..., opvi.Sampler]


class Stream(NamedTuple):
    """A family's rows in one order."""

    family: str
    order: str

    @property
    def name(self) -> str:
        return f"{self.family}, {self.order}"


STREAMS = [Stream(name, order) for name, family in FAMILIES.items() for order in family.orders]


@dataclass(eq=False)
class Clock:
    """What a block took: wall and processor seconds, and when JAX traced and compiled in it."""

    wall: float = 0.0
    processor: float = 0.0
    compiled: list[tuple[float, float]] = field(default_factory=list)

    @property
    def compiling(self) -> float:
        """Seconds of tracing and compiling; traces within traces count once."""
        total, end = 0.0, -math.inf
        for begun, done in sorted(self.compiled):
            total += max(done - max(begun, end), 0.0)
            end = max(end, done)
        return total

    @property
    def running(self) -> float:
        """Processor seconds without those of compiling."""
        return max(self.processor - self.compiling, 0.0)


_clocks: list[Clock] = []


@cache
def _listen() -> None:
    """Hear from JAX when it compiles; once per process."""

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith(COMPILING) and event.endswith("_duration"):
            now = time.perf_counter()
            for clock in _clocks:
                clock.compiled.append((now - duration_secs, now))

    jax.monitoring.register_event_duration_secs_listener(heard)


@contextmanager
def timed() -> Iterator[Clock]:
    """Measure a block."""
    _listen()
    clock, wall, processor = Clock(), time.perf_counter(), time.process_time()
    _clocks.append(clock)
    try:
        yield clock
    finally:
        _clocks.remove(clock)
        clock.wall, clock.processor = time.perf_counter() - wall, time.process_time() - processor


def chance(dim: int, draws: int = DRAWS) -> float:
    """Return what the worst mean of independent, exact draws is off by in one run of a hundred, in sds."""
    return float(norm.isf((1 - 0.99 ** (1 / dim)) / 2) / math.sqrt(draws))


def errors(draws: np.ndarray, reference: dict[str, Any]) -> dict[str, float]:
    """Return how far draws are from a posterior, in its sds."""
    mean, sd = (np.asarray(reference[key]) for key in ("mean", "sd"))
    draws = np.asarray(draws, float)
    off, ratio = np.abs(draws.mean(0) - mean) / sd, draws.std(0) / sd
    return {
        "worst mean": float(off.max()),
        "rms mean": float(np.sqrt((off**2).mean())),
        "smallest sd": float(ratio.min()),
        "largest sd": float(ratio.max()),
    }


@cache
def default(family: str) -> opvi.Sampler:
    """Return the tracker of a family, made once per process."""
    made: Family = FAMILIES[family]
    return opvi.tracker(made.target, example=jax.tree.map(lambda leaf: leaf[:1], made.rows.data))


def sampler_of(family: str, factory: Factory | None) -> opvi.Sampler:
    if factory is None:
        return default(family)
    made: Family = FAMILIES[family]
    return factory(made.target, example=jax.tree.map(lambda leaf: leaf[:1], made.rows.data))


def measure(
    stream: Stream,
    batch: int,
    seed: int,
    factory: Factory | None = None,
    *,
    reference: dict[str, Any],
    draws: int = DRAWS,
) -> dict[str, Any]:
    """Run a sampler over a stream; return how far its draws are from the reference, what it took, and what it says."""
    sampler = sampler_of(stream.family, factory)
    rows = FAMILIES[stream.family].in_order(stream.order)
    count = len(jax.tree.leaves(rows)[0])
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with timed() as first:
            state, _ = opvi.run(sampler, opvi.stream(rows, batch), seed)
            jax.block_until_ready(state)
        learning = first
        if first.compiling > COMPILED * first.wall:  # what is left of it would be a guess
            with timed() as learning:
                jax.block_until_ready(opvi.run(sampler, opvi.stream(rows, batch), seed)[0])
        with timed() as drawing:
            found = np.asarray(sampler.draws(state, jax.random.key(seed), draws))  # type: ignore[attr-defined]
        diagnosis = getattr(sampler, "diagnosis", None)
        checked = diagnosis(state) if diagnosis else None
        log_evidence = evidence_of(sampler, state, seed)
    said = sorted({str(one.message) for one in caught})
    return {
        **errors(found, reference),
        "log evidence off": log_evidence - reference["log evidence"],
        "ms per row": 1e3 * learning.running / count,
        "compile seconds": first.compiling,
        "seconds": first.wall,
        "draw seconds": drawing.wall - drawing.compiling,
        "concerns": checked.concerns() if checked else None,
        "diagnosis": dict(numbers_of(checked)),
        "warnings": said,
    }


def evidence_of(sampler: opvi.Sampler, state: Any, seed: int) -> float:
    """Return a sampler's log evidence, nan if it has none; some estimate it from draws and take a key."""
    evidence = getattr(sampler, "log_evidence", None)
    if evidence is None:
        return math.nan
    return float(evidence(state, seed) if len(inspect.signature(evidence).parameters) > 1 else evidence(state))


def numbers_of(diagnosis: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a diagnosis."""
    for key, value in getattr(diagnosis, "_asdict", dict)().items():
        if np.ndim(value) == 0 and isinstance(value, int | float | np.generic):
            yield key, float(value)


def near(trial: dict[str, Any], dim: int) -> bool:
    """Whether draws are as near as is asked for, beside what chance does to so many."""
    wide = max(SPREAD, 3.3 / math.sqrt(2 * DRAWS) + 0.02)
    inside = trial["smallest sd"] >= 1 - wide and trial["largest sd"] <= 1 + wide
    return inside and trial["worst mean"] <= max(NEAR, chance(dim))


def told(trial: dict[str, Any]) -> bool:
    """Whether the sampler says that its draws are not the posterior."""
    return bool(trial["concerns"]) or bool(trial["warnings"])


HEADER = [
    "stream",
    "batch",
    "runs",
    "mean off, sd",
    "sds",
    "evidence off",
    "ms per row",
    "compile, s",
    "near",
    "flagged",
]


def table(results: dict[str, dict[str, dict[str, dict]]]) -> dict[str, list]:
    """Return the worst of all seeds, for every stream and batch."""
    rows = []
    for stream in STREAMS:
        dim = FAMILIES[stream.family].target.dim if stream.name in results else 0
        for batch, trials in results.get(stream.name, {}).items():
            runs = list(trials.values())
            evidence = max((abs(run["log evidence off"]) for run in runs), key=lambda off: (math.isnan(off), off))
            rows.append(
                [
                    stream.name,
                    batch,
                    str(len(runs)),
                    f"{max(run['worst mean'] for run in runs):.2f}",
                    f"{min(run['smallest sd'] for run in runs):.2f}–{max(run['largest sd'] for run in runs):.2f}",
                    "nan" if math.isnan(evidence) else f"{evidence:.2f}",
                    f"{np.median([run['ms per row'] for run in runs]):.2f}",
                    f"{max(run['compile seconds'] for run in runs):.1f}",
                    f"{sum(near(run, dim) for run in runs)}",
                    f"{sum(told(run) for run in runs)}",
                ]
            )
    return {"header": HEADER, "rows": rows}


def printed(made: dict[str, list]) -> str:
    """Return a table as Markdown."""
    lines = [made["header"], ["---"] * len(made["header"]), *made["rows"]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def trial(family: str, order: str, batch: int, seed: int, folder: str) -> dict[str, Any]:
    """Measure one run of the default tracker, in a process of its own."""
    reference = order_references.load(Path(folder))[family]
    return measure(Stream(family, order), batch, seed, reference=reference)


def wanted(options: argparse.Namespace) -> list[Stream]:
    """Return the streams that were asked for by a part of their name and by order."""
    chosen = [stream for stream in STREAMS if not options.orders or stream.order in options.orders]
    return [stream for stream in chosen if not options.only or any(part in stream.name for part in options.only)]


def compare(options: argparse.Namespace) -> None:
    """Measure the default tracker, and write `orders.json`."""
    file = options.out / FILE
    held = json.loads(file.read_text()) if file.exists() and not options.fresh else {}
    results: dict[str, dict] = held.get("results", {})
    references = order_references.load(options.references)
    missing = {stream.family for stream in wanted(options)} - set(references)
    if missing:
        raise SystemExit(f"no reference for {', '.join(sorted(missing))}: `python -m benchmarks.orders references`.")
    tasks = [
        (stream.family, stream.order, batch, seed, str(options.references))
        for stream in wanted(options)
        for batch in options.batches
        for seed in range(options.first, options.first + options.seeds)
        if str(seed) not in results.get(stream.name, {}).get(str(batch), {})
    ]
    if options.jobs > 1:  # longest first
        tasks.sort(key=lambda task: -len(FAMILIES[task[0]].rows.y) * (0.3 + 1 / task[2]))
    about = machine("python -m benchmarks.orders")
    made = ((task, trial(*task)) for task in tasks) if options.jobs == 1 else finished(trial, tasks, options.jobs)
    for (family, order, batch, seed, _), one in made:
        name = Stream(family, order).name
        results.setdefault(name, {}).setdefault(str(batch), {})[str(seed)] = one
        short = {key: round(one[key], 3) for key in ("worst mean", "smallest sd", "largest sd", "ms per row")}
        print(name, batch, seed, short, "flagged" if told(one) else "silent", flush=True)
        report = {"command": about["command"], "machine": about, "sources": stamp(*SOURCES)}
        keep(file, {**report, "tables": [table(results)], "results": results})
    chosen = {stream.name: results[stream.name] for stream in wanted(options) if stream.name in results}
    print(printed(table(chosen)))


def main() -> None:
    """Measure, and write `orders.json`, its references or the figure beside other methods."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orders", description=__doc__)
    parser.add_argument("what", nargs="?", default="tracker", choices=("tracker", "references", "peers"))
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for the results")
    parser.add_argument("--references", type=Path, default=Path("docs/results"), help="folder of the references")
    parser.add_argument("--only", action="append", help="streams by a part of their name; repeat")
    parser.add_argument("--orders", nargs="+", help="orders, e.g. 'by y'")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, each on one core")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are in the file")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.what == "references":
        names = [name for name in FAMILIES if not options.only or any(part in name for part in options.only)]
        order_references.make(options.references, names)
    elif options.what == "peers":
        from benchmarks import order_peers

        order_peers.compare(options)
    else:
        compare(options)


if __name__ == "__main__":
    main()
