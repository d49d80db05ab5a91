"""Dictionaries of features as rows of a table that gets new columns as new features appear."""

import math
import numbers
import zlib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np

from opvi.running._origin import origin_of
from opvi.types import LARGEST_VALUE

Row = Mapping[Hashable, Any]  # features by name
Held = dict[str, Any]  # attributes to save
PAIRS = "_pairs"  # the attribute with the dictionaries, as saved
VALUES = 32  # of a text feature that have columns of their own
GAPS = 0.05  # of the rows: a number that is not there more often is 0 where its key is not there
STEADY = 5  # rows in a row with a number that is new: it did not exist before
PLAIN = frozenset((float, int, bool, np.bool_, np.float64, np.float32, np.int64, np.int32))


def paired(held: Held) -> Held:
    """Return attributes with dictionaries as lists of pairs: skops saves keys as strings, and reads False as true."""
    pairs = {name: [[*pair] for pair in value.items()] for name, value in held.items() if isinstance(value, dict)}
    return {**{name: value for name, value in held.items() if name not in pairs}, PAIRS: pairs}


def unpaired(held: Held) -> Held:
    """Return attributes with dictionaries again; an older opvi saved them as they are."""
    rest = {name: value for name, value in held.items() if name != PAIRS}
    return {**rest, **{name: dict(pairs) for name, pairs in held.get(PAIRS, {}).items()}}


class Columns:
    """Which column each feature has, in order of first appearance.

    A number has one column, with NaN where it is missing: None, NaN, or no key although the key is nearly always
    there. A key that is often absent, as with sparse transformers, counts as 0 then. A string has a column for
    each value, 1 or 0; values after the first 32 share those, by hashing. Features beyond `largest` columns share them
    by hashing, too, and add up.
    """

    def __init__(self, largest: int):
        self.largest = largest
        self.numbers: dict[Hashable, int] = {}
        self.texts: dict[Hashable, dict[str, int]] = {}
        self.count = 0  # columns in use
        self.blank: list[float] = []  # a row without features, as wide as the model
        self.origin = np.zeros(0)  # subtracted from the columns, where they lie far from 0
        self.rows = 0  # met
        self.since: dict[Hashable, int] = {}  # rows met before each number
        self.there: Counter[Hashable] = Counter()  # rows with it
        self.sparse: set[Hashable] = set()  # numbers that are 0 where their key is not there

    def __getstate__(self) -> Held:
        return paired(vars(self))

    def __setstate__(self, state: Held) -> None:
        vars(self).update(unpaired(state))
        self.there = Counter(self.there)

    def meet(self, rows: Sequence[Row]) -> list[int]:
        """Add columns for new features, whatever their order within a row; return those for numbers.

        Numbers that are often absent are not returned: they were 0 before.
        """
        new_numbers: set[Hashable] = set()
        new_texts: set[tuple[Hashable, str]] = set()
        for x in rows:
            for name, value in x.items():
                if is_number(value):
                    if name not in self.numbers:
                        new_numbers.add(name)
                elif value is not None and str(value) not in self.texts.get(name, ()):
                    new_texts.add((name, str(value)))
        self._count(rows, new_numbers)
        fresh = []
        for name in sorted(new_numbers, key=repr):
            before = self.count
            self.numbers[name] = self._next(repr(name))
            if self.count > before and name not in self.sparse:
                fresh.append(before)
        for name, value in sorted(new_texts, key=repr):
            known = self.texts.setdefault(name, {})
            if len(known) < VALUES:
                known[value] = self._next(repr((name, value)))
        return fresh

    def _count(self, rows: Sequence[Row], fresh: set[Hashable]) -> None:
        """Count absent keys, to decide which numbers are 0 where their key is absent."""
        start, self.rows = self.rows, self.rows + len(rows)
        self.there.update(name for x in rows for name in x if name in self.since or name in fresh)
        for name in fresh:
            first = next(place for place, x in enumerate(rows) if name in x)
            steady = self.there[name] == len(rows) - first >= STEADY  # from then on
            self.since[name] = start + first if start and steady else 0
        for name in self.since.keys() - self.sparse:
            met = self.rows - self.since[name]
            if met - self.there[name] > GAPS * met:
                self.sparse.add(name)

    def _next(self, label: str) -> int:
        if self.count < self.largest:
            self.count += 1
            return self.count - 1
        return zlib.crc32(label.encode()) % self.largest

    def widen(self, width: int) -> None:
        """Make rows of this width from now on."""
        self.blank = [0.0] * width
        for name, column in self.numbers.items():
            if name not in self.sparse:
                self.blank[column] = math.nan

    def row(self, x: Row) -> list[float]:
        """Return one row; features without a column are left out."""
        out, numbers_ = self.blank.copy(), self.numbers
        for name, value in x.items():
            if is_number(value):
                column = numbers_.get(name)
                if column is None:
                    continue
                if -LARGEST_VALUE <= value <= LARGEST_VALUE:
                    held = out[column]
                    out[column] = value if held != held else held + value  # NaN: nothing there yet
                elif self.count < self.largest:
                    out[column] = math.nan  # not a number, though its key is there
            elif value is None:
                if name in self.sparse and self.count < self.largest:
                    out[numbers_[name]] = math.nan
            else:
                known = self.texts.get(name)
                if known:
                    column = known.get(value) if type(value) is str else known.get(str(value))
                    if column is None and len(known) >= VALUES:
                        column = list(known.values())[zlib.crc32(str(value).encode()) % VALUES]
                    if column is not None:
                        out[column] = 1.0
        return out

    def table(self, rows: Sequence[Row]) -> np.ndarray:
        """Return rows `[n, width]`."""
        return (self._table(rows) - self.origin).astype(np.float32)

    def settle(self, rows: Sequence[Row], known: int) -> None:
        """Choose what to subtract from the columns after the first `known` if they lie far from 0."""
        self.origin = np.concatenate([self.origin[:known], origin_of(self._table(rows))[known:]])

    def _table(self, rows: Sequence[Row]) -> np.ndarray:
        return np.array([self.row(x) for x in rows], np.float64).reshape(len(rows), -1)


