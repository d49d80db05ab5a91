"""Which results are older than the code they measure: `python -m benchmarks.stamp`.

A results file may hold "sources": the hashes of the files that its numbers depend on, as they were when it was made.
Comments and docstrings do not count: mending a sentence does not make a result older.
"""

import ast
import hashlib
import io
import json
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef


def stamp(*paths: str, root: Path = ROOT) -> dict[str, str]:
    """Return the hashes of files, and of the Python files in folders, by their paths from the repository's root."""
    files = [
        file for path in paths for file in ([root / path] if path.endswith(".py") else (root / path).rglob("*.py"))
    ]
    return {file.relative_to(root).as_posix(): _hash(file) for file in sorted(files)}


def changed(results: dict, root: Path = ROOT) -> list[str]:
    """Return the sources of some results that have changed since."""
    return [path for path, was in results.get("sources", {}).items() if was not in _hashes(root / path)]


def _hash(file: Path) -> str:
    """Return the hash of a module's code: its lines without comments, docstrings and blank lines."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            said = node.body[0]
            lines[said.lineno - 1 : said.end_lineno] = [""] * (said.end_lineno - said.lineno + 1)
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def _hashes(file: Path) -> tuple[str, ...]:
    """Return the hashes that stand for a file as it is now: of its code and, in older results, of all its bytes."""
    return (_hash(file), hashlib.sha256(file.read_bytes()).hexdigest()[:16]) if file.exists() else ()


def main() -> None:
    """Name the results whose sources have changed; a notice, not a failure."""
    without = 0
    for file in sorted(RESULTS.glob("*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(results, dict) or "sources" not in results:
            without += 1
        elif found := changed(results):
            print(f"{file.name} is older than {', '.join(found)}: run `{results['command']}` again.")
    print(f"{without} results files do not say what they depend on.")


if __name__ == "__main__":
    main()
