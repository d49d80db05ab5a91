"""What a date, a constant, a copy, an ID or twenty columns of noise cost: `python -m benchmarks.additions`.

Each table is learnt as it is and with each addition, by the encoder of `opvi learn` and the default regressor. Errors
are of predictions made before learning, over the second half of the rows. Settings were chosen on the tables named
`made`, energy among them, under other seeds; that columns fade more readily above 10 was decided after errors of kin8nm
and concrete had been seen, and that distances follow networks that begin again with seeds 33 to 52 of concrete.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import opvi
from benchmarks.machine import machine
from benchmarks.stamp import stamp
from opvi.adapters.sklearn._frames import encoded, understood

SEEDS = (11, 12, 13)
SMALL = {"concrete", "made: strength", "made: dense"}  # about 1,000 rows: errors depend on chance
SMALL_SEEDS = tuple(range(11, 31))
MOST = 1.03  # times the error without the addition
FIRST_ROWS = 1000  # from which columns are understood
DAYS = 900  # that the dates span
NOISE = 20  # columns
SOURCES = ("benchmarks/additions.py", "src/opvi/tracking", "src/opvi/adapters/_tables", "src/opvi/filters")

Table = tuple[pd.DataFrame, np.ndarray]


def _frame(X: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(np.asarray(X, float), columns=[f"x{j}" for j in range(X.shape[1])])


# --- tables ---------------------------------------------------------------------------------------


def friedman(rng: np.random.Generator, rows: int = 6000) -> Table:
    """Friedman's first function of five columns."""
    X = rng.uniform(size=(rows, 5))
    y = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]
    return _frame(X), y + rng.normal(size=rows)


def arm(rng: np.random.Generator, rows: int = 6000) -> Table:
    """A robot's arm: eight angles that only count together."""
    angles = rng.uniform(-np.pi / 2, np.pi / 2, size=(rows, 8))
    bend, turn = np.cumsum(angles[:, :4], 1), np.cumsum(angles[:, 4:], 1)
    place = np.stack([(np.cos(bend) * np.cos(turn)).sum(1), (np.sin(bend) * np.cos(turn)).sum(1), np.sin(turn).sum(1)])
    return _frame(angles), np.sqrt(((place - 1) ** 2).sum(0)) + 0.1 * rng.normal(size=rows)


def strength(rng: np.random.Generator, rows: int = 1000) -> Table:
    """Few rows: amounts of a mixture, some of them mostly 0, and an age whose effect levels off."""
    amounts = rng.gamma(4, 1, size=(rows, 4))
    extras = rng.gamma(1, 1, size=(rows, 2)) * (rng.random((rows, 2)) < 0.4)
    age = np.exp(rng.normal(3, 1, size=rows))
    base = 8 * np.log1p(amounts[:, 0]) - 4 * amounts[:, 1] / (1 + amounts[:, 0]) + 3 * np.sqrt(extras[:, 0])
    y = base * np.log1p(age) / 3 + amounts[:, 2] * (extras[:, 1] > 0) + rng.normal(size=rows)
    return _frame(np.column_stack([amounts, extras, age])), y


def dense(rng: np.random.Generator, rows: int = 1000) -> Table:
    """Few rows of eight columns that all count, some of them only together."""
    X = rng.normal(size=(rows, 8))
    X[:, 1:] += 0.5 * X[:, :1]
    y = 3 * np.tanh(2 * X[:, 0]) + 2 * X[:, 1] * X[:, 2] + 2 * np.sin(2 * X[:, 3])
    y += X[:, 4] ** 2 + 2 * np.abs(X[:, 5]) + 2 * X[:, 6] * (X[:, 7] > 0)
    return _frame(X), y + 0.7 * rng.normal(size=rows)


