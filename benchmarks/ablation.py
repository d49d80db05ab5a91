"""What each part of the recommended models earns, by leaving it out: `python -m benchmarks.ablation`.

Every variant learns every stream of `ablation_streams` in one pass, in batches of 20 (River's row by row), and predicts
each batch before it learns it; tables with test rows are scored on those. Processor time is that of the second half of
the rows, without compiling. Trials are kept as they finish; the same command resumes. `--page docs/ablation.md` writes
the page, `--peers` adds River's forests and boosted trees refitted.

In Python: `run(lambda stream: opvi.regressor(stream.X.shape[1], levels=False), "clean tables", seeds=(0,))`.
"""

import argparse
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from benchmarks.ablation_streams import BATCH, FAMILIES, Stream
from benchmarks.machine import machine
from benchmarks.orders import timed
from benchmarks.parallel import finished, keep
from benchmarks.stamp import stamp

FILE = "ablation.json"
SOURCES = "src/opvi/tracking", "src/opvi/filters", "benchmarks/ablation.py", "benchmarks/ablation_streams.py"
SEEDS = 3
LEVEL = 0.9  # of intervals
SMALLEST = 1e-12  # probability, in a log loss
SLOW = ("whole elec2",)  # families that are measured only if they are named
DEFAULT = "default"
Scores = dict[str, float]
Factory = Callable[[Stream], opvi.Sampler | None]  # None: the variant is the default, on that stream


# Variants: a name, and how to make the model for a stream.


def maker(stream: Stream) -> Callable[..., Any]:
    """Return the recommended model's factory, for a stream's columns and classes."""
    features = stream.X.shape[1]
    return partial(opvi.classifier, features, stream.classes) if stream.classes else partial(opvi.regressor, features)


def recommended(stream: Stream, **settings: Any) -> opvi.Sampler | None:
    """Return the recommended model with the settings that it has; None if it has none of them."""
    make = maker(stream)
    known = {name: value for name, value in settings.items() if name in inspect.signature(make).parameters}
    return make(**known) if known or not settings else None


def without_expert(stream: Stream, name: str) -> opvi.Sampler | None:
    """Return the recommended model without an expert; None if it has no such expert."""
    make = maker(stream)
    experts = getattr(make(), "experts", ())
    kept = tuple(expert for expert in experts if named(expert) != name)
    return make(experts=kept) if kept and len(kept) < len(experts) else None


def named(expert: Any) -> str:
    """Return the name of an expert, of the one inside if it is wrapped."""
    return type(getattr(expert, "expert", expert)).__name__.lower()


def without_relevance(stream: Stream) -> opvi.Sampler | None:
    """Return the recommended model whose useless columns do not fade."""
    make = maker(stream)
    experts = getattr(make(), "experts", ())
    bare = tuple(getattr(expert, "expert", expert) for expert in experts)
    return make(experts=bare) if bare != tuple(experts) else None


def without_wrapper(stream: Stream, name: str) -> opvi.Sampler | None:
    """Return the recommended model without a wrapper around its stack; None if it has no such wrapper."""
    whole = maker(stream)()
    if name not in wrappers(getattr(whole, "model", None)):
        return None
    kind = stripped(type(whole))  # type: ignore[arg-type]  # a class is hashable
    return kind(**{one.name: getattr(whole, one.name) for one in fields(whole)}, part=name)


def wrappers(model: Any) -> list[str]:
    """Return the names of the wrappers around a stack, outermost first."""
    return [type(model).__name__.lower(), *wrappers(model.inner)] if hasattr(model, "inner") else []


@cache
def stripped(kind: Any) -> Any:
    """Return a kind of composition that leaves out the wrapper named in its field `part`."""

    @dataclass(frozen=True)
    class Stripped(kind):
        part: str = ""

        @cached_property
        def model(self) -> Any:
            return strip(kind.model.func(self), self.part)

    return Stripped


def strip(model: Any, part: str) -> Any:
    """Return a composition without one of its wrappers."""
    if type(model).__name__.lower() == part:
        return model.inner
    return replace(model, inner=strip(model.inner, part)) if hasattr(model, "inner") else model


