"""Predictions of a run for the rows of a table."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from opvi.app.learn import _scores as scoring
from opvi.app.learn._directory import RunDirectory, RunError
from opvi.app.learn._models import Settings, check_columns, described, from_json, model
from opvi.app.learn._sample import start as no_sample
from opvi.app.tables import Rejected, Schema, Source, TableError
from opvi.running._checkpoint import CheckpointError, shaped
from opvi.types import Array, Tracker

ROWS = 1024  # predicted at once


class Learnt(NamedTuple):
    """A run as its last good checkpoint left it."""

    about: dict[str, Any]
    schema: Schema
    settings: Settings
    tracker: Tracker
    tree: dict[str, Any]
    damaged: list[str]  # newer checkpoints that were passed over


def learnt(run: RunDirectory) -> Learnt:
    """Read a run; nothing in its folder is changed."""
    about = run.about()
    try:
        schema, settings = Schema.from_json(about["schema"]), from_json(about["settings"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{run.path / 'run.json'} is damaged: it does not describe a model ({error}).") from None
    try:
        tracker = model(schema, settings)
    except (TypeError, ValueError) as error:
        raise RunError(f"{run.path / 'run.json'} describes a model that cannot be made: {error}") from None
    kept = run.checkpoints
    tree = kept.newest()
    if tree is None and kept.damaged:
        raise RunError(
            f"{run.path} has no checkpoint that is whole; the newest: {kept.damaged[0]} Learn again from the first "
            "row: `opvi learn … --resume`."
        )
    if tree is None:
        raise RunError(f"{run.path} has no checkpoint yet. Let it learn first: `opvi learn … --resume`.")
    if not isinstance(tree, dict) or not {"state", "scores", "sample", "places", "kinds"} <= set(tree):
        raise RunError(f"the checkpoints of {run.path} hold something else than a run.")
    try:
        scores, sample = scoring.start(schema.task, len(schema.classes)), no_sample(len(schema.features))
        tree = shaped(tree, {"state": tracker, "scores": scores, "sample": sample})
        fits = tree.get("about") == described(schema, settings)
    except CheckpointError:
        fits = False
    if not fits:
        raise RunError(
            f"{run.path / 'run.json'} describes other columns or another model than the checkpoints were saved with. "
            "Bring the old one back."
        )
    return Learnt(about, schema, settings, tracker, tree, kept.damaged)


def predict(
    known: Learnt, source: Source, quantiles: Sequence[float] = (0.05, 0.5, 0.95)
) -> Iterator[tuple[dict[str, Any], list[Rejected]]]:
    """Columns of predictions, block by block, one row for every row of the source.

    Rows that break the schema have gaps for predictions and are handed on beside them.

    Args:
        known: a run.
        source: rows without a target, or with one that is not looked at.
        quantiles: of a regression's predictive.
    """
    if known.schema.task == "regression" and not all(0 < q < 1 for q in quantiles):
        raise TableError(f"the quantiles are {list(quantiles)}, but each must lie strictly between 0 and 1.")
    told = _program(known, tuple(float(q) for q in quantiles))
    some = False
    for block in source.blocks():
        some = True
        check_columns(known.schema, block, source.name)
        encoded = known.schema.encode(block, with_target=False)
        at = encoded.row - block.first
        columns: dict[str, Any] = {"row": np.arange(block.first, block.first + block.rows)}
        for name, values in told(encoded.x).items():
            if isinstance(values, list):
                texts: list[str | None] = [None] * block.rows
                for place, text in zip(at.tolist(), values, strict=True):
                    texts[place] = text
                columns[name] = texts
            else:
                wide = np.full(block.rows, np.nan, np.float32)
                wide[at] = values
                columns[name] = wide
        yield columns, encoded.rejected
    if not some:  # the names of the columns all the same
        yield {"row": np.arange(0), **told(np.zeros((0, len(known.schema.features)), np.float32))}, []


def _program(known: Learnt, quantiles: tuple[float, ...]) -> Callable[[np.ndarray], dict[str, Any]]:
    """Rows of any number to named predictions."""
    tracker, state, classes = known.tracker, known.tree["state"], list(known.schema.classes)
    regression = known.schema.task == "regression"

    @jax.jit
    def numbers(x: Array) -> tuple[Array, ...]:
        predictive = tracker.predict(state, x)
        if regression:
            return (predictive.mean(), predictive.sd(), *(predictive.quantile(quantiles) if quantiles else ()))
        return tuple(predictive.probabilities()[:, : len(classes)].T)

    def told(x: np.ndarray) -> dict[str, Any]:
        parts = []
        for start in range(0, max(len(x), 1), ROWS):
            rows = np.zeros((ROWS, x.shape[1]), np.float32)
            here = x[start : start + ROWS]
            rows[: len(here)] = here
            parts.append([np.asarray(a)[: len(here)] for a in numbers(rows)])
        columns = [np.concatenate(part) for part in zip(*parts, strict=True)]
        if regression:
            return dict(zip(["mean", "sd", *(f"q{q:g}" for q in quantiles)], columns, strict=True))
        best = np.argmax(columns, axis=0)
        probabilities = {f"p={label}": column for label, column in zip(classes, columns, strict=True)}
        return {"prediction": [classes[k] for k in best], **probabilities}

    return told
