"""Charts of what the model learnt: the effects of the columns, and where its particles lie."""

import math

import numpy as np

from opvi.app.report import _charts as charts
from opvi.app.report._charts import SERIES, WIDE, Chart, Figure, Range, Shape
from opvi.app.report._contents import Contents, Effect, Projection
from opvi.app.report._words import counted, number, percent, short

SMALL = (255.0, 165.0)  # width and height of an effect
MOST = 48  # effects shown
MOST_LEVELS = 12  # of a text column
MOST_COEFFICIENTS, MOST_LISTED = 30, 500


def effects(contents: Contents) -> tuple[list[Figure], list[tuple[str, Shape]]]:
    """Return small charts on one scale, the strongest effect first, and the legend of their lines."""
    ordered = sorted(contents.effects, key=lambda effect: -np.nan_to_num(effect.strength))
    if not ordered:
        return [], []
    classes = contents.task == "classification"
    bounds = _scale(ordered, classes)
    says = "probability" if classes else short(contents.target, 24)
    lines = ordered[0].lines if classes else ()
    legend = [(short(name, 60), charts.sample(f"line {SERIES[i % len(SERIES)]}")) for i, name in enumerate(lines)]
    return [_effect(effect, bounds, says, classes) for effect in ordered[:MOST]], legend


def _scale(ordered: list[Effect], classes: bool) -> Range:
    """Return one range for all charts: all means, and the bands unless they would flatten the means."""
    means = np.concatenate([np.ravel(np.asarray(e.mean, float)) for e in ordered])
    bands = np.concatenate([np.ravel(np.asarray(v, float)) for e in ordered for v in (e.low, e.high)])
    means, bands = means[np.isfinite(means)], bands[np.isfinite(bands)]
    if not len(means):
        return 0.0, 1.0
    room = max(2.0 * float(means.max() - means.min()), 1e-9 * float(np.abs(means).max()))
    bands = bands[(bands > means.min() - room) & (bands < means.max() + room)]
    return charts.spanned(means, bands, least=0.0, most=1.0) if classes else charts.spanned(means, bands)


def _effect(effect: Effect, bounds: Range, unit: str, classes: bool) -> Figure:
    name = short(effect.feature, 60)
    title, says = f"Effect of {name}", f"{unit} with a 90 % band; the prediction varies by"
    strength = percent(effect.strength) if classes else number(effect.strength, 3)
    draw = _levels if effect.kind == "text" else _numbers
    chart = draw(effect, bounds, unit, title, f"{says} {strength} over the rows.", classes)
    return Figure(name, chart, f"moves the prediction by ± {strength}")


