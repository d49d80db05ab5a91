"""The one thread that learns: durable rows become the next state, which is published as a whole."""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from opvi.adapters._tables import Encoded, Schema
from opvi.app.learn import Learner, RunError
from opvi.app.learn._directory import KEPT
from opvi.app.learn._model import BATCH, with_waiting
from opvi.app.learn._predict import Learnt
from opvi.app.serve._log import Log
from opvi.app.serve._worker import Worker
from opvi.running import Engine
from opvi.types import Sampler, Tree

AT_ONCE = 256  # groups that are learnt in one call, where so many wait
EVERY = 0.05  # seconds between two calls, at least: a call with few rows costs almost as much as one with many
FRESH = 0.5  # seconds after which rows that wait for a full batch are in the predictions, too, however many follow
TOGETHER = 1000  # rows learnt in one call, about
AGAIN = 10.0  # seconds after a save that failed
WINDOW = 10.0  # seconds over which the speed is measured


class Published(NamedTuple):
    """The state that predictions are made with; replaced, never changed."""

    schema: Schema
    sampler: Sampler
    state: Tree
    seed: int
    room: int = 0  # classes that the model has, where it learns

    @property
    def rows(self) -> int:
        """The number of rows that the state has learnt."""
        return int(self.state.rows)


class Work(NamedTuple):
    """Rows that are in the log."""

    schema: Schema  # with the classes that they brought
    encoded: Encoded
    end: int  # rows of the log behind them


def joined(works: Sequence[Work]) -> Work:
    """Return consecutive work items as one."""
    if len(works) == 1:
        return works[0]
    parts = [work.encoded for work in works]
    x, y, row = (np.concatenate([part[i] for part in parts]) for i in range(3))
    rejected = [one for part in parts for one in part.rejected]
    gaps = np.sum([part.gaps for part in parts], 0)
    words = {name: [text for part in parts for text in part.words[name]] for name in parts[0].words}
    return Work(works[-1].schema, Encoded(x, y, row, rejected, gaps, words), works[-1].end)


def parts(works: Sequence[Work]) -> Iterator[Work]:
    """Yield consecutive rows, few enough at once that a state is published often."""
    some: list[Work] = []
    for work in works:
        some.append(work)
        if sum(len(one.encoded.row) for one in some) >= TOGETHER:
            yield joined(some)
            some = []
    if some:
        yield joined(some)


class Writer:
    """A learner in a thread.

    Args:
        learner: the restored learner, open for writing.
        log: the source of its rows.
    """

    def __init__(self, learner: Learner, log: Log):
        self.learner, self.log = learner, log
        self.lock = threading.Lock()  # around every change of the learner
        self.failed = ""  # why it has stopped learning
        self.end = learner.places[-1].row  # rows of the log that are learnt
        self.saved_at = time.time()
        self._saved = deque([self.end], KEPT)  # what the checkpoints in the folder hold
        self._speed = deque([(time.monotonic(), learner.rows)], 1000)
        self.changed = threading.Event()  # set when there is something new to publish
        self._whole_at = 0.0  # when a state with all rows was published
        self._publish(whole=True)
        self._patient = 0.0  # until when not to save, after it has failed
        self._worker: Worker[Work] = Worker("learner", self.learn, AT_ONCE, EVERY)

    def _publish(self, whole: bool) -> None:
        """Publish the state; `whole`: with the rows that wait for a full batch, which takes about as long as one."""
        made = self.learner
        state = with_waiting(made.engine) if whole else made.engine.state
        self.published = Published(made.schema, made.engine.sampler, state, made.settings.seed, made.room)
        self.shown = self.end - (0 if whole else len(made.waiting[1]))
        self._whole_at = time.monotonic() if whole else self._whole_at
        self.changed.set()

    def warm(self) -> None:
        """Compile before the first client waits: a copy learns dummy rows and is discarded."""
        made = self.learner
        rows = np.zeros((BATCH, len(made.schema.features)), np.float32), np.zeros(BATCH, made.waiting[1].dtype)
        Engine(made.engine.sampler, made.settings.seed, batch=BATCH, state=made.engine.state).feed(rows)

    @property
    def behind(self) -> int:
        """The number of durable rows not learnt yet."""
        return self.log.rows - self.end

    @property
    def unseen(self) -> int:
        """The number of durable rows that predictions do not know yet."""
        return self.log.rows - self.shown

    def put(self, work: Work) -> None:
        """Queue durable rows."""
        self._worker.put(work)

    def learn(self, works: list[Work]) -> None:
        """Learn rows, publish, and save now and then; after an error learning stops, but nothing is lost."""
        if self.failed:
            return
        try:
            for work in parts(works):
                with self.lock:
                    self.learner.absorb(work.schema, work.encoded, at=work.end)
                self.end = work.end
                self._publish(whole=False)
                self._speed.append((time.monotonic(), self.learner.rows))
            if self.shown < self.end and (not self.behind or time.monotonic() - self._whole_at > FRESH):
                self._publish(whole=True)
            if self.learner.pace.due() and self.end > self._saved[-1] and time.monotonic() > self._patient:
                self._try_to_save()
        except Exception as error:
            self.failed = f"learning has stopped: {error}"
            self.changed.set()
            print(f"opvi: {self.failed}", file=sys.stderr)

    def _try_to_save(self) -> None:
        """Try to save; a full disk does not stop learning, because the log has the rows."""
        try:
            self.save()
        except RunError as error:
            self._patient = time.monotonic() + AGAIN
            print(f"opvi: {error} Learning continues, and the log keeps the rows.", file=sys.stderr)

    def save(self) -> None:
        """Write a checkpoint; log segments that no checkpoint needs are deleted."""
        with self.lock:
            self.learner.save()
        self.saved_at = time.time()
        self._saved.append(self.end)
        if len(self._saved) == KEPT:
            self.log.forget(self._saved[0])

    @property
    def speed(self) -> float:
        """The recent number of rows learnt per second."""
        now = time.monotonic()
        recent = [point for point in self._speed.copy() if now - point[0] < WINDOW]
        return (recent[-1][1] - recent[0][1]) / max(now - recent[0][0], 1.0) if recent else 0.0

    def learnt(self) -> Learnt:
        """Return the run as it is now, for the report."""
        with self.lock:
            made = self.learner
            return Learnt(made.run.about(), made.schema, made.settings, made.engine.sampler, made.tree(), [])

    def close(self) -> None:
        """Learn the durable rows and save."""
        self._worker.close()
        if not self.failed and self.end > self._saved[-1]:
            self.save()
