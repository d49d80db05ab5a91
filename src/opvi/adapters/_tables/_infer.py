"""The schema, inferred from the first rows."""

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from opvi.adapters._tables._block import Block, TableError, cut, quoted
from opvi.adapters._tables._delimited import NUMBER
from opvi.adapters._tables._first import First, Reading, settle
from opvi.adapters._tables._schema import DAY, HASHED, SMALLEST_POSITIVE, Column, Schema, labels_of, waves_of
from opvi.adapters._tables._source import named
from opvi.adapters._tables._spelling import folded
from opvi.adapters._tables._values import TRUTH, WHOLE, ZEROS, Values, label, whole_or_text
from opvi.running._origin import origin_of
from opvi.types import LARGEST_VALUE

FIRST_ROWS = 1_000
MOST_FEATURES = 4_096
LEVELS = 32  # of a text that have columns of their own
DIFFERENT = 0.9  # of the values: then a text only distinguishes rows
WHOLE_CLASSES = 10  # a whole-number target with more values is a regression's
COUNTED = 20  # rows from which on a row number is recognised
SMALLEST = 1 / LARGEST_VALUE  # values that differ by less have squares that a float32 does not tell from 0
RISING = 200  # rows from which on numbers with gaps are taken for one, where each is larger than the one before
NAMES_ROWS = re.compile(r"(?:^|[^A-Za-z])(?i:id|uuid|guid)$|[a-z]I[Dd]$")  # how a column is called that names rows

PLAINLY = Reading()


