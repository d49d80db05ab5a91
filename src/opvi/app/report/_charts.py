"""Charts as SVG shapes, which the page's templates write out.

By hand, because matplotlib was measured and is worse here. All 13 charts of a regression's report: 0.01 s of processor
time and 49 kB, against 0.4 to 0.8 s and 140 kB from matplotlib's SVG backend, whose import takes another 0.4 s. The
live page is redrawn every 3 seconds, in the learner's own process. Colours and sizes of text come from the page's
style sheet, so dark mode, paper and phones need no second drawing, and every mark shows its value under the pointer;
matplotlib writes both into each shape, and needs its output rewritten for either.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from opvi.app.report._words import number, percent, short

Numbers = Sequence[float] | np.ndarray
Range = tuple[float, float]
WIDE, HIGH = 440.0, 250.0  # small enough that a chart's text stays readable on a phone
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
SERIES = ("a", "b", "c", "d", "e", "f")  # the style sheet's colours, dashes and marks
ROOM = 5.0  # around the plotting area, for the thickness of lines and dots on its edge
# Forms of marks besides the circle, for a size of 1: square, triangle, diamond.
FORMS: dict[int, list[tuple[float, float]]] = {
    1: [(-1, -1), (1, -1), (1, 1), (-1, 1)],
    2: [(0, -1.25), (1.15, 0.85), (-1.15, 0.85)],
    3: [(0, -1.4), (1.4, 0), (0, 1.4), (-1.4, 0)],
}


class Shape(NamedTuple):
    """An SVG element."""

    tag: str
    attributes: dict[str, str | float]
    text: str = ""
    tip: str = ""  # shown under the pointer


def path(points: Iterable[tuple[float, float]], class_: str, tip: str = "", *, closed: bool = False) -> Shape:
    """Return a line through points, or the area that they enclose."""
    way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Shape("path", {"d": f"M{way}{'Z' * closed}", "class": class_}, tip=tip)


def circle(x: float, y: float, size: float, class_: str, tip: str = "") -> Shape:
    """Return a dot."""
    return Shape("circle", {"cx": round(x, 1), "cy": round(y, 1), "r": round(size, 1), "class": class_}, tip=tip)


def words(x: float, y: float, text: str, class_: str, anchor: str = "middle", turn: str | None = None) -> Shape:
    """Return text at a position."""
    place: dict[str, str | float] = {"x": round(x, 1), "y": round(y, 1), "class": class_, "text-anchor": anchor}
    return Shape("text", place | ({"transform": turn} if turn else {}), text)


def mark(index: int, x: float, y: float, size: float, tip: str) -> Shape:
    """Return a mark whose shape and colour show which group it belongs to."""
    class_ = f"mark {SERIES[index % len(SERIES)]}"
    if index % 4 == 0:
        return circle(x, y, size, class_, tip)
    return path([(x + size * dx, y + size * dy) for dx, dy in FORMS[index % 4]], class_, tip, closed=True)


def sample(class_: str) -> Shape:
    """Return a line of this class, for a legend."""
    return path([(1, 6), (25, 6)], class_)


# --- ranges and ticks -----------------------------------------------------------------------------


def spanned(*values: Numbers, margin: float = 0.06, least: float = -math.inf, most: float = math.inf) -> Range:
    """Return a range that holds every finite value, with a margin, inside the limits."""
    known = np.concatenate([np.ravel(np.asarray(v, float)) for v in values])
    known = known[np.isfinite(known)]
    if not len(known):
        return 0.0, 1.0
    low, high = float(known.min()), float(known.max())
    air = margin * (high - low) if high > low else 0.1 * abs(high) or 0.5
    low, high = low - air, high + air
    if not math.isfinite(high - low) or high <= low:
        return 0.0, 1.0
    low, high = max(low, least), min(high, most)
    return (low, high) if high > low else (low, low + 1.0)


def without_spikes(values: Numbers, *also: float) -> tuple[list[float], float]:
    """Return the values that set the scale, and the largest value left out: a few spikes must not flatten the rest."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    if len(known) < 10:
        return [*known, *also], math.nan
    usual, middle = np.quantile(known, 0.97), np.median(known)
    limit = usual + 1.5 * (usual - middle) + 1e-12
    spikes = known[known > limit]
    return [*known[known <= limit], *also], float(spikes.max()) if len(spikes) else math.nan


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers inside a range, about as many as asked for."""
    rough = (high - low) / max(count, 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(m for m, most in ((1, 1.5), (2, 3.2), (5, 7.1), (10, math.inf)) if rough / unit <= most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten inside a range, and 2 and 5 times them where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = math.log10(high / low) < 2.2
    every = -(-len(powers) // 8)
    marks = [m * 10.0**p for p in powers[::every] for m in ((1, 2, 5) if few else (1,))]
    return [m for m in marks if low * 0.999 <= m <= high * 1.001]


def compact(value: float) -> str:
    """Return a round number in short form: 20k, 5M."""
    for unit, letter in UNITS:
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def tick_labels(values: Sequence[float], shares: bool = False) -> list[str]:
    """Return the labels of an axis, all with the same number of decimals; shares in percent."""
    if shares:
        return [f"{label} %" for label in tick_labels([100 * v for v in values])]
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


# --- charts -----------------------------------------------------------------------------------------


class Chart:
    """Shapes on and around a plotting area.

    Args:
        title: its name.
        says: what it shows, in words.
        x_range: the range of the x axis.
        y_range: the range of the y axis.
        size: width and height, axes included.
        shares: the y axis is labelled in percent.
        log_x: the x axis is logarithmic.
        left: the left margin; None leaves room for the y axis's labels and name.
        top, right, bottom: margins.
    """

    def __init__(
        self,
        title: str,
        says: str,
        x_range: Range,
        y_range: Range,
        *,
        size: tuple[float, float] = (WIDE, HIGH),
        shares: bool = False,
        log_x: bool = False,
        left: float | None = None,
        top: float = 12,
        right: float = 20,
        bottom: float = 40,
    ):
        self.title, self.says, self.x_range, self.y_range = title, says, x_range, y_range
        self.width, self.height = size
        self.shares, self.log_x = shares, log_x
        self.top, self.right, self.floor = top, self.width - right, self.height - bottom
        labels = tick_labels(self._y_ticks(), shares)
        self.left = 25 + 8.2 * max(map(len, labels), default=1) if left is None else left
        self.around: list[Shape] = []
        self.inside: list[Shape] = []  # cut off at the edges of the plotting area

    @property
    def box(self) -> tuple[float, float, float, float]:
        """The clipping rectangle: x, y, width, height."""
        x, y = self.left - ROOM, self.top - ROOM
        return round(x, 1), round(y, 1), round(self.right + ROOM - x, 1), round(self.floor + ROOM - y, 1)

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        low, high = self.x_range
        if self.log_x:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the vertical position of a value, bounded because huge numbers break renderers."""
        low, high = self.y_range
        place = self.floor - (value - low) / (high - low) * (self.floor - self.top)
        return min(max(place, -20 * self.height), 20 * self.height)

    def one_scale(self) -> None:
        """Stretch the shorter axis, so that horizontal and vertical distances can be compared."""
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        across, up = self.right - self.left, self.floor - self.top
        unit = max((x1 - x0) / across, (y1 - y0) / up)
        wide, high = (unit * across - (x1 - x0)) / 2, (unit * up - (y1 - y0)) / 2
        self.x_range, self.y_range = (x0 - wide, x1 + wide), (y0 - high, y1 + high)

    # --- what is drawn --------------------------------------------------------------------------

    def line(self, x: Numbers, y: Numbers, class_: str) -> None:
        """Draw a line through points, broken where a value is missing; a single point becomes a dot."""
        pairs = list(zip(x, y, strict=True))
        for known, run in itertools.groupby(pairs, lambda pair: math.isfinite(pair[0]) and math.isfinite(pair[1])):
            points = [(self.x(a), self.y(b)) for a, b in run] if known else []
            if len(points) == 1:
                self.inside.append(circle(*points[0], 2.5, f"dot {class_}"))
            elif points:
                self.inside.append(path(points, f"line {class_}"))

    def band(self, x: Numbers, low: Numbers, high: Numbers, class_: str) -> None:
        """Fill the area between two lines."""
        rows = np.stack([np.asarray(v, float) for v in (x, low, high)])
        rows = rows[:, np.isfinite(rows).all(0)].T
        if len(rows) > 1:
            there, back = [(self.x(a), self.y(b)) for a, b, _ in rows], [(self.x(a), self.y(c)) for a, _, c in rows]
            self.inside.append(path([*there, *back[::-1]], f"band {class_}", closed=True))

    def across(self, y: float, class_: str) -> None:
        """Draw a horizontal line."""
        self.inside.append(path([(self.left, self.y(y)), (self.right, self.y(y))], class_))

    def diagonal(self) -> None:
        """Draw the line of equal values, from 0 to 1."""
        self.inside.append(path([(self.x(0), self.y(0)), (self.x(1), self.y(1))], "reference"))

    def dot(self, x: float, y: float, class_: str, tip: str, size: float = 3.5) -> None:
        """Draw a dot that shows its value."""
        self.inside.append(circle(self.x(x), self.y(y), size, f"dot {class_}", tip))

    def bars(self, heights: Numbers, tips: Sequence[str]) -> None:
        """Draw bars of equal width that fill the chart."""
        wide = (self.right - self.left) / max(len(heights), 1)
        for index, (height, tip) in enumerate(zip(heights, tips, strict=True)):
            x, top = self.left + index * wide, self.y(height) if math.isfinite(height) else self.floor
            corners = [(x + 0.5, self.floor), (x + 0.5, top), (x + wide - 0.5, top), (x + wide - 0.5, self.floor)]
            self.inside.append(path(corners, "bar", tip, closed=True))

    # --- axes -----------------------------------------------------------------------------------

    def _y_ticks(self) -> list[float]:
        return ticks(*self.y_range, count=4 if self.height < 220 else 5)

    def _x_ticks(self, count: int, shares: bool) -> list[float]:
        """Return as many ticks as there is room for labels."""
        if self.log_x:
            return decades(*self.x_range)
        made = ticks(*self.x_range, count)
        room = self.right - self.left
        while count > 1 and sum(9 * len(label) + 6 for label in tick_labels(made, shares)) > room:
            count -= 1
            made = ticks(*self.x_range, count)
        return made

    def axes(self, across: str, up: str, *, x_shares: bool = False, x_ticks: int = 5, whole: bool = False) -> None:
        """Draw the grid, tick labels and names of both axes; `whole` allows only whole numbers on the x axis."""
        at_y = self._y_ticks()
        for value, label in zip(at_y, tick_labels(at_y, self.shares), strict=True):
            y = self.y(value)
            self.around.append(path([(self.left, y), (self.right, y)], "grid"))
            self.around.append(words(self.left - 6, y + 4, label, "tick", "end"))
        at_x = [value for value in self._x_ticks(x_ticks, x_shares) if not whole or value == round(value)]
        labels = list(map(compact, at_x)) if self.log_x else tick_labels(at_x, x_shares)
        for value, label in zip(at_x, labels, strict=True):
            x = self.x(value)
            self.around.append(path([(x, self.floor), (x, self.floor + 4)], "axis"))
            self.around.append(words(x, self.floor + 17, label, "tick"))
        self.around.append(path([(self.left, self.floor), (self.right, self.floor)], "axis"))
        middle = (self.top + self.floor) / 2
        if across:
            self.around.append(words((self.left + self.right) / 2, self.height - 5, across, "name"))
        if up:
            self.around.append(words(11, middle, up, "name", turn=f"rotate(-90 11 {middle:g})"))


