"""Rows become batches: arrays, iterators and generators of any length, padded to few distinct shapes."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from opvi.flows.schedules import BatchRule, as_batch_rule
from opvi.running._rows import OnBad, batch, joined, row_count, taken, without_bad_rows
from opvi.types import Batch, Data


class _Arrays:
    """Rows of arrays held in memory, from a position on."""

    def __init__(self, data: Data, start: int, passes: int | None):
        self.data, self.position = data, start
        self.rows = row_count(data)
        self.end = None if passes is None else passes * self.rows

    def take(self, count: int | None) -> Data | None:
        count = self.rows if count is None else count
        stop = self.position + count if self.end is None else min(self.position + count, self.end)
        if stop <= self.position:
            return None
        first, last = self.position % self.rows, (stop - 1) % self.rows + 1
        whole = stop - self.position <= self.rows and first < last  # a slice copies nothing
        index: Any = slice(first, last) if whole else np.arange(self.position, stop) % self.rows
        self.position = stop
        return taken(self.data, index)


class _Iterator:
    """Rows of an iterator over blocks, regrouped to the requested size; the remainder waits."""

    def __init__(self, blocks: Iterator[Data], on_bad: OnBad):
        self.blocks, self.on_bad = blocks, on_bad
        self.waiting: Data | None = None
        self.layout: Any = None
        self.skipped = 0

    def _next(self) -> Data | None:
        """Return the good rows of the next block that has any."""
        for block in self.blocks:
            block = jax.tree.map(np.asarray, block)
            rows = row_count(block)
            layout = jax.tree.structure(block), [leaf.shape[1:] for leaf in jax.tree.leaves(block)]
            self.layout = self.layout or layout
            if layout != self.layout:
                if self.on_bad == "raise":
                    raise ValueError(
                        f"the stream changed shape: a row had leaves of shape {self.layout[1]}, now {layout[1]}. "
                        'Every row must have the same leaves; `on_bad="skip"` leaves others out and counts them.'
                    )
                self.skipped += rows
                continue
            block, skipped = without_bad_rows(block, self.on_bad)
            self.skipped += skipped
            if rows > skipped:
                return block
        return None

    def take(self, count: int | None) -> Data | None:
        parts, held = [], 0
        while held < (count or 1):
            part = self.waiting if self.waiting is not None else self._next()
            self.waiting = None
            if part is None:
                break
            parts.append(part)
            held += row_count(part)
        if not parts:
            return None
        data = joined(parts)
        if count is not None and held > count:
            self.waiting = taken(data, slice(count, None))
            data = taken(data, slice(count))
        return data


class Stream:
    """Batches in the order of the data. Made by `opvi.stream`.

    Arrays can be iterated again, and from any round (`after`); an iterator continues where it stopped.
    """

    def __init__(
        self, source: "_ArraySource | _Iterator", rule: BatchRule | None, rounds: int | None, done: int, skipped: int
    ):
        self._source, self._rule, self.done, self._skipped = source, rule, done, skipped  # `done`: rounds passed over
        self.rounds = rounds  # the last round of this stream, where that is known

    @property
    def skipped(self) -> int:
        """Bad rows left out so far."""
        return self._skipped + (self._source.skipped if isinstance(self._source, _Iterator) else 0)

    def __iter__(self) -> Iterator[Batch]:
        source = self._source
        reader: _Arrays | _Iterator = source.open(self.done) if isinstance(source, _ArraySource) else source
        t = self.done
        while self.rounds is None or t < self.rounds:
            data = reader.take(None if self._rule is None else rows_of_round(self._rule, t + 1))
            if data is None:
                return
            t += 1
            if reader is source:  # an iterator cannot be gone through again
                self.done = t
            rows = row_count(data)
            yield batch(data, pad_to=self._rule.bucket(rows) if self._rule else rows)

    @property
    def is_of_arrays(self) -> bool:
        """Whether the stream can start at any round; an iterator can be read only once."""
        return isinstance(self._source, _ArraySource)

    def after(self, rounds: int) -> "Stream":
        """Return the rest of the stream after `rounds` rounds: `stream.after(state.round)` resumes a run."""
        return Stream(self._source, self._rule, self.rounds, int(rounds), self._skipped)


class _ArraySource(NamedTuple):
    data: Data
    rule: BatchRule
    passes: int | None

    def open(self, rounds: int) -> _Arrays:
        """Return a reader at the row where round `rounds + 1` begins."""
        return _Arrays(self.data, sum(rows_of_round(self.rule, t) for t in range(1, rounds + 1)), self.passes)


def rows_of_round(rule: BatchRule, t: int) -> int:
    """Return the rule's size for round t; refuse it unless it is a whole number of at least one row."""
    size = rule.size(t)
    if not isinstance(size, int | np.integer) or size < 1:
        raise ValueError(
            f"the batch-size rule returned {size!r} for round {t}, but every round takes a whole number of at "
            "least 1 row. Round up: `math.ceil(...)`."
        )
    return int(size)


