"""What the columns mean, decided once, and the encoding of rows as numbers."""

import json
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from opvi.adapters._tables._block import SHOWN, Block, Json, Rejected, TableError, quoted
from opvi.adapters._tables._spelling import PLAIN, Spelling
from opvi.adapters._tables._values import (
    TRUTH,
    ZEROS,
    Values,
    as_booleans,
    as_dates,
    as_levels,
    as_numbers,
    whole_or_text,
)
from opvi.types import LARGEST_VALUE

HASHED = 32  # columns of a text with many values
DAY, HOUR = 86_400_000_000, 3_600_000_000  # microseconds
NEW_YEAR = 10_957 * DAY  # of 2000, since 1970
YEAR = 365.2425  # days
SMALLEST_POSITIVE = 1e-30  # of a target whose logarithm is learnt
COUNT_SHIFT, COUNT_BEND = 0.375, 10.0  # of `count_scale`; around b it turns from a square root into a logarithm
WHAT = {
    "number": "is not a number",
    "boolean": "is neither true nor false",
    "date": "is not a date like 2024-01-31 or 2024-01-31T10:20:30",
}


class Column(NamedTuple):
    """One column of the source, and how it becomes numbers."""

    name: str
    kind: str  # number, boolean, date, levels or hashed
    gaps: bool = False  # whether a column says where the value was missing
    mean: float = 0.0  # what gaps are filled with; of a date, the days
    levels: list[str] = []  # noqa: RUF012 (never written to): strings with a column each
    start: int = 0  # of a date: the first row's, in microseconds since 1970
    hours: bool = False  # of a date: whether there are times of day
    spelling: Spelling = PLAIN
    late: bool = False  # of a date: whether trend and season count only once a year has passed since `start`
    shift: float = 0.0  # of a number: subtracted, because it lies far from 0
    trend: bool = True  # of a date: whether the days are an input

    @property
    def features(self) -> list[str]:
        """Names of the encoded columns."""
        names = [self.name]
        if self.kind == "date":
            cycles = ["hour", "weekday", "year"] if self.hours else ["weekday", "year"]
            names = [f"{self.name}: {c} {wave}" for c in cycles for wave in ("sin", "cos")]
            names = [f"{self.name}: days", *names] if self.trend else names
        elif self.kind == "levels":
            names = [f"{self.name}={level}" for level in self.levels]
        elif self.kind == "hashed":
            names = [f"{self.name}: hash {place}" for place in range(1, HASHED + 1)]
        return [*names, f"{self.name} is missing"] if self.gaps else names


class Encoded(NamedTuple):
    """Rows as numbers. Every row of the block is in `row` or in `rejected`."""

    x: np.ndarray  # [n, k] float32
    y: np.ndarray | None  # [n] float32, or int32 for classes
    row: np.ndarray  # [n] int64, numbers in the source
    rejected: list[Rejected]  # malformed rows of the block included
    gaps: np.ndarray  # [columns of the source] of these rows, filled in
    words: dict[str, list[str]] = {}  # noqa: RUF012 (never written to): strings of the hashed columns, row by row
    read: np.ndarray | None = None  # [n] float64, numbers to predict as they were read


