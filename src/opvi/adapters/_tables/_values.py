"""Raw values as numbers, booleans, dates or text, element by element, so blocks may be cut anywhere.

Text is first converted a whole array at once; if that fails, each value is converted by itself, by the same
rule. Spaces around a value do not count.
"""

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from opvi.adapters._tables._arrow import as_arrow, in_numpy
from opvi.adapters._tables._delimited import NUMBER
from opvi.adapters._tables._spelling import EPOCH, PLAIN, Spelling, number, stamp

WHOLE = re.compile(r"[+-]?\d{1,4000}", re.ASCII)
ZEROS = re.compile(r"[+-]?0\d+", re.ASCII)  # 007 is a code, not a number
INFINITE = re.compile(r"[+-]?inf(?:inity)?", re.IGNORECASE)
DATE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[Tt ]\d\d(?::\d\d(?::\d\d(?:[.,]\d{1,9})?)?)?(?:[Zz]|[+-]\d\d(?::?\d\d)?)?)?", re.ASCII
)
FIRST, LAST = ((bound - EPOCH) // timedelta(microseconds=1) for bound in (datetime.min, datetime.max))
TRUTH = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}
SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # units in a second


class Values(NamedTuple):
    """One column of a block."""

    data: np.ndarray  # NaN, or 0 where whole numbers are kept, where nothing sound stands
    missing: np.ndarray  # [n] bool
    bad: np.ndarray  # [n] bool: there is a value, but not of this kind


def as_numbers(array: pa.Array, spelling: Spelling = PLAIN) -> Values:
    """Numbers in float64; infinity is kept."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _taken(as_numbers(array.dictionary, spelling), array.indices, np.nan)
    if pa.types.is_string(kind):
        quick = (lambda texts: _floats(texts.cast(pa.float64()))) if spelling.decimal == "." else None
        return _quickly(array, quick, partial(_number, spelling=spelling), np.nan, spelling)
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    elif pa.types.is_time(kind) or pa.types.is_duration(kind):
        array = pc.divide(
            array.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).cast(pa.float64()), float(SECOND[kind.unit])
        )
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
        return _nothing(array, np.nan)
    data = in_numpy(array.cast(pa.float64(), safe=False))
    missing = np.isnan(data)
    return Values(data, missing, np.zeros(len(data), bool))


def as_booleans(array: pa.Array, spelling: Spelling = PLAIN) -> Values:
    """1 for true, 0 for false."""
    if pa.types.is_dictionary(array.type):
        return _taken(as_booleans(array.dictionary, spelling), array.indices, np.nan)
    if pa.types.is_string(array.type):
        return _singly(array, lambda text: TRUTH[text.lower()], np.nan, spelling)
    values = as_numbers(array)
    bad = ~values.missing & ~np.isin(values.data, (0.0, 1.0))
    return Values(np.where(bad, np.nan, values.data), values.missing, values.bad | bad)


def as_dates(array: pa.Array, spelling: Spelling = PLAIN) -> Values:
    """Microseconds since 1970 in int64, in UTC where a zone is given; years 1 to 9999."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _taken(as_dates(array.dictionary, spelling), array.indices, 0)
    if pa.types.is_string(kind):
        if not spelling.dates:
            return _quickly(array, _stamps, _date, 0, spelling)
        return _quickly(array, None, partial(stamp, order=spelling.dates), 0, spelling)
    if pa.types.is_date32(kind):
        per, array = 1 / 86_400, array.cast(pa.int32())
    elif pa.types.is_date64(kind):
        per, array = SECOND["ms"], array.cast(pa.int64())
    elif pa.types.is_timestamp(kind):
        per, array = SECOND[kind.unit], array.cast(pa.int64())
    else:
        return _nothing(array, 0)
    missing = in_numpy(array.is_null())
    ticks = in_numpy(array.cast(pa.int64()), 0)
    bad = (ticks < FIRST / 10**6 * per) | (ticks > LAST / 10**6 * per)
    ticks = np.where(bad, 0, ticks)
    data = ticks // (per // 10**6) if per > 10**6 else ticks * round(10**6 / per)
    return Values(data, missing, bad & ~missing)


def as_levels(array: pa.Array, spelling: Spelling = PLAIN) -> tuple[np.ndarray, list[str]]:
    """Return for each row the index of its text in a list, -1 if missing. The list may contain a text twice."""
    kind = array.type
    if not pa.types.is_dictionary(kind):
        if not pa.types.is_string(kind):
            array = _spelt(array)
        array = array.dictionary_encode()
    elif not pa.types.is_string(kind.value_type):
        array = pa.DictionaryArray.from_arrays(array.indices, _spelt(array.dictionary))
    texts = [(text or "").strip() for text in array.dictionary.to_pylist()]
    missing = spelling.missing()
    known = np.array([text.lower() not in missing for text in texts] + [False], bool)
    codes = in_numpy(array.indices.cast(pa.int64()), -1)
    return np.where(known[codes], codes, -1), [spelling.key(text) for text in texts]


