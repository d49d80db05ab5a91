"""Charts of the predictions: error and loss along the stream, and calibration, with a verdict in words."""

import math
from collections.abc import Sequence

import numpy as np

from opvi.app.report import _contents as figures
from opvi.app.report._charts import Chart, Figure, Range, path, sample, spanned, without_spikes
from opvi.app.report._contents import Contents, Histogram, Stretch
from opvi.app.report._words import counted, number, percent

FLAG = [(-4, -8), (4, -8), (0, 0)]  # over an alarm


def learning(contents: Contents) -> list[Figure]:
    """Return error and loss along the stream; nothing before the first prediction."""
    regression = contents.task == "regression"
    curve = [s for s in contents.curve if s.rows > 0 and s.count > 0]
    if not curve:
        return []
    errors, losses = figures.so_far(curve, squared=regression)
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
    """Return the x range, whether it is logarithmic (if stretches grow along the stream), and its name."""
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
    """Draw the alarms over a curve, fainter if there are many."""
    many = " many" if len(alarms) > 20 else ""
    for row in alarms:
        x, top = chart.x(row), chart.top
        flag = path([(x + dx, top + dy) for dx, dy in FLAG], f"flag{many}", f"drift alarm at row {row:,}", closed=True)
        chart.around += [path([(x, top), (x, chart.floor)], f"alarm{many}"), flag]


def _covered(curve: Sequence[Stretch]) -> Figure:
    """Return the share inside the 90 % interval along the stream."""
    rows, values = [s.rows for s in curve], [s.covered for s in curve]
    across, log, axis = _rows_axis(curve)
    title = "Inside the 90 % interval, along the stream"
    says = f"Share inside the 90 % interval over {rows[-1]:,} rows; in the last stretch {percent(values[-1])}."
    y_range = spanned(values, [0.75, 1.0], least=0, most=1)
    chart = Chart(title, says, across, y_range, shares=True, log_x=log)
    limits = [figures.noise_limits(s.count, 0.9) for s in curve]
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


def calibration(contents: Contents) -> tuple[str, list[Figure]]:
    """Return a verdict and its charts; no charts before the first prediction."""
    counts = np.asarray(contents.calibration.counts, float)
    if not counts.sum() > 0:
        return "", []
    if contents.task == "classification":
        bins = contents.calibration
        return _class_verdict(bins), [_reliability(bins), _confidence(counts)]
    charts = [_pit(counts), _coverage(contents.calibration)]
    curve = [s for s in contents.curve if math.isfinite(s.covered) and s.count > 0]
    return _interval_verdict(contents), charts + ([_covered(curve)] if len(curve) > 1 else [])


def _pit(counts: np.ndarray) -> Figure:
    total, bins = float(counts.sum()), len(counts)
    low, high = figures.noise_limits(total, 1 / bins)
    heights = counts * bins / total
    band = low * bins / total, high * bins / total
    outside = int(((counts < low) | (counts > high)).sum())
    title = "Where the true values fell"
    says = f"Histogram of P(Y ≤ y) in {bins} bins over {total:,.0f} rows; {outside} bars outside the band of chance."
    # Of a handful of rows the band is as high as the chart; it needs no more room than that.
    chart = Chart(title, says, (0, 1), (0.0, max(1.6, 1.1 * float(heights.max()), min(1.1 * band[1], 3.0))))
    chart.axes("predicted probability of a smaller value", "share, relative to even")
    chart.bars(
        heights, [f"{i / bins:.2f} to {(i + 1) / bins:.2f}: {_rows(count)}" for i, count in enumerate(counts.tolist())]
    )
    chart.band([0, 1], [band[0]] * 2, [band[1]] * 2, "noise")
    chart.across(1, "reference")
    caption = (
        "Each true value is placed where it fell in its own predictive distribution; honest predictions give even "
        "bars. A hill means too wide predictions, a valley too narrow ones, a slope a bias. Chance alone keeps 19 of "
        "20 bars in the grey band"
        + ("; with this many rows even a harmless unevenness leaves it." if total > 20_000 else ".")
    )
    return Figure(title, chart, caption)


