"""The streams: tables in their original order, at most a few thousand rows each."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

GARBAGE = 50.0  # standard deviations


class Stream(NamedTuple):
    """Rows in order, and how they are delivered."""

    X: np.ndarray
    y: np.ndarray
    classes: int  # 0: y is a number
    batch: int = 20  # rows predicted, then learnt
    delay: int = 0  # rows after which a label arrives
    changes: tuple[int, ...] = ()
    garbage: np.ndarray | None = None  # rows whose y is not scored


class Source(NamedTuple):
    """Where a stream comes from."""

    kind: str  # regression, classes or posterior
    rows: int  # at most
    make: Callable[[int, int], Any]  # of a seed and rows
    about: str
    columns: int = 0  # where it decides which methods run


def _river(name: str, seed: int, rows: int) -> Stream:
    from river import datasets

    found = [row for row, _ in zip(getattr(datasets, name)(), range(rows), strict=False)]
    X = np.array([[float(value) for value in x.values()] for x, _ in found])
    if name in ("ChickWeights", "TrumpApproval"):
        return Stream(X, np.array([float(y) for _, y in found]), 0, 1)
    labels = sorted({y for _, y in found})
    return Stream(X, np.array([labels.index(y) for _, y in found]), len(labels), 1)


def _uci(name: str, seed: int, rows: int) -> Stream:
    from paper.data import uci_split

    X, y, X_test, y_test = uci_split(name, 0)
    X, y = np.concatenate([X, X_test]), np.concatenate([y, y_test])
    order = np.random.default_rng(1000 + seed).permutation(len(y))[:rows]
    return Stream(X[order], y[order], 0)


def _elec2(seed: int, rows: int, delay: int = 0) -> Stream:
    from paper.data import elec2

    X, y = elec2()
    return Stream(X[:rows], y[:rows].astype(int), 2, delay=delay)


def _covertype(seed: int, rows: int) -> Stream:
    from paper.data import covertype

    X, y = covertype()
    order = np.random.default_rng(1000 + seed).permutation(len(y))[:rows]
    return Stream(X[order].astype(float), y[order].astype(int), 7)


def _mnist(seed: int, rows: int) -> Stream:
    from paper.data import mnist

    source = mnist()
    order = np.random.default_rng(1000 + seed).permutation(len(source.y))[:rows]
    small = source.X[order].reshape(-1, 14, 2, 14, 2).mean((2, 4)).reshape(-1, 196)
    return Stream(small.astype(float), source.y[order].astype(int), 10)


def friedman(seed: int, rows: int, jumps: bool = False, swings: bool = False, delay: int = 0) -> Stream:
    """Return Friedman's function of five columns among eight; columns are swapped or terms oscillate."""
    rng = np.random.default_rng(2000 + seed)
    X = rng.uniform(size=(rows, 8))
    moved, at = X.copy(), rows // 2
    if jumps:
        moved[at:] = X[at:][:, [3, 4, 0, 1, 2, 5, 6, 7]]
    terms = np.stack(
        [
            10 * np.sin(np.pi * moved[:, 0] * moved[:, 1]),
            20 * (moved[:, 2] - 0.5) ** 2,
            10 * moved[:, 3],
            5 * moved[:, 4],
        ]
    )
    if swings:
        terms *= np.stack([np.cos(2 * np.pi * (np.arange(rows) / rows + k / 4)) for k in range(4)])
    y = terms.sum(0) + rng.normal(size=rows)
    return Stream(X, y, 0, delay=delay, changes=(at,) if jumps else ())


def sea(seed: int, rows: int) -> Stream:
    """Return SEA's three columns; the sum of two is compared with a bound that jumps; a tenth of labels are wrong."""
    rng = np.random.default_rng(3000 + seed)
    X, bounds = rng.uniform(0, 10, (rows, 3)), (8.0, 9.0, 7.0, 9.5)
    part = np.arange(rows) * len(bounds) // rows
    y = X[:, 0] + X[:, 1] > np.array(bounds)[part]
    y = y ^ (rng.random(rows) < 0.1)
    return Stream(X, y.astype(int), 2, changes=tuple(int(row) for row in np.flatnonzero(np.diff(part)) + 1))


def _contaminated(share: float, seed: int, rows: int) -> Stream:
    stream = _uci("kin8nm", seed, rows)
    rng = np.random.default_rng(4000 + seed)
    bad = rng.random(len(stream.y)) < share
    wild = rng.choice([-GARBAGE, GARBAGE], len(stream.y)) * stream.y.std()
    return stream._replace(y=np.where(bad, wild, stream.y), garbage=bad)


STREAMS: dict[str, Source] = {
    "ChickWeights": Source("regression", 578, partial(_river, "ChickWeights"), "River's, row by row"),
    "TrumpApproval": Source("regression", 1001, partial(_river, "TrumpApproval"), "River's, row by row"),
    "Phishing": Source("classes", 1250, partial(_river, "Phishing"), "River's, row by row"),
    "Bananas": Source("classes", 1500, partial(_river, "Bananas"), "River's, row by row"),
    "ImageSegments": Source("classes", 1500, partial(_river, "ImageSegments"), "River's, row by row"),
    "yacht": Source("regression", 308, partial(_uci, "yacht"), "UCI, in random order"),
    "boston": Source("regression", 506, partial(_uci, "bostonHousing"), "UCI, in random order"),
    "concrete": Source("regression", 1030, partial(_uci, "concrete"), "UCI, in random order"),
    "kin8nm": Source("regression", 3000, partial(_uci, "kin8nm"), "UCI, in random order"),
    "protein": Source("regression", 3000, partial(_uci, "protein-tertiary-structure"), "UCI, in random order"),
    "elec2": Source("classes", 4000, _elec2, "an electricity market, in its order"),
    "covertype": Source("classes", 3000, _covertype, "forest cover, in random order", 54),
    "MNIST": Source("classes", 1500, _mnist, "digits of 14 × 14 pixels, in random order", 196),
    "Friedman, jump": Source("regression", 3000, partial(friedman, jumps=True), "its columns change places half-way"),
    "Friedman, drift": Source("regression", 3000, partial(friedman, swings=True), "its four terms swing once"),
    "SEA": Source("classes", 3000, sea, "three jumps, a tenth of the labels wrong"),
    "kin8nm, 1 % garbage": Source("regression", 3000, partial(_contaminated, 0.01), "targets 50 sd off, not scored"),
    "kin8nm, 10 % garbage": Source("regression", 3000, partial(_contaminated, 0.1), "targets 50 sd off, not scored"),
    "Friedman, late": Source("regression", 3000, partial(friedman, delay=200), "labels come 200 rows later"),
    "elec2, late": Source("classes", 4000, partial(_elec2, delay=48), "labels come a day, 48 rows, later"),
}


def slug(name: str) -> str:
    """Return a name in a form that suits a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
