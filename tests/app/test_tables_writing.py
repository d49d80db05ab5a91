"""Tables written block by block: what is whole gets its name, what is not leaves nothing."""

import os
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from opvi.adapters._tables import TableError, open_source
from opvi.adapters._tables._arrow import as_arrow
from opvi.adapters._tables._writing import Writer, format_of

COLUMNS = {"row": np.arange(3), "mean": np.array([1.5, np.nan, -2.0], np.float32), "label": ["a", None, 'b"c']}


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_what_is_written_is_read_back(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"out.{format}"
    with Writer(str(path), format_of(str(path))) as out:
        out.write(COLUMNS)
        out.write(COLUMNS)
        assert not path.exists()  # it appears when it is whole
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    rows = [block.columns for block in open_source(path).blocks()]
    labels = [label for columns in rows for label in columns["label"].to_pylist()]
    assert labels == COLUMNS["label"] * 2
    assert sum(columns["mean"].null_count for columns in rows) == 2


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.5, np.nan, -np.inf] * 7),
        np.arange(12, dtype=np.float32)[::-3],
        np.arange(9)[1::2],
        np.arange(4, dtype=np.uint8),
        np.zeros(0),
        np.array([True, False]),
        ["a", "", "é🙂", "nul\0"],
        ["a", None],
        [],
        [1, 2],
    ],
    ids=str,
)
def test_arrays_made_from_bytes_are_those_that_arrow_would_make(values) -> None:
    made = as_arrow(values)
    made.validate(full=True)
    gaps = np.isnan(values) if isinstance(values, np.ndarray) and values.dtype.kind == "f" else None
    expected = pa.array(values, mask=gaps) if len(values) else made
    assert made.type == expected.type
    assert made.equals(expected)


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_an_error_leaves_what_was_there(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"out.{format}"
    path.write_text("before")
    written = Writer(str(path), format).__enter__()
    written.write(COLUMNS)
    written.__exit__(RuntimeError, RuntimeError(), None)
    assert path.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_a_full_disk_is_named_with_the_file(tmp_path: Path, format: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "full"
    path.symlink_to("/dev/full")

    def fill() -> None:
        with Writer(str(path), format) as out:
            for _ in range(2000):  # more than a buffer holds
                out.write(COLUMNS)

    with pytest.raises(TableError, match=f"{path} cannot be written: No space left"):
        fill()


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    """A whole file takes the place of a plain one only: not of a device, a pipe, or a link."""
    real, link, pipe = tmp_path / "real.csv", tmp_path / "link.csv", tmp_path / "pipe"
    link.symlink_to(real)
    with Writer(str(link), "csv") as out:
        out.write(COLUMNS)
    assert link.is_symlink()
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    with Writer(str(pipe), "csv") as out:
        out.write(COLUMNS)
    reader.join(10)
    assert pipe.is_fifo()
    assert got == [real.read_bytes()]
    with pytest.raises(TableError, match="Is a directory"), Writer(str(tmp_path), "csv"):
        pass
