"""When a run saves its state, and how it finds it again."""

import itertools
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from opvi.running._checkpoint import Checkpoints
from opvi.running._stream import Stream
from opvi.types import Batch, Key

SAVE_EVERY = 30.0  # seconds
LARGEST_SHARE = 1 / 30  # of the time that may go into saving


class Pace:
    """How often to save: every so many seconds, but never so often that it takes more than a thirtieth of the time."""

    def __init__(self, every: float = SAVE_EVERY):
        if not every >= 0:
            raise ValueError(f"`save_every` is {every}, but must be a number of seconds of at least 0.")
        self.every = every
        self.took, self._at = 0.0, time.perf_counter()

    def due(self) -> bool:
        """Whether the last save lies long enough back, also for what it cost."""
        return time.perf_counter() - self._at >= max(self.every, self.took / LARGEST_SHARE)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save, to know what it costs."""
        start = time.perf_counter()
        yield
        self._at = time.perf_counter()
        self.took = self._at - start


class Saver:
    """Saves a run's state now and then, and finds it again."""

    def __init__(self, kept: Checkpoints, every: float):
        self.kept, self.pace = kept, Pace(every)
        self.key: Any = None
        self.saved = -1  # the round of the last one

    def due(self) -> bool:
        """Whether it is time for the next one."""
        return self.pace.due()

    def save(self, state: Any) -> None:
        """Save, unless this round was saved already."""
        if int(state.round) == self.saved:
            return
        with self.pace.saving():
            self.kept.save(int(state.round), {"state": state, "key": self.key})
        self.saved = int(state.round)

    def resumed(self, key: Key, stream: Iterable[Batch], rounds: int | None) -> tuple[Any, Iterable[Batch], Any] | None:
        """The state, the rest of the stream and of the rounds; or None if nothing was saved yet."""
        self.key = key
        found = self.kept.newest()
        for message in self.kept.damaged:
            warnings.warn(f"{message} Passed over.", RuntimeWarning, stacklevel=3)
        if found is None:
            return None
        if not isinstance(found, dict) or set(found) != {"state", "key"}:
            raise ValueError(f"{self.kept.folder} holds checkpoints of something else. Choose another folder.")
        if not np.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(key)):
            raise ValueError(
                f"{self.kept.folder} holds a run with another key, which this call would mix up with its own. Give the "
                "same key, or choose another folder."
            )
        state = found["state"]
        done = self.saved = int(state.round)
        if rounds is not None:
            rounds = max(0, rounds - done)
        if isinstance(stream, Stream) and stream.is_of_arrays:
            return state, stream.after(done), rounds
        return state, _without(stream, done), rounds


def _without(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    """The batches after the first `count`."""
    source = iter(batches)
    for _ in itertools.islice(source, count):
        pass
    return source
