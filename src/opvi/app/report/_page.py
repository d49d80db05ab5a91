"""The whole report as one HTML page that needs nothing else."""

import base64
import hashlib
import itertools
import math
from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from opvi.app.report._contents import ColumnTold, Contents, calibration_error
from opvi.app.report._model_charts import effects, posterior
from opvi.app.report._prediction_charts import calibration, learning
from opvi.app.report._words import clean, counted, number, percent, short

MOST_REASONS, MOST_ALARMS = 30, 50  # listed


def _shown(value: object) -> object:
    """Return a value as a template writes it: never None, and without characters that would break the page."""
    return "" if value is None else clean(value) if type(value) is str else value


TEMPLATES = Environment(
    loader=PackageLoader("opvi.app.report"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["counted"] = counted


def _file(name: str) -> Markup:
    """Return the contents of a file beside the templates."""
    return Markup(TEMPLATES.loader.get_source(TEMPLATES, name)[0])  # type: ignore[union-attr]


STYLE, SCRIPT = _file("style.css"), _file("live.js")
SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
LIVE_POLICY = f"{POLICY}; script-src 'sha256-{SCRIPT_HASH}'; connect-src 'self'"


def page(contents: Contents, *, live: bool = False) -> str:
    """Return the page as HTML: one file, no script, nothing from elsewhere.

    Args:
        contents: what to show. All of it is escaped.
        live: the page refreshes itself every few seconds from its server (`serve`); only then does it contain a
            script, the one that its policy names by its hash.
    """
    verdict, calibration_charts = calibration(contents)
    effect_charts, lines = effects(contents)
    since = [row - before for before, row in itertools.pairwise([0, *contents.alarms])]
    alarms = [(f"{row:,}", f"{rows:,}") for row, rows in zip(contents.alarms, since, strict=True)]
    return TEMPLATES.get_template("page.html").render(
        run=contents,
        live=live,
        policy=LIVE_POLICY if live else POLICY,
        style=STYLE,
        script=SCRIPT,
        of_classes=_of_classes(contents),
        headline=headline(contents),
        learning=learning(contents),
        verdict=verdict,
        calibration=calibration_charts,
        listed_alarms=alarms[-MOST_ALARMS:],
        effects=effect_charts,
        lines=lines,
        ticks=any(effect.seen for effect in contents.effects),
        particles=posterior(contents.posterior),
        rejected=sum(contents.rejected.values()),
        reasons=_reasons(contents),
        confusion=_confusion(contents),
        columns=_columns(contents),
    )


def _of_classes(contents: Contents) -> str:
    if contents.task == "regression":
        return ""
    few = ", ".join(short(name, 40) for name in contents.classes[:6])
    if len(contents.classes) > 6:
        few += f" and {len(contents.classes) - 6:,} more"
    return f", one of {counted(len(contents.classes), 'class', 'classes')}" + (f": {few}" if few else "")


def headline(contents: Contents) -> list[tuple[str, str, str]]:
    """Return the figures that matter most: name, value and what to compare it with."""
    total, regression = contents.total, contents.task == "regression"
    rejected = sum(contents.rejected.values())
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
    figures = contents.figures
    mae, r2, auc = (_known(figures.get(name)) for name in ("mae", "r2", "auc"))
    more = []
    if regression and math.isfinite(mae):
        more = [("Mean absolute error", number(mae), f"R² is {number(r2, 3)}: the share of the variance predicted")]
    elif math.isfinite(auc):
        more = [("Area under ROC", number(auc, 3), "a half is guessing, 1 ranks every pair of rows correctly")]
    last = f"last at row {contents.alarms[-1]:,}" if contents.alarms else "predictions never became suddenly worse"
    if contents.probability is not None:
        last += f"; probability of a jump by now: {percent(contents.probability)}"
    return [
        ("Rows learnt", f"{contents.rows:,}", "each predicted before it was learnt"),
        error,
        *more,
        ("Loss, nats per row", number(total.loss), loss_note),
        honest,
        ("Rows rejected", f"{rejected:,}", f"{percent(share)} of all" if rejected else "every row fitted"),
        ("Drift alarms", f"{len(contents.alarms):,}", last if contents.rows else "nothing predicted yet"),
    ]


def _known(value: object) -> float:
    return float(value) if isinstance(value, float | int) else math.nan


def _confusion(contents: Contents) -> list[tuple[str, ...]]:
    """Return table rows: the class, its rows, how many were predicted correctly, and the most frequent confusion."""
    table = contents.figures.get("confusion")
    if not isinstance(table, Mapping):
        return []
    out = []
    for name, row in table.items():
        rows = sum(row.values())
        wrong = sorted(((count, other) for other, count in row.items() if other != name and count), reverse=True)[:3]
        taken = ", ".join(f"{short(other, 40)} ({percent(count / rows)})" for count, other in wrong)
        out.append((rows, (short(name, 60), f"{rows:,}", percent(row[name] / rows) if rows else "–", taken or "–")))
    return [told for _, told in sorted(out, key=lambda one: -one[0])]


def _columns(contents: Contents) -> list[tuple[str, ...]]:
    """Return table rows: each column with its gaps and how far it moved, largest moves first."""

    def order(one: ColumnTold) -> float:
        return -one.moved if one.moved == one.moved else 0.0

    return [
        (
            short(one.name, 60),
            one.kind,
            str(one.inputs),
            percent(one.gaps) if one.gaps else "none",
            "–" if one.moved != one.moved else "was constant" if math.isinf(one.moved) else f"{one.moved:.1f} sd",
        )
        for one in sorted(contents.columns, key=order)
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


def _reasons(contents: Contents) -> list[tuple[str, str, str]]:
    """Return the reasons for rejecting rows, most frequent first, with counts and shares."""
    ordered = sorted(contents.rejected.items(), key=lambda item: -item[1])
    if others := ordered[MOST_REASONS:]:
        ordered = [*ordered[:MOST_REASONS], (f"{len(others):,} other reasons", sum(count for _, count in others))]
    total = sum(contents.rejected.values())
    return [(reason, f"{count:,}", percent(count / total)) for reason, count in ordered]
