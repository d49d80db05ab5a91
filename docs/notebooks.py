"""Write guides as notebooks, with what their blocks printed: `python docs/notebooks.py`.

The page is the source: its blocks are run by the tests, and a test compares the notebooks with the pages.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
NOTEBOOKS = {  # guides, and what they need
    "regression": "opvi[sklearn,plots]",
    "drift": "opvi[river,plots]",
    "numpyro": "opvi[numpyro,plots]",
}
PART = re.compile(
    r"^```python\n(?P<code>.*?)^```\n|^<!-- output -->\n(?P<output>.*?)^<!-- end -->\n", re.DOTALL | re.MULTILINE
)
PRINTED = re.compile(r"```text\n(.*?)```", re.DOTALL)
PAGE = re.compile(
    r"\[([^\]]*)\]\((?!https?:|#)[^)]*\.md(?:#[^)]*)?\)"
)  # links to pages, which a notebook has not beside it
FOOT = re.compile(r"^Run it yourself: .*\n", re.MULTILINE)


def notebook(text: str, needs: str) -> dict[str, Any]:
    """Return a page as a notebook: its code, its words, and what the code printed; figures are drawn anew."""
    cells: list[dict[str, Any]] = []
    text, last = FOOT.sub("", text), 0
    for part in PART.finditer(text):
        _say(cells, text[last : part.start()])
        last = part.end()
        if part["code"] is not None:
            cells.append({**_cell("code", part["code"], len(cells)), "execution_count": None, "outputs": []})
        else:
            printed = "".join(PRINTED.findall(part["output"]))
            stream = {"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}
            cells[-1]["outputs"] = [stream] if printed else []
    _say(cells, text[last:])
    cells[0]["source"] += ["\n", "\n", f"Needs `pip install '{needs}'`."]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def _say(cells: list[dict[str, Any]], words: str) -> None:
    if words.strip():
        cells.append(_cell("markdown", PAGE.sub(r"\1", words).strip(), len(cells)))


def _cell(kind: str, source: str, number: int) -> dict[str, Any]:
    """Return a cell; its name depends on its content and place alone."""
    name = hashlib.sha256(f"{number} {source}".encode()).hexdigest()[:8]
    return {"cell_type": kind, "id": name, "metadata": {}, "source": source.rstrip().splitlines(keepends=True)}


def written(name: str) -> str:
    """Return the file of a guide's notebook."""
    page = (DOCS / "guides" / f"{name}.md").read_text(encoding="utf-8")
    return json.dumps(notebook(page, NOTEBOOKS[name]), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all of them."""
    for name in NOTEBOOKS:
        file = DOCS / "notebooks" / f"{name}.ipynb"
        file.parent.mkdir(exist_ok=True)
        file.write_text(written(name), encoding="utf-8")


if __name__ == "__main__":
    main()
