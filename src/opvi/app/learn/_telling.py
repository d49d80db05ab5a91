"""A run as the report tells it."""

import platform
from importlib.metadata import version
from typing import Any

from opvi.app.learn import _scores as scoring
from opvi.app.learn._models import widths
from opvi.app.learn._predicting import Learnt
from opvi.app.report import Contents, Effect, Projection, effects, projection


def versions() -> dict[str, str]:
    """Of everything that has a say in the numbers."""
    names = ("opvi", "jax", "jaxlib", "numpy", "optax", "pyarrow")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def settled(known: Learnt) -> dict[str, str]:
    """The settings in words."""
    settings, schema = known.settings, known.schema
    hidden = widths(schema.task, settings)
    told = {
        "target": schema.target,
        "task": schema.task,
        "inputs": f"{len(schema.features)} encoded from {len(set(schema.origin))} columns",
        "hidden layers": " × ".join(map(str, hidden)) if hidden else "none: a linear model",
        "particles": str(settings.particles),
        "half-life": f"{settings.half_life:g} rows" if settings.half_life else "found out from the data",
        "seed": str(settings.seed),
        "model": known.tracker.about,
    }
    if settings.memory_rows:
        told["rows kept to learn from again"] = f"{settings.memory_rows:,}"
    return told


def contents(known: Learnt, title: str, command: str) -> Contents:
    """All that the page shows; effects and projections are computed here."""
    schema, tree = known.schema, known.tree
    told = scoring.summary(tree["scores"], schema.task)
    state: Any = tree["state"]
    rows = int(state.rows)
    drawn = rows > 0
    names = list(schema.classes)
    sample = tree["sample"].rows
    return Contents(
        title=title,
        task="regression" if schema.task == "regression" else "classification",
        target=schema.target,
        classes=names,
        rows=rows,
        rejected=dict(tree["kinds"]),
        filled=tree["filled"],
        finished=tree["finished"],
        total=told.total,
        baseline=told.baseline,
        curve=told.curve,
        calibration=told.calibration,
        alarms=told.alarms,
        effects=_effects(known, sample) if drawn else [],
        posterior=_posterior(known, sample) if drawn else None,
        settings=settled(known),
        versions={**known.about.get("versions", {})},
        command=command,
        notes=[*schema.notes, *known.damaged, *_refused(told)],
    )


def _effects(known: Learnt, sample: Any) -> list[Effect]:
    schema, hidden = known.schema, widths(known.schema.task, known.settings)
    state = known.tree["state"]
    return effects(known.tracker, state, sample, schema.features, schema.origin, list(schema.classes), hidden=hidden)


def _posterior(known: Learnt, sample: Any) -> Projection:
    schema, state = known.schema, known.tree["state"]
    hidden = widths(schema.task, known.settings)
    return projection(known.tracker, state, sample, hidden, schema.features, list(schema.classes))


def _refused(told: scoring.Summary) -> list[str]:
    if not told.refused:
        return []
    return [f"{told.refused:,} batches taught nothing, because their update was not finite. Look at extreme values."]
