"""What the model learnt: effects of the columns, and where its particles lie."""

import math
from typing import Any

import numpy as np

from opvi.app.report import _charts as charts
from opvi.app.report._charts import SERIES
from opvi.app.report._contents import Contents, Effect, Projection
from opvi.app.report._layout import WIDE, figure, legend, line_sample, sample, section, table
from opvi.app.report._markup import Safe, counted, element, number, percent, short

SMALL, SMALL_HIGH = 255.0, 165.0
FIRST, MOST = 12, 48  # effects shown at once, and in all
MOST_LEVELS = 12  # of a text column
MOST_COEFFICIENTS, MOST_LISTED = 30, 500


# --- effects --------------------------------------------------------------------------------------


def effects(contents: Contents) -> Safe:
    """Small charts, the strongest effect first, all on one scale."""
    ordered = sorted(contents.effects, key=lambda effect: -np.nan_to_num(effect.strength))
    heading = "What the columns do"
    if not ordered:
        return section(heading, element("p", "No effects were computed for this run.", class_="note"))
    classes = contents.task == "classification"
    bounds = _scale(ordered, classes)
    says = "probability" if classes else short(contents.target, 24)
    words = (
        "How the prediction changes when one column alone is changed and the others stay as they are in a sample of "
        "rows. The line is the mean, the band holds 90 % of what the particles allow. All charts share one scale, so a "
        "steep line is a strong effect; the strongest comes first."
    )
    words += " Columns that do not vary in the sample are left out."
    words += " Where columns go together, changing one alone asks about rows that never occur: read those with care."
    if any(effect.seen for effect in ordered):
        words += " Ticks along the bottom mark each tenth of the rows: where there are none, the line is a guess."
    shown = [_effect(effect, bounds, says, classes) for effect in ordered[:MOST]]
    parts: list[Any] = [element("p", words, class_="lead"), _lines(ordered, classes)]
    parts.append(element("div", *shown[:FIRST], class_="small"))
    if len(shown) > FIRST:
        more = element("summary", f"{len(shown) - FIRST} weaker effects")
        parts.append(element("details", more, element("div", *shown[FIRST:], class_="small")))
    if len(ordered) > MOST:
        parts.append(element("p", f"{len(ordered) - MOST:,} still weaker ones are left out.", class_="note"))
    return section(heading, *parts)


def _lines(ordered: list[Effect], classes: bool) -> Safe:
    """Which colour is which class."""
    names = ordered[0].lines
    if not classes or not names:
        return Safe()
    if len(names) == 1:
        return element("p", "Shown is the probability of ", element("strong", short(names[0], 60)), ".")
    return legend(*((short(name, 60), line_sample(SERIES[i % len(SERIES)])) for i, name in enumerate(names)))


def _scale(ordered: list[Effect], classes: bool) -> tuple[float, float]:
    """One range for all charts: the means in full, the bands as far as they do not flatten the means."""
    means = np.concatenate([np.ravel(np.asarray(e.mean, float)) for e in ordered])
    bands = np.concatenate([np.ravel(np.asarray(v, float)) for e in ordered for v in (e.low, e.high)])
    means, bands = means[np.isfinite(means)], bands[np.isfinite(bands)]
    if not len(means):
        return 0.0, 1.0
    room = max(2.0 * float(means.max() - means.min()), 1e-9 * float(np.abs(means).max()))
    bands = bands[(bands > means.min() - room) & (bands < means.max() + room)]
    return charts.spanned(means, bands, least=0.0 if classes else None, most=1.0 if classes else None)


def _effect(effect: Effect, bounds: tuple[float, float], says: str, classes: bool) -> Safe:
    title = f"Effect of {clean_name(effect)}"
    told = f"{says} with a 90 % band; the prediction varies by {number(effect.strength, 3)} over the rows."
    if effect.kind == "text":
        drawn = _levels(effect, bounds, says, title, told, classes)
    else:
        drawn = _numbers(effect, bounds, says, title, told, classes)
    form = f"± {percent(effect.strength)}" if classes else f"± {number(effect.strength, 3)}"
    return figure(short(effect.feature, 60), drawn, caption=f"moves the prediction by {form}")


def clean_name(effect: Effect) -> str:
    """The column's name, short enough for a title."""
    return short(effect.feature, 60)


