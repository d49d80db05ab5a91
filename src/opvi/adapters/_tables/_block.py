"""What readers produce: blocks of raw rows, rejected rows, and the limits that keep memory bounded."""

from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

Json = dict[str, Any]  # an object of JSON
PIECE = 1 << 20  # bytes of text in a block, and the most that one record may have
ROWS = 8_192  # in a block
CELLS = 1 << 20  # rows × columns in a block of JSON lines, where every row may bring new keys
LONGEST_LINE = 1 << 28  # bytes: a line with more ends the reading
MOST_BAD, MOST_BAD_TEXT = 100_000, 1 << 25  # malformed rows one after the other, and their text: more end the reading
MOST_COLUMNS = 10_000  # of a source
SHOWN = 2_000  # characters of a rejected row that are kept


class TableError(ValueError):
    """A source that cannot be read as requested; the message says what to do."""


class SourceChangedError(TableError):
    """A source whose first rows are not those that were learnt."""


class Rejected(NamedTuple):
    """A row that was rejected, and why."""

    row: int  # its number in the source, from 0; malformed rows count as well
    reason: str
    text: str  # the row as it stood there, or its values as JSON; at most 2,000 characters


class Content(NamedTuple):
    """A block's rows as they appear in the source, to recognise them by."""

    text: bytes | memoryview
    ends: np.ndarray  # [rows]: where each one ends in the text

    @classmethod
    def of(cls, rows: list[bytes]) -> Self:
        """Return the content of consecutive rows."""
        return cls(b"".join(rows), np.cumsum([len(row) for row in rows], dtype=np.int64))

    def part(self, start: int, stop: int) -> "Content":
        """Return the content of some rows."""
        begin, end = (int(self.ends[at - 1]) if at else 0 for at in (start, stop))
        return Content(memoryview(self.text)[begin:end], self.ends[start:stop] - begin)


class Block(NamedTuple):
    """Rows in the order of the source, as raw values."""

    columns: dict[str, pa.Array]  # of the well-formed rows; text in CSV and JSON lines
    first: int  # number of the first row in the source
    rows: int  # of the source that this block used up, malformed ones included
    malformed: list[Rejected]
    share: float | None = None  # of the source's bytes read so far; None where the size is not known
    nested: dict[str, np.ndarray] = {}  # noqa: RUF012 (never written to): columns to the rows that hold lists or objects

    open: bool = False  # whether other rows may bring other columns, as in JSON lines
    content: Content | None = None  # None where the source keeps it otherwise
    unended: bool = False  # one row whose line has no end yet: the last of a file, which may still be written

    @property
    def numbers(self) -> np.ndarray:
        """Source row numbers of the well-formed rows."""
        out = np.arange(self.first, self.first + self.rows, dtype=np.int64)
        if not self.malformed:
            return out
        return np.delete(out, [rejected.row - self.first for rejected in self.malformed])


def cut(block: Block, start: int, stop: int) -> Block:
    """Return the part of a block between two source rows, excluding the second."""
    start, stop = max(start, block.first), min(stop, block.first + block.rows)
    stop = max(start, stop)
    if (start, stop) == (block.first, block.first + block.rows):
        return block
    first, last = (int(i) for i in np.searchsorted(block.numbers, (start, stop)))
    columns = {name: values.slice(first, last - first) for name, values in block.columns.items()}
    nested = {name: at[(at >= first) & (at < last)] - first for name, at in block.nested.items()}
    malformed = [rejected for rejected in block.malformed if start <= rejected.row < stop]
    content = block.content and block.content.part(start - block.first, stop - block.first)
    return Block(columns, start, stop - start, malformed, block.share, nested, block.open, content, block.unended)


def shown(text: bytes | str) -> str:
    """Return the beginning of a row in readable form; bytes that are not UTF-8 become \ufffd."""
    if isinstance(text, bytes):
        text = text[: 4 * SHOWN].decode("utf-8", "replace")
    return text[:SHOWN]


def quoted(name: str) -> str:
    """Return a name or value for a message: on one line and short."""
    short = name if len(name) <= 60 else name[:57] + "..."
    return repr(short)
