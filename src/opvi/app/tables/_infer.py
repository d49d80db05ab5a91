"""The schema, inferred from the first rows."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from opvi.app.tables._block import Block, TableError, cut, quoted
from opvi.app.tables._delimited import NUMBER
from opvi.app.tables._schema import DAY, HASHED, Column, Schema, labels_of, raw
from opvi.app.tables._source import named
from opvi.app.tables._values import Values, as_booleans, as_dates, as_levels, as_numbers, label
from opvi.types import LARGEST_VALUE

FIRST_ROWS = 1_000
MOST_FEATURES = 4_096
LEVELS = 32  # of a text that have columns of their own
NEARLY = 0.95  # of the values decide what a column holds; rows with the others are rejected
DIFFERENT = 0.9  # of the values: then a text only distinguishes rows
WHOLE_CLASSES = 10  # a whole-number target with more values is a regression's
COUNTED = 20  # rows from which on a row number is recognised
CONVERT = {"number": as_numbers, "boolean": as_booleans, "date": as_dates}
# Texts that a person reads as numbers or dates: €5, 12 %, 1,234.5 and 3,14; 31/01/2024 and 31.1.24.
LIKE_NUMBERS = re.compile(r"[+-]?[$£€¥]? ?[+-]?(?:\d{1,3}(?:[,.' ]\d{3})+|\d+)(?:[.,]\d+)? ?[%$£€¥]?", re.ASCII)
LIKE_DATES = re.compile(r"(?:\d{1,2}([/.-])\d{1,2}\1\d{2,4}|\d{4}([/.])\d{1,2}\2\d{1,2})(?:[ T].*)?", re.ASCII)


def infer_schema(
    blocks: Iterable[Block],
    target: str,
    task: str = "auto",
    classes: Sequence[str] | None = None,
    leave_out: Sequence[str] = (),
    rows: int = FIRST_ROWS,
) -> Schema:
    """Return what the columns mean, judged by the first rows of a source.

    Args:
        blocks: the first blocks of a source; rows after the first `rows` are not looked at.
        target: the column to predict.
        task: regression, classification, or auto: classification for text, truth values, and whole numbers of at
            most 10 different values.
        classes: the labels, if some may come later than the first rows.
        leave_out: columns that the model must not see.
    """
    if task not in ("auto", "regression", "classification"):
        raise TableError(f"the task {quoted(task)} is not known. Tasks: auto, regression, classification.")
    blocks = list(blocks)
    start = blocks[0].first if blocks else 0
    blocks = [part for block in blocks if (part := cut(block, start, start + rows)).rows > 0]
    count = sum(len(block.numbers) for block in blocks)
    if not count:
        malformed = [rejected for block in blocks for rejected in block.malformed]
        if not malformed:
            raise TableError("there is no row to learn from: the source holds none.")
        raise TableError(
            f"there is no row to learn from among the first {len(malformed):,}. The first was rejected: "
            f"{malformed[0].reason}."
        )
    names = list(dict.fromkeys(name for block in blocks for name in [*block.columns, *block.nested]))
    for name in (target, *leave_out):
        if name not in names:
            raise TableError(
                f"there is no column {quoted(name)}. {named(names)} If its first line holds values, add one of names."
            )
    if target in leave_out:
        raise TableError(f"the target {quoted(target)} cannot be left out.")
    notes: list[str] = []
    task, labels, classes = _task(First(blocks, target), task, classes, notes)
    columns = []
    inputs = [name for name in names if name not in (target, *leave_out)]
    for name in inputs:
        column, note = _column(First(blocks, name), alone=len(inputs) == 1)
        columns += [column] if column else []
        notes += [f"column {quoted(name)} {note}"] if note else []
    return _schema(target, task, list(classes), labels, columns, notes)


class First:
    """One column of the first rows."""

    def __init__(self, blocks: list[Block], name: str):
        self.name = name
        self.arrays = [raw(block, name, len(block.numbers)) for block in blocks]
        self.odd = np.concatenate([_nested(block, name) for block in blocks])  # lists and objects, in the rows
        self.open = any(block.open for block in blocks)
        self.kind = self._kind()

    @property
    def nested(self) -> bool:
        """Whether lists and objects are more than a slip."""
        there = sum(len(array) - array.null_count for array in self.arrays)
        return bool(self.odd.sum() > (1 - NEARLY) * (there + self.odd.sum()))

    def _kind(self) -> str:
        """number, boolean, date, text, or nothing if no value is there."""
        kind = next((a.type for a in self.arrays if a.null_count < len(a)), pa.null())
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_null(kind):
            return ""
        if not pa.types.is_string(kind):
            return _typed(kind)
        if not self.levels()[0]:
            return ""
        for kind in ("number", "boolean", "date"):
            values = self.values(kind)
            there = ~values.missing
            if values.bad.sum() <= (1 - NEARLY) * there.sum():
                return kind
        return "text"

    def values(self, kind: str) -> Values:
        """The column as one of the kinds; what is infinite or too large is bad."""
        parts = [CONVERT[kind](array) for array in self.arrays]
        data, missing, bad = (np.concatenate([part[i] for part in parts]) for i in range(3))
        large = np.abs(data) > LARGEST_VALUE  # False for NaN
        return Values(data, missing & ~self.odd, bad | large | self.odd)

    def levels(self) -> tuple[list[str], list[str]]:
        """Each row's text without the missing ones, and the different texts, the most frequent first."""
        out: list[str] = []
        for array in self.arrays:
            codes, texts = as_levels(array)
            out += [texts[code] for code in codes.tolist() if code >= 0]
        return out, [text for text, _ in sorted(Counter(out).items(), key=lambda item: (-item[1], item[0]))]


