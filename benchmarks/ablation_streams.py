"""Families of streams on which the parts of the recommended models earn their rent, for `benchmarks.ablation`."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from paper import data

BATCH = 20
LONGEST = 5000  # rows of a table
BEGIN = 20  # predictions before are not scored
NONE, GLITCH = -999.0, 30.0
Arrays = tuple[np.ndarray, np.ndarray]


class Stream(NamedTuple):
    """Rows as a model gets them, and what its predictions are compared with."""

    X: np.ndarray
    y: np.ndarray
    truth: np.ndarray  # y without garbage
    scored: np.ndarray  # which predictions before learning count
    tests: Mapping[str, Arrays] = MappingProxyType(
        {}
    )  # scored after all rows, instead of them if there is one named `test`
    classes: int = 0  # 0: numbers
    batch: int = BATCH
    unit: float = 1.0  # errors are divided by it


Make = Callable[[int], Stream]


def plain(X: np.ndarray, y: np.ndarray, classes: int = 0, **rest: object) -> Stream:
    """Return a stream without garbage; every row is scored except the first."""
    return Stream(X, y, y, np.arange(len(y)) >= BEGIN, classes=classes, **rest)  # type: ignore[arg-type]


# Clean tables. A split's training rows are learnt in their order, its test rows scored.


def table(name: str, split: int) -> Stream:
    """Return a split of a regression table, of at most 5,000 training rows."""
    X, y, X_test, y_test = data.uci_split(name, split)
    return plain(X[:LONGEST], y[:LONGEST], tests={"test": (X_test, y_test)})


def first_rows(name: str, split: int) -> Stream:
    """Return the first 500 training rows, predicted before they are learnt."""
    X, y = data.uci_split(name, split)[:2]
    return plain(X[:500], y[:500])


def smooth(seed: int) -> Stream:
    """Return a smooth function that varies by .01 around 1, with noise of a thousandth of its sd."""
    rng = np.random.default_rng([401, seed])
    X = rng.normal(size=(5000, 4))
    f = np.sin(X[:, 0] + 0.5 * X[:, 1]) + 0.3 * X[:, 2] ** 2
    y = 1 + 0.01 * (f / f.std() + 1e-3 * rng.normal(size=len(f)))
    return plain(X[:4000], y[:4000], tests={"test": (X[4000:], y[4000:])}, unit=0.01)


TABLES = {
    "kin8nm": "kin8nm",
    "protein": "protein-tertiary-structure",
    "concrete": "concrete",
    "boston": "bostonHousing",
    "yacht": "yacht",
}


# Useless and useful columns.


def friedman(rng: np.random.Generator, rows: int, columns: int = 5) -> Arrays:
    """Return Friedman's first function."""
    X = rng.uniform(size=(rows, columns))
    return X, friedman_of(X) + rng.normal(size=rows)


def friedman_of(X: np.ndarray) -> np.ndarray:
    return 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]


def noisy(seed: int, name: str = "", count: int = 10) -> Stream:
    """Return a table, or Friedman's function, with columns of noise."""
    rng = np.random.default_rng([402, seed])
    if name:
        made = table(name, seed)
        X_test, y_test = made.tests["test"]
        X, X_test = (np.column_stack([X, rng.normal(size=(len(X), count))]) for X in (made.X, X_test))
        return made._replace(X=X, tests={"test": (X_test, y_test)})
    X, y = friedman(rng, 4000)
    return plain(np.column_stack([X, rng.normal(size=(len(X), count))]), y)