def _levels(effect: Effect, bounds: Range, unit: str, title: str, says: str, classes: bool) -> Chart:
    each = np.asarray([effect.mean, effect.low, effect.high], float)  # [3, lines, values]
    order = np.argsort(-np.nan_to_num(each[0, 0]), kind="stable") if each.shape[1] == 1 else np.arange(each.shape[2])
    if len(order) > MOST_LEVELS:  # both ends of the order
        order = np.concatenate([order[: MOST_LEVELS // 2], order[-MOST_LEVELS // 2 :]])
    rows = [[(float(m), float(low), float(high)) for m, low, high in each[:, :, i].T] for i in order]
    names = [str(effect.values[i]) for i in order]
    return charts.intervals(title, says, names, rows, width=SMALL[0], x_range=bounds, across=unit, shares=classes)


def _numbers(effect: Effect, bounds: Range, unit: str, title: str, says: str, classes: bool) -> Chart:
    x = np.asarray(effect.values, float)
    right = 64.0 if effect.missing else 14.0
    across = charts.spanned(x, margin=0.02)
    chart = Chart(title, says, across, bounds, size=SMALL, shares=classes, right=right, bottom=24)
    chart.axes("", unit, x_ticks=4)
    for class_, mean, low, high in zip(SERIES, effect.mean, effect.low, effect.high, strict=False):
        chart.band(x, low, high, class_)
        chart.line(x, mean, class_)
    for place in (chart.x(value) for value in effect.seen if math.isfinite(value)):
        chart.inside.append(charts.path([(place, chart.floor - 5), (place, chart.floor)], "rug"))
    if effect.missing:
        chart.around.append(charts.words(SMALL[0] - 28, chart.floor + 17, "missing", "tick"))
    for index, triple in enumerate(effect.missing):
        class_, at = SERIES[index % len(SERIES)], SMALL[0] - 30 + 4 * index
        if all(math.isfinite(v) for v in triple):
            middle, bottom, top = (chart.y(min(max(v, bounds[0]), bounds[1])) for v in triple)
            chart.around.append(charts.path([(at, bottom), (at, top)], f"whisker {class_}"))
            chart.around.append(charts.circle(at, middle, 3.5, f"dot {class_}", "missing"))
    return chart


def posterior(projection: Projection | None) -> list[Figure]:
    """Return the particles in a plane, and the weights of a linear model."""
    if projection is None or not len(projection.points):
        return []
    return [_particles(projection), *([_coefficients(projection)] if projection.coefficients else [])]


def _particles(projection: Projection) -> Figure:
    points = np.asarray(projection.points, float)
    weights = np.nan_to_num(np.asarray(projection.weights, float))
    groups = list(dict.fromkeys(projection.groups))
    near = _near(points, weights)
    says = f"{counted(len(points), 'particle', 'particles')} in {counted(len(groups), 'group', 'groups')}."
    ranges = charts.spanned(points[near, 0], margin=0.1), charts.spanned(points[near, 1], margin=0.1)
    chart = Chart("Particles in the plane", says, *ranges, size=(WIDE, 320))
    chart.one_scale()
    first, second = projection.explained
    chart.axes(f"first axis: {percent(first, 0)} of all differences", f"second axis: {percent(second, 0)}")
    largest = weights.max() if weights.max() > 0 else 1.0
    for i in np.flatnonzero(near).tolist():
        group, size = projection.groups[i], 2.5 + 6 * math.sqrt(max(weights[i], 0) / largest)
        tip = f"{short(group, 60)}: weight {percent(weights[i])}"
        chart.around.append(charts.mark(groups.index(group), chart.x(points[i, 0]), chart.y(points[i, 1]), size, tip))
    legend = [(short(group, 40), charts.mark(i, 13, 6, 4.5, "")) for i, group in enumerate(groups)]
    caption = (
        "Each mark is a particle, that is one whole model. Marks close together predict alike on a sample of rows, far "
        "apart they disagree: the distance is the typical difference. Large marks have more say in the prediction. The "
        "axes are those along which the particles differ most."
    )
    if not near.all():
        away = counted(int((~near).sum()), "particle lies", "particles lie")
        caption += f" {away} outside the picture, together with {percent(weights[~near].sum())} of the weight."
    return Figure("Particles, by what they predict", chart, caption, legend)


def _near(points: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the particles to show: all but far outliers of negligible weight, which would hide the rest."""
    finite = np.isfinite(points).all(1)
    core = finite & (weights >= 0.2 / len(weights))
    if not core.any():
        return finite
    low, high = points[core].min(0), points[core].max(0)
    reach = (high - low).max()
    return finite & ((points >= low - reach) & (points <= high + reach)).all(1)


def _coefficients(projection: Projection) -> Figure:
    ordered = sorted(projection.coefficients, key=lambda c: -abs(np.nan_to_num(c.mean)))
    shown = ordered[:MOST_COEFFICIENTS]
    title = "Weights of the linear model"
    chart = charts.intervals(
        title,
        f"The {len(shown)} largest weights with 90 % intervals.",
        [c.name for c in shown],
        [[(c.mean, c.low, c.high)] for c in shown],
        width=WIDE,
        x_range=charts.spanned([c.mean for c in shown], [c.low for c in shown], [c.high for c in shown], [0.0]),
        across=short(projection.unit, 50),
        zero=True,
    )
    rows = [(c.name, number(c.mean), f"{number(c.low)} to {number(c.high)}") for c in ordered[:MOST_LISTED]]
    caption = (
        "What one standard deviation more of a column adds, with a 90 % interval; the largest first. An interval that "
        "holds 0 says that the column may not matter."
    )
    return Figure(title, chart, caption, rows=rows)
