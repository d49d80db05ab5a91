"""Several processes on one or many machines, as one program: JAX's own runtime, shared streams, checkpoints by orbax.

Every process runs the same script, reads its own rows, and takes part in every step of `opvi.scale.sharded`.
"""

import atexit
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from opvi.running._checkpoint import CheckpointError
from opvi.running._rows import OnBad, batch, row_count
from opvi.running._stream import stream as local_stream
from opvi.types import Array, ArrayLike, Batch, Data, State, Tree

Row = TypeVar("Row")

# What JAX says when another process of the run does not answer any more.
SIGNS_OF_LOSS = ("gloo", "nccl", "heartbeat", "coordination", "connection", "unavailable", "socket closed")
FAILED_START = re.compile(r"[a-z_]+: (gloo|nccl) ")
AHEAD = 64  # batches a process reads before all agree how many there are
SAVED = re.compile(r"round-(\d{10})")
REMAINS = re.compile(r"round-\d{10}.*tmp.*")  # of a save that was cut off


class LostProcessError(ConnectionError):
    """Another process of the run is gone. The run resumes from its last checkpoint once all are started again."""


# --- processes ----------------------------------------------------------------------------------


@contextmanager
def connected(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    timeout: int = 30,
    patience: int = 300,
) -> Iterator[None]:
    """Make one run of all processes, for the length of a `with`, which comes before anything else that uses JAX.

    What is omitted is taken from the variables OPVI_COORDINATOR, OPVI_PROCESSES and OPVI_PROCESS, and otherwise
    determined by JAX (under Slurm, Open MPI, Kubernetes and on TPUs). If one process dies or fails, every other one
    ends with `LostProcessError` (or is ended by JAX, where it was not computing) and a status that is not 0.

    Args:
        coordinator: address and port of process 0, e.g. "10.0.0.1:1234", reachable from all.
        processes: their number.
        process: which of them this is: 0, 1, …
        timeout: seconds of silence after which a process counts as dead.
        patience: seconds to wait for all to start.
    """
    coordinator = coordinator or os.environ.get("OPVI_COORDINATOR")
    processes = _number("OPVI_PROCESSES", processes)
    process = _number("OPVI_PROCESS", process)
    if processes is not None and not 0 <= (process or 0) < processes:
        raise ValueError(
            f"`process` is {process} of {processes} `processes`, but must be 0, 1, … and less than their number."
        )
    if processes == 1:
        yield
        return
    _initialise(coordinator, processes, process, timeout, patience)
    try:
        yield
    except BaseException as error:
        status = error.code if isinstance(error, SystemExit) else 1
        if status in (0, None):
            raise
        # At its end JAX waits for the other processes, who wait for this one.
        atexit.register(_leave, status if isinstance(status, int) else 1)
        if _tells_of_loss(error):
            raise LostProcessError(
                f"process {jax.process_index()} of {jax.process_count()} ends, because another one is gone: {error}. "
                "Start all of them again: the run resumes from its last checkpoint."
            ) from error
        raise
    jax.distributed.shutdown()


def _number(name: str, given: int | None) -> int | None:
    text = os.environ.get(name)
    if given is not None or not text:
        return given
    if not text.isdecimal():
        raise ValueError(f"the variable {name} is {text!r}, but must be a whole number.")
    return int(text)


def _initialise(
    coordinator: str | None, processes: int | None, process: int | None, timeout: int, patience: int
) -> None:
    if coordinator and process:
        _reach(coordinator, patience)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=timeout, initialization_timeout=patience
        )
    except ValueError as error:
        raise ValueError(
            f"it is not known which processes belong together ({error}) Give `coordinator`, `processes` and `process`, "
            "or set OPVI_COORDINATOR=host:port, OPVI_PROCESSES and OPVI_PROCESS for each of them."
        ) from error