SETTINGS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "no memory of rows": {"memory_rows": 0},
    "no warm-up": {"warm_up": 0},
    "nothing forgotten": {"half_life": math.inf},
    "4 networks": {"particles": 4},
    "networks of 50 units": {"hidden": (50,)},
    "linear models only": {"hidden": ()},
}
EXPERTS = "networks", "process", "linear", "neighbours", "levels"
WRAPPERS = "robust", "change"
VARIANTS: dict[str, Factory] = {
    **{name: partial(recommended, **settings) for name, settings in SETTINGS.items()},
    **{f"without {name}": partial(without_expert, name=name) for name in EXPERTS},
    **{f"without {name}": partial(without_wrapper, name=name) for name in WRAPPERS},
    "without relevance": without_relevance,
}


@cache
def made(variant: str, features: int, classes: int) -> opvi.Sampler | None:
    """Return a variant's model, made once per process: runs then share compiled programs."""
    nothing = np.zeros((1, features))
    return VARIANTS[variant](Stream(nothing, nothing[:, 0], nothing[:, 0], nothing[:, 0] > 0, classes=classes))


# One run.


def score(sampler: opvi.Sampler, stream: Stream, seed: int) -> Scores:
    """Return what a model's predictions are worth over a stream, and its processor time."""
    given = stream.X.astype(np.float32), stream.y.astype(np.int32 if stream.classes else np.float32)
    half = len(stream.y) // stream.batch // 2 * stream.batch
    parts, state = [], None
    with timed() as whole:
        for rows in (slice(half), slice(half, None)):
            batches = opvi.stream((given[0][rows], given[1][rows]), stream.batch)
            with timed() as later:
                state, history = opvi.run(sampler, batches, seed, state=state, record=said)
                jax.block_until_ready(state)
            parts.append(flat(history.record))
    predicted = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    kept = predicted.pop("weight") > 0
    predicted = {key: leaf[kept] for key, leaf in predicted.items()}
    found = of_classes(predicted, stream) if stream.classes else of_numbers(predicted, stream)
    for name, (X, y) in stream.tests.items():
        there = tested(sampler, state, X, y, stream)
        if name == "test":
            found = {**{f"{key}, before learning": value for key, value in found.items()}, **there}
        else:
            found |= {f"{key}, {name}": value for key, value in there.items()}
    found["ms per row"] = 1e3 * later.running / max(len(stream.y) - half, 1)
    found["compile seconds"], found["seconds"] = whole.compiling, whole.wall
    return found


def said(state: Any, info: Any, batch: opvi.Batch) -> dict[str, jax.Array]:
    """Return what was predicted of a batch before it was learnt."""
    named = info.predicted._asdict()
    return {"weight": batch.weight} | {key: value for key, value in named.items() if value is not None}