class Figure(NamedTuple):
    """A chart with its heading and caption."""

    heading: str
    chart: Chart
    caption: str = ""
    legend: list[tuple[str, Shape]] = []  # noqa: RUF012 (never written to): what each line or mark stands for
    rows: list[tuple[str, str, str]] = []  # noqa: RUF012 (never written to): the same as numbers, on demand


def intervals(
    title: str,
    says: str,
    names: Sequence[str],
    rows: Sequence[Sequence[tuple[float, float, float]]],
    *,
    width: float,
    x_range: Range,
    across: str,
    shares: bool = False,
    zero: bool = False,
) -> Chart:
    """Return means with intervals: one row per name, one interval per series."""
    pitch, top, bottom = 20.0, 8.0, 38.0
    left = min(0.36 * width, 14 + 7.2 * max((len(name) for name in names), default=0))
    size = width, top + bottom + pitch * len(names)
    chart = Chart(title, says, x_range, (0, 1), size=size, left=left, top=top, bottom=bottom)
    at = ticks(*x_range, count=3 if width < 350 else 5)
    for value, label in zip(at, tick_labels(at, shares), strict=True):
        x = chart.x(value)
        chart.around.append(path([(x, chart.top), (x, chart.floor)], "axis" if zero and value == 0 else "grid"))
        chart.around.append(words(x, chart.floor + 15, label, "tick"))
    chart.around.append(words((left + chart.right) / 2, chart.height - 5, across, "name"))
    form = percent if shares else number
    for index, (name, row) in enumerate(zip(names, rows, strict=True)):
        middle = chart.top + pitch * (index + 0.5)
        chart.around.append(words(left - 8, middle + 4, short(name, int(left / 6.8)), "label", "end"))
        for series, (mean, low, high) in enumerate(row):
            y = middle + (series - (len(row) - 1) / 2) * 5
            class_ = SERIES[series % len(SERIES)]
            ends = [chart.x(min(max(v, x_range[0]), x_range[1])) for v in (low, high, mean)]
            if math.isfinite(low) and math.isfinite(high):
                chart.inside.append(path([(ends[0], y), (ends[1], y)], f"whisker {class_}"))
            if math.isfinite(mean):
                tip = f"{short(name, 60)}: {form(mean)}, 90 % band {form(low)} to {form(high)}"
                chart.inside.append(circle(ends[2], y, 3.5, f"dot {class_}", tip))
    return chart
