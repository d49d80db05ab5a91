"""Running a sampler over a stream: chunks of equal shape in one compiled loop, and a history as arrays."""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from opvi._cpu import one_blas_thread
from opvi._forks import refuse_forked
from opvi.flows.schedules import BatchRule, within_budget
from opvi.running._cursor import Trail
from opvi.running._engine import CHUNK_ROUNDS, Record, advance, advanced, make_room, one_round, program
from opvi.running._progress import Progress
from opvi.running._rows import as_rows, joined, padded, row_count, size_of, taken
from opvi.running._saving import SAVE_EVERY, Checkpoints, Saver
from opvi.running._stream import stream as make_stream
from opvi.types import Batch, Data, DivergedError, Key, Sampler, Seed, Start, StoresRows, Tree, as_key

CHUNK_BYTES = 1 << 24  # of batches and of recorded values held at once


class Chunk(NamedTuple):
    """What a callback sees: the rounds just done."""

    state: Tree  # after the last of them
    round: int  # rounds done in all
    info: Tree  # leaves [k, ...]
    record: Tree  # leaves [k, ...], or None
    batches: list[Batch]


class History(NamedTuple):
    """A run as arrays, one entry per round."""

    round: np.ndarray  # [T]: 1, 2, …
    info: Tree  # the sampler's Info, leaves [T, ...]
    record: Tree  # what `record` returned, leaves [T, ...], or None
    callbacks: dict[str, Tree]  # name -> {"round": [m], "value": leaves [m, ...]}
    seconds: float  # wall time, compilation included


Callback = Callable[[Chunk], Tree]


