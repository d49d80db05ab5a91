"""How the page is put together: sections, charts under headings and over captions, legends, tables."""

from collections.abc import Sequence
from typing import Any

from opvi.app.report._markup import Safe, element

WIDE, HIGH = 440.0, 250.0  # of a chart; small enough that its text stays readable on a phone


def figure(heading: str, *parts: Any, caption: Any = "") -> Safe:
    """A chart under its heading and over its caption."""
    under = element("figcaption", caption) if caption else ""
    return element("figure", element("h3", heading), *parts, under)


def section(heading: str, *parts: Any) -> Safe:
    """A section of the page."""
    return element("section", element("h2", heading), *parts)


def legend(*entries: tuple[str, Safe]) -> Safe:
    """What each line or mark stands for."""
    return element("ul", *(element("li", sample, name) for name, sample in entries), class_="legend")


def sample(*parts: Any) -> Safe:
    """A small picture beside a name."""
    return element("svg", *parts, viewBox="0 0 26 12", aria_hidden="true")


def line_sample(class_: str) -> Safe:
    """A line of this class."""
    return sample(element("polyline", points="1,6 25,6", class_=class_))


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Any]], amounts: Sequence[int] = ()) -> Safe:
    """A table whose first column names the row; columns in `amounts` hold numbers."""

    def cell(index: int, value: Any) -> Safe:
        class_ = "amount" if index in amounts else None
        if index == 0:
            return element("th", value, scope="row", class_=class_)
        return element("td", value, class_=class_)

    body = (element("tr", *(cell(i, v) for i, v in enumerate(row))) for row in rows)
    titles = (
        element("th", name, scope="col", class_="amount" if i in amounts else None) for i, name in enumerate(head)
    )
    made = element(
        "table",
        element("caption", caption) if caption else "",
        element("thead", element("tr", *titles)),
        element("tbody", *body),
    )
    return element("div", made, class_="panel wide")
