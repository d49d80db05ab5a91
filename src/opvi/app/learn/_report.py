"""A run as the report shows it."""

import platform
from datetime import datetime, timedelta
from importlib.metadata import version

import numpy as np

from opvi.app.learn import _scores as scoring
from opvi.app.learn import _words as texts
from opvi.app.learn._model import widths
from opvi.app.learn._predict import Learnt
from opvi.app.report import Contents, Effect, effects, projection
from opvi.tracking import kept_rows


def versions() -> dict[str, str]:
    """Return the versions of everything that affects the numbers."""
    names = ("opvi", "jax", "jaxlib", "numpy", "optax", "pyarrow")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def _settings(known: Learnt) -> dict[str, str]:
    """The settings in words."""
    settings, schema = known.settings, known.schema
    hidden = widths(schema, settings)
    sources = [place["name"] for place in known.tree["places"]]
    told = {
        "source": ", then ".join(dict.fromkeys(sources)),
        "target": schema.target,
        "task": schema.task,
        "inputs": f"{len(schema.features)} encoded from {len(set(schema.origin))} columns",
        "hidden layers": " × ".join(map(str, hidden)) if hidden else "none: a linear model",
        "particles": str(settings.particles or "chosen from the number of inputs"),
        "half-life": f"{settings.half_life:g} rows" if settings.half_life else "determined from the data",
        "seed": str(settings.seed),
        "model": known.sampler.about,
    }
    if schema.counts:
        told["scale"] = (
            "counts are learnt on the scale arsinh √((y + 3/8) / 10); effects are on it, figures on the target's own"
        )
    if schema.positive:
        told["scale"] = "the logarithm of the target is learnt; effects are on that scale, figures on the target's own"
    began, saved = (_moment(known.about.get(name)) for name in ("began", "saved"))
    if began is not None:
        told["began"] = f"{began:%Y-%m-%d %H:%M} UTC"
    if began is not None and saved is not None and saved >= began:
        told["last saved"] = (
            f"{saved:%Y-%m-%d %H:%M} UTC, {timedelta(seconds=round((saved - began).total_seconds()))} later"
        )
    if settings.memory_rows:
        told["how many rows to keep and learn from again"] = f"{settings.memory_rows:,}"
    return told


def _moment(text: object) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def contents(known: Learnt, title: str, command: str) -> Contents:
    """Return everything the page shows; effects and projections are computed here."""
    schema, tree = known.schema, known.tree
    summary = scoring.summary(tree["scores"], schema.task)
    state, classes = tree["state"], list(schema.classes)
    refused = (
        f"{summary.refused:,} batches taught nothing, because their update was not finite. Look at extreme values."
    )
    unsound = (
        f"{summary.unsound:,} rows were predicted as something that is not a finite number. They are in no figure here."
    )
    made = Contents(
        title=title,
        task="regression" if schema.task == "regression" else "classification",
        target=schema.target,
        classes=classes,
        rows=int(state.rows),
        rejected=dict(tree["kinds"]),
        filled=tree["filled"],
        finished=tree["finished"],
        total=summary.total,
        baseline=summary.baseline,
        curve=summary.curve,
        calibration=summary.calibration,
        figures=tree["figures"].told(schema.task, classes) if "figures" in tree else {},
        columns=tree["columns"].told(schema) if "columns" in tree else [],
        alarms=summary.alarms,
        probability=summary.probability,
        settings=_settings(known),
        versions={**known.about.get("versions", {})},
        command=command,
        notes=[
            *schema.notes,
            *known.damaged,
            *([refused] if summary.refused else []),
            *([unsound] if summary.unsound else []),
        ],
    )
    sample = np.asarray(kept_rows(state)[0])
    if not len(sample):
        return made
    words = tree.get("words", {})  # an older opvi had none
    found = effects(known.sampler, state, sample, schema.features, schema.origin, classes, texts.named(words))
    shifts = {column.name: column.shift for column in schema.columns}
    return made._replace(
        effects=[_located(effect, shifts.get(effect.feature, 0.0), schema.shift) for effect in found],
        posterior=projection(known.sampler, state, sample, texts.shown(schema, words), classes),
    )


def _located(effect: Effect, along: float, up: float) -> Effect:
    """Return an effect shifted back to the column's and the target's own units."""
    if along:
        values = [float(v) + along for v in effect.values]
        names = [f"{v:.12g}" for v in values]  # of two values
        seen = [v + along for v in effect.seen]
        effect = effect._replace(values=names if effect.kind == "text" else values, seen=seen)
    if up:
        mean, low, high = ([[y + up for y in line] for line in part] for part in (effect.mean, effect.low, effect.high))
        missing = [(m + up, a + up, b + up) for m, a, b in effect.missing]
        effect = effect._replace(mean=mean, low=low, high=high, missing=missing)
    return effect
