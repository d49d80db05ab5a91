"""The model behind a run: the recommended regressor or classifier, by settings that a run's folder keeps."""

import json
import math
from functools import lru_cache
from typing import Any, NamedTuple

import jax

from opvi.app.tables import Block, Schema, TableError
from opvi.tracking import watched
from opvi.tracking._regressor import EARLY_ROWS
from opvi.tracking._shared import shared_classifier, shared_regressor

MOST_BYTES = 1 << 30  # of a model's state
HIDDEN = {"regression": (50,), "classification": (100,)}


class Settings(NamedTuple):
    """What a user may choose about the model; the rest follows from the data."""

    hidden: tuple[int, ...] | None = None  # None: what the task recommends
    particles: int = 20
    half_life: float | None = None
    memory_rows: int = 0
    warm_up: int = EARLY_ROWS
    seed: int = 0


def model(schema: Schema, settings: Settings) -> Any:
    """The tracker for a schema, with an alarm for changes in the data."""
    return _model(schema.task, len(schema.features), len(schema.classes), settings)


@lru_cache(8)  # runs of one kind share their compiled programs
def _model(task: str, columns: int, classes: int, settings: Settings) -> Any:
    shared = {
        "hidden": widths(task, settings),
        "particles": settings.particles,
        "half_life": settings.half_life,
        "memory_rows": settings.memory_rows,
    }
    if task == "regression":
        return _checked(watched(shared_regressor(columns, warm_up=settings.warm_up, **shared)))
    return _checked(watched(shared_classifier(columns, max(2, classes), **shared)))


def _checked(tracker: Any) -> Any:
    """Refuse a model that would not fit, before it takes the memory."""
    state = jax.eval_shape(tracker.init, jax.random.key(0))
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    if size > MOST_BYTES:
        raise ValueError(
            f"the model would have {size / 2**30:.1f} GiB, and several times that while it learns, but at most "
            f"{MOST_BYTES / 2**30:g} is allowed. Leave out columns, take fewer particles, or fewer classes; a linear "
            "classifier grows with the square of columns times classes, one with hidden layers far less."
        )
    return tracker


def widths(task: str, settings: Settings) -> tuple[int, ...]:
    """The hidden layers in use."""
    return HIDDEN[task] if settings.hidden is None else tuple(settings.hidden)


def as_json(settings: Settings) -> dict[str, Any]:
    """Plain values."""
    return settings._asdict()


def described(schema: Schema, settings: Settings) -> str:
    """Columns and model as a text, which every checkpoint carries: it belongs to these and to no others."""
    return json.dumps([schema.to_json(), as_json(settings)], sort_keys=True)


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
