"""The model of a run: the recommended regressor or classifier, with settings stored in the run's folder."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import jax

from opvi.adapters._tables import Block, Json, Schema, TableError
from opvi.app.learn._directory import RunDirectory, RunError
from opvi.app.learn._scales import Counts, Positive
from opvi.running._rows import size_of
from opvi.tracking import classifier, regressor, remembering, watched
from opvi.tracking._classifier import chosen_sizes
from opvi.tracking.experts._usual import EARLY_ROWS, widths_for
from opvi.types import Sampler, as_key

MOST_BYTES = 1 << 30  # of a model's state
WHILE_LEARNING = 4  # times its state a model needs, for temporaries and checkpoints
SAMPLE = 256  # rows kept for the report, a uniform sample of all that were learnt


class Settings(NamedTuple):
    """What a user may choose about the model; the rest follows from the data."""

    hidden: tuple[int, ...] | None = None  # None: what the task recommends
    particles: int | None = None  # None: what the task recommends for so many columns
    half_life: float | None = None
    memory_rows: int = 0
    warm_up: int = EARLY_ROWS
    seed: int = 0
    neighbour_rows: int | None = None  # None: what the task recommends


def model(schema: Schema, settings: Settings, room: int | None = None) -> Sampler:
    """Return the sampler for a schema; it raises an alarm when the data change and keeps a sample of the rows.

    Args:
        schema: what the columns mean.
        settings: the model's settings.
        room: how many classes the model has room for; those of the schema if omitted.
    """
    columns, particles, half_life = len(schema.features), settings.particles, settings.half_life
    made: Sampler
    if schema.task == "regression":
        made = regressor(
            columns,
            hidden=settings.hidden,
            particles=particles,
            half_life=half_life,
            warm_up=settings.warm_up,
            memory_rows=settings.neighbour_rows,
        )
    else:
        room = room or max(2, len(schema.classes))
        made = classifier(
            columns,
            room,
            hidden=settings.hidden,
            particles=particles,
            half_life=half_life,
            memory_rows=settings.neighbour_rows,
        )
    if settings.memory_rows:
        made = remembering(made, settings.memory_rows)
    made = watched(remembering(made, SAMPLE, again=0))
    made = Counts(made) if schema.counts else Positive(made) if schema.positive else made
    size = size_of(jax.eval_shape(made.init, as_key(0)))
    if size > MOST_BYTES:  # before it takes the memory
        raise ValueError(
            f"the model would have {size / 2**30:.1f} GiB, and several times that while it learns, but at most "
            f"{MOST_BYTES / 2**30:g} is allowed. {_remedy(schema)}"
        )
    free = free_memory()
    if free is not None and size * WHILE_LEARNING > free:
        raise ValueError(
            f"the model has {size / 2**20:,.0f} MiB and needs about {WHILE_LEARNING} times that while it learns, but "
            f"only {free / 2**20:,.0f} MiB of memory are free. Leave out columns, or take fewer particles or narrower "
            "layers: `--leave-out`, `--particles`, `--hidden`."
        )
    return made


def _remedy(schema: Schema) -> str:
    """Say how a model that is too large becomes smaller."""
    if schema.task == "regression":
        return (
            f"It has {len(schema.features):,} columns as encoded, and grows with their square. Leave out columns, or "
            "take fewer particles or narrower layers: `--leave-out`, `--particles`, `--hidden`."
        )
    return (
        "Leave out columns, take fewer particles, or fewer classes; a linear classifier grows with the square of "
        "columns times classes, one with hidden layers far less."
    )


def free_memory() -> int | None:
    """Return the free memory of the machine or container in bytes; None if unknown."""
    found = []
    for path, pattern in (("/proc/meminfo", r"MemAvailable:\s+(\d+) kB"), ("/sys/fs/cgroup/memory.max", r"(\d+)")):
        try:
            text = re.search(pattern, Path(path).read_text())
        except OSError:
            continue
        if text is not None:
            found.append(int(text[1]) * (1024 if "meminfo" in path else 1))
    return min(found, default=None)


def widths(schema: Schema, settings: Settings) -> tuple[int, ...]:
    """Return the widths of the hidden layers in use."""
    if settings.hidden is not None:
        return tuple(settings.hidden)
    if schema.task == "classification":
        return (chosen_sizes(len(schema.features))[0],)
    return widths_for(len(schema.features))


def describes(text: object, schema: Schema, settings: Settings) -> bool:
    """Return whether a checkpoint's description matches this schema and these settings."""
    try:
        columns, chosen = json.loads(str(text))
        before = Settings(**chosen)
        before = before._replace(hidden=None if before.hidden is None else tuple(before.hidden))
        return Schema.from_json(columns) == schema and before == settings
    except (ValueError, TypeError):
        return False


def described(schema: Schema, settings: Settings) -> str:
    """Return columns and model as a string, stored in every checkpoint to tie it to them."""
    return json.dumps([schema.to_json(), settings._asdict()], sort_keys=True)


def about_model(run: RunDirectory, about: Json) -> tuple[Schema, Settings]:
    """Return the schema and the settings stored in a run's folder."""
    try:
        settings = Settings(**about["settings"])
        hidden = None if settings.hidden is None else tuple(settings.hidden)
        return Schema.from_json(about["schema"]), settings._replace(hidden=hidden)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{run.path / 'run.json'} is damaged: it does not describe a model ({error}).") from None


def later(schema: Schema, tree: Json) -> tuple[Schema, int]:
    """Return the schema with the classes stored in a checkpoint, and how many the model has room for."""
    classes, room = tree.get("classes", schema.classes), tree.get("room", max(2, len(schema.classes)))
    if list(classes[: len(schema.classes)]) != list(schema.classes) or not isinstance(room, int) or room > 1 << 16:
        raise TypeError("the classes that the run began with")
    return schema._replace(classes=[str(name) for name in classes]), room


def check_columns(schema: Schema, block: Block, name: str) -> None:
    """Refuse a source that lacks a column; in JSON lines an absent key is a missing value."""
    absent = schema.absent([*block.columns, *block.nested])
    if absent and not block.open:
        more = f" nor {len(absent) - 1} others" if len(absent) > 1 else ""
        raise TableError(
            f"{name} has no column {absent[0]!r}{more}, from which the run learns. Add it; it may be empty."
        )
