"""Starting, advancing and asking models that are given as arrays; it holds none itself."""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.scale.fleet import _programs as programs
from opvi.scale.fleet._rows import hashed, padded
from opvi.scale.fleet._table import Id
from opvi.types import Algorithm, Batch, Key, Tracker, as_key

FEW = 16  # models or batches, for which there is a program of their own: a call for one must not move a thousand
SMALL = 1 << 16  # bytes of a state, up to which a step does not keep all cores busy by itself


def typed_key(key: Any) -> Key:
    """A key with its kind, also from a seed or from an old-style array."""
    key = as_key(key)
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


class Job(NamedTuple):
    """The work of one thread: models, and blocks of tiles of their batches."""

    models: int
    real: np.ndarray  # [tiles, lanes]: which places of the tiles are taken,
    items: np.ndarray  # and by which batch
    arguments: tuple[Any, Any, list[Any]]  # keys, states, blocks


class Engine:
    """One algorithm's compiled programs, and the threads that run them.

    Args:
        algorithm: of every model.
        key: the fleet's.
        particles: what `init` takes.
        lanes: see `opvi.Fleet`.
    """

    def __init__(self, algorithm: Algorithm | Tracker, key: Key, particles: Any, lanes: int | None):
        self.algorithm, self.key = algorithm, key
        on_cpu = jax.default_backend() == "cpu"
        self.lanes = lanes or (1 if on_cpu else programs.ACCELERATOR_LANES)
        drawn = isinstance(particles, int | np.integer)
        self._particles = (int(particles), None) if drawn else (None, particles)
        self.state = self._shapes()
        self.dtype = jax.eval_shape(lambda state: state.particles, self.state).dtype
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = cores if on_cpu and programs.size_of(self.state) <= SMALL else 1
        from concurrent.futures import ThreadPoolExecutor  # not loaded with opvi: only fleets need it

        self._pool = ThreadPoolExecutor(self._threads, "opvi-fleet")  # starts no thread before it is used

    def prepare(self, batch: Batch) -> None:
        """Refuse, from shapes alone, batches that the algorithm cannot learn from; see how it may be run.

        Args:
            batch: shapes of one.
        """
        if not programs.waits(self.algorithm.step, self.key, self.state, batch):
            return
        if self.lanes > 1:
            raise ValueError(
                f"`lanes` is {self.lanes}, but this algorithm factorises matrices, and many such calls at once can "
                "lock up on a CPU. Leave `lanes` at 1."
            )
        self._threads = 1

    def _shapes(self) -> Any:
        """Of one model's state; refuses what `init` refuses, and an `init` that cannot be compiled."""
        if self._particles[1] is not None:
            self.algorithm.init(self.key, self._particles[1])  # looks at the values, as a traced one cannot
        words, one = np.zeros((1, 2), np.uint32), np.int32(1)
        try:
            _, states = programs.start.eval_shape(self.algorithm.init, *self._particles, self.key, words, one)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise TypeError(
                "this algorithm's `init` looks at values, so thousands of models cannot be started by one compiled "
                f"program. Look at shapes alone inside `init`. ({str(error).splitlines()[0]})"
            ) from error
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states)

    def room(self, items: int) -> int:
        """Models that go into one call, where there is so much to do in all."""
        return min(FEW if items <= FEW else programs.MODELS, programs.fits(programs.size_of(self.state)))

    def starts(self, names: list[Id]) -> tuple[np.ndarray, Any]:
        """Keys as numbers, and first states, of some ids."""
        words, room, parts = hashed(names), self.room(len(names)), []
        for begin in range(0, len(names), room):
            some = words[begin : begin + room]
            count = np.int32(len(some))
            out = programs.start(self.algorithm.init, *self._particles, self.key, padded(some, room), count)
            parts.append(jax.tree.map(lambda leaf, n=count: np.asarray(leaf)[:n], out))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    def answers(self, predict: Any, states: Any, at: np.ndarray, x: Any, room: int) -> Any:
        """What model `at[i]` of the states predicts for row i: at most `room` models and rows."""
        states, rows = (jax.tree.map(partial(padded, room=room), tree) for tree in (states, x))
        out = programs.answer(predict, states, padded(at, room), rows, np.int32(len(at)))
        return jax.tree.map(lambda leaf: np.asarray(leaf)[: len(at)], out)

    def advance(self, keys: np.ndarray, states: Any, model: np.ndarray, batches: Batch) -> tuple[Any, Any]:
        """States after these batches, and the Info of each.

        Args:
            keys: of the models, as numbers.
            states: leaves `[models, ...]`.
            model: whose each batch is: sorted, and every model has at least one.
            batches: leaves `[batches, rows, ...]`.
        """
        jobs = list(self._jobs(keys, states, model, batches))
        first_keys, first_states, blocks = jobs[0].arguments
        program = programs.compiled_advance(self.algorithm.step, self.lanes, first_keys, first_states, *blocks[0])
        # Only programs run in threads: what JAX was told by a context is not known there.
        each = map if self._threads == 1 else self._pool.map
        results = list(each(partial(_run, program), [job.arguments for job in jobs]))
        parts, out = [], None
        for job, (new, infos) in zip(jobs, results, strict=True):
            parts.append(jax.tree.map(lambda leaf, n=job.models: np.asarray(leaf)[:n], new))
            info = jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *infos)
            info = jax.tree.map(lambda leaf, real=job.real: leaf[: len(real)][real], info)
            if out is None:
                out = jax.tree.map(lambda leaf: np.empty((len(model), *leaf.shape[1:]), leaf.dtype), info)
            jax.tree.map(lambda rows, leaf, at=job.items[job.real]: rows.__setitem__(at, leaf), out, info)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts), out

    def _jobs(self, keys: np.ndarray, states: Any, model: np.ndarray, batches: Batch) -> Iterator[Job]:
        lanes, models = self.lanes, int(model[-1]) + 1
        few = len(model) <= FEW
        room = max(lanes, self.room(len(model)))
        most = FEW if few else programs.MODELS
        tiles = -(-min(most, programs.fits(programs.size_of(batches) // len(model))) // lanes)
        each = room if few else min(room, -(-models // self._threads))
        for first in range(0, models, each):
            low, high = np.searchsorted(model, [first, first + each])
            here = model[low:high] - first
            wave = np.arange(high - low) - np.searchsorted(here, here)
            at, items = programs.tiles_of(here, wave, lanes, room)
            real, items = items >= 0, np.maximum(items, 0) + low
            blocks = []
            for begin in range(0, len(at), tiles):
                some = slice(begin, begin + tiles)
                chosen = padded(items[some], tiles)
                block = padded(at[some], tiles), jax.tree.map(lambda leaf, i=chosen: leaf[i], batches)
                blocks.append(jax.device_put((*block, np.int32(len(at[some])))))
            mine = jax.tree.map(lambda leaf, f=first: padded(leaf[f : f + each], room), (keys, states))
            own, own_states = jax.device_put(mine)
            own = jax.random.wrap_key_data(own, impl=jax.random.key_impl(self.key))
            yield Job(min(each, models - first), real, items, (own, own_states, blocks))


def _run(program: Any, arguments: tuple[Any, Any, list[Any]]) -> tuple[Any, list[Any]]:
    """All blocks of batches of some models, one after the other."""
    keys, states, blocks = arguments
    infos = []
    for block in blocks:
        states, info = program(keys, states, *block)
        infos.append(info)
    return jax.block_until_ready((states, infos))
