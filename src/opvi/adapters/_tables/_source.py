"""One way to open all of them: a file or a pipe, by its name or its first bytes."""

import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from opvi.adapters._tables._block import MOST_BAD, MOST_BAD_TEXT, ROWS, Block, TableError, cut, quoted
from opvi.adapters._tables._delimited import Delimited
from opvi.adapters._tables._feeds import GZIP, ZSTD, Feed, Reader
from opvi.adapters._tables._jsonlines import JsonLines
from opvi.adapters._tables._parquet import Parquet
from opvi.adapters._tables._writing import WRITTEN

FORMATS = ("csv", "tsv", "jsonl", "parquet")
ENDINGS = {**WRITTEN, ".tsv": "tsv", ".json": "jsonl"}


class Source:
    """Rows of a file or a pipe, in order, once. Made by `open_source`."""

    def __init__(self, feed: Feed, reader: Reader, skip: int, columns: list[str] | None):
        self._feed, self._reader = feed, reader
        self.name: str = feed.name
        self.columns: list[str] = list(reader.columns)
        self.notes: list[str] = list(reader.notes)  # for the user
        self.fingerprint: str | None = feed.fingerprint()
        self._blocks = self._read(skip, columns)

    def __enter__(self) -> "Source":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def semicolons(self) -> bool:
        """Whether semicolons separate the fields, as where a comma is the decimal sign."""
        return isinstance(self._reader, Delimited) and self._reader.grammar.delimiter == ";"

    def close(self) -> None:
        """Close the file. Standard input stays open."""
        self._blocks = iter(())
        self._reader.close()
        self._feed.close()

    def begins_like(self, fingerprint: str | None) -> bool:
        """Whether this is the file that had the fingerprint, or one to which rows were added. False for a pipe."""
        if fingerprint is None or self.fingerprint is None:
            return False
        count, mark, _ = fingerprint.partition("-")
        return bool(mark) and self._feed.fingerprint(int(count, 16)) == fingerprint

    def blocks(self) -> Iterator[Block]:
        """Return the blocks that were not handed out yet; a pipe's come as soon as there is a row."""
        return self._blocks

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
                    f"so it is not read on. The last one: {block.malformed[-1].reason}. Look for a quote that is "
                    "opened and not closed, or for another file joined to this one."
                )
            end = block.first + block.rows
            for start in range(max(skip, block.first), end, ROWS):
                yield cut(block, start, start + ROWS)


def _last_bad(block: Block) -> int:
    """Malformed rows at the end of a block."""
    numbers = block.numbers
    return block.first + block.rows - 1 - int(numbers[-1]) if len(numbers) else block.rows


def open_source(
    path: str | os.PathLike[str], format: str | None = None, skip: int = 0, columns: list[str] | None = None
) -> Source:
    """Open a table.

    Args:
        path: a file, plain or compressed with gzip or Zstandard; `-` is standard input.
        format: csv, tsv, jsonl or parquet. Determined by the file's ending if omitted; for a pipe, by its first bytes.
        skip: rows to leave out at the beginning. Parquet leaves out whole row groups unread, text is not parsed.
        columns: the columns to read; all if omitted.
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
        return Source(feed, reader, skip, columns)
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
            raise TableError(f"{feed.name} is compressed from outside; Parquet compresses within. Decompress it first.")
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
            f"with .gz or .zst. Rename the file, or say which it is: {', '.join(FORMATS)}."
        )
    return ENDINGS[ending]


def _by_content(pieces: Iterator[bytes]) -> tuple[Iterator[bytes], str]:
    """The format that the first bytes look like; nothing of them is lost."""
    head = b""
    for piece in pieces:
        head += piece
        if len(head.lstrip()) >= 4:
            break
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    kind = "parquet" if head.startswith(b"PAR1") else "jsonl" if begin.startswith((b"{", b"[")) else "csv"
    return chain([head] if head else [], pieces), kind


def named(columns: list[str]) -> str:
    """The columns there are, for a message."""
    some = ", ".join(quoted(name) for name in columns[:20])
    more = f" and {len(columns) - 20:,} more" if len(columns) > 20 else ""
    return f"It has {some}{more}." if columns else "It has none."
