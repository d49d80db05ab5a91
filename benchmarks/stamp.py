"""Which results are older than the code they measure: `python -m benchmarks.stamp`.

A results file may hold "sources": the hashes of the files that its numbers depend on, as they were when it was made.
"""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"


def stamp(*paths: str, root: Path = ROOT) -> dict[str, str]:
    """Return the hashes of files, and of the Python files in folders, by their paths from the repository's root."""
    files = [
        file for path in paths for file in ([root / path] if path.endswith(".py") else (root / path).rglob("*.py"))
    ]
    return {file.relative_to(root).as_posix(): _hash(file) for file in sorted(files)}


def changed(results: dict, root: Path = ROOT) -> list[str]:
    """Return the sources of some results that are not what they were."""
    return [path for path, was in results.get("sources", {}).items() if _hash(root / path) != was]


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else ""


def main() -> None:
    """Name the results whose sources have changed; a notice, and no failure."""
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