def _nested(block: Block, name: str) -> np.ndarray:
    out = np.zeros(len(block.numbers), bool)
    out[block.nested.get(name, [])] = True
    return out


def _typed(kind: pa.DataType) -> str:
    types = pa.types
    if types.is_boolean(kind):
        return "boolean"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "date"
    plain = (types.is_integer, types.is_floating, types.is_decimal, types.is_time, types.is_duration)
    return "number" if any(test(kind) for test in plain) else "other"


def _column(first: First, alone: bool) -> tuple[Column | None, str]:
    """How a column is encoded, or None; and what the user should know of it."""
    name = first.name
    if first.nested or first.kind == "other":
        return None, "left out: it holds lists, objects or a type that is not read"
    if not first.kind:
        return None, "" if first.open else "left out: no value among the first rows"
    if first.kind == "text":
        return _text(first)
    values = first.values(first.kind)
    sound = ~values.missing & ~values.bad
    if not sound.any():
        return None, "left out: no sound value among the first rows"
    gaps, wrong, data = bool(values.missing.any()), int(values.bad.sum()), values.data[sound]
    note = f"taken as {first.kind}s; {wrong} of the first rows hold something else, and such rows are rejected"
    note = note if wrong else ""
    if first.kind == "date":
        start = int(data[0])
        days = float(np.mean((data - start) / DAY))
        return Column(name, "date", gaps, days, start=start, hours=bool((data % DAY != 0).any())), note
    counts = len(data) >= COUNTED and sound.all() and data[0] == np.floor(data[0]) and (np.diff(data) == 1).all()
    if counts and not alone:
        return None, "left out: it counts the rows"
    return Column(name, first.kind, gaps, float(np.mean(data))), note


def _text(first: First) -> tuple[Column | None, str]:
    texts, levels = first.levels()
    gaps = bool(len(texts) < len(first.odd) - first.odd.sum())
    like, plain = _like(texts)
    hint = f"{quoted(texts[0])} and others look like {like}; write {plain} to have them learnt so" if like else ""
    if len(levels) <= LEVELS:
        return Column(first.name, "levels", gaps, levels=sorted(levels)), hint and f"taken as text: {hint}"
    hint = hint and f": {hint}"
    if len(levels) >= DIFFERENT * len(texts):
        return None, f"left out: {'' if len(levels) == len(texts) else 'nearly '}every value differs{hint}"
    return Column(first.name, "hashed", gaps), f"has {len(levels)} different texts: hashed into {HASHED} columns{hint}"


def _like(texts: list[str]) -> tuple[str, str]:
    """What texts were probably meant to be, and how that is written; nothing if they are just texts."""
    for pattern, like, plain in ((LIKE_NUMBERS, "numbers", "1234.5"), (LIKE_DATES, "dates", "2024-01-31")):
        if sum(pattern.fullmatch(text) is not None for text in texts) >= NEARLY * len(texts):
            return like, plain
    return "", ""


