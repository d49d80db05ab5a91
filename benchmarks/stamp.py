"""Which results are older than the code they measure: `python -m benchmarks.stamp`.

Every results file holds "sources": the hashes of the files and folders that its numbers depend on, as they were when it
was made. Comments and docstrings do not count: mending a sentence does not make a result older.

`python -m benchmarks.stamp --write` stamps files that have none: one that is not committed with the code as it is now,
another with that of the commit it names, or of the commit that brought it.
"""

import argparse
import ast
import hashlib
import io
import json
import subprocess
import tokenize
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef

FLOWS = "src/opvi/flows", "src/opvi/targets"
FILTERS = "src/opvi/filters", "src/opvi/targets"
LEARNERS = "src/opvi/tracking", "src/opvi/filters"
APP = "src/opvi/app", "src/opvi/running"
FLEET = "src/opvi/scale", "src/opvi/running"
# What results depend on whose commands do not stamp them. The first pattern that fits a file's name counts.
DEPENDS = {
    "agreement": ("benchmarks/agree.py", *FLOWS, *LEARNERS),
    "batches": ("benchmarks/batches.py", *LEARNERS),
    "bench": ("benchmarks/__main__.py", "benchmarks/peers.py", *FLOWS, *FILTERS),
    "brokers": ("benchmarks/brokers.py", "src/opvi/adapters/_streams", *APP),
    "choose": ("benchmarks/choose.py", "benchmarks/choices.py", *FLOWS, *LEARNERS),
    "classification": ("paper/classification.py", *LEARNERS),
    "columns": ("benchmarks/columns.py", *LEARNERS),
    "crash-points": ("benchmarks/crashes.py", "benchmarks/faults.py", "src/opvi/scale", *APP),
    "demo": ("paper/demo.py", *FLOWS),
    "devices": ("benchmarks/devices.py", *LEARNERS),
    "endurance": ("benchmarks/hostile.py", *APP),
    "endless": ("benchmarks/endless.py", *LEARNERS),
    "estimators": ("benchmarks/estimators.py", "src/opvi/adapters/sklearn", *LEARNERS),
    "faults": ("benchmarks/faults.py", *APP),
    "first*": ("benchmarks/first.py", "benchmarks/first_case.py", "src/opvi/running", *LEARNERS),
    "fleet*": ("benchmarks/fleet.py", "benchmarks/fleet_kills.py", *FLEET),
    "fuzz-files": ("benchmarks/fuzz.py", "src/opvi/scale", *APP),
    "fuzz": ("benchmarks/fuzz.py", "src/opvi/adapters/_tables"),
    "gpu": ("benchmarks/gpu", *FLOWS, *FILTERS),
    "keyed": ("benchmarks/keyed.py", *FLEET),
    "kills*": ("benchmarks/kills.py", *APP),
    "kin8nm-*": ("paper/kin8nm.py", "paper/best.py", *FLOWS),
    "learning-*": ("benchmarks/learning.py", *APP, *LEARNERS),
    "mnist-*": ("paper/mnist.py", "paper/best.py", *FLOWS),
    "plan": ("benchmarks/plan.py", "src/opvi/scale"),
    "pooling": ("benchmarks/pooling.py", "src/opvi/scale", *LEARNERS),
    "regression": ("paper/regression.py", *LEARNERS),
    "regret": ("benchmarks/regret.py", "src/opvi/regret"),
    "regret-*": ("paper/regret.py", "paper/regret_errors.py", "paper/regret_posterior.py", "src/opvi/regret", *FLOWS),
    "remembering": ("benchmarks/remembering.py", *LEARNERS),
    "rivals": ("benchmarks/rivals", *LEARNERS),
    "river-streams*": ("benchmarks/river_streams.py", "src/opvi/adapters/river", *LEARNERS),
    "robust": ("benchmarks/robust.py", *LEARNERS),
    "scaling": ("benchmarks/scaling.py", "src/opvi/scale", *FLOWS),
    "serve": ("benchmarks/serve.py", *APP),
    "spark": ("benchmarks/spark.py", "src/opvi/adapters/spark.py", *FLEET),
    "synthetic-*": ("paper/synthetic.py", *FLOWS),
    "tables": ("benchmarks/tables.py", "src/opvi/adapters/_tables"),
    "threads": ("benchmarks/threads.py", "src/opvi/_cpu.py", "src/opvi/running"),
    "trackers": ("benchmarks/trackers.py", *FILTERS),
    "tracking-*": ("paper/tracking.py", "paper/posteriors.py", "src/opvi/adapters", *FILTERS),
    "understand-*": ("paper/understand.py", "paper/understand_common.py", "paper/understand_modes.py", *FLOWS),
    "wide": ("benchmarks/wide.py", "src/opvi/adapters/_tables", *LEARNERS),
    "width": ("benchmarks/width.py", *LEARNERS),
}
NOT_MEASURED = "paper", "stated", "tried"  # the paper's own figures, definitions, and notes on what was not kept


