"""The classifier out of the box: one pass, one setting for every stream, each batch predicted before it is learnt."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi.types import Array, Batch
from paper import data
from paper.results import Book, Check, Experiment, Record, Row, at_least, no_more_than, summary

BATCH = 20
SEEDS = 3
FIRST_SEED = 100  # the settings were found with smaller ones
COVERTYPE_ROWS = 100_000
POINTS = 50  # of a curve


class Stream(NamedTuple):
    """Rows in order, and rows to test on at the end, if any."""

    X: np.ndarray
    y: np.ndarray
    classes: int
    test: tuple[np.ndarray, np.ndarray] | None = None


class Wanted(NamedTuple):
    """The goals."""

    accuracy: float
    log_loss: float
    ece: float | None = None


WANTED = {
    "elec2": Wanted(0.853, 0.340),
    "covertype, natural order": Wanted(0.905, 0.240),
    "covertype, shuffled": Wanted(0.768, 0.552),
    "MNIST, 500 × 20 rows": Wanted(0.955, 0.153, 0.010),
    "MNIST, one pass": Wanted(0.981, 0.066),
}


# --- the streams ------------------------------------------------------------------------------


def _elec2(seed: int) -> Stream:
    X, y = data.elec2()
    return Stream(X.astype(np.float32), y, 2)


def _covertype(shuffled: bool, seed: int) -> Stream:
    X, y = data.covertype()
    order = np.random.default_rng(seed).permutation(len(y)) if shuffled else np.arange(len(y))
    rows = order[:COVERTYPE_ROWS]
    return Stream(X[rows].astype(np.float32), y[rows], 7)


def _mnist(rows: int, seed: int) -> Stream:
    source = data.mnist()
    order = np.random.default_rng(seed).permutation(len(source.y))[:rows]
    return Stream(source.X[order], source.y[order], 10, (source.X_test, source.y_test))


def _digits(seed: int) -> Stream:
    source = data.digits()
    return Stream(source.X[:200], source.y[:200], 10, (source.X_test, source.y_test))


STREAMS: dict[str, Callable[[int], Stream]] = {
    "elec2": _elec2,
    "covertype, natural order": partial(_covertype, False),
    "covertype, shuffled": partial(_covertype, True),
    "MNIST, 500 × 20 rows": partial(_mnist, 10_000),
    "MNIST, one pass": partial(_mnist, 60_000),
}


# --- one trial --------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=0)
def _pass(tracker: Any, key: Any, state: Any, X: Array, y: Array) -> tuple[Any, Array]:
    """Run all rounds; return the probabilities predicted for each batch before it was learnt."""

    def one(state: Any, rows: tuple[Array, Array]) -> tuple[Any, Array]:
        state, info = tracker.step(key, state, Batch(rows, jnp.ones(len(rows[1]))))
        return state, info.predicted.probabilities

    return jax.lax.scan(one, state, (X, y))


def prequential(tracker: opvi.types.Sampler, X: np.ndarray, y: np.ndarray, seed: int) -> tuple[Any, np.ndarray]:
    """Return the state after all full batches of 20 rows, and what was predicted for each row before learning it."""
    key = jax.random.key(seed)
    state = tracker.init(key)
    rounds = len(y) // BATCH
    out = []
    for begin in range(0, rounds, 500):
        rows = slice(begin * BATCH, min(begin + 500, rounds) * BATCH)
        batches = X[rows].reshape(-1, BATCH, X.shape[1]), y[rows].reshape(-1, BATCH)
        state, p = _pass(tracker, key, state, *map(jnp.asarray, batches))
        out.append(np.asarray(p).reshape(-1, p.shape[-1]))
    return state, np.concatenate(out)


def scores(p: np.ndarray, y: np.ndarray, bins: int = 15) -> dict[str, float]:
    """Return accuracy, mean log loss, and the gap between confidence and accuracy over bins of confidence."""
    y = y[: len(p)]
    confidence, right = p.max(1), p.argmax(1) == y
    index = np.minimum((confidence * bins).astype(int), bins - 1)
    gap = np.bincount(index, confidence - right, bins)
    return {
        "accuracy": float(right.mean()),
        "log_loss": float(-np.log(np.maximum(p[np.arange(len(y)), y], 1e-30)).mean()),
        "ece": float(np.abs(gap).sum() / len(y)),
    }


def trial(make: Callable[[int], Stream], index: int) -> Record:
    """Run one pass, scored on every batch before it is learnt, and on the test rows if there are any."""
    seed = FIRST_SEED + index
    stream = make(seed)
    tracker = opvi.classifier(stream.X.shape[1], stream.classes)
    begun = time.perf_counter()
    state, p = prequential(tracker, stream.X, stream.y, seed)
    seconds = time.perf_counter() - begun
    on_the_way = scores(p, stream.y)
    final = on_the_way
    if stream.test is not None:
        X, y = stream.test
        parts = np.array_split(X, max(1, len(X) // 2000))
        final = scores(np.concatenate([np.asarray(tracker.predict(state, x).probabilities()) for x in parts]), y)
    edges = np.linspace(0, len(p), POINTS + 1).astype(int)
    pieces = [scores(p[a:b], stream.y[a:b]) for a, b in itertools.pairwise(edges)]
    return {
        **final,
        "on_the_way": on_the_way,
        "last_label_repeated": _repeated(stream.y),
        "weights": np.exp(np.asarray(state.log_weights)),
        "exponents": np.asarray(state.exponents.value),
        "rows": int(state.rows),
        "seconds": seconds,
        "curve": {"rows": edges[1:], "log_loss": [piece["log_loss"] for piece in pieces]},
    }


def _repeated(y: np.ndarray) -> float:
    """Return the accuracy of repeating the last label of the previous batch for a whole batch."""
    batches = y[: len(y) // BATCH * BATCH].reshape(-1, BATCH)
    return float((batches[1:] == batches[:-1, -1:]).mean())


# --- the experiment ---------------------------------------------------------------------------


def experiment(smoke: bool = False) -> Experiment:
    """The table of the classifier."""
    streams: dict[str, Callable[[int], Stream]] = {"digits": _digits} if smoke else STREAMS
    return Experiment(
        "classification" + ("-smoke" if smoke else ""),
        "Classification out of the box: one pass, batches of 20, each predicted before it is learnt",
        {
            "tracker": "opvi.classifier(features, classes)",
            "batch": BATCH,
            "scored": "on every batch before it is learnt; MNIST on its test set at the end",
            "first_seed": FIRST_SEED,
            "smoke": smoke,
        },
        [Row(name, {}, partial(trial, make)) for name, make in streams.items()],
        1 if smoke else SEEDS,
        ["stream", "accuracy", "log loss", "ECE", "last label repeated", "ms per row"],
        _line,
        (lambda book: []) if smoke else _checks,
        _draw,
    )


def _line(name: str, records: list[Record]) -> list[str]:
    per_row = float(np.median([record["seconds"] / record["rows"] for record in records])) * 1e3
    return [
        summary(records, "accuracy").text(4),
        summary(records, "log_loss").text(4),
        summary(records, "ece").text(4),
        f"{summary(records, 'last_label_repeated').mean:.3f}",
        f"{per_row:.2f}",
    ]


def _checks(book: Book) -> list[Check]:
    out = []
    for name, wanted in WANTED.items():
        records = book.records(name)
        if not records:
            continue
        out.append(at_least(f"{name}: accuracy", summary(records, "accuracy").mean, wanted.accuracy))
        out.append(no_more_than(f"{name}: log loss", summary(records, "log_loss").mean, wanted.log_loss))
        if wanted.ece is not None:
            out.append(no_more_than(f"{name}: ECE", summary(records, "ece").mean, wanted.ece))
    return out


def _draw(book: Book, _: Path) -> Any:
    """Log loss along each stream."""
    import matplotlib.pyplot as plt

    from paper import plots

    names = list(book.content["rows"])
    with plots.style():
        figure, axes = plt.subplots(1, len(names), figsize=(2.6 * len(names) + 0.6, 2.8), squeeze=False)
        for ax, name, colour in zip(axes[0], names, plots.COLOURS, strict=False):
            for record in book.records(name):
                ax.plot(np.asarray(record["curve"]["rows"]), record["curve"]["log_loss"], color=colour, lw=1.2)
            ax.set(title=name, xlabel="rows", ylim=(0, None))
            ax.grid(color="#DDDDDD")
        axes[0, 0].set_ylabel("log loss before learning")
        figure.tight_layout()
        return figure
