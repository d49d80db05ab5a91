"""Requests to learn: read, checked, made durable together, answered and passed on."""

import hashlib
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

from opvi.adapters._tables import Encoded, Json, Schema
from opvi.adapters._tables._jsonlines import BadLineError
from opvi.adapters._tables._messages import Row, block_of, rows_of, unlike
from opvi.app.learn import Learner
from opvi.app.learn._classes import met
from opvi.app.serve._log import Entry, Known, Log, LogError
from opvi.app.serve._tickets import Held, Tickets
from opvi.app.serve._worker import Answer, Loop, Reply, Worker, answer, deliver, refused
from opvi.app.serve._writer import Work, Writer

AT_ONCE = 256  # requests that share an fsync
MOST_ROWS = 10_000  # of a request
TOGETHER = 1 << 19  # bytes of requests that share an fsync, about
WAITING_BYTES = 1 << 26  # of requests that are not read yet
PLAIN = b'{"rows":%d,"first":%d,"repeated":false}'  # an answer
TICKET = "ticket "  # how the key of a request begins that has only a ticket
TELL = 20  # rejected rows of which an answer tells

Observe = Callable[[float], None]  # is told how many seconds something took


class Sent(NamedTuple):
    """A request to learn."""

    body: bytes
    key: str
    ticket: str
    reply: Reply


class Accepted(NamedTuple):
    """A request whose rows go into the log."""

    sent: Sent
    entry: Entry
    rows: list[Row]
    held: Held | None  # what its ticket stands for


