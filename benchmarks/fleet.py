"""What a fleet costs: rows per second by sampler, batch size and lanes, beside a loop over models, over its size."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from threadpoolctl import threadpool_limits

import opvi
from benchmarks.machine import machine
from benchmarks.measure import Result, Timing

MODELS, FEATURES, PARTICLES, SEED = 10_000, 9, 20, 0
TARGET_COST = 5.0  # µs per row: 200,000 rows per second
WIDE = ("SVGD", "OPVI", "Langevin")  # the others factorise matrices: one lane and one core at a time
SECONDS = 6.0  # for each line
ROUNDS = 5000  # filled by calls of one row, in each measurement
CALLS = {1: 200, 17: 50, 100: 20, MODELS: 1}  # of so many rows, in each measurement
LINEAR = opvi.linear_regression(FEATURES)
SAMPLERS: dict[str, tuple[Any, Any]] = {
    "SVGD": (opvi.svgd(LINEAR, step=0.01), PARTICLES),
    "OPVI": (opvi.opvi(LINEAR, step=0.01), PARTICLES),
    "Langevin": (opvi.langevin(LINEAR, step=0.01), PARTICLES),
    "linear_ekf, 2 classes": (opvi.linear_ekf(FEATURES, 2), None),
    "Gauss–Newton": (opvi.gauss_newton(LINEAR), PARTICLES),
    "gain_one": (opvi.gain_one(LINEAR), PARTICLES),
    "regressor, hidden=()": (opvi.regressor(FEATURES, hidden=(), particles=PARTICLES), None),
}


def arrivals(name: str, models: int, batch_size: int) -> tuple[np.ndarray, Any]:
    """Return a batch for each model, all rows in random order."""
    rng = np.random.default_rng(SEED)
    X = rng.standard_normal((models * batch_size, FEATURES)).astype(np.float32)
    y = X.sum(1) + rng.standard_normal(len(X)).astype(np.float32)
    ids = rng.permutation(np.arange(models).repeat(batch_size))
    return ids, (X, (y > 0).astype(np.int32) if "classes" in name else y)


def fleet(name: str, **settings: Any) -> opvi.Fleet:
    algorithm, particles = SAMPLERS[name]
    return opvi.Fleet(algorithm, SEED, particles=particles, **settings)


def repeat(call: Callable[[], Any], seconds: float = SECONDS) -> Timing:
    """Time a call: the first compiles and creates the models; at least 3 more follow."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 4 or (time.perf_counter() - begin < seconds and len(times) < 200):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return Timing(times[0], times[1:])


