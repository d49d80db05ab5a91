"""One engine behind every interface: it learns batches in one compiled loop and predicts in a few sizes."""

import io
import pickle
from collections.abc import Callable, Hashable, Iterator
from functools import cache, partial
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._cpu import compiler_options, give_back, inline, one_blas_thread
from opvi._forks import refuse_forked
from opvi.predictive import Predictive
from opvi.running._kept import Program
from opvi.running._learners import one_learner, without_mark
from opvi.running._plain import from_plain, plainly
from opvi.running._programs import keep_programs
from opvi.running._rows import as_rows, cut, joined, row_count, size_of, taken, weights, with_room
from opvi.types import Array, ArrayLike, Batch, Data, Info, Key, Sampler, Seed, State, StoresRows, Tree, as_key

CHUNK_BYTES = 1 << 24  # of batches held at once
CHUNK_ROUNDS = 64  # at most; fewer are in room for as many, and the program stops after them
ASK_ROWS = 16  # asked about at once
ASK_ROUNDS = 64
MANY_ROWS = 32_768  # in a question that is worth an optimised program: it saves as much time as it takes to compile
LONE_ROWS = 1000  # that are learnt as padded batches, for the same reason
LONG_ROUNDS = 16  # after which memory is given back: to ask for it again takes little beside them
# Often the only question, which compiles sooner without what others need. So a life has four programs: the start, which
# a given state does without; learning, first a quick program, which takes a third of the time to compile, and then an
# optimised one, which is four times as fast; and this question. Another question adds two: what all of them need, and
# its own.
ALONE = Predictive.mean, Predictive.probabilities

Record = Callable[[Tree, Tree, Batch], Tree]  # a pure function of (state, info, batch)
Watcher = Callable[[Tree, Tree, Batch], Tree]  # of the states before and after a round, and its batch
Watchers = tuple[Watcher, ...]


def one_round(
    sampler: Sampler, record: Record | None, watchers: Watchers, key: Key, state: Tree, batch: Batch
) -> tuple[Tree, Tree]:
    """Return the new state, and what is kept of the round: Info, the result of `record`, the results of watchers."""
    before = state
    state, info = sampler.step(key, before, batch)
    watched = [watcher(before, state, batch) for watcher in watchers]
    return state, (info, record(state, info, batch) if record else None, watched)


def make_room(sampler: Sampler, state: Tree, batch: Batch, rounds: int) -> Tree:
    """Return the state with room for so many batches of a shape, if the sampler stores rows."""
    return sampler.make_room(state, batch, rounds) if isinstance(sampler, StoresRows) else state


def _relearnt(sampler: Any, key: Key, state: Tree, batch: Batch) -> tuple[Tree, None]:
    return sampler.relearn(key, state, batch), None


def looped(one: Callable[[Tree, Tree], tuple[Tree, Tree]], state: Tree, items: Tree, count: Array) -> tuple[Tree, Tree]:
    """Return the state after the first `count` of the stacked items, and the stacked results.

    The count is traced, so one program serves any length.
    """
    first = jax.tree.map(lambda leaf: leaf[0], items)
    room = row_count(items)
    out = jax.tree.map(lambda s: jnp.zeros((room, *s.shape), s.dtype), jax.eval_shape(one, state, first)[1])

    def body(i: Array, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        state, out = carry
        at = i.astype(jnp.uint32)  # JAX asks of other numbers whether they are below 0
        item = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), items)
        state, values = one(state, item)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=at, axis=0)
        return state, jax.tree.map(write, out, values)

    return jax.lax.fori_loop(0, count, body, (state, out))


def begun(sampler: Sampler, key: Key) -> Tree:
    """Return a sampler's usual start."""
    return sampler.init(key)


def advanced(
    sampler: Sampler, record: Record | None, watchers: Watchers, key: Key, state: Tree, batches: Batch, count: Array
) -> tuple[Tree, Tree]:
    """Learn the first `count` of the stacked batches; return the state, and what is kept of each round."""
    return looped(partial(one_round, sampler, record, watchers, key), state, batches, count)


advance = jax.jit(advanced, static_argnums=(0, 1, 2))


def again(sampler: Sampler, key: Key, state: Tree, batches: Batch, count: Array) -> Tree:
    """Learn the first `count` of the stacked batches again; return the state."""
    return looped(partial(_relearnt, sampler, key), state, batches, count)[0]