class Schema(NamedTuple):
    """What the first rows revealed: plain data, stored with the model. Made by `infer_schema`."""

    target: str
    task: str  # regression or classification
    classes: list[str]
    labels: str  # what the target holds: see `label_name`
    columns: list[Column]
    features: list[str]  # names of the encoded columns, all different
    origin: list[str]  # for each of them, the source's column
    notes: list[str]  # for the user
    spelling: Spelling = PLAIN  # of the target
    positive: bool = False  # whether the logarithm of the target is learnt
    closed: bool = False  # whether the user named all classes
    counts: bool = False  # whether the target counts something, and is learnt on `count_scale`
    shift: float = 0.0  # subtracted from a number to predict, because it lies far from 0

    def to_json(self) -> Json:
        """Return plain lists, dictionaries, numbers and strings."""
        columns = [{**column._asdict(), "spelling": _spelled(column.spelling)} for column in self.columns]
        return {**self._asdict(), "columns": columns, "spelling": _spelled(self.spelling)}

    @classmethod
    def from_json(cls, data: Json) -> Self:
        """Return the schema that `to_json` wrote."""
        try:
            columns = [
                Column(**{**column, "spelling": _spelling(column.get("spelling", {}))}) for column in data["columns"]
            ]
            return cls(**{**data, "columns": columns, "spelling": _spelling(data.get("spelling", {}))})
        except (TypeError, KeyError, AttributeError) as error:
            raise TableError(
                f"this is not a schema that this version of opvi wrote ({error}). Start a new run."
            ) from None

    @property
    def used(self) -> list[str]:
        """The source's columns that are read, the target last."""
        return [*(column.name for column in self.columns), self.target]

    @property
    def known(self) -> frozenset[str]:
        """The same as a set."""
        return _set_of(tuple(self.used))

    def absent(self, columns: list[str]) -> list[str]:
        """Feature columns that a source lacks."""
        return [column.name for column in self.columns if column.name not in columns]

    def unknown(self, block: Block) -> list[str]:
        """Return the labels of a block that are not among the classes, in order of appearance."""
        if self.task != "classification":
            return []
        name_of = label_name(self._labels(block), self.spelling)
        known = {"", *(self.spelling.key(name) for name in self.classes)}
        gaps = self.spelling.missing(among_values=self.labels != "text")
        codes, texts = as_levels(raw(block, self.target, len(block.numbers)), self.spelling._replace(fold=False))
        out: dict[str, str] = {}
        for code in dict.fromkeys(codes.tolist()):
            name = name_of(texts[code])
            if code >= 0 and (key := self.spelling.key(name)) not in known and texts[code].lower() not in gaps:
                out.setdefault(key, name)
        return list(out.values())

    def encode(self, block: Block, with_target: bool = True) -> Encoded:
        """Encode rows as numbers; those that break the schema are returned with a reason.

        Args:
            block: rows of any source with these columns; a column that is absent counts as missing.
            with_target: whether rows need a target; predicting does not.
        """
        numbers = block.numbers
        x = np.zeros((len(numbers), len(self.features)), np.float32)
        reasons: dict[int, str] = {}
        gaps = np.zeros((len(self.columns), len(numbers)), bool)
        y, read = self._target(block, len(numbers), reasons) if with_target else (None, None)
        first, words = 0, dict[str, Texts]()
        for place, column in enumerate(self.columns):
            width = len(column.features)
            array = raw(block, column.name, len(numbers))
            _refuse_nested(block, column.name, reasons)
            gaps[place], met = encode_column(column, array, x[:, first : first + width], reasons)
            if met is not None and column.kind == "hashed":
                words[column.name] = met
            first += width
        keep = np.ones(len(numbers), bool)
        keep[list(reasons)] = False
        said = {name: met.of(keep) for name, met in words.items()}
        if not reasons:
            return Encoded(x, y, numbers, list(block.malformed), gaps.sum(1), said, read)
        refused = [Rejected(int(numbers[i]), reason, _spell(block, i)) for i, reason in reasons.items()]
        rejected = sorted([*block.malformed, *refused])
        y, read = (None if values is None else values[keep] for values in (y, read))
        return Encoded(x[keep], y, numbers[keep], rejected, gaps[:, keep].sum(1), said, read)

    def targets(self, learnt: np.ndarray) -> np.ndarray:
        """Return the targets in their own units, from numbers as they are learnt."""
        learnt = np.asarray(learnt, float)
        if self.counts:
            return np.round(COUNT_BEND * np.sinh(learnt) ** 2 - COUNT_SHIFT)
        return np.exp(learnt) if self.positive else learnt + self.shift

    def _labels(self, block: Block) -> str:
        """What the target of a block holds: a number in JSON is a value, not text."""
        return "number" if self.labels == "whole" and block.open else self.labels

    def _target(self, block: Block, rows: int, reasons: dict[int, str]) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the targets of all rows, and numbers as they were read; values at rejected rows are meaningless."""
        array = raw(block, self.target, rows)
        where = f"target {quoted(self.target)}"
        _refuse_nested(block, self.target, reasons)
        if self.task == "regression":
            values = as_numbers(array, self.spelling)
            _refuse(values, array, "number", where, reasons, self.spelling)
            _note(values.missing, lambda _: f"{where} is missing", reasons)
            _refuse_large(values.data, where, reasons)
            sound = np.abs(values.data) <= LARGEST_VALUE
            if self.counts:
                sound &= (values.data >= 0) & (values.data == np.floor(values.data))
                _note(~sound, lambda i: f"{where}: {_value(array, i)} is not a whole number of at least 0", reasons)
                return count_scale(np.where(sound, values.data, 0.0)).astype(np.float32), values.data
            if self.positive:
                sound &= values.data >= SMALLEST_POSITIVE
                _note(~sound, lambda i: f"{where}: {_value(array, i)} is not positive", reasons)
                return np.log(np.where(sound, values.data, 1.0)).astype(np.float32), values.data
            return np.where(sound, values.data - self.shift, 0.0).astype(np.float32), values.data
        codes, missing = labels_of(array, self._labels(block), self.classes, self.spelling)
        _note(missing, lambda _: f"{where} is missing", reasons)
        known = ", ".join(self.classes[:10]) + (", ..." if len(self.classes) > 10 else "")
        _note(
            (codes < 0) & ~missing, lambda i: f"{where}: {_value(array, i)} is none of the classes ({known})", reasons
        )
        return codes.astype(np.int32), None


@lru_cache(16)
def _set_of(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(names)


def count_scale(counts: np.ndarray) -> np.ndarray:
    r"""Return $g(y) = \operatorname{arsinh} \sqrt{(y + 3/8) / b}$, on which counts vary about equally.

    It is a square root for small counts, whose variance is their mean, and a logarithm for large ones, which vary by
    shares: Anscombe's scale for negative binomials.
    """
    return np.arcsinh(np.sqrt((counts + COUNT_SHIFT) / COUNT_BEND))


def _spelled(spelling: Spelling) -> Json:
    return {**spelling._asdict(), "na": list(spelling.na)}


def _spelling(data: Json) -> Spelling:
    return Spelling(**{**data, "na": tuple(data.get("na", ()))})


def raw(block: Block, name: str, rows: int) -> pa.Array:
    """Return a column of a block; all gaps if it is missing."""
    array = block.columns.get(name)
    return pa.nulls(rows, pa.string()) if array is None else array


def label_name(labels: str, spelling: Spelling) -> Callable[[str], str]:
    """Return a function from a label to the name of its class: the label as written, unless it is another spelling.

    Args:
        labels: text or whole numbers, as written; truth values, in any case; boolean: these, and 1 and 0 for them; or
            number: by value, except codes like 007.
        spelling: how numbers are written.
    """
    if labels == "truth":
        return lambda text: text.lower() if text.lower() in ("true", "false") else text
    if labels == "boolean":
        return lambda text: {1.0: "true", 0.0: "false"}.get(TRUTH.get(text.lower(), 2.0), text)
    if labels == "number":
        return lambda text: text if ZEROS.fullmatch(text) else whole_or_text(text, spelling) or text
    return lambda text: text


def labels_of(
    array: pa.Array, labels: str, classes: list[str], spelling: Spelling = PLAIN
) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each row's class, -1 for none, and which rows have no label."""
    name_of = label_name(labels, spelling)
    place = {spelling.key(name): number for number, name in enumerate(classes)}
    codes, texts = as_levels(array, spelling)
    gaps = spelling.missing(among_values=labels != "text")
    known = np.array([place.get(spelling.key(name_of(text)), -1) for text in texts] + [-1], np.int64)
    gone = np.array([text.lower() in gaps for text in texts] + [True], bool)
    return known[codes], gone[codes]


