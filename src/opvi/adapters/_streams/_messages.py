"""What brokers and databases share: ordered messages, each one row, with a position to resume after it."""

import csv
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, parse_qsl, urlencode, urlsplit

from opvi.adapters._tables import Block, Rejected, TableError
from opvi.adapters._tables._block import shown
from opvi.adapters._tables._jsonlines import BadLineError
from opvi.adapters._tables._messages import Row, block_of, rows_of
from opvi.running._cursor import Cursor

AT_ONCE = 1000  # messages in a block, at most
LOOK = 0.25  # seconds that a wait for messages lasts, so that signals are heard
IDENTITY = ("stream", "table", "key", "columns")  # options that say which rows are meant
PATIENCE = 60.0  # seconds that a broker may be gone
SHORTEST, LONGEST = 0.1, 5.0  # seconds between two attempts to find it again


class Message(NamedTuple):
    """One row as it arrived."""

    id: str  # by which others know it
    place: tuple[int, int]  # where it came from, such as a partition, and its number there
    payload: bytes | Row


class Url(NamedTuple):
    """An address of rows: `nats://HOST/SUBJECT?OPTION=VALUE`."""

    split: SplitResult
    options: dict[str, str]

    @classmethod
    def of(cls, text: str, *known: str) -> "Url":
        """Parse an address; refuse unknown options."""
        split = urlsplit(text)
        options = {name: values[-1] for name, values in parse_qs(split.query, keep_blank_values=True).items()}
        known = (*known, "columns", "until", "patience")
        if odd := [name for name in options if name not in known]:
            raise TableError(f"{named(text)}: the option {odd[0]!r} is not known. There are: {', '.join(known)}.")
        if options.get("until", "now") != "now":
            raise TableError(f"{named(text)}: `until` is {options['until']!r}, but only `until=now` is known.")
        return cls(split, options)

    @property
    def patience(self) -> float:
        """How many seconds the broker may be unreachable."""
        text = self.options.get("patience", str(PATIENCE))
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise TableError(f"`patience` is {text!r}, but must be a number of seconds of at least 0.")
        return seconds


def named(url: str) -> str:
    """Return an address without user, password and options that do not select rows, to be shown, saved and compared."""
    split = urlsplit(url)
    query = urlencode({name: value for name, value in parse_qsl(split.query) if name in IDENTITY}, safe=",")
    return f"{split.scheme}://{split.netloc.rpartition('@')[2]}{split.path}{'?' if query else ''}{query}"


class Gone:
    """Reports a lost broker, waits longer with each attempt, and finally gives up.

    Args:
        name: the broker's address.
        patience: seconds.
    """

    def __init__(self, name: str, patience: float):
        self._name, self._patience = name, patience
        self._since: float | None = None
        self._wait = SHORTEST

    def back(self) -> None:
        """Note that the broker is reachable again."""
        if self._since is not None:
            print(f"opvi: {self._name} is reachable again.", file=sys.stderr)
        self._since, self._wait = None, SHORTEST

    def pause(self, why: str) -> float:
        """Return the seconds to wait before the next attempt; raise an error once patience has run out."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
            print(f"opvi: {self._name} is unreachable ({why}). Trying again.", file=sys.stderr)
        if now - self._since > self._patience:
            raise TableError(
                f"{self._name} has been unreachable for {self._patience:g} seconds ({why}). What was "
                "learnt is saved. Restart it, then resume with --resume."
            )
        self._wait = min(LONGEST, 2 * self._wait)
        return self._wait


class MessageSource:
    """Rows from messages: a `RowSource`. A subclass fetches them and knows the cursor after them.

    Args:
        url: where they come from.
        text: the address as the user gave it.
        cursor: where to resume.
    """

    once = False
    semicolons = False

    def __init__(self, url: Url, text: str, cursor: Cursor):
        self.url, self.name = url, named(text)
        self.fingerprint: str | None = None
        self.notes: list[str] = []
        self._row = self._next = cursor.row
        self._handed: deque[Message] = deque()  # not passed yet
        self._columns = [name for name in url.options.get("columns", "").split(",") if name]
        self._blocks = self._read()

    def __enter__(self) -> "MessageSource":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""

    def blocks(self) -> Iterator[Block]:
        """Return the blocks not handed out yet, each as soon as it has a row."""
        return self._blocks

    def passed(self, block: Block) -> Cursor:
        """Record that the rows of a block were learnt; return the position after them."""
        if block.first != self._row:
            raise ValueError(f"row {block.first} was passed after row {self._row} of {self.name}.")
        for _ in range(block.rows):
            self.behind(self._handed.popleft().place)
        self._row += block.rows
        return self.cursor(self._row)

    def ids(self, rows: list[int]) -> list[str]:
        """Return the ids of rows that were handed out but are not learnt yet."""
        return [self._handed[row - self._row].id for row in rows]

    def fetch(self) -> list[Message] | None:
        """Return the next messages, an empty list if there are none yet, None at the end."""
        raise NotImplementedError

    def behind(self, place: tuple[int, int]) -> None:
        """Record that a message was learnt."""
        raise NotImplementedError

    def cursor(self, row: int) -> Cursor:
        """Return the position after the messages that were learnt."""
        raise NotImplementedError

    def _read(self) -> Iterator[Block]:
        while (messages := self.fetch()) is not None:
            if messages:
                rows = [self._parsed(message) for message in messages]
                block = block_of(rows, self._next)
                self._next += len(messages)
                self._handed.extend(messages)
                yield block

    def _parsed(self, message: Message) -> Row | Rejected:
        """The row of a message: JSON, or a line of CSV where the columns are named."""
        payload = message.payload
        if isinstance(payload, dict):
            return payload
        try:
            if self._columns and not payload.lstrip().startswith(b"{"):
                return _line(payload, self._columns)
            rows = rows_of(payload)
            if len(rows) != 1:
                raise BadLineError(f"{len(rows)} rows, but a message holds one")
            return rows[0]
        except BadLineError as error:
            return Rejected(0, f"{error} (message {message.id})", shown(payload))


def _line(payload: bytes, columns: list[str]) -> Row:
    try:
        records = list(csv.reader([payload.decode().rstrip("\r\n")], strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadLineError(f"not a line of CSV: {error}") from None
    values = records[0] if records else []
    if len(values) != len(columns):
        raise BadLineError(f"{len(values)} values, but {len(columns)} columns are named in the address")
    return dict(zip(columns, values, strict=True))
