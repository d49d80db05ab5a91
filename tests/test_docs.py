"""Every Python block of the README and of the documentation's pages runs, in order, as a reader would run it."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent


PAGES = ["README.md", *(f"docs/{name}.md" for name in ("index", "trackers", "estimators", "interop", "regret"))]
PAGES += [f"docs/guides/{name}.md" for name in ("regression", "drift", "numpyro", "schedule")]


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # a reader has JAX's defaults
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out
