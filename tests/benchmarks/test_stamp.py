"""Results know the code they were made with."""

import json
import subprocess

from benchmarks.stamp import changed, measured, stamp, write


def test_results_are_older_once_a_source_changes(tmp_path):
    (tmp_path / "room").mkdir()
    for name in ("a.py", "room/b.py"):
        (tmp_path / name).write_text("x = 1\n")
    results = {"sources": stamp("a.py", "room", root=tmp_path)}
    assert list(results["sources"]) == ["a.py", "room/b.py"]
    assert changed(results, tmp_path) == []
    (tmp_path / "room" / "b.py").write_text('"""A sentence."""\n\nx = 1  # a remark\n')
    assert changed({"sources": stamp("room", root=tmp_path)}, tmp_path) == []
    (tmp_path / "room" / "b.py").write_text('"""A better sentence."""\n\nx = 1\n')
    results["sources"] |= stamp("room", root=tmp_path)
    (tmp_path / "room" / "b.py").write_text('"""The best sentence."""\n\nx = 1\n')
    assert changed(results, tmp_path) == []
    (tmp_path / "room" / "b.py").write_text("x = 2\n")
    assert changed(results, tmp_path) == ["room/b.py"]
    (tmp_path / "a.py").unlink()
    assert changed(results, tmp_path) == ["a.py", "room/b.py"]
    assert changed({}) == []


def test_results_are_stamped_with_the_code_of_their_commit(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)

    file, source = tmp_path / "plan.json", tmp_path / "src" / "opvi" / "scale" / "a.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n")
    file.write_text('{\n "figure": 1\n}\n')
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    before = file.read_text()
    source.write_text("x = 2\n")
    git("commit", "-q", "-a", "-m", "second")
    write(file, tmp_path)
    older = json.loads(file.read_text())
    assert older["figure"] == 1
    assert changed(older, tmp_path) == ["benchmarks/plan.py", "src/opvi/scale"]  # the first is not there at all
    file.write_text(before.replace("1", "2"))  # new, not committed
    write(file, tmp_path)
    assert changed(json.loads(file.read_text()), tmp_path) == ["benchmarks/plan.py"]
    (source.parent / "b.py").write_text("y = 1\n")
    assert "src/opvi/scale" in changed(json.loads(file.read_text()), tmp_path)


def test_every_result_says_what_it_depends_on():
    assert [file.name for file, results in measured() if not results.get("sources")] == []
