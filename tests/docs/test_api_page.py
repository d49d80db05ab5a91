"""The API page has an entry for every public name, and every entry is a name."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def load_hook() -> ModuleType:
    """`docs/source_hook.py`, which finds names in the sources; the documentation is no package."""
    spec = importlib.util.spec_from_file_location("source_hook", ROOT / "docs" / "source_hook.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HOOK = load_hook()

# Packages say what is public in their __init__, `X as X`; of a plain module all names without an underscore are.
PACKAGES = [
    "opvi",
    "opvi.adapters.sklearn",
    "opvi.scale.fleet",
    "opvi.adapters.river",
    "opvi.regret",
    "opvi.targets",
    "opvi.tracking",
]
MODULES = [
    "opvi.scale.distributed",
    "opvi.flows.fields",
    "opvi.adapters.arviz",
    "opvi.adapters.blackjax",
    "opvi.adapters.numpyro",
]
MODULES += ["opvi.flows.kernels", "opvi.metrics", "paper.plots", "opvi.schedules"]
MODULES += ["opvi._steps", "opvi.predictive._distributions"]


def tree(module: str) -> ast.Module:
    return ast.parse((ROOT / HOOK.definition(module).path).read_text(encoding="utf-8"))


def exported(package: str) -> list[str]:
    imports = [node for node in ast.walk(tree(package)) if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports for alias in node.names if alias.asname == alias.name]


def defined(module: str) -> list[str]:
    nodes = (node for node in tree(module).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return [node.name for node in nodes if not node.name.startswith("_")]


NAMES = [f"{package}.{name}" for package in PACKAGES for name in exported(package)]
NAMES += [f"{module}.{name}" for module in MODULES for name in defined(module)]


def test_every_public_name_has_an_entry():
    found = {name: HOOK.definition(name) for name in NAMES}
    modules = [
        name for name, place in found.items() if place.line == 1 and place.name == name
    ]  # `opvi.flows.fields` itself
    assert set(modules) <= {*PACKAGES, *MODULES}
    missing = [place.name for name, place in found.items() if name not in modules and HOOK.anchor(place) != place.name]
    assert not missing, f"public, but not on docs/api.md: {sorted(set(missing))}"


def test_a_missing_name_is_told(monkeypatch):
    monkeypatch.setattr(HOOK, "_documented", lambda: frozenset({"opvi.flows.kernels"}))
    assert HOOK.anchor(HOOK.definition("opvi.flows.kernels.rbf")) == "opvi.flows.kernels.rbf"
    assert HOOK.anchor(HOOK.definition("opvi.schedules.power")) is None
    assert HOOK.anchor(HOOK.definition("opvi.flows.kernels.PRECISION")) is None  # nothing is said about it


@pytest.mark.parametrize("name", re.findall(r"^::: ([\w.]+)", PAGE, re.MULTILINE))
def test_every_entry_is_a_name(name):
    assert HOOK.definition(name).name == name  # by the module it stands in, as links on other pages have it


def test_every_section_begins_with_a_sentence():
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title, first = section.split("\n\n")[:2]
        assert first[0].isalpha() or first[0] == "`", f"{title}: say what is in it"
        assert first.rstrip().endswith("."), title
