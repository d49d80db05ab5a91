"""Open any table, a file or a pipe; the format follows from its name or its first bytes."""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Protocol

from opvi.adapters._tables._block import (
    MOST_BAD,
    MOST_BAD_TEXT,
    ROWS,
    Block,
    SourceChangedError,
    TableError,
    cut,
    quoted,
)
from opvi.adapters._tables._delimited import Delimited
from opvi.adapters._tables._feeds import BEGINNING, GZIP, ZSTD, Feed, Reader
from opvi.adapters._tables._jsonlines import JsonLines
from opvi.adapters._tables._parquet import Parquet
from opvi.adapters._tables._writing import WRITTEN
from opvi.running._cursor import Cursor, Trail

FORMATS = ("csv", "tsv", "jsonl", "parquet")
ENDINGS = {**WRITTEN, ".tsv": "tsv", ".json": "jsonl"}


class RowSource(Protocol):
    """Rows in order, once, from a file, a pipe or a broker; what `Learner.learn` reads from.

    `blocks` yields rows; `passed` is called with those that were learnt (in order, each once; parts of a block are cut
    with `cut`) and returns the cursor after them. That cursor is stored in the checkpoint with the model, so both are
    saved or neither is. To resume, the source is opened again at a cursor. It then skips what lies before and
    raises a `SourceChangedError` if that is not what was learnt; where the past cannot be read again, as in a broker,
    `Cursor.position` is the number to continue at, and `Cursor.digest` anything that identifies the source.
    """

    name: str  # for messages, and to open it again
    notes: list[str]  # for the user
    fingerprint: str | None  # a quick look at who it is; None for what cannot be read again
    once: bool  # whether what it handed out is gone, so that it must be learnt or saved before the run ends

    @property
    def semicolons(self) -> bool:
        """Whether semicolons separate fields, as they do where the comma is the decimal sign."""

    def blocks(self) -> Iterator[Block]:
        """Return the blocks not handed out yet, each as soon as it has a row."""

    def passed(self, block: Block) -> Cursor:
        """Record that the rows of a block were learnt; return the position after them."""

    def close(self) -> None:
        """Close it."""


class Source:
    """Rows of a file or a pipe, in order, once: a `RowSource`. Made by `open_source`."""

    def __init__(self, feed: Feed, reader: Reader, skip: int, digest: str | None, columns: list[str] | None):
        self._feed, self._reader = feed, reader
        self.name: str = feed.name
        self.columns: list[str] = list(reader.columns)
        self.notes: list[str] = list(reader.notes)  # for the user
        self.fingerprint: str | None = feed.fingerprint()
        self.once = feed.pipe
        self._begun = 0  # bytes that the fingerprint covers
        self._plain = not isinstance(reader, Parquet) and not feed.packed
        self._trail = Trail()
        self._blocks = self._after(skip, digest, columns)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def semicolons(self) -> bool:
        """Whether semicolons separate the fields, as they do where the comma is the decimal sign."""
        return isinstance(self._reader, Delimited) and self._reader.grammar.delimiter == ";"

    def close(self) -> None:
        """Close the file. Standard input stays open."""
        self._blocks = iter(())
        self._reader.close()
        self._feed.close()

    def begins_like(self, fingerprint: str | None) -> bool:
        """Return whether this may be the file with that fingerprint, perhaps with rows appended. False for a pipe."""
        if fingerprint is None or self.fingerprint is None:
            return False
        count, mark, _ = fingerprint.partition("-")
        return bool(mark) and self._feed.fingerprint(int(count, 16)) == fingerprint

    def blocks(self) -> Iterator[Block]:
        """Return the blocks not handed out yet; those of a pipe as soon as there is a row."""
        return self._blocks

    def passed(self, block: Block) -> Cursor:
        """Record that the rows of a block were learnt; return the position after them."""
        if block.first != self._trail.row:
            raise ValueError(f"row {block.first} was passed after row {self._trail.row} of {self.name}.")
        self._pass(block)
        if self._begun < BEGINNING and not self.once:  # what was not learnt yet may still be corrected
            self._begun = self._trail.position if self._plain else BEGINNING
            self.fingerprint = self._feed.fingerprint(min(BEGINNING, self._begun))
        return self._trail.cursor

    def check(self) -> None:
        """Skip the rows that were learnt before; raise an error if they differ from those."""
        first = next(self._blocks, None)
        self._blocks = chain([] if first is None else [first], self._blocks)

    def _pass(self, block: Block) -> None:
        content = block.content if block.content is not None else self._reader.content(block)
        self._trail.add(content.text, block.rows)

    def _after(self, skip: int, digest: str | None, columns: list[str] | None) -> Iterator[Block]:
        """Skip the first rows, which must have the digest; yield the others."""
        for block in self._whole(skip, columns):
            end = block.first + block.rows
            if block.first < skip:
                self._pass(cut(block, block.first, skip))
                if end < skip:
                    continue
                self._recognise(skip, digest)
            for start in range(max(skip, block.first), end, ROWS):
                yield cut(block, start, start + ROWS)
        if self._trail.row < skip and digest is not None:
            self._recognise(skip, digest)

    def _recognise(self, skip: int, digest: str | None) -> None:
        found = self._trail.cursor
        if digest is not None and (found.row, found.digest) != (skip, digest):
            short = found.row < skip
            raise SourceChangedError(
                f"{self.name} has changed: {skip:,} rows of it were learnt, "
                f"{f'but now it has {found.row:,}' if short else 'but they are not its first rows now'}. Restore "
                "the old file, or learn from the new one under another name or in another run (`--run DIR`)."
            )

    def _whole(self, skip: int, columns: list[str] | None) -> Iterator[Block]:
        """Yield blocks of whole lines; in a file, an unterminated last line comes alone."""
        held: Block | None = None
        blocks = self._read(skip, columns)
        if self.once:
            yield from blocks
            return
        try:
            for block in blocks:
                if held is not None:
                    yield held
                held = block
        except TableError:
            if held is not None:
                yield held
            raise
        if held is None:
            return
        last = held.first + held.rows - (not self._reader.ended)
        if last > held.first:
            yield cut(held, held.first, last)
        if not self._reader.ended:
            yield cut(held, last, last + 1)._replace(unended=True)

    def _read(self, skip: int, columns: list[str] | None) -> Iterator[Block]:
        bad = text = 0  # malformed rows since the last sound one, and their characters
        for block in self._reader.blocks(skip, columns):
            block = block._replace(share=self._reader.share)
            whole = len(block.malformed) == block.rows
            bad = bad + block.rows if whole else _last_bad(block)
            text = text + sum(len(one.text) for one in block.malformed) if whole else 0
            if bad > MOST_BAD or text > MOST_BAD_TEXT:
                raise TableError(
                    f"{self.name}: the last {bad:,} rows, up to row {block.first + block.rows:,}, are all malformed, "
                    f"so reading stopped. The last one: {block.malformed[-1].reason}. Look for a quote that is "
                    "opened and not closed, or for another file joined to this one."
                )
            yield block


