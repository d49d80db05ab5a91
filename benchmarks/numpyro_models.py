"""Models in the style of NumPyro's examples, tracked row by row and compared with NUTS.

`python -m benchmarks.numpyro_models --out docs/results --jobs 16`. Means and sds of NUTS are kept in the results file,
and a run that only adds batches or seeds takes them from there. Limits of the diagnosis were set on seeds 0, 1, 10, 11.
"""

import argparse
import hashlib
import inspect
import json
import time
import warnings
from concurrent.futures import Future, as_completed
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam

import opvi
from benchmarks.numpyro_examples import MODELS
from benchmarks.parallel import keep, pool
from benchmarks.stamp import stamp

COMMAND = "python -m benchmarks.numpyro_models --out docs/results --batches {} --seeds {}"
SOURCES = (
    "src/opvi/filters",
    *(f"src/opvi/adapters/{name}.py" for name in ("numpyro", "_program", "_sites", "_local", "_choices", "_heads")),
    "benchmarks/numpyro_examples.py",
    "benchmarks/numpyro_models.py",
)
CHAINS, WARM_UP, SAMPLES, ACCEPTED = 4, 1000, 10000, 0.98
DRAWS = 12_800  # 32 of each chain; of 4,000, the sd of a parameter with heavy tails is off by 5 % by chance
LONG = 100.0  # seconds: seeds that take longer together run apart
NON_CENTRED = {"levels": {"level": LocScaleReparam(0)}}  # NUTS, too, is slow to explore a funnel
LOGARITHMS = {"horseshoe": ("own", "shared")}  # half-Cauchy scales have no mean
Seconds = dict[str, dict[str, float]]  # by model and batch
Moments = dict[str, dict[str, list[float]]]  # by site: mean and sd of every entry


def nuts(name: str, sites: list[str]) -> Moments:
    """Return the moments of a long run of NUTS on all rows."""
    model, rows = MODELS[name]
    if name in NON_CENTRED:
        model = reparam(model, config=NON_CENTRED[name])
    how = {"num_warmup": WARM_UP, "num_samples": SAMPLES, "num_chains": CHAINS, "chain_method": "vectorized"}
    chain = MCMC(NUTS(model, target_accept_prob=ACCEPTED), progress_bar=False, **how)
    chain.run(jax.random.key(0), *(rows if isinstance(rows, tuple) else (rows,)))
    found = chain.get_samples()
    return moments(flattened(name, {site: found[site] for site in sites}))


def moments(found: dict[str, np.ndarray]) -> Moments:
    """Return the means and sds of draws."""
    return {site: {"mean": draws.mean(0).tolist(), "sd": draws.std(0).tolist()} for site, draws in found.items()}


