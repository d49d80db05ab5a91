"""Signals: a run ends at the next safe point, and at once while it waits for rows."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from opvi.adapters._tables import Block, RowSource


class Stopped(KeyboardInterrupt):
    """A signal asked the run to end."""


class Stop:
    """A signal handler: the run ends at the next safe point, and at once while it waits for rows."""

    def __init__(self) -> None:
        self.asked: str | None = None
        self.reading = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.asked:  # a second time: do not even save
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name
        if self.reading:
            raise Stopped(self.asked)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this block nothing is learnt, and a signal ends it at once."""
        self.reading = True
        try:
            self.check()
            yield
        finally:
            self.reading = False

    def check(self) -> None:
        """Raise if a signal has arrived."""
        if self.asked:
            raise Stopped(self.asked)


def blocks_of(source: RowSource, stop: Stop) -> Iterator[Block]:
    """Yield the blocks; while the next one is awaited, a signal ends the wait."""
    blocks = source.blocks()
    while True:
        with stop.waiting():
            block = next(blocks, None)
        if block is None:
            return
        yield block
