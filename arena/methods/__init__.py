"""The methods: one line each here, and an adapter of at most 60 lines in a module next to this one.

An adapter module defines some of `regression(task, seed, **options)`, `classes(task, seed, **options)` and
`posterior(problem, seed, **options)`. The first two return an object with

- `predict(X)`: for numbers `forecasts.Numbers`, or bare points `[rows]`; for classes probabilities `[rows, classes]`;
- `learn(X, y)`;
- `state()`: what must be kept between rows; its pickled bytes are counted.

The third returns one with `learn(rows)`, `draws(n)` and `state()`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from arena.streams import Source

TABLES = ("regression", "classes")
LINKED = ("posterior: linear", "posterior: logistic")


class Task(NamedTuple):
    """What a method may know before the first row."""

    columns: int
    classes: int  # 0: y is a number
    batch: int
    rows: int  # of the whole stream; only the paper's OPVI uses it


class Entry(NamedTuple):
    """A method: its module, the kinds of streams it can play, and what it needs."""

    module: str
    kinds: tuple[str, ...]
    about: str
    options: dict[str, Any] = {}  # noqa: RUF012  # of a NamedTuple: never changed
    needs: tuple[str, ...] = ()
    most_columns: int = 10_000
    posteriors: tuple[str, ...] = ()  # the only ones that it can play; all if empty


METHODS: dict[str, Entry] = {
    "opvi": Entry("ours", (*TABLES, "posterior"), "`opvi.regressor`, `opvi.classifier`, `opvi.tracker` as they come"),
    "opvi, linear": Entry("ours", TABLES, "the same without hidden units", {"hidden": ()}),
    "OPVI, as in the paper": Entry(
        "paper_opvi",
        (*TABLES, "posterior"),
        "20 networks of 50 units, the paper's steps and schedules; knows the number of rows",
        posteriors=("posterior: mixture",),
    ),
    "adaptive forest": Entry("river_trees", TABLES, "River's ARF", {"kind": "ARF"}, ("river",), 200),
    "Mondrian forest": Entry("river_trees", TABLES, "River's AMF", {"kind": "AMF"}, ("river",), 200),
    "random patches": Entry("river_trees", TABLES, "River's SRP", {"kind": "SRP"}, ("river",), 60),
    "nearest neighbours": Entry("river_simple", TABLES, "River's, columns scaled", {"kind": "KNN"}, ("river",)),
    "linear, SGD": Entry("river_simple", TABLES, "River's, columns scaled", {"kind": "linear"}, ("river",)),
    "Bayesian linear": Entry(
        "river_bayes",
        ("regression", "posterior"),
        "River's, columns and targets scaled",
        needs=("river",),
        posteriors=("posterior: linear",),
    ),
    "LightGBM, refit": Entry("boosting", TABLES, "on all rows: at 100, 300 and every 1,000", {}, ("lightgbm",)),
    "Kalman, full": Entry(
        "full_filter",
        (*TABLES, "posterior"),
        "extended Kalman filter of a network of 20 units",
        most_columns=60,
        posteriors=LINKED,
    ),
    "Kalman, rank 10": Entry(
        "low_rank", (*TABLES, "posterior"), "LoFi (arXiv 2305.19535), network of 50 units", posteriors=LINKED
    ),
    "deep ensemble": Entry("ensemble", TABLES, "five networks of 50 units, Adam on every batch"),
    "NUTS, refit": Entry("nuts", ("posterior",), "on all rows at every look: the ceiling", {}, ("numpyro",)),
}


def missing(name: str) -> list[str]:
    """Return the libraries that a method needs but that are not installed."""
    return [library for library in METHODS[name].needs if find_spec(library) is None]


def plays(name: str, stream: str, source: Source) -> bool:
    """Return whether a method can run on a stream."""
    entry = METHODS[name]
    able = source.kind != "posterior" or not entry.posteriors or stream in entry.posteriors
    return able and source.kind in entry.kinds and source.columns <= entry.most_columns


def make(name: str, kind: str, task: Any, seed: int) -> Any:
    """Return a new player."""
    entry = METHODS[name]
    return getattr(import_module(f"arena.methods.{entry.module}"), kind)(task, seed, **entry.options)
