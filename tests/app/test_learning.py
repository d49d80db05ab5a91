"""`opvi learn`, `predict` and `report`: nothing is lost, whatever happens to the process, its disk or its rows."""

import errno
import http.server
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

import opvi
from benchmarks import kills
from opvi.adapters._tables import SourceChangedError
from opvi.app import cli
from opvi.app.learn import RunDirectory, RunError, Settings, Stopped, contents
from opvi.app.learn import _learner as learner
from opvi.app.learn import _scores as scores
from opvi.app.learn._learner import Stop
from opvi.app.learn._predict import learnt
from opvi.app.learn._starting import Asked, alone, ready
from opvi.running import Fed
from opvi.running import _checkpoint as checkpoint
from opvi.running import _saving as saving
from opvi.types import Predicted

SMALL = Settings(hidden=(), particles=4)  # as in OPTIONS: the same programs
ROWS = 80  # at once, so that a small table has many
OPTIONS = ["--target", "y", "--hidden", "none", "--particles", "4"]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(learner, "ROWS", ROWS)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """1,500 rows, one of them broken, with gaps and a text."""
    path = tmp_path_factory.mktemp("table") / "table.csv"
    kills.write_table(path, 1500)
    return path


def learn(path, folder, stop=None, show=lambda learner, share: None, **asked):
    """A run in this process; gives the learner."""
    asked = Asked(str(path) if path else None, **{"target": "y", "settings": SMALL, "resume": True, **asked})
    run, stop = RunDirectory(folder), stop or Stop()
    with run.checkpoints as kept:
        made = ready(run, kept, asked, stop)
        with made.source:
            made.learner.learn(made.source, made.first, stop, show)
    made.learner.messages = made.messages
    return made.learner


def stopping_after(chunks):
    """A signal that comes after so many chunks."""
    stop = Stop()
    left = [chunks]

    def show(learner, share):
        left[0] -= 1
        if left[0] == 0:
            stop.asked = "SIGTERM"

    return {"stop": stop, "show": show}


