"""How a run begins and how it resumes: which source, from which row, with which schema."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from opvi.adapters._streams import MessageSource, is_stream, named, open_stream
from opvi.adapters._tables import (
    FIRST_ROWS,
    Block,
    Json,
    Reading,
    RowSource,
    Schema,
    Source,
    SourceChangedError,
    infer_schema,
    open_source,
)
from opvi.app.learn._directory import RunDirectory, RunError
from opvi.app.learn._learner import SERVED, Learner, Place
from opvi.app.learn._model import Settings, about_model
from opvi.app.learn._report import versions
from opvi.app.learn._stopping import Stop, blocks_of
from opvi.running import Checkpoints
from opvi.running._cursor import Cursor
from opvi.running._saving import SAVE_EVERY
from opvi.tracking._wrapped import Wrapper

PIPE = "-"
LARGER = "--hidden W,W,…, --particles N, --neighbour-rows N"  # options that enlarge the model
MOST_READ = 200_000  # rows, most of them malformed, among which the first sound ones are looked for


class Asked(NamedTuple):
    """What the user asked for."""

    source: str | None
    target: str | None = None
    task: str = "auto"
    classes: Sequence[str] | None = None
    leave_out: Sequence[str] = ()
    first_rows: int = FIRST_ROWS
    format: str | None = None
    reading: Reading = Reading()
    positive: bool = False
    counts: bool = False
    settings: Settings = Settings()
    resume: bool = False
    replayed: bool = False  # a pipe that starts again from its first row
    strict: bool = False
    given: Json = {}  # noqa: RUF012 (never written to): options that shape the run, those that were given
    save_every: float = SAVE_EVERY


class Ready(NamedTuple):
    """Everything that `Learner.learn` needs, and what to tell the user first."""

    learner: Learner
    source: Source | MessageSource
    first: list[Block]
    messages: list[str]


@contextmanager
def alone(run: RunDirectory, asked: Asked, stop: Stop) -> Iterator[Ready]:
    """Lock a run against other processes; its source is closed at the end of the block."""
    with run.checkpoints as kept:
        made = ready(run, kept, asked, stop)
        with made.source:
            yield made


def ready(run: RunDirectory, kept: Checkpoints, asked: Asked, stop: Stop) -> Ready:
    """Return a run that is ready to begin, or to resume from its last good checkpoint."""
    if run.exists and kept.begun and not asked.resume:
        raise RunError(f"{run.path} holds a run already. Resume it: `--resume`. Or choose another folder: `--run DIR`.")
    if run.exists and asked.resume:
        return _resumed(run, kept, asked, stop)
    if kept.begun:
        raise RunError(
            f"{run.path} holds checkpoints, but no run.json that says what they are about. Restore it, or choose "
            "another folder: `--run DIR`."
        )
    return _begun(run, kept, asked, stop)


def _begun(run: RunDirectory, kept: Checkpoints, asked: Asked, stop: Stop) -> Ready:
    if asked.source is None:
        raise RunError(f"there is no run in {run.path} to resume, and no SOURCE to begin one from. Name a file.")
    if asked.target is None:
        raise RunError("`--target COLUMN` is missing: name the column to predict.")
    source: Source | MessageSource
    source = open_stream(asked.source) if is_stream(asked.source) else open_source(asked.source, asked.format)
    try:
        first = _some(source, asked.first_rows, stop)
        schema = _inferred(first, asked, asked.target, source.semicolons)
        learner = _learner(run, kept, schema, asked.settings, asked)
        run.begin(
            {
                "source": source.name,
                "schema": schema.to_json(),
                "settings": asked.settings._asdict(),
                "asked": asked.given,
                "versions": versions(),
                "command": sys.argv,
            }
        )
    except BaseException:
        source.close()
        raise
    learner.places.append(Place(source.name, source.fingerprint, asked.format, 0))
    again = ["Nothing was learnt here before: beginning."] if asked.resume else []
    return Ready(learner, source, first, [*again, *source.notes, *schema.notes, _chosen(learner)])


def _chosen(learner: Learner) -> str:
    """Return a line about the model, without what the run wraps around it."""
    made = learner.engine.sampler
    while isinstance(made, Wrapper):
        made = made.sampler
    return f"{made}. For a larger one: {LARGER}."


def _inferred(first: list[Block], asked: Asked, target: str, semicolons: bool) -> Schema:
    """Return what the first rows say about the columns, given what was asked for."""
    return infer_schema(
        first,
        target,
        asked.task,
        asked.classes,
        asked.leave_out,
        asked.first_rows,
        asked.reading._replace(semicolons=semicolons),
        asked.positive,
        asked.counts,
    )


def check_targets(asked: Asked, ahead: Sequence[str], targets: Sequence[str]) -> None:
    """Refuse targets that cannot be learnt, judged by the first rows of a file; those of a broker are not awaited.

    Args:
        asked: what the user asked for.
        ahead: the targets to check.
        targets: all targets; none is an input of another.
    """
    if asked.source is None or is_stream(asked.source):
        return
    with open_source(asked.source, asked.format) as source:
        first = _some(source, asked.first_rows, Stop())
        for target in ahead:
            others = [name for name in targets if name != target]
            _inferred(first, asked._replace(leave_out=[*asked.leave_out, *others]), target, source.semicolons)


def _resumed(run: RunDirectory, kept: Checkpoints, asked: Asked, stop: Stop) -> Ready:
    about = run.about()
    schema, settings = about_model(run, about)
    if asked.target not in (None, schema.target):
        raise RunError(
            f"`--target` is {asked.target!r}, but the run in {run.path} learns to predict {schema.target!r}."
        )
    _refuse_changes(run, about, schema, settings, asked.given)
    learner = _learner(run, kept, schema, settings, asked)
    found = kept.newest()
    messages = [f"{message} Passed over." for message in kept.damaged]
    if found is not None:
        learner.restore(found)
        learner.places.sort(key=lambda place: place.name != SERVED)  # what was served is no source to resume
    elif kept.damaged:
        messages.append("No checkpoint is whole: beginning again from the first row.")
    try:
        source, told = _source(learner, asked, about, stop)
    except SourceChangedError:
        before = kept.newest(below=learner.saves) if learner.places[-1].unended else None
        if before is None:
            raise
        learner = _learner(run, kept, schema, settings, asked).restore(before)
        messages.append("The last line was incomplete when it was learnt: it is taken back and read again.")
        source, told = _source(learner, asked, about, stop)
    return Ready(learner, source, [], [*messages, told])


def _refuse_changes(run: RunDirectory, about: Json, schema: Schema, settings: Settings, given: Json) -> None:
    """Refuse options other than those that the run began with: they would be ignored."""
    began = {
        **settings._asdict(),
        "task": schema.task,
        "positive": schema.positive,
        "counts": schema.counts,
        **about.get("asked", {}),
    }
    for name, value in given.items():
        if (name in began or "asked" in about) and _plain(began.get(name)) != _plain(value):
            without = began.get(name) is None
            raise RunError(
                f"`--{name.replace('_', '-')}` is {value}, but the run in {run.path} began "
                f"{'without it' if without else f'with {began[name]}'}. Leave it out, or begin a new run: `--run DIR`."
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _source(learner: Learner, asked: Asked, about: Json, stop: Stop) -> tuple[Source | MessageSource, str]:
    """Open the source at the row where learning resumes."""
    last = learner.places[-1] if learner.places and learner.places[-1].name != SERVED else None
    path = asked.source or (last.name if last else about.get("source"))
    if path in (None, PIPE, "standard input"):
        path = PIPE
    if is_stream(path):
        return _stream(learner, path)
    format = asked.format or (last.format if last else None)
    if path == PIPE and asked.source is None:
        raise RunError(
            "the run learnt from standard input. Name what it should continue with: a file, or `-` for a pipe."
        )
    if last is None or (path == PIPE and not asked.replayed):
        source = open_source(path, format)
        learner.places.append(Place(source.name, source.fingerprint, format, 0))
        more = " Rows from the pipe are taken as new ones (`--replayed` passes over those learnt before)."
        return source, f"Resuming after {learner.rows:,} rows.{more if path == PIPE and last else ''}"
    if path == PIPE:
        learner.places.append(last._replace(name="standard input", fingerprint=None))
        source = open_source(path, format, skip=last.row, digest=last.digest)
        return source, f"Resuming after row {last.row:,} of the pipe."
    with open_source(path, format) as source:
        alike = [place for place in dict.fromkeys(reversed(learner.places)) if source.begins_like(place.fingerprint)]
    changed: SourceChangedError | None = None
    for known in alike:
        source = open_source(path, format, skip=known.row, digest=known.digest)
        try:
            with stop.waiting():
                source.check()
        except BaseException as error:
            source.close()
            if not isinstance(error, SourceChangedError):
                raise
            changed = changed or error
        else:
            if known is not last:
                learner.places.append(known)
            return source, f"Resuming {path} after row {known.row:,}."
    if Path(path).absolute() in {Path(place.name).absolute() for place in learner.places}:
        raise changed or SourceChangedError(
            f"{path} begins differently now from the file that this run learnt from. Restore the old file, or learn "
            "from the new one under another name."
        )
    source = open_source(path, format)
    learner.places.append(Place(source.name, source.fingerprint, asked.format, 0))
    return source, f"Resuming after {learner.rows:,} rows, with {path} from its first row."


def _stream(learner: Learner, url: str) -> tuple[MessageSource, str]:
    """Open a broker or a database after the last message that was learnt."""
    known = next((place for place in reversed(learner.places) if place.name == named(url)), None)
    if known is None:
        source = open_stream(url)
        learner.places.append(Place(source.name, source.fingerprint, None, 0))
        return source, f"Resuming after {learner.rows:,} rows, with {source.name} from its beginning."
    source = open_stream(url, Cursor(known.row, known.position, known.digest), known.fingerprint)
    if known is not learner.places[-1]:
        learner.places.append(known)
    return source, " ".join([f"Resuming {source.name} after row {known.row:,}.", *source.notes])


def _learner(run: RunDirectory, kept: Checkpoints, schema: Schema, settings: Settings, asked: Asked) -> Learner:
    try:
        return Learner(run, kept, schema, settings, strict=asked.strict, save_every=asked.save_every)
    except (ValueError, TypeError) as error:  # of the model: particles, hidden layers, half-life
        raise RunError(str(error)) from None


def _some(source: RowSource, rows: int, stop: Stop) -> list[Block]:
    """Read blocks with the first rows; fewer if most are malformed."""
    blocks, count, read = [], 0, 0
    for block in blocks_of(source, stop):
        blocks.append(block)
        count, read = count + len(block.numbers), read + block.rows
        if count >= rows or read >= MOST_READ + 2 * rows:
            break
    return blocks
