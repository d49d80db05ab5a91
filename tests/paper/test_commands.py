"""`python -m paper`: experiments run, resume, and say what is wrong."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from paper import commands, data, results


def fake(trial: Any, rows: tuple[str, ...] = ("one", "two"), **settings: Any) -> results.Experiment:
    """An experiment that costs nothing."""

    def draw(book: results.Book, folder: Path) -> Any:
        import matplotlib.pyplot as plt

        return plt.figure()

    return results.Experiment(
        name="fake-text",
        title="a fake",
        settings=settings,
        rows=[results.Row(name, {"row": name}, lambda seed, name=name: trial(name, seed)) for name in rows],
        repeats=2,
        header=["method", "x"],
        line=lambda name, records: [results.summary(records, "x").text(1)],
        checks=lambda book: [results.at_least("x", 1.0, 0.5)],
        draw=draw,
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command on a fake experiment; gives its exit status."""

    def call(experiment: results.Experiment, *more: str, out: Path = tmp_path) -> int:
        monkeypatch.setattr(commands, "build", lambda name, options: experiment)
        return commands.main(["reproduce", "synthetic", "--out", str(out), *more])

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "name", "row"),
    [
        (["synthetic", "--mode", "best", "--variance", "4"], "synthetic-best-variance-4-smoke", "best"),
        (["kin8nm", "--mode", "best"], "kin8nm-best-smoke", "best (tanh)"),
        (["mnist", "--mode", "authors"], "mnist-authors-smoke", "LD full"),
    ],
    ids=["synthetic", "kin8nm", "mnist"],
)
def test_an_experiment_runs_in_seconds(words: list[str], name: str, row: str, tmp_path: Path, capsys: Any) -> None:
    with jax.numpy_dtype_promotion("standard"):  # optax's NAdam mixes integers and floats
        assert commands.main(["reproduce", *words, "--smoke", "--seeds", "1", "--out", str(tmp_path)]) == 0
    content = json.loads((tmp_path / f"{name}.json").read_text())
    assert content["rows"][row]["trials"]["0"]["rows"] > 0
    assert content["command"].startswith(f"python -m paper reproduce {words[0]} --mode {words[2]}")
    for ending in (".png", ".svg", ".md"):
        assert (tmp_path / f"{name}{ending}").stat().st_size > 0
    assert row in capsys.readouterr().out


def test_the_file_says_all_about_itself(run: Any, tmp_path: Path) -> None:
    assert run(fake(lambda name, seed: {"x": seed}, note=1), "--seeds", "3") == 0
    content = json.loads((tmp_path / "fake-text.json").read_text())
    assert content["command"] == "python -m paper reproduce synthetic --mode text --seeds 3"
    assert content["settings"] == {"note": 1}
    assert content["checks"][0]["holds"] is True
    assert content["rows"]["two"] == {"settings": {"row": "two"}, "trials": {str(i): {"x": i} for i in range(3)}}
    assert set(content["made_with"]) == {"python", "jax", "backend", "commit"}


def test_an_interrupted_run_is_resumed(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[tuple[str, int]] = []

    def trial(name: str, seed: int, stop: bool) -> results.Record:
        if stop and len(done) == 3:
            raise KeyboardInterrupt
        done.append((name, seed))
        return {"x": seed}

    assert run(fake(lambda name, seed: trial(name, seed, True))) == commands.INTERRUPTED
    told = capsys.readouterr().err
    assert f"python -m paper reproduce synthetic --mode text --seeds 2 --out {tmp_path}" in told
    assert json.loads((tmp_path / "fake-text.json").read_text())["rows"]["two"]["trials"] == {"0": {"x": 0}}
    assert run(fake(lambda name, seed: trial(name, seed, False))) == 0
    assert done == [("one", 0), ("one", 1), ("two", 0), ("two", 1)]


def test_other_settings_are_not_mixed_in(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake(lambda name, seed: {"x": 1}, width=1)) == 0
    assert run(fake(lambda name, seed: {"x": 2}, width=2)) == 1
    assert "another `settings`" in capsys.readouterr().err
    assert run(fake(lambda name, seed: {"x": 2}, width=2), "--fresh") == 0


def test_a_row_with_other_settings_is_run_anew(tmp_path: Path) -> None:
    book = results.Book(tmp_path / "b.json", results.header(fake(None), "opvi"))
    row = results.Row("one", {"step": 1}, lambda seed: {})
    book.add(row, 0, {"x": 1})
    assert book.has(row, 0)
    assert not book.has(row._replace(settings={"step": 2}), 0)


def test_a_spoilt_file_is_named(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fake-text.json").write_text("{")
    assert run(fake(lambda name, seed: {"x": 1})) == 1
    assert "not valid JSON" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(fake(lambda name, seed: {"x": 1}), out=tmp_path / "file" / "below") == 1
    told = capsys.readouterr().err
    assert "`--out` is" in told
    assert "nothing can be written" in told


def test_missing_data_is_an_error_not_a_trace(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setenv(data.FOLDER, str(tmp_path / "nowhere"))
    assert commands.main(["reproduce", "kin8nm", "--out", str(tmp_path)]) == 1
    assert "which is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["reproduce", "cifar"],
        ["reproduce", "kin8nm", "--mode", "other"],
        ["reproduce", "kin8nm", "--splits", "0"],
        ["reproduce", "synthetic", "--variance", "-1"],
        ["forget"],
    ],
)
def test_unknown_words_end_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        commands.main(words)
    assert stop.value.code == 2
    assert "error" in capsys.readouterr().err


def test_a_missing_library_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else name)
    assert commands.main(["reproduce", "synthetic"]) == 1
    assert "matplotlib is needed but not installed" in capsys.readouterr().err
