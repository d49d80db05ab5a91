"""Tables written block by block: CSV, JSON lines or Parquet, to a pipe or to a file that appears once complete."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from opvi.adapters._tables._arrow import as_arrow
from opvi.adapters._tables._block import TableError, quoted
from opvi.types import ArrayLike

WRITTEN = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}


def format_of(path: str) -> str:
    """Return the format for a file name; CSV for a pipe."""
    if path == "-":
        return "csv"
    ending = Path(path).suffix.lower()
    if ending not in WRITTEN:
        raise TableError(
            f"{path} ends in {quoted(ending)}, but predictions are written to {', '.join(WRITTEN)}. Rename it, or name "
            "the format."
        )
    return WRITTEN[ending]


class Writer:
    """Use as `with Writer(path, format) as out: out.write(columns)`; an error leaves no file behind."""

    def __init__(self, path: str, format: str):
        self.path, self.format = path, format
        if format not in set(WRITTEN.values()):
            raise TableError(
                f"the format {quoted(format)} is not known. Formats: {', '.join(sorted(set(WRITTEN.values())))}."
            )
        if path == "-" and format == "parquet":
            raise TableError("Parquet is written to a file, not to a pipe: give a name with `-o`.")
        self._temporary: str | None = None
        self._parquet: pyarrow.parquet.ParquetWriter | None = None
        self._begun = False

    def __enter__(self) -> Self:
        if self.path == "-":
            self._file: IO[bytes] = sys.stdout.buffer
            return self
        self._place = Path(self.path).resolve()  # what a link stands for is written, and the link stays
        try:
            if self._place.exists() and not self._place.is_file():  # a device or a named pipe; a folder is an error
                self._file = self._place.open("wb")
                return self
            handle, self._temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=self._place.parent)
        except OSError as error:
            raise TableError(f"{self.path} cannot be written: {error.strerror}.") from None
        self._file = os.fdopen(handle, "wb")
        return self

    def write(self, columns: Mapping[str, ArrayLike]) -> None:
        """Write some rows: names to arrays of numbers (NaN is written as a gap) or lists of strings."""
        table = pa.table({name: as_arrow(values) for name, values in columns.items()})
        with self._errors():
            if self.format == "parquet":
                self._parquet = self._parquet or pyarrow.parquet.ParquetWriter(self._file, table.schema)
                self._parquet.write_table(table)
            elif self.format == "csv":
                options = pyarrow.csv.WriteOptions(include_header=not self._begun)
                pyarrow.csv.write_csv(table, self._file, options)
            else:
                lines = (json.dumps(row, ensure_ascii=False) for row in table.to_pylist())
                self._file.write("".join(line + "\n" for line in lines).encode())
            self._begun = True
            if self.path == "-":
                self._file.flush()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._errors():
                self._finish(whole=kind is None)
        except TableError:
            if kind is None:  # otherwise the first error is the one to report
                raise
        finally:
            if self._temporary is not None:
                Path(self._temporary).unlink(missing_ok=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # whoever reads has enough: not an error to report
            raise
        except OSError as error:
            why = error.strerror or error
            raise TableError(f"{self.path} cannot be written: {why}. Make room, or choose another place.") from None

    def _finish(self, whole: bool) -> None:
        """Close everything that is open, even after errors; rename a complete file to its final name."""
        try:
            if self._parquet is not None:
                self._parquet.close()
        finally:
            if self.path != "-":
                self._file.close()
        if whole and self._temporary is not None:
            Path(self._temporary).chmod(0o644)
            Path(self._temporary).replace(self._place)
            self._temporary = None
