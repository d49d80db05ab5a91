"""Numbers and names as people read them."""

import math
import re

# Control characters, halves of characters, and marks that turn the direction of the text around them.
UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def clean(text: str) -> str:
    """Return the text with � in place of characters that a page cannot show."""
    return UNSHOWABLE.sub("�", text)


def short(text: str, most: int = 28) -> str:
    """Return the text, cut to fit a label."""
    text = " ".join(clean(text).split())
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def number(value: float, digits: int = 4) -> str:
    """Return a number with the given number of digits and thousands separators; – if there is none."""
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


def percent(value: float, digits: int = 1) -> str:
    """Return a share as a percentage with a non-breaking space."""
    return f"{100 * value:.{digits}f}\u00a0%".replace("-", "−") if math.isfinite(value) else "–"


def counted(count: int, one: str, many: str) -> str:
    """Return `1 row`, `2 rows`."""
    return f"{count:,} {one if count == 1 else many}"
