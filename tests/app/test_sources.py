"""Sources by content: a source is continued only if everything learnt from it is still there."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from opvi.adapters._tables import SourceChangedError, TableError, cut, open_source
from opvi.app import cli
from opvi.app.learn import RunDirectory, RunError
from opvi.app.learn import _learner as learner
from opvi.app.learn._predict import learnt
from opvi.app.learn._starting import Asked, alone
from opvi.app.learn._stopping import Stop
from opvi.running._cursor import Cursor, Trail
from tests.app.test_learning import SMALL, learn

ROWS = 9000  # more than 64 KiB, and more than one block


def written(folder: Path, kind: str, rows: range | list[int] = range(ROWS), name: str = "a") -> Path:
    """Rows of two columns."""
    path = folder / f"{name}.{kind}"
    if kind == "parquet":
        numbers = np.array(rows)
        table = pa.table({"x": numbers % 7, "y": numbers * 1.5})
        pyarrow.parquet.write_table(table, path, row_group_size=2000, compression="none")
        return path
    if kind.startswith("csv"):
        lines = ["x,y", *(f"{row % 7},{row * 1.5}" for row in rows)]
    else:
        lines = [json.dumps({"x": row % 7, "y": row * 1.5}) for row in rows]
    text = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if kind.endswith("gz") else text)
    return path


def passed(path: Path, count: int, size: int = 700, **options) -> Cursor:
    """The cursor behind the first rows, learnt so many at a time."""
    cursor = Cursor()
    with open_source(path, **options) as source:
        for block in source.blocks():
            for start in range(block.first, min(count, block.first + block.rows), size):
                cursor = source.passed(cut(block, start, min(count, start + size)))
    return cursor


KINDS = ["csv", "jsonl", "csv.gz", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_is_known_by_everything_consumed(tmp_path, kind):
    path = written(tmp_path, kind)
    cursor = passed(path, 8500)
    assert cursor.row == 8500
    assert passed(path, 8500, size=333) == cursor  # however it was cut
    with open_source(path, skip=8500, digest=cursor.digest) as source:
        source.check()
        assert sum(block.rows for block in source.blocks()) == 500
    resumed = passed(path, 9000, skip=8500, digest=cursor.digest)
    assert resumed == passed(path, 9000)

    changes = {
        "inserted": [*range(8300), *range(50), *range(8300, ROWS)],
        "changed": [*range(7000), 7, *range(7001, ROWS)],
        "shorter": range(8000),
        "regrown": [*range(100), *range(20_000, 20_000 + ROWS)],
    }
    for name, rows in changes.items():
        written(tmp_path, kind, rows)
        words = "now it has 8,000" if name == "shorter" else "not its first"
        with (
            open_source(path, skip=8500, digest=cursor.digest) as source,
            pytest.raises(SourceChangedError, match=words),
        ):
            source.check()
    if kind != "parquet":  # of which a row group is known as a whole
        written(tmp_path, kind, [*range(8500), *range(20)])  # what was not learnt yet may change
        with open_source(path, skip=8500, digest=cursor.digest) as source:
            source.check()
            assert sum(block.rows for block in source.blocks()) == 20


def test_the_digest_is_the_hash_of_the_rows(tmp_path):
    """Blank lines and carriage returns are no part of them, and malformed rows are."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'x,y\r\n1,2\r\n\r\n"a\nb",4\n5\n6,"7\n8,9\n')
    trail = Trail()
    for row in (b"1,2\n", b'"a\nb",4\n', b"5\n", b'6,"7\n', b"8,9\n"):
        trail.add(row, 1)
        assert passed(path, trail.row, size=1) == trail.cursor


def test_rows_are_passed_in_order(tmp_path):
    with open_source(written(tmp_path, "csv")) as source:
        block = next(source.blocks())
        with pytest.raises(ValueError, match="row 5 was passed after row 0"):
            source.passed(cut(block, 5, 6))


