"""The process that learns: it takes requests from the server, makes their rows durable, learns, and sends its state.

Python runs one thread at a time and XLA queues programs, so learning in the server's process would delay its answers.
Here the operating system schedules, and the server is hardly delayed, because the thread that learns has a lower
priority, as have the threads that it and XLA start. Making rows durable keeps the server's priority: it takes a few
microseconds per row.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.connection import Connection

import jax
import numpy as np

from opvi.app.cli._common import prepare
from opvi.app.learn import RunDirectory
from opvi.app.serve._behind import Behind
from opvi.app.serve._intake import Sent
from opvi.app.serve._messages import PAGE, Answers, End, Ended, Give, Given, Keep, Learn, Speaker, State, Where
from opvi.app.serve._options import Options
from opvi.app.serve._service import written
from opvi.app.serve._worker import Answer, Worker
from opvi.app.serve._writer import Writer

NICE = 10  # how much lower the priority of learning is
REST = 20  # times as long as a state took to send, no other is sent
PARENT_GONE = 1  # PR_SET_PDEATHSIG of Linux


class Numbered:
    """A reply that the other process waits for."""

    def __init__(self, number: int, back: "Back"):
        self._number, self._back = number, back

    def done(self) -> bool:
        """Return False: only the server knows which clients have gone."""
        return False

    def set_result(self, said: Answer) -> None:
        """Send the answer, with the others."""
        self._back.ready.append((self._number, said))


class Back:
    """Sends answers back to the server's process, in place of the event loop."""

    def __init__(self, speaker: Speaker, where: Callable[[], Where]):
        self._speaker, self._where = speaker, where
        self.ready: list[tuple[int, Answer]] = []  # filled by one thread, that of the intake

    def is_closed(self) -> bool:
        """Return False: every answer is sent."""
        return False

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        """Collect answers and send them together."""
        call()
        answers, self.ready = self.ready, []
        self._speaker.say(Answers(answers, self._where()))


class Publisher:
    """Sends the learner's state when it has changed, but not too often.

    Args:
        writer: the thread that learns.
        speaker: the connection to the server.
    """

    def __init__(self, writer: Writer, speaker: Speaker):
        self._writer, self._speaker = writer, speaker
        self._changed = writer.changed
        self._send()
        self._thread = threading.Thread(target=self._run, name="opvi-publisher", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._changed.wait():
            self._changed.clear()
            time.sleep(REST * self._send())

    def _send(self) -> float:
        began, known = time.perf_counter(), self._writer.published
        state, settings = jax.tree.map(np.asarray, known.state), self._writer.learner.settings
        self._speaker.say(State(known.schema, settings, known.room, state, where(self._writer)))
        return time.perf_counter() - began


def where(writer: Writer) -> Where:
    """Return how far the writer has got."""
    return Where(writer.log.rows, writer.end, writer.failed)


def main(connection: Connection) -> None:
    """Learn what the server sends until it ends or is gone."""
    speaker = Speaker(connection)
    run, options = connection.recv()
    try:
        with ExitStack() as stack, ThreadPoolExecutor(1, initializer=os.nice, initargs=(NICE,)) as humble:
            begun = humble.submit(stack.enter_context, written(RunDirectory(run), options, _say))
            _serve(connection, speaker, begun.result(), options)
        speaker.say(Ended(None))
    except Exception as error:
        speaker.say(Ended(error))


def _serve(connection: Connection, speaker: Speaker, writer: Writer, options: Options) -> None:
    back = Back(speaker, lambda: where(writer))
    behind = Behind(writer, options.name, options.backlog, back)
    Publisher(writer, speaker)
    writer.warm()  # while the server compiles its own programs

    def give(orders: list[Give]) -> None:
        for order in orders:
            made = behind.page_now() if order.what == PAGE else behind.figures_now()
            speaker.say(Given(order.number, made))

    giving: Worker[Give] = Worker("giving", give, 1)
    for order in _orders(connection):
        if isinstance(order, Learn):
            refusal = behind.take(Sent(order.body, order.key, order.ticket, Numbered(order.number, back)))
            if refusal is not None:
                speaker.say(Answers([(order.number, refusal)], where(writer)))
        elif isinstance(order, Keep):
            behind.keep(*order)
        else:
            giving.put(order)
    behind.close()


def _orders(connection: Connection) -> Iterator[Learn | Keep | Give]:
    """Yield the server's requests until the end."""
    while True:
        try:
            orders = connection.recv()
        except (EOFError, OSError):
            os._exit(1)  # the server was killed: what is durable is learnt at the next start
        for order in orders:
            if isinstance(order, End):
                return
            yield order


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def begin(descriptor: int) -> None:
    """Set the process up, and learn."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)  # the server gets them, and says when to end
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_GONE, signal.SIGKILL)
    prepare()
    main(Connection(descriptor))
    os._exit(0)  # all is saved; threads that wait need not be ended one by one
