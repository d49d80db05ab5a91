"""Predictions made before learning, written to a file or published exactly once per row."""

import csv
import io
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from opvi.adapters._streams import is_stream
from opvi.adapters._tables import Json, RowSource, Schema
from opvi.app.learn._directory import RunError
from opvi.app.learn._scores import counted
from opvi.running import Fed
from opvi.running._checkpoint import sync_folder

if TYPE_CHECKING:
    from opvi.app.learn._learner import Learner

COLUMNS = {
    "regression": ("id", "y", "mean", "level", "log_density"),
    "classification": ("id", "y", "prediction", "probability", "log_density"),
}


class Sink(Protocol):
    """Where predictions go, in the order of the rows."""

    name: str
    position: int  # behind what was written; saved with every checkpoint

    def write(self, told: list[Json]) -> None:
        """Write predictions."""

    def end(self) -> None:
        """Note that all is written and saved."""

    def settle(self) -> None:
        """Wait until everything written is safe."""

    def back(self, position: int) -> None:
        """Return to an earlier position, because what was written after it was not learnt."""

    def close(self) -> None:
        """Close it."""


class Mark(NamedTuple):
    """Where a teller stood."""

    rows: list["Waiting"]
    position: int


class Waiting(NamedTuple):
    """A row that waits for its prediction."""

    id: str
    y: float | None  # a number as it was read; None for a class


