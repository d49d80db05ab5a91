"""Tables written block by block: CSV, JSON lines or Parquet, to a file that appears when it is whole, or to a pipe."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from opvi.tables.block import TableError, quoted

WRITTEN = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".pq": "parquet"}


def format_of(path: str) -> str:
    """The format that a file's name asks for; CSV for a pipe."""
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
    """`with Writer(path, format) as out: out.write(columns)`; an error on the way leaves no file behind."""

    def __init__(self, path: str, format: str):
        self.path, self.format = path, format
        if format not in set(WRITTEN.values()):
            raise TableError(
                f"the format {quoted(format)} is not known. Formats: {', '.join(sorted(set(WRITTEN.values())))}."
            )
        if path == "-" and format == "parquet":
            raise TableError("Parquet is written to a file, not to a pipe: give a name with `-o`.")
        self._temporary: str | None = None
        self._parquet: Any = None
        self._begun = False

    def __enter__(self) -> Self:
        if self.path == "-":
            self._file: Any = sys.stdout.buffer
            return self
        folder = Path(self.path).absolute().parent
        try:
            handle, self._temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=folder)
        except OSError as error:
            raise TableError(f"{self.path} cannot be written: {error.strerror}.") from None
        self._file = os.fdopen(handle, "wb")
        return self

    def write(self, columns: Mapping[str, Any]) -> None:
        """Some rows: names to arrays of numbers (NaN is written as a gap) or lists of texts."""
        table = pa.table({name: _array(values) for name, values in columns.items()})
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
        if self._parquet is not None:
            self._parquet.close()
        if self._temporary is None:
            return
        self._file.close()
        if kind is None:
            Path(self._temporary).chmod(0o644)
            Path(self._temporary).replace(self.path)
        else:
            Path(self._temporary).unlink(missing_ok=True)


def _array(values: Any) -> Any:
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return pa.array(values, mask=np.isnan(values))
    return pa.array(values)
