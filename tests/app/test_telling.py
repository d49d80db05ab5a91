"""`opvi learn --predictions`: what was predicted before each row was learnt, once for every row, through stops."""

import asyncio
import csv
import errno
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import brokers, kills
from opvi.app.cli import main
from opvi.app.learn import RunDirectory, RunError, Stopped, _telling
from opvi.app.learn import _learner as learner
from opvi.app.learn._predict import learnt
from opvi.app.learn._starting import Asked, ready
from opvi.app.learn._stopping import Stop
from opvi.app.learn._telling import COLUMNS, Teller, telling
from opvi.running import Checkpoints
from tests.app.test_learning import ROWS, SMALL, stopping_after
from tests.app.test_streams import broker

assert broker  # a fixture


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(learner, "ROWS", ROWS)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.csv"
    kills.write_table(path, 1100)  # one of them broken
    return path


def learn(path, folder, where, stop=None, show=lambda learner, share: None, target="y", **more):
    run, stop = RunDirectory(folder), stop or Stop()
    with run.checkpoints as kept:
        made = ready(run, kept, Asked(str(path), target=target, settings=SMALL, resume=True, **more), stop)
        with made.source, telling(made.learner, str(where)):
            made.learner.learn(made.source, made.first, stop, show)
    return made.learner


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_file_has_every_row_once_through_stops(ending, table, tmp_path):
    whole, parts = tmp_path / f"whole.{ending}", tmp_path / f"parts.{ending}"
    done = learn(table, tmp_path / "whole", whole)
    for chunks in (1, 3, None):
        if chunks:
            with pytest.raises(Stopped):
                learn(table, tmp_path / "run", parts, **stopping_after(chunks))
        else:
            learn(table, tmp_path / "run", parts)
        with parts.open("a") as file:
            file.write("what a process wrote that was killed before it saved")
    learn(table, tmp_path / "run", parts)  # nothing is left to learn
    assert parts.read_text() == whole.read_text()
    if ending == "csv":
        with whole.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = [json.loads(line) for line in whole.read_text().splitlines()]
    with table.open(newline="") as file:
        y = {str(number): float(row["y"]) for number, row in enumerate(csv.DictReader(file)) if row["c"] != "broken"}
    assert [row["id"] for row in rows] == list(y)
    np.testing.assert_allclose([float(row["y"]) for row in rows], list(y.values()), rtol=1e-6)
    known = [row for row in rows if row["mean"] not in ("", None)]
    assert len(rows) - len(known) == learner.BATCH  # before the first batch nothing is known
    error = np.array([float(row["mean"]) - float(row["y"]) for row in known])
    assert np.sqrt(np.mean(error**2)) == pytest.approx(done.summary().total.error, rel=1e-5)
    loss = -np.mean([float(row["log_density"]) for row in known])
    assert loss == pytest.approx(done.summary().total.loss, rel=1e-5)


def test_labels_among_them_those_that_come_later(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    label = np.where(x[:, 0] > 0, "up", "down").astype(object)
    label[250:] = "late"
    lines = [f"{a:.4f},{b:.4f},{name}" for (a, b), name in zip(x, label, strict=True)]
    (tmp_path / "t.csv").write_text("a,b,kind\n" + "\n".join(lines) + "\n")
    run = RunDirectory(tmp_path / "run")
    with run.checkpoints as kept:
        asked = Asked(str(tmp_path / "t.csv"), target="kind", settings=SMALL, first_rows=200)
        made = ready(run, kept, asked, Stop())
        with made.source, telling(made.learner, str(tmp_path / "out.jsonl")):
            made.learner.learn(made.source, made.first, Stop())
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["y"] for row in rows] == label.tolist()
    wrong = np.mean([row["prediction"] != row["y"] for row in rows if row["prediction"] is not None])
    assert wrong == pytest.approx(made.learner.summary().total.error)
    assert {row["prediction"] for row in rows[280:]} <= {"up", "down", "late"}


def test_files_of_others_are_not_touched(table, tmp_path):
    (tmp_path / "mine.csv").write_text("precious")
    for name, words in {
        "mine.csv": "is there already, and not of this run",
        "out.parquet": "write to a .csv or .jsonl file",
        "none/out.csv": "cannot be written",
    }.items():
        with pytest.raises(RunError, match=words):
            learn(table, tmp_path / "run", tmp_path / name)
    assert (tmp_path / "mine.csv").read_text() == "precious"
    with pytest.raises(Stopped):
        learn(table, tmp_path / "run", tmp_path / "out.csv", **stopping_after(2))
    (tmp_path / "out.csv").write_text("")
    with pytest.raises(RunError, match="is shorter than the run left it"):
        learn(table, tmp_path / "run", tmp_path / "out.csv")