def stream(
    source: Any,
    batch_size: int | BatchRule | Callable[[int], int] | None = 20,
    *,
    rounds: int | None = None,
    passes: int | None = 1,
    blocks: bool = False,
    on_bad: OnBad = "raise",
) -> Stream:
    """Return a stream of batches from arrays, or from any iterator of unknown length.

    Args:
        source: arrays with one leading axis of rows, e.g. `X` or `(X, y)`; or an iterator or generator.
        batch_size: rows per round, as a number or a rule of `opvi.schedules`. A rule's batches are padded
            to powers of two, so that a growing batch compiles only O(log B) times. With `blocks=True`,
            None takes each block as it comes.
        rounds: stop after this many rounds. By default the source's end decides; the last batch may be
            smaller than the rest.
        passes: the number of passes over arrays; None for no end.
        blocks: the iterator yields blocks of rows (arrays with a leading axis), not single rows.
        on_bad: "raise" refuses a row with NaN, infinity or a number beyond 1e18; "skip" leaves it out and counts it
            in `skipped`.
    """
    if on_bad not in ("raise", "skip"):
        raise ValueError(f'`on_bad` is {on_bad!r}, but must be "raise" or "skip".')
    if rounds is not None and rounds < 1:
        raise ValueError(f"`rounds` is {rounds}, but must be at least 1, or None to run to the source's end.")
    if isinstance(source, Iterator):
        if batch_size is None and not blocks:
            raise ValueError("`batch_size=None` takes blocks as they come; it needs `blocks=True`.")
        rule = None if batch_size is None else as_batch_rule(batch_size)
        one_by_one = (jax.tree.map(lambda a: np.asarray(a)[None], row) for row in source)
        reader = _Iterator(source if blocks else one_by_one, on_bad)
        return Stream(reader, rule, rounds, done=0, skipped=0)
    if batch_size is None:
        raise ValueError("`batch_size` is None, but arrays need a number of rows per round or a rule.")
    if passes is None and rounds is None:
        raise ValueError("`passes=None` never ends; give `rounds` as well.")
    rule = as_batch_rule(batch_size)
    data, skipped = without_bad_rows(jax.tree.map(np.asarray, source), on_bad)
    rows = row_count(data)
    if rows == 0:
        raise ValueError(f"the stream is empty: 0 rows ({skipped} bad ones left out), but at least 1 is needed.")
    if passes is not None:
        rounds = _rounds_in(rule, passes * rows, rounds)
    return Stream(_ArraySource(data, rule, passes), rule, rounds, done=0, skipped=skipped)


def _rounds_in(rule: BatchRule, rows: int, at_most: int | None) -> int:
    """Return how many rounds `rows` rows are enough for."""
    taken = t = 0
    while taken < rows and t != at_most:
        t += 1
        taken += rows_of_round(rule, t)
    return t
