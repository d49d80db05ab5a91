"""Fault injection: every call of the file system fails once, one after the other; nothing is lost, and it says why.

The calls are those that Python's `os` makes for a run's folder, and then those of the C library, among them the writes
inside file objects (all of them in `benchmarks/faults.py`, some here). Kills are in `benchmarks/kills.py`.
"""

import errno
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import crashes, faults, kills
from opvi.app.learn import RunDirectory, RunError
from opvi.app.learn import _learner as learner
from opvi.running import CheckpointError
from opvi.running import _saving as saving
from tests.app.test_learning import learn

CODES = (errno.EIO, errno.ENOSPC, errno.EMFILE)
CALLS = ("open", "fsync", "pwrite", "ftruncate", "replace", "unlink", "mkdir")


class Faults:
    """Counts the calls under a folder, and lets one of them fail."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, at: int, code: int):
        self.count, self.at, self.code, self.failed = 0, at, code, ""
        for name in CALLS:
            patch.setattr(os, name, self._shim(name, getattr(os, name), folder))

    def _shim(self, name, real, folder):
        def shim(*args, **options):
            about = isinstance(args[0], int) or str(folder) in str(args[0])
            if about and self.count >= 0:
                self.count += 1
                if self.count == self.at:
                    self.failed = name
                    raise OSError(self.code, os.strerror(self.code), None if isinstance(args[0], int) else str(args[0]))
            return real(*args, **options)

        return shim


@pytest.fixture
def table(tmp_path):
    """200 rows of the columns in `test_learning`, which has their programs; one is broken."""
    path = tmp_path / "table.csv"
    kills.write_table(path, 200)
    lines = path.read_text().splitlines(keepends=True)
    lines[151] = "broken,1,1,red,1\n"
    path.write_text("".join(lines))
    return path


@pytest.mark.slow
def test_every_call_may_fail_once(table, tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "ROWS", 80)
    monkeypatch.setattr(saving, "LARGEST_SHARE", np.inf)  # save after every chunk
    options = {"first_rows": 100, "save_every": 0.0}
    whole = learn(table, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        counted = Faults(tmp_path / "runs", patch, at=0, code=0)
        learn(table, tmp_path / "runs" / "counted", **options)
    assert counted.count > 20
    seen = set()
    for at in range(1, counted.count + 1):
        code, said = CODES[at % len(CODES)], ""  # all of them with every call take three times as long, and pass, too
        folder = tmp_path / "runs" / str(at)
        with monkeypatch.context() as patch:
            fault = Faults(folder, patch, at, code)
            try:
                learn(table, folder, **options)
            except (RunError, CheckpointError, OSError) as error:
                said = str(error)
        assert os.strerror(code) in said or not said
        seen.add(fault.failed)
        done = learn(table, folder, **options)
        assert (done.rows, done.rejected, done.finished) == (199, 1, True)
        np.testing.assert_array_equal(done.engine.state.particles, whole.engine.state.particles)
        lines = (RunDirectory(folder).path / "rejected.jsonl").read_text().splitlines()
        assert len(lines) == 1
    assert {"open", "fsync", "pwrite"} <= seen


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
def test_some_calls_of_the_c_library_fail_or_stop_halfway():
    found = faults.preloaded(every=29, start=3)
    learnt, served = found["learn"], found["serve"]
    assert learnt["bad"] == served["bad"] == []
    assert min(learnt["faults"], served["faults"]) >= 10
    assert (served["lost"], served["twice"]) == (0, 0)
    assert {"write", "open"} <= set(learnt["by_call"]) & set(served["by_call"])
    assert {"EINTR: 0", "half: 0"} <= set(learnt["exit_statuses"])  # repeated, and nobody notices
    assert any(name.endswith(": 1") for name in learnt["exit_statuses"])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler")
def test_after_a_power_cut_what_is_there_was_saved_or_is_refused():
    """A few of the crash points of `python -m benchmarks.crashes`, seven of them resumed to the end."""
    found = crashes.crash(["run", "fleet", "serve"], 200, seed=3)
    assert [one["examples"] for one in found.values()] == [[], [], []]
    assert all(one["outcomes"].get("nothing there yet", 0) < 30 for one in found.values())
