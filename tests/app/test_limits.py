"""What a run's folder, its names and its live page are protected from."""

import os
import socket
import threading
import time
import urllib.request
from contextlib import suppress

import numpy as np
import pytest

from benchmarks import kills
from opvi.app.cli._learn import _called, _served
from opvi.app.learn import RunDirectory, RunError
from opvi.app.learn._starting import Asked, ready
from opvi.app.learn._stopping import Stop
from opvi.app.report._server import serve
from tests.app.test_learning import SMALL, learn


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/data.2024.csv", "data.2024"),
        ("data.2025.csv.gz", "data.2025"),
        ("A.PARQUET", "A"),
        ("v1.2", "v1.2"),
        (".csv", "csv"),
        ("nats://host/rows", "rows"),
    ],
)
def test_sources_that_differ_have_runs_that_differ(source, name):
    assert _called(source) == name


def test_a_file_with_another_name_is_not_written_to(tmp_path):
    run = RunDirectory(tmp_path)
    other = tmp_path / "other.txt"
    other.write_text("precious")
    os.link(other, tmp_path / "rejected.jsonl")
    with pytest.raises(RunError, match="it has another name elsewhere"):
        run.open_rejected(0)
    assert other.read_text() == "precious"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_named_pipe_in_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run.json")
    with pytest.raises(RunError, match="not a regular file, so it was not read"):
        RunDirectory(tmp_path).about()
    os.mkfifo(tmp_path / "rejected.jsonl")
    with pytest.raises(RunError, match="not a regular file"):
        RunDirectory(tmp_path).open_rejected(0)


@pytest.mark.slow
def test_slow_connections_to_the_live_page_do_not_harm_learning(tmp_path):
    table = tmp_path / "table.csv"
    kills.write_table(table, 800)
    whole = learn(table, tmp_path / "whole")
    run, ended, sent = RunDirectory(tmp_path / "watched"), threading.Event(), []

    def dribble(held):
        while not ended.wait(0.05):
            for one in held:
                with suppress(OSError):  # closed unheard
                    sent.append(one.send(b"X"))

    with run.checkpoints as kept:
        made = ready(run, kept, Asked(str(table), target="y", settings=SMALL), Stop())
        with made.source, _served(made.learner, run.path, 0) as server:
            held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
            for one in held:
                with suppress(OSError):
                    one.send(b"GET / HTTP/1.1\r\nX-Slow: ")
            slow = threading.Thread(target=dribble, args=(held,))
            slow.start()
            made.learner.learn(made.source, made.first, Stop())
            ended.set()
            slow.join()
            for one in held:
                one.close()
            time.sleep(0.5)
            with urllib.request.urlopen(server.url, timeout=60) as page:
                assert b"Rows learnt" in page.read()
    assert sent  # some were slow all the while
    np.testing.assert_array_equal(made.learner.engine.state.particles, whole.engine.state.particles)
    assert made.learner.rows == whole.rows


def test_the_server_ends_after_the_page_that_is_being_made():
    """It uses JAX, which would abort the process if it was torn down meanwhile."""
    begun, go, made = threading.Event(), threading.Event(), []

    def page():
        begun.set()
        go.wait(30)
        made.append(True)
        return "page"

    server = serve(page)

    def ask():
        with urllib.request.urlopen(server.url, timeout=30) as answer:
            assert answer.read() == b"page"

    browser = threading.Thread(target=ask, daemon=True)
    browser.start()
    assert begun.wait(30)
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    go.set()
    closing.join(30)
    assert made == [True]
    assert not closing.is_alive()
    browser.join(30)
