"""Parquet: batches of typed columns, row group by row group."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from opvi.adapters._tables._arrow import in_numpy
from opvi.adapters._tables._block import CELLS, MOST_COLUMNS, PIECE, ROWS, Block, Content, Rejected, TableError, quoted
from opvi.adapters._tables._delimited import refuse_duplicates
from opvi.adapters._tables._feeds import Feed, Reader

LARGEST_FOOTER = 1 << 24  # bytes of one text, and things in one list, of a file's description
TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())


class Parquet(Reader):
    """The rows of a Parquet file. Columns of lists, structures and maps are named, but not read."""

    def __init__(self, feed: Feed):
        self.feed = feed
        with self._errors():
            file = self._open([])
            about = file.schema_arrow
            self.columns = [str(name) for name in about.names]
            refuse_duplicates(self.columns, feed.name)
            if len(self.columns) > MOST_COLUMNS:
                raise TableError(
                    f"{feed.name} has {len(self.columns):,} columns, but at most {MOST_COLUMNS:,} are read."
                )
            self.nested = [field.name for field in about if pa.types.is_nested(field.type)]
            # A text that is stored once and used in many rows is kept so: memory stays bounded.
            self._file = self._open([field.name for field in about if is_text(field.type)])
            stored = self._file.metadata
            groups = [stored.row_group(i).num_rows for i in range(stored.num_row_groups)]
        self._groups, self.rows, self._done = groups, sum(groups), 0
        self._firsts = np.cumsum([0, *groups])[:-1]  # the first row of each

    def _open(self, texts: list[str]) -> parquet.ParquetFile:
        return parquet.ParquetFile(
            self.feed.path,
            read_dictionary=texts,
            memory_map=False,
            buffer_size=PIECE,
            pre_buffer=False,
            thrift_string_size_limit=LARGEST_FOOTER,
            thrift_container_size_limit=LARGEST_FOOTER,
            page_checksum_verification=True,
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TableError:
            raise
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, IndexError, MemoryError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            raise TableError(f"{self.feed.name} cannot be read as Parquet: {why}. It may be damaged.") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def share(self) -> float:
        """The share of the rows read so far."""
        return min(1.0, self._done / self.rows) if self.rows else 1.0

    def blocks(self, skip: int, columns: list[str] | None) -> Iterator[Block]:
        """Blocks of typed columns; row groups before row `skip` are not decoded."""
        group = first = 0
        while group < len(self._groups) and first + self._groups[group] <= skip:
            yield Block({}, first, self._groups[group], [])
            first += self._groups[group]
            group += 1
        wanted = [name for name in (self.columns if columns is None else columns) if name not in self.nested]
        size = max(1, min(ROWS, CELLS // max(1, len(self.columns))))
        with self._errors():
            batches = self._file.iter_batches(size, list(range(group, len(self._groups))), wanted, use_threads=False)
        while True:
            with self._errors():
                batch = next(batches, None)
                if batch is None:
                    return
                block = _block(batch, first, self.nested)
            first += block.rows
            self._done = first
            yield block

    def content(self, block: Block) -> Content:
        """Return the hash of a row group's bytes for its first row, and nothing for the others."""
        text, ends = b"", np.zeros(block.rows, np.int64)
        last = block.first + block.rows
        for group in range(*np.searchsorted(self._firsts, (block.first, last)).tolist()):
            if self._groups[group]:
                ends[self._firsts[group] - block.first :] += hashlib.sha256().digest_size
                text += self._digest(group)
        return Content(text, ends)

    def _digest(self, group: int) -> bytes:
        """Hash all bytes between the previous row group and the end of this one, and their metadata."""
        begin, end = self._end(group - 1) if group else 0, self._end(group)
        out = hashlib.sha256(f"{self._file.schema_arrow} {self._groups[group]}".encode())
        try:
            with Path(self.feed.path).open("rb") as file:
                file.seek(begin)
                while begin < end and (piece := file.read(min(PIECE, end - begin))):
                    out.update(piece)
                    begin += len(piece)
        except OSError as error:
            raise TableError(f"{self.feed.name} cannot be read further ({error.strerror}).") from None
        return out.digest()

    def _end(self, group: int) -> int:
        """Return where the bytes of a row group end, according to the metadata."""
        about = self._file.metadata.row_group(group)
        chunks = [about.column(i) for i in range(about.num_columns)]
        ends = [
            (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size for chunk in chunks
        ]
        return max(0, min(self.feed.size or 0, max(ends, default=0)))


def _block(batch: pa.RecordBatch, first: int, nested: list[str]) -> Block:
    """Return a batch as a block; rows whose text is not UTF-8 are malformed."""
    columns, faults = {}, {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        array.validate(full=not is_text(array.type))
        columns[name], bad = as_strings(array) if is_text(array.type) else (array, np.empty(0, int))
        faults.update(dict.fromkeys(bad.tolist(), name))
    malformed = []
    if faults:
        keep = np.delete(np.arange(batch.num_rows), list(faults))
        columns = {name: array.take(pa.array(keep)) for name, array in columns.items()}
        for row, name in sorted(faults.items()):
            malformed.append(Rejected(first + row, f"column {quoted(name)}: bytes that are not UTF-8", ""))
    every = np.arange(batch.num_rows - len(faults))
    return Block(columns, first, batch.num_rows, malformed, None, dict.fromkeys(nested, every))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text, or bytes that may be text."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in TEXTS or pa.types.is_fixed_size_binary(kind)


def as_strings(array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Return text as `string`, dictionary-encoded if it was before, and the rows that are not UTF-8."""
    texts = array.dictionary if pa.types.is_dictionary(array.type) else array
    bad = np.zeros(len(texts), bool)
    try:
        texts = texts.cast(pa.binary()).cast(pa.string())
        texts.validate(full=True)
    except pa.ArrowInvalid:
        decoded = [_decoded(value) for value in texts.cast(pa.binary()).to_pylist()]
        bad = np.array([value is False for value in decoded], bool)
        texts = pa.array([value or None for value in decoded], pa.string())
    if not pa.types.is_dictionary(array.type):
        return texts, np.flatnonzero(bad)
    places = in_numpy(array.indices.cast(pa.int64()), -1)
    rows = np.flatnonzero(np.append(bad, False)[places]) if bad.any() else np.empty(0, int)
    return pa.DictionaryArray.from_arrays(array.indices, texts), rows


def _decoded(value: bytes | None) -> str | bool | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return False
