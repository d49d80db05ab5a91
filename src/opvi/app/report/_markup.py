"""HTML and SVG from nested calls: text is escaped unless it was made here."""

import math
import re
from html import escape
from typing import Any

# Control characters, halves of characters, and marks that turn the direction of the text around them.
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
VOID = {"meta", "link"}


class Safe(str):
    """Markup made by this module; any other string is text."""

    __slots__ = ()


def clean(text: Any) -> str:
    """The text with � in place of every character that a page cannot show or that would upset it."""
    return UNSHOWABLE.sub("�", str(text))


def shown(text: Any) -> Safe:
    """The text, escaped."""
    return text if isinstance(text, Safe) else Safe(escape(clean(text), quote=True))


def joined(parts: Any, between: str = "") -> Safe:
    """Parts one after the other."""
    return Safe(shown(between).join(shown(part) for part in parts))


def element(name: str, /, *children: Any, **attributes: Any) -> Safe:
    """An element; None leaves an attribute out, a trailing underscore keeps `class_` from being a keyword."""
    told = []
    for key, value in attributes.items():
        if value is not None:
            value = f"{value:.6g}" if isinstance(value, float) else value
            told.append(f' {key.rstrip("_").replace("_", "-")}="{shown(value)}"')
    opening = f"<{name}{''.join(told)}>"
    return Safe(opening if name in VOID else f"{opening}{joined(children)}</{name}>")


def short(text: Any, most: int = 28) -> str:
    """The text, cut to fit a label."""
    text = " ".join(clean(text).split())
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def number(value: Any, digits: int = 4) -> str:
    """A number for people: so many digits, thousands apart; – where there is none."""
    value = float(value)
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    if size and not 1e-4 <= size < 1e9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa} × 10^{int(exponent)}".replace("-", "−")
    if size >= 10 ** (digits - 1) or value == round(value):
        return f"{value:,.0f}".replace("-", "−")
    places = digits - 1 - math.floor(math.log10(size))
    return f"{value:.{places}f}".replace("-", "−")


def percent(value: Any, digits: int = 1) -> str:
    """A share as a percentage, which no line break tears apart."""
    value = float(value)
    return f"{100 * value:.{digits}f}\u00a0%".replace("-", "−") if math.isfinite(value) else "–"


def counted(count: int, one: str, many: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{count:,} {one if count == 1 else many}"
