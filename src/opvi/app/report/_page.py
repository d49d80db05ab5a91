"""The whole report as one HTML page that needs nothing else."""

import math
from collections.abc import Mapping

from opvi.app.report._calibration import calibration
from opvi.app.report._contents import Contents, calibration_error
from opvi.app.report._curves import drift, learning
from opvi.app.report._layout import section, table
from opvi.app.report._markup import Safe, counted, element, joined, number, percent, short
from opvi.app.report._model import effects, posterior
from opvi.app.report._style import CSS, LIVE_POLICY, POLICY, SCRIPT

MOST_REASONS = 30


def page(contents: Contents, *, live: bool = False) -> str:
    """The page as HTML: one file, no script, nothing from elsewhere.

    Args:
        contents: what to show. All of it is escaped.
        live: the page renews itself every few seconds from the server it came from (`serve`); only then it holds a
            script, the one that its policy names by its hash.
    """
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=LIVE_POLICY if live else POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("link", rel="icon", href="data:,"),
        element("title", f"{contents.title} · opvi"),
        element("style", Safe(CSS)),
    )
    main = element(
        "main",
        header(contents, live),
        learning(contents),
        calibration(contents),
        drift(contents),
        effects(contents),
        posterior(contents),
        rows(contents),
        about(contents),
        element(
            "footer",
            "Made by opvi. This page is one file, holds no script and asks for nothing from elsewhere."
            if not live
            else "Made by opvi, which serves this page to this computer only.",
        ),
    )
    body = element("body", main, element("script", Safe(SCRIPT)) if live else "")
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


# --- the head of the page -------------------------------------------------------------------------


def header(contents: Contents, live: bool) -> Safe:
    """Title, state and the figures that matter most."""
    state = "finished" if contents.finished else "unfinished"
    badges = [element("span", contents.task, class_="badge"), element("span", state, class_="badge")]
    if live:
        badges.append(element("span", "live", class_="badge live", id="live", role="status"))
    what = joined(["Predicting ", element("strong", contents.target), _of_classes(contents), "."])
    parts = [element("h1", contents.title), element("p", *badges), element("p", what, class_="lead")]
    if not contents.rows:
        parts.append(element("p", "No row has been learnt yet, so there is nothing to judge.", class_="warning"))
    elif contents.rows < 100:
        few = f"Only {counted(contents.rows, 'row', 'rows')} so far: every figure here may still change a lot."
        parts.append(element("p", few, class_="warning"))
    tiles = (
        element("div", element("dt", name), element("dd", _sized(value), element("small", note)))
        for name, value, note in figures(contents)
    )
    return element("header", *parts, element("dl", *tiles, class_="figures"))


def _sized(value: str) -> Safe:
    """A figure, smaller where it is long."""
    return element("span", value, class_="long" if len(value) > 9 else None)


def _of_classes(contents: Contents) -> str:
    if contents.task == "regression":
        return ""
    few = ", ".join(short(name, 40) for name in contents.classes[:6])
    if len(contents.classes) > 6:
        few += f" and {len(contents.classes) - 6:,} more"
    return f", one of {counted(len(contents.classes), 'class', 'classes')}" + (f": {few}" if few else "")


def figures(contents: Contents) -> list[tuple[str, str, str]]:
    """The headline: name, value and what to hold it against."""
    total, regression = contents.total, contents.task == "regression"
    rejected = sum(dict(contents.rejected).values())
    share = rejected / (rejected + contents.rows) if rejected + contents.rows else math.nan
    if regression:
        error = ("Typical error (RMSE)", number(total.error), _against(contents, "predicting the mean so far"))
        honest = ("Inside the 90 % interval", percent(total.covered), "of the true values; 90\u00a0% is honest")
        loss_note = "mean negative log density; lower is better"
    else:
        against = _against(contents, "naming the most frequent label so far")
        error = ("Wrong labels", percent(total.error), against)
        ece = calibration_error(contents.calibration)
        honest = ("Calibration error (ECE)", percent(ece), "mean gap between confidence and accuracy")
        even = math.log(len(contents.classes)) if contents.classes else math.nan
        loss_note = f"lower is better; guessing evenly costs {number(even, 3)}"
    last = f"last at row {contents.alarms[-1]:,}" if contents.alarms else "predictions never became suddenly worse"
    return [
        ("Rows learnt", f"{contents.rows:,}", "each predicted before it was learnt"),
        error,
        ("Loss, nats a row", number(total.loss), loss_note),
        honest,
        ("Rows rejected", f"{rejected:,}", f"{percent(share)} of all" if rejected else "every row fitted"),
        ("Drift alarms", f"{len(contents.alarms):,}", last if contents.rows else "nothing predicted yet"),
    ]


def _against(contents: Contents, baseline: str) -> str:
    form = number if contents.task == "regression" else percent
    if not (math.isfinite(contents.baseline) and math.isfinite(contents.total.error)):
        return f"{baseline}: not known yet"
    if contents.baseline <= 0:
        return f"{baseline}: {form(contents.baseline)}"
    change = contents.total.error / contents.baseline - 1
    word = "below" if change < 0 else "above"
    return f"{percent(abs(change), 0)} {word} {baseline} ({form(contents.baseline)})"


# --- rows, settings -------------------------------------------------------------------------------


def rows(contents: Contents) -> Safe:
    """Rejected rows by reason, and filled values."""
    rejected = dict(contents.rejected)
    total = sum(rejected.values())
    parts = []
    if total:
        ordered = sorted(rejected.items(), key=lambda item: -item[1])
        others = ordered[MOST_REASONS:]
        if others:
            ordered = [*ordered[:MOST_REASONS], (f"{len(others):,} other reasons", sum(count for _, count in others))]
        share = (f"{percent(count / total)}" for _, count in ordered)
        shown = [(reason, f"{count:,}", part) for (reason, count), part in zip(ordered, share, strict=True)]
        parts.append(
            element(
                "p",
                f"{counted(total, 'row', 'rows')} did not fit the columns settled at the start and "
                "were set aside, with the reason, instead of being learnt.",
            )
        )
        parts.append(table("", ("reason", "rows", "share"), shown, (1, 2)))
    else:
        parts.append(element("p", "Every row fitted the columns settled at the start; none was set aside."))
    if contents.filled:
        parts.append(element("p", f"{counted(contents.filled, 'missing value was', 'missing values were')} filled in."))
    return section("Rejected rows", *parts)


def named(heading: str, values: Mapping[str, str]) -> Safe:
    """A small table of names and values."""
    if not values:
        return Safe()
    return table(heading, ("name", "value"), [(key, value) for key, value in values.items()])


def about(contents: Contents) -> Safe:
    """Settings, versions, the command that goes on, notes."""
    parts = [element("p", note, class_="note") for note in contents.notes]
    if contents.command:
        parts += [element("p", "To go on with this run:"), element("pre", contents.command)]
    tables = [named("Settings", contents.settings), named("Versions", contents.versions)]
    if any(tables):
        parts.append(element("div", *tables, class_="tables"))
    return section("About this run", *parts) if parts else Safe()