def _levels(effect: Effect, bounds: tuple[float, float], says: str, title: str, told: str, classes: bool) -> Safe:
    mean, low, high = (np.asarray(v, float) for v in (effect.mean, effect.low, effect.high))
    order = np.argsort(-np.nan_to_num(mean[0]), kind="stable") if len(mean) == 1 else np.arange(len(effect.values))
    if len(order) > MOST_LEVELS:  # both ends of the order
        order = np.concatenate([order[: MOST_LEVELS // 2], order[-MOST_LEVELS // 2 :]])
    rows = [[(float(mean[k, i]), float(low[k, i]), float(high[k, i])) for k in range(len(mean))] for i in order]
    names = [str(effect.values[i]) for i in order]
    return charts.intervals(title, told, names, rows, width=SMALL, x_range=bounds, across=says, shares=classes)


def _numbers(effect: Effect, bounds: tuple[float, float], says: str, title: str, told: str, classes: bool) -> Safe:
    x = np.asarray(effect.values, float)
    gap = 50.0 if effect.missing else 0.0
    across = charts.spanned(x, margin=0.02)
    frame = charts.framed(SMALL, SMALL_HIGH, across, bounds, shares=classes, right=14 + gap, bottom=24)
    floor = frame.height - frame.bottom
    drawn = []
    for index, (mean, low, high) in enumerate(zip(effect.mean, effect.low, effect.high, strict=True)):
        class_ = SERIES[index % len(SERIES)]
        drawn += [charts.band(frame, x, low, high, class_), charts.line(frame, x, mean, class_)]
    rug = [charts.rule(frame.x(v), floor - 5, frame.x(v), floor, "rug") for v in effect.seen if math.isfinite(v)]
    aside = []
    for index, triple in enumerate(effect.missing):
        class_, at = SERIES[index % len(SERIES)], SMALL - 30 + 4 * index
        if all(math.isfinite(v) for v in triple):
            middle, bottom, top = (frame.y(min(max(v, bounds[0]), bounds[1])) for v in triple)
            aside += [charts.rule(at, bottom, at, top, f"whisker {class_}"), charts.dot(at, middle, class_, "missing")]
    if effect.missing:
        aside.append(charts.text(SMALL - 28, floor + 17, "missing", "tick", "middle"))
    axes = charts.axes(frame, "", says, y_shares=classes, x_ticks=4)
    return charts.drawing(SMALL, SMALL_HIGH, title, told, axes, charts.inside(frame, *drawn, *rug), *aside)


# --- particles ------------------------------------------------------------------------------------


def posterior(contents: Contents) -> Safe:
    """The particles in a plane, and the weights of a linear model."""
    projection = contents.posterior
    heading = "The particles"
    if projection is None or not len(projection.points):
        return section(heading, element("p", "No picture of the particles was made for this run.", class_="note"))
    parts = [_particles(projection)]
    if projection.coefficients:
        parts.append(_coefficients(projection))
    return section(heading, element("div", *parts, class_="charts"))


def _particles(projection: Projection) -> Safe:
    points = np.asarray(projection.points, float)
    weights = np.nan_to_num(np.asarray(projection.weights, float))
    groups = list(dict.fromkeys(projection.groups))
    high = 320.0
    near = _near(points, weights)
    x_range, y_range = charts.spanned(points[near, 0], margin=0.1), charts.spanned(points[near, 1], margin=0.1)
    frame = charts.alike(charts.framed(WIDE, high, x_range, y_range))
    largest = weights.max() if weights.max() > 0 else 1.0
    marks = []
    for i in np.flatnonzero(near).tolist():
        group, size = projection.groups[i], 2.5 + 6 * math.sqrt(max(weights[i], 0) / largest)
        tip = f"{short(group, 60)}: weight {percent(weights[i])}"
        marks.append(charts.mark(groups.index(group), frame.x(points[i, 0]), frame.y(points[i, 1]), tip, size))
    first, second = projection.explained
    axes = charts.axes(
        frame, f"first axis: {percent(first, 0)} of all differences", f"second axis: {percent(second, 0)}"
    )
    told = f"{counted(len(points), 'particle', 'particles')} in {counted(len(groups), 'group', 'groups')}."
    drawing = charts.drawing(WIDE, high, "Particles in the plane", told, axes, *marks)
    entries = [(short(group, 40), sample(charts.mark(i, 13, 6, group, 4.5))) for i, group in enumerate(groups)]
    caption = (
        "Each mark is a particle, that is one whole model. Marks close together predict alike on a sample of rows, far "
        "apart they disagree: the distance is the typical difference. Large marks have more say in the prediction. The "
        "axes are those along which the particles differ most."
    )
    if not near.all():
        away = counted(int((~near).sum()), "particle lies", "particles lie")
        caption += f" {away} outside the picture, together with {percent(weights[~near].sum())} of the weight."
    return figure("Particles, by what they predict", legend(*entries), drawing, caption=caption)


def _near(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The particles to show: all but those without a say that lie so far off that the others would be one dot."""
    finite = np.isfinite(points).all(1)
    core = finite & (weights >= 0.2 / len(weights))
    if not core.any():
        return finite
    low, high = points[core].min(0), points[core].max(0)
    reach = (high - low).max()
    return finite & ((points >= low - reach) & (points <= high + reach)).all(1)


def _coefficients(projection: Projection) -> Safe:
    ordered = sorted(projection.coefficients, key=lambda c: -abs(np.nan_to_num(c.mean)))
    shown = ordered[:MOST_COEFFICIENTS]
    bounds = charts.spanned([c.mean for c in shown], [c.low for c in shown], [c.high for c in shown], [0.0])
    drawing = charts.intervals(
        "Weights of the linear model",
        f"The {len(shown)} largest weights with 90 % intervals.",
        [c.name for c in shown],
        [[(c.mean, c.low, c.high)] for c in shown],
        width=WIDE,
        x_range=bounds,
        across=short(projection.unit, 50),
        zero=True,
    )
    rows = [(c.name, number(c.mean), f"{number(c.low)} to {number(c.high)}") for c in ordered[:MOST_LISTED]]
    listed = table("", ("column", "weight", "90 % interval"), rows, (1, 2))
    caption = (
        "What one standard deviation more of a column adds, with a 90 % interval; the largest first. An interval that "
        "holds 0 says that the column may not matter."
    )
    details = element("details", element("summary", "As numbers"), listed)
    return figure("Weights of the linear model", drawing, details, caption=caption)
