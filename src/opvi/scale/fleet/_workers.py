"""One sampler's compiled programs, and the threads that run them on models given as words."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from opvi._cpu import inline
from opvi.running._rows import joined, padded, size_of, taken, with_room
from opvi.scale.fleet import _programs as programs
from opvi.scale.fleet._programs import Form
from opvi.types import Batch, Key, Sampler, State, Tree

# Models or batches in one call of a program, which moves as many however few there are. There are two programs of each
# kind, because a third would have to be compiled, too.
FEW, MORE, MANY = 16, 64, 1024
ASKED_BYTES, LEARNT_BYTES = 1 << 17, 1 << 20  # up to which `MORE` take hardly longer to move than `FEW`
CALL_BYTES = 1 << 24  # in one call of a program
CALLS, REPEATED = 4, 128  # calls for few, and the items in them, up to which they are quicker than one call for many
ACCELERATOR_LANES = 1024
SMALL = 1 << 16  # bytes of a state, up to which a step does not keep all cores busy by itself

Block = tuple[np.ndarray, Batch, np.int32]  # the models of each tile, their batches, and how many tiles there are


def few_for(size: int, space: int) -> int:
    """Return how many items of `size` bytes go into a call for few, of `space` bytes where that is possible."""
    return min(max(FEW, space // max(size, 1)), MORE)


def room_for(size: int, most: int = MANY) -> int:
    """Return how many items of `size` bytes fit into one call, at most this many."""
    return min(most, max(1, CALL_BYTES // max(size, 1)))


def room_in_turns(items: int, size: int) -> int:
    """Return how many of these items of `size` bytes go into each of several calls, one after the other."""
    few = few_for(size, ASKED_BYTES)
    return room_for(size, few if items <= min(CALLS * few, REPEATED) else MANY)


class Job(NamedTuple):
    """The work of one thread: models, and blocks of tiles of their batches."""

    models: int
    real: np.ndarray  # [tiles, lanes]: which places of the tiles are taken,
    items: np.ndarray  # and by which batch
    words: np.ndarray
    blocks: list[Block]


class Workers:
    """Compiled programs of one sampler for models of one form.

    Args:
        sampler: the sampler of every model.
        form: the layout of their words.
        lanes: see `Keyed`.
    """

    def __init__(self, sampler: Sampler, form: Form, lanes: int | None):
        on_cpu = jax.default_backend() == "cpu"
        self.sampler, self.form = sampler, form
        self.lanes = lanes or (1 if on_cpu else ACCELERATOR_LANES)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = cores if on_cpu and form.ends[-1] * form.word.itemsize <= SMALL else 1
        self._compiled: dict[tuple[object, ...], Callable[..., Tree]] = {}
        self._pool: Any = None

    def prepare(self, key: Key, state: State, batch: Batch) -> None:
        """Refuse, from shapes alone, batches that the sampler cannot learn from; decide how it may be run."""
        if not programs.waits(self.sampler, key, state, batch):
            return
        if self.lanes > 1:
            raise ValueError(
                f"`lanes` is {self.lanes}, but this sampler factorises matrices, and many such calls at once can "
                "lock up on a CPU. Leave `lanes` at 1."
            )
        self.threads = 1

    def answers(self, models: np.ndarray, at: np.ndarray, x: Tree, room: int) -> Tree:
        """Return what model `at[i]` predicts for row i: at most `room` models and rows."""
        given = *with_room((models, at, x), room), np.int32(len(at))
        here = room <= MORE and models.itemsize * models.shape[1] <= SMALL
        out = self._program("answer", programs.answer, *given, here=here)(*given)
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(at)], out)

    def many(self, words: np.ndarray, model: np.ndarray, batches: Batch) -> tuple[np.ndarray, Tree]:
        """Return models after these batches, and the Info of each.

        Args:
            words: the models' words.
            model: the model of each batch, sorted; every model has at least one.
            batches: leaves `[batches, rows, ...]`.
        """
        jobs = list(self._jobs(words, model, batches))
        given = jobs[0].words, *jobs[0].blocks[0]
        here = max(len(given[0]), len(given[1])) <= MORE and words[0].nbytes <= SMALL
        program = self._program("many", programs.advance, *given, here=here)
        run = partial(_run, program, jax.dtypes.canonicalize_dtype(np.float64) == np.float64)
        parts: list[np.ndarray] = []
        out = None
        for job, (new, infos) in zip(jobs, self._in_threads(run, jobs), strict=True):
            parts.append(np.asarray(new)[: job.models])
            info = taken(taken(joined(jax.tree.map(np.asarray, infos)), slice(len(job.real))), job.real)
            if out is None:
                out = jax.tree.map(lambda leaf: np.empty((len(model), *leaf.shape[1:]), leaf.dtype), info)
            jax.tree.map(lambda rows, leaf, at=job.items[job.real]: rows.__setitem__(at, leaf), out, info)
        return joined(parts), out

    def _in_threads(self, run: Callable[[Job], tuple[Tree, list[Tree]]], jobs: list[Job]) -> Any:
        if self.threads == 1 or len(jobs) == 1:
            return map(run, jobs)
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # not loaded with opvi: only this needs it

            self._pool = ThreadPoolExecutor(self.threads, "opvi-keyed")
        return list(self._pool.map(run, jobs))

    def _jobs(self, words: np.ndarray, model: np.ndarray, batches: Batch) -> Iterator[Job]:
        """Split the work on models of these words into one part per thread."""
        lanes, models = self.lanes, len(words)
        sizes = size_of(batches) // len(model), words[0].nbytes
        few = few_for(sum(sizes), LEARNT_BYTES)
        share = -(-len(model) // min(self.threads, models))
        most, room = (room_for(size, few if share <= few else MANY) for size in sizes)
        room = max(lanes, room)
        tiles = -(-most // lanes)
        each = room if len(model) <= few else min(room, -(-models // self.threads))
        for first in range(0, models, each):
            low, high = np.searchsorted(model, [first, first + each])
            here = model[low:high] - first
            wave = np.arange(high - low) - np.searchsorted(here, here)
            at, items = programs.tiles_of(here, wave, lanes, room)
            real, items = items >= 0, np.maximum(items, 0) + low
            blocks = []
            for begin in range(0, len(at), tiles):
                some = slice(begin, begin + tiles)
                block = padded(at[some], tiles), taken(batches, padded(items[some], tiles))
                blocks.append((*block, np.int32(len(at[some]))))
            yield Job(min(each, models - first), real, items, padded(words[first : first + each], room), blocks)

    def _program(self, name: str, jitted: Any, *arguments: Tree, here: bool = False) -> Callable[..., Tree]:
        """Return the compiled program for these arguments; jit's own lookup takes longer than learning one row.

        Args:
            name: that of the program.
            jitted: the function.
            arguments: those that are not settings.
            here: whether it runs in the calling thread: another one takes longer to wake up than to predict a row.
        """
        shape = name, *(leaf.shape for leaf in jax.tree.leaves(arguments))
        if shape not in self._compiled:
            static = (self.sampler, self.form, self.lanes) if name == "many" else (self.sampler, self.form)
            given = inline(arguments) if here else arguments
            self._compiled[shape] = programs.ready(jitted, static, given)
        return self._compiled[shape]


def _run(program: Callable[..., tuple[Tree, Tree]], long: bool, job: Job) -> tuple[Tree, list[Tree]]:
    """Return models after all blocks of their batches, one after the other, and every Info."""
    words, infos = job.words, []
    with jax.enable_x64(long):  # a setting that does not reach other threads by itself
        for block in job.blocks:
            words, info = program(words, *block)
            infos.append(info)
        return jax.block_until_ready((words, infos))