class Texts(NamedTuple):
    """The strings of a column: for each row its index in `texts`, -1 for none."""

    codes: np.ndarray
    texts: list[str]

    def of(self, rows: np.ndarray) -> list[str]:
        """Return the strings of some rows, without gaps."""
        return [self.texts[code] for code in self.codes[rows].tolist() if code >= 0]


def encode_column(
    column: Column, array: pa.Array, out: np.ndarray, reasons: dict[int, str]
) -> tuple[np.ndarray, Texts | None]:
    """Write a column's numbers; return rows with gaps, and strings. `reasons` gets rows that break the schema."""
    where, met = f"column {quoted(column.name)}", None
    if column.kind in ("levels", "hashed"):
        met = Texts(*as_levels(array, column.spelling))
        missing = met.codes < 0
        _encode_text(column, *met, out)
    else:
        values = {"number": as_numbers, "boolean": as_booleans, "date": as_dates}[column.kind](array, column.spelling)
        missing = values.missing
        _refuse(values, array, column.kind, where, reasons, column.spelling)
        if column.kind == "date":
            out[:, 0] = column.mean if column.trend else 0.0
            there = np.flatnonzero(~missing & ~values.bad)
            waves = waves_of(values.data[there].astype(np.int64), column)
            out[there, : waves.shape[1]] = waves
        else:
            _refuse_large(values.data, where, reasons)
            sound = np.abs(values.data) <= LARGEST_VALUE
            out[:, 0] = (values.data if sound.all() else np.where(sound, values.data, column.mean)) - column.shift
    if column.gaps:
        out[:, -1] = missing
    return missing, met


