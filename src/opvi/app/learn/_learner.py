"""The loop behind `opvi learn`: read, predict, learn, save; after a kill it resumes, to the same bits."""

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import numpy as np

from opvi.adapters._carried import carried, room_for
from opvi.adapters._tables import Block, Encoded, Json, Rejected, RowSource, Schema, cut
from opvi.app.learn import _scores as scoring
from opvi.app.learn._classes import met
from opvi.app.learn._columns import ColumnSums
from opvi.app.learn._directory import METRICS, RunDirectory, RunError
from opvi.app.learn._figures import Figures
from opvi.app.learn._model import BATCH, Settings, check_columns, described, describes, later, model
from opvi.app.learn._places import Place
from opvi.app.learn._stopping import Stop, Stopped, blocks_of
from opvi.app.learn._telling import Teller
from opvi.app.learn._words import Words, copied, counted
from opvi.running import CheckpointError, Checkpoints, Engine, Fed
from opvi.running._checkpoint import shaped
from opvi.running._saving import SAVE_EVERY, Pace
from opvi.types import Batch, Sampler

ROWS = 256 * BATCH  # of the source at most, between two looks at the clock
FEW_ROWS = 5 * BATCH  # at first; more as long as they are learnt quickly
QUICK, SLOW = 0.25, 1.0  # seconds
MOST_KINDS = 50  # of reasons counted apart
VALUE = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|-?\d[\d.,e+-]*")
OTHER = "other reasons"

Show = Callable[["Learner", float | None], None]  # called with the learner and the share of the source read


SERVED = "opvi serve"  # the name, among a run's sources, of rows that came over HTTP