def flat(record: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return rounds of rows as rows."""
    return {key: np.asarray(leaf, float).reshape(-1, *leaf.shape[2:]) for key, leaf in record.items()}


def of_numbers(predicted: dict[str, np.ndarray], stream: Stream) -> Scores:
    """Return the errors of predicted numbers, beside the truth and in the stream's units."""
    error = ((predicted["mean"] - stream.truth) / stream.unit)[stream.scored]
    level = predicted["level"][stream.scored]
    inside = (level > (1 - LEVEL) / 2) & (level < (1 + LEVEL) / 2)
    density = predicted["log_density"][stream.scored]
    return {
        "rmse": float(np.sqrt((error**2).mean())),
        "log density": float(density.mean() + math.log(stream.unit)),
        "coverage": float(inside.mean()),
    }


def of_classes(predicted: dict[str, np.ndarray], stream: Stream) -> Scores:
    """Return accuracy and log loss of predicted probabilities, beside the right labels."""
    p, truth = predicted["probabilities"][stream.scored], stream.truth[stream.scored]
    chosen = np.clip(p[np.arange(len(truth)), truth], SMALLEST, 1.0)
    return {"accuracy": float((p.argmax(1) == truth).mean()), "log loss": float(-np.log(chosen).mean())}


def tested(sampler: opvi.Sampler, state: Any, X: np.ndarray, y: np.ndarray, stream: Stream) -> Scores:
    """Return the errors on rows that are not learnt."""
    predictive = sampler.predict(state, X.astype(np.float32))
    target = jnp.asarray(y, jnp.float32)
    low, high = (np.asarray(end, float) for end in predictive.interval(LEVEL))  # type: ignore[attr-defined]
    error = (np.asarray(predictive.mean(), float) - y) / stream.unit
    return {
        "rmse": float(np.sqrt((error**2).mean())),
        "log density": float(predictive.log_density(target).mean()) + math.log(stream.unit),
        "coverage": float(((low <= y) & (y <= high)).mean()),
    }


def run(model_factory: Factory, family: str, seeds: tuple[int, ...] = (0,)) -> dict[str, dict[int, Scores]]:
    """Return the scores of a model on every stream of a family, by stream and seed."""
    out: dict[str, dict[int, Scores]] = {}
    for name, make in FAMILIES[family].items():
        for seed in seeds:
            stream = make(seed)
            sampler = model_factory(stream)
            if sampler is not None:
                out.setdefault(name, {})[seed] = score(sampler, stream, seed)
    return out


def trial(variant: str, family: str, name: str, seed: int) -> Scores | None:
    """Return the scores of one run; None where the variant is the default."""
    stream = FAMILIES[family][name](seed)
    if variant in PEERS:
        from benchmarks import ablation_peers

        return ablation_peers.score(variant, stream, seed)
    sampler = made(variant, stream.X.shape[1], stream.classes)
    if sampler is None or (variant != DEFAULT and sampler == made(DEFAULT, stream.X.shape[1], stream.classes)):
        return None
    try:
        return score(sampler, stream, seed)
    except opvi.DivergedError:
        return {"rmse": math.inf, "log density": -math.inf, "log loss": math.inf}


PEERS = ("River's forest", "boosted trees, refitted")


# Tables.


def main_score(stream: dict[str, Scores]) -> tuple[str, float]:
    """Return the name of a stream's main score, of which less is better, and its mean over seeds."""
    key = "log loss" if any("log loss" in one for one in stream.values()) else "rmse"
    return key, float(np.mean([one.get(key, math.inf) for one in stream.values()]))


def density_of(one: Scores) -> float:
    """Return a mean log density; nan for peers, which have none."""
    return one.get("log density", math.nan)


def relative(results: dict, variant: str, family: str) -> tuple[float, float, float] | None:
    """Return a variant's error over the default's (geometric mean), nats lost per row, and its share of time."""
    ratios, nats, times = [], [], []
    for name, seeds in results.get(DEFAULT, {}).get(family, {}).items():
        other = results.get(variant, {}).get(family, {}).get(name, {})
        for seed, base in seeds.items():
            one = other.get(seed)
            if not one:  # where it is the default, it is as good
                one = base
            key = "log loss" if "log loss" in base else "rmse"
            ratios.append(math.log(max(one[key], 1e-9) / max(base[key], 1e-9)) if math.isfinite(one[key]) else 5.0)
            worse = one["log loss"] - base["log loss"] if key == "log loss" else base["log density"] - density_of(one)
            nats.append(min(worse, 10.0))
            times.append(math.log(max(one.get("ms per row", 1.0), 1e-4) / max(base["ms per row"], 1e-4)))
    if not ratios or not any(results.get(variant, {}).get(family, {}).values()):
        return None
    return float(np.exp(np.mean(ratios))), float(np.mean(nats)), float(np.exp(np.mean(times)))


def overview(results: dict) -> str:
    """Return a table of variants by families: error relative to the default's, and nats lost per row."""
    families = [family for family in FAMILIES if family in results.get(DEFAULT, {})]
    lines = ["| left out | " + " | ".join(families) + " | time |", "| --- |" + " --- |" * (len(families) + 1)]
    for variant in results:
        cells, times = [], []
        for family in families:
            found = None if variant == DEFAULT else relative(results, variant, family)
            cells.append("" if found is None else f"{found[0]:.3f} ({found[1]:+.3f})")
            times += [] if found is None else [found[2]]
        if variant != DEFAULT and times:
            lines.append(f"| {variant} | " + " | ".join(cells) + f" | {np.exp(np.mean(np.log(times))):.2f} |")
    return "\n".join(lines)


KEYS = ("rmse", "log density", "coverage", "accuracy", "log loss", "ms per row")


def details(results: dict, variant: str = DEFAULT) -> str:
    """Return a variant's scores on every stream, means over seeds."""
    lines = ["| family | stream | " + " | ".join(KEYS) + " | more |", "| --- | --- |" + " --- |" * (len(KEYS) + 1)]
    for family, streams in results.get(variant, {}).items():
        for name, seeds in streams.items():
            runs = [one for one in seeds.values() if one]
            if not runs:
                continue
            means = {key: float(np.mean([one.get(key, math.nan) for one in runs])) for key in runs[0]}
            more = ", ".join(
                f"{key} {value:.3g}" for key, value in means.items() if ", " in key and "before" not in key
            )
            cells = [f"{means[key]:.4g}" if key in means else "" for key in KEYS]
            lines.append(f"| {family} | {name} | " + " | ".join(cells) + f" | {more} |")
    return "\n".join(lines)


def page(results: dict, about: dict) -> str:
    """Return the page of the ablation."""
    return f"""# What each part earns

Every line leaves out one part of the recommended models and learns all streams again: RMSE or log loss over that of the
default (geometric mean over the family's streams and seeds; above 1, the part helps), in brackets the nats per row that
are lost, and in the last column the processor time that remains. An empty cell: the part is not there.

{overview(results)}

## The default, stream by stream

RMSE and log density are of test rows where a table has some, otherwise of rows before they are learnt. The streams are
in `benchmarks/ablation_streams.py`, the numbers in `docs/results/ablation.json` (`{about["command"]}`).

{details(results)}
"""


def main() -> None:
    """Measure, and write `ablation.json` and its page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for the results")
    parser.add_argument("--name", default=FILE, help="the file's name")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--families", nargs="+", default=[name for name in FAMILIES if name not in SLOW])
    parser.add_argument("--streams", nargs="+", help="streams by a part of their names")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed; settings are chosen on seeds from 5 on")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, each on one core")
    parser.add_argument("--peers", action="store_true", help="River's forest and boosted trees, too")
    parser.add_argument("--fresh", action="store_true", help="forget the runs that are in the file")
    parser.add_argument("--page", type=Path, help="write the page there, e.g. docs/ablation.md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / options.name
    results: dict[str, Any] = json.loads(file.read_text())["results"] if file.exists() and not options.fresh else {}
    tasks = [
        (variant, family, name, seed)
        for seed in range(options.first, options.first + options.seeds)
        for family in options.families
        for name in FAMILIES[family]
        for variant in [*options.variants, *(PEERS if options.peers else ())]
        if not options.streams or any(part in name for part in options.streams)
        if str(seed) not in results.get(variant, {}).get(family, {}).get(name, {})
    ]
    if options.jobs > 1:  # longest first
        tasks.sort(key=lambda task: (task[0] != DEFAULT, -len(FAMILIES[task[1]][task[2]](task[3]).y)))
    about = machine("python -m benchmarks.ablation")
    report = {"command": about["command"], "machine": about, "sources": stamp(*SOURCES)}
    each = ((task, trial(*task)) for task in tasks) if options.jobs == 1 else finished(trial, tasks, options.jobs)
    for (variant, family, name, seed), one in each:
        results.setdefault(variant, {}).setdefault(family, {}).setdefault(name, {})[str(seed)] = one
        if one:
            short = {key: round(one[key], 4) for key in KEYS if key in one}
            print(f"{variant}: {family}: {name}: {seed}:", short, flush=True)
        keep(file, {**report, "batch": BATCH, "results": results})
    print(overview(results), details(results), sep="\n\n")
    if options.page:
        options.page.write_text(page(results, about), encoding="utf-8")


if __name__ == "__main__":
    main()