def _reach(coordinator: str, patience: int) -> None:
    """Wait for process 0 to listen; JAX itself would abort the program without a word on the address."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"`coordinator` is {coordinator!r}, but must be an address and a port: `10.0.0.1:1234`.")
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise LostProcessError(
                    f"nobody answers at {coordinator} ({error}), where process 0 should, in {patience} seconds. Start "
                    "it, and let the port through."
                ) from error
            time.sleep(0.1)


def _tells_of_loss(error: BaseException) -> bool:
    text = str(error).lower()
    if isinstance(error, jax.errors.JaxRuntimeError):
        return any(sign in text for sign in SIGNS_OF_LOSS)
    # A program that fails while it is being started, as short ones do, is reported as a mere ValueError.
    return isinstance(error, ValueError) and FAILED_START.match(text) is not None


def _leave(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# --- rows ---------------------------------------------------------------------------------------


def share(source: Data | Iterator[Row], batch_size: int, *, after: int = 0) -> Data | Iterator[Row]:
    """Return this process's rows of a source that every process can read: its part of each batch.

    Batch k then holds the same rows in the same order, however many processes there are. Of an iterator, rows of
    others are passed over before anybody has to parse them, so give the lines of a file rather than its numbers.

    Args:
        source: arrays with one leading axis of rows, or an iterator of rows (numbers, lines, anything).
        batch_size: rows per batch, over all processes.
        after: rows to leave out at the start: `int(state.round) * batch_size` resumes a run.
    """
    each, mine = _rows_each(batch_size), jax.process_index()
    if after < 0:
        raise ValueError(f"`after` is {after}, but must be a number of rows of at least 0.")
    if isinstance(source, Iterator):
        return (row for i, row in enumerate(islice(source, after, None)) if i % batch_size // each == mine)

    row_count(source)

    def part(rows: ArrayLike) -> np.ndarray:
        rows = np.asarray(rows)[after:]
        return rows[np.arange(len(rows)) % batch_size // each == mine]

    return jax.tree.map(part, source)


class SharedStream:
    """Batches of which every process holds its own rows. Made by `opvi.scale.distributed.stream`."""

    def __init__(self, local: Iterable[Batch], ahead: int):
        self._local, self._ahead = local, ahead

    def __iter__(self) -> Iterator[Batch]:
        """Yield this process's rows of every batch; where they run out before those of others, rows of weight 0."""
        local, spare = iter(self._local), None
        while True:
            ready = list(islice(local, self._ahead))
            counts = _of_all_processes(len(ready))
            if not counts.max():
                return
            if spare is None and not counts.min():
                raise ValueError(
                    f"processes {np.flatnonzero(counts == 0).tolist()} got no rows at all. Start fewer processes, or "
                    "lower `batch_size`, so that each has a part of the first batch."
                )
            for k in range(counts.max()):
                if k < len(ready):
                    spare = ready[k]
                    yield spare
                elif spare is not None:
                    yield batch(spare.data, np.zeros(len(spare.weight), np.float32))

    def place(self, batches: Batch) -> Batch:
        """Return stacked batches `[rounds, rows, ...]` of this process as part of the arrays of all processes."""
        count = jax.process_count()
        if count == 1:
            return batches
        devices = np.array(jax.devices()).reshape(count, -1)
        cut = NamedSharding(Mesh(devices, ("process", "device")), PartitionSpec(None, "process"))

        def join(leaf: np.ndarray) -> jax.Array:
            shape = (leaf.shape[0], leaf.shape[1] * count, *leaf.shape[2:])
            return jax.make_array_from_process_local_data(cut, leaf, shape)

        return jax.tree.map(join, batches)


def stream(
    rows: Data | Iterator[Data], batch_size: int, *, blocks: bool = False, on_bad: OnBad = "raise", ahead: int = AHEAD
) -> SharedStream:
    """Return a stream for `opvi.run` of which this process reads its own rows; none is sent before it is needed.

    Args:
        rows: arrays, or an iterator, of this process's rows alone: what `share` returns, or a source of its own (a
            partition of a log, a file for each machine).
        batch_size: rows per batch over all processes, which have equal parts in it. A process that runs out of rows
            continues with rows of weight 0 until the last has ended.
        blocks: the iterator yields blocks of rows, not single ones.
        on_bad: as in `opvi.stream`.
        ahead: batches read before the processes agree how many there are; 1 for rows that must be learnt as they come.
    """
    if ahead < 1:
        raise ValueError(f"`ahead` is {ahead}, but must be at least 1 batch.")
    each = _rows_each(batch_size)
    if not isinstance(rows, Iterator) and not row_count(rows):
        return SharedStream([], ahead)
    local = local_stream(rows, each, blocks=blocks, on_bad=on_bad)
    return SharedStream((batch(b.data, b.weight, pad_to=each) for b in local), ahead)


def _rows_each(batch_size: int) -> int:
    count = jax.process_count()
    if batch_size < 1 or batch_size % count:
        near = max(1, round(batch_size / count)) * count
        raise ValueError(
            f"`batch_size` is {batch_size}, but {count} processes have equal parts in a batch: use a multiple of "
            f"{count}, e.g. {near}."
        )
    return batch_size // count


