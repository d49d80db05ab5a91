"""Every Python block of the README and of the documentation's pages runs, in order, as a reader would run it."""

import re
from pathlib import Path

import jax
import pytest

import opvi

ROOT = Path(__file__).parents[2]


PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("index", "extend", "trackers", "estimators", "learn", "checkpoints", "checks")),
    *(f"docs/{name}.md" for name in ("interop", "regret")),
]
PAGES += [f"docs/guides/{name}.md" for name in ("regression", "drift", "numpyro", "schedule")]


# What a page shows on many rows, or particles, runs here on fewer; `docs/execute.py` runs all of it.
SHORTER = {
    "ROWS, CHANGE = 4000, 2000": "ROWS, CHANGE = 600, 300",
    "BRANCHES, DAYS = 5, 120": "BRANCHES, DAYS = 5, 4",
    "tracker = opvi.tracker(target": "tracker = quick_tracker(target",
    "X, y = rows(4000)": "X, y = rows(200)",
    "X, y = measured(3000)": "X, y = measured(300)",
    "x = rng.normal(size=(2000, 2))": "x = rng.normal(size=(300, 2))",
    "(scaled[:200], labels[:200])": "(scaled[:60], labels[:60])",
    "X_new, y_new = measured(1000)": "X_new, y_new = measured(145)",  # as many as hours: one program
    # The first 200 rows are learnt by a program of their own, and here no others:
    "for seen in (60, 400, 4000)": "for seen in (60, 120, 200)",
    "for start in range(0, 1900, 50)": "for start in range(0, 200, 50)",
    "model.partial_fit(X[:500], labels[:500]": "model.partial_fit(X[:200], labels[:200]",
    "cross_val_score(model, X, labels, cv=3)": "cross_val_score(model, X[:300], labels[:300], cv=3)",
    "opvi.regressor(features=3, memory_rows=0), key=0": "opvi.regressor(features=3, hidden=()), key=0",
    # Networks take longest to compile; those of README.md, estimators.md and guides/drift.md are as readers have them.
    "opvi.regressor(features=1)": "opvi.regressor(features=1, hidden=())",
    "opvi.watched(opvi.classifier(features=3, classes=2))": "opvi.watched(opvi.classifier(3, 2, hidden=()))",
    "opvi.stream((X[:1900], y[:1900]), batch_size=20)": "opvi.stream((X[:300], y[:300]), batch_size=20)",
    "opvi.stream((X[:600], labels[:600]), batch_size=20)": "opvi.stream((X[:200], labels[:200]), batch_size=20)",
}


def quick_tracker(target, **options):
    """The tracker with few particles."""
    return opvi.tracker(target, particles=16, **options)


def test_shortened_pages_say_what_is_shortened():
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    assert all(words in text for words in SHORTER)


TEXTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md")]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Files that a page links to exist, and so do the headings: the README's, too, which MkDocs does not see."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), f"{target} in {page.name}"
        if anchor and file.suffix == ".md" and file.name != "api.md":
            assert anchor in headings(file), f"{target} in {page.name}"


def headings(page):
    """The anchors of a page, as MkDocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles]


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES)
def test_code_blocks_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some blocks write files
    text = (ROOT / page).read_text(encoding="utf-8")
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict = {"quick_tracker": quick_tracker}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # a reader has JAX's defaults
        for block in blocks:
            if "MCMC(" in block:  # another library's sampler, for comparison: it takes longer than the rest of its page
                continue
            exec(compile(block, page, "exec"), names)
    assert capsys.readouterr().out
