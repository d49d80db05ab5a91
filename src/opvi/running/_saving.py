"""A run's checkpoints: the last few in a folder with one writer at a time, when to save, and how to resume."""

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from opvi.running._checkpoint import CheckpointError, make_folder, read, save, shaped
from opvi.running._cursor import Cursor, Trail
from opvi.running._settings import difference, settings
from opvi.running._stream import Stream
from opvi.types import Batch, Key, Sampler, State, Tree

ENDING, DAMAGED, LOCK, OWNER = ".opvi", ".damaged", "lock", "owner"
SAVE_EVERY = 30.0  # seconds
LARGEST_SHARE = 1 / 30  # of the time that may go into saving


class LockedError(RuntimeError):
    """Another process writes to this folder."""


class Checkpoints:
    """The last few checkpoints of one run, in a folder of their own.

    `with Checkpoints(folder) as kept:` makes the folder and locks it against other writers until the block, or the
    process, ends. Reading (`newest`) needs no lock.

    Args:
        folder: only checkpoints belong there.
        keep: how many of the last ones are kept. If one is damaged, the one before it is used.
    """

    def __init__(self, folder: str | Path, keep: int = 3):
        if keep < 1:
            raise ValueError(f"`keep` is {keep}, but at least 1 checkpoint must stay.")
        self.folder, self.keep = Path(folder), keep
        self.damaged: list[str] = []  # what `newest` passed over, and why
        self._lock: Any = None

    def __enter__(self) -> Self:
        from filelock import FileLock, Timeout  # what is there to lock with differs between systems

        make_folder(self.folder)
        path, owner = self.folder / LOCK, self.folder / OWNER
        for link in (path, owner):
            if link.is_symlink():
                raise LockedError(f"{link} is a link, but a run's files must lie in its own folder. Delete it.")
        lock = FileLock(path, timeout=0, thread_local=False)
        try:
            lock.acquire()  # the system opens it again when the process ends
        except Timeout:
            name = owner.read_text(errors="replace")[:20].strip() if owner.is_file() else ""
            raise LockedError(
                f"{self.folder} is being written to by process {name or '(unknown)'}. Wait for it, stop it, or choose "
                "another folder."
            ) from None
        self._lock = lock
        try:
            owner.write_text(str(os.getpid()))  # not into the lock itself: some versions empty it before they ask
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(self, number: int, tree: Tree) -> Path:
        """Save under an increasing number, such as the rounds done; older ones beyond `keep` are deleted."""
        path = save(self.folder / f"{number:015d}{ENDING}", tree)
        old = [other for other in self._paths() if other != path][self.keep - 1 :]
        for other in [*old, *self.folder.glob(".*.part")]:  # parts: of a process killed while it wrote
            other.unlink(missing_ok=True)
        return path

    def newest(self, like: Tree = None, below: int | None = None) -> Tree:
        """Return the newest intact checkpoint, or None; `damaged` lists those that were skipped.

        The holder of the lock renames damaged files. One that cannot be read now, for other reasons, is passed over if
        another is intact, and stays: the disk or the system may let it be read later.

        Args:
            like: its form, as in `opvi.load`. An intact checkpoint of another form is an error.
            below: consider only those with a lower number.
        """
        unread: OSError | None = None
        for path in self._paths():
            if below is not None and int(path.stem) >= below:
                continue
            try:
                if path.is_symlink():
                    raise CheckpointError(f"{path} is a link, but a run's files must lie in its own folder.")
                tree = read(path)
            except FileNotFoundError:  # a running process has deleted it since
                return self.newest(like, below)
            except OSError as error:
                self.damaged.append(f"{path} cannot be read: {error.strerror or error}.")
                unread = unread or error
            except (CheckpointError, MemoryError) as error:
                self.damaged.append(str(error))
                if self._lock is not None:
                    path.rename(path.with_suffix(DAMAGED))
            else:
                try:
                    return shaped(tree, like)
                except CheckpointError as error:
                    raise CheckpointError(f"{path}: {error}") from None
        if unread is not None:
            raise unread
        return None

    @property
    def begun(self) -> bool:
        """Return whether anything was saved here."""
        return bool(self._paths())

    def _paths(self) -> list[Path]:
        """Return the paths of checkpoints, newest first."""
        return sorted((path for path in self.folder.glob(f"[0-9]*{ENDING}") if path.stem.isdecimal()), reverse=True)


