"""The server's view of a learner in a process of its own."""

import asyncio
import itertools
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Self

import jax
import jax.numpy as jnp

from opvi.app.learn import RunDirectory, RunError
from opvi.app.learn._model import model
from opvi.app.serve import _messages as messages
from opvi.app.serve._intake import WAITING_BYTES, Sent
from opvi.app.serve._options import Options
from opvi.app.serve._tickets import Held
from opvi.app.serve._worker import Answer, Reply, Worker, deliver, refused
from opvi.app.serve._writer import Published

BEGIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from opvi.app.serve._learning import begin
begin(int(sys.argv[1]))
"""
GONE = "learning has stopped: its process has gone. Start the server again; rows that were acknowledged are kept."
AT_ONCE = 256  # orders that are sent together
PATIENCE = 60.0  # seconds for the process to end, when it has said that all is saved


class Apart:
    """A run written by a separate process.

    Args:
        run: its folder.
        options: how it is served.
    """

    readonly = False

    def __init__(self, run: RunDirectory, options: Options):
        self._backlog = options.backlog
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Reply, int]] = {}  # who waits for an answer, and the bytes that were sent
        self._bytes = 0
        self._made: dict[int, asyncio.Future[bytes]] = {}
        self._where = messages.Where(0, 0, "")
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gone, self._ending = "", False
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", BEGIN, str(theirs.fileno()), json.dumps(sys.path)]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], process_group=0, stdin=subprocess.DEVNULL
            )
        self._connection = Connection(ours.detach())
        self._connection.send((run.path, options))
        self._first = self._received()
        self._sending: Worker[messages.Order] = Worker("sending", self._send, AT_ONCE)

    def __enter__(self) -> Self:
        """Wait until the run is restored."""
        first = self._first
        if isinstance(first, messages.Ended) and first.error is not None:
            self._end()
            raise first.error
        if not isinstance(first, messages.State):
            self._end()
            raise RunError(GONE)
        self._know(first)
        self._thread = threading.Thread(target=self._listen, name="opvi-listener", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Let the learner finish the durable rows and save."""
        self._end()
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._gone:
            raise RunError(self._gone)

    def _end(self) -> None:
        self._ending = True
        self._sending.put(messages.End())
        self._sending.close()

    # --- what is asked of it ------------------------------------------------------------------

    def ready(self, loop: asyncio.AbstractEventLoop) -> Self:
        """Register the event loop that waits for answers."""
        self._loop = loop
        return self

    @property
    def failed(self) -> str:
        """Why learning has stopped, if it has."""
        return self._gone or self._where.failed

    @property
    def behind(self) -> int:
        """The number of durable rows not learnt yet, as far as is known here."""
        return self._where.logged - self._where.learnt

    def take(self, sent: Sent) -> Answer | None:
        """Accept a request to learn, or return why not."""
        if self.failed:
            return refused(503, self.failed)
        if self.behind > self._backlog or self._bytes > WAITING_BYTES:
            return refused(429, f"{self.behind:,} rows wait to be learnt. Try again later.", Retry_After="1")
        number = next(self._numbers)
        self._waiting[number] = sent.reply, len(sent.body)
        self._bytes += len(sent.body)
        self._sending.put(messages.Learn(number, sent.body, sent.key, sent.ticket))
        return None

    def keep(self, ticket: str, held: Held) -> None:
        """Keep a request whose label will come later."""
        self._sending.put(messages.Keep(ticket, held))

    async def figures(self) -> bytes:
        """Return the run's metrics for Prometheus."""
        return await self._give(messages.FIGURES)

    async def page(self) -> bytes:
        """Return the report."""
        return await self._give(messages.PAGE)

    async def _give(self, what: str) -> bytes:
        assert self._loop is not None
        if self._gone:
            return b""
        number = next(self._numbers)
        self._made[number] = self._loop.create_future()
        self._sending.put(messages.Give(number, what))
        return await self._made[number]

    def close(self) -> None:
        """Do nothing: pending requests are answered when the block ends."""

    # --- threads ------------------------------------------------------------------------------

    def _send(self, orders: list[messages.Order]) -> None:
        if orders:
            with suppress(OSError):  # it has gone, which the listener notices
                self._connection.send(orders)

    def _received(self) -> messages.Report | None:
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def _listen(self) -> None:
        while not isinstance(said := self._received(), messages.Ended | None):
            if isinstance(said, messages.State):
                self._know(said)
            elif isinstance(said, messages.Answers):
                self._where = said.where
                self._deliver(said.answers)
            else:
                self._call(self._hand_over, said)
        self._error = said.error if said is not None else None
        if said is None or not self._ending:
            self._gone = GONE if self._error is None else f"learning has stopped: {self._error}"
            print(f"opvi: {self._gone}", file=sys.stderr)
            self._call(self._give_up)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _know(self, said: messages.State) -> None:
        """Publish a state; a model that has grown is a new sampler."""
        known: Published | None = getattr(self, "published", None)
        grown = known is None or known.room != said.room
        sampler = model(said.schema, said.settings, said.room) if known is None or grown else known.sampler
        state = jax.tree.map(jnp.asarray, said.state)
        self.published = Published(said.schema, sampler, state, said.settings.seed, said.room)
        self._where = said.where

    def _deliver(self, answers: list[tuple[int, Answer]]) -> None:
        found = []
        for number, said in answers:
            reply, size = self._waiting.pop(number)
            found.append((reply, said, size))
        assert self._loop is not None
        deliver(self._loop, [(reply, said) for reply, said, _ in found])
        self._call(self._less, sum(size for *_, size in found))

    def _less(self, size: int) -> None:
        self._bytes -= size

    def _call(self, call: Callable[..., None], *values: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *values)

    def _hand_over(self, said: messages.Given) -> None:
        future = self._made.pop(said.number)
        if not future.done():
            future.set_result(said.content)

    def _give_up(self) -> None:
        """Answer waiting clients after the process has gone."""
        for number in list(self._waiting):
            reply, _ = self._waiting.pop(number)
            if not reply.done():
                reply.set_result(refused(503, GONE))
        for future in self._made.values():
            if not future.done():
                future.set_result(b"")
        self._made.clear()
