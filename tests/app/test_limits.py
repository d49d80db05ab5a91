"""What a run's folder, its names and its live page are protected from."""

import os
import threading
import urllib.request

import pytest

from opvi.app.cli._learn import _called
from opvi.app.learn import RunDirectory, RunError
from opvi.app.report._server import serve


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