def _task(first: First, task: str, classes: Sequence[str] | None, notes: list[str]) -> tuple[str, str, Sequence[str]]:
    """The task, what the target holds, and the classes."""
    where = f"the target {quoted(first.name)}"
    if first.nested or first.kind in ("", "other"):
        raise TableError(f"{where} has no value among the first rows, or holds lists or objects. Choose another.")
    if classes is not None and task != "regression":
        labels, given = _given(classes, where)
        parts = [labels_of(array, labels, given) for array in first.arrays]
        other = np.concatenate([(codes < 0) & ~missing for codes, missing in parts])
        if other.any():
            notes.append(f"{where}: {other.sum():,} of the first rows hold none of the classes given, and are rejected")
        return "classification", labels, given
    numeric = first.kind == "number"
    values = first.values("number") if numeric else None
    data = np.unique(values.data[~values.missing & ~values.bad]) if values else np.empty(0)
    whole = numeric and len(data) <= WHOLE_CLASSES and (data == np.floor(data)).all()
    if task == "regression" or (task == "auto" and numeric and not whole):
        if not numeric:
            held = {"boolean": "truth values", "date": "dates"}.get(first.kind, "text")
            raise TableError(f"{where} holds {held}, but regression needs numbers. Use task classification.")
        _refuse_single([label(value) for value in data.tolist()], where)
        return "regression", "number", []
    if task == "auto" and first.kind == "date":
        raise TableError(f"{where} holds dates. Give a column of numbers, or of labels.")
    if numeric:
        labels, found = "number", [label(value) for value in data.tolist()]
        if task == "auto":
            notes.append(
                f"{where} holds whole numbers with {len(data)} values, taken as classes; else: task regression"
            )
    elif first.kind == "boolean":
        labels, found = "boolean", ["false", "true"]
    else:
        labels, found = "text", sorted(first.levels()[1])
        like, plain = _like(first.levels()[0])
        if task == "auto" and like:
            raise TableError(
                f"{where} holds texts such as {quoted(found[0])}, which look like {like}. Write them like {plain}; or, "
                "if they are labels, say so: task classification."
            )
    _refuse_single(found, where)
    rows = len(first.levels()[0])
    if len(found) > LEVELS and len(found) >= DIFFERENT * rows:
        raise TableError(
            f"{where} has {len(found)} classes in {rows} rows: (nearly) every value differs. Choose another."
        )
    return "classification", labels, found


def _given(classes: Sequence[str], where: str) -> tuple[str, list[str]]:
    names = [name.strip() for name in classes]
    if names and all(name.lower() in ("true", "false") for name in names):
        labels, names = "boolean", [name.lower() for name in names]
    elif names and all(NUMBER.fullmatch(name) for name in names):
        labels, names = "number", [label(float(name)) for name in names]
    else:
        labels = "text"
    if len(set(names)) < len(names) or len(names) < 2:
        raise TableError(f"{where} was given the classes {names}, but needs at least 2, all different.")
    return labels, names


def _refuse_single(found: list[str], where: str) -> None:
    if len(found) < 2:
        only = f"only the value {quoted(found[0])}" if found else "no sound value"
        raise TableError(
            f"{where} has {only} among the first rows, but there is nothing to learn without 2. Shuffle the rows, name "
            "the classes, or choose another column."
        )


def _schema(target: str, task: str, classes: list[str], labels: str, columns: list[Column], notes: list[str]) -> Schema:
    """All of it, with names that differ."""
    if not columns:
        why = " ".join(f"{note}." for note in notes)
        raise TableError(f"no column is left to learn from. {why or 'At least one besides the target is needed.'}")
    names = [(name, column.name) for column in columns for name in column.features]
    if len(names) > MOST_FEATURES:
        widest = sorted(columns, key=lambda column: -len(column.features))[:3]
        raise TableError(
            f"the columns make {len(names):,} numbers a row, but at most {MOST_FEATURES:,} are learnt from. Leave some "
            f"out, e.g. {', '.join(quoted(column.name) for column in widest)}."
        )
    seen: dict[str, int] = {}
    features = []
    for name, _ in names:
        fresh = name
        while fresh in seen:
            seen[name] += 1
            fresh = f"{name} ({seen[name]})"
        seen[fresh] = 1
        features.append(fresh)
    return Schema(target, task, classes, labels, columns, features, [origin for _, origin in names], notes)
