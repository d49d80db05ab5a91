"""What every experiment shares: repeated rows of a table, stored in a file as they finish, and summarised."""

import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import opvi

Record = dict[str, Any]  # one trial's numbers


class Row(NamedTuple):
    """One line of a table: a method under fixed settings."""

    name: str
    settings: dict[str, Any]
    trial: Callable[[int], Record]  # seed or split -> its numbers
    at_most: int | None = None  # repeats, where one is dear


class Check(NamedTuple):
    """A number compared with what it should be."""

    what: str
    value: float
    should: str
    holds: bool


class Experiment(NamedTuple):
    """An experiment of the paper, under one mode."""

    name: str  # e.g. "kin8nm-text", which names its files
    title: str
    settings: dict[str, Any]
    rows: list[Row]
    repeats: int  # seeds or splits, unless the command says otherwise
    header: list[str]
    line: Callable[[str, list[Record]], list[str]]  # a row's name and records -> the cells after the name
    checks: Callable[["Book"], list[Check]]
    draw: Callable[["Book", Path], Any]  # a matplotlib figure, written by the caller; None for no figure
    derived: Callable[["Book"], dict[str, Any]] | None = None  # what is said of the rows besides the table


class ResultsError(Exception):
    """Results that cannot be stored or continued."""


class Book:
    """The results of one experiment in a JSON file, rewritten after every trial."""

    def __init__(self, path: Path, header: dict[str, Any], fresh: bool = False):
        self.path = path
        self.content: dict[str, Any] = {**header, "rows": {}}
        self.made_with = header["made_with"]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not fresh:
                self.content["rows"] = self._finished(json.loads(path.read_text()))
            self.write()
        except OSError as error:
            raise ResultsError(f"`--out` is {str(path.parent)!r}, where nothing can be written: {error}.") from error
        except json.JSONDecodeError as error:
            raise ResultsError(f"{path} is not valid JSON ({error}). Delete it, or start over with --fresh.") from error

    def _finished(self, old: dict[str, Any]) -> dict[str, Any]:
        for what in ("experiment", "version", "settings"):
            if old.get(what) != self.content[what]:
                raise ResultsError(
                    f"{self.path} holds results with another `{what}` ({old.get(what)}, now {self.content[what]}), and "
                    "the two must not be mixed. Give another --out, or start over with --fresh."
                )
        self.content["made_with"] = old["made_with"]  # until a trial is added
        return old["rows"]

    def records(self, row: str, repeats: int | None = None) -> list[Record]:
        """A row's trials so far, in the order of their seeds; of the first `repeats` seeds only, if given."""
        trials = self.content["rows"].get(row, {}).get("trials", {})
        seeds = sorted(int(seed) for seed in trials)
        return [trials[str(seed)] for seed in seeds if repeats is None or seed < repeats]

    def has(self, row: Row, seed: int) -> bool:
        """Return whether this trial was finished with the same settings."""
        kept = self.content["rows"].get(row.name)
        return kept is not None and kept["settings"] == as_json(row.settings) and str(seed) in kept["trials"]

    def add(self, row: Row, seed: int, record: Record) -> None:
        """Store a trial, also in the file."""
        kept = self.content["rows"].get(row.name)
        if kept is None or kept["settings"] != as_json(row.settings):
            kept = self.content["rows"][row.name] = {"settings": as_json(row.settings), "trials": {}}
        kept["trials"][str(seed)] = as_json(record)
        self.content["made_with"] = self.made_with
        self.content.pop("sources", None)  # the stamp of older code: `python -m benchmarks.stamp --write` makes another
        self.write()

    def write(self) -> None:
        """Replace the file in one move, so that an interrupted write leaves the old one."""
        draft = self.path.with_suffix(".json.part")
        draft.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
        draft.replace(self.path)