def energy(rng: np.random.Generator, rows: int = 6000) -> Table:
    """Hourly demand with a season, a weekly rhythm and a trend; the table has the weather and the kind of day."""
    hours = np.arange(rows) * DAYS * 24 / rows
    year, day = 2 * np.pi * hours / 24 / 365.25, 2 * np.pi * (hours % 24) / 24
    weather = 10 - 10 * np.cos(year) + 4 * np.sin(day) + rng.normal(0, 3, rows)
    wind, sun = rng.gamma(2, 2, rows), np.maximum(0, -np.cos(day)) * rng.random(rows)
    rest = (hours // 24 % 7 >= 5).astype(float)
    y = 50 + 0.1 * (weather - 15) ** 2 - 8 * rest - 6 * sun + 5 * np.cos(year + 1) + 4 * np.sin(day) + hours / 24 / 90
    frame = pd.DataFrame({"weather": weather, "wind": wind, "sun": sun, "day": np.where(rest > 0, "rest", "work")})
    return frame, y + wind * rng.normal(0, 0.5, rows)


def stored(name: str, most: int = 6000) -> Callable[[np.random.Generator], Table]:
    """Rows of a table that the experiments use, in random order."""

    def drawn(rng: np.random.Generator) -> Table:
        from paper import data

        X, y = (lambda d: (d.X, d.y))(data.kin8nm()) if name == "kin8nm" else _uci(name)
        kept = rng.permutation(len(y))[:most]
        return _frame(X[kept]), y[kept]

    return drawn


def _uci(name: str) -> tuple[np.ndarray, np.ndarray]:
    from paper import data

    X, y, X_test, y_test = data.uci_split(name, 0)
    return np.concatenate([X, X_test]), np.concatenate([y, y_test])


TABLES: dict[str, Callable[[np.random.Generator], Table]] = {
    "made: friedman": friedman,
    "made: arm": arm,
    "made: strength": strength,
    "made: dense": dense,
    "energy": energy,
    "kin8nm": stored("kin8nm"),
    "concrete": stored("concrete"),
    "protein": stored("protein-tertiary-structure"),
}
REPORTED = ("energy", "kin8nm", "concrete", "protein")


# --- additions ------------------------------------------------------------------------------------


def _dated(frame: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    step = pd.Timedelta(days=DAYS / len(frame))
    return frame.assign(date=pd.Timestamp("2021-03-01") + np.arange(len(frame)) * step)


def _copied(frame: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    return frame.assign(copy=frame[frame.columns[0]])


def _numbered(frame: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    return frame.assign(id=70_000 + np.cumsum(rng.integers(1, 5, len(frame))))


def _named(frame: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    return frame.assign(id=rng.integers(10_000_000, 99_999_999, len(frame)))


def _noisy(frame: pd.DataFrame, rng: np.random.Generator) -> pd.DataFrame:
    return frame.assign(**{f"noise{j}": rng.normal(size=len(frame)) for j in range(NOISE)})


ADDITIONS: dict[str, Callable[[pd.DataFrame, np.random.Generator], pd.DataFrame]] = {
    "a date": _dated,
    "constant": lambda frame, _: frame.assign(constant=7.0),
    "copy": _copied,
    "ID, rising with gaps": _numbered,
    "ID, at random": _named,
    "20 columns of noise": _noisy,
}


def error(frame: pd.DataFrame, y: np.ndarray, seed: int) -> float:
    """Root mean squared error of the second half, each batch predicted before it is learnt."""
    X = encoded(frame, understood(frame[:FIRST_ROWS]))
    made = opvi.regressor(X.shape[1])
    _, history = opvi.run(made, opvi.stream((X, y.astype(np.float32)), 20), seed)
    squared = np.asarray(history.info.squared_error)
    return float(np.sqrt(squared[len(squared) // 2 :].mean()))


def measured(name: str, additions: list[str], seed: int) -> tuple[int, dict[str, float]]:
    """Rows of a table, and its errors under one seed, alone and with each addition."""
    frame, y = TABLES[name](np.random.default_rng(seed))
    found = {"alone": error(frame, y, seed)}
    for what in additions:
        found[what] = error(ADDITIONS[what](frame, np.random.default_rng([seed, 1])), y, seed)
    return len(y), found


def told(name: str, rows: int, seeds: list[dict[str, float]]) -> dict[str, Any]:
    """Errors by seed, and the mean of their ratios to those without an addition; a line for the reader."""
    found = {what: [one[what] for one in seeds] for what in seeds[0]}
    alone = np.array(found["alone"])
    each = {what: np.array(errors) / alone for what, errors in found.items() if what != "alone"}
    ratios = {what: float(ratio.mean()) for what, ratio in each.items()}
    errors_of_means = {
        what: float(ratio.std(ddof=1) / len(ratio) ** 0.5) for what, ratio in each.items() if len(ratio) > 1
    }
    said = ", ".join(f"{what} {ratio:.3f}" for what, ratio in ratios.items())
    print(f"{name}: {alone.mean():.4g} alone; {said}", flush=True)
    return {"rows": rows, "rmse": found, "ratios": ratios, "standard errors": errors_of_means}


def seeds_of(name: str, given: list[int] | None) -> list[int]:
    """Return the seeds of a table: those given, or the usual ones."""
    return given or list(SMALL_SEEDS if name in SMALL else SEEDS)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.additions", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for additions.json")
    parser.add_argument("--tables", nargs="+", choices=tuple(TABLES), default=REPORTED)
    parser.add_argument("--additions", nargs="+", choices=tuple(ADDITIONS), default=list(ADDITIONS))
    parser.add_argument("--seeds", nargs="+", type=int, help="11 to 13 if omitted, 11 to 30 for small tables")
    parser.add_argument("--jobs", type=int, default=1, help="tables and seeds measured at once")
    options = parser.parse_args()
    tables: dict[str, Any] = {}
    report = {
        "machine": machine("python -m benchmarks.additions"),
        "command": "python -m benchmarks.additions --out docs/results",
        "sources": stamp(*SOURCES),
        "most": MOST,
        "errors": tables,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        waiting = {
            name: [pool.submit(measured, name, options.additions, seed) for seed in seeds_of(name, options.seeds)]
            for name in reversed(options.tables)  # the longest first
        }
        for name in options.tables:
            done = [one.result() for one in waiting[name]]
            seeds = seeds_of(name, options.seeds)
            tables[name] = {"seeds": seeds, **told(name, done[0][0], [errors for _, errors in done])}
            (options.out / "additions.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
