"""One column of the first rows: what it holds, and how values are written."""

import re
from collections import Counter
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from opvi.adapters._tables._block import Block, TableError, quoted
from opvi.adapters._tables._schema import raw
from opvi.adapters._tables._spelling import DAY, DECIMALS, ORDERS, PLAIN, THOUSANDS, date_orders, folded, spellings
from opvi.adapters._tables._values import Values, as_booleans, as_dates, as_levels, as_numbers
from opvi.types import LARGEST_VALUE

NEARLY = 0.95  # of the values decide what a column holds; rows with the others are rejected
CONVERT = {"number": as_numbers, "boolean": as_booleans, "date": as_dates}
# The simplest first, of those that fit equally well.
FORMS = [(".", ""), (".", ","), (",", ""), (",", "."), (".", " "), (",", " "), (".", "'"), (",", "'")]
SIGN = re.compile(r"[$£€¥₹%]|EUR|USD|GBP|CHF|JPY|kr|zł")
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(?:\.\d{3})+", re.ASCII)  # 1.234: a thousand, or not
# Texts that a person reads as numbers or dates: €5, 12 %, 1,234.5 and 3,14; 31/01/2024 and 31.1.24.
LIKE_NUMBERS = re.compile(r"[+-]?[$£€¥]? ?[+-]?(?:\d{1,3}(?:[,.' ]\d{3})+|\d+)(?:[.,]\d+)? ?[%$£€¥]?", re.ASCII)
LIKE_DATES = re.compile(r"(?:\d{1,2}([/.-])\d{1,2}\1\d{2,4}|\d{4}([/.])\d{1,2}\2\d{1,2})(?:[ T].*)?", re.ASCII)
# A number and its unit: 50 kg, 1.557,63 km, 21°C, 80 m2.
WITH_UNIT = re.compile(r"[+-]?(?:\d{1,3}(?:[,.' ]\d{3})+|\d+)(?:[.,]\d+)? ?((?:[^\W\d_]|[°/])[^\d]{0,14}[23]?)")
NAMES = {"dmy": "day, month, year", "mdy": "month, day, year", "ymd": "year, month, day"}


class Reading(NamedTuple):
    """What the user says about how values are written; anything that is None is inferred from the rows."""

    decimal: str | None = None
    thousands: str | None = None
    dates: str | None = None  # dmy, mdy, ymd, or a pattern with %
    na: tuple[str, ...] = ()
    fold: bool = False
    semicolons: bool = False  # between the fields, as where a comma is the decimal sign

    def checked(self) -> "Reading":
        """Return the same with words in lower case; raise an error for impossible settings."""
        if self.decimal not in (None, *DECIMALS):
            raise TableError(f"the decimal sign is {quoted(str(self.decimal))}, but must be `.` or `,`.")
        if self.thousands not in (None, *THOUSANDS):
            raise TableError(
                f"the thousands separator is {quoted(str(self.thousands))}, but must be a comma, a point, a space, "
                "an apostrophe or nothing."
            )
        if self.decimal == self.thousands is not None:
            raise TableError(f"{quoted(str(self.decimal))} cannot be both the decimal and the thousands separator.")
        if self.dates is not None and self.dates not in ORDERS and "%" not in self.dates:
            raise TableError(
                f"the date format is {quoted(self.dates)}, but must be dmy, mdy, ymd, or a pattern like %d.%m.%Y."
            )
        return self._replace(na=tuple(word.strip().lower() for word in self.na))

    @property
    def forms(self) -> list[tuple[str, str]]:
        """The number formats that may be meant."""
        forms = [form for form in FORMS if self.decimal in (None, form[0])]
        forms = [form for form in forms if self.thousands in (None, form[1]) or not form[1]]
        return [form for form in forms if form[0] != self.thousands]


