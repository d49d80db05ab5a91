"""How numbers, dates and gaps are written: `1.234,56`, `€30.58`, `12%`, `31.12.2024`, `?`.

Each column of a file has its own format. The plain one is `1234.5` and `2024-01-31`.
"""

import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from itertools import pairwise
from typing import NamedTuple

# Words for nothing, in lower case: in every column, and those that mean it among numbers and dates only.
MISSING = frozenset(("", "na", "n/a", "nan", "null", "none", "#n/a", "#na", "<na>", "n.a.", "nat", "\\n"))
SIGNS = ("?", "-", "--", "---", "–", "—", ".", "...", "*", "n/d", "nd", "k.a.", "nil")
ERRORS = ("#value!", "#div/0!", "#ref!", "#name?", "#null!", "#num!")  # of a spreadsheet
GAPS = MISSING | frozenset((*SIGNS, *ERRORS))
DECIMALS, THOUSANDS = (".", ","), ("", ",", ".", " ", "'")
MONEY = r"(?:[$£€¥₹]|EUR|USD|GBP|CHF|JPY|kr\.?|zł)"
SAME = str.maketrans({"\u00a0": " ", "\u202f": " ", "\u2009": " ", "’": "'", "−": "-"})
EPOCH = datetime(1970, 1, 1)
ORDERS = ("dmy", "mdy", "ymd")
PART = r"(\d{1,4}|[^\W\d_]{3,10}\.?)"
TIME = r"(?:[ T,]+(\d{1,2}):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)? ?(?:([AaPp])\.?[Mm]\.?)?)?"
DAY = re.compile(rf"{PART}[./ -] ?{PART}[./ ,-] ?{PART}{TIME}")
NAMED = (
    *(("jan", "janv"), ("feb", "fév", "fev"), ("mar", "mär", "mrz", "mars"), ("apr", "avr"), ("may", "mai")),
    *(("jun", "juin"), ("jul", "juil"), ("aug", "aoû", "aou"), ("sep",), ("oct", "okt"), ("nov",)),
    ("dec", "dez", "déc"),
)
MONTHS = {name: month for month, names in enumerate(NAMED, 1) for name in names}  # by how they begin


class Spelling(NamedTuple):
    """How a column's values are written."""

    decimal: str = "."
    thousands: str = ""  # between groups of three digits
    dates: str = ""  # dmy, mdy or ymd, or a pattern with %; nothing for 2024-01-31
    na: tuple[str, ...] = ()  # more words for nothing, in lower case
    fold: bool = False  # whether strings that differ by case and spaces are the same

    def missing(self, among_values: bool = False) -> frozenset[str]:
        """The words for a missing value: in any column, or among numbers and dates."""
        return _missing(self.na, among_values)

    def key(self, text: str) -> str:
        """Return a key that is equal for strings of the same level."""
        return folded(text) if self.fold else text


PLAIN = Spelling()


@cache
def _missing(na: tuple[str, ...], among_values: bool) -> frozenset[str]:
    return (GAPS if among_values else MISSING) | frozenset(na)


def folded(text: str) -> str:
    """Return text in lower case with single spaces; `y` and `n` become yes and no."""
    short = " ".join(text.casefold().split())
    return {"y": "yes", "n": "no"}.get(short, short)


@cache
def pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    """Return the pattern of numbers in one format, with currency or percent signs, brackets or a trailing minus."""
    d, t = re.escape(decimal), re.escape(thousands)
    whole = rf"(?:[1-9]\d{{0,2}}(?:{t}\d{{3}})+|\d+)" if thousands else r"\d+"
    core = rf"(?:{whole}(?:{d}\d*)?|{d}\d+)(?:[eE][+-]?\d+)?"
    bare = rf"(?P<sign>[+-]?) ?{MONEY}? ?(?P<inner>[+-]?)(?P<core>{core}) ?(?:{MONEY}|%)?(?P<last>-?)"
    return re.compile(rf"{bare}|\({MONEY}? ?(?P<bracketed>{core}) ?{MONEY}?\)", re.ASCII)


def number(text: str, spelling: Spelling) -> float:
    """Return the number in a text, ignoring currency and percent signs; ValueError if there is none."""
    found = pattern(spelling.decimal, spelling.thousands).fullmatch(text.translate(SAME))
    if found is None:
        raise ValueError
    core, minus = found["core"], (found["sign"], found["inner"], found["last"])
    if core is None:
        core, minus = found["bracketed"], ("-", "", "")
    if sum(sign != "" for sign in minus) > 1:
        raise ValueError
    value = float(core.replace(spelling.thousands, "").replace(spelling.decimal, "."))
    return -value if "-" in minus else value


def stamp(text: str, order: str) -> int:
    """Return a date as microseconds since 1970, read in one order or by a `datetime.strptime` pattern."""
    text = text.translate(SAME)
    if "%" in order:
        read = datetime.strptime(text, order)
        since = read.replace(tzinfo=None) - (read.utcoffset() or timedelta(0)) - EPOCH
        return since // timedelta(microseconds=1)
    found = DAY.fullmatch(text)
    if found is None:
        raise ValueError
    *parts, hour, minute, second, fraction, half = found.groups()
    year, month, day = (parts[order.index(letter)] for letter in "ymd")
    if len(year) not in (2, 4) or not day.isdigit() or len(day) > 2 or len(month) > 10:
        raise ValueError
    named = MONTHS.get(month.lower()[:4].rstrip("."), MONTHS.get(month.lower()[:3]))
    at = int(hour or 0)
    if half is not None:
        if not 1 <= at <= 12:
            raise ValueError
        at = at % 12 + (12 if half in "Pp" else 0)
    short = int(year) + (0 if len(year) == 4 else 2000 if int(year) < 70 else 1900)
    when = datetime(short, int(month) if month.isdigit() else named or 0, int(day), at, int(minute or 0))
    micro = int((fraction or "0")[:6].ljust(6, "0"))
    return (when + timedelta(seconds=_below_60(second or "0"), microseconds=micro) - EPOCH) // timedelta(microseconds=1)


def _below_60(text: str) -> int:
    value = int(text)
    if value > 59:
        raise ValueError
    return value


# --- which spelling it is ---------------------------------------------------------------------


def spellings(texts: Iterable[str], allowed: list[tuple[str, str]], most_bad: float) -> dict[tuple[str, str], int]:
    """Return the formats (decimal and thousands separators) that fit all but a few strings, and how many misfit."""
    texts, out = list(texts), {}
    for form in allowed:
        wanted, bad = pattern(*form), 0
        for text in texts:
            bad += wanted.fullmatch(text.translate(SAME)) is None
            if bad > most_bad * len(texts):
                break
        else:
            out[form] = bad
    return out


def date_orders(texts: list[str], allowed: Iterable[str], most_bad: float) -> list[tuple[str, int, int]]:
    """Return the date orders that fit all but a few strings: the order, how many do not fit, and steps back in time."""
    out = []
    for order in allowed:
        stamps = []
        for text in texts:
            with suppress(ValueError, OverflowError):
                stamps.append(stamp(text, order))
        bad = len(texts) - len(stamps)
        if texts and bad <= most_bad * len(texts):
            out.append((order, bad, sum(later < earlier for earlier, later in pairwise(stamps))))
    return out