def infer_schema(
    blocks: Iterable[Block],
    target: str,
    task: str = "auto",
    classes: Sequence[str] | None = None,
    leave_out: Sequence[str] = (),
    rows: int = FIRST_ROWS,
    reading: Reading = PLAINLY,
    positive: bool = False,
    counts: bool = False,
) -> Schema:
    """Return what the columns mean, judged by the first rows of a source.

    Args:
        blocks: the first blocks of a source; only the first `rows` rows are used.
        target: the column to predict.
        task: regression, classification, or auto: classification for text, truth values, and whole numbers of at
            most 10 different values.
        classes: the labels, if no others are allowed; otherwise labels that appear later become classes too.
        leave_out: columns that the model must not see.
        reading: how numbers, dates and gaps are written, as far as the user says.
        positive: learn the logarithm of a target that is always positive, so that predictions are positive too.
        counts: whether the target is a count; predictions are then distributions over 0, 1, 2, …
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
    reading = reading.checked()
    aim, *firsts = (First(blocks, name, reading) for name in (target, *names) if name not in leave_out)
    firsts = [first for first in firsts if first.name != target]
    told = settle([aim, *firsts])
    notes = [told] if told else []
    closed = classes is not None
    task = "regression" if counts and task == "auto" else task  # few small numbers are no classes then
    task, labels, classes = _task(aim, task, classes, notes)
    if positive or counts:
        _check_positive(aim, task, counts)
    made = _schema(target, task, list(classes), labels, _columns(firsts, notes), notes)
    shift = 0.0 if positive or counts or task != "regression" else _shift(aim.values("number"))
    if task == "regression" and not positive:
        _refuse_tiny(aim.values("number"), shift, target)
    return made._replace(spelling=aim.spelling, positive=positive, closed=closed, counts=counts, shift=shift)


def _refuse_tiny(values: Values, shift: float, target: str) -> None:
    """Refuse targets whose squares a float32 does not tell from 0: a model would learn nothing, and not say so."""
    size = np.abs(values.data[~values.missing & ~values.bad] - shift).max(initial=0.0)
    if 0 < size < SMALLEST:
        raise TableError(
            f"the target {quoted(target)} varies by less than {SMALLEST:g}. Give it in a smaller unit, such that it "
            "varies by about 1."
        )


def _shift(values: Values) -> float:
    return float(origin_of(values.data[~values.missing & ~values.bad][:, None])[0])


def infer_inputs(blocks: Iterable[Block], rows: int, reading: Reading = PLAINLY, shuffled: bool = False) -> Schema:
    """Return what the columns of a table without a target mean, judged by its first rows.

    Rows that will be `shuffled` before learning are not treated as sorted by time, whatever their dates say.
    """
    blocks = [part for block in blocks if (part := cut(block, 0, rows)).rows > 0]
    if not blocks:
        raise TableError("there is no row to learn from: the table has none.")
    firsts = [First(blocks, name, reading.checked()) for name in blocks[0].columns]
    told = settle(firsts)
    notes = [told] if told else []
    return _schema("", "regression", [], "number", _columns(firsts, notes, shuffled), notes)


def _columns(firsts: list[First], notes: list[str], shuffled: bool = False) -> list[Column]:
    """Return the input columns; `notes` collects what the user should know about them."""
    columns = []
    for first in firsts:
        column, note = _column(first, alone=len(firsts) == 1, shuffled=shuffled)
        columns += [column._replace(spelling=first.spelling)] if column else []
        notes += [f"column {quoted(first.name)} {note}"] if note else []
    return columns


def _column(first: First, alone: bool, shuffled: bool) -> tuple[Column | None, str]:
    """Return how a column is encoded, or None, and what the user should know about it."""
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
        column = Column(name, "date", gaps, start=int(data.min()), hours=bool((data % DAY != 0).any()), late=True)
        if len(data) >= COUNTED and (np.diff(data) >= 0).all() and not shuffled:
            return column._replace(trend=False), note  # rows in the order of time: forgetting follows a trend
        return column._replace(mean=float(waves_of(data.astype(np.int64), column)[:, 0].mean())), note
    whole = len(data) >= COUNTED and sound.all() and (data == np.floor(data)).all()
    steps = np.diff(data) if whole else np.zeros(1)
    if (steps == 1).all() and not alone:
        return None, "left out: it counts the rows"
    if (steps > 0).all() and len(data) >= RISING and not alone:
        return (
            None,
            "left out: it rises from row to row, as numbers of orders do, and only says when a row came",
        )
    if whole and len(data) >= RISING and NAMES_ROWS.search(name) and len(np.unique(data)) == len(data) and not alone:
        return None, "left out: it is called an ID, and no two of the first rows have the same"
    shift = float(origin_of(data[:, None])[0]) if first.kind == "number" else 0.0
    if 0 < np.abs(data - shift).max() < SMALLEST:
        return (
            None,
            f"left out: its values differ by less than {SMALLEST:g}. Give it in a smaller unit to have it learnt",
        )
    return Column(name, first.kind, gaps, float(np.mean(data)), shift=shift), note


def _check_positive(first: First, task: str, counts: bool) -> None:
    if task != "regression":
        what = "a count" if counts else "positive"
        raise TableError(f"the target {quoted(first.name)} has classes, but only a number can be {what}.")
    values = first.values("number")
    data = values.data[~values.missing & ~values.bad]
    low = float(data.min())
    if counts and (low < 0 or (data != np.floor(data)).any()):
        odd = float(data[(data < 0) | (data != np.floor(data))][0])
        raise TableError(
            f"the target {quoted(first.name)} holds {odd:g} among the first rows, so it is not a count. Learn "
            "it as it is, or with --positive."
        )
    if not counts and low < SMALLEST_POSITIVE:
        raise TableError(
            f"the target {quoted(first.name)} holds {low:g} among the first rows, so it is not always positive. Learn "
            "it as it is, or add a constant first."
        )


def _text(first: First) -> tuple[Column | None, str]:
    if first.yes_or_no():
        first.spelling = first.spelling._replace(fold=True)
    texts, levels = first.levels()
    gaps = bool(len(texts) < len(first.odd) - first.odd.sum())
    like, remedy = first.like()
    hint = f"{quoted(texts[0])} and others look like {like}; {remedy} to have them learnt so" if like else ""
    if len(levels) <= LEVELS:
        return Column(first.name, "levels", gaps, levels=sorted(levels)), hint and f"taken as text: {hint}"
    hint = hint and f": {hint}"
    if len(levels) >= DIFFERENT * len(texts):
        return None, f"left out: {'' if len(levels) == len(texts) else 'nearly '}every value differs{hint}"
    return Column(
        first.name, "hashed", gaps
    ), f"has {len(levels)} different strings: hashed into {HASHED} columns{hint}"


def _task(first: First, task: str, classes: Sequence[str] | None, notes: list[str]) -> tuple[str, str, Sequence[str]]:
    """The task, what the target holds, and the classes."""
    where = f"the target {quoted(first.name)}"
    if first.nested or first.kind in ("", "other"):
        raise TableError(f"{where} has no value among the first rows, or holds lists or objects. Choose another.")
    if classes is not None and task != "regression":
        labels, given = _given(classes, where)
        parts = [labels_of(array, labels, given, first.spelling) for array in first.arrays]
        other = np.concatenate([(codes < 0) & ~missing for codes, missing in parts])
        if other.any():
            notes.append(f"{where}: {other.sum():,} of the first rows hold none of the classes given, and are rejected")
        return "classification", labels, given
    numeric = first.kind == "number"
    values = first.values("number") if numeric else None
    data = np.unique(values.data[~values.missing & ~values.bad]) if values else np.empty(0)
    whole = bool(numeric and (data == np.floor(data)).all())
    few = whole and len({whole_or_text(text, first.spelling) for text in first.levels()[1]} - {""}) <= WHOLE_CLASSES
    if task == "regression" or (task == "auto" and numeric and not few):
        if not numeric:
            held = {"boolean": "truth values", "date": "dates"}.get(first.kind, "text")
            if unit := first.kind == "text" and first.unit():
                raise TableError(
                    f"{where} holds numbers with the unit {quoted(unit)}, such as {quoted(first.levels()[1][0])}, but "
                    "regression needs plain numbers. Remove the unit."
                )
            raise TableError(f"{where} holds {held}, but regression needs numbers. Use task classification.")
        _refuse_single([label(value) for value in data.tolist()], where)
        return "regression", "number", []
    if task == "auto" and first.kind == "date":
        raise TableError(f"{where} holds dates. Give a column of numbers, or of labels.")
    texts = first.levels()[1]
    if numeric and not any(ZEROS.fullmatch(text) for text in texts):
        labels, found = _numbers(first, texts)
        if task == "auto":
            notes.append(
                f"{where} holds whole numbers with {len(found)} values, taken as classes; else: task regression"
            )
        found += _words(first, lambda text: not whole_or_text(text, first.spelling))
    elif first.kind == "boolean":
        labels = "boolean" if {"1", "0"} & set(texts) else "truth"
        found = ["false", "true", *_words(first, lambda text: text.lower() not in TRUTH)]
    else:
        labels, found = "text", sorted(_as_written(first))
        if not numeric:
            _doubt(first, found, task, where, notes)
    _refuse_single(found, where)
    rows = len(first.levels()[0])
    if len(found) > LEVELS and len(found) >= DIFFERENT * rows:
        raise TableError(
            f"{where} has {len(found)} classes in {rows} rows: (nearly) every value differs. Choose another."
        )
    return "classification", labels, found


def _doubt(first: First, found: list[str], task: str, where: str, notes: list[str]) -> None:
    """Refuse strings that were hardly meant as classes; note those that may have been."""
    like, remedy = first.like()
    if task == "auto" and like:
        if not first.unit() or len(found) > WHOLE_CLASSES:
            raise TableError(
                f"{where} holds strings such as {quoted(found[0])}, which look like {like}. {remedy.capitalize()}; "
                "or, if they are labels, say so: task classification."
            )
        notes.append(f"{where} holds {like}, taken as {len(found)} classes; {remedy} to have them learnt as numbers")
    same: dict[str, list[str]] = {}
    for text in found:
        same.setdefault(folded(text), []).append(text)
    twice = max(same.values(), key=len)
    if not first.spelling.fold and len(twice) > 1:
        notes.append(
            f"{where} has {len(found)} classes, of which some differ only by case, spaces, or y for yes and n for no: "
            f"{', '.join(map(quoted, twice[:4]))}. To make them one: --fold-case"
        )


def _numbers(first: First, texts: list[str]) -> tuple[str, list[str]]:
    """Return what labels that are mostly numbers hold, and the numbers among them, each once, in ascending order."""
    spelt = {text: key for text in texts if (key := whole_or_text(text, first.spelling))}
    plain = bool(first.forms) and not first.open and all(text == key for text, key in spelt.items())
    found = sorted(set(spelt.values()), key=lambda key: (float(key), int(key) if WHOLE.fullmatch(key) else 0))
    return "whole" if plain else "number", found


def _words(first: First, odd: Callable[[str], bool]) -> list[str]:
    """Return the labels among numbers or truth values that are neither these nor gaps, as they are written."""
    gaps = first.spelling.missing(among_values=True)
    return sorted(text for text in _as_written(first) if odd(text) and text.lower() not in gaps)


def _as_written(first: First) -> list[str]:
    """The strings of a column, each in its most frequent spelling."""
    if not first.spelling.fold:
        return first.levels()[1]
    first.spelling, key = first.spelling._replace(fold=False), first.spelling.key
    texts = first.levels()[1]
    first.spelling = first.spelling._replace(fold=True)
    return list({key(text): text for text in reversed(texts)}.values())


def _given(classes: Sequence[str], where: str) -> tuple[str, list[str]]:
    names = [name.strip() for name in classes]
    if names and all(name.lower() in ("true", "false") for name in names):
        labels, names = "boolean", [name.lower() for name in names]
    elif names and all(NUMBER.fullmatch(name) and not ZEROS.fullmatch(name) for name in names):
        labels, names = "number", [whole_or_text(name) for name in names]
    else:
        labels = "text"
    if len(set(names)) < len(names) or len(names) < 2:
        raise TableError(f"{where} was given the classes {names}, but needs at least 2, all different.")
    return labels, names


def _refuse_single(found: list[str], where: str) -> None:
    if len(found) < 2:
        only = f"only the value {quoted(found[0])}" if found else "no sound value"
        raise TableError(
            f"{where} has {only} among the first rows, but learning needs at least 2 different ones. Shuffle the rows, "
            "name the classes, or choose another column."
        )


def _schema(target: str, task: str, classes: list[str], labels: str, columns: list[Column], notes: list[str]) -> Schema:
    """Return the schema, with distinct feature names."""
    if not columns:
        why = " ".join(f"{note}." for note in notes)
        raise TableError(f"no column is left to learn from. {why or 'At least one besides the target is needed.'}")
    names = [(name, column.name) for column in columns for name in column.features]
    if len(names) > MOST_FEATURES:
        widest = sorted(columns, key=lambda column: -len(column.features))[:3]
        raise TableError(
            f"the columns make {len(names):,} numbers per row, but at most {MOST_FEATURES:,} are learnt from. Leave "
            f"some out, e.g. {', '.join(quoted(column.name) for column in widest)}."
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