def answer(
    sampler: Sampler, what: Callable[..., Tree], static: tuple[Hashable, ...], state: Tree, asked: Tree, count: Array
) -> Tree:
    """Apply a function to the predictive at the first `count` of the stacked rows `(x, others)`."""

    def one(state: Tree, rows: tuple[Tree, tuple[Array, ...]]) -> tuple[Tree, Tree]:
        x, others = rows
        return state, what(sampler.predict(state, x), *others, *static)

    return looped(one, state, asked, count)[1]


def foreseen(sampler: Sampler, state: Tree, x: Tree, count: Array) -> Tree:
    """Return the predictives at the first `count` of the stacked rows, for any number of questions."""
    return looped(lambda state, rows: (state, sampler.predict(state, rows)), state, x, count)[1]


def told(
    what: Callable[..., Tree], static: tuple[Hashable, ...], predictives: Tree, others: tuple[Array, ...], count: Array
) -> Tree:
    """Apply a function to the first `count` of the stacked predictives."""

    def one(_: None, rows: tuple[Tree, tuple[Array, ...]]) -> tuple[None, Tree]:
        predictive, others = rows
        return None, what(predictive, *others, *static)

    return looped(one, None, (predictives, others), count)[1]


@cache
def program(
    function: Callable[..., Tree],
    settings: int,
    quick: bool,
    in_place: int | None = None,
    inner_loops: bool = False,
) -> Program:
    """Compile a function whose first arguments are settings, as the engine does; one argument may be overwritten."""
    options = compiler_options(quick, function in (answer, foreseen, told), inner_loops=inner_loops)
    return Program(function, settings, options, in_place)


class Fed(NamedTuple):
    """What a call of `feed` learnt, as NumPy arrays."""

    info: Tree  # the sampler's Info, leaves [rounds, ...]
    data: Data  # leaves [rounds, batch, ...]
    weight: np.ndarray  # [rounds, batch]: 0 for padding


