"""docs/measured.md shows what the committed results hold, losses first."""

import pytest

from arena import measured
from benchmarks.pages import fill


def test_the_page_shows_the_results():
    page = measured.PAGE.read_text(encoding="utf-8")
    for name, table in measured.tables().items():
        place = f"<!-- measured: {name} -->\n\n{table.strip()}\n\n<!-- end -->"
        assert place in page, f"the table `{name}` is out of date: python -m arena.measured"


def test_losses_come_first():
    page = measured.PAGE.read_text(encoding="utf-8")
    marks = [page.index(f"<!-- measured: {name} -->") for name in measured.tables()]
    assert marks[0] == min(marks)
    ours = [row.split(" | ")[2] for row in measured.tables()["streams"].splitlines()[2:]]
    won = [cell.startswith("**") for cell in ours]
    assert won == sorted(won)


def test_a_table_without_a_place_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- kind: one -->\nold\n<!-- end -->\nafter\n")
    fill(page, "kind", {"one": "| new |\n"})
    assert page.read_text() == "before\n<!-- kind: one -->\n\n| new |\n\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="no place for the table `two`"):
        fill(page, "kind", {"two": "| new |\n"})
