"""SIGINT, SIGTERM and SIGHUP: a run saves and ends soon, whatever it is doing."""

import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opvi.app.learn._learner import Stop

EXIT = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}  # what a shell reports
NAMES = [name for name in EXIT if hasattr(signal, name)]
PATIENCE = 2.0  # seconds in which a run gets to its next good moment; compiling a model may take longer
SHOW_CURSOR = "\x1b[?25h"


class Deadline:
    """A thread that ends the process if the run does not end in time.

    Python runs no signal handler while a model is being compiled. Nothing is lost by ending then: the rows of
    a file are read again from the last checkpoint on, as after a kill. A second signal ends at once.

    Args:
        again: the command that resumes.
    """

    def __init__(self, again: Sequence[str]):
        self.again = list(again)
        self.lossless = False  # whether the source can be read again; otherwise only a second signal ends at once
        self._over = threading.Event()
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self.wakeup = self._theirs.fileno()
        self._thread = threading.Thread(target=self._watch, name="opvi-signals", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        known = {int(getattr(signal, name)): name for name in NAMES}
        asked = ""
        while not self._over.is_set():
            name = known.get(self._ours.recv(1)[0])
            if name and asked:
                self._end(name, "Ended at once, without saving.")
            asked = name or asked
            if name and self.lossless:
                threading.Thread(target=self._wait, args=(name,), daemon=True).start()

    def _wait(self, name: str) -> None:
        if not self._over.wait(PATIENCE):
            self._end(name, f"Stopped by {name}. What was learnt since the last checkpoint is read again. To resume:")

    def _end(self, name: str, words: str) -> None:
        told = f"{SHOW_CURSOR if sys.stderr.isatty() else ''}{words}\n"
        told += f"  {shlex.join(self.again)}\n" if words.endswith("resume:") else ""
        try:
            os.write(2, told.encode())
        finally:
            os._exit(EXIT[name])

    def close(self) -> None:
        """Stop watching: the run has ended by itself."""
        self._over.set()
        self._theirs.send(b"\0")
        self._thread.join()
        self._ours.close()
        self._theirs.close()


@contextmanager
def handled(stop: "Stop", again: Sequence[str]) -> Iterator[Deadline]:
    """Within this block signals end the run at the next safe point, or after two seconds."""
    numbers = [getattr(signal, name) for name in NAMES]
    before = [signal.signal(number, stop) for number in numbers]
    deadline = Deadline(again)
    woken = signal.set_wakeup_fd(deadline.wakeup, warn_on_full_buffer=False)
    try:
        yield deadline
    finally:
        signal.set_wakeup_fd(woken)
        deadline.close()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
