"""Rows on the disk before they are acknowledged: an append-only log, one fsync for many requests.

The log is a folder of segments, each named by the number of its first row. A segment is a sequence of groups, each
written and synced at once: a header (a mark, a checksum, the number of the first row, the rows, the bytes) and the
requests, each a line of JSON that describes it and the body as it came; before a label that came later, the request
that it belongs to, as that came. What follows the last whole group was never acknowledged and is cut off.
"""

import itertools
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from opvi.adapters._tables import Json
from opvi.adapters._tables._jsonlines import BadLineError
from opvi.adapters._tables._messages import Row, rows_of
from opvi.app.learn import RunError
from opvi.running._checkpoint import make_folder, sync_folder

MARK = b"opvi"
HEADER = struct.Struct("<4sIQII")  # the mark, CRC-32 of all that follows it, first row, rows, bytes
ENDING = ".log"
NAMELESS = b'{"key": "", "digest": "", "rows": %d, "bytes": %d}\n%b\n'  # a request without a key
SEGMENT = 1 << 26  # bytes, after which a new segment begins
LARGEST = 1 << 31  # bytes of a segment that is read
MARKS = re.compile(MARK)
KEPT = 4  # segments that stay, though all their rows are learnt: the keys in them are remembered


class LogError(RunError):
    """The log cannot be read or written; the message says what to do."""


class Entry(NamedTuple):
    """A request to learn."""

    key: str  # by which a repetition is recognised; empty for none
    digest: str  # of what was sent under a key
    first: int  # number of its first row in the log
    rows: int
    body: bytes  # its rows as JSON
    asked: bytes = b""  # of a label that came later: the rows as they were asked about

    def read(self) -> list[Row]:
        """Return its rows; raise a `BadLineError` with the reason if they are none."""
        rows = rows_of(self.body)
        asked = rows_of(self.asked) if self.asked else [{}] * len(rows)
        if {len(rows), len(asked)} != {self.rows}:
            raise BadLineError(f"{self.rows} rows were logged, but there are {len(asked)} and {len(rows)}")
        return [{**before, **row} for before, row in zip(asked, rows, strict=True)] if self.asked else rows


class Known(NamedTuple):
    """What is remembered about a request with a key."""

    digest: str
    first: int
    rows: int


