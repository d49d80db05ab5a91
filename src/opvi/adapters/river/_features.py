"""Dictionaries of features as rows of a table whose columns come as the features do."""

import math
import numbers
import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from opvi.types import LARGEST_VALUE

Row = Mapping[Hashable, Any]  # features by name
VALUES = 32  # of a text feature that have columns of their own
PLAIN = frozenset((float, int, bool, np.bool_, np.float64, np.float32, np.int64, np.int32))


class Columns:
    """Which column each feature has, in the order in which they were met.

    A number has a column, NaN where it is missing. A text has a column for each value, 1 or 0; values after the
    first 32 share those, by hashing. Features beyond `largest` columns share them by hashing, too, and add up.
    """

    def __init__(self, largest: int):
        self.largest = largest
        self.numbers: dict[Hashable, int] = {}
        self.texts: dict[Hashable, dict[str, int]] = {}
        self.count = 0  # columns in use
        self.blank: list[float] = []  # a row without features, as wide as the model

    def meet(self, rows: Sequence[Row]) -> list[int]:
        """Columns for what is new in these rows, whatever the order within a row; the new ones for numbers."""
        new_numbers: set[Hashable] = set()
        new_texts: set[tuple[Hashable, str]] = set()
        for x in rows:
            for name, value in x.items():
                if is_number(value):
                    if name not in self.numbers:
                        new_numbers.add(name)
                elif value is not None and str(value) not in self.texts.get(name, ()):
                    new_texts.add((name, str(value)))
        before = self.count
        for name in sorted(new_numbers, key=repr):
            self.numbers[name] = self._next(repr(name))
        fresh = list(range(before, self.count))
        for name, value in sorted(new_texts, key=repr):
            known = self.texts.setdefault(name, {})
            if len(known) < VALUES:
                known[value] = self._next(repr((name, value)))
        return fresh

    def _next(self, label: str) -> int:
        if self.count < self.largest:
            self.count += 1
            return self.count - 1
        return zlib.crc32(label.encode()) % self.largest

    def widen(self, width: int) -> None:
        """Rows of this width from now on."""
        self.blank = [0.0] * width
        for column in self.numbers.values():
            self.blank[column] = math.nan

    def row(self, x: Row) -> list[float]:
        """One row; features without a column are left out."""
        out, numbers_ = self.blank.copy(), self.numbers
        for name, value in x.items():
            if is_number(value):
                column = numbers_.get(name)
                if column is not None and -LARGEST_VALUE <= value <= LARGEST_VALUE:
                    held = out[column]
                    out[column] = value if held != held else held + value  # NaN: nothing there yet
            elif value is not None:
                known = self.texts.get(name)
                if known:
                    column = known.get(value) if type(value) is str else known.get(str(value))
                    if column is None and len(known) >= VALUES:
                        column = list(known.values())[zlib.crc32(str(value).encode()) % VALUES]
                    if column is not None:
                        out[column] = 1.0
        return out

    def table(self, rows: Sequence[Row]) -> np.ndarray:
        """Rows `[n, width]`."""
        return np.array([self.row(x) for x in rows], np.float32).reshape(len(rows), -1)


def is_number(value: object) -> bool:
    """Whether a feature is a number, truth values included."""
    return type(value) in PLAIN or isinstance(value, numbers.Real)