def test_a_file_is_known_from_the_first_row_on(table, tmp_path, monkeypatch):
    """Also a process that is killed before its first regular checkpoint can resume."""

    def killed(self, schema):
        self.sink.write([dict.fromkeys(COLUMNS["regression"], 0.0)])
        (tmp_path / "run").rename(tmp_path / "left")  # whatever is saved from now on is lost
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(Teller, "flush", killed)
        with pytest.raises(RunError, match="could not be written"):
            learn(table, tmp_path / "run", tmp_path / "out.csv")
    learn(table, tmp_path / "left", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 1099


def name_of(file):
    return Path(f"/proc/self/fd/{file}").resolve().name


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for the name of an open file")
@pytest.mark.parametrize("at", [1, 3, 6, 9, 40])
@pytest.mark.parametrize("half", [False, True])
def test_a_disk_that_is_full_loses_no_row_and_teaches_none_twice(at, half, table, tmp_path, monkeypatch):
    """A batch, its place and its predictions are one step: all or none."""
    whole = learn(table, tmp_path / "whole", tmp_path / "whole.csv")
    real, calls = os.pwrite, []

    def full(file, data, place):
        if name_of(file) != "out.csv":
            return real(file, data, place)
        calls.append(place)
        if len(calls) < at:
            return real(file, data, place)
        if half and len(calls) == at:
            return real(file, data[: len(data) // 2], place)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        if at > 30:  # never reached: all is well
            learn(table, tmp_path / "run", tmp_path / "out.csv")
        else:
            with pytest.raises(RunError, match="No space left on device"):
                learn(table, tmp_path / "run", tmp_path / "out.csv")
    text = (tmp_path / "out.csv").read_text()
    assert (tmp_path / "whole.csv").read_text().startswith(text)
    assert not text or text.endswith("\n")  # no half a row
    done = learn(table, tmp_path / "run", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == (tmp_path / "whole.csv").read_text()
    assert (done.rows, done.rejected, done.filled, done.kinds) == (1099, 1, whole.filled, whole.kinds)
    np.testing.assert_array_equal(done.engine.state.particles, whole.engine.state.particles)
    np.testing.assert_array_equal(done.scores.curve, whole.scores.curve)


def test_a_run_that_could_not_save_anything_resumes(table, tmp_path, monkeypatch):
    """Nothing is in the file of predictions before a checkpoint knows it."""
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoints, "save", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(RunError, match="No space left"):
            learn(table, tmp_path / "run", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == ""
    learn(table, tmp_path / "run", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 1099


@pytest.mark.skipif(sys.platform != "linux", reason="asks the system for the name of an open file")
def test_a_disk_that_cannot_sync_is_not_believed_later(table, tmp_path, monkeypatch):
    """After an `fsync` that failed, the next one may succeed though what was written is gone: nothing is saved then."""
    real, failed = os.fsync, []

    def fsync(file):
        if name_of(file) == "out.csv" and not failed and os.fstat(file).st_size > 1000:
            failed.append(True)
            os.ftruncate(file, 1000)  # what the system had not written is lost
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(RunError, match="may not be on the disk"):
        learn(table, tmp_path / "run", tmp_path / "out.csv")
    assert failed
    learn(table, tmp_path / "run", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 1099


def test_a_broker_that_goes_away_half_way_gets_the_same_messages_under_the_same_numbers(table, tmp_path, monkeypatch):
    """Those that it has already are recognised by their numbers, and none is left out."""
    got = {}

    class Broker:
        name, run, position, left = "nats://host/told", "run", 0, 250

        def write(self, told):
            for row in told:
                if not self.left:
                    raise RunError("nats://host/told has been unreachable for 60 seconds.")
                self.left, self.position = self.left - 1, self.position + 1
                assert got.setdefault(self.position, row) == row

        def settle(self):
            pass

        def back(self, position):
            self.position = position

        def end(self):
            pass

        def close(self):
            pass

    def sink(where, schema, saved):
        made = Broker()
        made.position = saved.get("position", 0)
        return made

    monkeypatch.setattr(_telling, "open_sink", sink)
    with pytest.raises(RunError, match="unreachable"):
        learn(table, tmp_path / "run", "nats://host/told")
    assert len(got) == 250
    monkeypatch.setattr(Broker, "left", 10**6)
    done = learn(table, tmp_path / "run", "nats://host/told")
    assert (done.rows, sorted(got)) == (1099, list(range(1, 1100)))
    assert len({row["id"] for row in got.values()}) == 1099


def test_a_source_that_fails_after_its_rows_were_learnt_teaches_none_twice(table, tmp_path, monkeypatch):
    from opvi.adapters._tables import TableError
    from opvi.adapters._tables._source import Source

    real, calls = Source.passed, []

    def passed(self, block):
        calls.append(block)
        if len(calls) == 3:
            raise TableError("the disk has gone.")
        return real(self, block)

    with monkeypatch.context() as patched:
        patched.setattr(Source, "passed", passed)
        with pytest.raises(TableError, match="has gone"):
            learn(table, tmp_path / "run", tmp_path / "out.csv")
    done = learn(table, tmp_path / "run", tmp_path / "out.csv")
    assert (done.rows, done.rejected) == (1099, 1)
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = [row["id"] for row in csv.DictReader(file)]
    assert (len(rows), len(set(rows))) == (1099, 1099)


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
@pytest.mark.parametrize(("far", "more"), [(0.0, {}), (123216155.07, {}), (1.0, {"positive": True})])
def test_numbers_have_the_digits_that_they_were_read_with(ending, far, more, tmp_path):
    """Targets as they were read, also across a stop; predictions with a float's digits and no tail."""
    rng = np.random.default_rng(0)
    y = [f"{value:.4f}" for value in far + 0.1719 + rng.random(210)]
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{i % 7},{value}\n" for i, value in enumerate(y)))
    source, out = tmp_path / "t.csv", tmp_path / f"out.{ending}"
    with pytest.raises(Stopped):
        learn(source, tmp_path / "run", out, **stopping_after(2), **more)
    learn(source, tmp_path / "run", out, **more)
    if ending == "csv":
        rows = list(csv.DictReader(out.read_text().splitlines()))
    else:
        rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [float(row["y"]) for row in rows] == [float(value) for value in y]
    for row in rows[learner.BATCH :]:
        assert max(len(str(row[name]).strip("-0.").replace(".", "")) for name in ("level", "log_density")) <= 9 + 4
        assert len(str(row["mean"])) <= len("0.123456789" if not far else "123216155.123456")
        assert abs(float(row["mean"]) - far - 0.67) < 1
    near = np.array([float(row["mean"]) for row in rows[learner.BATCH :]]) - far
    assert len(np.unique(near)) > 50  # and not the rounding of a float32 that far from 0


def test_several_targets_have_a_file_each(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 7},{i % 7 + i % 3},{i % 5 + i % 3 + 1},{i % 2 - 1}" for i in range(60)]
    (tmp_path / "t.csv").write_text("x,price €,price $,low\n" + "\n".join(lines) + "\n")
    words = ["learn", "t.csv", "--hidden", "none", "--task", "regression", "--neighbour-rows", "0", "--run", "both"]
    both = ["--target", "price €", "--target", "price $", "--predictions"]
    for wrong, says in (
        ([*both, "nats://host/told"], "takes the predictions of one target, but there are 2"),
        ([*both, "-"], "takes the predictions of one target, but there are 2"),
        ([*both, "out.csv", "--target", "low", "--positive"], "the target 'price €' holds 0"),
        (["--target", "price $", "--target", "low", "--positive"], "the target 'low' holds -1"),
    ):
        assert main([*words, *wrong]) == 1
        assert says in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["t.csv"]  # nothing was learnt
    files = [tmp_path / f"out-{place}-price_.csv" for place in (1, 2)]
    files[1].write_text("precious")
    assert main([*words, *both, "out.csv"]) == 1
    assert f"would write {files[1].name}, which is there already" in capsys.readouterr().err
    files[1].unlink()
    assert main([*words, *both, "out.csv"]) == 0
    assert f"The predictions of price €: {files[0].name}" in capsys.readouterr().err
    tables = [list(csv.DictReader(path.read_text().splitlines())) for path in files]
    assert [[float(row["y"]) for row in rows[:3]] for rows in tables] == [[0, 2, 4], [1, 3, 5]]
    assert main([*words, *both, "out.csv", "--resume"]) == 0
    assert [len(rows) for rows in tables] == [60, 60]


def test_predictions_are_published_once_with_the_ids_of_the_messages(broker, table, tmp_path):
    import nats

    payloads = brokers.payloads_of(table)
    brokers.publish(broker.url, payloads)

    async def told(count):
        client = await nats.connect(broker.url)
        context = client.jetstream()
        if not count:
            await context.add_stream(name="TOLD", subjects=["told"])
            return await client.close()
        consumer = await context.pull_subscribe("told", "reader")
        messages = []
        while len(messages) < count:
            some = await consumer.fetch(500, timeout=5)
            await asyncio.gather(*(message.ack() for message in some))
            messages += some
        info = await context.stream_info("TOLD")
        await client.close()
        return [json.loads(message.data) for message in messages], info.state.messages

    asyncio.run(told(0))
    source, sink = f"{broker.url}/{brokers.SUBJECT}?until=now", f"{broker.url}/told"
    with pytest.raises(Stopped):
        learn(source, tmp_path / "run", sink, **stopping_after(3))
    saved = tmp_path / "saved"
    (tmp_path / "run").rename(saved)  # as a kill would leave it: published, but not in the checkpoint
    shutil.copytree(saved, tmp_path / "run")
    learn(source, tmp_path / "run", sink)
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(saved, tmp_path / "run")
    learn(source, tmp_path / "run", sink)  # all again, under the same ids
    rows, count = asyncio.run(told(1099))
    assert (len(rows), count) == (1099, 1099)
    sound = [str(number + 1) for number in range(1100) if b"broken" not in payloads[number]]
    assert [row["id"] for row in rows] == sound
    assert learnt(RunDirectory(tmp_path / "run")).tree["told"]["position"] == 1099
