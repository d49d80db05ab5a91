"""Several processes that learn one model together: `opvi learn --distributed`.

Every process holds some of the particles and sees all rows of a batch. Whether the rows come from one file, which all
of them read, or from a file for each, whose rows are then exchanged, every process knows the same of the run; only
process 0 writes it down.
"""

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self, TypeVar, cast

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import Mesh

from opvi.app.learn._directory import REJECTED, RunDirectory, RunError
from opvi.app.learn._learner import BATCH, Learner, Place, Show, Stop, Stopped, count_kind, show_nothing
from opvi.app.learn._model import check_columns
from opvi.app.learn._starting import PIPE, Asked, Ready, ready
from opvi.app.tables import Block, Json, Source, TableError
from opvi.running import CheckpointError, Checkpoints, Engine, Fed, LockedError
from opvi.scale._sharding import check_counts, mesh, place, sharded
from opvi.scale.distributed import gather
from opvi.types import Batch, Sampler, Tree

Result = TypeVar("Result")

ROUNDS = 256  # batches learnt before the processes agree on what to do next
PROCESS = "{process}"  # stands for the process's number in the name of a file


class Patient(Stop):
    """A signal handler for one process of several: the run ends where all of them have agreed to."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name

    def check(self) -> None:
        """Nothing: a process that stopped alone would be missed."""


def leads() -> bool:
    """Whether this process is the one that writes."""
    return jax.process_index() == 0


def exchanged(data: bytes) -> list[bytes]:
    """What every process says, told to all. All of them must call it."""
    lengths = _of_all(np.array([len(data)], np.int32))[:, 0]
    padded = np.zeros(1 << int(lengths.max()).bit_length(), np.uint8)  # few lengths: each is a program
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return [row[:length].tobytes() for row, length in zip(_of_all(padded), lengths, strict=True)]


def _of_all(array: np.ndarray) -> np.ndarray:
    """The arrays of all processes on a new first axis."""
    return array[None] if jax.process_count() == 1 else np.asarray(process_allgather(array))


class EndedError(RunError):
    """Something went wrong in one process, and all know of it: they end together."""


def one_for_all(work: Callable[[], Result]) -> Result:
    """What `work` gives in this process; where it fails in one, all end. It may exchange nothing itself."""
    result, trouble = None, ""
    try:
        result = work()
    except (RunError, TableError, CheckpointError, LockedError, OSError) as error:
        trouble = str(error) or type(error).__name__
    troubles = [text.decode() for text in exchanged(trouble.encode())]
    if any(troubles):
        first = next(process for process, text in enumerate(troubles) if text)
        raise EndedError(trouble or f"process {first}: {troubles[first]}")
    return cast("Result", result)


# --- the start ----------------------------------------------------------------------------------


@contextmanager
def opened(run: RunDirectory, asked: Asked, stop: Stop) -> Iterator[Ready]:
    """Yield a run that may begin or resume: process 0 decides what it is about, the others read it in its folder.

    Args:
        run: in a folder that all processes see.
        asked: of every process the same.
        stop: a signal handler that lets all agree.
    """
    with ExitStack() as stack:
        first = one_for_all(lambda: _ready(run, stack.enter_context(run.checkpoints), asked, stop) if leads() else None)
        made = one_for_all(lambda: first or _followed(run, asked, stop))
        stack.callback(made.source.close)
        seen = exchanged(json.dumps([run.about(), made.learner.saves]).encode())
        if len(set(seen)) > 1:
            raise EndedError(f"the processes see different runs in {run.path}. Use a folder that all of them share.")
        yield made


def _followed(run: RunDirectory, asked: Asked, stop: Stop) -> Ready:
    """What process 0 has begun."""
    if not run.exists:
        raise RunError(f"{run.path} is seen by process 0 but not by this one. Use a folder that all of them share.")
    return _ready(run, run.checkpoints, asked._replace(resume=True), stop)


def _ready(run: RunDirectory, kept: Checkpoints, asked: Asked, stop: Stop) -> Ready:
    pattern, count = asked.source, 1
    if pattern is None and run.exists:
        about = run.about()
        pattern = about.get("source") if about.get("processes", 1) > 1 else None
    if pattern is not None:
        count = jax.process_count() if PROCESS in pattern else 1
        path = pattern.replace(PROCESS, str(jax.process_index()))
        if path == PIPE or (Path(path).exists() and not Path(path).is_file()):
            raise RunError(f"{path} is a pipe, which --distributed cannot read. Name a file.")
        asked = asked._replace(source=path, processes=count, pattern=pattern if count > 1 else None)
    return ready(run, kept, asked, stop, SharedLearner)


# --- learning -----------------------------------------------------------------------------------


class SharedEngine(Engine):
    """An engine whose arrays lie in several processes."""

    def on_host(self, tree: Tree) -> Tree:
        """Return arrays to read, wherever their parts lie."""
        return super().on_host(gather(tree))


def _spread(sampler: Sampler, over: Mesh) -> Sampler:
    """The sampler over the devices of all processes."""
    try:
        check_counts(jax.eval_shape(sampler.init, jax.random.key(0)), over)
    except ValueError as error:
        why = str(error).partition(". ")[0]
        raise RunError(
            f"`--particles` does not suit the {over.size} devices of {jax.process_count()} processes: {why}. Choose "
            "another number of them or of processes. (A classifier shares its particles out among groups, of which "
            "each is cut; without hidden layers it has a few of its own.)"
        ) from None
    return sharded(sampler, over)


class Counts(NamedTuple):
    """Numbers of rows, over all processes."""

    rejected: int
    filled: int
    kinds: dict[str, int]


class Agreed(NamedTuple):
    """What all processes do next."""

    rounds: int
    save: bool
    signal: int  # 0: none came


class SharedLearner(Learner):
    """A run in memory, of which this process has some of the particles."""

    _before = Counts(0, 0, {})  # of all processes, at the last checkpoint
    _whole: Json = {}  # noqa: RUF012 (never written to): of that checkpoint, what no process has alone

    def _engine(self, sampler: Sampler) -> Engine:
        self._mesh = mesh()
        self._each = -(-BATCH // self.parts)  # rows of a batch from each part
        return SharedEngine(_spread(sampler, self._mesh), self.settings.seed, batch=BATCH)

    def learn(self, source: Source, first: list[Block], stop: Stop, show: Show = show_nothing) -> None:
        """Learn all rows of all sources. A checkpoint ends it, unless a process fails: the last one then stays."""
        self.finished = False
        self._open_rejected()
        try:
            rows = self._rows(itertools.chain(first, source.blocks()), source.name)
            while True:
                try:
                    more, share = one_for_all(lambda: next(rows))
                except EndedError:
                    self.save()
                    raise
                agreed = self._agree(more, stop)
                if agreed.signal:
                    self.save()
                    raise Stopped(signal.Signals(agreed.signal).name)
                if not agreed.rounds:
                    break
                if agreed.save:
                    self.save()
                self.learn_batches(self._joined(agreed.rounds))
                show(self, share)
            self.finished = True
            self.save()
        finally:
            os.close(self._lines)
        show(self, 1.0)

    def learn_batches(self, batches: Batch) -> None:
        """Learn stacked batches, which all processes have alike."""
        self.count(Fed(self.engine.learn(batches), *batches))  # type: ignore[arg-type]

    def accept(self, x: np.ndarray, y: np.ndarray) -> None:
        """Let rows wait until all processes are ready to learn."""
        before = self.waiting
        self.waiting = np.concatenate([before[0], x]), np.concatenate([before[1], y])

    def _rows(self, blocks: Iterator[Block], name: str) -> Iterator[tuple[bool, float | None]]:
        """Read until as many rows wait as are learnt at once; yield whether there are more, and the share read."""
        for block in blocks:
            check_columns(self.schema, block, name)
            self.take(block)
            while len(self.waiting[1]) >= ROUNDS * self._each:
                yield True, block.share
        while True:
            yield False, 1.0

    def _agree(self, more: bool, stop: Stop) -> Agreed:
        """Full batches while anybody has more rows to read; then all that is left."""
        asked = signal.Signals[stop.asked].value if stop.asked else 0
        mine = [len(self.waiting[1]), more, asked, leads() and self.pace.due()]
        waiting, reading, signals, due = _of_all(np.array(mine, np.int32)).T
        if self.parts == 1 and len({*zip(waiting.tolist(), reading.tolist(), strict=True)}) > 1:
            raise EndedError(
                f"the processes read different numbers of rows from {self.places[-1].name}. Give all of them the same "
                "file, or a file to each: {process} in SOURCE stands for its number."
            )
        full = waiting[reading > 0] // self._each
        rounds = full.min() if len(full) else -(-waiting.max() // self._each)
        return Agreed(int(min(rounds, ROUNDS)), bool(due.any()), int(signals.max()))

    def _joined(self, rounds: int) -> Batch:
        """Batches of this and, where they read files of their own, of all other processes, `[rounds, rows, …]`."""
        x, y = self.waiting
        rows = min(rounds * self._each, len(y))
        self.waiting = x[rows:], y[rows:]

        def join(a: np.ndarray) -> np.ndarray:
            out = np.zeros((ROUNDS * self._each, *a.shape[1:]), a.dtype)  # always as many: one program
            out[:rows] = a[:rows]
            out = out.reshape(ROUNDS, self._each, *a.shape[1:])
            return (np.concatenate(list(_of_all(out)), 1) if self.parts > 1 else out)[:rounds]

        weight = join(np.ones(len(y), np.float32))
        somewhere = np.arange(rounds)[:, None], np.argmax(weight > 0, 1)[:, None]  # a row that is there

        def filled(a: np.ndarray) -> np.ndarray:
            absent = (weight == 0).reshape(*weight.shape, *(1,) * (a.ndim - 2))
            return np.where(absent, a[somewhere], a)

        return Batch((filled(join(x)), filled(join(y))), weight)  # type: ignore[arg-type]

    # --- checkpoints --------------------------------------------------------------------------

    def _open_rejected(self) -> None:
        """Where this process writes its rejected rows: nowhere, if process 0 has the same ones."""
        if leads():
            self._lines, self._size = self.run.open_rejected(self._size)
        elif self.parts > 1:
            name = Path(REJECTED)
            mine = f"{name.stem}-{jax.process_index()}{name.suffix}"
            self._lines, self._size = self.run.open_rejected(self._size, mine)
        else:
            self._lines = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def save(self) -> None:
        """A checkpoint of all processes, written by the first. All of them must call it."""
        one_for_all(lambda: os.fsync(self._lines) if self.parts > 1 else None)
        self._whole = {"state": gather(self.engine.state), **({"parts": self._parts()} if self.parts > 1 else {})}
        one_for_all(super().save if leads() else lambda: None)
        if not leads():
            self.saves += 1

    def tree(self) -> Json:
        """All that the run is, with the particles of all processes as they were at the last `save`."""
        return {**super().tree(), **self._whole}

    def _parts(self) -> list[Json]:
        """How far each process has read, and what waits there. The counts of all processes become known to all."""
        x, y = self.waiting
        before = self._before
        new = {
            "rejected": self.rejected - before.rejected,
            "filled": self.filled - before.filled,
            "kinds": {kind: n - before.kinds.get(kind, 0) for kind, n in self.kinds.items()},
        }
        said = {"new": new, "size": self._size, "places": [place._asdict() for place in self.places]}
        heads = [json.loads(head) for head in exchanged(json.dumps(said).encode())]
        xs = [np.frombuffer(rows, x.dtype).reshape(-1, x.shape[1]) for rows in exchanged(x.tobytes())]
        ys = [np.frombuffer(rows, y.dtype) for rows in exchanged(y.tobytes())]
        self.rejected, self.filled, self.kinds = before.rejected, before.filled, dict(before.kinds)
        for head in heads:  # in the same order everywhere
            self.rejected += head["new"]["rejected"]
            self.filled += head["new"]["filled"]
            for kind, count in head["new"]["kinds"].items():
                count_kind(self.kinds, kind, count)
        self._before = Counts(self.rejected, self.filled, dict(self.kinds))
        return [
            {"places": head["places"], "size": head["size"], "waiting": {"x": rows, "y": targets}}
            for head, rows, targets in zip(heads, xs, ys, strict=True)
        ]

    def restore(self, tree: Json) -> Self:
        """Resume from a checkpoint, with as many processes as there are; with the same files, if each has its own."""
        super().restore(tree)
        self.engine.state = place(self.engine.state, self._mesh)
        self._before = Counts(self.rejected, self.filled, dict(self.kinds))
        if self.parts > 1:
            try:
                mine = tree["parts"][jax.process_index()]
                self.places, self._size = [Place(**place) for place in mine["places"]], mine["size"]
                self.waiting = mine["waiting"]["x"], mine["waiting"]["y"]
            except (KeyError, IndexError, TypeError) as error:
                raise CheckpointError(f"a checkpoint of {self.run.path} lacks the part {error} of a process.") from None
        return self
