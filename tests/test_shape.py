"""What keeps the library easy to survey: no name hides a module, and modules are private unless listed."""

import ast
from pathlib import Path

import opvi

ROOT = Path(opvi.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
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
    "opvi.filters",
    "opvi.flows",
    "opvi.flows.fields",
    "opvi.flows.kernels",
    "opvi.flows.schedules",
    "opvi.metrics",
    "opvi.predictive",
    "opvi.regret",
    "opvi.running",
    "opvi.scale",
    "opvi.scale.fleet",
    "opvi.targets",
    "opvi.tracking",
    "opvi.tracking.experts",
    "opvi.types",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    """The module's dotted name."""
    parts = ["opvi", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def exported(package: Path) -> set[str]:
    """Functions and classes that a package's `__init__` defines or hands on; not its own modules."""
    tree, own = parsed(package), name_of(package)
    handed = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module != own]
    names = {alias.asname or alias.name for node in handed for alias in node.names}
    return names | {node.name for node in tree.body if isinstance(node, Function | ast.ClassDef)}


def test_no_function_hides_a_module():
    for package in (path for path in FILES if path.name == "__init__.py"):
        here = package.parent
        modules = {path.stem for path in here.glob("*.py")} | {path.parent.name for path in here.glob("*/__init__.py")}
        assert not exported(package) & modules, package


def test_modules_are_private_unless_listed():
    modules = {name_of(path) for path in FILES if path.name != "__main__.py"}
    assert {name for name in modules if "._" not in name} == PUBLIC
