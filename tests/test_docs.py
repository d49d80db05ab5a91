"""Every Python block of the README and of the documentation's pages runs, in order, as a reader would run it."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent


PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("index", "trackers", "estimators", "learn", "interop", "regret")),
]
PAGES += [f"docs/guides/{name}.md" for name in ("regression", "drift", "numpyro", "schedule")]


# What a page shows on many rows runs here on fewer; `docs/execute.py` runs all of it.
SHORTER = {
    "ROWS, CHANGE = 4000, 2000": "ROWS, CHANGE = 600, 300",
    "BRANCHES, DAYS = 5, 120": "BRANCHES, DAYS = 5, 20",
    "opvi.stream((X[:1900], y[:1900]), batch_size=20)": "opvi.stream((X[:300], y[:300]), batch_size=20)",
    "opvi.stream((X[:600], labels[:600]), batch_size=20)": "opvi.stream((X[:200], labels[:200]), batch_size=20)",
}


def test_shortened_pages_say_what_is_shortened():
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert all(words in text for words in SHORTER)


@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some blocks write files
    text = (ROOT / page).read_text(encoding="utf-8")
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # a reader has JAX's defaults
        for block in blocks:
            if "MCMC(" in block:  # another library's sampler, for comparison: it takes longer than the rest of its page
                continue
            exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out