class Dates:
    """Dates among the features as numbers: the time of day, the weekday and, after a year, the season."""

    def __init__(self) -> None:
        self.first: dict[Hashable, datetime] = {}
        self.year: set[Hashable] = set()  # dates that have spanned one

    def __getstate__(self) -> Held:
        return paired(vars(self))

    def __setstate__(self, state: Held) -> None:
        vars(self).update(unpaired(state))

    def numbers(self, x: Row, learn: bool = False) -> Row:
        """Return the row with its dates replaced by numbers."""
        if not any(isinstance(value, date | np.datetime64) for value in x.values()):
            return x
        out: dict[Hashable, Any] = {}
        for name, value in x.items():
            if not isinstance(value, date | np.datetime64):
                out[name] = value
            elif value == value:  # NaT is not equal to itself
                out.update(self._waves(name, _plain_time(value), learn))
        return out

    def _waves(self, name: Hashable, when: datetime, learn: bool) -> dict[Hashable, float]:
        if learn:
            first = self.first.setdefault(name, when)
            if abs((when - first).days) >= 365:
                self.year.add(name)
        phases = {"hour": (when.hour * 60 + when.minute) / 1440, "weekday": when.weekday() / 7}
        if name in self.year:
            phases["year"] = when.timetuple().tm_yday / 365.2425
        turns = {label: 2 * math.pi * phase for label, phase in phases.items()}
        waves = [(label, wave) for label in turns for wave in (math.sin, math.cos)]
        return {f"{name}: {label} {wave.__name__}": wave(turns[label]) for label, wave in waves}


def _plain_time(value: date | np.datetime64) -> datetime:
    """Return a date or time without a zone; one with a zone is converted to UTC."""
    if isinstance(value, np.datetime64):
        return value.astype("datetime64[us]").item()
    if not isinstance(value, datetime):
        return datetime(value.year, value.month, value.day)
    return value.replace(tzinfo=None) - (value.utcoffset() or timedelta(0))


def is_number(value: object) -> bool:
    """Return whether a feature is a number; booleans are."""
    return type(value) in PLAIN or isinstance(value, numbers.Real)
