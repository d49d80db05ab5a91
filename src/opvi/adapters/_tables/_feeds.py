"""Bytes of a file or a pipe as they arrive, decompressed on the fly in bounded memory."""

import gzip
import hashlib
import os
import select
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, cast

import pyarrow as pa

from opvi.adapters._tables._block import PIECE, Block, Content, SourceChangedError, TableError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # how such files begin
BEGINNING = 1 << 16  # bytes that the fingerprint covers
SMALL = 1 << 16  # bytes that are decompressed at a time


class Feed:
    """An open file or pipe. `pieces()` yields its bytes; those of a pipe as soon as they arrive.

    Reading happens in Python, so that an exception raised by a signal handler ends it at once.
    """

    def __init__(self, path: str):
        self.path, self.name = path, "standard input" if path == "-" else path
        self.size: int | None = None
        self.position = 0
        self.packed = False  # whether it is compressed; known once it is read
        self._owned = path != "-"
        self._head = b""
        try:
            self._file = os.open(path, os.O_RDONLY) if self._owned else sys.stdin.fileno()
            about = os.fstat(self._file)
        except (OSError, ValueError, AttributeError) as error:
            raise TableError(f"{self.name} cannot be read ({_why(error)}). Give a file that exists.") from None
        if stat.S_ISDIR(about.st_mode):
            self.close()
            raise TableError(f"{self.name} is a directory, but one file is read. Give the file, or pipe several in.")
        if stat.S_ISREG(about.st_mode) and self._owned:
            self.size = about.st_size

    @property
    def pipe(self) -> bool:
        """Whether this can be read only once, from its beginning."""
        return self.size is None

    @property
    def share(self) -> float | None:
        """The share of the bytes read so far."""
        return None if self.size is None else min(1.0, self.position / self.size) if self.size else 1.0

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if self._owned and self._file >= 0:
            os.close(self._file)
            self._file = -1

    def peek(self, count: int) -> bytes:
        """The first bytes, which `pieces` hands out again."""
        while len(self._head) < count:
            more = self._read(count - len(self._head))
            if not more:
                break
            self._head += more
        return self._head[:count]

    def read(self, count: int) -> bytes:
        """Return at most `count` bytes: fewer if no more have arrived, none at the end of the source."""
        if self._head:
            out, self._head = self._head[:count], self._head[count:]
            return out
        return self._read(count)

    def _read(self, count: int) -> bytes:
        if self._file < 0:
            raise TableError(f"{self.name} was closed. Open it again.")
        try:
            out = os.read(self._file, count)
        except OSError as error:
            raise TableError(f"{self.name} cannot be read further ({_why(error)}).") from None
        if not out:
            self._refuse_shorter()
        self.position += len(out)
        return out

    def _refuse_shorter(self) -> None:
        """Refuse a file from which bytes were taken away while it was read: who knows what else was changed."""
        size = os.fstat(self._file).st_size
        before = max(self.size or 0, self.position)
        if self.size is not None and size < before:
            raise SourceChangedError(
                f"{self.name} has become shorter while it was read: {before:,} bytes were there, and now it has "
                f"{size:,}. What was learnt is saved. Restore the file, then resume with --resume."
            )

    def _waiting(self) -> bool:
        """Whether a pipe has more bytes at this moment."""
        try:
            return bool(select.select([self._file], [], [], 0)[0])
        except (OSError, ValueError):
            return False

    def plain(self) -> Iterator[bytes]:
        """The bytes as they are stored, in pieces of at most 1 MiB."""
        while piece := self.read(PIECE):
            if self.pipe:  # a pipe holds 64 KiB at a time: take what a fast writer has added meanwhile
                parts, held = [piece], len(piece)
                while held < PIECE and self._waiting():
                    more = self.read(PIECE - held)
                    if not more:
                        break
                    parts.append(more)
                    held += len(more)
                piece = b"".join(parts)
            elif len(piece) < PIECE:  # what was peeked at, with what follows
                piece += self.read(PIECE - len(piece))
            yield piece

    def pieces(self) -> Iterator[bytes]:
        """The bytes, decompressed if they begin like gzip or Zstandard."""
        head = self.peek(4)
        self.packed = head.startswith((GZIP, ZSTD))
        if head.startswith(GZIP):
            return self._gathered(self._unpacked(gzip.GzipFile(fileobj=cast("IO[bytes]", _Raw(self))).read1))
        if head == ZSTD:
            stream = pa.CompressedInputStream(pa.PythonFile(_Raw(self), mode="r"), "zstd")
            return self._gathered(self._unpacked(stream.read))
        for ending in (".gz", ".zst"):
            if self.path.endswith(ending):
                raise TableError(
                    f"{self.name} does not begin like a {ending} file, but ends in {ending}. It may be damaged; "
                    "if it is not compressed, rename it."
                )
        return self.plain()

    def _unpacked(self, read: Callable[[int], bytes]) -> Iterator[bytes]:
        """Yield decompressed bytes, in pieces small enough that little is lost before a damaged part."""
        while True:
            try:
                piece = read(SMALL)
            except EOFError:
                raise TableError(self._truncated()) from None
            except (OSError, zlib.error) as error:
                if "runcated" in str(error):
                    raise TableError(self._truncated()) from None
                raise TableError(f"{self.name} is damaged after {self.position:,} bytes: {error}.") from None
            if not piece:
                return
            yield piece

    def _gathered(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Yield larger pieces of a file, which are faster to parse; pieces of a pipe stay as they are."""
        held: list[bytes] = []
        length = 0
        try:
            for piece in pieces:
                held.append(piece)
                length += len(piece)
                if self.pipe or length >= PIECE // 2:
                    whole, held, length = b"".join(held), [], 0
                    yield whole
        except TableError:
            if held:
                yield b"".join(held)
            raise
        if held:
            yield b"".join(held)

    def _truncated(self) -> str:
        return (
            f"{self.name} ends in the middle of its compressed data, after {self.position:,} bytes: it was cut off. "
            "What came before was read. Get the whole file, then resume from there."
        )

    def fingerprint(self, count: int = BEGINNING) -> str | None:
        """`<bytes>-<SHA-256>` of the beginning, in hexadecimal; None for a pipe."""
        if self.size is None:
            return None
        count = min(self.size, count)
        try:
            begin = os.pread(self._file, count, 0)
            if len(begin) < count:
                self._refuse_shorter()
            return f"{count:x}-{hashlib.sha256(begin).hexdigest()}"
        except OSError as error:
            raise TableError(f"{self.name} cannot be read ({_why(error)}).") from None


class Reader:
    """Reads the rows of one format, in order, once."""

    feed: Feed
    columns: list[str]
    notes: Sequence[str] = ()  # for the user
    got = handed = 0  # bytes of text that were read, and that were handed out in blocks
    ended = True  # whether the last line that was read has an end

    @property
    def share(self) -> float | None:
        """The share of the source handed out so far; None where its size is not known."""
        read = self.feed.share
        return None if read is None else read * min(1.0, self.handed / self.got) if self.got else read

    def counted(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """Return the same pieces; their bytes are counted."""
        for piece in pieces:
            self.got += len(piece) - piece.count(b"\r")  # which are not handed out
            self.ended = piece.endswith(b"\n")
            yield piece

    def blocks(self, skip: int, columns: list[str] | None) -> Iterator[Block]:
        """Return all blocks; those before row `skip` have no columns. All columns are read if `columns` is None."""
        raise NotImplementedError

    def content(self, block: Block) -> Content:
        """Return the content by which a block's rows are recognised, if the block does not carry it."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what the reader opened itself; the feed closes its own file."""


class _Raw:
    """A feed wrapped as a file object for gzip and pyarrow."""

    closed = False

    def __init__(self, feed: Feed):
        self.feed = feed

    def read(self, count: int) -> bytes:
        return self.feed.read(count)

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


def _why(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
