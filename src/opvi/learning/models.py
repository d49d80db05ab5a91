"""The model behind a run: the recommended regressor or classifier, by settings that a run's folder keeps."""

from typing import Any, NamedTuple

from opvi.tables import Block, Schema, TableError
from opvi.tracking import watched
from opvi.tracking.regressor import EARLY_ROWS
from opvi.tracking.shared import shared_classifier, shared_regressor
from opvi.types import Tracker

HIDDEN = {"regression": (50,), "classification": (100,)}


class Settings(NamedTuple):
    """What a user may choose about the model; the rest follows from the data."""

    hidden: tuple[int, ...] | None = None  # None: what the task recommends
    particles: int = 20
    half_life: float | None = None
    memory_rows: int = 0
    warm_up: int = EARLY_ROWS
    seed: int = 0


def model(schema: Schema, settings: Settings) -> Tracker:
    """The tracker for a schema, with an alarm for changes in the data."""
    shared = {
        "hidden": widths(schema.task, settings),
        "particles": settings.particles,
        "half_life": settings.half_life,
        "memory_rows": settings.memory_rows,
    }
    columns = len(schema.features)
    if schema.task == "regression":
        return watched(shared_regressor(columns, warm_up=settings.warm_up, **shared))
    return watched(shared_classifier(columns, max(2, len(schema.classes)), **shared))


def widths(task: str, settings: Settings) -> tuple[int, ...]:
    """The hidden layers in use."""
    return HIDDEN[task] if settings.hidden is None else tuple(settings.hidden)


def as_json(settings: Settings) -> dict[str, Any]:
    """Plain values."""
    return settings._asdict()


def from_json(values: dict[str, Any]) -> Settings:
    """The settings again."""
    hidden = values.get("hidden")
    return Settings(**{**values, "hidden": None if hidden is None else tuple(hidden)})


def check_columns(schema: Schema, block: Block, name: str) -> None:
    """Refuse a source that lacks a column; in JSON lines a key that is not there is a missing value."""
    absent = schema.absent([*block.columns, *block.nested])
    if absent and not block.open:
        more = f" nor {len(absent) - 1} others" if len(absent) > 1 else ""
        raise TableError(
            f"{name} has no column {absent[0]!r}{more}, from which the run learns. Add it; it may be empty."
        )