def _of_all_processes(number: int) -> np.ndarray:
    if jax.process_count() == 1:
        return np.array([number])
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(np.int32(number)))


# --- states -------------------------------------------------------------------------------------


def gather(state: Tree) -> Tree:
    """Return the whole state on every process, to predict from, look at, or `opvi.save`. All processes must call it."""
    from jax.experimental.multihost_utils import process_allgather

    def whole(leaf: ArrayLike) -> jax.Array:
        spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated
        return jnp.asarray(process_allgather(leaf, tiled=True) if spread else np.asarray(leaf))

    return jax.tree.map(whole, state)


def save(folder: str | Path, state: State, *, keep: int = 2) -> Path:
    """Write a state that is spread over processes, each its own part; all of them must call it.

    It is in the folder under the number of its round, and only once all of it is written. Any number of processes and
    devices can read it.

    Args:
        folder: on a file system that all processes see.
        state: a sampler's.
        keep: the number of newest states to keep; older ones are removed.
    """
    if keep < 1:
        raise ValueError(f"`keep` is {keep}, but at least 1 state is kept.")
    folder = Path(folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"round-{int(state.round):010d}"
    if not path.exists():
        orbax = _orbax()
        with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as writer:
            writer.save(path, args=orbax.args.StandardSave(_named(state)))
    if jax.process_index() == 0:
        old = _saved(folder)[:-keep]
        for stale in [*old, *(p for p in folder.iterdir() if REMAINS.fullmatch(p.name))]:
            shutil.rmtree(stale, ignore_errors=True)
    return path


def resume(folder: str | Path, state: State) -> State:
    """Return the newest state in a folder, laid out like the one given; that one itself if nothing was saved.

    Args:
        folder: what `save` was given.
        state: a new state of the same sampler, `sampler.init(key, ...)`, on this run's processes and devices.
    """
    folder = Path(folder).resolve()
    saved = _saved(folder) if folder.is_dir() else []
    newest = int(_of_all_processes(int(SAVED.fullmatch(saved[-1].name)[1]) if saved else -1)[0])  # type: ignore[index]
    if newest < 0:
        return state
    path, orbax = folder / f"round-{newest:010d}", _orbax()
    if not path.is_dir():
        raise CheckpointError(f"{path} is seen by process 0 but not by this one. Use a folder that all of them share.")
    with orbax.Checkpointer(orbax.StandardCheckpointHandler()) as reader:
        leaves = _named(state)
        try:
            found = {name: _kind(leaf) for name, leaf in reader.metadata(path).item_metadata.tree.items()}
        except Exception as error:
            raise CheckpointError(f"{path} is not a saved state, or is damaged ({error}). Remove it.") from error
        _compare(path, found, {name: _kind(leaf) for name, leaf in leaves.items()})
        like = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in leaves.items()}
        try:
            read = reader.restore(path, args=orbax.args.StandardRestore(like))
        except Exception as error:
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise
            raise CheckpointError(
                f"{path} is damaged ({error}). Remove it: the run then resumes from the one before."
            ) from error
    return jax.tree.unflatten(jax.tree.structure(state), [read[name] for name in leaves])


def _saved(folder: Path) -> list[Path]:
    """Return the folders of complete states, the oldest first; an incomplete one has another name."""
    return sorted(p for p in folder.iterdir() if SAVED.fullmatch(p.name) and p.is_dir())


def _named(state: Tree) -> dict[str, Array]:
    """Return the arrays of a state by the path to them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="-"): leaf for path, leaf in leaves}


def _kind(leaf: Array) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.shape), str(np.dtype(leaf.dtype))


def _compare(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    names = [*wanted, *(name for name in found if name not in wanted)]
    different = [name for name in names if found.get(name) != wanted.get(name)]
    if different:
        name = different[0]
        there, here = (kinds.get(name, "missing") for kinds in (found, wanted))
        raise CheckpointError(
            f"{path} is the state of another sampler: `{name}` is {there} there and {here} here, and so are "
            f"{len(different) - 1} more. Resume with the sampler, number of particles and dtype that saved it."
        )


def _orbax() -> Any:
    try:
        import orbax.checkpoint as orbax
    except ImportError as error:
        raise ImportError(
            'checkpoints of several processes need orbax: pip install "opvi[distributed]". On one process use '
            "`opvi.save`."
        ) from error
    return orbax