@pytest.fixture(scope="module")
def whole(table, tmp_path_factory):
    """A run that nobody touched."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    patch = pytest.MonkeyPatch()
    patch.setattr(learner, "ROWS", ROWS)
    learn(table, folder)
    patch.undo()
    return folder


def same(table, a, b):
    return kills.same(kills.result(table, a), kills.result(table, b))


# --- the same bits, whatever happens ------------------------------------------------------------


@pytest.mark.slow
def test_a_run_stopped_again_and_again_ends_with_the_same_bits(table, whole, tmp_path):
    for chunks in (1, 5, 2, 3):
        with pytest.raises(Stopped):
            learn(table, tmp_path / "run", **stopping_after(chunks))
    assert 0 < learnt(RunDirectory(tmp_path / "run")).tree["state"].rows < 1499
    done = learn(None, tmp_path / "run")
    assert done.finished
    assert done.rows == 1499
    assert same(table, whole, tmp_path / "run")
    again = learn(None, tmp_path / "run")  # nothing is left to learn
    assert again.rows == 1499


@pytest.mark.slow
def test_kills_lose_nothing(tmp_path):
    """SIGKILL at random moments, twice; `python -m benchmarks.kills` kills 50 times (docs/results/kills.json)."""
    kills.write_table(tmp_path / "table.csv", 4_000)
    suites = Path(os.environ["OPVI_PROGRAMS"])
    found = kills.trial(tmp_path / "table.csv", tmp_path, 2, OPTIONS[2:], within=0.05, cache=suites)
    assert found == {"kills": 2, "same_bits": True}


def test_a_damaged_checkpoint_falls_back_to_the_one_before(table, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LARGEST_SHARE", np.inf)  # save after every chunk
    with pytest.raises(Stopped):
        learn(table, tmp_path / "run", save_every=0.0, **stopping_after(9))
    files = sorted((tmp_path / "run" / "checkpoints").glob("*.opvi"))
    assert len(files) == 3
    data = bytearray(files[-1].read_bytes())
    data[len(data) // 2] ^= 1
    files[-1].write_bytes(data)
    files[-2].write_bytes(files[-2].read_bytes()[:-5])
    done = learn(table, tmp_path / "run")
    assert sum("damaged" in message for message in done.messages) == 2
    assert any("after row" in message for message in done.messages)
    assert same(table, whole, tmp_path / "run")


def test_without_a_good_checkpoint_it_begins_again(table, whole, tmp_path):
    with pytest.raises(Stopped):
        learn(table, tmp_path / "run", **stopping_after(2))
    for path in (tmp_path / "run" / "checkpoints").glob("*.opvi"):
        path.write_bytes(b"")
    done = learn(table, tmp_path / "run")
    assert any("beginning again" in message for message in done.messages)
    assert same(table, whole, tmp_path / "run")


@pytest.mark.parametrize("where", ["checkpoint", "rejected"])
def test_a_full_disk_loses_nothing(where, table, whole, tmp_path, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    write = {"checkpoint": checkpoint.os.fsync, "rejected": learner.os.pwrite}[where]
    if where == "checkpoint":
        with pytest.raises(Stopped):
            learn(table, tmp_path / "run", **stopping_after(3))
    before = sorted(p.read_bytes() for p in (tmp_path / "run" / "checkpoints").glob("*.opvi"))
    count = [0]

    def fails(*args):
        count[0] += 1
        if count[0] > (0 if where == "rejected" else 2):
            raise full
        return write(*args)

    name = {"checkpoint": "fsync", "rejected": "pwrite"}[where]
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fails)
        with pytest.raises(RunError, match="No space left"):
            learn(table, tmp_path / "run", save_every=0.0)
    after = sorted(p.read_bytes() for p in (tmp_path / "run" / "checkpoints").glob("*.opvi"))
    assert set(before) <= set(after)
    assert not list((tmp_path / "run" / "checkpoints").glob("*.part"))
    learn(table, tmp_path / "run")
    assert same(table, whole, tmp_path / "run")


@pytest.mark.slow
def test_a_signal_while_waiting_for_rows_ends_the_wait(tmp_path):
    """A pipe that stays silent after some rows; SIGTERM; then the rest, in another process."""
    kills.write_table(tmp_path / "table.csv", 300)
    lines = (tmp_path / "table.csv").read_text().splitlines(keepends=True)
    command = [sys.executable, "-m", "opvi.app.cli", "learn", "-", "--run", str(tmp_path / "run"), *OPTIONS, "--resume"]
    process = subprocess.Popen(
        [*command, "--first-rows", "50"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.writelines(lines[:206])
    process.stdin.flush()
    while not (tmp_path / "run" / "run.json").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 143, told
    assert "Stopped by SIGTERM" in told
    assert f"opvi learn - --run {tmp_path / 'run'} --resume --target y" in told
    tree = learnt(RunDirectory(tmp_path / "run")).tree
    waiting = len(tree["waiting"]["y"])
    assert int(tree["state"].rows) + waiting == 205  # not one row of the pipe is lost
    rest = subprocess.run(command, input="".join(lines[:1] + lines[206:]), capture_output=True, text=True, check=True)
    assert "taken as new ones" in rest.stderr
    assert int(learnt(RunDirectory(tmp_path / "run")).tree["state"].rows) == 300


def test_predictions_that_are_not_finite_are_counted_said_and_end_with_a_status(table, tmp_path, capsys, monkeypatch):
    def broken(learner, share):
        state = learner.engine.state
        learner.engine.state = jax.tree.map(lambda leaf: leaf * np.nan if leaf.dtype.kind == "f" else leaf, state)

    whole = learn(table, tmp_path / "whole")
    done = learn(table, tmp_path / "run", show=broken)
    told = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert (whole.summary().unsound, whole.summary().broken) == (0, False)
    assert done.summary().broken
    assert told["predictions_not_finite"] > 1300
    assert told["predictions_not_finite"] + done.summary().total.count == 1499 - learner.BATCH
    assert "rows were predicted as something that is not a finite number" in str(
        contents(learnt(done.run), "", "").notes
    )
    assert cli.main(["learn", str(table), "--run", str(tmp_path / "run"), "--resume"]) == 4
    said = capsys.readouterr()
    assert "predictions not finite, in no other figure" in said.out
    assert "not a finite number" in said.err
    assert cli.main(["predict", str(tmp_path / "run"), str(table), "-o", str(tmp_path / "out.csv")]) == 0
    assert "1,500 of them without a prediction" in capsys.readouterr().err


# --- the folder ---------------------------------------------------------------------------------


def test_two_writers_are_refused(table, tmp_path, capsys):
    with RunDirectory(tmp_path / "run").checkpoints:
        assert cli.main(["learn", str(table), "--run", str(tmp_path / "run"), *OPTIONS]) == 1
    assert f"process {os.getpid()}" in capsys.readouterr().err


def test_a_run_is_not_begun_twice_by_accident(table, whole, capsys):
    assert cli.main(["learn", str(table), "--run", str(whole), *OPTIONS]) == 1
    assert "--resume" in capsys.readouterr().err


class Bomb:
    def __reduce__(self):
        return (Path.write_text, (Path("owned"), "x"))


def test_a_pickle_named_like_a_checkpoint_is_refused_unread(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "run")
    for path in Path("run/checkpoints").glob("*.opvi"):
        path.write_bytes(pickle.dumps(Bomb()))
    assert cli.main(["report", "run"]) == 1
    assert "not an opvi checkpoint" in capsys.readouterr().err
    assert not Path("owned").exists()


def test_paths_of_a_run_stay_inside_it(table, whole, tmp_path, capsys):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    (folder / "rejected.jsonl").unlink()
    (folder / "rejected.jsonl").symlink_to(secret)
    assert cli.main(["learn", str(table), "--run", str(folder), "--resume"]) == 1
    assert secret.read_text() == "mine"
    assert "is a link" in capsys.readouterr().err
    shutil.rmtree(folder / "checkpoints")
    (folder / "checkpoints").symlink_to(whole / "checkpoints")
    assert cli.main(["report", str(folder)]) == 1
    assert "is a link" in capsys.readouterr().err


def test_versions(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    about = json.loads((folder / "run.json").read_text())
    for content, words in (
        ({**about, "format": 99}, "newer"),
        ({"format": 1}, "damaged"),
        ([], "damaged"),
        (None, "holds no run"),
    ):
        (folder / "run.json").write_text(json.dumps(content)) if content is not None else (folder / "run.json").unlink()
        assert cli.main(["predict", str(folder), "x.csv"]) == 1
        assert words in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused(whole, tmp_path, table):
    shutil.copytree(whole, tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    other = {**about, "settings": {**about["settings"], "particles": 6}}
    renamed = json.loads(json.dumps(about).replace('"name": "a"', '"name": "z"'))
    for content in (other, renamed):
        (tmp_path / "run" / "run.json").write_text(json.dumps(content))
        with pytest.raises(RunError, match="describes other columns or another model"):
            learn(table, tmp_path / "run")
        with pytest.raises(RunError, match="describes other columns or another model"):
            learnt(RunDirectory(tmp_path / "run"))
    (tmp_path / "run" / "run.json").unlink()
    with pytest.raises(RunError, match="no run.json"):
        learn(table, tmp_path / "run", resume=False)


# --- sources ------------------------------------------------------------------------------------


def test_rows_added_to_the_file_are_learnt_and_other_files_too(table, tmp_path):
    lines = table.read_text().splitlines(keepends=True)
    grown, other = tmp_path / "grown.csv", tmp_path / "other.csv"
    grown.write_text("".join(lines[:401]))
    assert learn(grown, tmp_path / "run", first_rows=300).rows == 400
    grown.write_text("".join(lines[:501]))
    assert learn(grown, tmp_path / "run").rows == 500
    other.write_text("".join([lines[0], *lines[601:651]]))
    assert learn(other, tmp_path / "run").rows == 550
    assert learn(grown, tmp_path / "run").rows == 550  # known, and learnt to its end
    other.write_text("".join([lines[0], *lines[701:751]]))  # another file, under an old name
    with pytest.raises(SourceChangedError, match="begins differently"):
        learn(other, tmp_path / "run")


def test_a_pipe_may_be_played_again(table, tmp_path, monkeypatch):
    lines = table.read_text().splitlines(keepends=True)
    for count, replayed, rows in ((241, False, 240), (501, True, 500)):
        read, write = os.pipe()
        os.write(write, "".join(lines[:count]).encode())  # less than a pipe holds
        os.close(write)
        with monkeypatch.context() as patch, os.fdopen(read) as pipe:
            patch.setattr(sys, "stdin", pipe)
            assert learn("-", tmp_path / "run", first_rows=100, replayed=replayed).rows == rows


def test_strict_stops_at_the_first_bad_row_and_loses_none(table, whole, tmp_path):
    with pytest.raises(RunError, match="row 1,008 of .* 'broken' is not a number"):
        learn(table, tmp_path / "run", strict=True)
    assert not (tmp_path / "run" / "rejected.jsonl").read_bytes()
    learn(table, tmp_path / "run")
    assert same(table, whole, tmp_path / "run")


# --- figures ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_figures_are_those_of_predicting_each_batch_before_learning_it(table, tmp_path):
    seen = []

    def show(learner, share):
        seen.append(learner.rows)

    done = learn(table, tmp_path / "run", show=show)
    tracker, schema = done.engine.sampler, done.schema
    with kills_source(table) as source:
        parts = [schema.encode(block) for block in source.blocks()]
    x, y = np.concatenate([p.x for p in parts]), np.concatenate([p.y for p in parts])
    state, loss, error, covered, baseline = tracker.init(jax.random.key(0)), [], [], [], []
    for at in range(0, len(y), 20):
        rows = slice(at, at + 20)
        batch = checkpoint_batch(x[rows], y[rows])
        if at:
            said = tracker.predict(state, batch.data[0])
            here = slice(0, len(y[rows]))
            loss.append(np.asarray(-said.log_density(batch.data[1]))[here])
            error.append((np.asarray(said.mean())[here] - y[rows]) ** 2)
            level = np.asarray(said.cdf(batch.data[1]))[here]
            covered.append((level > 0.05) & (level < 0.95))
            baseline.append((y[rows] - y[:at].mean(dtype=float)) ** 2)
        state, _ = tracker.step(jax.random.key(0), state, batch)
    told = done.summary()
    assert told.total.count == len(y) - 20
    # Scores are those of the whole grid of settings; `predict` says the same by 64 of its quantiles.
    np.testing.assert_allclose(told.total.loss, np.concatenate(loss).mean(), rtol=1e-3)
    np.testing.assert_allclose(told.total.error, np.sqrt(np.concatenate(error).mean()), rtol=1e-4)
    differ = told.total.covered * told.total.count - np.concatenate(covered).sum()
    assert abs(round(differ)) <= 2  # rows whose level is nearly 0.05 or 0.95
    np.testing.assert_allclose(told.baseline, np.sqrt(np.concatenate(baseline).mean()), rtol=1e-4)
    # Up to rounding: the engine compiles with other options.
    np.testing.assert_allclose(np.asarray(state.particles), np.asarray(done.engine.state.particles), atol=1e-4)
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["rows"] == len(y) == seen[-1]


def kills_source(table):
    from opvi.adapters._tables import open_source

    return open_source(table)


def checkpoint_batch(x, y):
    from opvi.running._stream import batch

    return batch((x, y), pad_to=20)


class Told(NamedTuple):
    """What a watched sampler says about its batches."""

    rows: np.ndarray
    finite: np.ndarray
    changed: np.ndarray
    predicted: Predicted
    probability: np.ndarray


def fed(task, count, seed=0):
    """So many batches of 20 rows, of which some are padding or could not be predicted."""
    rng = np.random.default_rng(seed)
    shape = count, 20
    weight = (rng.random(shape) < 0.9).astype(np.float32)
    density = np.where(rng.random(shape) < 0.02, np.nan, rng.normal(size=shape))
    rows = np.cumsum((weight > 0).sum(1))
    if task == "regression":
        y, predicted = rng.normal(size=shape), Predicted(density, rng.normal(size=shape), rng.random(shape))
    else:
        y = rng.integers(0, 3, shape)
        predicted = Predicted(density, probabilities=rng.dirichlet(np.ones(3), shape))
    told = Told(rows, np.arange(count) != 5, np.arange(count) % 7 == 3, predicted, rng.random(count))
    return Fed(told, (np.zeros((*shape, 2)), y), weight)


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_scores_do_not_depend_on_cuts_and_the_curve_stays_short(task, monkeypatch):
    monkeypatch.setattr(scores, "STRETCHES", 8)
    whole, results = fed(task, 50), []
    for cuts in ([50], [1] * 50, [7, 13, 30]):
        out = scores.start(task, 3)
        for part in np.split(np.arange(50), np.cumsum(cuts)[:-1]):
            out = scores.add(out, task, jax.tree.map(lambda a, part=part: a[part], whole))
        results.append(out)
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)
    told = scores.summary(results[0], task)
    assert len(told.curve) == 7  # stretches of 8 batches
    assert told.curve[-1].rows == whole.info.rows[-1]
    assert told.alarms == whole.info.rows[3::7].tolist()
    assert told.refused == 1
    assert told.probability == whole.info.probability[-1]
    # The first batch was predicted from nothing, and what is not finite was not predicted.
    counted = (whole.weight > 0) & np.isfinite(whole.info.predicted.log_density)
    counted[0] = False
    assert sum(stretch.count for stretch in told.curve) == told.total.count == counted.sum()
    assert told.total.loss == pytest.approx(-whole.info.predicted.log_density[counted].mean())
    y, predicted = whole.data[1][counted], jax.tree.map(lambda a: a[counted], whole.info.predicted)
    if task == "regression":
        assert told.total.error == pytest.approx(np.sqrt(((predicted.mean - y) ** 2).mean()))
        assert told.total.covered == pytest.approx(((predicted.level >= 0.05) & (predicted.level <= 0.95)).mean())
        np.testing.assert_array_equal(told.calibration.counts, np.histogram(predicted.level, 20, (0, 1))[0])
    else:
        right, sure = predicted.probabilities.argmax(1) == y, predicted.probabilities.max(1)
        assert told.total.error == pytest.approx(1 - right.mean())
        inside = (sure >= 0.6) & (sure < 2 / 3)  # the tenth of 15 bins
        assert told.calibration.counts[9] == inside.sum() > 0
        assert told.calibration.confidence[9] == pytest.approx(sure[inside].mean())
        assert told.calibration.accuracy[9] == pytest.approx(right[inside].mean())


# --- predictions and the command line -----------------------------------------------------------


def test_predictions_in_every_format_with_gaps_for_bad_rows(table, whole, tmp_path, capsys):
    for name in ("out.csv", "out.jsonl", "out.parquet"):
        assert cli.main(["predict", str(whole), str(table), "-o", str(tmp_path / name), "--quantiles", "0.1,0.9"]) == 0
        assert "row 1,008 has no prediction" in capsys.readouterr().err
    wide = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert wide == lines
    assert len(lines) == 1500
    assert lines[1008] == {"row": 1008, "mean": None, "sd": None, "q0.1": None, "q0.9": None}
    assert all(line["q0.1"] < line["mean"] < line["q0.9"] for line in lines if line["mean"] is not None)
    text = (tmp_path / "out.csv").read_text().splitlines()
    assert text[0].replace('"', "") == "row,mean,sd,q0.1,q0.9"
    assert text[1009] == "1008,,,,"
    np.testing.assert_allclose(float(text[1].split(",")[1]), lines[0]["mean"], rtol=1e-6)


def test_classes_from_the_command_line(tmp_path, capsys):
    rng = np.random.default_rng(0)
    x = rng.normal(size=400)
    label = np.where(x > 0.5, 'a, "b"', np.where(x < -0.5, "<b>c</b>", "d"))
    lines = [
        json.dumps({"x": float(v), "when": f"2024-03-{1 + i % 28:02d}", "y": str(k)})
        for i, (v, k) in enumerate(zip(x, label, strict=True))
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    folder, out = tmp_path / "run", tmp_path / "out.csv"
    words = ["learn", str(tmp_path / "rows.jsonl"), "--run", str(folder), *OPTIONS]
    assert cli.main(words) == 0
    told = capsys.readouterr()
    assert "classification: y" in told.out
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["error_rate"] < 0.2 < metrics["baseline_error_rate"]
    assert cli.main(["predict", str(folder), str(tmp_path / "rows.jsonl"), "-o", str(out)]) == 0
    import csv

    with out.open() as file:
        predicted = list(csv.DictReader(file))
    probabilities = [[float(row[f"p={k}"]) for k in ('a, "b"', "<b>c</b>", "d")] for row in predicted]
    np.testing.assert_allclose(np.sum(probabilities, 1), 1, rtol=1e-5)
    assert np.mean([row["prediction"] == k for row, k in zip(predicted, label, strict=True)]) > 0.85
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "&lt;b&gt;c&lt;/b&gt;" in page
    assert "<b>c</b>" not in page


def test_a_report_of_a_regression(whole, tmp_path, capsys):
    assert cli.main(["report", str(whole), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!DOCTYPE html>") or page.startswith("<!doctype html>")
    for words in ("colour", "column &#39;c&#39;: … is not a number", "1,499"):
        assert words in page, words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["learn"], "SOURCE"),
        (["learn", "-", "--target", "y"], "--run"),
        (["learn", "{table}", "--run", "{new}"], "--target"),
        (["learn", "{table}", "--run", "{new}", "--target", "nothing"], "'nothing'"),
        (["learn", "{table}", "--run", "{new}", "--target", "y", "--hidden", "x"], "--hidden"),
        (["learn", "{table}", "--run", "{new}", "--target", "colour", "--particles", "3"], "3"),
        (["learn", "{new}", "--run", "{new}", "--target", "y"], "{new}"),
        (["learn", "--run", "{new}", "--resume"], "no SOURCE"),
        (["learn", "--run", "{whole}", "--resume", "--target", "a"], "learns to predict 'y'"),
        (["predict", "{new}", "{table}"], "holds no run"),
        (["predict", "{whole}", "{table}", "--quantiles", "2"], "between 0 and 1"),
        (["predict", "{whole}", "{table}", "--quantiles", "a"], "--quantiles"),
        (["predict", "{whole}", "{table}", "-o", "{new}/x.txt"], ".txt"),
        (["predict", "{whole}", "{table}", "-o", "{new}/x.csv"], "cannot be written"),
        (["report", "{new}"], "holds no run"),
    ],
)
def test_mistakes_get_a_line_that_says_what_to_do(words, expected, table, whole, tmp_path, capsys):
    names = {"table": table, "whole": whole, "new": tmp_path / "new"}
    assert cli.main([word.format(**names) for word in words]) == 1
    told = capsys.readouterr().err
    assert told.startswith("opvi: ")
    assert expected.format(**names) in told
    assert not (tmp_path / "new" / "run.json").exists()


def test_the_first_figures_come_soon_and_progress_counts_rows(table, tmp_path, monkeypatch):
    """The table is smaller than what is read at once: the share is that of the rows learnt, not of the bytes read."""
    monkeypatch.setattr(learner, "ROWS", 5120)
    seen = []
    learn(table, tmp_path / "run", show=lambda run, share: seen.append((run.rows, share)))
    assert seen[0][0] == 100
    rows, shares = (np.array(values, float) for values in zip(*seen, strict=True))
    np.testing.assert_allclose(shares, np.minimum(rows, 1500) / 1500, atol=0.03)


def test_the_first_line_of_a_log_comes_sooner_than_the_others(monkeypatch, capsys):
    from types import SimpleNamespace

    from opvi.app.cli import _screen

    clock = iter((0.0, 0.5, 1.5, 3.0, 11.0, 12.0))
    monkeypatch.setattr(_screen.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(_screen, "figures_of", lambda run, rate: [("rows", str(run.rows))])
    screen = _screen.Screen(SimpleNamespace(rows=0), [])
    for rows in (100, 200, 300, 400, 500):
        screen.show(SimpleNamespace(rows=rows), rows / 1000)
    assert capsys.readouterr().err == "learning (20%): rows 200\nlearning (50%): rows 500\n"


def test_alarms_are_sent_to_an_address(table, tmp_path, monkeypatch, capsys):
    """Each once, also across a resumed run; an address that nobody answers ends nothing."""
    got, add = [], scores.add

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    def alarmed(made, task, fed):
        made, seen = add(made, task, fed), int(fed.info.rows[-1])
        alarms = np.array([row for row in (400, 900) if row <= seen])
        return made._replace(alarms=alarms, alarm_count=np.array(len(alarms)))

    monkeypatch.setattr(scores, "add", alarmed)
    words = ["learn", str(table), *OPTIONS, "--run", str(tmp_path / "run"), "--alarm-webhook"]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/alarms"
        assert cli.main([*words, address]) == 0
        assert cli.main([*words, address, "--resume"]) == 0
        server.shutdown()
    assert got == [{"run": "run", "event": "drift", "row": row, "target": "y"} for row in (400, 900)]
    words[words.index("--run") + 1] = str(tmp_path / "alone")
    assert cli.main([*words, address]) == 0
    assert "Learning continues" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*words, "nowhere"])
    assert "'nowhere' is not an address" in capsys.readouterr().err


@pytest.mark.slow
def test_columns_tell_their_gaps_and_how_far_they_moved(tmp_path):
    """Against NumPy, whole and stopped on the way; the text of the page has them."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 4000))
    b[2000:] += 3
    first = ["" if i % 4 == 0 else f"{value:.4f}" for i, value in enumerate(a)]
    lines = [f"{text},{y:.4f},{x:.4f}" for text, x, y in zip(first, a, b, strict=True)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["a,b,y", *lines]) + "\n")
    whole = learn(path, tmp_path / "whole")
    with pytest.raises(Stopped):
        learn(path, tmp_path / "cut", **stopping_after(9))
    cut = learn(path, tmp_path / "cut")
    for one, other in zip(whole.columns, cut.columns, strict=True):
        np.testing.assert_array_equal(one, other)
    told = {one.name: one for one in whole.columns.told(whole.schema)}
    assert told["a"].gaps == 0.25
    assert told["b"].gaps == 0
    weight = 0.5 ** (np.arange(4000)[::-1] // 20 * 20 / 1000)
    expected = abs(np.average(b, weights=weight) - b[:1000].mean()) / b[:1000].std()
    assert told["b"].moved == pytest.approx(expected, rel=1e-3)
    assert told["a"].moved < 0.2
    known = contents(learnt(RunDirectory(tmp_path / "cut")), "t", "")
    assert [one.name for one in known.columns] == ["a", "b"]
    assert known.figures["mae"] > 0
    assert known.settings["source"] == str(path)
    assert "UTC" in known.settings["last saved"]


@pytest.mark.parametrize("kind", [{}, {"counts": True}, {"positive": True}, {"task": "classification"}], ids=str)
def test_a_run_says_which_model_it_has_and_how_to_enlarge_it(kind, tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{i % 7},{i % 5 + 1}\n" for i in range(40)))
    run, options = RunDirectory(tmp_path / "run"), {"task": "regression", **kind}
    asked = Asked(str(tmp_path / "t.csv"), target="y", settings=SMALL, **options)
    with alone(run, asked, Stop()) as made:
        pass
    if kind.get("task"):
        told = str(opvi.classifier(1, 5, hidden=SMALL.hidden, particles=SMALL.particles or 20))
    else:
        told = str(opvi.regressor(1, hidden=SMALL.hidden, particles=SMALL.particles, warm_up=SMALL.warm_up))
    assert made.messages[-1] == f"{told}. For a larger one: --hidden W,W,…, --particles N, --neighbour-rows N."
    with alone(run, asked._replace(resume=True), Stop()) as again:
        pass
    assert not any("larger" in message for message in again.messages)  # it is settled


def test_an_alarm_may_be_an_exit_status(table, tmp_path, monkeypatch):
    add = scores.add

    def alarmed(made, task, fed):
        return add(made, task, fed)._replace(alarm_count=np.array(2))

    words = ["learn", str(table), *OPTIONS, "--alarm-exit", "--run"]
    assert cli.main([*words, str(tmp_path / "quiet")]) == 0
    monkeypatch.setattr(scores, "add", alarmed)
    assert cli.main([*words, str(tmp_path / "loud")]) == 3
    assert cli.main([*words, str(tmp_path / "loud"), "--resume"]) == 0  # none since


@pytest.mark.slow
def test_several_targets_are_runs_side_by_side(tmp_path, capsys):
    """The same as learning each by itself without the other; predicted together; resumed together."""
    rng = np.random.default_rng(0)
    x, z = rng.normal(size=(2, 300))
    path, folder = tmp_path / "t.csv", tmp_path / "both"
    rows = zip(x, 2 * x + z, np.where(x + 0.1 * z > 0, "up", "down"), strict=True)
    path.write_text("x,price,move\n" + "".join(f"{a:.4f},{b:.4f},{c}\n" for a, b, c in rows))
    words = ["learn", str(path), "--hidden", "none", "--run"]
    both = ["--target", "price", "--target", "move"]
    assert cli.main([*words, str(folder), *both]) == 0
    assert cli.main(["learn", "--run", str(folder), "--resume"]) == 0
    assert cli.main([*words, str(tmp_path / "alone"), "--target", "price", "--leave-out", "move"]) == 0
    one, alone = (learnt(RunDirectory(run)).tree["state"] for run in (folder / "1-price", tmp_path / "alone"))
    assert jax.tree.all(jax.tree.map(np.array_equal, one, alone))
    assert cli.main(["predict", str(folder), str(path), "-o", str(tmp_path / "out.csv")]) == 0
    assert cli.main(["predict", str(tmp_path / "alone"), str(path), "-o", str(tmp_path / "one.csv")]) == 0
    out, single = (pyarrow.csv.read_csv(tmp_path / name).to_pydict() for name in ("out.csv", "one.csv"))
    assert list(out)[:3] == ["row", "price: mean", "price: sd"]
    assert out["price: mean"] == single["mean"]
    assert set(out["move: prediction"]) == {"up", "down"}
    assert cli.main(["report", str(folder)]) == 0
    assert (folder / "2-move" / "report.html").exists()
    capsys.readouterr()
    for wrong, says in (
        ([*words, str(folder), "--target", "move", "--target", "x"], "holds runs of other targets: price, move"),
        ([*words, str(tmp_path / "alone"), *both], "holds a run of one target"),
        ([*words, str(tmp_path / "new"), "--target", "x", "--target", "x"], "names a column twice"),
        (["learn", "-", "--run", str(tmp_path / "new"), *both], "a pipe is read once"),
        (["predict", str(folder), "-"], "a pipe is read once"),
        ([*words, str(folder), "--target", "x"], "holds runs of several targets"),
    ):
        assert cli.main(wrong) != 0
        assert says in capsys.readouterr().err
