"""What stands behind the routes: a run that learns and answers, or one that is followed."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from opvi.app.learn import Learner, RunDirectory, RunError, contents
from opvi.app.learn._learner import SERVED, Place
from opvi.app.learn._model import about_model
from opvi.app.learn._predict import Learnt, learnt
from opvi.app.report import page
from opvi.app.serve._asking import Asking
from opvi.app.serve._intake import Intake, replay
from opvi.app.serve._log import Log
from opvi.app.serve._metrics import Metrics
from opvi.app.serve._tickets import Tickets
from opvi.app.serve._writer import Published, Writer
from opvi.running import CheckpointError
from opvi.running._saving import SAVE_EVERY

LOG = "log"  # the folder of the log in a run's
BACKLOG = 100_000  # rows that may wait to be learnt
MOST_BYTES = 1 << 23  # of a body
LOOK = 1.0  # seconds between two looks for a new checkpoint
REST = 4  # times as long as a page took to make, the next one is not made: learning needs the time


class Options(NamedTuple):
    """How a run is served."""

    name: str  # of the model
    backlog: int = BACKLOG
    most_bytes: int = MOST_BYTES
    save_every: float = SAVE_EVERY


class Followed:
    """A run that another process writes: a new checkpoint replaces what predictions are made with.

    Args:
        run: its folder.
    """

    def __init__(self, run: RunDirectory):
        self._run = run
        self._seen = self._newest()
        self.known = learnt(run)
        self.published = _published(self.known)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="opvi-follower", daemon=True)
        self._thread.start()

    def _newest(self) -> str:
        return max((path.name for path in self._run.checkpoints.folder.glob("[0-9]*.opvi")), default="")

    def _follow(self) -> None:
        said = ""
        while not self._end.wait(LOOK):
            try:
                newest = self._newest()
                if newest != self._seen:
                    known = learnt(self._run)
                    self.known, self.published, self._seen = known, _published(known), newest
                said = ""
            except (RunError, CheckpointError, OSError) as error:
                if str(error) != said:
                    said = str(error)
                    print(f"opvi: {said} The last good state is served.", file=sys.stderr)

    def learnt(self) -> Learnt:
        """Return the run as it was last read, for the report."""
        return self.known

    def close(self) -> None:
        """Follow no longer."""
        self._end.set()
        self._thread.join()


def _published(known: Learnt) -> Published:
    return Published(known.schema, known.sampler, known.tree["state"], known.settings.seed)


class Page:
    """The report, made when it is asked for, and not too often.

    Args:
        known: returns the run.
        title: of the page.
    """

    def __init__(self, known: Callable[[], Learnt], title: str):
        self._known, self._title = known, title
        self._one_at_a_time = asyncio.Lock()
        self._made, self._at, self._took = b"", -1.0, 0.0

    async def get(self) -> bytes:
        """Return the page; made in a thread, one at a time."""
        asked = time.monotonic()
        async with self._one_at_a_time:
            if self._at < asked and time.monotonic() > self._at + REST * self._took:
                began = time.monotonic()
                self._made = await asyncio.to_thread(self._make)
                self._at = time.monotonic()
                self._took = self._at - began
        return self._made

    def _make(self) -> bytes:
        return page(contents(self._known(), self._title, ""), live=True).encode(errors="replace")


class Service:
    """All that answers requests, while the server runs.

    Args:
        options: how it is served.
        run: who gives the state: a writer, or a run that is followed.
    """

    def __init__(self, options: Options, run: Writer | Followed):
        self.loop = loop = asyncio.get_running_loop()
        self.options, self.run = options, run
        self.tickets = Tickets()
        self.asking = Asking(self.published, loop)
        writer = run if isinstance(run, Writer) else None
        self.metrics = Metrics(self.tickets, self.published, writer)
        self.intake = Intake(writer, self.tickets, loop, options.backlog, self.metrics.durable) if writer else None
        self.page = Page(run.learnt, options.name)

    def published(self) -> Published:
        """Return what predictions are made with."""
        return self.run.published

    @property
    def ready(self) -> bool:
        """Whether it does all that it is there for."""
        return not (isinstance(self.run, Writer) and self.run.failed)

    def close(self) -> None:
        """Answer what was asked; rows that are durable are learnt by the writer's own end."""
        if self.intake is not None:
            self.intake.close()
        self.asking.close()


@contextmanager
def written(run: RunDirectory, options: Options, say: Callable[[str], None]) -> Iterator[Writer]:
    """A run that this process alone writes: restored, and what its log holds beyond the checkpoint learnt."""
    with run.checkpoints as kept:
        schema, settings = about_model(run, run.about())
        found = kept.newest()
        for message in kept.damaged:
            say(f"{message} Passed over.")
        if found is None:
            raise RunError(f"{run.path} has no checkpoint yet. Let it learn first: `opvi learn … --resume`.")
        learner = Learner(run, kept, schema, settings, save_every=options.save_every).restore(found)
        known = next((place for place in reversed(learner.places) if place.name == SERVED), None)
        learner.places = [place for place in learner.places if place.name != SERVED]
        learner.places.append(known or Place(SERVED, None, None, 0))
        log = Log(run.path / LOG, learner.places[-1].row)
        learner.finished = False
        with learner.writing():
            try:
                rows = replay(learner, log)
                if rows:
                    learner.save()
                    say(f"{rows:,} rows of the log were not in the checkpoint: learnt.")
                writer = Writer(learner, log)
                yield writer
                writer.close()
            finally:
                log.close()


@contextmanager
def followed(run: RunDirectory) -> Iterator[Followed]:
    """A run that another process writes."""
    made = Followed(run)
    try:
        yield made
    finally:
        made.close()