def as_json(value: Any) -> Any:
    """Plain numbers, lists and strings; floats to seven digits, which is what float32 holds."""
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [as_json(entry) for entry in value]
    return as_json(np.asarray(value).tolist())


def commit() -> str | None:
    """What `OPVI_COMMIT` says, or the commit of the source, with `-dirty` where it was changed; None without either."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    if "OPVI_COMMIT" in os.environ:  # where a copy of the source runs without its history
        return os.environ["OPVI_COMMIT"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def header(experiment: Experiment, command: str) -> dict[str, Any]:
    """Return the file's header."""
    return {
        "experiment": experiment.name,
        "command": command,
        "version": opvi.__version__,
        "made_with": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "backend": jax.default_backend(),
            "commit": commit(),
        },
        "settings": as_json(experiment.settings),
    }


def collect(experiment: Experiment, repeats: int, book: Book, advance: Callable[[str, bool], None]) -> None:
    """Run every trial that the book does not have yet.

    Args:
        experiment: the experiment, whose rows are run one after the other.
        repeats: seeds or splits of each row, unless the row takes fewer.
        book: where each finished trial is stored.
        advance: called with each trial's name, and whether it existed already.
    """
    for row in experiment.rows:
        for seed in range(count(row, repeats)):
            kept = book.has(row, seed)
            if not kept:
                book.add(row, seed, row.trial(seed))
            advance(row.name, kept)


def count(row: Row, repeats: int) -> int:
    """Return how often a row is repeated."""
    return min(repeats, row.at_most or repeats)


# --- statistics and tables --------------------------------------------------------------------


class Summary(NamedTuple):
    """Mean and standard deviation over seeds or splits."""

    mean: float
    sd: float
    n: int

    def __str__(self) -> str:
        return self.text(4)

    def text(self, digits: int) -> str:
        """`mean ± sd`, or the mean alone where there is one number."""
        spread = f" ± {self.sd:.{digits}f}" if self.n > 1 else ""
        return f"{self.mean:.{digits}f}{spread}"

    @property
    def standard_error(self) -> float:
        """The standard error of the mean."""
        return self.sd / math.sqrt(self.n) if self.n else math.nan


def summary(records: Iterable[Record], key: str) -> Summary:
    """Return mean and sample standard deviation of one number over trials."""
    values = np.array([record[key] for record in records], float)
    if not len(values):
        return Summary(math.nan, math.nan, 0)
    return Summary(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else 0.0, len(values))


def paired(pairs: Sequence[tuple[str, str]], key: str, book: Book) -> dict[str, Any]:
    """Differences of one number between two rows, trial by trial: mean and standard error."""
    out = {}
    for first, second in pairs:
        both = zip(book.records(first), book.records(second), strict=True)
        found = summary([{key: ours[key] - theirs[key]} for ours, theirs in both], key)
        out[f"{first} less {second}, {key}"] = {"mean": found.mean, "standard_error": found.standard_error}
    return out


def near(what: str, found: Summary, expected: float, tolerance: float) -> Check:
    """Check that a mean lies within a tolerance of what was measured before."""
    return Check(what, found.mean, f"{expected:.4g} ± {tolerance:.2g}", abs(found.mean - expected) <= tolerance)


def at_least(what: str, value: float, bound: float) -> Check:
    """Check that a number is no smaller than a bound."""
    return Check(what, value, f"≥ {bound:.4g}", value >= bound)


def no_more_than(what: str, value: float, bound: float) -> Check:
    """Check that a number is no larger than a bound."""
    return Check(what, value, f"≤ {bound:.4g}", value <= bound)


def lines(experiment: Experiment, book: Book, repeats: int | None = None) -> list[list[str]]:
    """The table's cells, row by row; rows without a finished trial are left out."""
    out = []
    for row in experiment.rows:
        records = book.records(row.name, repeats)
        if records:
            out.append([row.name, *experiment.line(row.name, records)])
    return out


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table for the documentation."""
    table = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in table) + "\n"
