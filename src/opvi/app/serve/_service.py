"""A run that learns and answers, or one that is followed, and everything that answers requests."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from opvi.adapters._tables import Schema
from opvi.adapters._tables._messages import Row
from opvi.app.learn import Learner, RunDirectory, RunError
from opvi.app.learn._learner import SERVED, Place
from opvi.app.learn._model import about_model
from opvi.app.serve._apart import Apart
from opvi.app.serve._asking import LEVELS, Asked, Asking, Said
from opvi.app.serve._behind import Behind
from opvi.app.serve._followed import Followed
from opvi.app.serve._intake import replay
from opvi.app.serve._log import Log
from opvi.app.serve._metrics import Requests
from opvi.app.serve._options import Options
from opvi.app.serve._worker import Answer, answer
from opvi.app.serve._writer import Published, Writer

LOG = "log"  # the folder of the log in a run's
REST = 4  # times as long as a page took to make, the next one is not made: learning needs the time


class Page:
    """The report, rendered on request, but not too often.

    Args:
        make: renders it.
    """

    def __init__(self, make: Callable[[], Awaitable[bytes]]):
        self._make = make
        self._one_at_a_time = asyncio.Lock()
        self._made, self._at, self._took = b"", -1.0, 0.0

    async def get(self) -> bytes:
        """Return the page; only one is rendered at a time."""
        asked = time.monotonic()
        async with self._one_at_a_time:
            if self._at < asked and time.monotonic() > self._at + REST * self._took:
                began = time.monotonic()
                self._made = await self._make()
                self._at = time.monotonic()
                self._took = self._at - began
        return self._made


class Service:
    """Everything that answers requests while the server runs.

    Args:
        options: how it is served.
        run: the source of the state: a writer or a followed run in this process, or a learner in its own.
    """

    def __init__(self, options: Options, run: Writer | Followed | Apart):
        self.loop = loop = asyncio.get_running_loop()
        if isinstance(run, Writer):
            run.warm()
        self.options = options
        self.behind = run.ready(loop) if isinstance(run, Apart) else Behind(run, options.name, options.backlog, loop)
        self.requests = Requests()
        self.asking = Asking(self.published, loop, self.requests.unsound.inc)
        self._probed: Published | None = None
        self._sound = False
        self.page = Page(self.behind.page)

    def published(self) -> Published:
        """Return the state that predictions are made with."""
        return self.behind.published

    async def ready(self) -> bool:
        """Return whether the service is fully working: it learns, and what its model predicts is finite."""
        known = self.published()
        if self._probed is not known:
            said = await self.ask(0, lambda _: [{}], LEVELS, lambda said: answer({}, 503 if said.rejected else 200))
            self._probed, self._sound = known, said.status == 200
        return self._sound and not self.behind.failed

    async def ask(
        self,
        size: int,
        read: Callable[[Schema], list[Row]],
        levels: tuple[float, ...],
        write: Callable[[Said], Answer],
    ) -> Answer:
        """Return the answer to a request of so many bytes for predictions, as `write` writes it."""
        reply = self.loop.create_future()
        return self.asking.put(Asked(size, read, levels, write, reply)) or await reply

    async def metrics(self) -> bytes:
        """Return the metrics for Prometheus."""
        return self.requests.text() + await self.behind.figures()

    def close(self) -> None:
        """Finish open requests."""
        self.behind.close()
        self.asking.close()


@contextmanager
def written(run: RunDirectory, options: Options, say: Callable[[str], None]) -> Iterator[Writer]:
    """Yield a run that this process alone writes, restored from its checkpoint and its log."""
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
                    say(f"{rows:,} rows of the log were not in the checkpoint; they are learnt now.")
                writer = Writer(learner, log)
                yield writer
                writer.close()
            finally:
                log.close()


@contextmanager
def followed(run: RunDirectory) -> Iterator[Followed]:
    """Yield a run that another process writes."""
    made = Followed(run)
    try:
        yield made
    finally:
        made.close()
