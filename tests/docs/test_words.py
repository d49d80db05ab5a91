"""Words of CONTRIBUTING's glossary: what we do not write is nowhere in pages, docstrings, messages and comments."""

import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]
SOURCES = [path for folder in ("src", "arena") for path in sorted((ROOT / folder).rglob("*.py"))]
UNITS = "rows|nats|updates|rounds|bytes|ms|µs|milliseconds|microseconds|seconds|numbers|predictions|requests"
UNWANTED = {
    "per row, per second": rf"\b({UNITS}) an? (second|row|round|batch)\b",
    "resume, continue": r"\bgo(es)? on\b(?! [a-z]+ing)",
    "strings": r"(?<![`.\w])texts\b(?![`:=(\[.])",
    "is determined automatically if omitted": r"\bfound out if\b|\bis found out\b",
    "is not an opvi checkpoint": r"\bis no (?!such)[a-z]+ (checkpoint|file|fleet|folder|model|table)\b",
    "at most n rows": r"\b(at most|sample of|up to) so many\b",
    "if omitted": r"\bif not given\b",
    "is not a class, has no topic": r"(?<![Tt]here )\b(is|are) no (class|row|object|count|letter|number|date)s?\b",
    "forever": r"\bfor ever\b",
    "restart, repeat, again": r"\b(begins?|begun|starts?|made|reads?|opens?|opened|learnt|run) anew\b",
    "something other than": r"\bsomething else than\b",
    "the position after a row": r"\bplace behind\b",
    "fix, repair, correct": r"\b[Mm]end(s|ed|ing)?\b(?!s)",
    "expensive": r"\b(is|are|too|most) dear(er|est)?\b",
    'of the model: "the model\'s name"': r"^\s+[a-z_]+: of (the|some|a|its|their) ",
}
NAMES = re.compile(r"^\s*(texts|rows)\b.*:")  # of arguments in a docstring


@cache
def prose(path: Path) -> str:
    """A page without its code, or the strings and comments of a module."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    kinds = tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    said = "\n".join(token.string for token in tokens if token.type in kinds)
    said = re.sub(r"\{[^{}]*\}", "", said)  # code inside of f-strings
    return "\n".join(line for line in re.sub(r"`[^`\n]*`", "", said).splitlines() if not NAMES.match(line))


def test_the_glossary_is_what_is_looked_for():
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Words")[1].split("\n\nA *row*")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    assert [wanted for wanted, _ in rows] == list(UNWANTED)
    examples = ["7 rows a second", "it goes on", "two texts", "is found out if not given", "is no opvi checkpoint"]
    examples += ["at most so many rows", "1 if not given", "what is no row", "wait for ever", "it is read anew"]
    examples += [
        "something else than numbers",
        "the place behind it",
        "mend it",
        "it is dear",
        "    name: of the model.",
    ]
    for example, pattern in zip(examples, UNWANTED.values(), strict=True):
        assert re.search(pattern, example, re.MULTILINE)


@pytest.mark.parametrize("wanted", UNWANTED)
def test_unwanted_words_are_nowhere(wanted):
    found = [
        f"{path.relative_to(ROOT)}: …{text[max(0, match.start() - 40) : match.end() + 20]!r}"
        for path in (*PAGES, *SOURCES)
        for text in [prose(path)]
        for match in re.finditer(UNWANTED[wanted], text, re.MULTILINE)
    ]
    assert not found, f"write {wanted!r} instead: " + "\n".join(found)
