"""`opvi learn --distributed`: two processes, one of which may die, learn what one process learns."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from opvi.app import cli
from opvi.app.learn import RunDirectory
from opvi.app.learn._predict import learnt
from opvi.tracking import kept_rows

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # programs run once
ROWS, BATCH = 395, 20  # the last batch is not full, and of two files the second ends early
MODEL = ["--target", "y", "--hidden", "none", "--particles", "4"]
# 20 rounds in float32, added up in another order. Differences grow with the rounds: on a table like this one, inputs
# changed by 1e-7 moved the particles of one process by 4e-6 after 20 rounds, and by 1e-4 after 200.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A table, and the same rows in two files, each with its part of every batch and a row that is rejected."""
    folder = tmp_path_factory.mktemp("distributed")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 2))
    y = 2 * x[:, 0] - x[:, 1] + 0.3 * rng.normal(size=ROWS)
    rows = [f"{a:.5f},{b:.5f},{c:.5f}" for (a, b), c in zip(x, y, strict=True)]
    owner = np.arange(ROWS) % BATCH // (BATCH // 2)
    for name, mine in [("all", owner >= 0), ("part-0", owner == 0), ("part-1", owner == 1)]:
        lines = [row for row, taken in zip(rows, mine, strict=True) if taken]
        lines.insert(90, f"{name},0,0")
        (folder / f"{name}.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")
    assert cli.main(["learn", str(folder / "all.csv"), *MODEL, "--run", str(folder / "alone")]) == 0
    return folder


def two(work, mode, *arguments):
    """Both processes of a pair, until they end: their statuses and what they said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {"XLA_FLAGS": FLAGS, "NPROC": "2", "JAX_PLATFORMS": "cpu", "OPVI_COORDINATOR": address}
    shared |= {"OPVI_PROCESSES": "2", "JAX_COMPILATION_CACHE_DIR": str(work / "programs")}
    command = [sys.executable, str(HERE / "learning_processes.py"), mode, *arguments]
    pair = [
        subprocess.Popen(
            command, env={**os.environ, **shared, "OPVI_PROCESS": str(i)}, stderr=subprocess.PIPE, text=True, cwd=work
        )
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=240)[1] for process in pair]
    finally:
        for process in pair:
            process.kill()
    return [process.returncode for process in pair], said


@pytest.fixture(scope="module")
def killed(work):
    """How a run over one file ended whose process 1 was killed."""
    run = ["learn", "all.csv", *MODEL, "--run", "killed", "--save-every", "1e-9", "--distributed"]
    statuses, said = two(work, "killed", *run)
    shutil.copytree(work / "killed", work / "killed, then one")
    return statuses, said


@pytest.fixture(scope="module")
def several(work, killed):
    """What two processes do next: go on with that run; learn from files of their own, with a signal; be refused."""
    files = ["learn", "part-{process}.csv", "--distributed", *MODEL]
    commands = [
        ("resumed", ["learn", "--run", "killed", "--resume", "--distributed"]),
        ("stopped", [*files, "--run", "files"]),
        ("went on", ["learn", "--run", "files", "--resume", "--distributed"]),
        ("odd", [*files, "--run", "odd", "--particles", "5"]),
        ("piped", ["learn", "-", *MODEL, "--run", "piped", "--distributed"]),
        ("other", ["learn", "part-{process}.csv", "--run", "killed", "--resume", "--distributed"]),
    ]
    statuses, said = two(work, "several", json.dumps(commands))
    assert statuses == [0, 0], said
    return said


def last(folder):
    return learnt(RunDirectory(folder)).tree


def same(folder, work):
    """Whether a run ended as the one that nobody touched."""
    one, other = last(work / "alone"), last(folder)
    assert other["finished"]
    np.testing.assert_allclose(other["state"].particles, one["state"].particles, atol=ROUNDING)
    np.testing.assert_allclose(other["scores"].curve, one["scores"].curve, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(kept_rows(other["state"])[0], kept_rows(one["state"])[0])
    return True


def test_a_killed_process_ends_the_other_and_leaves_the_checkpoint(work, killed):
    statuses, said = killed
    assert statuses == [1, -signal.SIGKILL], said
    assert "process 0 of 2 ends, because another one is gone" in said[0]
    assert "Traceback" not in said[0]
    assert int(last(work / "killed, then one")["state"].round) == 4  # saved before the chunk that was cut off


def test_a_run_goes_on_with_one_process(work, killed):
    folder = work / "killed, then one"
    assert cli.main(["learn", "--run", str(folder), "--resume", str(work / "all.csv")]) == 0
    assert same(folder, work)
    rejected = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    assert [(row["row"], row["source"]) for row in rejected] == [(90, "all.csv")]


def test_a_run_goes_on_with_two_processes(work, several):
    assert "resumed 0" in several[0]
    assert same(work / "killed", work)
    assert json.loads((work / "killed" / "metrics.json").read_text())["rejected"] == 1


def test_a_signal_to_one_process_stops_all_and_saves(several):
    assert all("stopped 143" in said for said in several)
    assert "Stopped by SIGTERM. 160 rows are learnt and saved" in several[0]


def test_files_of_their_own_make_the_same_batches(work, several):
    assert all("went on 0" in said for said in several)
    assert same(work / "files", work)
    for name, part in [("rejected.jsonl", 0), ("rejected-1.jsonl", 1)]:
        lines = (work / "files" / name).read_text().splitlines()
        assert [json.loads(line)["text"] for line in lines] == [json.dumps({"a": f"part-{part}", "b": "0", "y": "0"})]
    assert json.loads((work / "files" / "metrics.json").read_text())["rejected"] == 2
    assert sum(last(work / "files")["kinds"].values()) == 2


def test_what_cannot_work_is_said(work, several, capsys):
    assert "odd 1" in several[0]
    assert "`--particles` does not suit the 2 devices of 2 processes: this sampler has 5 particles" in several[0]
    assert "process 0: `--particles` does not suit" in several[1]
    assert "opvi: - is a pipe, which --distributed cannot read" in several[0]
    assert "learns from one file, so all processes must read it" in several[0]
    assert cli.main(["learn", "--run", str(work / "files"), "--resume"]) == 1
    assert "learns from the files of 2 processes, but now there would be 1" in capsys.readouterr().err
    assert cli.main(["learn", str(work / "all.csv"), "--watch", "--distributed"]) == 1
    assert "`--watch` shows a run of one process" in capsys.readouterr().err
