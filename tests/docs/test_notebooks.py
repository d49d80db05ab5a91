"""The notebooks are the guides, whose blocks other tests run."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "notebooks.py")
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)


@pytest.mark.parametrize("name", notebooks.NOTEBOOKS)
def test_a_notebook_is_its_page(name):
    file = ROOT / "docs" / "notebooks" / f"{name}.ipynb"
    assert file.read_text(encoding="utf-8") == notebooks.written(name), "run `python docs/notebooks.py`"
    page = (ROOT / "docs" / "guides" / f"{name}.md").read_text(encoding="utf-8")
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == page.count("```python\n")
    assert all(f"```python\n{block}\n```" in page for block in code)
    compile("\n".join(code), name, "exec")
    assert f"(../notebooks/{name}.ipynb)" in page


def test_words_code_and_output_become_cells():
    said = "<!-- output -->\n```text\n1\n```\n\n<!-- end -->\n"
    page = f"# Title\n\nWords, [a page](../choose.md#here).\n\n```python\nprint(1)\n```\n\n{said}\nThe end.\n"
    first, code, last = notebooks.notebook(page, "opvi")["cells"]
    assert "".join(first["source"]) == "# Title\n\nWords, a page.\n\nNeeds `pip install 'opvi'`."
    assert code["source"] == ["print(1)"]
    assert code["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    assert last["source"] == ["The end."]
