"""Starting, advancing and asking models that are given as arrays; it holds none itself."""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from opvi.running._rows import joined, padded, size_of, taken
from opvi.scale.fleet import _programs as programs
from opvi.scale.fleet._rows import hashed
from opvi.scale.fleet._table import Id
from opvi.types import Batch, Key, Sampler, Start, State, Tree

FEW = 16  # models or batches, for which there is a program of their own: a call for one must not move a thousand
SMALL = 1 << 16  # bytes of a state, up to which a step does not keep all cores busy by itself

Block = tuple[np.ndarray, Batch, np.int32]  # the models of each tile, their batches, and how many tiles there are


class Job(NamedTuple):
    """The work of one thread: models, and blocks of tiles of their batches."""

    models: int
    real: np.ndarray  # [tiles, lanes]: which places of the tiles are taken,
    items: np.ndarray  # and by which batch
    arguments: tuple[Key, Tree, list[Block]]  # keys, states, blocks


class Workers:
    """One sampler's compiled programs, and the threads that run them.

    Args:
        sampler: of every model.
        key: the fleet's.
        particles: what `init` takes; None for the sampler's usual start.
        lanes: see `opvi.Fleet`.
    """

    def __init__(self, sampler: Sampler, key: Key, particles: Start, lanes: int | None):
        from concurrent.futures import ThreadPoolExecutor  # not loaded with opvi: only fleets need it

        self.sampler, self.key = sampler, key
        on_cpu = jax.default_backend() == "cpu"
        self.lanes = lanes or (1 if on_cpu else programs.ACCELERATOR_LANES)
        drawn = isinstance(particles, int | np.integer)
        self._particles = (int(particles), None) if drawn else (None, particles)
        self.state = self._shapes()
        self.dtype = jax.eval_shape(lambda state: state.particles, self.state).dtype
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.threads = cores if on_cpu and size_of(self.state) <= SMALL else 1
        self._pool = ThreadPoolExecutor(self.threads, "opvi-fleet")  # starts no thread before it is used

    def prepare(self, batch: Batch) -> None:
        """Refuse, from shapes alone, batches that the sampler cannot learn from; see how it may be run.

        Args:
            batch: shapes of one.
        """
        if not programs.waits(self.sampler, self.key, self.state, batch):
            return
        if self.lanes > 1:
            raise ValueError(
                f"`lanes` is {self.lanes}, but this sampler factorises matrices, and many such calls at once can "
                "lock up on a CPU. Leave `lanes` at 1."
            )
        self.threads = 1

    def _shapes(self) -> State:
        """Return those of one model's state; refuse what `init` refuses, and an `init` that cannot be compiled."""
        if self._particles[1] is not None:
            self.sampler.init(self.key, self._particles[1])  # looks at the values, as a traced one cannot
        words, one = np.zeros((1, 2), np.uint32), np.int32(1)
        try:
            _, states = programs.start.eval_shape(self.sampler, *self._particles, self.key, words, one)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise TypeError(
                "this sampler's `init` looks at values, so thousands of models cannot be started by one compiled "
                f"program. Look at shapes alone inside `init`. ({str(error).splitlines()[0]})"
            ) from error
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states)

    def room(self, items: int) -> int:
        """Return how many models go into one call, where there are so many items in all."""
        return min(FEW if items <= FEW else programs.MODELS, programs.fits(size_of(self.state)))

    def starts(self, names: list[Id]) -> tuple[np.ndarray, Tree]:
        """Return keys as numbers, and first states, of some ids."""
        words, room, parts = hashed(names), self.room(len(names)), []
        for begin in range(0, len(names), room):
            some = words[begin : begin + room]
            count = np.int32(len(some))
            out = programs.start(self.sampler, *self._particles, self.key, padded(some, room), count)
            parts.append(_first(out, count))
        return joined(parts)

    def answers(self, states: Tree, at: np.ndarray, x: Tree, room: int) -> Tree:
        """Return what model `at[i]` of the states predicts for row i: at most `room` models and rows."""
        count = np.int32(len(at))
        out = programs.answer(self.sampler, padded(states, room), padded(at, room), padded(x, room), count)
        return _first(out, count)

    def advance(self, keys: np.ndarray, states: Tree, model: np.ndarray, batches: Batch) -> tuple[Tree, Tree]:
        """Return states after these batches, and the Info of each.

        Args:
            keys: of the models, as numbers.
            states: leaves `[models, ...]`.
            model: whose each batch is: sorted, and every model has at least one.
            batches: leaves `[batches, rows, ...]`.
        """
        jobs = list(self._jobs(keys, states, model, batches))
        work = [job.arguments for job in jobs]
        if self.threads > 1 and len(jobs) > 1:
            # Settings of a JAX context, such as 64 bits, do not reach other threads, where a jitted function would be
            # compiled anew without them. So the program is fetched here, which takes jit 0.2 ms after the first time.
            first, its_states, blocks = work[0]
            program = programs.advance.lower(self.sampler, self.lanes, first, its_states, *blocks[0]).compile()
            results = list(self._pool.map(partial(_run, program), work))
        else:
            results = [_run(partial(programs.advance, self.sampler, self.lanes), each) for each in work]
        parts, out = [], None
        for job, (new, infos) in zip(jobs, results, strict=True):
            parts.append(_first(new, job.models))
            info = taken(_first(joined(infos), len(job.real)), job.real)
            if out is None:
                out = jax.tree.map(lambda leaf: np.empty((len(model), *leaf.shape[1:]), leaf.dtype), info)
            jax.tree.map(lambda rows, leaf, at=job.items[job.real]: rows.__setitem__(at, leaf), out, info)
        return joined(parts), out

    def _jobs(self, keys: np.ndarray, states: Tree, model: np.ndarray, batches: Batch) -> Iterator[Job]:
        lanes, models = self.lanes, int(model[-1]) + 1
        few = len(model) <= FEW
        room = max(lanes, self.room(len(model)))
        most = FEW if few else programs.MODELS
        tiles = -(-min(most, programs.fits(size_of(batches) // len(model))) // lanes)
        each = room if few else min(room, -(-models // self.threads))
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
                blocks.append(jax.device_put((*block, np.int32(len(at[some])))))
            mine = taken((keys, states), slice(first, first + each))
            own, own_states = jax.device_put(padded(mine, room))
            own = jax.random.wrap_key_data(own, impl=jax.random.key_impl(self.key))
            yield Job(min(each, models - first), real, items, (own, own_states, blocks))


def _first(tree: Tree, count: int | np.integer) -> Tree:
    """Return the first so many entries, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], tree)


def _run(
    program: Callable[..., tuple[Tree, Tree]], arguments: tuple[Key, Tree, list[Block]]
) -> tuple[Tree, list[Tree]]:
    """Return the states of some models after all blocks of their batches, one after the other, and every Info."""
    keys, states, blocks = arguments
    infos = []
    for block in blocks:
        states, info = program(keys, states, *block)
        infos.append(info)
    return jax.block_until_ready((states, infos))