def flattened(name: str, found: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Return the draws of each site as a matrix; of scales without a mean, the logarithms."""
    flat = {site: np.asarray(value, float).reshape(len(value), -1) for site, value in found.items()}
    return {site: np.log(draws) if site in LOGARITHMS.get(name, ()) else draws for site, draws in flat.items()}


def mark(name: str) -> str:
    """Return a hash of a model's code and rows: moments of NUTS are kept as long as it stays the same."""
    model, rows = MODELS[name]
    text = (
        inspect.getsource(model)
        + f"{CHAINS} {WARM_UP} {SAMPLES} {ACCEPTED} {sorted(NON_CENTRED.get(name, {}))} {LOGARITHMS.get(name, ())}"
    )
    return hashlib.sha256(text.encode() + b"".join(leaf.tobytes() for leaf in jax.tree.leaves(rows))).hexdigest()[:16]


def errors(ours: Moments, exact: Moments) -> dict[str, float]:
    """Return how far draws are from those of NUTS, in the model's own units; entries that never vary are left out."""
    (mean, sd), (right, scale) = (
        [np.concatenate([found[site][key] for site in exact]) for key in ("mean", "sd")] for found in (ours, exact)
    )
    moving = scale > 1e-6
    off, ratio = (np.abs(mean - right) / scale)[moving], (sd / scale)[moving]
    return {"worst mean, sd": float(off.max()), "smallest sd": float(ratio.min()), "largest sd": float(ratio.max())}


@cache
def tracked(name: str) -> tuple[Any, Any]:
    """Return a model's target and tracker, made once per process: its runs then share their compiled programs."""
    model, rows = MODELS[name]
    target = opvi.from_numpyro(model, rows)
    return target, opvi.tracker(target)


class Run(NamedTuple):
    """What a tracker's draws are like, and what it says about itself."""

    found: Moments
    said: dict[str, float]


def trial(name: str, batch: int, seed: int) -> Run:
    """Track a model."""
    rows = MODELS[name][1]
    target, tracker = tracked(name)
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, _ = opvi.run(tracker, opvi.stream(rows, batch), seed)
    seconds = time.process_time() - begun
    found = target.constrain(tracker.draws(state, jax.random.key(seed), DRAWS))
    said = tracker.diagnosis(state)
    about = {"remembered": said.remembered, "lost": said.lost, "seconds": seconds}
    return Run(moments(flattened(name, found)), {"flagged": not said.right, **about})


class Task(NamedTuple):
    """Runs that one process makes in turn."""

    name: str
    batch: int
    seeds: tuple[int, ...]


def tasks(models: list[str], batches: list[int], seeds: list[int], done: dict[str, dict], took: Seconds) -> list[Task]:
    """Return the runs that are missing, longest first by what they took before; the seeds of long ones run apart."""
    found: dict[Task, float] = {}
    for name in models:
        for batch in batches:
            missing = tuple(seed for seed in seeds if str(seed) not in done.get(name, {}).get(str(batch), {}))
            start, run = expected(took.get(name, {}), batch)
            each = [(seed,) for seed in missing] if run * len(missing) > LONG else [missing]
            found |= {Task(name, batch, some): start + run * len(some) for some in each if some}
    return sorted(found, key=lambda task: -found[task])


def expected(took: dict[str, float], batch: int) -> tuple[float, float]:
    """Return the seconds that a model takes to compile, about those of its fastest run before, and those of a run."""
    start, longest = min(took.values(), default=LONG), max(took.values(), default=LONG / 2)
    by_rounds = max(((seconds - start) * int(other) / batch for other, seconds in took.items()), default=0.0)
    return start, took[str(batch)] - start if str(batch) in took else max(2 * longest - start, by_rounds)


def slowest(done: dict[str, dict]) -> Seconds:
    """Return how long the slowest run of each model and batch took: others may have found their programs compiled."""
    return {
        name: {batch: max(trial["seconds"] for trial in trials.values()) for batch, trials in by_batch.items()}
        for name, by_batch in done.items()
    }


def trials(task: Task) -> dict[str, Run]:
    """Return the runs of a task by seed."""
    return {str(seed): trial(task.name, task.batch, seed) for seed in task.seeds}


def reference(name: str) -> dict:
    """Return what NUTS finds for the sites of a model, and the mark of what it was found for."""
    sites = [site for site in tracked(name)[0].program.names if site != "root"]
    return {"mark": mark(name), "sites": nuts(name, sites)}


HEADER = ["model", "runs", "worst mean, sds off", "sds, ratio to NUTS", "near", "flagged", "others", "flagged"]


def table(done: dict[str, dict]) -> dict[str, list]:
    """Return a table of all runs: the worst error, how many were near NUTS, and how many of each kind were flagged."""
    rows, total = [], np.zeros(5, int)
    for name, by_batch in sorted(done.items()):
        runs = [trial for trials in by_batch.values() for trial in trials.values()]
        worst, least, most = (
            choose(trial[key] for trial in runs)
            for choose, key in ((max, "worst mean, sd"), (min, "smallest sd"), (max, "largest sd"))
        )
        kinds = [[trial["flagged"] for trial in runs if near(trial) == kind] for kind in (True, False)]
        counts = [len(runs), *(count for kind in kinds for count in (len(kind), sum(kind)))]
        total += counts
        rows.append([name, str(len(runs)), f"{worst:.2f}", f"{least:.2f}–{most:.2f}", *map(str, counts[1:])])
    rows.append(["all", str(total[0]), "", "", *map(str, total[1:])])
    return {"header": HEADER, "rows": rows}


def near(trial: dict) -> bool:
    """Whether every mean is within a tenth of an sd, and every sd within 8 %."""
    return trial["worst mean, sd"] <= 0.1 and trial["smallest sd"] >= 0.92 and trial["largest sd"] <= 1.08


def command(done: dict[str, dict]) -> str:
    """Return the command that makes these runs."""
    batches = sorted({int(batch) for by_batch in done.values() for batch in by_batch}, reverse=True)
    seeds = sorted({int(seed) for by_batch in done.values() for trials in by_batch.values() for seed in trials})
    return COMMAND.format(*(" ".join(map(str, numbers)) for numbers in (batches, seeds)))


def write(file: Path, done: dict[str, dict], references: dict[str, dict], took: Seconds) -> None:
    """Write what has been measured so far; `took` says how long earlier runs took."""
    made = {
        "command": command(done),
        "sources": stamp(*SOURCES),
        "tables": [table(done)],
        "results": done,
        "references": references,
        "seconds": {
            name: took.get(name, {}) | new for name, new in ({name: {} for name in took} | slowest(done)).items()
        },
    }
    keep(file, made)


def main() -> None:
    """Measure, and write `numpyro.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for numpyro.json")
    parser.add_argument("--batches", type=int, nargs="+", default=[20])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--again", action="store_true", help="measure runs that are in the file, too")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, each on one core")
    options = parser.parse_args()
    file = options.out / "numpyro.json"
    options.out.mkdir(parents=True, exist_ok=True)
    before = json.loads(file.read_text()) if file.exists() else {}
    done: dict[str, dict] = {} if options.again else before.get("results", {})
    references: dict[str, dict] = before.get("references", {})
    took = before.get("seconds") or slowest(before.get("results", {}))
    failed: dict[Any, BaseException] = {}
    found: dict[Task, dict[str, Run]] = {}
    lacking = {name for name in options.models if references.get(name, {}).get("mark") != mark(name)}
    with pool(options.jobs) as processes:
        waiting: dict[Future, Any] = {
            processes.submit(reference, name): name for name in options.models if name in lacking
        }
        for task in tasks(options.models, options.batches, options.seeds, done, took):
            waiting[processes.submit(trials, task)] = task
        for future in as_completed(waiting):
            what = waiting[future]
            if error := future.exception():
                failed[what] = error
            elif isinstance(what, Task):
                found[what] = future.result()
            else:
                references[what] = future.result()
                lacking.remove(what)
            for task in [task for task in found if task.name not in lacking]:
                exact, ours = references[task.name]["sites"], found.pop(task)
                compared = {seed: {**errors(run.found, exact), **run.said} for seed, run in ours.items()}
                done.setdefault(task.name, {}).setdefault(str(task.batch), {}).update(compared)
                print(task, compared, flush=True)
            write(file, done, references, took)
    if failed:
        raise SystemExit("\n".join(f"{what}: {error!r}" for what, error in failed.items()))


if __name__ == "__main__":
    main()
