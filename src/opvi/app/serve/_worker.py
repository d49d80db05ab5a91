"""Threads that process queued items in groups, and return answers to the event loop."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, Protocol, TypeVar

from opvi.adapters._tables import Json
from opvi.app.cli._common import one_stop

Item = TypeVar("Item")
TICK = 1.0  # seconds after which an idle worker looks around


class Answer(NamedTuple):
    """A response to a client."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Reply(Protocol):
    """Where an answer is expected: a future of the event loop, or a number known to another process."""

    def done(self) -> bool:
        """Return whether no client is waiting any more."""

    def set_result(self, said: Answer, /) -> None:
        """Answer."""


class Loop(Protocol):
    """Delivers answers: the event loop, or a connection to another process."""

    def is_closed(self) -> bool:
        """Return whether no client is waiting any more."""

    def call_soon_threadsafe(self, call: Callable[[], None], /) -> object:
        """Call a function soon, in the thread where replies may be answered."""


def answer(content: Json, status: int = 200, **headers: str) -> Answer:
    """Return JSON as an answer."""
    body = json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    return Answer(status, body, tuple((name.replace("_", "-"), value) for name, value in headers.items()))


def refused(status: int, why: str, **headers: str) -> Answer:
    """Return an answer that says why nothing was done."""
    return answer({"error": one_stop(why)}, status, **headers)


def deliver(loop: Loop, answers: Sequence[tuple[Reply, Answer]]) -> None:
    """Hand answers to the event loop, all at once, skipping clients that have gone."""

    def hand_over() -> None:
        for reply, said in answers:
            if not reply.done():
                reply.set_result(said)

    if answers and not loop.is_closed():
        loop.call_soon_threadsafe(hand_over)


class Worker(Generic[Item]):
    """A thread that processes queued items.

    Args:
        name: the thread's name.
        work: called with the next items, at most `most`, or with none after an idle second.
        most: the most items per call.
        every: the least number of seconds between calls, so that more items are processed together.
    """

    def __init__(self, name: str, work: Callable[[list[Item]], None], most: int, every: float = 0.0):
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        self._work, self._most, self._every = work, most, every
        self._thread = threading.Thread(target=self._run, name=f"opvi-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Queue an item."""
        self._queue.put(item)

    def close(self) -> None:
        """Finish the queued items, then end."""
        self._every = 0.0
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        ended = False
        while not ended:
            items: list[Item] = []
            try:
                item = self._queue.get(timeout=TICK)
                while item is not None:
                    items.append(item)
                    if len(items) >= self._most:
                        break
                    item = self._queue.get_nowait()
                ended = item is None
            except Empty:
                pass
            if items or not ended:
                began = time.monotonic()
                self._work(items)
                if len(items) < self._most:
                    time.sleep(max(0.0, began + self._every - time.monotonic()))