def _encode_text(column: Column, codes: np.ndarray, texts: list[str], out: np.ndarray) -> None:
    """Encode text: one column per level, or a sign in one of 32 columns, fixed for each string."""
    if column.kind == "levels":
        place = {level: number for number, level in enumerate(column.levels)}
        places = np.array([place.get(text, -1) for text in texts] + [-1], np.int64)[codes]
        rows = np.flatnonzero(places >= 0)
        out[rows, places[rows]] = 1.0
        return
    places = np.array([*map(hashed_place, texts), (0, 0)], np.int64)[codes]
    rows = np.flatnonzero(codes >= 0)
    out[rows, places[rows, 0]] = places[rows, 1]


def hashed_place(text: str) -> tuple[int, int]:
    """Return the input, counted from 0, to which a string of a hashed column maps, and its sign."""
    value = zlib.crc32(text.encode())
    return value % HASHED, -1 if value >> 31 else 1


def waves_of(stamps: np.ndarray, column: Column) -> np.ndarray:
    """Return days since the first row, if they are an input, and the position of dates in the day, week and year.

    Until a year has passed since the first row, trend and season cannot be distinguished, and both are 0.
    """
    spanned = stamps - column.start >= YEAR * DAY if column.late else np.ones(len(stamps), bool)
    phases = [(stamps // DAY + 3) % 7 / 7, (stamps - NEW_YEAR) / DAY / YEAR]  # 1970 began on a Thursday
    if column.hours:
        phases.insert(0, stamps % DAY / DAY)
    turns = 2 * np.pi * np.stack(phases, 1)
    waves = np.stack([np.sin(turns), np.cos(turns)], 2).reshape(len(stamps), 2 * len(phases))
    waves[~spanned, -2:] = 0.0
    if not column.trend:
        return waves
    days = (stamps - column.start) / DAY - (YEAR if column.late else 0.0)
    return np.concatenate([np.where(spanned, days, 0.0)[:, None], waves], 1)


def _refuse(
    values: Values, array: pa.Array, kind: str, where: str, reasons: dict[int, str], spelling: Spelling = PLAIN
) -> None:
    what = WHAT[kind]
    if kind == "date" and spelling.dates:
        what = f"is not a date in the order {spelling.dates}"
    if kind == "number" and spelling.decimal == ",":
        what = "is not a number with a decimal comma"
    _note(values.bad, lambda i: f"{where}: {_value(array, i)} {what}", reasons)


def _refuse_large(data: np.ndarray, where: str, reasons: dict[int, str]) -> None:
    large = np.abs(data) > LARGEST_VALUE  # False for NaN
    _note(large, lambda i: f"{where}: {data[i]:g} is infinite or beyond {LARGEST_VALUE:g}", reasons)


def _refuse_nested(block: Block, name: str, reasons: dict[int, str]) -> None:
    for row in block.nested.get(name, ()):
        reasons.setdefault(int(row), f"column {quoted(name)}: a list or an object, where one value is needed")


def _note(rows: np.ndarray, reason: Callable[[int], str], reasons: dict[int, str]) -> None:
    """Note why a row is rejected; the first reason is kept."""
    if rows.any():
        for i in np.flatnonzero(rows).tolist():
            if i not in reasons:
                reasons[i] = reason(i)


def _value(array: pa.Array, row: int) -> str:
    return quoted(str(plain(array[row])))


def plain(scalar: pa.Scalar) -> str | float | None:
    """Return a value that JSON can represent."""
    try:
        value = scalar.as_py()
    except (ValueError, OverflowError, NotImplementedError):  # e.g. a date in the year 200,000
        return str(scalar.type)
    return value[:SHOWN] if isinstance(value, str) else value if isinstance(value, int | float | None) else str(value)


def _spell(block: Block, row: int) -> str:
    """The values of a row as JSON."""
    parts, length = [], 0
    for name, array in block.columns.items():
        value = plain(array[row])
        if value is not None:
            parts.append(f"{json.dumps(name[:SHOWN], ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}")
            length += len(parts[-1])
        if length > SHOWN:
            break
    return ("{" + ", ".join(parts) + "}")[:SHOWN]