class Learner:
    """A run in memory.

    Args:
        run: its folder.
        kept: the folder's checkpoints, locked.
        schema: what the columns mean.
        settings: the model's settings.
        strict: stop at the first row that breaks the schema.
        save_every: the least number of seconds between checkpoints.
    """

    def __init__(
        self,
        run: RunDirectory,
        kept: Checkpoints,
        schema: Schema,
        settings: Settings,
        *,
        strict: bool = False,
        save_every: float = SAVE_EVERY,
    ):
        self.run, self.kept, self.schema, self.settings = run, kept, schema, settings
        self.begun = schema  # with the classes of the first rows
        self.room = max(2, len(schema.classes))  # classes that the model has
        self.strict, self.pace = strict, Pace(save_every)
        self.engine = self._engine(model(schema, settings))
        self.scores = scoring.start(schema.task, len(schema.classes))
        self.figures = Figures.start(len(schema.classes))
        self.columns = ColumnSums.start(schema)
        self.words: Words = {}  # behind hashed columns
        self.places: list[Place] = []
        self.kinds: dict[str, int] = {}
        self.rejected = self.filled = self.saves = 0
        self.finished = False
        self.lost = ""  # why nothing more can be saved
        self._lines, self._size = -1, 0  # the file of rejected rows, open while learning, and its length
        self.teller: Teller | None = None  # writes predictions down, where that is asked for
        self.told: Json = {}  # what the checkpoint says of it

    def _engine(self, sampler: Sampler) -> Engine:
        return Engine(sampler, self.settings.seed, batch=BATCH)

    # --- checkpoints --------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the whole run, and the figures beside it."""
        if self.lost:
            raise RunError(self.lost)
        try:
            self._settle()
            with self.pace.saving():
                self.kept.save(self.saves + 1, {**self.tree(), "saves": self.saves + 1})
            self.saves += 1
            self.run.write(METRICS, self.metrics())
        except OSError as error:
            raise RunError(
                f"{self.run.path} could not be written to: {error.strerror or error}. "
                f"{'Its last checkpoint is as it was' if self.saves else 'It holds no checkpoint yet'}. Free "
                "some space or fix the permissions, then resume with --resume."
            ) from error

    def _mend_metrics(self) -> None:
        """Write the figures if they are not those of the checkpoint, after which the power may have failed."""
        try:
            told = json.loads((self.run.path / METRICS).read_bytes())
        except (OSError, ValueError):
            told = None
        if told != self.metrics():
            self.run.write(METRICS, self.metrics())

    def _settle(self) -> None:
        """Wait until rejected rows and predictions are on the disk; if that fails once, no later attempt is believed.

        A system may forget what it could not write, and report success the next time.
        """
        try:
            os.fsync(self._lines)
            if self.teller is not None:
                self.teller.sink.settle()
        except OSError as error:
            self.lost = (
                f"what {self.run.path} had written may not be on the disk ({error.strerror or error}). Its last "
                "checkpoint is as it was. Look at the disk, then resume with --resume."
            )
            raise

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Within this block rows, their place and their predictions are taken together: if it raises, none of them.

        Everything that changes is replaced, never changed in place, so what was there before is put back as it was.
        """
        before, state, waiting = dict(self.__dict__), self.engine.state, self.engine.waiting
        mark = None if self.teller is None else self.teller.mark()
        try:
            yield
        except BaseException:
            self.__dict__.update(before)
            self.engine.state, self.engine.waiting = state, waiting
            if self.teller is not None and mark is not None:
                self.teller.back(mark)
            raise

    def tree(self) -> Json:
        """Return the whole run, for a checkpoint."""
        x, y = self.waiting
        return {
            "state": self.engine.state,
            "rows": self.rows,
            "scores": self.scores,
            "figures": self.figures,
            "columns": self.columns,
            "words": copied(self.words),
            "waiting": {"x": x, "y": y},
            "places": [place._asdict() for place in self.places],
            "rejected": {"size": self._size, "count": self.rejected},
            "kinds": dict(self.kinds),
            "filled": self.filled,
            "finished": self.finished,
            "saves": self.saves,
            "classes": list(self.schema.classes),
            "room": self.room,
            "about": described(self.begun, self.settings),
            **({"told": self.teller.tree()} if self.teller else {}),
        }

    def restore(self, tree: Json) -> Self:
        """Resume from a checkpoint."""
        try:
            if not describes(tree["about"], self.begun, self.settings):
                raise RunError(
                    f"{self.run.path / 'run.json'} describes other columns or another model than the checkpoints were "
                    "saved with. Restore the old one."
                )
            self.schema, self.room = later(self.begun, tree)
            if self.room != max(2, len(self.begun.classes)):
                self.engine = self._engine(model(self.schema, self.settings, self.room))
            try:
                like = {"state": self.engine.state, "scores": self.scores}
                more = {"figures": self.figures, "columns": self.columns}  # an older opvi had none
                tree = shaped(tree, like | {name: value for name, value in more.items() if name in tree})
            except CheckpointError as error:
                raise RunError(
                    f"the checkpoints of {self.run.path} hold a model of another shape than its run.json describes: "
                    f"{error} One of the two comes from another run."
                ) from None
            self.engine.state, self.scores = tree["state"], tree["scores"]
            self.figures = tree.get("figures", Figures.start(self.room))
            self.columns, self.words = tree.get("columns", self.columns), tree.get("words", {})
            self.waiting = tree["waiting"]["x"], tree["waiting"]["y"]
            self.places = [Place(**place) for place in tree["places"]]
            self.kinds, self.filled = tree["kinds"], tree["filled"]
            self.rejected, self._size = tree["rejected"]["count"], tree["rejected"]["size"]
            self.finished, self.saves = tree["finished"], tree["saves"]
            self.told = tree.get("told", {})
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"a checkpoint of {self.run.path} lacks {error}: another version wrote it.") from None
        return self

    @property
    def waiting(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows and targets that wait for a full batch."""
        if self.engine.waiting is not None:
            return self.engine.waiting.data
        target = np.float32 if self.schema.task == "regression" else np.int32
        return np.zeros((0, len(self.schema.features)), np.float32), np.zeros(0, target)

    @waiting.setter
    def waiting(self, rows: tuple[np.ndarray, np.ndarray]) -> None:
        weight = np.ones(len(rows[1]), np.float32)
        self.engine.waiting = Batch(rows, weight) if len(weight) else None  # type: ignore[arg-type]

    # --- learning -----------------------------------------------------------------------------

    def learn(self, source: RowSource, first: list[Block], stop: Stop, show: Show = lambda *_: None) -> None:
        """Learn all rows of a source, then write a final checkpoint.

        Args:
            source: opened at the last recorded position.
            first: blocks that were already read.
            stop: called between batches; returns whether to stop.
            show: called after every few batches.
        """
        with self.writing():
            self._learn(source, first, stop, show)
        show(self, 1.0)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the file of rejected rows open while learning and saving."""
        self._lines, self._size = self.run.open_rejected(self._size)
        try:
            yield
        finally:
            os.close(self._lines)

    def _learn(self, source: RowSource, first: list[Block], stop: Stop, show: Show) -> None:
        done, self.finished = self.finished, False
        if self.teller is not None:
            self.teller.source = source
            if self.told.get("name") != self.teller.sink.name:  # so that after a kill its file is known
                self.save()
        rows, share = min(ROWS, FEW_ROWS), 0.0
        try:
            done = self._learn_held(stop) and done
            for block in itertools.chain(first, blocks_of(source, stop)):
                done = False
                check_columns(self.schema, block, source.name)
                if block.unended:  # if its line is longer later, this is where to return to
                    self.save()
                start, end = block.first, block.first + block.rows
                while start < end:
                    began = time.perf_counter()
                    self._step(source, cut(block, start, start + rows))
                    start = min(end, start + rows)
                    show(self, _between(share, block.share, 1 - (end - start) / block.rows))
                    took = time.perf_counter() - began
                    rows = min(ROWS, 2 * rows) if took < QUICK else max(BATCH, rows // 2) if took > SLOW else rows
                    if stop.asked and source.once and start < end:  # what a pipe gave cannot be read again: it is kept
                        self._step(source, cut(block, start, end), learn=False)
                    stop.check()
                    if self.pace.due():
                        self.save()
                share = block.share or 0.0
            with self.all_or_none():
                self.count(self.engine.feed((self.waiting[0][:0], self.waiting[1][:0]), last=True))
                if self.teller is not None:
                    self.teller.flush(self.schema)
            self.finished = True
            if not done:  # otherwise there was nothing new
                self.save()
            else:
                self._mend_metrics()
        except (Exception, Stopped):  # not a second Ctrl-C, which may come at any moment
            self.save()
            raise

    def _learn_held(self, stop: Stop) -> bool:
        """Learn rows that a pipe delivered before the run was stopped; return whether there were none."""
        if len(self.waiting[1]) < BATCH:
            return True
        while len(self.waiting[1]) >= BATCH:
            with self.all_or_none():
                x, y = self.waiting
                self.waiting = x[:0], y[:0]
                self._feed(x[:BATCH], y[:BATCH])
                self._hold(x[BATCH:], y[BATCH:])
                if self.teller is not None:
                    self.teller.flush(self.schema)
            stop.check()
        return False

    def _step(self, source: RowSource, part: Block, learn: bool = True) -> None:
        """Take the next rows of a source, and move on to the place after them."""
        with self.all_or_none():
            self.take(part, learn)
            self.places = [*self.places[:-1], self.places[-1].after(source, part)]

    def _hold(self, x: np.ndarray, y: np.ndarray) -> None:
        """Keep rows for later in the checkpoint."""
        self.waiting = np.concatenate([self.waiting[0], x]), np.concatenate([self.waiting[1], y])

    def take(self, block: Block, learn: bool = True) -> None:
        """Learn or hold the rows of a block and set bad ones aside; if this raises, nothing has changed."""
        self.absorb(*met(self.schema, block), learn=learn)

    def absorb(self, schema: Schema, encoded: Encoded, learn: bool = True, at: int | None = None) -> None:
        """Do the same with rows that are already encoded.

        Args:
            schema: what the columns mean, with the classes that these rows brought.
            encoded: the rows.
            learn: whether to learn them now; otherwise they wait.
            at: the number of the row after them in their source, where no source knows it.
        """
        with self.all_or_none():
            self._size += self._set_aside(encoded.rejected, self.places[-1].name)
            self.rejected += len(encoded.rejected)
            self.filled += int(encoded.gaps.sum())
            self.kinds = _counted_kinds(self.kinds, encoded.rejected)
            if encoded.y is not None:
                if self.teller is not None:
                    self.teller.expect(encoded.row, encoded.read)
                learn = learn or (schema.task == "classification" and bool((encoded.y >= self.room).any()))
                (self._feed if learn else self._hold)(encoded.x, encoded.y)
            self.schema, self.columns = schema, self.columns.met(encoded)
            if encoded.words:
                self.words = copied(self.words)
                counted(self.words, encoded.words)
            if at is not None:
                self.places = [*self.places[:-1], self.places[-1]._replace(row=at)]
            if self.teller is not None:  # last, because others may see what it writes
                self.teller.flush(schema)

    def _feed(self, x: np.ndarray, y: np.ndarray) -> None:
        """Learn rows; those that do not fill a batch wait. The model grows before a batch with too many classes."""
        while self.schema.task == "classification" and len(late := np.flatnonzero(y >= self.room)):
            held = len(self.waiting[1])
            ready = max(0, (held + int(late[0])) // BATCH * BATCH - held)
            self.count(self.engine.feed((x[:ready], y[:ready])))
            self._widen(room_for(int(y[late[0]]) + 1))
            x, y = x[ready:], y[ready:]
        self.count(self.engine.feed((x, y)))

    def _widen(self, room: int) -> None:
        """Give the model more classes, keeping what was learnt."""
        try:
            engine = self._engine(model(self.schema, self.settings, room))
        except ValueError as error:
            raise RunError(
                f"with {room} classes {error} Or name the classes that count: `--classes A,B,…`, in a new run."
            ) from None
        engine.state, engine.waiting = carried(self.engine.state, engine.state), self.engine.waiting
        seen = np.concatenate([self.scores.seen, np.zeros(room - len(self.scores.seen))])
        self.engine, self.room, self.scores = engine, room, self.scores._replace(seen=seen)
        self.figures = self.figures.widened(room)

    def count(self, fed: Fed | None) -> None:
        """Add what was predicted for batches to the figures."""
        if fed is not None:
            if self.schema.positive or self.schema.counts:  # figures are of the target, not of its logarithm
                fed = fed._replace(data=(fed.data[0], self.schema.targets(fed.data[1])))
            self.scores = scoring.add(self.scores, self.schema.task, fed)
            self.figures = self.figures.add(self.schema.task, fed)
            self.columns = self.columns.add(fed)
            if self.teller is not None:
                self.teller.add(fed)

    def _set_aside(self, bad: list[Rejected], name: str) -> int:
        """Append rejected rows after the last valid ones; return the number of bytes written."""
        if bad and self.strict:
            raise RunError(
                f"row {bad[0].row:,} of {name} was rejected: {bad[0].reason}. It was not learnt, and --strict stops "
                "here. Fix the row, or leave out --strict to set such rows aside; then resume with --resume."
            )
        data, done = self.run.as_lines(bad, name), 0
        try:
            while done < len(data):
                done += os.pwrite(self._lines, data[done:], self._size + done)
        except OSError as error:
            raise RunError(
                f"rejected rows could not be written to {self.run.path}: {error.strerror}. Make room, then resume with "
                "--resume."
            ) from error
        return done

    # --- what people read ---------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """The number of rows learnt so far."""
        return int(self.engine.state.rows)

    def summary(self) -> scoring.Summary:
        """Return the figures so far."""
        return scoring.summary(self.scores, self.schema.task)

    def metrics(self) -> Json:
        """Return the figures as plain values, for a file."""
        told = self.summary()
        name = "rmse" if self.schema.task == "regression" else "error_rate"

        def plain(value: float) -> float | None:
            return float(value) if np.isfinite(value) else None

        figures = {
            "rows": self.rows,
            "rejected": self.rejected,
            "filled": self.filled,
            "finished": self.finished,
            "log_loss": plain(told.total.loss),
            name: plain(told.total.error),
            f"recent_{name}": plain(told.recent.error),
            f"baseline_{name}": plain(told.baseline),
            "drift_alarms": told.alarm_count,
            "jump_probability": plain(told.probability),
            "refused_batches": told.refused,
            "predictions_not_finite": told.unsound,
            **self.figures.told(self.schema.task, self.schema.classes),
        }
        if self.schema.task == "regression":
            return {**figures, "covered_by_90_percent_interval": plain(told.total.covered)}
        return {**figures, "calibration_error": plain(told.calibration_error)}


def _between(before: float, after: float | None, part: float) -> float | None:
    """Return the share of the source read after part of a block."""
    return None if after is None else before + part * max(0.0, after - before)


def _counted_kinds(kinds: dict[str, int], rejected: list[Rejected]) -> dict[str, int]:
    """Return how often rows were rejected for each reason, after some more."""
    kinds = dict(kinds)
    for one in rejected:
        kind = _kind(one.reason)
        kind = kind if kind in kinds or len(kinds) < MOST_KINDS else OTHER  # one too many
        kinds[kind] = kinds.get(kind, 0) + 1
    return kinds


def _kind(reason: str) -> str:
    """Return the reason without the value, so that similar ones are counted together; the column's name stays."""
    column, mark, rest = reason.partition("': ")
    return column + mark + VALUE.sub("…", rest) if mark else VALUE.sub("…", reason)