def dated(seed: int) -> Stream:
    """Return demand by the weather, with the date as days since 1970: seasons, a weekly rhythm and a trend."""
    rng = np.random.default_rng([403, seed])
    rows = 5000
    hours = np.arange(rows) * 900 * 24 / rows
    year, day = 2 * np.pi * hours / 24 / 365.25, 2 * np.pi * (hours % 24) / 24
    weather = 10 - 10 * np.cos(year) + 4 * np.sin(day) + rng.normal(0, 3, rows)
    rest = (hours // 24 % 7 >= 5).astype(float)
    y = 50 + 0.1 * (weather - 15) ** 2 - 8 * rest + 5 * np.cos(year + 1) + 4 * np.sin(day) + hours / 24 / 90
    y = y + rng.normal(size=rows)
    return plain(np.column_stack([weather, rest, np.sin(day), np.cos(day), 18_000 + hours / 24]), y)


def identified(seed: int) -> Stream:
    """Return rows with an ID among 200 whose effects know no order, and a number that rises with gaps."""
    rng = np.random.default_rng([404, seed])
    rows = 4000
    which = rng.integers(0, 200, rows)
    X = rng.normal(size=(rows, 4))
    y = X[:, 0] + np.sin(2 * X[:, 1]) + 1.5 * rng.normal(size=200)[which] + 0.3 * rng.normal(size=rows)
    rising = 70_000 + np.cumsum(rng.integers(1, 5, rows))
    return plain(np.column_stack([X, which * 7919 % 1000, rising]), y)


# Drift and jumps.


def drifting(seed: int) -> Stream:
    """Return a function whose weights wander."""
    rng = np.random.default_rng([405, seed])
    rows = 6000
    X = rng.normal(size=(rows, 5))
    w = np.cumsum(rng.normal(size=(rows, 5)) * 0.02, 0) + rng.normal(size=5)
    y = 2 * np.tanh((X * w).sum(1) / 2) + (X * w[:, ::-1]).sum(1) + 0.3 * rng.normal(size=rows)
    return plain(X, y)


def jumping(level: float, scale: float, places: bool, seed: int) -> Stream:
    """Return Friedman's function, whose level, scale or columns jump half-way; the rows after the jump count."""
    rng = np.random.default_rng([406, seed])
    rows = 4000
    X = rng.uniform(size=(rows, 8))
    after = np.arange(rows) >= rows // 2
    f = friedman_of(np.where(after[:, None], X[:, ::-1], X) if places else X) + rng.normal(size=rows)
    y = np.where(after, f * scale + level * f.std(), f)
    scored = (np.arange(rows) >= rows // 2 + 100) & (np.arange(rows) < rows // 2 + 1100)
    return Stream(X, y, y, scored, unit=scale)


# Garbage.


def wrong_targets(name: str, share: float, size: float, split: int) -> Stream:
    """Return a table some of whose targets are so many sds off; its test rows are clean."""
    made = table(name, split)
    rng = np.random.default_rng([407, split])
    bad = rng.random(len(made.y)) < share
    y = made.y + np.where(bad, rng.choice([-1.0, 1.0], len(bad)) * size * made.y.std(), 0.0)
    return made._replace(y=y, scored=made.scored & ~bad)


def wrong_columns(kind: str, seed: int) -> Stream:
    """Return Friedman's function with 1 % of all entries -999, or 30 times what they are; clean rows count."""
    rng = np.random.default_rng([408, seed])
    X, y = friedman(rng, 4000, 8)
    X = X - 0.5
    bad = rng.random(X.shape) < 0.01
    dirty = np.where(bad, NONE if kind == "none" else GLITCH * X, X)
    scored = ~bad.any(1) & (np.arange(len(y)) >= 200)
    return Stream(dirty, y, y, scored)


# Far outside of what was seen.


def far(seed: int, curved: bool = False) -> Stream:
    """Return y = x1 + bounded noise; one row in 200 has x1 between 3 and 30 sds. Errors count in sds of the noise."""
    rng = np.random.default_rng([409, seed])

    def rows(count: int, x1: np.ndarray) -> Arrays:
        X = rng.normal(size=(count, 6))
        X[:, 0] = x1
        y = x1 + rng.uniform(-1, 1, count) * 0.3 * np.sqrt(3)
        return X, y + (np.sin(2 * X[:, 1]) if curved else 0.0)

    usual = rng.normal(size=5000)
    X, y = rows(5000, np.where(rng.random(5000) < 0.005, rng.uniform(3, 30, 5000), usual))
    tests = {
        "test": rows(500, rng.normal(size=500)),
        "beyond 10 sds": rows(500, rng.uniform(10, 30, 500)),
        "at 30 sds": rows(200, np.full(200, 30.0)),
    }
    return plain(X, y, tests=tests, unit=0.3)


# Classes.


def elec2(rows: int, wrong: float, seed: int) -> Stream:
    """Return an electricity market in order; some labels are wrong."""
    X, y = data.elec2()
    return mislabelled(X[:rows], y[:rows], 2, wrong, seed)


def covertype(rows: int, wrong: float, seed: int, none: float = 0.0) -> Stream:
    """Return patches of forest in order; some labels are wrong, or some numbers -999."""
    X, y = data.covertype()
    made = mislabelled(X[:rows].astype(float), y[:rows], 7, wrong, seed)
    bad = np.random.default_rng([410, seed]).random((rows, 10)) < none
    X = made.X.copy()
    X[:, :10] = np.where(bad, NONE, X[:, :10])
    return made._replace(X=X, scored=made.scored & ~bad.any(1))


def digits(rows: int, seed: int) -> Stream:
    """Return the first images of MNIST."""
    made = data.mnist()
    return plain(made.X[:rows], made.y[:rows], 10)


def mislabelled(X: np.ndarray, y: np.ndarray, classes: int, wrong: float, seed: int) -> Stream:
    """Return a stream whose labels are wrong with a probability; predictions are compared with the right ones."""
    rng = np.random.default_rng([411, seed])
    bad = rng.random(len(y)) < wrong
    given = np.where(bad, (y + rng.integers(1, classes, len(y))) % classes, y).astype(np.int32)
    return Stream(np.asarray(X, float), given, y, np.arange(len(y)) >= BEGIN, classes=classes)


def sea(seed: int, rows: int = 8000) -> Stream:
    """Return the SEA concepts: a threshold on the sum of two of three columns jumps three times, labels are noisy."""
    rng = np.random.default_rng([412, seed])
    X = rng.uniform(0, 10, size=(rows, 3))
    threshold = np.repeat([8.0, 9.0, 7.0, 9.5], rows // 4)
    y = (X[:, :2].sum(1) <= threshold).astype(np.int32)
    return plain(X, np.where(rng.random(rows) < 0.1, 1 - y, y), 2)


def river(name: str, seed: int) -> Stream:
    """Return a stream that comes with River, row by row."""
    from river import datasets

    rows = list(getattr(datasets, name)())
    columns = sorted(rows[0][0])
    X = np.array([[float(x[column]) for column in columns] for x, _ in rows])
    if name in ("ChickWeights", "TrumpApproval"):
        return plain(X, np.array([float(y) for _, y in rows]), batch=1)
    labels = sorted({y for _, y in rows}, key=str)
    y = np.array([labels.index(y) for _, y in rows], np.int32)
    return plain(X, y, len(labels), batch=1)


def one_by_one(rows: int, make: Make, seed: int) -> Stream:
    """Return the first rows of a stream, one in a batch."""
    made = make(seed)
    parts = {name: getattr(made, name)[:rows] for name in ("X", "y", "truth", "scored")}
    return made._replace(**parts, tests={}, batch=1)


def wide(seed: int, columns: int = 60) -> Stream:
    """Return a smooth function of six among sixty columns."""
    rng = np.random.default_rng([413, seed])
    X = rng.normal(size=(3000, columns))
    y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + X[:, 3:6].sum(1) + 0.3 * rng.normal(size=len(X))
    return plain(X, y)


JUMPS = {
    "level by 3 sds": (3.0, 1.0, False),
    "level by 100 sds": (100.0, 1.0, False),
    "scale times 30": (0.0, 30.0, False),
    "columns change places": (0.0, 1.0, True),
}
SMALL = ("concrete", "boston", "yacht")
FAMILIES: dict[str, dict[str, Make]] = {
    "clean tables": {name: partial(table, file) for name, file in TABLES.items()} | {"smooth": smooth},
    "first 500 rows": {name: partial(first_rows, file) for name, file in TABLES.items()},
    "noise, dates, IDs": {
        "Friedman, 10 columns of noise": noisy,
        "concrete, 10 columns of noise": partial(noisy, name="concrete"),
        "kin8nm, 20 columns of noise": partial(noisy, name="kin8nm", count=20),
        "date": dated,
        "IDs": identified,
    },
    "drift and jumps": {"drift": drifting, **{name: partial(jumping, *sizes) for name, sizes in JUMPS.items()}},
    "wrong targets": {
        f"{name}, {share:.0%} ±{size:.0f} sds": partial(wrong_targets, TABLES[name], share, size)
        for name in (*SMALL, "kin8nm")
        for share, size in ((0.05, 10.0), (0.1, 250.0))
    },
    "wrong columns": {"-999": partial(wrong_columns, "none"), "glitches": partial(wrong_columns, "glitch")},
    "far outside": {"line": far, "line and curve": partial(far, curved=True)},
    "River, numbers": {name: partial(river, name) for name in ("ChickWeights", "TrumpApproval")},
    "River, classes": {name: partial(river, name) for name in ("Phishing", "ImageSegments", "Bananas")},
    "classes": {
        "elec2, 10,000 rows": partial(elec2, 10_000, 0.0),
        "covertype, 8,000 rows": partial(covertype, 8_000, 0.0),
        "MNIST, 5,000 rows": partial(digits, 5_000),
        "SEA": sea,
    },
    "wrong labels and columns": {
        "elec2, 10 % wrong": partial(elec2, 10_000, 0.1),
        "covertype, 10 % wrong": partial(covertype, 8_000, 0.1),
        "covertype, 1 % -999": partial(covertype, 8_000, 0.0, none=0.01),
    },
    "cost": {
        "kin8nm, one by one": partial(one_by_one, 3000, partial(table, TABLES["kin8nm"])),
        "60 columns": wide,
        "elec2, one by one": partial(one_by_one, 3000, partial(elec2, 3000, 0.0)),
    },
    "whole elec2": {"elec2": partial(elec2, 45_312, 0.0)},
}
