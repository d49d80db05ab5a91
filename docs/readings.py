"""Draw docstrings, sentences and messages at random to be read aloud: `python docs/readings.py --seed 1`.

Whoever reads them marks what a native engineer would not write; CONTRIBUTING's table of words grows by what is found.
"""

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "arena", "benchmarks", "paper")  # of docstrings
SHOWN = ("src", "arena")  # of messages: what a user meets
SKIPPED = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$|<!--.*?-->|\$\$.*?\$\$", re.DOTALL | re.MULTILINE)
END = re.compile(r"(?<=[.?!])[\"')*]*\s+(?=[\"'(*`\[]*[A-Z0-9`$⌈])")
WORDS = re.compile(r"[^\W\d_]{2,}")
PRINTERS = {"print", "warn", "add_argument", "add_parser", "ArgumentTypeError", "SystemExit", "say", "fail"}


def modules(folders: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of some folders, each with its path."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield every docstring with its place."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for path, module in modules(FOLDERS):
        for node in ast.walk(module):
            if isinstance(node, kinds) and (said := ast.get_docstring(node)):
                yield f"{path}: {getattr(node, 'name', 'module')}", said


def sentences() -> Iterator[tuple[str, str]]:
    """Yield the sentences of README and pages, list items and cells included, of six words or more, code aside."""
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "docs" / "guides").glob("*.md")),
    ]
    for page in pages:
        text = SKIPPED.sub("\n\n", page.read_text(encoding="utf-8"))
        text = re.sub(
            r"^\|(.*)\|$", lambda row: "\n\n" + row[1].replace("|", "\n\n") + "\n\n", text, flags=re.MULTILINE
        )
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
            for sentence in END.split(" ".join(paragraph.split())):
                said = re.sub(r"`[^`]*`|\]\([^)]*\)", "", sentence)
                if len(WORDS.findall(said)) >= 6 and not sentence.startswith(("!", "#", ":::")):
                    yield page.relative_to(ROOT).as_posix(), sentence


def messages() -> Iterator[tuple[str, str]]:
    """Yield the strings of errors, warnings and the command line that have three words or more."""
    for path, module in modules(SHOWN):
        for node in ast.walk(module):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            if isinstance(node, ast.Raise) or name in PRINTERS or name.endswith("Error"):
                for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
                    said = _text(value)
                    if len(WORDS.findall(said)) >= 3:
                        yield f"{path}:{call.lineno}", said


def _text(node: ast.expr) -> str:
    """Return a string as it stands in the source, with {…} for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join("{…}" if isinstance(part, ast.FormattedValue) else _text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def main() -> None:
    """Print what was drawn."""
    parser = argparse.ArgumentParser(description="Draw docstrings, sentences of the pages and messages to be read.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docstrings", type=int, default=100)
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--messages", type=int, default=60)
    options = parser.parse_args()
    for name, all_of_them in (("docstrings", docstrings), ("sentences", sentences), ("messages", messages)):
        found = sorted(set(all_of_them()))
        drawn = random.Random(f"{name}, {options.seed}").sample(found, min(getattr(options, name), len(found)))
        print(f"\n=== {len(drawn)} of {len(found)} {name}, seed {options.seed} ===\n")
        for number, (place, said) in enumerate(drawn, 1):
            print(f"{number}. [{place}] {said}\n")


if __name__ == "__main__":
    main()
