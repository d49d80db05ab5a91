"""Results know the code they were made with."""

from benchmarks.stamp import changed, stamp


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