class Pace:
    """How often to save: at an interval in seconds, but never for more than a thirtieth of the time."""

    def __init__(self, every: float = SAVE_EVERY):
        if not every >= 0:
            raise ValueError(f"`save_every` is {every}, but must be a number of seconds of at least 0.")
        self.every = every
        self.took, self._at = 0.0, time.perf_counter()

    def due(self) -> bool:
        """Return whether the last save was long enough ago, given its cost."""
        return time.perf_counter() - self._at >= max(self.every, self.took / LARGEST_SHARE)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Measure what a save costs."""
        start = time.perf_counter()
        yield
        self._at = time.perf_counter()
        self.took = self._at - start


class Resumed(NamedTuple):
    """What is left of a run."""

    state: State
    stream: Iterable[Batch]
    rounds: int | None


class Saver:
    """Saves a run's state now and then, and finds it again."""

    def __init__(self, kept: Checkpoints, every: float, sampler: Sampler, key: Key):
        self.kept, self.pace, self.key = kept, Pace(every), key
        self.settings = settings(sampler)
        self.trail = Trail()  # of the batches that the state has learnt
        self.saved = -1  # the round of the last one

    def save(self, state: State) -> None:
        """Save, unless this round was saved already."""
        if int(state.round) == self.saved:
            return
        tree = {"state": state, "key": self.key, "settings": self.settings, "passed": self.trail.cursor._asdict()}
        with self.pace.saving():
            self.kept.save(int(state.round), tree)
        self.saved = int(state.round)

    def resumed(self, begin: Callable[[], State], stream: Iterable[Batch], rounds: int | None) -> Resumed | None:
        """Return the state and what is left of the stream and the rounds, or None if nothing was saved yet."""
        found = self.kept.newest()
        for message in self.kept.damaged:
            warnings.warn(f"{message} Passed over.", RuntimeWarning, stacklevel=3)
        if found is None:
            return None
        if not isinstance(found, dict) or set(found) - {"passed"} != {"state", "key", "settings"}:
            raise ValueError(f"{self.kept.folder} holds checkpoints of something else. Choose another folder.")
        if not np.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(self.key)):
            raise ValueError(
                f"{self.kept.folder} holds a run with another key, which this call would mix with its own. Give the "
                "same key, or choose another folder."
            )
        odd = difference(found["settings"], self.settings)
        if odd:
            raise ValueError(
                f"{self.kept.folder} holds a run of another sampler: {odd}. Give the same sampler, or choose another "
                "folder."
            )
        try:
            state = shaped(found["state"], jax.eval_shape(begin), "state")
        except CheckpointError as error:
            raise CheckpointError(f"{self.kept.folder}: {error}") from None
        self.saved = int(state.round)
        learnt = Cursor(**found["passed"]) if "passed" in found else Cursor(self.saved)  # an older opvi kept no hash
        rest = self._rest(stream, learnt)
        return Resumed(state, rest, None if rounds is None else max(0, rounds - learnt.row))

    def _rest(self, stream: Iterable[Batch], learnt: Cursor) -> Iterable[Batch]:
        """Return the stream after the batches that were learnt, which must be its first ones."""
        batches = iter(stream)
        self.trail = self.trail.after(itertools.islice(batches, learnt.row))
        now = self.trail.cursor
        if learnt.digest is not None and now != learnt:
            few = f"it has only {now.row:,}" if now.row < learnt.row else "its first ones are others now"
            raise ValueError(
                f"{self.kept.folder} holds a run that learnt {learnt.row:,} batches of its stream, but {few}. Give the "
                "same stream from its beginning, or choose another folder."
            )
        return stream.after(stream.done + learnt.row) if isinstance(stream, Stream) and stream.is_of_arrays else batches