def run(
    sampler: Sampler,
    stream: Iterable[Batch],
    key: Seed,
    *,
    particles: Start = None,
    state: Tree = None,
    rounds: int | None = None,
    record: Record | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    every: int | None = None,
    progress: bool | str = False,
    checkpoint: str | Path | None = None,
    save_every: float = SAVE_EVERY,
) -> tuple[Tree, History]:
    """Run a sampler over a stream; return its state and the history.

    The result is the same, bit for bit, as calling `sampler.step` in a loop, whatever `every` is and
    wherever the run is cut and resumed: `run(sampler, stream.after(state.round), key, state=state)`.

    Args:
        sampler: e.g. `opvi.tracker(target)` or `opvi.opvi(target, step=0.01)`.
        stream: `opvi.stream(...)`, or any iterable of `Batch`.
        key: a JAX key or an integer seed. The same key resumes the same run.
        particles: what `sampler.init` takes: how many to draw, or the particles themselves. The sampler's
            usual number if omitted.
        state: where to resume, instead of new particles.
        rounds: stop after this many more rounds; with `checkpoint`, after this many since the run began.
        record: a pure function of `(state, info, batch)`, compiled into the loop; what it returns is kept
            for every round.
        callbacks: name -> function of a `Chunk`, called on the host between chunks; what it returns (an
            array, or a pytree of them) is kept in `history.callbacks[name]`, None is not. One that has a method
            `record(before, after, batch)` of the states around a round, pure and compiled into the loop, sees every
            round: its chunk's `record` is that method's, and it returns one entry per round, e.g. `opvi.regret.watch`.
        every: the number of rounds between calls. By default chunks are as long as memory allows.
        progress: draw a progress bar on standard error; a string is its label.
        checkpoint: a folder for the run's checkpoints. The same call again, with the stream from its beginning,
            resumes from the last good one; batches learnt before are skipped and not in the history.
            With another key, sampler or stream (their rows are hashed) it is refused.
        save_every: the least seconds between checkpoints. One more is saved when the run ends, even by an error.
    """
    refuse_forked()
    key = as_key(key)
    for name, value in (("rounds", rounds), ("every", every)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` is {value}, but must be at least 1, or None.")
    with ExitStack() as stack:
        begin = partial(sampler.init, key, particles) if state is None else lambda: state
        saver = resumed = None
        if checkpoint is not None:
            saver = Saver(stack.enter_context(Checkpoints(checkpoint)), save_every, sampler, key)
            resumed = saver.resumed(begin, stream, rounds)
        state, stream, rounds = resumed or (begin(), stream, rounds)
        source = itertools.islice(stream, rounds)  # and not one more pulled from what cannot give it back
        head = next(source, None)
        if head is None and resumed:  # all of it was learnt before
            return state, History(np.arange(0), None, None, {}, 0.0)
        if head is None:
            raise ValueError("the stream is empty: it gave no batch, but a run needs at least one.")
        last = getattr(stream, "rounds", None)
        if rounds is not None:
            last = min(last or math.inf, int(state.round) + rounds)
        label = progress if isinstance(progress, str) else "learning"
        bar = stack.enter_context(Progress(label, int(state.round), last, bool(progress)))
        place = getattr(stream, "place", lambda batches: batches)  # where rows come from several processes
        stack.enter_context(one_blas_thread())
        return _over(sampler, key, state, head, source, place, record, callbacks or {}, every, bar, saver)


def _over(
    sampler: Sampler,
    key: Key,
    state: Tree,
    head: Batch,
    source: Iterator[Batch],
    place: Callable[[Batch], Batch],
    record: Record | None,
    callbacks: Mapping[str, Callback],
    every: int | None,
    bar: Progress,
    saver: Saver | None,
) -> tuple[Tree, History]:
    """Run the loop: the batch `head` first, then those of the source."""
    if not isinstance(head, Batch):
        raise TypeError(
            f"`stream` yields a {type(head).__name__}, but a run takes batches. Make them from arrays or an iterator: "
            "`opvi.stream((X, y), batch_size=20)`."
        )
    watchers = {name: callback.record for name, callback in callbacks.items() if hasattr(callback, "record")}
    loop = (sampler, record, tuple(watchers.values()), key)
    roomy = make_room(sampler, state, head, 1)
    kept = size_of(jax.eval_shape(partial(one_round, *loop), roomy, head)[1]) if record or watchers else 0

    def room(batch: Batch) -> int:
        """Return how many rounds of this shape are held at once."""
        return max(1, min(CHUNK_ROUNDS, every or CHUNK_ROUNDS, CHUNK_BYTES // max(size_of(batch), kept, 1)))

    learn = program(advanced, 3, False, None, True) if isinstance(sampler, StoresRows) else advance
    log = _Log(int(state.round), callbacks, every, partial(_odd_label, sampler, state))
    first_rows = int(state.rows)
    try:
        for chunk in _chunks(itertools.chain([head], source), room, log.first, every):
            stacked = as_rows(jax.tree.map(lambda *leaves: np.stack(leaves), *chunk), state.particles.dtype)
            batches = place(padded(stacked, room(chunk[0])))  # rounds past the last are never read
            state = make_room(sampler, state, chunk[0], len(chunk))
            trail = saver.trail.after(chunk) if saver else Trail()
            state, (info, *out) = learn(*loop, state, batches, np.int32(len(chunk)))
            if saver:  # no signal is taken between here and the state above
                saver.trail = trail
            if hasattr(info, "predicted"):  # as large as the data
                info = info._replace(predicted=None)
            info, recorded, watched = taken(jax.tree.map(np.asarray, (info, *out)), slice(len(chunk)))
            log.add(state, info, recorded, chunk, dict(zip(watchers, watched, strict=True)))
            bar.update(log.done, int(info.rows[-1]), int(info.rows[-1]) - first_rows)
            if saver and saver.pace.due():
                saver.save(state)
    finally:
        if saver:
            saver.save(state)
    log.flush()
    for concern in getattr(sampler, "concerns", lambda _: [])(state):
        warnings.warn(f"this may not be the posterior: {concern}", UserWarning, stacklevel=3)
    return state, log.history()


def _chunks(
    batches: Iterator[Batch], room: Callable[[Batch], int], done: int, every: int | None
) -> Iterator[list[Batch]]:
    """Yield consecutive batches of one shape, cut where memory ends or a callback is due."""
    chunk: list[Batch] = []
    shape: Any = None
    for batch in batches:
        new_shape = jax.tree.map(np.shape, batch)
        if chunk and (new_shape != shape or len(chunk) == room(chunk[0])):
            yield chunk
            chunk = []
        chunk.append(batch)
        shape, done = new_shape, done + 1
        if every and done % every == 0:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _odd_label(sampler: Sampler, state: Tree, batch: Batch) -> str:
    """Return which label of a batch `(x, y)` is not a class of the model; nothing if none is, or nobody can say."""
    try:
        x, y = batch.data
        labels = np.asarray(y)[np.asarray(batch.weight) > 0]
        classes = jax.eval_shape(lambda state: sampler.predict(state, x).probabilities(), state).shape[1]
    except Exception:  # another form of data, or no classes
        return ""
    odd = labels[(labels < 0) | (labels >= classes)] if labels.dtype.kind in "iu" else labels[:0]
    return f"A row has the label {odd[0]}, but the model has {classes} classes: 0 to {classes - 1}." if len(odd) else ""


class _Log:
    """Collects a run's arrays, and calls the callbacks when they are due."""

    def __init__(
        self, first: int, callbacks: Mapping[str, Callback], every: int | None, odd_label: Callable[[Batch], str]
    ):
        self.first = self.done = first
        self.odd_label = odd_label
        self.callbacks, self.every = callbacks, every
        self.chunks: list[Chunk] = []
        self.watched: list[dict[str, Tree]] = []  # of the chunks not shown to the callbacks yet
        self.due = 0  # chunks before this one were shown to the callbacks
        self.notes: dict[str, list[tuple[int, Tree]]] = {}
        self.start = time.perf_counter()

    def add(self, state: Tree, info: Tree, recorded: Tree, batches: list[Batch], watched: dict[str, Tree]) -> None:
        self.done += len(batches)
        self.chunks.append(Chunk(state, self.done, info, recorded, batches))
        if watched:
            self.watched.append(watched)
        if not info.finite.all():
            place = int(info.finite.argmin())
            at = self.done - len(batches) + place + 1
            why = self.odd_label(batches[place]) or (
                "The batch itself was finite: the step is too large, the log density overflows, or a row lies outside "
                "the model (a label with no class) for every particle. Lower `step` if you set one, standardise the "
                "data, or check the labels."
            )
            raise DivergedError(
                f"the update of round {at} was not finite, so the particles stayed as they were before it. {why} The "
                "state is in this error's `state`, the history in its `history`.",
                state,
                self.history(),
            )
        if self.every is None or self.done % self.every == 0:
            self.flush()
        if not self.callbacks:  # nobody needs the rows and states of rounds gone by
            self.chunks[-1] = self.chunks[-1]._replace(state=None, batches=[])

    def flush(self) -> None:
        """Call the callbacks with what is new since the last time."""
        new = self.chunks[self.due :]
        if not new or not self.callbacks:
            return
        info, recorded = joined([chunk.info for chunk in new]), joined([chunk.record for chunk in new])
        seen = Chunk(new[-1].state, self.done, info, recorded, [batch for chunk in new for batch in chunk.batches])
        watched = joined(self.watched) if self.watched else {}
        for name, callback in self.callbacks.items():
            value = callback(seen._replace(record=watched[name]) if name in watched else seen)
            if value is not None:
                self.notes.setdefault(name, []).append((self.done, value))
        self.chunks[self.due :] = [Chunk(None, self.done, info, recorded, [])]
        self.watched = []
        self.due = len(self.chunks)

    def history(self) -> History:
        callbacks = {}
        for name, entries in self.notes.items():
            rounds, values = zip(*entries, strict=True)
            if hasattr(self.callbacks[name], "record"):  # one entry a round already
                shown = np.arange(self.first + 1, rounds[-1] + 1)
                callbacks[name] = {"round": shown, "value": joined(list(values))}
                continue
            value = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *values)
            callbacks[name] = {"round": np.asarray(rounds), "value": value}
        return History(
            round=np.arange(self.first + 1, self.done + 1),
            info=joined([chunk.info for chunk in self.chunks]),
            record=joined([chunk.record for chunk in self.chunks]),
            callbacks=callbacks,
            seconds=time.perf_counter() - self.start,
        )


class Compared(NamedTuple):
    """One method's part in a comparison."""

    state: Tree
    history: History
    rows: int  # rows visited, counted


def compare(
    methods: Mapping[str, tuple[Sampler, int | BatchRule | Callable[[int], int]]],
    data: Data,
    key: Seed,
    *,
    rounds: int,
    rows: int,
    particles: Start = 100,
    record: Record | None = None,
    progress: bool = False,
) -> dict[str, Compared]:
    """Run methods under one budget: the same rounds and the same total of rows for each (FITDS).

    Every batch rule is fitted to the budget with `schedules.within_budget`, so its growth is kept and its
    total is exact; the rows each method visits are counted and checked. All start from the same key.

    Args:
        methods: name -> `(sampler, batch_size)`.
        data: arrays with at least `rows` rows; the first `rows` are streamed once, in order.
        key: as in `run`, and so are `particles`, `record` and `progress`.
        rounds: the budget's rounds.
        rows: the budget's rows.
        particles: the starting particles of every method.
        record: a function whose result is kept for every round.
        progress: whether to draw a progress bar for every method.
    """
    available = row_count(data)
    if available < rows:
        raise ValueError(f"the budget is {rows} rows, but the data have {available}. Lower `rows`.")
    budget = jax.tree.map(lambda a: np.asarray(a)[:rows], data)
    results = {}
    for name, (sampler, rule) in methods.items():
        source = make_stream(budget, within_budget(rule, rounds, rows))
        state, history = run(sampler, source, key, particles=particles, record=record, progress=progress and name)
        visited = int(state.rows)
        if len(history.round) != rounds or visited != rows:
            raise AssertionError(
                f"{name} took {len(history.round)} rounds and {visited} rows, not {rounds} and {rows}."
            )
        results[name] = Compared(state, history, visited)
    return results