def _last_bad(block: Block) -> int:
    """Return the number of malformed rows at the end of a block."""
    numbers = block.numbers
    return block.first + block.rows - 1 - int(numbers[-1]) if len(numbers) else block.rows


def open_source(
    path: str | os.PathLike[str],
    format: str | None = None,
    skip: int = 0,
    columns: list[str] | None = None,
    digest: str | None = None,
) -> Source:
    """Open a table.

    Args:
        path: a file, plain or compressed with gzip or Zstandard; `-` is standard input.
        format: csv, tsv, jsonl or parquet. Determined by the file's ending if omitted; for a pipe, by its first bytes.
        skip: rows to leave out at the beginning. They are hashed, but not parsed.
        columns: the columns to read; all if omitted.
        digest: the digest in the cursor after these rows; if theirs differs, reading or `check` raises a
            `SourceChangedError`.
    """
    if format is not None and format not in FORMATS:
        raise TableError(f"the format {quoted(format)} is not known. Formats: {', '.join(FORMATS)}.")
    feed = Feed(os.fspath(path))
    try:
        reader = _reader(feed, format)
        if columns is not None and not isinstance(reader, JsonLines):  # there a key may come later
            absent = [name for name in columns if name not in reader.columns]
            if absent:
                raise TableError(f"{feed.name} has no column {quoted(absent[0])}. {named(reader.columns)}")
        return Source(feed, reader, skip, digest, columns)
    except BaseException:
        feed.close()
        raise


def _reader(feed: Feed, format: str | None) -> Reader:
    format = format or (None if feed.pipe else _by_name(feed.path))
    if feed.peek(4) == b"PAR1":
        format = format or "parquet"
    if format == "parquet":
        if feed.pipe:
            raise TableError(f"{feed.name} is Parquet in a pipe, but Parquet is read from a file. Save it first.")
        if feed.peek(4).startswith((GZIP, ZSTD)):
            raise TableError(
                f"{feed.name} is a compressed Parquet file, but Parquet compresses internally. Decompress it first."
            )
        return Parquet(feed)
    pieces = feed.pieces()
    if format is None:
        pieces, format = _by_content(pieces)
        if format == "parquet":
            raise TableError(f"{feed.name} is Parquet in a pipe, but Parquet is read from a file. Save it first.")
    if format == "jsonl":
        return JsonLines(feed, pieces)
    return Delimited(feed, pieces, "\t" if format == "tsv" else None)


def _by_name(path: str) -> str:
    name = path.lower()
    for packing in (".gz", ".zst"):
        name = name.removesuffix(packing)
    ending = Path(name).suffix
    if ending not in ENDINGS:
        raise TableError(
            f"{path} ends in {quoted(ending)}, which names no format. Known endings: {', '.join(ENDINGS)}, each also "
            f"with .gz or .zst. Rename the file, or name the format: {', '.join(FORMATS)}."
        )
    return ENDINGS[ending]


def _by_content(pieces: Iterator[bytes]) -> tuple[Iterator[bytes], str]:
    """Return the format that the first bytes look like, without consuming them."""
    head = b""
    for piece in pieces:
        head += piece
        if len(head.lstrip()) >= 4:
            break
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    kind = "parquet" if head.startswith(b"PAR1") else "jsonl" if begin.startswith((b"{", b"[")) else "csv"
    return chain([head] if head else [], pieces), kind


def named(columns: list[str]) -> str:
    """List the columns, for a message."""
    some = ", ".join(quoted(name) for name in columns[:20])
    more = f" and {len(columns) - 20:,} more" if len(columns) > 20 else ""
    return f"It has {some}{more}." if columns else "It has none."