def told(schema: Schema, fed: Fed, waited: list[Waiting]) -> list[Json]:
    """Return what was predicted for the rows of batches as plain values; None where nothing was known yet."""
    there, known = fed.weight > 0, counted(fed)
    said, y = fed.info.predicted, np.asarray(fed.data[1])[there]
    columns: dict[str, list[Any]] = {
        "id": [row.id for row in waited],
        "log_density": shortest(np.asarray(said.log_density)[there]),
    }
    if schema.task == "regression":
        learnt = shortest(y, schema.shift)  # in case that an older opvi left rows waiting
        columns |= {
            "y": [value if row.y is None else row.y for row, value in zip(waited, learnt, strict=True)],
            "mean": shortest(np.asarray(said.mean)[there], schema.shift),
            "level": shortest(np.asarray(said.level)[there]),
        }
    else:
        p = np.asarray(said.probabilities)[there][:, : len(schema.classes)]
        named = p.argmax(1).tolist()
        columns |= {
            "y": [schema.classes[code] for code in y.tolist()],
            "prediction": [schema.classes[code] for code in named],
            "probability": shortest(p[np.arange(len(p)), named]),
        }
    names = COLUMNS[schema.task]
    out = []
    for sure, *values in zip(known[there].tolist(), *(columns[name] for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        for name in names[2:]:
            if not sure or (isinstance(row[name], float) and not math.isfinite(row[name])):
                row[name] = None
        out.append(row)
    return out


def shortest(values: np.ndarray, shift: float = 0.0) -> list[float]:
    """Return numbers, shifted back, with the digits that tell them apart from others of their type."""
    return [float(f"{float(str(value)) + shift:.15g}") for value in values]


class Teller:
    """Keeps ids and targets of rows until they are predicted, and writes each prediction once.

    Args:
        sink: where predictions go.
        saved: what the checkpoint says about it.
        waiting: rows that wait for a full batch.
    """

    def __init__(self, sink: Sink, saved: Json, waiting: int):
        self.sink = sink
        self.source: RowSource | None = None
        ids = saved.get("ids", [""] * waiting)
        self._rows = [Waiting(*row) for row in zip(ids, saved.get("y", [None] * len(ids)), strict=True)]
        self._fed: list[tuple[Fed, list[Waiting]]] = []

    def expect(self, rows: np.ndarray, read: np.ndarray | None) -> None:
        """Record the source numbers of the rows to be learnt next, and numbers to predict as they were read."""
        names = getattr(self.source, "ids", None)
        ids = names(rows.tolist()) if names else [str(row) for row in rows.tolist()]
        values = [None] * len(ids) if read is None else read.tolist()
        self._rows = self._rows + [Waiting(*row) for row in zip(ids, values, strict=True)]

    def add(self, fed: Fed) -> None:
        """Record what was predicted for the next rows."""
        count = int((fed.weight > 0).sum())
        self._fed.append((fed, self._rows[:count]))
        self._rows = self._rows[count:]

    def flush(self, schema: Schema) -> None:
        """Write what was recorded; `schema` has the classes of the rows."""
        rows = [row for fed, waited in self._fed for row in told(schema, fed, waited)]
        self._fed = []
        if rows:
            self.sink.write(rows)

    def mark(self) -> Mark:
        """Return where it stands; nothing may be recorded and not written."""
        return Mark(self._rows, self.sink.position)

    def back(self, mark: Mark) -> None:
        """Return to a mark: what came after it was not learnt."""
        self._rows, self._fed = mark.rows, []
        if self.sink.position != mark.position:
            self.sink.back(mark.position)

    def tree(self) -> Json:
        """Return what a checkpoint keeps."""
        sink = self.sink
        return {
            "name": sink.name,
            "position": sink.position,
            "run": getattr(sink, "run", ""),
            "ids": [row.id for row in self._rows],
            "y": [row.y for row in self._rows],
        }


class File:
    """Predictions in a file, as CSV or JSON lines; lines written after the checkpoint are removed and written again.

    Args:
        path: the file.
        schema: what is predicted.
        position: its length at the checkpoint; None if no checkpoint knows it.
    """

    def __init__(self, path: str, schema: Schema, position: int | None):
        ending = Path(path).suffix.lower()
        if ending not in (".csv", ".jsonl", ".ndjson"):
            raise RunError(f"`--predictions {path}`: write to a .csv or .jsonl file, or to nats://HOST/SUBJECT.")
        self.name, self._csv, self._names = str(Path(path).absolute()), ending == ".csv", COLUMNS[schema.task]
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(f"`--predictions {path}` cannot be written: {error.strerror}.") from None
        size = os.fstat(self._file).st_size
        if size < (position or 0) or (size and position is None):
            os.close(self._file)
            why = "is there already, and not of this run" if position is None else "is shorter than the run left it"
            raise RunError(f"`--predictions {path}` {why}. Restore the old one, or choose another name.")
        self.position = position or 0
        try:
            os.ftruncate(self._file, self.position)
            sync_folder(Path(self.name).parent)  # the checkpoints that count its rows must not outlive its name
        except BaseException:
            os.close(self._file)
            raise

    def write(self, told: list[Json]) -> None:
        """Append lines. Nothing is there before a checkpoint knows the file: who finds something then may keep it."""
        if not self._csv:
            return self._append("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in told))
        text = io.StringIO()
        text.write("" if self.position else ",".join(self._names) + "\n")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([["" if row[name] is None else row[name] for name in self._names] for row in told])
        self._append(text.getvalue())

    def _append(self, text: str) -> None:
        data = text.encode(errors="replace")
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self.position + done)
        except OSError as error:
            self.back(self.position)
            raise RunError(f"{self.name} cannot be written: {error.strerror}. Make room, then resume.") from None
        self.position += done

    def back(self, position: int) -> None:
        """Cut off what was written after a position, if possible; otherwise that is done at the next start."""
        with suppress(OSError):
            os.ftruncate(self._file, position)
        self.position = position

    def end(self) -> None:
        """Name the columns of a file without rows."""
        if self._csv and not self.position:
            self.write([])

    def settle(self) -> None:
        """Flush it to disk."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def open_sink(where: str, schema: Schema, saved: Json) -> Sink:
    """Open a file or a subject of NATS for predictions.

    Args:
        where: the file, or `nats://HOST/SUBJECT`.
        schema: what is predicted.
        saved: its name and position in the checkpoint.
    """
    if is_stream(where):
        from opvi.adapters._streams import open_publisher

        made = open_publisher(where, saved.get("run") or os.urandom(8).hex())
        made.position = saved.get("position", 0) if saved.get("name") == made.name else 0
        return made
    same = saved.get("name") == str(Path(where).absolute())
    return File(where, schema, saved["position"] if same else None)


@contextmanager
def telling(learner: "Learner", where: str) -> Iterator[None]:
    """Within this block a learner writes its predictions to a file or a subject."""
    sink = open_sink(where, learner.schema, learner.told)
    learner.teller = Teller(sink, learner.told, len(learner.waiting[1]))
    try:
        yield
        sink.end()
    finally:
        sink.close()
        learner.teller = None
