"""No page has more than 1,500 words: what is longer is split by topic.

Words are counted as a reader meets them: everything between blanks that has a letter or a digit, in prose, lists,
tables and formulas. Code blocks are not counted, nor comments, which nobody sees.
"""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]
MOST = 1500
MOST_OF_README = 900
PARTS = ["Start", "Tutorials", "How-to", "Reference", "Explanation"]


def words(text: str) -> int:
    """Return the number of words outside of code blocks and comments."""
    text = re.sub(r"^ *(```+|~~~+).*?^ *\1 *$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_words_are_counted_in_prose_and_tables_and_not_in_code():
    assert (
        words("# Two words\n\n| a | 1.5 ± 2 |\n|---|---|\n\n```python\nx = 1\n```\n\n<!-- hidden -->\nend – here") == 7
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_is_too_long(page):
    found, most = words(page.read_text(encoding="utf-8")), MOST_OF_README if page.name == "README.md" else MOST
    assert found <= most, f"{page.name} has {found} words, more than {most}: split it by topic, or tighten it."


def test_pages_are_in_four_parts():
    """Every page of the site stands in one part, and only once."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = yaml.safe_load("nav:\n" + text.partition("\nnav:")[2].partition("\n")[2])["nav"]
    assert [part for entry in nav for part in entry] == PARTS
    named = re.findall(r": ([\w/-]+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:])
