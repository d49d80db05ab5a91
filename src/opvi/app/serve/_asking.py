"""Predictions for requests: waiting requests are encoded and answered together, with the last published state."""

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from opvi.adapters._tables import Json, Rejected, Schema
from opvi.adapters._tables._jsonlines import BadLineError
from opvi.adapters._tables._messages import Row, block_of
from opvi.app.learn._predict import FEW_LEVELS, NOT_FINITE, predicted, unsound
from opvi.app.serve._worker import Answer, Loop, Reply, Worker, deliver, refused
from opvi.app.serve._writer import Published
from opvi.running import Engine

AT_ONCE = 64  # requests that are answered together
TOGETHER = 1 << 19  # bytes of requests that are answered together, about
LARGE = 1 << 14  # bytes of a request that others do not wait for
WAITING_BYTES = 1 << 26  # of requests that are not answered yet
MOST_ROWS = 10_000  # of a request
LEVELS = (0.05, 0.5, 0.95)  # quantiles, where none are asked for


class Said(NamedTuple):
    """The predictions for a request."""

    schema: Schema
    rows: list[Row]  # that were asked about
    columns: dict[str, np.ndarray]  # by their names, one value for every sound row that was asked about together
    here: slice  # where this request's are among them
    plain: list[Json | None]  # the request's own by rows, as JSON says it; None for one that is not finite
    sound: list[int]  # the places of those rows in the request
    rejected: list[Rejected]  # the others; `row` is the place in the request
    learnt: int  # rows that the predictions know

    def column(self, name: str) -> np.ndarray:
        """Return the predictions of a name, one for every sound row of the request."""
        return self.columns[name][self.here]


class Asked(NamedTuple):
    """A request for predictions."""

    size: int  # bytes
    read: Callable[[Schema], list[Row]]  # may raise a `BadLineError`
    levels: tuple[float, ...]
    write: Callable[[Said], Answer]
    reply: Reply


class Asking:
    """Answers requests in threads of its own while learning continues: others do not wait for large requests.

    Args:
        published: returns the state to predict with.
        loop: the event loop that waits for answers.
        count_unsound: is told how many rows had a prediction that is not finite.
    """

    def __init__(self, published: Callable[[], Published], loop: Loop, count_unsound: Callable[[int], None]):
        self._published, self._loop, self._count_unsound = published, loop, count_unsound
        self._engines: dict[str, Engine] = {}  # one for each thread
        self._lock, self._waiting = threading.Lock(), 0  # bytes of requests that were put in and are not answered
        self._small: Worker[Asked] = Worker("asking", self._take, AT_ONCE)
        self._large: Worker[Asked] = Worker("asking-large", self._take, AT_ONCE)

    def put(self, asked: Asked) -> Answer | None:
        """Take a request, or return why not."""
        if self._waiting > WAITING_BYTES:
            return refused(429, "too many requests wait to be answered. Try again later.", Retry_After="1")
        self._count(asked.size)
        (self._large if asked.size > LARGE or len(asked.levels) > FEW_LEVELS else self._small).put(asked)
        return None

    def _count(self, size: int) -> None:
        with self._lock:
            self._waiting += size

    def close(self) -> None:
        """Answer the waiting requests, then end."""
        self._small.close()
        self._large.close()

    def _take(self, questions: list[Asked]) -> None:
        while questions:
            sizes = itertools.accumulate(one.size for one in questions)
            count = max(1, sum(size <= TOGETHER for size in sizes))
            self._group(questions[:count])
            questions = questions[count:]

    def _group(self, questions: list[Asked]) -> None:
        answers: list[tuple[Reply, Answer]] = []
        for levels in dict.fromkeys(one.levels for one in questions):
            some = [one for one in questions if one.levels == levels]
            answers += self._safely(some, levels)
        self._count(-sum(one.size for one in questions))
        deliver(self._loop, answers)

    def _safely(self, questions: Sequence[Asked], levels: tuple[float, ...]) -> list[tuple[Reply, Answer]]:
        """Answer requests together; if that fails, answer each alone."""
        try:
            return self.answers(questions, levels)
        except Exception as error:
            if len(questions) > 1:
                return [said for one in questions for said in self._safely([one], levels)]
            return [(questions[0].reply, refused(500, f"the server failed: {type(error).__name__}"))]

    def answers(self, questions: Sequence[Asked], levels: tuple[float, ...]) -> list[tuple[Reply, Answer]]:
        """Return the answers to requests for the same quantiles."""
        known = self._published()
        answers: list[tuple[Reply, Answer]] = []
        read: list[tuple[Asked, list[Row]]] = []
        for one in questions:
            try:
                rows = one.read(known.schema)
            except BadLineError as error:
                answers.append((one.reply, refused(400, f"{error}.")))
                continue
            if 0 < len(rows) <= MOST_ROWS:
                read.append((one, rows))
            else:
                why = f"the request has {len(rows):,} rows, but from 1 to {MOST_ROWS:,} are answered at once."
                answers.append((one.reply, refused(413 if rows else 400, why)))
        if not read:
            return answers
        ends = np.cumsum([0, *(len(rows) for _, rows in read)])
        block = block_of([row for _, rows in read for row in rows], 0, known.schema)
        encoded = known.schema.encode(block, with_target=False)
        columns = predicted(self._asked(known), known.schema, encoded.x, levels)
        learnt = known.rows
        rows_said = _by_rows(known.schema, columns)
        odd = unsound(columns)
        if odd.any():
            rows_said = [None if strange else said for strange, said in zip(odd.tolist(), rows_said, strict=True)]
            strange = [Rejected(int(row), NOT_FINITE, "") for row in encoded.row[odd]]
            encoded = encoded._replace(rejected=sorted([*encoded.rejected, *strange]))
            self._count_unsound(len(strange))
        places, sound = np.searchsorted(encoded.row, ends).tolist(), encoded.row.tolist()
        for (one, rows), first, low, high in zip(read, ends.tolist(), places, places[1:], strict=False):
            end = first + len(rows)
            rejected = [bad._replace(row=bad.row - first) for bad in encoded.rejected if first <= bad.row < end]
            here = [row - first for row in sound[low:high]]
            said = Said(known.schema, rows, columns, slice(low, high), rows_said[low:high], here, rejected, learnt)
            answers.append((one.reply, one.write(said)))
        return answers

    def _asked(self, known: Published) -> Engine:
        """Return the engine that answers in this thread; a new one if the model has grown."""
        name = threading.current_thread().name
        engine = self._engines.get(name)
        if engine is None or engine.sampler is not known.sampler:
            engine = self._engines[name] = Engine(known.sampler, known.seed, state=known.state)
        engine.state = known.state
        return engine


def _by_rows(schema: Schema, columns: dict[str, np.ndarray]) -> list[Json | None]:
    """Return the predictions of all rows as plain values, converted at once because most requests have one row."""
    if schema.task == "regression":
        lists = [np.asarray(values, float).tolist() for values in columns.values()]
        return [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]
    shares = np.stack([columns[f"p={name}"] for name in schema.classes], 1).astype(float).tolist()
    return [
        {"prediction": label, "probabilities": dict(zip(schema.classes, share, strict=True))}
        for label, share in zip(columns["prediction"].tolist(), shares, strict=True)
    ]


def plain(said: Said) -> list[Json | None]:
    """Return each row's prediction as plain values; None for a row that was rejected."""
    out: list[Json | None] = [None] * len(said.rows)
    for place, values in zip(said.sound, said.plain, strict=True):
        out[place] = values
    return out