class Intake:
    """Makes the rows of many requests durable at once and passes them to the writer.

    Args:
        writer: learns the rows, after they are in its log.
        tickets: predictions waiting for labels.
        loop: the event loop that waits for answers.
        backlog: the most rows that may wait to be learnt.
        observe: called with the time it took to make rows durable.
    """

    def __init__(
        self,
        writer: Writer,
        tickets: Tickets,
        loop: Loop,
        backlog: int,
        observe: Observe,
    ):
        self.log, self.writer, self.tickets = writer.log, writer, tickets
        self.schema = writer.learner.schema
        met(self.schema, block_of([{self.schema.target: "0"}], 0, self.schema))  # loads what the first request needs
        self.backlog = backlog
        self._loop, self._observe = loop, observe
        self._bytes = 0  # of requests that were put in, by the event loop, and read, by the worker
        self._read = 0
        self._worker: Worker[Sent] = Worker("intake", self._take, AT_ONCE)

    def take(self, sent: Sent) -> Answer | None:
        """Accept a request, or return why not."""
        if self.writer.failed:
            return refused(503, self.writer.failed)
        if self.writer.behind > self.backlog or self._bytes - self._read > WAITING_BYTES:
            return refused(429, f"{self.writer.behind:,} rows wait to be learnt. Try again later.", Retry_After="1")
        self._bytes += len(sent.body)
        self._worker.put(sent)
        return None

    def close(self) -> None:
        """Finish accepted requests."""
        self._worker.close()

    def _take(self, requests: list[Sent]) -> None:
        while requests:
            sizes = itertools.accumulate(len(sent.body) for sent in requests)
            count = max(1, sum(size <= TOGETHER for size in sizes))
            self._group(requests[:count])
            requests = requests[count:]

    def _group(self, requests: list[Sent]) -> None:
        answers: list[tuple[Reply, Answer]] = []
        try:
            answers = self._learn(requests)
        except Exception as error:  # whatever it is, others are served
            why = str(error) if isinstance(error, LogError) else f"the server failed: {type(error).__name__}"
            answers = [(sent.reply, refused(503, why)) for sent in requests]
        finally:
            self._read += sum(len(sent.body) for sent in requests)
            deliver(self._loop, answers)

    def _learn(self, requests: list[Sent]) -> list[tuple[Reply, Answer]]:
        """Return the answers; rows answered with 200 are on disk."""
        answers: list[tuple[Reply, Answer]] = []
        accepted: list[Accepted] = []
        repeated: list[tuple[Sent, str]] = []
        fresh: set[str] = set()
        first = self.log.rows
        for sent in requests:
            digest = hashlib.blake2b(sent.body, digest_size=16).hexdigest() if sent.key else ""
            held = self.tickets.find(sent.ticket) if sent.ticket else None
            # A ticket that waits is a new one, though its name was used before; a key belongs to one request forever.
            known = sent.key in self.log.keys and not (held is not None and sent.key.startswith(TICKET))
            if sent.key and (known or sent.key in fresh):
                repeated.append((sent, digest))
                continue
            one = self._accepted(sent, digest, first, held)
            if isinstance(one, Answer):
                answers.append((sent.reply, one))
                continue
            fresh.add(sent.key)
            accepted.append(one)
            first += len(one.rows)
        if accepted:
            answers += self._accept(accepted)
        answers += [(sent.reply, _again(self.log.keys[sent.key], digest)) for sent, digest in repeated]
        return answers

    def _accepted(self, sent: Sent, digest: str, first: int, held: Held | None) -> Accepted | Answer:
        """Return a request with its rows, completed from its ticket, or why it is refused."""
        try:
            rows = rows_of(sent.body)
        except BadLineError as error:
            return refused(400, f"{error}. A row is a JSON object; several are an array of objects.")
        if not rows:
            return refused(400, "there is no row in the request.")
        if len(rows) > MOST_ROWS:
            return refused(413, f"the request has {len(rows):,} rows, but at most {MOST_ROWS:,} are taken at once.")
        if sent.ticket and held is None:
            return refused(404, "the ticket is not known: it was used, or is too old. Send the whole row.")
        if held is not None and held.rows != len(rows):
            return refused(400, f"the ticket is of {held.rows} rows, but the request has {len(rows)}.")
        entry = Entry(sent.key, digest, first, len(rows), sent.body, held.body if held else b"")
        return Accepted(sent, entry, entry.read() if held else rows, held)

    def _accept(self, accepted: list[Accepted]) -> list[tuple[Reply, Answer]]:
        """Encode, write, sync, pass on and answer."""
        rows = [row for one in accepted for row in one.rows]
        block = block_of(rows, accepted[0].entry.first, self.schema)
        schema, encoded = met(self.schema, block)
        began = time.perf_counter()
        self.log.append([one.entry for one in accepted])
        self._observe(time.perf_counter() - began)
        self.schema = schema
        self.writer.put(Work(schema, encoded, self.log.rows))
        bad = {one.row: one.reason for one in encoded.rejected}
        labels = _labels(schema, encoded) if any(one.sent.ticket for one in accepted) else {}
        answers = []
        for one in accepted:
            first, rows_sent = one.entry.first, one.entry.rows
            odd = unlike(schema, one.rows)
            if not bad and not one.sent.ticket and not odd:  # as most are
                answers.append((one.sent.reply, Answer(200, PLAIN % (rows_sent, first))))
                continue
            told: Json = {"rows": rows_sent, "first": first, "repeated": False, **odd}
            if bad:
                reasons = [{"row": i, "reason": bad[first + i]} for i in range(rows_sent) if first + i in bad]
                told |= {"rejected": len(reasons), "reasons": reasons[:TELL]}
            if one.held is not None:
                own = {i: labels[first + i] for i in range(rows_sent) if first + i in labels}
                told["scored"] = self.tickets.settle(one.sent.ticket, one.held, own)
            answers.append((one.sent.reply, answer(told)))
        return answers


def _again(known: Known, digest: str) -> Answer:
    """Return the answer to a repeated key."""
    if known.digest != digest:
        return refused(422, "the idempotency key was used for other rows. Give every request a key of its own.")
    return answer({"rows": known.rows, "first": known.first, "repeated": True})


def _labels(schema: Schema, encoded: Encoded) -> dict[int, float | str]:
    """Return the targets of valid rows by row number, as given in the table."""
    assert encoded.y is not None
    if schema.task == "classification":
        return {int(row): schema.classes[code] for row, code in zip(encoded.row, encoded.y, strict=True)}
    return dict(zip(encoded.row.tolist(), schema.targets(encoded.y).tolist(), strict=True))


def replay(learner: Learner, log: Log) -> int:
    """Learn the rows in the log that the checkpoint does not hold; return how many there were."""
    begin = first = learner.places[-1].row
    rows: list[Row] = []
    for entry in log.after(begin):
        try:
            rows += entry.read()  # checkpoints lie between requests
        except BadLineError as error:
            raise LogError(f"{log.folder} is not a log that opvi wrote: {error}. Restore it.") from None
        if len(rows) >= MOST_ROWS or first + len(rows) == log.rows:
            learner.absorb(*met(learner.schema, block_of(rows, first, learner.schema)), at=first + len(rows))
            first, rows = first + len(rows), []
    return log.rows - begin
