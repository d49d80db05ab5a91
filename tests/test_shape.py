"""Limits that keep the library readable: lengths, vague types, names at the root, names that hide modules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import opvi

ROOT = Path(opvi.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LONGEST_FILE, LONGEST_FUNCTION, MOST_ANY, MOST_NAMES = 400, 80, 60, 60
# What users import by path. Every other module starts with an underscore.
PUBLIC = {
    "opvi",
    "opvi.adapters",
    "opvi.adapters.arviz",
    "opvi.adapters.blackjax",
    "opvi.adapters.numpyro",
    "opvi.adapters.river",
    "opvi.adapters.sklearn",
    "opvi.adapters.spark",
    "opvi.app",
    "opvi.app.cli",
    "opvi.app.learn",
    "opvi.app.report",
    "opvi.app.serve",
    "opvi.checks",
    "opvi.filters",
    "opvi.flows",
    "opvi.flows.fields",
    "opvi.flows.kernels",
    "opvi.flows.schedules",
    "opvi.metrics",
    "opvi.posterior",
    "opvi.predictive",
    "opvi.regret",
    "opvi.running",
    "opvi.scale",
    "opvi.scale.fleet",
    "opvi.targets",
    "opvi.tracking",
    "opvi.types",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """The module's dotted name."""
    parts = ["opvi", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def vague(body: list[ast.stmt]) -> int:
    """How often public annotations say `Any`."""
    nodes = (node for annotation in public_annotations(body) for node in ast.walk(annotation))
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)


def public_annotations(body: list[ast.stmt], in_class: bool = False) -> Iterator[ast.expr]:
    """Annotations of public functions, of what they define inside, and of public classes' methods and fields."""
    for node in body:
        if isinstance(node, Function):
            if not node.name.startswith("_") or (in_class and node.name.startswith("__")):
                given = node.args
                every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
                annotations = [node.returns, *(argument.annotation for argument in every if argument)]
                yield from (annotation for annotation in annotations if annotation)
            yield from public_annotations(node.body)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_annotations(node.body, in_class=True)
        elif isinstance(node, ast.AnnAssign) and in_class:
            yield node.annotation


def exported(package: Path) -> set[str]:
    """Functions and classes that a package's `__init__` defines or hands on; not its own modules."""
    tree, own = parsed(package), name_of(package)
    handed = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != own]
    names = {alias.asname or alias.name for node in handed for alias in node.names}
    return names | {node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)}


def test_files_are_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE} == {}


def test_functions_are_short():
    functions = [(path, node) for path in FILES for node in ast.walk(parsed(path)) if isinstance(node, Function)]
    lengths = {f"{path}:{node.lineno}": node.end_lineno - node.lineno + 1 for path, node in functions}
    assert len(lengths) > 500
    assert {place: lines for place, lines in lengths.items() if lines > LONGEST_FUNCTION} == {}


def test_public_signatures_say_what_they_take():
    counts = {name_of(path): vague(parsed(path).body) for path in FILES}
    assert sum(counts.values()) <= MOST_ANY, {name: count for name, count in counts.items() if count}


def test_the_root_is_easy_to_survey():
    assert len(dir(opvi)) <= MOST_NAMES


def test_no_function_hides_a_module():
    for package in (path for path in FILES if path.name == "__init__.py"):
        here = package.parent
        modules = {path.stem for path in here.glob("*.py")} | {path.parent.name for path in here.glob("*/__init__.py")}
        assert not exported(package) & modules, package


def test_modules_are_private_unless_listed():
    modules = {name_of(path) for path in FILES if path.name != "__main__.py"}
    assert {name for name in modules if "._" not in name} == PUBLIC


def test_the_counting_sees_what_it_counts():
    """On a small module: three vague places are public, the others are not."""
    source = """
def public(a: Any, b: int) -> dict[str, Any]:
    c: Any = a
def _private(a: Any): ...
class Public:
    field: Any
    def _hidden(self, a: Any): ...
class _Hidden:
    field: Any
"""
    assert vague(ast.parse(source).body) == 3
