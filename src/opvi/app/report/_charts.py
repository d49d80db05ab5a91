"""Charts as inline SVG: lines, bands, bars, dots and intervals. Colours come from the page's style sheet."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from opvi.app.report._markup import Safe, element, joined, number, percent, short

Numbers = Sequence[float] | np.ndarray
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SERIES = ("a", "b", "c", "d", "e", "f")  # the style sheet's colours, dashes and marks


class Frame(NamedTuple):
    """A plotting area inside a drawing: what lies where."""

    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False
    left: float = 50
    right: float = 20
    top: float = 12
    bottom: float = 40

    def x(self, value: float) -> float:
        """Across, in the drawing's units."""
        low, high = self.x_range
        if self.log_x:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Down."""
        low, high = self.y_range
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - self.top - self.bottom)


# --- ranges and ticks -----------------------------------------------------------------------------


def spanned(*values: Any, margin: float = 0.06, least: float | None = None, most: float | None = None) -> Any:
    """A range that holds every finite value, with some air around it, inside the limits."""
    known = np.concatenate([np.ravel(np.asarray(v, float)) for v in values]) if values else np.zeros(0)
    known = known[np.isfinite(known)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    air = margin * (high - low) if high > low else 0.1 * abs(high) or 0.5
    low, high = low - air, high + air
    if not math.isfinite(high - low) or high <= low:
        return 0.0, 1.0
    low, high = low if least is None else max(low, least), high if most is None else min(high, most)
    return (low, high) if high > low else (low, low + 1.0)


def alike(frame: Frame) -> Frame:
    """The frame with one scale for both axes, so that distances can be compared: the closer one is drawn out."""
    across, up = frame.width - frame.left - frame.right, frame.height - frame.top - frame.bottom
    (x0, x1), (y0, y1) = frame.x_range, frame.y_range
    unit = max((x1 - x0) / across, (y1 - y0) / up)
    wide, high = (unit * across - (x1 - x0)) / 2, (unit * up - (y1 - y0)) / 2
    return frame._replace(x_range=(x0 - wide, x1 + wide), y_range=(y0 - high, y1 + high))


def without_spikes(values: Any, *also: float) -> tuple[list[float], float]:
    """The values that set the scale, and the largest one left off: a few spikes must not flatten all the rest."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    if len(known) < 10:
        return [*known, *also], math.nan
    usual, middle = np.quantile(known, 0.97), np.median(known)
    limit = usual + 1.5 * (usual - middle) + 1e-12
    spikes = known[known > limit]
    return [*known[known <= limit], *also], float(spikes.max()) if len(spikes) else math.nan


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers inside a range, about as many as asked for."""
    rough = (high - low) / max(count, 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(m for m, most in ((1, 1.5), (2, 3.2), (5, 7.1), (10, math.inf)) if rough / unit <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Powers of ten inside a range, and 2 and 5 times them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = math.log10(high / low) < 2.2
    every = -(-len(powers) // 8)
    marks = [m * 10.0**p for p in powers[::every] for m in ((1, 2, 5) if few else (1,))]
    return [m for m in marks if low * 0.999 <= m <= high * 1.001]


def compact(value: float) -> str:
    """A round number in few letters: 20k, 5M."""
    for unit, letter in UNITS:
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def tick_texts(values: Sequence[float]) -> list[str]:
    """Labels of an axis, all with the same number of places."""
    if not values:
        return []
    size = max(abs(v) for v in values)
    step = min((b - a for a, b in itertools.pairwise(values)), default=size) or 1.0
    if size >= 1e15 or (size and size < 1e-4) or step < 1e-6 * size:
        digits = max(1, math.ceil(math.log10(size / step)) + 1)
        return [f"{v:.{digits}g}".replace("e+", "e").replace("-", "−") if v else "0" for v in values]
    for unit, letter in UNITS:
        if size >= 10 * unit or (size >= unit and letter != "k"):
            return [f"{v / unit:g}{letter}".replace("-", "−") if v else "0" for v in values]
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{v + 0.0:.{places}f}".replace("-", "−") for v in values]


# --- parts of a drawing -----------------------------------------------------------------------------


def drawing(width: float, height: float, title: str, description: str, *parts: Any) -> Safe:
    """An SVG image that says in words what it shows."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        *parts,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=f"{title}. {description}",
    )


def inside(frame: Frame, *parts: Any) -> Safe:
    """Parts cut off at the frame's edges, with a little room for the thickness of lines."""
    x, y, room = frame.left, frame.top, 3
    width, height = frame.width - frame.right - x + 2 * room, frame.height - frame.bottom - y + 2 * room
    box = f"{x - room:g} {y - room:g} {width:g} {height:g}"
    return element("svg", *parts, x=x - room, y=y - room, width=width, height=height, viewBox=box, class_="inside")


