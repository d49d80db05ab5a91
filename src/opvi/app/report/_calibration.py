"""Whether the predictions keep what they promise."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import bdtrik

from opvi.app.report import _charts as charts
from opvi.app.report._contents import Contents, Histogram, Stretch, calibration_error, interval_coverage
from opvi.app.report._curves import rows_axis
from opvi.app.report._layout import HIGH, WIDE, figure, section
from opvi.app.report._markup import Safe, counted, element, percent

NOISE = 0.95  # of the bands that chance alone explains


def calibration(contents: Contents) -> Safe:
    """Whether the predictions promise what they keep."""
    counts = np.asarray(contents.calibration.counts, float)
    if not len(counts) or not counts.sum() > 0:
        return section("Calibration", element("p", "Nothing has been predicted yet.", class_="note"))
    if contents.task == "regression":
        parts = [_pit(counts), _coverage(contents.calibration)]
        covered = [s for s in contents.curve if math.isfinite(s.covered) and s.count > 0]
        parts += [_covered_over_time(covered)] if len(covered) > 1 else []
        verdict = _interval_verdict(contents)
    else:
        parts = [_reliability(contents.calibration), _confidence(contents.calibration)]
        verdict = _class_verdict(contents.calibration)
    return section(
        "Calibration",
        element("p", verdict, class_="verdict"),
        element("div", *parts, class_="charts three" if len(parts) == 3 else "charts"),
    )


def noise_limits(total: float, share: float) -> tuple[float, float]:
    """The counts between which a bin that holds this share of all rows falls 19 times out of 20, by chance alone."""
    tail = (1 - NOISE) / 2
    low, high = (float(bdtrik(q, total, share)) for q in (tail, 1 - tail))
    return max(0.0, math.floor(low)) if math.isfinite(low) else 0.0, math.ceil(high) if math.isfinite(high) else total


def _pit(counts: np.ndarray) -> Safe:
    total, bins = float(counts.sum()), len(counts)
    low, high = noise_limits(total, 1 / bins)
    heights = counts * bins / total
    band = low * bins / total, high * bins / total
    # Of a handful of rows the band is as high as the chart; it needs no more room than that.
    frame = charts.framed(WIDE, HIGH, (0, 1), (0.0, max(1.6, 1.1 * float(heights.max()), min(1.1 * band[1], 3.0))))
    tips = [f"{i / bins:.2f} to {(i + 1) / bins:.2f}: {counted(int(c), 'row', 'rows')}" for i, c in enumerate(counts)]
    right, top, floor = WIDE - frame.right, frame.y(band[1]), frame.y(band[0])
    noise = element("rect", x=frame.left, y=top, width=right - frame.left, height=floor - top, class_="noise")
    outside = int(((counts < low) | (counts > high)).sum())
    told = f"Histogram of P(Y ≤ y) in {bins} bins over {total:,.0f} rows; {outside} bars outside the band of chance."
    drawing = charts.drawing(
        WIDE,
        HIGH,
        "Where the true values fell",
        told,
        charts.axes(frame, "predicted probability of a smaller value", "share, relative to even"),
        charts.bars(frame, heights, "bar", tips),
        charts.inside(frame, noise, charts.rule(frame.left, frame.y(1), right, frame.y(1), "reference")),
    )
    caption = (
        "Each true value is placed where it fell in its own predictive distribution; honest predictions give even "
        "bars. A hill means too wide predictions, a valley too narrow ones, a slope a bias. Chance alone keeps 19 of "
        "20 bars in the grey band"
        + ("; with so many rows even a harmless unevenness leaves it." if total > 20_000 else ".")
    )
    return figure("Where the true values fell", drawing, caption=caption)


def _coverage(bins: Histogram) -> Safe:
    promised, held = interval_coverage(bins)
    frame = charts.framed(WIDE, HIGH, (0, 1), (0, 1), shares=True)
    shown = [
        charts.dot(frame.x(p), frame.y(h), "a", f"{percent(p, 0)} promised, {percent(h)} held")
        for p, h in zip(promised, held, strict=True)
    ]
    told = ", ".join(f"{percent(p, 0)}: {percent(h)}" for p, h in zip(promised, held, strict=True))
    drawing = charts.drawing(
        WIDE,
        HIGH,
        "Intervals: promised and kept",
        f"Share of rows inside central intervals. {told}",
        charts.axes(frame, "promised", "inside", x_shares=True, y_shares=True),
        charts.rule(frame.x(0), frame.y(0), frame.x(1), frame.y(1), "reference"),
        charts.line(frame, promised, held, "a"),
        *shown,
    )
    caption = (
        "Dots on the dashed line: an interval that promises to hold 80 % of the values held 80 %. Below the line "
        "intervals are too narrow, above it too wide."
    )
    return figure("Intervals: promised and kept", drawing, caption=caption)


def _covered_over_time(curve: Sequence[Stretch]) -> Safe:
    rows, values = [s.rows for s in curve], [s.covered for s in curve]
    across, log, axis = rows_axis(curve)
    y_range = charts.spanned(values, [0.75, 1.0], least=0, most=1)
    frame = charts.framed(WIDE, HIGH, across, y_range, shares=True, log_x=log)
    limits = [noise_limits(s.count, 0.9) for s in curve]
    low, high = ([limit[i] / s.count for limit, s in zip(limits, curve, strict=True)] for i in (0, 1))
    drawing = charts.drawing(
        WIDE,
        HIGH,
        "Inside the 90 % interval, along the stream",
        f"Share inside the 90 % interval over {rows[-1]:,} rows; in the last stretch {percent(values[-1])}.",
        charts.axes(frame, axis, "inside", y_shares=True, whole=True),
        charts.inside(
            frame,
            charts.band(frame, rows, low, high, "noise"),
            charts.rule(frame.left, frame.y(0.9), WIDE - frame.right, frame.y(0.9), "reference"),
            charts.line(frame, rows, values, "a"),
        ),
    )
    caption = (
        "Should wander about 90 %, mostly within the grey band of chance. A dip shows where the model was more sure "
        "than it should have been."
    )
    return figure("Inside the 90 % interval, along the stream", drawing, caption=caption)


def _interval_verdict(contents: Contents) -> str:
    covered, rows = contents.total.covered, contents.total.count or contents.rows
    if not math.isfinite(covered) or rows < 1:
        return "How many rows lay inside their 90 % interval is not known."
    if rows < 50:
        return f"{counted(rows, 'row is', 'rows are')} too few to judge."
    low, high = noise_limits(rows, 0.9)
    if low <= covered * rows <= high:
        return (
            f"90 % intervals held {percent(covered)} of {counted(rows, 'value', 'values')}: as promised, within chance."
        )
    near = abs(covered - 0.9) < 0.02
    word = "narrow" if covered < 0.9 else "wide"
    how = f"slightly too {word}" if near else f"too {word}"
    return f"90 % intervals held {percent(covered)} of {counted(rows, 'value', 'values')}: {how}."


def _wilson(share: float, count: float) -> tuple[float, float]:
    """A 95 % interval for a share seen in so many rows (Wilson's)."""
    z2 = 1.96**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = 1.96 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _bins(bins: Histogram) -> list[tuple[float, float, int]]:
    """Confidence, accuracy and count of the bins that hold rows."""
    rows = zip(bins.confidence, bins.accuracy, bins.counts, strict=True)
    return [(float(c), float(a), int(n)) for c, a, n in rows if n > 0 and math.isfinite(c) and math.isfinite(a)]


def _reliability(bins: Histogram) -> Safe:
    known = _bins(bins)
    frame = charts.framed(WIDE, HIGH, (0, 1), (0, 1), shares=True)
    parts = []
    for confidence, accuracy, count in known:
        low, high = _wilson(min(max(accuracy, 0.0), 1.0), count)
        x = frame.x(confidence)
        parts.append(charts.rule(x, frame.y(low), x, frame.y(high), "whisker a"))
        tip = f"confidence {percent(confidence)}, right {percent(accuracy)}, {counted(count, 'row', 'rows')}"
        parts.append(charts.dot(x, frame.y(accuracy), "a", tip, 3 if count < 30 else 4))
    told = "; ".join(f"{percent(c, 0)} sure: {percent(a)} right" for c, a, _ in known)
    drawing = charts.drawing(
        WIDE,
        HIGH,
        "Confidence and accuracy",
        told,
        charts.axes(frame, "confidence in the label named", "share right", x_shares=True, y_shares=True),
        charts.rule(frame.x(0), frame.y(0), frame.x(1), frame.y(1), "reference"),
        charts.line(frame, [c for c, *_ in known], [a for _, a, _ in known], "thin a") if len(known) > 1 else "",
        *parts,
    )
    caption = (
        "Rows grouped by how sure the model was of the label it named. On the dashed line, labels named with 80 % "
        "confidence are right in 80 % of the rows; below it the model is too sure. Upright lines show "
        "how far chance alone may move a dot."
    )
    return figure("Confidence and accuracy", drawing, caption=caption)


def _confidence(bins: Histogram) -> Safe:
    counts = np.asarray(bins.counts, float)
    n = len(counts)
    frame = charts.framed(WIDE, HIGH, (0, 1), (0.0, 1.1 * float(counts.max())))
    tips = [
        f"{percent(i / n)} to {percent((i + 1) / n)}: {counted(int(c), 'row', 'rows')}" for i, c in enumerate(counts)
    ]
    drawing = charts.drawing(
        WIDE,
        HIGH,
        "How sure the model was",
        f"Rows by confidence in the label named, in {n} bins.",
        charts.axes(frame, "confidence in the label named", "rows", x_shares=True),
        charts.bars(frame, counts, "bar", tips),
    )
    caption = "How many rows stand behind each dot of the other chart. A useful model is often sure, and rightly so."
    return figure("How sure the model was", drawing, caption=caption)


def _class_verdict(bins: Histogram) -> str:
    known = _bins(bins)
    total = sum(n for *_, n in known)
    gap = sum((c - a) * n for c, a, n in known) / total if total else math.nan
    ece = calibration_error(bins)
    if not math.isfinite(ece):
        return "How far confidence and accuracy lie apart is not known."
    if ece < 0.02:
        how = "confidence can be taken at its word"
    else:
        how = (
            "the model is too sure"
            if gap > 0.25 * ece
            else "the model is too modest"
            if gap < -0.25 * ece
            else "uneven"
        )
    return f"Confidence and accuracy lie {percent(ece)} apart on average (ECE): {how}."
