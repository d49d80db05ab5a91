"""Results for pages: one number of a committed file, and tables written between marks of a page."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
END = "<!-- end -->"


def read(name: str) -> Any:
    """Return a committed results file."""
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def mean(name: str, row: str, key: str, digits: int) -> str:
    """Return the mean over an experiment's trials."""
    trials = read(name)["rows"][row]["trials"].values()
    return f"{statistics.mean(trial[key] for trial in trials):.{digits}f}"


def benchmark(name: str, what: str, size: str = "") -> dict[str, Any]:
    """Return one line of a benchmark's results."""
    return next(r for r in read(name)["results"] if r["what"] == what and size in r["size"])


def in_table(name: str, row: str, column: str) -> str:
    """Return a cell of the table that a results file holds."""
    table = read(name)["table"]
    return next(cells for cells in table["rows"] if cells[0] == row)[table["header"].index(column)]


def fill(page: Path, kind: str, found: dict[str, str]) -> None:
    """Write each table between its marks on the page, `<!-- KIND: NAME -->` and `<!-- end -->`."""
    text = page.read_text(encoding="utf-8")
    for name, table in found.items():
        mark = f"<!-- {kind}: {name} -->"
        if mark not in text:
            raise ValueError(f"{page} has no place for the table `{name}`: put `{mark}` and `{END}` into it.")
        new = f"{mark}\n\n{table.strip()}\n\n{END}"
        text = re.sub(f"{re.escape(mark)}.*?{END}", lambda _, new=new: new, text, flags=re.DOTALL)
    page.write_text(text, encoding="utf-8")