@pytest.mark.parametrize("kind", ["csv", "jsonl", "csv.gz"])
def test_a_last_line_without_its_end_comes_alone(tmp_path, kind):
    path = written(tmp_path, kind, range(30))
    data = gzip.decompress(path.read_bytes()) if kind.endswith("gz") else path.read_bytes()
    path.write_bytes(gzip.compress(data[:-1]) if kind.endswith("gz") else data[:-1])
    with open_source(path) as source:
        assert [(block.rows, block.unended) for block in source.blocks()] == [(29, False), (1, True)]


# --- learning -----------------------------------------------------------------------------------


@pytest.fixture
def line(tmp_path):
    """A file to write rows to, and its run."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=600)
    rows = [f"{a:.6f},{2 * a + b / 10:.6f}\n" for a, b in zip(x, rng.normal(size=600), strict=True)]
    return tmp_path / "line.csv", tmp_path / "line.run", rows


def test_a_changed_file_is_refused_and_another_is_learnt_from_its_first_row(line):
    path, run, rows = line
    path.write_text("x,y\n" + "".join(rows[:300]))
    assert learn(path, run, first_rows=100).rows == 300
    path.write_text("x,y\n" + "".join(rows[:299] + rows[500:550] + rows[299:300]))  # 50 inserted
    for source in (path, None):
        with pytest.raises(SourceChangedError, match=r"has changed: 300 rows.*under another name|begins diff"):
            learn(source, run)
    assert learnt(RunDirectory(run)).tree["rows"] == 300
    other = path.with_name("other.csv")
    other.write_text("x,y\n" + "".join(rows[:100] + rows[400:450]))
    assert learn(other, run).rows == 450


def test_a_line_that_was_learnt_before_it_was_whole_is_taken_back(line):
    path, run, rows = line
    text = "x,y\n" + "".join(rows[:250])
    path.write_text(text[:-5])
    assert learn(path, run, first_rows=100).rows == 250
    assert learn(path, run).rows == 250  # as long as nobody writes to it, it counts
    path.write_text(text + "".join(rows[250:400]))
    done = learn(path, run)
    assert done.rows == 400
    assert any("taken back" in message for message in done.messages)
    whole = learn(path, run.with_name("whole.run"), first_rows=100)
    np.testing.assert_array_equal(done.engine.state.particles, whole.engine.state.particles)
    path.write_text(text + "".join(rows[250:400]) + rows[7])
    assert learn(path, run).rows == 401


def test_other_settings_are_refused(line, capsys):
    path, run, rows = line
    path.write_text("x,y\n" + "".join(rows[:300]))
    asked = {"hidden": [], "particles": 4}
    learn(path, run, given=asked)
    assert learn(path, run, given={"hidden": (), "task": "regression"}).rows == 300
    for given, words in (
        ({"seed": 3}, "`--seed` is 3, but the run in .* began with 0"),
        ({"particles": 5}, "`--particles` is 5, .* began with 4. Leave it out, or begin a new run"),
        ({"classes": "a,b"}, "`--classes` is a,b, .* began without it"),
        ({"task": "classification"}, "began with regression"),
    ):
        with pytest.raises(RunError, match=words):
            learn(path, run, given=given)
    assert cli.main(["learn", str(path), "--run", str(run), "--resume", "--hidden", "7"]) == 1
    assert "`--hidden` is (7,), but the run" in capsys.readouterr().err
    assert SMALL.seed == 0


def test_a_log_that_is_closed_does_not_end_learning(line, monkeypatch, capsys):
    from opvi.app.cli import _screen

    path, run, rows = line
    path.write_text("x,y\n" + "".join(rows))
    monkeypatch.setattr(_screen, "LOG_EVERY", 0.0)
    monkeypatch.setattr(learner, "ROWS", 80)

    class Closed:
        encoding, written = "utf-8", 0

        def write(self, text):
            self.written += 1
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self):
            raise BrokenPipeError(32, "Broken pipe")

        def isatty(self):
            return False

    monkeypatch.setattr("sys.stderr", Closed())
    options = ["--target", "y", "--hidden", "none", "--particles", "4", "--run", str(run)]
    assert cli.main(["learn", str(path), *options]) == 0
    monkeypatch.undo()
    assert learnt(RunDirectory(run)).tree["rows"] == 600


@pytest.mark.parametrize(
    ("header", "refused"),
    [
        ("y,x,a", True),
        (" y , x , a ", True),
        ('"y","x","a"', True),
        ("x,y,b", True),
        ("x,y,a", False),
        ("7,x,a", False),
    ],
)
def test_another_header_half_way_ends_the_reading(tmp_path, header, refused):
    """Two tables joined to one, with their columns in another order: the second would be read under wrong names."""
    rows = [f"{i % 7},{i * 1.5},{'pq'[i % 2]}" for i in range(1200)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["x,y,a", *rows[:900], header, *rows[900:]]) + "\n")
    if not refused:
        done = learn(path, tmp_path / "run")
        assert (done.rows, done.rejected) == (1200, 1)
        return
    with pytest.raises(TableError, match="names its columns again in row 900, and otherwise"):
        learn(path, tmp_path / "run", first_rows=500)
    tree = learnt(RunDirectory(tmp_path / "run")).tree
    assert tree["rows"] + len(tree["waiting"]["y"]) == 900  # those before it are learnt


def test_text_that_happens_to_be_a_column_s_name_is_a_value(tmp_path):
    rows = [f"{['x', 'a', 'y'][i % 3]},{i * 1.5},{['x', 'a'][i % 2]}" for i in range(300)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,a", *rows]) + "\n")
    assert learn(tmp_path / "t.csv", tmp_path / "run").rows == 300


@pytest.mark.parametrize(("kind", "left"), [("csv", 100), ("jsonl", 0), ("csv.gz", 100), ("csv", 1_200_000)])
def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path, kind, left):
    path = written(tmp_path, kind, range(130_000))
    with open_source(path) as source:
        blocks = source.blocks()
        next(blocks)
        os.truncate(path, left)
        with pytest.raises(SourceChangedError, match="has become shorter while it was read"):
            _ = list(blocks)


def test_a_run_of_a_file_that_is_emptied_ends_with_an_error_and_resumes(tmp_path, capsys, monkeypatch):
    path = written(tmp_path, "csv", range(130_000))
    whole, real = path.read_bytes(), learner.Learner.take

    def take(self, block, learn=True):
        path.write_bytes(b"")
        return real(self, block, learn)

    monkeypatch.setattr(learner.Learner, "take", take)
    with pytest.raises(SourceChangedError, match="has become shorter"):
        learn(path, tmp_path / "run")
    path.write_bytes(whole)
    with alone(RunDirectory(tmp_path / "run"), Asked(None, resume=True), Stop()) as made:
        assert next(made.source.blocks()).first == made.learner.rows + len(made.learner.waiting[1])


@pytest.mark.parametrize("scale", [1e-25, 1e-17])
def test_values_too_small_for_a_float32_are_not_passed_over_in_silence(tmp_path, scale):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    y = x.sum(1) + 0.1 * rng.normal(size=300)
    lines = [f"{a * scale!r},{b!r},{c!r}" for (a, b), c in zip(x.tolist(), y.tolist(), strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")
    done = learn(tmp_path / "t.csv", tmp_path / "run")
    told = [note for note in done.schema.notes if "'a'" in note]
    if scale < 1e-18:
        assert "left out: its values differ by less than 1e-18. Give it in a smaller unit" in told[0]
        assert done.schema.features == ["b"]
    else:
        assert not told
        assert done.summary().recent.error < 0.5  # it is learnt
    (tmp_path / "tiny.csv").write_text(
        "\n".join(["x,y", *(f"{i % 7},{c * 1e-25!r}" for i, c in enumerate(y.tolist()))]) + "\n"
    )
    with pytest.raises(TableError, match="the target 'y' varies by less than 1e-18"):
        learn(tmp_path / "tiny.csv", tmp_path / "other")