def text(x: float, y: float, words: Any, class_: str = "", anchor: str | None = None, **more: Any) -> Safe:
    """Words at a place."""
    return element("text", words, x=round(x, 1), y=round(y, 1), class_=class_ or None, text_anchor=anchor, **more)


def rule(x1: float, y1: float, x2: float, y2: float, class_: str) -> Safe:
    """A straight line."""
    return element("line", x1=round(x1, 1), y1=round(y1, 1), x2=round(x2, 1), y2=round(y2, 1), class_=class_)


def framed(width: float, height: float, x_range: Any, y_range: Any, *, shares: bool = False, **more: Any) -> Frame:
    """A frame with room on the left for the labels of its ticks and the name of the axis."""
    labels = _labels(ticks(y_range[0], y_range[1], _count(height)), shares)
    return Frame(width, height, x_range, y_range, left=25 + 8.2 * max(map(len, labels), default=1), **more)


def _count(height: float) -> int:
    """Of ticks on the upright axis."""
    return 4 if height < 220 else 5


def axes(
    frame: Frame,
    across: str,
    up: str,
    *,
    x_shares: bool = False,
    y_shares: bool = False,
    x_ticks: int = 5,
    whole: bool = False,
) -> Safe:
    """Grid, tick labels and names of both axes; shares are labelled in percent, `whole` numbers across only."""
    bottom, right = frame.height - frame.bottom, frame.width - frame.right
    parts = []
    at_y = ticks(*frame.y_range, count=_count(frame.height))
    for value, label in zip(at_y, _labels(at_y, y_shares), strict=True):
        parts.append(rule(frame.left, frame.y(value), right, frame.y(value), "grid"))
        parts.append(text(frame.left - 6, frame.y(value) + 4, label, "tick", "end"))
    at_x = decades(*frame.x_range) if frame.log_x else _fitting(frame, x_ticks, x_shares)
    at_x = [value for value in at_x if not whole or value == round(value)]
    for value, label in zip(at_x, list(map(compact, at_x)) if frame.log_x else _labels(at_x, x_shares), strict=True):
        parts.append(rule(frame.x(value), bottom, frame.x(value), bottom + 4, "axis"))
        parts.append(text(frame.x(value), bottom + 17, label, "tick", "middle"))
    parts.append(rule(frame.left, bottom, right, bottom, "axis"))
    if across:
        parts.append(text((frame.left + right) / 2, frame.height - 5, across, "name", "middle"))
    if up:
        middle = (frame.top + bottom) / 2
        parts.append(text(11, middle, up, "name", "middle", transform=f"rotate(-90 11 {middle:g})"))
    return joined(parts)


def _fitting(frame: Frame, count: int, shares: bool) -> list[float]:
    """As many ticks as have room beside each other for their labels."""
    room = frame.width - frame.left - frame.right
    while count > 1 and sum(9 * len(label) + 6 for label in _labels(ticks(*frame.x_range, count), shares)) > room:
        count -= 1
    return ticks(*frame.x_range, count)


def _labels(values: list[float], shares: bool) -> list[str]:
    if not shares:
        return tick_texts(values)
    return [f"{label} %" for label in tick_texts([100 * v for v in values])]


def _places(frame: Frame, x: Numbers, y: Numbers) -> list[list[str]]:
    """Points in runs without gaps."""
    runs: list[list[str]] = [[]]
    for a, b in zip(x, y, strict=True):
        if math.isfinite(a) and math.isfinite(b):
            far = frame.height * 20  # beyond the edges anyway; huge numbers upset renderers
            runs[-1].append(f"{frame.x(a):.1f},{min(max(frame.y(b), -far), far):.1f}")
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def line(frame: Frame, x: Numbers, y: Numbers, class_: str) -> Safe:
    """A line through points, broken where a value is missing; a single point becomes a dot."""
    parts = []
    for run in _places(frame, x, y):
        if len(run) == 1:
            cx, cy = run[0].split(",")
            parts.append(element("circle", cx=cx, cy=cy, r=2.5, class_=f"dot {class_}"))
        else:
            parts.append(element("polyline", points=" ".join(run), class_=class_))
    return joined(parts)