class Engine:
    """A sampler, its state and the rows waiting for a full batch.

    The state is the same, bit for bit, however the rows are cut into calls, and up to rounding what `opvi.run` gives
    over `opvi.stream(data, batch)`, whose programs take longer to compile. A call that fails leaves the engine as it
    was. An engine can be pickled and copied: it holds no compiled programs, because JAX keeps those by the sampler's
    settings.

    Engines in different threads run in parallel. Only one thread at a time may teach an engine; a second one gets
    an error. Any number may ask meanwhile, and each answer comes from one consistent state.

    Args:
        sampler: what learns.
        key: a JAX key or an integer seed.
        batch: rows learnt at once.
        state: where to resume; the sampler's usual start if omitted.
        quick: rows before the program that learns is optimised. Until then it compiles three times faster and runs a
            quarter as fast, for those who want an answer after a few rows. Questions about fewer than 32,768 rows are
            then answered by such programs, too.
        singly: whether most questions are about one row; then one row is not padded.
        in_place: overwrite the state while learning instead of copying it. Then no other thread may ask meanwhile,
            and a state taken from the engine is gone once it learns more.
    """

    quick = lone = 0  # of engines saved by an older opvi
    in_place = singly = False

    def __init__(
        self,
        sampler: Sampler,
        key: Seed,
        *,
        batch: int = 20,
        state: State | None = None,
        quick: int = 0,
        singly: bool = False,
        in_place: bool = False,
    ):
        if batch < 1:
            raise ValueError(f"`batch` is {batch}, but a batch has at least 1 row.")
        if not isinstance(quick, int) or isinstance(quick, bool) or quick < 0:
            raise ValueError(f"`quick` is {quick!r}, but must be a whole number of rows of at least 0.")
        refuse_forked()
        keep_programs()
        self.sampler, self.key, self.batch, self.quick = sampler, inline(as_key(key)), int(batch), quick
        self.singly, self.in_place = singly, in_place
        self.state = program(begun, 1, True)(sampler, self.key) if state is None else state
        self.waiting: Batch | None = None  # rows, fewer than a batch
        self._dtype = _dtype_of(self.state)

    @property
    def state(self) -> Tree:
        """What has been learnt."""
        return self._state

    @state.setter
    def state(self, state: Tree) -> None:
        self._state = inline(state)

    @property
    def dtype(self) -> np.dtype:
        """What rows are cast to: the particles' dtype."""
        return self._dtype

    @one_learner
    def feed(self, data: Data, weight: ArrayLike | None = None, *, last: bool = False) -> Fed | None:
        """Learn from rows, in order, in batches of `batch`; the remainder waits for the next call.

        Args:
            data: a pytree of arrays with one leading axis of rows, e.g. `(X, y)`.
            weight: how often each row counts; 1 if omitted.
            last: also learn the remainder, in a padded batch. Calls with one row each are padded too, until there
                have been a thousand: then a program for one row is worth compiling.
        """
        new = self._rows(data, weight)
        rows = new if self.waiting is None else joined([self.waiting, new])
        alone = last and self.waiting is None and len(rows.weight) == 1
        size, held = 1 if alone and self.lone >= LONE_ROWS else self.batch, len(rows.weight)
        take = held if last else held - held % size
        if not take:
            self.waiting = rows if held else None
            return None
        batches = cut(taken(rows, slice(take)), size)
        info = self.learn(batches)
        self.lone += alone
        self.waiting = taken(rows, slice(take, None)) if take < held else None
        return Fed(info, *batches)  # type: ignore[arg-type]

    @one_learner
    def learn(self, batches: Batch) -> Info:
        """Learn stacked batches `[rounds, rows, ...]`; return the sampler's Info, leaves `[rounds, ...]`."""
        state, infos = self.state, []
        chunks = list(self._chunks(batches))
        settings: tuple[Any, ...] = (4,) if self.in_place else ()
        if isinstance(self.sampler, StoresRows):
            settings = (4 if self.in_place else None, True)
        learners = {quick: program(advanced, 3, quick, *settings) for _, _, quick in chunks}
        with one_blas_thread():
            for chunk, count, quick in chunks:
                learn = learners[quick]
                state = make_room(self.sampler, state, jax.tree.map(lambda leaf: leaf[0], chunk), count)
                state, (info, _, _) = learn(self.sampler, None, (), self.key, state, chunk, np.int32(count))
                self._state = state if self.in_place else self._state  # the old one is gone
                infos.append((info, count))
                if quick and not self._quick_rounds(state):  # an optimised one follows, which needs as much memory
                    learn.let_go(self.sampler, None, (), self.key, state, chunk, np.int32(count))
            told = joined([taken(_on_host(info), slice(count)) for info, count in infos])
        self._state = state
        if len(batches.weight) >= LONG_ROUNDS:
            give_back()  # what a loop took, and the old state
        return told

    @one_learner
    def relearn(self, data: Data, weight: ArrayLike | None = None) -> None:
        """Learn again from rows learnt before, which teach the parameters but not calibration, scale or counts."""
        if getattr(self.sampler, "relearn", None) is None:
            raise TypeError(f"{self.sampler} cannot learn rows again: it has no `relearn`.")
        batches, state = cut(self._rows(data, weight), self.batch), self.state
        learn = program(again, 1, self._quick_rounds(state) > 0)
        with one_blas_thread():
            for chunk, count in _chunks(batches):
                state = learn(self.sampler, self.key, state, chunk, np.int32(count))
            self._state = jax.block_until_ready(state)

    def ask(
        self,
        x: Tree,
        what: Callable[..., Tree],
        *static: Hashable,
        others: tuple[ArrayLike, ...] = (),
        alone: bool = False,
    ) -> Tree:
        """Apply a function to the predictive at some rows; return NumPy arrays `[rows, ...]`.

        Args:
            x: inputs, any number of rows.
            what: a function of a module, `what(predictive, *others, *static)`, whose results have a leading axis of
                rows. It is compiled once; the predictive itself once for all questions.
            static: hashable settings of `what`.
            others: arrays with as many rows as x.
            alone: whether no other question is expected: then the predictive is compiled together with it.
        """
        refuse_forked()
        state = self.state  # one and the same for all rows, whatever another thread learns meanwhile
        arrays = as_rows((x, tuple(others)), self._dtype)
        rows, answers = row_count(arrays), []
        if not rows:
            raise ValueError("`x` has 0 rows, but a question needs at least 1.")
        size = 1 if self.singly and rows < ASK_ROWS else ASK_ROWS
        quick = self.quick > 0 and rows < MANY_ROWS
        for start in range(0, rows, size * ASK_ROUNDS):
            chunk = taken(arrays, slice(start, start + size * ASK_ROUNDS))
            here = row_count(chunk)
            rounds = -(-here // size)
            room = with_room(chunk, size * ASK_ROUNDS, size * rounds)
            stacked = jax.tree.map(lambda a: a.reshape(ASK_ROUNDS, size, *a.shape[1:]), room)
            given = state, stacked, np.int32(rounds)
            said = self._said(quick, alone or what in ALONE, what, static, *given)
            said = jax.tree.map(lambda a: np.asarray(a).reshape(-1, *a.shape[2:]), said)
            answers.append(taken(said, slice(here)))
        return joined(answers)

    def _said(
        self,
        quick: bool,
        alone: bool,
        what: Callable[..., Tree],
        static: tuple[Hashable, ...],
        state: Tree,
        asked: Tree,
        count: np.int32,
    ) -> Tree:
        if alone:
            return program(answer, 3, quick)(self.sampler, what, static, state, asked, count)
        x, others = asked
        predictives = program(foreseen, 1, quick)(self.sampler, state, x, count)
        return program(told, 2, quick)(what, static, predictives, others, count)

    def _quick_rounds(self, state: Tree) -> int:
        """Return how many rounds are left until a state's programs are optimised."""
        return max(0, -(-self.quick // self.batch) - int(state.round)) if self.quick else 0

    def _chunks(self, batches: Batch) -> Iterator[tuple[Batch, int, bool]]:
        """Yield pieces of batches, each with its number of batches and whether its program is a quick one."""
        first = self._quick_rounds(self.state)
        for part, quick in ((slice(first), True), (slice(first, None), False)):
            some = taken(batches, part)
            for chunk, count in _chunks(some) if len(some.weight) else ():
                yield chunk, count, quick

    def _rows(self, data: Data, weight: ArrayLike | None) -> Batch:
        data = as_rows(data, self._dtype)
        return Batch(data, weights(weight, row_count(data)).astype(self._dtype, copy=False))  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Tree]:
        """Return NumPy arrays and settings: plain data, as far as the sampler is opvi's own."""
        key = str(jax.random.key_impl(self.key)), np.asarray(jax.random.key_data(self.key))
        state = jax.tree.map(np.asarray, self.state)
        try:
            sampler = plainly(self.sampler)
        except TypeError:  # functions of the user
            buffer = io.BytesIO()
            _Pickler(buffer).dump(self.sampler)
            sampler = buffer.getvalue()
        held = {name: value for name, value in without_mark(self.__dict__).items() if name not in ("_dtype", "_state")}
        return {**held, "state": state, "key": key, "sampler": sampler}

    def __setstate__(self, held: dict[str, Tree]) -> None:
        refuse_forked()
        kind, data = held["key"]
        key = inline(jax.random.wrap_key_data(jnp.asarray(data), impl=kind))
        sampler = held["sampler"]
        sampler = pickle.loads(sampler) if isinstance(sampler, bytes) else from_plain(sampler)
        state = jax.tree.map(jnp.asarray, held["state"])  # once, and not with every question
        self.__dict__.update({name: value for name, value in held.items() if name != "state"}, key=key, sampler=sampler)
        self.state = state
        self._dtype = _dtype_of(self.state)


class _Pickler(pickle.Pickler):
    """Pickles module functions that JAX has decorated (`jax.nn.relu`) by name."""

    def reducer_override(self, value: Any) -> Any:
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not isinstance(value, type | FunctionType) and name and module and _named(module, name) is value:
            return _named, (module, name)
        return NotImplemented


def _named(module: str, name: str) -> Any:
    return getattr(import_module(module), name, None)


def _dtype_of(state: Tree) -> np.dtype:
    """Return the particles' dtype; states that join their particles need not do so for this."""
    return np.dtype(jax.eval_shape(lambda held: held.particles, state).dtype)


def _on_host(tree: Tree) -> Tree:
    return jax.tree.map(np.asarray, tree)


def _chunks(batches: Batch) -> Iterator[tuple[Batch, int]]:
    """Yield stacked batches in pieces of one size, each with the number of batches to learn."""
    rounds, alone = batches.weight.shape
    room = max(1, min(CHUNK_ROUNDS, CHUNK_BYTES // max(1, size_of(batches) // rounds)))
    room = 1 if alone == 1 and rounds == 1 else room  # one row at a time needs no room
    for start in range(0, rounds, room):
        chunk = taken(batches, slice(start, start + room))
        yield with_room(chunk, room), len(chunk.weight)