def _spelt(array: pa.Array) -> pa.Array:
    """Return typed values as text: a whole number without a decimal point, whatever its type."""
    if pa.types.is_null(array.type) or pa.types.is_nested(array.type):
        return pa.nulls(len(array), pa.string())
    if pa.types.is_boolean(array.type):
        return pc.if_else(array, "true", "false")
    if pa.types.is_integer(array.type):
        return array.cast(pa.string())  # beyond 2^53, too
    values = as_numbers(array)
    if values.bad.any():  # dates, and types that nobody expects
        try:
            return array.cast(pa.string())
        except pa.ArrowException:
            return pa.nulls(len(array), pa.string())
    return pa.array([None if np.isnan(value) else label(value) for value in values.data.tolist()], pa.string())


def label(value: float) -> str:
    """A number as the name of a class or level."""
    return str(int(value)) if value == value // 1 and abs(value) < 1e15 else repr(value)


def whole_or_text(text: str, spelling: Spelling = PLAIN) -> str:
    """Return a key that is equal for all spellings of a number, of any length; an empty string for other text."""
    try:
        if WHOLE.fullmatch(text):
            return str(int(text))
        value = _number(text, spelling)
        return str(int(value)) if value == value // 1 else repr(value)
    except (ValueError, OverflowError):
        return ""


def _nothing(array: pa.Array, blank: float) -> Values:
    """Return a column of the wrong kind: every value is bad."""
    missing = in_numpy(array.is_null())
    return Values(np.full(len(array), blank), missing, ~missing)


def _taken(values: Values, indices: pa.Array, blank: float) -> Values:
    """Expand dictionary values to rows."""
    places = in_numpy(indices.cast(pa.int64()), -1)  # -1: the added last one
    data = np.append(values.data, np.array(blank, values.data.dtype))
    return Values(data[places], np.append(values.missing, True)[places], np.append(values.bad, False)[places])


def _quickly(
    array: pa.Array,
    quick: Callable[[pa.Array], np.ndarray | None] | None,
    slow: Callable[[str], float],
    blank: float,
    spelling: Spelling,
) -> Values:
    """Convert a whole text array; if that fails, without spaces and words for gaps; if that fails, one by one."""
    if quick is None:  # each text that differs, once
        array = array.dictionary_encode()
        return _taken(_singly(array.dictionary, slow, blank, spelling), array.indices, blank)
    ways = (lambda: _tidied(array, spelling),) if spelling.na else (lambda: array, lambda: _tidied(array, spelling))
    for attempt in ways:
        texts = attempt()
        try:
            data = quick(texts)
        except pa.ArrowInvalid:
            continue
        if data is not None:
            return Values(data, in_numpy(texts.is_null()), np.zeros(len(data), bool))
    return _singly(array, slow, blank, spelling)


def _tidied(array: pa.Array, spelling: Spelling) -> pa.Array:
    trimmed = pc.ascii_trim_whitespace(array)
    words = pc.is_in(pc.ascii_lower(trimmed), value_set=as_arrow(sorted(spelling.missing(True))))
    return pc.if_else(words, pa.nulls(1, pa.string())[0], trimmed)


def _floats(array: pa.Array) -> np.ndarray | None:
    """Return floats, or None if there is a NaN: it may stand for something we do not accept as a gap."""
    data = in_numpy(array)
    return data if int(np.isnan(data).sum()) == array.null_count else None


def _stamps(array: pa.Array) -> np.ndarray | None:
    """Return timestamps, or None if a year lies outside 1 to 9999."""
    try:
        stamps = array.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:
        stamps = array.cast(pa.timestamp("us", "UTC"))
    data = in_numpy(stamps.cast(pa.int64()), 0)
    return data if ((data >= FIRST) & (data <= LAST)).all() else None


def _singly(array: pa.Array, parse: Callable[[str], float], blank: float, spelling: Spelling = PLAIN) -> Values:
    """Convert each text by itself. `parse` returns a value or raises."""
    data = np.full(len(array), blank)
    missing, bad = np.zeros(len(array), bool), np.zeros(len(array), bool)
    words = spelling.missing(True)
    for place, text in enumerate(array.to_pylist()):
        text = (text or "").strip()
        if text.lower() in words:
            missing[place] = True
            continue
        try:
            data[place] = parse(text)
        except (ValueError, OverflowError, KeyError):
            bad[place] = True
    return Values(data, missing, bad)


def _number(text: str, spelling: Spelling = PLAIN) -> float:
    if spelling.decimal == "." and (NUMBER.fullmatch(text) or INFINITE.fullmatch(text)):
        return float(text)
    return number(text, spelling)


def _date(text: str) -> int:
    if not DATE.fullmatch(text):
        raise ValueError
    stamp = datetime.fromisoformat(text.upper().replace(",", "."))
    since = stamp.replace(tzinfo=None) - (stamp.utcoffset() or timedelta(0)) - EPOCH
    return since // timedelta(microseconds=1)