def band(frame: Frame, x: Numbers, low: Numbers, high: Numbers, class_: str) -> Safe:
    """The area between two lines."""
    good = np.isfinite(np.asarray(low, float) + np.asarray(high, float) + np.asarray(x, float))
    x, low, high = (np.asarray(v, float)[good] for v in (x, low, high))
    if len(x) < 2:
        return Safe()
    there, back = _places(frame, x, low), _places(frame, x[::-1], high[::-1])
    return element("polygon", points=" ".join([*there[0], *back[0]]), class_=f"band {class_}")


def dot(x: float, y: float, class_: str, tip: str = "", size: float = 3.5) -> Safe:
    """A dot that tells its value."""
    return element(
        "circle", element("title", tip) if tip else "", cx=round(x, 1), cy=round(y, 1), r=size, class_=f"dot {class_}"
    )


def mark(index: int, x: float, y: float, tip: str, size: float) -> Safe:
    """A mark whose form tells its group as well as its colour does: circle, square, triangle, diamond."""
    class_, s = f"mark {SERIES[index % len(SERIES)]}", size
    forms = {
        1: [(-s, -s), (s, -s), (s, s), (-s, s)],
        2: [(0, -1.25 * s), (1.15 * s, 0.85 * s), (-1.15 * s, 0.85 * s)],
        3: [(0, -1.4 * s), (1.4 * s, 0), (0, 1.4 * s), (-1.4 * s, 0)],
    }
    form = forms.get(index % 4)
    if form is None:
        return element("circle", element("title", tip), cx=round(x, 1), cy=round(y, 1), r=round(s, 1), class_=class_)
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in form)
    return element("polygon", element("title", tip), points=points, class_=class_)


# --- charts -----------------------------------------------------------------------------------------


def bars(frame: Frame, heights: Numbers, class_: str, tips: Sequence[str]) -> Safe:
    """Bars of equal width that fill the frame."""
    floor = frame.y(max(frame.y_range[0], 0))
    wide = (frame.width - frame.left - frame.right) / max(len(heights), 1)
    parts = []
    for index, (height, tip) in enumerate(zip(heights, tips, strict=True)):
        top = frame.y(height) if math.isfinite(height) else floor
        x = frame.left + index * wide
        parts.append(
            element(
                "rect",
                element("title", tip),
                x=round(x + 0.5, 1),
                y=round(top, 1),
                width=round(wide - 1, 1),
                height=round(max(floor - top, 0), 1),
                class_=class_,
            )
        )
    return joined(parts)


def intervals(
    title: str,
    description: str,
    names: Sequence[str],
    rows: Sequence[Sequence[tuple[float, float, float]]],
    *,
    width: float,
    x_range: tuple[float, float],
    across: str,
    shares: bool = False,
    zero: bool = False,
) -> Safe:
    """Means with intervals, one row a name and side by side within it one for each series."""
    pitch, top, bottom = 20.0, 8.0, 38.0
    left = min(0.36 * width, 14 + 7.2 * max((len(name) for name in names), default=0))
    frame = Frame(width, top + bottom + pitch * len(names), x_range, (0, 1), left=left, top=top, bottom=bottom)
    parts = []
    floor = frame.height - frame.bottom
    marks = ticks(*x_range, count=3 if width < 350 else 5)
    for value, label in zip(marks, _labels(marks, shares), strict=True):
        parts.append(rule(frame.x(value), frame.top, frame.x(value), floor, "grid"))
        parts.append(text(frame.x(value), floor + 15, label, "tick", "middle"))
    if zero and x_range[0] < 0 < x_range[1]:
        parts.append(rule(frame.x(0), frame.top, frame.x(0), floor, "axis"))
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        middle = frame.top + pitch * (index + 0.5)
        label = short(name, int(left / 6.8))
        parts.append(text(left - 8, middle + 4, label, "", "end"))
        for series, (mean, low, high) in enumerate(row):
            y = middle + (series - (len(row) - 1) / 2) * 5
            class_ = SERIES[series % len(SERIES)]
            tip = f"{short(name, 60)}: {_told(mean, low, high, shares)}"
            if math.isfinite(low) and math.isfinite(high):
                ends = (frame.x(min(max(v, x_range[0]), x_range[1])) for v in (low, high))
                left_end, right_end = ends
                parts.append(rule(left_end, y, right_end, y, f"whisker {class_}"))
            if math.isfinite(mean):
                parts.append(dot(frame.x(min(max(mean, x_range[0]), x_range[1])), y, class_, tip))
    parts.append(text((left + frame.width - frame.right) / 2, frame.height - 5, across, "name", "middle"))
    return drawing(width, frame.height, title, description, *parts)


def _told(mean: float, low: float, high: float, shares: bool) -> str:
    form = percent if shares else number
    return f"{form(mean)}, 90 % band {form(low)} to {form(high)}"