def _coverage(bins: Histogram) -> Figure:
    promised, held = figures.interval_coverage(bins)
    title = "Intervals: promised and kept"
    told = ", ".join(f"{percent(p, 0)}: {percent(h)}" for p, h in zip(promised, held, strict=True))
    chart = Chart(title, f"Share of rows inside central intervals. {told}", (0, 1), (0, 1), shares=True)
    chart.axes("promised", "inside", x_shares=True)
    chart.diagonal()
    chart.line(promised, held, "a")
    for p, h in zip(promised, held, strict=True):
        chart.dot(p, h, "a", f"{percent(p, 0)} promised, {percent(h)} held")
    caption = (
        "Dots on the dashed line: an interval that promises to hold 80 % of the values held 80 %. Below the line "
        "intervals are too narrow, above it too wide."
    )
    return Figure(title, chart, caption)


def _interval_verdict(contents: Contents) -> str:
    covered, rows = contents.total.covered, contents.total.count or contents.rows
    if not math.isfinite(covered) or rows < 1:
        return "How many rows lay inside their 90 % interval is not known."
    if rows < 50:
        return f"{counted(rows, 'row is', 'rows are')} too few to judge."
    held = f"90 % intervals held {percent(covered)} of {counted(rows, 'value', 'values')}"
    low, high = figures.noise_limits(rows, 0.9)
    if low <= covered * rows <= high:
        return f"{held}: as promised, within chance."
    return f"{held}: {'slightly ' * (abs(covered - 0.9) < 0.02)}too {'narrow' if covered < 0.9 else 'wide'}."


def _wilson(share: float, count: float) -> tuple[float, float]:
    """Return a 95 % (Wilson) interval for a share observed in `count` rows."""
    z2 = 1.96**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = 1.96 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _known(bins: Histogram) -> list[tuple[float, float, int]]:
    """Return confidence, accuracy and count of the non-empty bins."""
    rows = zip(bins.confidence, bins.accuracy, bins.counts, strict=True)
    return [(float(c), float(a), int(n)) for c, a, n in rows if n > 0 and math.isfinite(c) and math.isfinite(a)]


def _reliability(bins: Histogram) -> Figure:
    known = _known(bins)
    title = "Confidence and accuracy"
    says = "; ".join(f"{percent(c, 0)} sure: {percent(a)} right" for c, a, _ in known)
    chart = Chart(title, says, (0, 1), (0, 1), shares=True)
    chart.axes("confidence in the label named", "share right", x_shares=True)
    chart.diagonal()
    if len(known) > 1:
        chart.line([c for c, *_ in known], [a for _, a, _ in known], "thin a")
    for confidence, accuracy, count in known:
        x, ends = chart.x(confidence), _wilson(min(max(accuracy, 0.0), 1.0), count)
        chart.inside.append(path([(x, chart.y(end)) for end in ends], "whisker a"))
        tip = f"confidence {percent(confidence)}, right {percent(accuracy)}, {_rows(count)}"
        chart.dot(confidence, accuracy, "a", tip, 3 if count < 30 else 4)
    caption = (
        "Rows grouped by how sure the model was of the label it named. On the dashed line, labels named with 80 % "
        "confidence are right in 80 % of the rows; below it the model is too sure. Upright lines show "
        "how far chance alone may move a dot."
    )
    return Figure(title, chart, caption)


def _confidence(counts: np.ndarray) -> Figure:
    n = len(counts)
    title = "How sure the model was"
    says = f"Rows by confidence in the label named, in {n} bins."
    chart = Chart(title, says, (0, 1), (0.0, 1.1 * float(counts.max())))
    chart.axes("confidence in the label named", "rows", x_shares=True)
    chart.bars(
        counts, [f"{percent(i / n)} to {percent((i + 1) / n)}: {_rows(count)}" for i, count in enumerate(counts)]
    )
    caption = "How many rows stand behind each dot of the other chart. A useful model is often sure, and rightly so."
    return Figure(title, chart, caption)


def _rows(count: float) -> str:
    return counted(int(count), "row", "rows")


def _class_verdict(bins: Histogram) -> str:
    known = _known(bins)
    total = sum(n for *_, n in known)
    gap = sum((c - a) * n for c, a, n in known) / total if total else math.nan
    ece = figures.calibration_error(bins)
    if not math.isfinite(ece):
        return "How far confidence and accuracy lie apart is not known."
    if ece < 0.02:
        how = "confidence can be taken at its word"
    elif abs(gap) > 0.25 * ece:
        how = f"the model is too {'sure' if gap > 0 else 'modest'}"
    else:
        how = "uneven"
    return f"Confidence and accuracy lie {percent(ece)} apart on average (ECE): {how}."