class Log:
    """The log of a run, open for one writer.

    Args:
        folder: the folder of segments, created if needed.
        learnt: the number of rows of the log in the last checkpoint.
    """

    def __init__(self, folder: Path, learnt: int):
        self.folder, self.keys = folder, dict[str, Known]()
        self.broken = ""  # why nothing more can be written
        if folder.is_symlink():
            raise LogError(f"{folder} is a link, but a run's files must lie in its own folder. Delete it.")
        make_folder(folder)
        self.rows = 0  # all that were ever appended
        self._file, self._size = -1, 0
        paths = self._paths()
        for path in paths:
            if path != paths[0] and _number(path) != self.rows:
                raise LogError(
                    f"{self.folder} lacks the rows from {self.rows:,} to {_number(path):,}. Restore the file."
                )
            self.rows = _number(path)
            for entry in self._read(path, last=path == paths[-1]):
                self.rows = entry.first + entry.rows
                self._remember(entry)
        if paths and _number(paths[0]) > learnt:
            raise LogError(
                f"{self.folder} begins with row {_number(paths[0]):,}, but only {learnt:,} rows are learnt. Restore "
                "the missing files."
            )
        if self.rows < learnt:  # the log is gone, what was in it is learnt
            self.rows = learnt
            paths = []
        self._open(paths[-1] if paths else None)

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob(f"*{ENDING}") if path.stem.isdigit() and not path.is_symlink())

    def _remember(self, entry: Entry) -> None:
        if entry.key:
            self.keys[entry.key] = Known(entry.digest, entry.first, entry.rows)

    def _open(self, path: Path | None) -> None:
        """Continue a segment or begin a new one, whose name survives a crash."""
        if self._file >= 0:
            os.close(self._file)
        path = path or self.folder / f"{self.rows:015d}{ENDING}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._file).st_size
        sync_folder(self.folder)

    def close(self) -> None:
        """Close the segment."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, entries: Sequence[Entry]) -> None:
        """Write requests; when this returns they are on disk, and if it raises, none of them is."""
        if self.broken:
            raise LogError(self.broken)
        if self._size > SEGMENT:
            self._open(None)
        data = b"".join(map(_packed, entries))
        first, rows = entries[0].first, sum(entry.rows for entry in entries)
        tail = HEADER.pack(MARK, 0, first, rows, len(data))[8:]
        text = MARK + struct.pack("<I", zlib.crc32(data, zlib.crc32(tail))) + tail + data
        done = 0
        try:
            while done < len(text):
                done += os.pwrite(self._file, text[done:], self._size + done)
            os.fdatasync(self._file)
        except OSError as error:
            why = f"the log {self.folder} could not be written to: {error.strerror}."
            try:
                os.ftruncate(self._file, self._size)
                os.fsync(self._file)
            except OSError:
                self.broken = f"{why} Nothing more is learnt: free some space or repair the disk, then start again."
            raise LogError(self.broken or f"{why} Free some space, and it continues by itself.") from None
        self._size += done
        self.rows = first + rows
        for entry in entries:
            self._remember(entry)

    def after(self, row: int) -> Iterator[Entry]:
        """Yield the requests with rows from this one on."""
        paths = self._paths()
        ends = [_number(path) for path in paths[1:]] + [self.rows]
        for path, end in zip(paths, ends, strict=True):
            if end > row:
                yield from (entry for entry in self._read(path) if entry.first + entry.rows > row)

    def forget(self, row: int) -> None:
        """Delete segments whose rows all come before this one, except the last few."""
        paths = self._paths()
        for path, following in itertools.pairwise(paths[: 1 - KEPT]):
            if _number(following) > row:
                return
            for entry in self._read(path):
                if entry.key and self.keys.get(entry.key) == Known(entry.digest, entry.first, entry.rows):
                    del self.keys[entry.key]
            path.unlink()

    def _read(self, path: Path, last: bool = False) -> Iterator[Entry]:
        """Yield the requests of a segment; the last segment is truncated after its last complete group."""
        size = path.stat().st_size
        if size > LARGEST:
            raise LogError(f"{path} has {size:,} bytes, more than any part of a log, so it was not read. Restore it.")
        data = memoryview(path.read_bytes())
        at = 0
        while at < len(data):
            end = _whole(data, at)
            if end is None:
                break
            yield from _group(path, data, at, end)
            at = end
        if at == len(data):
            return
        if not last or any(_whole(data, found.start()) is not None for found in MARKS.finditer(data, at + 1)):
            raise LogError(
                f"{path} is damaged after {at:,} bytes, and rows that were acknowledged follow. Restore a copy of "
                "the file, or truncate it there to give up those rows."
            )
        os.truncate(path, at)


def _number(path: Path) -> int:
    return int(path.stem)


def _group(path: Path, data: memoryview, at: int, end: int) -> Iterator[Entry]:
    """Yield the requests of a group, which are as many, with as many rows, as it says."""
    _, _, first, rows, _ = HEADER.unpack_from(data, at)
    at, last = at + HEADER.size, first + rows
    while at < end:
        try:
            entry, at = _unpacked(data, at, first)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LogError(f"{path} is not a log that opvi wrote ({error!r}). Restore it.") from None
        first += entry.rows
        yield entry
    if at != end or first != last:
        raise LogError(f"{path} is not a log that opvi wrote: its parts do not add up. Restore it.")


def _whole(data: memoryview | bytes, at: int) -> int | None:
    """Return where the group that begins here ends; None if it is incomplete."""
    if len(data) - at < HEADER.size:
        return None
    mark, checksum, _, _, size = HEADER.unpack_from(data, at)
    end = at + HEADER.size + size
    if mark != MARK or end > len(data) or zlib.crc32(data[at + 8 : end]) != checksum:
        return None
    return end


def _packed(entry: Entry) -> bytes:
    if not entry.key:
        return NAMELESS % (entry.rows, len(entry.body), entry.body)
    about: Json = {"key": entry.key, "digest": entry.digest, "rows": entry.rows, "bytes": len(entry.body)}
    if entry.asked:
        about["asked"] = len(entry.asked)
    return json.dumps(about).encode() + b"\n" + entry.asked + entry.body + b"\n"


def _unpacked(data: memoryview, at: int, first: int) -> tuple[Entry, int]:
    line = bytes(data[at : at + 4096]).split(b"\n", 1)[0]
    about = json.loads(line)
    sizes = about["rows"], about["bytes"], about.get("asked", 0)
    texts = about["key"], about["digest"]
    if not all(type(size) is int and 0 <= size <= len(data) for size in sizes) or {*map(type, texts)} != {str}:
        raise ValueError("sizes")
    asked = at + len(line) + 1
    begin = asked + about.get("asked", 0)
    end = begin + about["bytes"]
    parts = bytes(data[begin:end]), bytes(data[asked:begin])
    return Entry(about["key"], about["digest"], first, about["rows"], *parts), end + 1
