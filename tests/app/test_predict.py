"""Reading a run to predict with it: every folder that is no good is refused in words."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from opvi.adapters._tables import Schema, infer_schema, open_source
from opvi.app.cli import main
from opvi.app.learn import RunDirectory, RunError, Settings, _model, predict
from opvi.app.learn import _scores as scores
from opvi.app.learn._model import described, free_memory, model
from opvi.app.learn._predict import learnt

SETTINGS = Settings(hidden=(), particles=2)


@pytest.fixture
def schema(tmp_path: Path) -> Schema:
    path = tmp_path / "a.csv"
    path.write_text("a,b,y\n" + "".join(f"{i % 7},{i % 5},{i % 11}.5\n" for i in range(50)))
    return infer_schema(open_source(path).blocks(), "y")


@pytest.fixture
def run(tmp_path: Path, schema: Schema) -> RunDirectory:
    """A run that has learnt nothing yet, saved."""
    run = RunDirectory(tmp_path / "run")
    run.begin({"schema": schema.to_json(), "settings": SETTINGS._asdict()})
    tree = {
        "state": model(schema, SETTINGS).init(jax.random.key(0)),
        "scores": scores.start("regression", 0),
        "places": [],
        "kinds": {},
        "waiting": {"x": np.zeros((0, len(schema.features)), np.float32), "y": np.zeros(0, np.float32)},
        "about": described(schema, SETTINGS),
    }
    with run.checkpoints as kept:
        kept.save(1, tree)
    return run


def edit(run: RunDirectory, **changes: object) -> None:
    path = run.path / "run.json"
    about = json.loads(path.read_text())
    about["settings"] |= changes
    path.write_text(json.dumps(about))


def test_a_table_without_rows_has_its_columns_named(run: RunDirectory, tmp_path: Path) -> None:
    path = tmp_path / "none.csv"
    path.write_text("a,b\n")
    ((columns, rejected),) = predict(learnt(run), open_source(path), [0.5])
    assert list(columns) == ["row", "mean", "sd", "q0.5"]
    assert all(len(values) == 0 for values in columns.values())
    assert not rejected


def test_before_anything_was_learnt_it_is_said(run: RunDirectory, tmp_path: Path, capsys) -> None:
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    assert main(["predict", str(run.path), str(tmp_path / "t.csv")]) == 0
    assert "Nothing was learnt yet: the predictions are the model's first guesses." in capsys.readouterr().err


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to, None])
def test_the_source_is_not_written_over(run: RunDirectory, tmp_path: Path, link, capsys) -> None:
    source, out = tmp_path / "t.csv", tmp_path / "other.csv"
    source.write_text("a,b\n1,2\n")
    if link is None:
        out = tmp_path / "." / "t.csv"
    else:
        link(out, source)
    assert main(["predict", str(run.path), str(source), "-o", str(out)]) == 1
    assert "is the source itself" in capsys.readouterr().err
    assert source.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"particles": 4}, "describes other columns or another model"),
        ({"particles": "two"}, "cannot be made: `particles` is 'two'"),
        ({"particles": [2]}, "cannot be made"),
        ({"hidden": [0]}, "cannot be made: `hidden`"),
        ({"wings": 2}, "does not describe a model"),
    ],
)
def test_settings_that_are_not_the_run_s(run: RunDirectory, changes: dict, message: str) -> None:
    edit(run, **changes)
    with pytest.raises(RunError, match=message):
        learnt(run)


def test_no_checkpoint_and_no_whole_one_are_told_apart(run: RunDirectory) -> None:
    (path,) = (run.path / "checkpoints").glob("*.opvi")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"no intact checkpoint; the newest: .*000001\.opvi is damaged"):
        learnt(run)
    path.unlink()
    with pytest.raises(RunError, match="no checkpoint yet"):
        learnt(run)


def test_a_model_beyond_memory_is_refused_before_it_is_made(schema: Schema) -> None:
    names = [str(i) for i in range(300)]
    many = schema._replace(task="classification", features=names[:64], classes=names)
    with pytest.raises(ValueError, match=r"would have [\d.]+ GiB.*Leave out columns"):
        model(many, Settings(hidden=()))
    assert model(many, Settings()).about  # with a hidden layer it fits
    wide = schema._replace(features=[str(i) for i in range(3_000)])
    with pytest.raises(ValueError, match="3,000 columns as encoded, and grows with their square. Leave out") as refused:
        model(wide, Settings())
    assert "class" not in str(refused.value)


def test_memory_that_is_not_there_is_refused_with_numbers(schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (free_memory() or 1) > 0
    monkeypatch.setattr(_model, "free_memory", lambda: 1 << 20)
    with pytest.raises(
        ValueError, match=r"the model has [\d,]+ MiB and needs about 4 times .* only 1 MiB of memory are"
    ):
        model(schema, Settings())
