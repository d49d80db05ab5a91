"""The API page has an entry for every public name, and every entry is a name."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import opvi

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

SHARED = "opvi._steps"  # what all samplers share: not for users, but for whoever writes a sampler


def modules() -> list[str]:
    """Every module that is public; the application's are not for importing, its door is the command `opvi`."""
    files = (path.relative_to(ROOT / "src").with_suffix("") for path in (ROOT / "src" / "opvi").rglob("*.py"))
    names = (".".join(part for part in file.parts if part != "__init__") for file in files)
    return sorted(name for name in names if "._" not in name and not name.startswith("opvi.app"))


def tree(module: str) -> ast.Module:
    path = ROOT.joinpath("src", *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def exported(module: str) -> list[str]:
    """A package says what is public by `X as X`; of a plain module all names without an underscore are."""
    imports = [node for node in ast.walk(tree(module)) if isinstance(node, ast.ImportFrom)]
    defined = [node for node in tree(module).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    names = [alias.name for node in imports for alias in node.names if alias.asname == alias.name]
    return names + [node.name for node in defined if not node.name.startswith("_")]


NAMES = [f"{module}.{name}" for module in [*modules(), SHARED] for name in exported(module)]


def test_every_public_name_has_an_entry():
    found = {name: HOOK.definition(name) for name in {*NAMES, *(f"opvi.{name}" for name in dir(opvi))}}
    found = {name: place for name, place in found.items() if HOOK._file(place.name) is None}  # a module is no entry
    found.pop("opvi.__version__")
    missing = sorted(name for name, place in found.items() if HOOK.anchor(place) is None)
    assert not missing, f"public, but not on docs/api.md: {missing}"


def test_a_missing_name_is_told(monkeypatch):
    monkeypatch.setattr(HOOK, "_documented", lambda: {"opvi.flows.kernels": "opvi.flows.kernels"})
    assert HOOK.anchor(HOOK.definition("opvi.flows.kernels.rbf")) == "opvi.flows.kernels.rbf"
    assert HOOK.anchor(HOOK.definition("opvi.schedules.power")) is None
    assert HOOK.anchor(HOOK.definition("opvi.flows.kernels.PRECISION")) is None  # nothing is said about it


@pytest.mark.parametrize("name", re.findall(r"^::: ([\w.]+)", PAGE, re.MULTILINE))
def test_every_entry_is_a_name(name):
    assert HOOK.definition(name), "no such name"
    assert "._" not in name.removeprefix(SHARED), "an entry has the public name"


def test_no_definition_has_two_entries():
    places = [HOOK.definition(name) for name in re.findall(r"^::: ([\w.]+)", PAGE, re.MULTILINE)]
    assert len(set(places)) == len(places)


def test_every_section_begins_with_a_sentence():
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        title, first = section.split("\n\n")[:2]
        assert first[0].isalpha() or first[0] == "`", f"{title}: say what is in it"
        assert first.rstrip().endswith("."), title