def learning(name: str, models: int, batch_size: int, target: float | None = None, **settings: Any) -> Result:
    """Microseconds per row, and how far the particles are from those of the same streams run alone."""
    made, (ids, data) = fleet(name, batch_size=batch_size, **settings), arrivals(name, models, batch_size)
    timing = repeat(lambda: made.learn(ids, data))
    rows = len(ids)
    cost = 1e3 * timing.median / rows
    done = 1 + len(timing.repeats)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(made.state(0)))
    extra = {
        "rows_a_second": 1e6 / cost,
        "rounds_a_second": 1e6 / cost / batch_size,
        "difference": max(difference(made, ids, data, done, model) for model in (0, models // 2, models - 1)),
        "state_bytes": size,
        "diverged": made.diverged,
    }
    about = f"{models:,} models, batch {batch_size}, " + ", ".join(f"{k} {v:,}" for k, v in settings.items())
    return Result(name, about, cost, "µs per row", target, {"learn": timing}, extra)


def difference(made: opvi.Fleet, ids: np.ndarray, data: Any, times: int, model: int) -> float:
    """Return the difference between a model's particles and those of its stream run alone."""
    mine = jax.tree.map(lambda leaf: leaf[ids == model], data)
    stream = opvi.stream(mine, made.batch_size, passes=times)
    state, _ = opvi.run(made.sampler, stream, made.key(model), state=made.start(model))
    return float(np.abs(np.asarray(state.particles) - np.asarray(made.state(model).particles)).max())


def by_sampler() -> Iterator[Result]:
    for name in SAMPLERS:
        for batch_size in (1, 20):
            for lanes in (1, 64) if name in WIDE else (1,):
                yield learning(name, MODELS, batch_size, TARGET_COST, lanes=lanes)


def by_size() -> Iterator[Result]:
    for models in (1, 10, 100, 1000, 10_000, 100_000):
        yield learning("SVGD", models, 20, lanes=1)


def beside_a_loop() -> Iterator[Result]:
    """One call of `learn` beside the compiled step called for each model in turn: the same states."""
    models, name = 1000, "SVGD"
    algorithm, _ = SAMPLERS[name]
    for batch_size in (1, 20):
        made, (ids, data) = fleet(name, batch_size=batch_size), arrivals(name, models, batch_size)
        order = np.argsort(ids, kind="stable").reshape(models, batch_size)
        keys = [made.key(model) for model in range(models)]
        states = [made.start(model) for model in range(models)]
        weight = np.ones(batch_size, np.float32)

        def loop(order: Any = order, keys: Any = keys, states: Any = states, data: Any = data, w: Any = weight) -> None:
            for model, rows in enumerate(order):
                batch = opvi.Batch(jax.tree.map(lambda leaf, rows=rows: leaf[rows], data), w)
                states[model], _ = algorithm.step(keys[model], states[model], batch)
            jax.block_until_ready(states)

        timings = {
            "fleet": repeat(lambda made=made, ids=ids, data=data: made.learn(ids, data), 3.0),
            "loop": repeat(loop, 3.0),
        }
        value = timings["loop"].median / timings["fleet"].median
        yield Result("fleet beside a loop", f"{models:,} models, batch {batch_size}", value, "×", None, timings)


def on_disk() -> Iterator[Result]:
    """Time calls with every model on disk, saves of all models and of a hundredth, and a load."""
    yield learning("SVGD", MODELS, 20, hot=MODELS // 10)
    with tempfile.TemporaryDirectory(prefix="opvi-fleet-") as folder:
        made, (ids, data) = fleet("SVGD", batch_size=20, path=Path(folder) / "fleet"), arrivals("SVGD", MODELS, 20)
        few = ids < MODELS // 100
        for what, rows in (("save", slice(None)), ("save 1 %", few), ("load", few)):
            times = []
            for _ in range(6):
                made.learn(ids[rows], jax.tree.map(lambda leaf, rows=rows: leaf[rows], data))
                start = time.perf_counter()
                if what == "load":
                    made.close()
                    made = fleet("SVGD", batch_size=20, path=Path(folder) / "fleet")
                    made.state(0)
                else:
                    made.save()
                times.append(1e3 * (time.perf_counter() - start))
            timing = Timing(times[0], times[1:])
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
            about = f"{MODELS:,} models"
            yield Result(what, about, timing.median, "ms", None, {what: timing}, {"bytes": size})


def one_row() -> Iterator[Result]:
    """Compare calls with one row, including the rounds they fill, to their share of a call with all rows."""
    rng = np.random.default_rng(SEED + 1)
    for batch_size in (1, 20):
        (ids, (X, y)), bulk = arrivals("OPVI", MODELS, batch_size), fleet("OPVI", batch_size=batch_size)
        made = fleet("OPVI", batch_size=batch_size)
        begun = np.repeat(np.arange(MODELS), 1 + np.arange(MODELS) % batch_size)  # batches that are not full alike
        made.learn(begun, (X[: len(begun)], y[: len(begun)]))
        count = ROUNDS * batch_size
        rows = [(X[row : row + 1], y[row : row + 1]) for row in range(count)]
        whose = {"50 models": np.resize(np.arange(50), count), "all models": rng.integers(MODELS, size=count)}
        calls = {what: [*zip(np.split(who, count), rows, strict=True)] for what, who in whose.items()}
        spent: dict[str, list[float]] = {what: [] for what in ("bulk", *calls)}
        walls: dict[str, list[float]] = {what: [] for what in ("bulk", *calls)}
        for what in 8 * ("bulk", *calls):
            used, began = time.process_time(), time.perf_counter()
            if what == "bulk":
                bulk.learn(ids, (X, y))
            else:
                for one in calls[what]:
                    made.learn(*one)
                made.waiting(0)  # the rows go to their records
            walls[what].append(1e3 * (time.perf_counter() - began))
            spent[what].append(time.process_time() - used)
        timings = {what: Timing(times[0], times[1:]) for what, times in walls.items()}
        bulk_wall = 1e3 * timings["bulk"].median / len(ids)
        bulk_processor = 1e6 * float(np.median(spent["bulk"][1:])) / len(ids)
        for what in calls:
            value, processor = 1e3 * timings[what].median / count, 1e6 * float(np.median(spent[what][1:])) / count
            extra = {
                "bulk_us": bulk_wall,
                "times_bulk": value / bulk_wall,
                "processor_us": processor,
                "bulk_processor_us": bulk_processor,
                "times_bulk_by_processor": processor / bulk_processor,
            }
            two = {"one": timings[what], "bulk": timings["bulk"]}
            yield Result("one row a call", f"batch {batch_size}, {what}", value, "µs per row", None, two, extra)


def some_rows() -> Iterator[Result]:
    """Compare calls with a few rows, each of another model, to their share of a call with a row of every model."""
    for name in ("OPVI", "Gauss–Newton"):
        made, (ids, (X, y)) = fleet(name, batch_size=1), arrivals(name, MODELS, 1)
        rows = {
            count: [(ids[some], X[some], y[some]) for some in np.resize(np.arange(MODELS), (calls, count))]
            for count, calls in CALLS.items()
        }
        made.learn(ids, (X, y))
        done: dict[str, Callable[..., Any]] = {
            "learn": lambda ids, X, y, made=made: made.learn(ids, (X, y)),
            "predict": lambda ids, X, y, made=made: jax.block_until_ready(made.predict(ids, X)),
        }
        for what, call in done.items():
            times: dict[int, list[float]] = {count: [] for count in CALLS}
            for count in 16 * list(CALLS):
                began = time.perf_counter()
                for some in rows[count]:
                    call(*some)
                times[count].append(1e3 * (time.perf_counter() - began) / CALLS[count])
            timings = {count: Timing(found[0], found[1:]) for count, found in times.items()}
            bulk = 1e3 * timings[MODELS].median / MODELS
            for count in list(CALLS)[:-1]:
                value = 1e3 * timings[count].median / count
                two = {"call": timings[count], "bulk": timings[MODELS]}
                extra = {"bulk_us": bulk, "times_bulk": value / bulk}
                rows_a_call = "1 row a call" if count == 1 else f"{count} rows a call"
                yield Result(f"{name}, {what}", rows_a_call, value, "µs per row", None, two, extra)


def table(results: list[dict[str, Any]]) -> str:
    """The samplers' lines, as the documentation shows them."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for result in results:
        if "lanes" in result["size"] and result["size"].startswith(f"{MODELS:,}") and result["target"]:
            _, batch_size, lanes = result["size"].split(", ")
            extra = result["extra"]
            row = cells.setdefault((result["what"], batch_size), {})
            row["bytes"] = f"{extra['state_bytes']:,}"
            row[lanes] = f"{extra['rows_a_second']:,.0f}"
            row[f"{lanes} difference"] = f"{extra['difference']:.0e}" if extra["difference"] else "0"
    lines = [
        "| sampler | rows per batch | bytes of a state | rows per second | with 64 lanes | difference "
        "| with 64 lanes |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    names = ("bytes", "lanes 1", "lanes 64", "lanes 1 difference", "lanes 64 difference")
    for (what, batch_size), row in cells.items():
        lines.append(f"| {what} | {batch_size.split()[1]} | " + " | ".join(row.get(name, "–") for name in names) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for fleet.json")
    parser.add_argument("--only", nargs="*", help="some of: by_sampler by_size beside_a_loop one_row some_rows on_disk")
    parser.add_argument("--name", default="fleet", help="of the JSON file")
    given = parser.parse_args()
    folder = given.out
    folder.mkdir(parents=True, exist_ok=True)
    threadpool_limits(limits=1)  # several threads are slower for matrices this small
    about, done = machine("python -m benchmarks.fleet"), []
    for source in (by_sampler, by_size, beside_a_loop, one_row, some_rows, on_disk):
        if given.only and source.__name__ not in given.only:
            continue
        for result in source():
            done.append({**result.summary(), "timings": {k: _short(t) for k, t in result.timings.items()}})
            met = {None: "", True: "(met)", False: "(missed)"}[result.met]
            extra = {key: round(value, 10) for key, value in result.extra.items()}
            print(f"{result.what:24s} {result.size:40s} {result.value:9.3g} {result.unit} {met} {extra}", flush=True)
    print(table(done))
    report = {"machine": about, "results": done}
    (folder / f"{given.name}.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


def _short(timing: Timing) -> dict[str, Any]:
    """Return the results without the repeats."""
    return {name: value for name, value in timing.summary().items() if name != "repeats"}


if __name__ == "__main__":
    main()
