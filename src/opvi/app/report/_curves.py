"""The learning curve and the drift alarms."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

from opvi.app.report import _charts as charts
from opvi.app.report._contents import Contents, Stretch, so_far
from opvi.app.report._layout import HIGH, WIDE, figure, legend, line_sample, sample, section, table
from opvi.app.report._markup import Safe, counted, element, number, percent

FEW_ALARMS, SHOWN_ALARMS = 8, 50  # up to which they are listed at once, and on demand


def learning(contents: Contents) -> Safe:
    """Error and loss along the stream."""
    regression = contents.task == "regression"
    curve = [s for s in contents.curve if s.rows > 0 and s.count > 0]
    if not curve:
        return section("Learning curve", element("p", "Nothing has been predicted yet.", class_="note"))
    errors, losses = so_far(curve, squared=regression)
    name = "typical error (RMSE)" if regression else "wrong labels"
    against = "predicting the mean so far" if regression else "naming the most frequent label so far"
    error = _curve(
        "Error along the stream",
        name,
        contents,
        curve,
        ([s.error for s in curve], errors),
        baseline=contents.baseline if math.isfinite(contents.baseline) else math.nan,
        shares=not regression,
        caption=f"Each row is predicted before it is learnt. The dashed line is {against}: a model that has learnt "
        "something stays below it.",
    )
    loss = _curve(
        "Loss along the stream",
        "loss, nats a row",
        contents,
        curve,
        ([s.loss for s in curve], losses),
        caption="How surprised the model was by what came: the mean negative log predictive density. Lower is "
        "better; it counts misplaced confidence, not only errors.",
    )
    return section("Learning curve", element("div", error, loss, class_="charts"))


def growing(curve: Sequence[Stretch]) -> bool:
    """Whether stretches grow along the stream, so that a logarithmic axis spaces them evenly."""
    return len(curve) > 2 and curve[-1].rows >= 20 * curve[0].rows and curve[-2].count >= 8 * curve[0].count


def rows_axis(curve: Sequence[Stretch]) -> tuple[tuple[float, float], bool, str]:
    """The range across, whether it is logarithmic, and its name."""
    log = growing(curve)
    return (float(curve[0].rows) if log else 0.0, float(curve[-1].rows)), log, f"rows seen{' (logarithmic)' * log}"


def _curve(
    title: str,
    name: str,
    contents: Contents,
    curve: Sequence[Stretch],
    lines: tuple[Sequence[float], np.ndarray],
    *,
    caption: str,
    baseline: float = math.nan,
    shares: bool = False,
) -> Safe:
    values, running = lines
    rows = [s.rows for s in curve]
    kept, spike = charts.without_spikes(values, baseline)
    across, log, axis = rows_axis(curve)
    y_range = charts.spanned([*kept, running[-1]], most=1.0 if shares else None)
    if min(kept, default=0) >= 0:  # air below must not suggest values that cannot be
        y_range = max(y_range[0], 0.0), y_range[1]
    frame = charts.framed(WIDE, HIGH, across, y_range, shares=shares, log_x=log, top=16)
    entries = [("a stretch of rows", line_sample("thin a")), ("all rows so far", line_sample("a"))]
    drawn = [charts.line(frame, rows, values, "thin a"), charts.line(frame, rows, running, "a")]
    if math.isfinite(baseline):
        drawn.append(charts.rule(frame.left, frame.y(baseline), WIDE - frame.right, frame.y(baseline), "reference b"))
        entries.append(("baseline", sample(charts.rule(1, 6, 25, 6, "reference b"))))
    alarms = [row for row in contents.alarms if across[0] <= row <= across[1]]
    if alarms:
        entries.append(("drift alarm", sample(charts.rule(13, 0, 13, 12, "alarm"))))
    form = percent if shares else number
    if math.isfinite(spike):
        caption += f" The scale leaves out stretches up to {form(spike)}."
    if not np.isfinite(values).any():
        caption += " Here none of the values is a number."
    told = f"{name} over {rows[-1]:,} rows; of all {form(running[-1])}, in the last stretch {form(values[-1])}"
    axes = charts.axes(frame, axis, name, y_shares=shares, whole=True)
    parts = axes, _flags(frame, alarms), charts.inside(frame, *drawn)
    return figure(title, legend(*entries), charts.drawing(WIDE, HIGH, title, told, *parts), caption=caption)


def _flags(frame: charts.Frame, alarms: Sequence[int]) -> Safe:
    """The alarms over a curve."""
    flags = []
    for row in alarms:
        x = frame.x(row)
        points = f"{x - 4:.1f},{frame.top - 8} {x + 4:.1f},{frame.top - 8} {x:.1f},{frame.top}"
        flags.append(charts.rule(x, frame.top, x, frame.height - frame.bottom, "alarm"))
        flags.append(element("polygon", element("title", f"drift alarm at row {row:,}"), points=points, class_="flag"))
    return element("g", *flags, class_="many" if len(alarms) > 20 else None)


def drift(contents: Contents) -> Safe:
    """The alarms, and what they mean."""
    if not contents.alarms:
        said = "No alarm: the predictions never became suddenly worse."
        return section("Drift", element("p", said if contents.rows else "Nothing has been predicted yet."))
    count = len(contents.alarms)
    words = (
        f"{counted(count, 'alarm', 'alarms')}: there the loss rose above what its own variation explains, so the data "
        "probably changed. The model goes on learning; what it learnt before counts less and less."
    )
    since = (row - before for before, row in itertools.pairwise([0, *contents.alarms]))
    listed = [(f"{row:,}", f"{rows:,}") for row, rows in zip(contents.alarms, since, strict=True)]
    shown = table("", ("alarm at row", "rows since the one before"), listed[-SHOWN_ALARMS:], (0, 1))
    which = "All of them" if count <= SHOWN_ALARMS else f"The last {SHOWN_ALARMS}"
    details = element("details", element("summary", which), shown)
    return section("Drift", element("p", words), shown if count <= FEW_ALARMS else details)