class First:
    """One column of the first rows."""

    def __init__(self, blocks: list[Block], name: str, reading: Reading = Reading()):  # noqa: B008 (never written to)
        self.name, self.reading = name, reading
        self.spelling = PLAIN._replace(na=reading.na, fold=reading.fold)
        self.arrays = [raw(block, name, len(block.numbers)) for block in blocks]
        self.odd = np.concatenate([_nested(block, name) for block in blocks])  # lists and objects, in the rows
        self.open = any(block.open for block in blocks)
        self.forms: dict[tuple[str, str], int] = {}  # in which its strings are numbers, and how many are not
        self.orders: list[tuple[str, int, int]] = []  # the same of dates
        self.kind = self._kind()

    @property
    def nested(self) -> bool:
        """Whether lists and objects are more than an exception."""
        there = sum(len(array) - array.null_count for array in self.arrays)
        return bool(self.odd.sum() > (1 - NEARLY) * (there + self.odd.sum()))

    def _kind(self) -> str:
        """Return "number", "boolean", "date" or "text"; an empty string if there are no values."""
        kind = next((a.type for a in self.arrays if a.null_count < len(a)), pa.null())
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_null(kind):
            return ""
        if not pa.types.is_string(kind):
            return _typed(kind)
        gaps = self.spelling.missing(among_values=True)
        texts = self.levels()[0]
        values = [text for text in texts if text.lower() not in gaps]
        if not values:
            return "text" if texts else ""
        if self.reading.dates and (found := date_orders(values, [self.reading.dates], 1 - NEARLY)):
            self.orders = found
            return "date"
        self.forms = self._forms(values)
        if self.forms:
            return "number"
        for kind in ("boolean", "date"):
            if self._mostly(kind):
                return kind
        if sum(DAY.fullmatch(text) is not None for text in values[:20]) >= NEARLY * len(values[:20]) - 1:
            self.orders = date_orders(values, [self.reading.dates] if self.reading.dates else ORDERS, 1 - NEARLY)
        return "date" if self.orders else "text"

    def _forms(self, texts: list[str]) -> dict[tuple[str, str], int]:
        """Return the formats in which the strings are numbers; plain numbers need no further check."""
        plain = self.reading.forms[0] == (".", "")
        if plain and self._mostly("number", None):
            dotted = [text for text in texts if "." in text]
            if not all(GROUPED.fullmatch(text) for text in dotted):
                return {(".", ""): 0}
            if not dotted:  # whole numbers are the same in all
                return dict.fromkeys((form for form in self.reading.forms if not form[1]), 0)
        return spellings(texts, self.reading.forms, 1 - NEARLY)

    def _mostly(self, kind: str, share: float | None = 1 - NEARLY) -> bool:
        """Return whether all but a few values are of a kind; all of them if no share is given."""
        values = self.values(kind)
        there = ~values.missing
        return bool(there.any() and values.bad.sum() <= (share or 0) * there.sum())

    def values(self, kind: str) -> Values:
        """Return the column as one of the kinds; infinite or too large values are bad."""
        parts = [CONVERT[kind](array, self.spelling) for array in self.arrays]
        data, missing, bad = (np.concatenate([part[i] for part in parts]) for i in range(3))
        large = np.abs(data) > LARGEST_VALUE  # False for NaN
        return Values(data, missing & ~self.odd, bad | large | self.odd)

    def levels(self) -> tuple[list[str], list[str]]:
        """Return the text of each row that has one, and the distinct strings, most frequent first."""
        out: list[str] = []
        for array in self.arrays:
            codes, texts = as_levels(array, self.spelling)
            out += [texts[code] for code in codes.tolist() if code >= 0]
        return out, [text for text, _ in sorted(Counter(out).items(), key=lambda item: (-item[1], item[0]))]

    def yes_or_no(self) -> bool:
        """Whether every string is some spelling of yes or no."""
        return {folded(text) for text in self.levels()[1]} == {"yes", "no"}

    def like(self) -> tuple[str, str]:
        """Return what strings were probably meant to be and the remedy; nothing if they are just strings."""
        texts = [text for text in self.levels()[0] if not text.isdigit()]  # whole numbers are not misspelt, but long
        for pattern, like, remedy in (
            (LIKE_NUMBERS, "numbers", "write them like 1234.5"),
            (LIKE_DATES, "dates", "write them like 2024-01-31"),
        ):
            if texts and sum(pattern.fullmatch(text) is not None for text in texts) >= NEARLY * len(texts):
                return self._misread(texts, remedy) if like == "dates" and self.reading.dates else (like, remedy)
        if unit := self.unit():
            return f"numbers with the unit {quoted(unit)}", "remove the unit"
        return "", ""

    def _misread(self, texts: list[str], remedy: str) -> tuple[str, str]:
        """Return that dates do not fit the order or pattern that the user gave, and those that they fit."""
        fits = [quoted(order) for order, _, _ in date_orders(texts, ORDERS, 1 - NEARLY)]
        remedy = f"give the date format {' or '.join(fits)}" if fits else remedy
        return f"dates, but do not fit the date format given, {quoted(str(self.reading.dates))}", remedy

    def unit(self) -> str:
        """Return the unit that follows the number in nearly all strings; nothing if there is none."""
        texts = [text for text in self.levels()[0] if not text.isdigit()]
        found = Counter(match[1] for text in texts if (match := WITH_UNIT.fullmatch(text)))
        unit, count = max(found.items(), key=lambda item: item[1], default=("", 0))
        return unit if count >= NEARLY * len(texts) else ""

    @property
    def signs(self) -> bool:
        """Whether numbers carry a currency or a percent sign."""
        return self.kind == "number" and any(SIGN.search(text) for text in self.levels()[1][:50])


