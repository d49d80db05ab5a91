"""Every Python block of the README and of two pages of the documentation runs, in order, as a reader would run it."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/trackers.md"])
def test_code_blocks_run(page, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # a reader has JAX's defaults
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out
