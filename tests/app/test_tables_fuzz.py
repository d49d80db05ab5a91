"""Malformed tables: no crash, no hang, no accepted garbage. `python -m benchmarks.fuzz` is the long form."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app import hostile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_damaged_tables(kind: str, folder: Path) -> None:
    counts = [0, 0, 0]
    for seed in range(150):
        ending, data = hostile.hostile(seed, kind)
        path = folder / f"a.{ending}"
        path.write_bytes(data)
        encoded, rejected, error = hostile.read(path)
        counts = [counts[0] + encoded, counts[1] + rejected, counts[2] + bool(error)]
    assert min(counts) > 30, counts  # the inputs are neither all sound nor all hopeless


def test_damaged_parquet(folder: Path) -> None:
    """In a process of its own: a fault in a decoder would end this one."""
    command = [sys.executable, hostile.__file__, "parquet", "0", "150", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failures"] == []
    assert report["counts"]["inputs"] == 150
    assert report["counts"]["encoded"] > 100


@settings(max_examples=100, deadline=None)
@given(data=hostile.ANYTHING, kind=st.sampled_from(["csv", "tsv", "jsonl", "parquet"]))
def test_any_bytes(folder: Path, data: bytes, kind: str) -> None:
    path = folder / f"any.{kind}"
    path.write_bytes(data)
    hostile.read(path)


@settings(max_examples=100, deadline=None)
@given(text=hostile.TEXT)
def test_any_text_after_sound_rows(folder: Path, text: str) -> None:
    path = folder / "text.csv"
    path.write_bytes(b"a,y\n1,2.5\n3,4.5\n" + text.encode())
    hostile.read(path)
    path = folder / "text.jsonl"
    path.write_bytes(b'{"a": 1, "y": 2.5}\n{"a": 2, "y": 4.5}\n' + text.encode())
    hostile.read(path)