def settle(columns: list[First]) -> str:
    """Choose between formats that fit a column equally well by the other columns; return notes for the user.

    Without other hints `1.234` has a decimal point and `1,234` a thousands separator, except next to semicolons.
    """
    if not columns:
        return ""
    reading = columns[0].reading
    decimals = [{form[0] for form in _best(column.forms)} for column in columns if column.forms]
    sure = Counter(sign for signs in decimals if len(signs) == 1 for sign in signs)
    voted = "," if sure[","] > sure["."] else "." if sure["."] else None
    for column in columns:
        if column.forms:
            form = _form(column, voted, reading.semicolons)
            column.spelling = column.spelling._replace(decimal=form[0], thousands=form[1])
    seen = Counter((c.spelling.decimal, c.spelling.thousands) for c in columns if c.forms and c.spelling.thousands)
    for column in columns:
        if column.forms and not column.spelling.thousands:
            decimal = column.spelling.decimal
            other = [form for form, _ in seen.most_common() if form[0] == decimal]
            more = reading.thousands or (other[0][1] if other else "." if decimal == "," else "")
            column.spelling = column.spelling._replace(thousands=more)
        if column.forms and not column._mostly("number"):  # too large for numbers
            column.kind, column.forms = "text", {}
    comma = voted == "," or reading.semicolons
    ordered = Counter(_best_orders(c)[0][0] for c in columns if c.orders and len(_best_orders(c)) == 1)
    for column in columns:
        if column.orders:
            order = min(_best_orders(column), key=lambda found: (-ordered[found[0]], _odd_order(column, found, comma)))
            column.spelling = column.spelling._replace(dates=order[0])
    return _told(columns)


def _best(forms: dict[tuple[str, str], int]) -> list[tuple[str, str]]:
    return [form for form, bad in forms.items() if bad == min(forms.values())]


def _form(column: First, voted: str | None, semicolons: bool) -> tuple[str, str]:
    best = _best(column.forms)
    wanted = voted or ("," if semicolons and (".", "") not in best else None)
    return min(best, key=lambda form: (wanted is not None and form[0] != wanted, FORMS.index(form)))


def _best_orders(column: First) -> list[tuple[str, int, int]]:
    return [found for found in column.orders if found[1] == min(bad for _, bad, _ in column.orders)]


def _odd_order(column: First, found: tuple[str, int, int], comma: bool) -> tuple[int, bool]:
    """Return how unlikely a date order is: rows are mostly sorted by time, and points suggest day first."""
    order, _, back = found
    text = column.levels()[1][0]
    day_first = comma or "/" not in text
    return (0 if "." in text else back), (order == "mdy") == day_first


def _told(columns: list[First]) -> str:
    """Describe formats other than the plain one, in one line."""
    numbers: dict[str, list[str]] = {}
    dates: dict[str, list[str]] = {}
    for column in columns:
        decimal, thousands, order = column.spelling[:3]
        if column.kind == "number" and column.forms and (decimal == "," or thousands):
            numbers.setdefault(f"1{thousands}234{decimal}5", []).append(column.name)
        if column.kind == "date" and order:
            dates.setdefault(NAMES.get(order, order), []).append(column.name)
    parts = [f"numbers are read as {form} in {_some(names)}" for form, names in numbers.items()]
    parts += [f"dates as {form} in {_some(names)}" for form, names in dates.items()]
    signed = [column.name for column in columns if column.signs]
    parts += [f"currency and percent signs are left off in {_some(signed)}"] if signed else []
    return "; ".join(parts) + ". If that is wrong: --decimal, --thousands, --date-format" if parts else ""


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(quoted(name) for name in names[:4]) + more


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
