"""Classes that first appear in the middle of a stream are learnt by `opvi learn`, whatever happens to the process."""

import json

import jax
import numpy as np
import pyarrow.csv as pc
import pytest

from opvi.adapters._tables import Schema, infer_schema, open_source
from opvi.app import cli
from opvi.app.learn import RunDirectory, Settings, Stopped
from opvi.app.learn import _classes as classes
from opvi.app.learn import _learner as learner
from opvi.app.learn._classes import met
from opvi.app.learn._predict import learnt
from tests.app.test_learning import learn, stopping_after

SMALL = {"settings": Settings(hidden=(), particles=4), "first_rows": 100}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Clusters at -2 and 2 from the start, at 6 from row 333 on, at -6 from row 700 on; the last row is broken."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("late") / "late.csv"
    lines = []
    for i in range(900):
        kinds = 2 if i < 333 else 3 if i < 700 else 5
        kind = int(rng.integers(kinds)) if i != 333 else 2
        x = (-2, 2, 6, -6, 10)[kind] + rng.normal() / 2
        lines.append(f"{x:.4f},{rng.normal():.4f},{('b', 'a', '9007199254740993', 'e', 'c')[kind]}\n")
    path.write_text("x,noise,y\n" + "".join(lines) + "oops,1,never\n")
    return path


@pytest.fixture(scope="module")
def whole(table):
    folder = table.parent / "run"
    learn(table, folder, **SMALL)
    return folder


@pytest.mark.slow
def test_late_classes_are_learnt(table, whole, tmp_path):
    known = learnt(RunDirectory(whole))
    assert known.schema.classes[:2] == ["a", "b"]
    assert known.schema.classes[2] == "9007199254740993"
    assert set(known.schema.classes[3:]) == {"e", "c"}
    figures = json.loads((whole / "metrics.json").read_text())
    assert (figures["rows"], figures["rejected"]) == (900, 1)
    assert figures["recent_error_rate"] < 0.15
    assert cli.main(["predict", str(whole), str(table), "-o", str(tmp_path / "out.csv")]) == 0
    out = pc.read_csv(tmp_path / "out.csv", convert_options=pc.ConvertOptions(column_types={"prediction": "string"}))
    truth = [line.split(",")[2] for line in table.read_text().splitlines()[1:-1]]
    assert np.mean(np.array(out["prediction"].to_pylist()[:-1]) == truth) > 0.95
    p = np.array([out[f"p={name}"].to_numpy()[:-1] for name in known.schema.classes])
    np.testing.assert_allclose(p.sum(0), 1, rtol=1e-5)
    assert cli.main(["report", str(whole), "-o", str(tmp_path / "page.html")]) == 0
    assert "9007199254740993" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_stopped_run_with_late_classes_ends_with_the_same_bits(table, whole, tmp_path, monkeypatch):
    """The model grows before the same batch, however the rows are cut."""
    monkeypatch.setattr(learner, "ROWS", 77)
    for chunks in (4, 2, 5):
        with pytest.raises(Stopped):
            learn(table, tmp_path / "run", **SMALL, **stopping_after(chunks))
    learn(None, tmp_path / "run", **SMALL)
    one, other = (learnt(RunDirectory(folder)).tree for folder in (whole, tmp_path / "run"))
    assert one["classes"] == other["classes"]
    assert one["room"] == other["room"] == 8
    for a, b in zip(*(jax.tree.leaves((tree["state"], tree["scores"])) for tree in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_named_classes_are_all_there_are(table, tmp_path):
    done = learn(table, tmp_path / "run", **SMALL, classes=["a", "b"])
    assert done.schema.classes == ["a", "b"]
    assert done.rejected > 200


def test_there_is_a_largest_number_of_classes(table, tmp_path, monkeypatch):
    monkeypatch.setattr(classes, "MOST_CLASSES", 3)
    done = learn(table, tmp_path / "run", **SMALL)
    assert done.schema.classes == ["a", "b", "9007199254740993"]
    assert any("is none of the classes" in kind for kind in done.kinds)


@pytest.mark.parametrize(
    ("first", "late", "classes"),
    [
        (["true", "false"], ["maybe", "1", "TRUE", "0"], ["false", "true", "maybe", "1", "0"]),
        (["true", "0"], ["maybe", "1", "False"], ["false", "true", "maybe"]),
        (["1", "2"], ["other", "3", "02"], ["1", "2", "other", "3", "02"]),
        (["7", "8"], ["07", "3.0", "8", "3", "07"], ["7", "8", "07", "3.0", "3"]),
        (["1.0", "2.0"], ["3.0", "3", "01", "x"], ["1", "2", "3", "01", "x"]),
        (["7", "8"] * 30 + ["odd"], ["9"], ["7", "8", "odd", "9"]),
    ],
)
def test_late_labels_are_kept_as_written(tmp_path, first, late, classes):
    """Among truth values and numbers as among text; a missing label still costs its row."""
    labels = [*(first[i % len(first)] for i in range(120)), *late, "?", ""]
    text = "".join(f"{i % 7}.5,{i % 3},{label}\n" for i, label in enumerate(labels))
    (tmp_path / "a.csv").write_text(f"x,noise,y\n{text}")
    with open_source(tmp_path / "a.csv") as source:
        blocks = list(source.blocks())
    schema, encoded = met(infer_schema(blocks, "y", rows=100), blocks[0])
    assert schema.classes == classes
    assert [one.row for one in encoded.rejected] == [len(labels) - 2, len(labels) - 1]


def test_a_run_meets_late_classes_among_truth_values(tmp_path):
    text = "".join(f"{i % 7}.5,{('maybe', 'true', 'false')[i % 3 or 2 * (i < 150)]}\n" for i in range(300))
    (tmp_path / "a.csv").write_text(f"x,y\n{text}")
    done = learn(tmp_path / "a.csv", tmp_path / "run", **SMALL)
    assert (done.schema.classes, done.rejected) == (["false", "true", "maybe"], 0)


def test_numbers_in_json_are_values(tmp_path):
    """Beside labels of a table, too, as in a request to a model that learnt from one."""
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i}.5,{i % 2 + 7}\n" for i in range(30)))
    (tmp_path / "b.jsonl").write_text('{"x": 1, "y": 7.0}\n{"x": 1, "y": "07"}\n{"x": 2, "y": 9.0}\n{"x": 2, "y": 9}\n')
    with open_source(tmp_path / "a.csv") as table, open_source(tmp_path / "b.jsonl") as lines:
        schema = infer_schema(list(table.blocks()), "y")
        schema, encoded = met(schema, *lines.blocks())
    assert schema.classes == ["7", "8", "07", "9"]
    assert encoded.y.tolist() == [0, 2, 3, 3]


@pytest.mark.parametrize(
    ("labels", "late", "codes"),
    [("boolean", ["1", "FALSE", "maybe"], [1, 0, 2]), ("number", ["1.0", "0", "maybe"], [1, 0, 2])],
)
def test_schemas_of_older_runs_meet_late_classes(tmp_path, labels, late, codes):
    """In them 1 is true, and numbers are read by value."""
    names = ["false", "true"] if labels == "boolean" else ["0", "1"]
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i}.5,{label}\n" for i, label in enumerate(late)))
    with open_source(tmp_path / "a.csv") as source:
        blocks = list(source.blocks())
    old = infer_schema(blocks, "y", task="classification").to_json()
    schema, encoded = met(Schema.from_json({**old, "classes": names, "labels": labels}), blocks[0])
    assert schema.classes == [*names, "maybe"]
    assert encoded.y.tolist() == codes
