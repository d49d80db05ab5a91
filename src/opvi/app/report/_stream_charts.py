"""Charts along the stream: error, loss, and how often the intervals held."""

import math
from collections.abc import Sequence

import numpy as np

from opvi.app.report._charts import Chart, Figure, Range, path, sample, spanned, without_spikes
from opvi.app.report._contents import Contents, Stretch, noise_limits, so_far
from opvi.app.report._words import number, percent

FLAG = [(-4, -8), (4, -8), (0, 0)]  # over an alarm


def learning(contents: Contents) -> list[Figure]:
    """Return error and loss along the stream; nothing before the first prediction."""
    regression = contents.task == "regression"
    curve = [s for s in contents.curve if s.rows > 0 and s.count > 0]
    if not curve:
        return []
    errors, losses = so_far(curve, squared=regression)
    against = "predicting the mean so far" if regression else "naming the most frequent label so far"
    return [
        _along(
            "Error along the stream",
            "typical error (RMSE)" if regression else "wrong labels",
            contents,
            ([s.error for s in curve], errors),
            baseline=contents.baseline,
            shares=not regression,
            caption=f"Each row is predicted before it is learnt. The dashed line is {against}: a model that has learnt "
            "something stays below it.",
        ),
        _along(
            "Loss along the stream",
            "loss, nats per row",
            contents,
            ([s.loss for s in curve], losses),
            caption="How surprised the model was by what came: the mean negative log predictive density. Lower is "
            "better; it counts misplaced confidence, not only errors.",
        ),
    ]


def _rows_axis(curve: Sequence[Stretch]) -> tuple[Range, bool, str]:
    """The range across, whether it is logarithmic (where stretches grow along the stream), and its name."""
    log = len(curve) > 2 and curve[-1].rows >= 20 * curve[0].rows and curve[-2].count >= 8 * curve[0].count
    return (float(curve[0].rows) if log else 0.0, float(curve[-1].rows)), log, f"rows seen{' (logarithmic)' * log}"


def _along(
    title: str,
    name: str,
    contents: Contents,
    lines: tuple[list[float], np.ndarray],
    *,
    caption: str,
    baseline: float = math.nan,
    shares: bool = False,
) -> Figure:
    curve = [s for s in contents.curve if s.rows > 0 and s.count > 0]
    rows, (values, running) = [s.rows for s in curve], lines
    kept, spike = without_spikes(values, *([baseline] if math.isfinite(baseline) else []))
    across, log, axis = _rows_axis(curve)
    y_range = spanned([*kept, running[-1]], most=1.0 if shares else math.inf)
    if min(kept, default=0) >= 0:  # air below must not suggest values that cannot be
        y_range = max(y_range[0], 0.0), y_range[1]
    form = percent if shares else number
    says = f"{name} over {rows[-1]:,} rows; of all {form(running[-1])}, in the last stretch {form(values[-1])}"
    chart = Chart(title, says, across, y_range, shares=shares, log_x=log, top=16)
    chart.axes(axis, name, whole=True)
    alarms = [row for row in contents.alarms if across[0] <= row <= across[1]]
    _flags(chart, alarms)
    chart.line(rows, values, "thin a")
    chart.line(rows, running, "a")
    legend = [("a stretch of rows", sample("line thin a")), ("all rows so far", sample("line a"))]
    if math.isfinite(baseline):
        chart.across(baseline, "reference b")
        legend.append(("baseline", sample("reference b")))
    if alarms:
        legend.append(("drift alarm", path([(13, 0), (13, 12)], "alarm")))
    if math.isfinite(spike):
        caption += f" The scale leaves out stretches up to {form(spike)}."
    if not np.isfinite(values).any():
        caption += " Here none of the values is a number."
    return Figure(title, chart, caption, legend)


def _flags(chart: Chart, alarms: Sequence[int]) -> None:
    """The alarms over a curve; of many each is faint."""
    many = " many" if len(alarms) > 20 else ""
    for row in alarms:
        x, top = chart.x(row), chart.top
        flag = path([(x + dx, top + dy) for dx, dy in FLAG], f"flag{many}", f"drift alarm at row {row:,}", closed=True)
        chart.around += [path([(x, top), (x, chart.floor)], f"alarm{many}"), flag]


def covered(curve: Sequence[Stretch]) -> Figure:
    """Return the share inside the 90 % interval along the stream."""
    rows, values = [s.rows for s in curve], [s.covered for s in curve]
    across, log, axis = _rows_axis(curve)
    title = "Inside the 90 % interval, along the stream"
    says = f"Share inside the 90 % interval over {rows[-1]:,} rows; in the last stretch {percent(values[-1])}."
    y_range = spanned(values, [0.75, 1.0], least=0, most=1)
    chart = Chart(title, says, across, y_range, shares=True, log_x=log)
    limits = [noise_limits(s.count, 0.9) for s in curve]
    low, high = ([limit[i] / s.count for limit, s in zip(limits, curve, strict=True)] for i in (0, 1))
    chart.axes(axis, "inside", whole=True)
    chart.band(rows, low, high, "noise")
    chart.across(0.9, "reference")
    chart.line(rows, values, "a")
    caption = (
        "Should wander about 90 %, mostly within the grey band of chance. A dip shows where the model was more sure "
        "than it should have been."
    )
    return Figure(title, chart, caption)
