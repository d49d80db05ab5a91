"""Stopping: soon, whatever the process is doing, and without losing a row."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from opvi.app.learn import RunDirectory, Stopped
from opvi.app.learn import _learner as learner
from opvi.app.learn._predict import learnt
from tests.app.test_learning import learn, stopping_after

# A call of a library that never ends and lets no handler of Python run, as the compiler does for minutes.
BUSY = """
import ctypes, sys
from opvi.app.cli._signals import handled

with handled(lambda *_: None, ["opvi", "learn", "--resume"]) as deadline:
    deadline.lossless = sys.argv[1] == "file"
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    print("busy", flush=True)
    libc.pthread_mutex_lock(mutex)
    print("finished", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a mutex of zeros is Linux's")
@pytest.mark.parametrize(
    ("source", "signals", "status", "words"),
    [
        ("file", ["SIGTERM"], 143, "Stopped by SIGTERM. What was learnt since the last checkpoint is read again. To"),
        ("pipe", ["SIGINT", "SIGINT"], 130, "Ended at once, without saving."),
    ],
)
def test_a_process_that_is_busy_inside_a_library_ends_all_the_same(source, signals, status, words):
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "busy\n"
    for name in signals:
        process.send_signal(getattr(signal, name))
        time.sleep(0.2)
    try:
        out, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (status, "")
    assert words in told


@pytest.mark.slow
def test_a_pipe_that_is_stopped_keeps_the_rows_it_gave(tmp_path, monkeypatch):
    """They wait in the checkpoint, are learnt first when the run is resumed, and the bits are those of no stop."""
    monkeypatch.setattr(learner, "ROWS", 80)
    rng = np.random.default_rng(0)
    rows = [f"{a:.6f},{2 * a + b:.6f}\n" for a, b in rng.normal(size=(500, 2))]

    def pipe(lines, **more):
        read, write = os.pipe()
        os.write(write, ("x,y\n" + "".join(lines)).encode())  # less than a pipe holds
        os.close(write)
        with monkeypatch.context() as patch, os.fdopen(read) as end:
            patch.setattr(sys, "stdin", end)
            return learn("-", tmp_path / "run", first_rows=100, **more)

    with pytest.raises(Stopped):
        pipe(rows[:430], **stopping_after(2))
    tree = learnt(RunDirectory(tmp_path / "run")).tree
    held = len(tree["waiting"]["y"])
    assert held > 200
    assert tree["rows"] + held == 430
    with pytest.raises(Stopped):  # and again, before they are all learnt
        pipe(rows[430:450], stop=stopped())
    assert len(learnt(RunDirectory(tmp_path / "run")).tree["waiting"]["y"]) == held - 20
    done = pipe(rows[430:])
    assert done.rows == 500
    path = tmp_path / "whole.csv"
    path.write_text("x,y\n" + "".join(rows))
    whole = learn(path, tmp_path / "whole", first_rows=100)
    np.testing.assert_array_equal(done.engine.state.particles, whole.engine.state.particles)


def stopped():
    """A signal that has come already."""
    stop = learner.Stop()
    stop.asked = "SIGTERM"
    return stop