def stamp(*paths: str, root: Path = ROOT) -> dict[str, str]:
    """Return the hashes of files, and of the Python files in folders, by their paths from the repository's root."""
    files = [
        file for path in paths for file in ([root / path] if path.endswith(".py") else (root / path).rglob("*.py"))
    ]
    return {file.relative_to(root).as_posix(): _hash(file) for file in sorted(files)}


def changed(results: dict, root: Path = ROOT) -> list[str]:
    """Return the sources of some results that have changed since."""
    return [path for path, was in results.get("sources", {}).items() if was not in _hashes(root / path, root)]


def depends(name: str) -> tuple[str, ...]:
    """Return what the results file of this name depends on."""
    found = [paths for pattern, paths in DEPENDS.items() if fnmatch(name, pattern)]
    if not found:
        raise SystemExit(
            f"{name}.json has no stamp and is not in benchmarks.stamp.DEPENDS: say there what it measures."
        )
    return tuple(dict.fromkeys(found[0]))


def write(file: Path, root: Path = ROOT) -> None:
    """Stamp a results file with the code as it was when it was made."""
    results = json.loads(file.read_text(encoding="utf-8"))
    at = _made_at(file, results, root)
    sources = {path: _digest(path, _texts(path, at, root)) for path in depends(file.stem)}
    rest = file.read_text(encoding="utf-8").rstrip().removesuffix("}").rstrip()  # as it is written
    file.write_text(f'{rest},\n "sources": {json.dumps(sources)}\n}}\n', encoding="utf-8")


def _made_at(file: Path, results: dict, root: Path) -> str | None:
    """Return the commit of some results; None if they are of now."""
    if _git(root, "status", "--porcelain", "--", str(file)):
        return None
    said = str((results.get("machine") or results.get("made_with") or {}).get("commit")).removesuffix("-dirty")
    return _git(root, "rev-parse", "-q", "--verify", said + "^{commit}") or _git(
        root, "log", "-1", "--format=%H", "--", str(file)
    )


def _texts(path: str, commit: str | None, root: Path) -> Iterator[tuple[str, str]]:
    """Yield the paths and texts of a Python file, or of a folder's; of a commit, or of now."""
    if commit is None:
        files = sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]
        yield from (
            (file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")) for file in files if file.exists()
        )
        return
    listed = _git(root, "ls-tree", "-r", "--name-only", commit, "--", path).splitlines()
    yield from ((name, _git(root, "show", f"{commit}:{name}")) for name in sorted(listed) if name.endswith(".py"))


def _digest(path: str, texts: Iterator[tuple[str, str]]) -> str:
    """Return the hash of a file's code, or one for all files of a folder; of what was not there, none."""
    hashes = {name: _code(text) for name, text in texts}
    return hashes.get(path) or (_short(json.dumps(hashes)) if hashes else "")


def _git(root: Path, *arguments: str) -> str:
    """Return what git prints, nothing if it fails."""
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _hash(file: Path) -> str:
    return _code(file.read_text(encoding="utf-8"))


def _code(text: str) -> str:
    """Return the hash of a module's code: its lines without comments, docstrings and blank lines."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            said = node.body[0]
            lines[said.lineno - 1 : said.end_lineno] = [""] * (said.end_lineno - said.lineno + 1)
    return _short("\n".join(line.rstrip() for line in lines if line.strip()))


def _hashes(path: Path, root: Path) -> tuple[str, ...]:
    """Return the hashes that stand for a source as it is now: of its code and, in older results, of all its bytes."""
    if not path.exists():
        return ()
    name = path.relative_to(root).as_posix()
    whole = (hashlib.sha256(path.read_bytes()).hexdigest()[:16],) if path.is_file() else ()
    return _digest(name, _texts(name, None, root)), *whole


def measured() -> Iterator[tuple[Path, dict]]:
    """Yield the files of results and what they hold."""
    for file in sorted(RESULTS.glob("*.json")):
        if file.stem not in NOT_MEASURED:
            yield file, json.loads(file.read_text(encoding="utf-8"))


def main() -> None:
    """Name the results whose sources have changed; a notice, not a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="stamp the files that have no stamp")
    options = parser.parse_args()
    files = 0
    for file, results in measured():
        files += 1
        if "sources" not in results and options.write:
            write(file)
        elif found := changed(results):
            command = results.get("command") or (results.get("machine") or {}).get("command")
            others = f" and {len(found) - 3} more" if len(found) > 3 else ""
            print(
                f"{file.name} is older than {', '.join(found[:3])}{others}"
                + f": run `{command}` again." * bool(command)
            )
    print(f"{files} results files.")


if __name__ == "__main__":
    main()
