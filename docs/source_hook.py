"""MkDocs hook: links from pages to code get a line number, and the code they point at becomes pages of the site.

A page writes [`opvi.schedules.power`](../src/opvi/flows/schedules.py), which on GitHub opens the file. Here the name is
looked up in the sources, which are read and not imported, through as many re-exports as it takes; the link then leads
to its entry on the API page, which has the public name, and the line beside it to the code. A name that does not
exist, or stands in another file, ends the build.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[`([^`\]]+)`\]\((?:\.\./)+((?:src|paper|tests|benchmarks)/[\w/]+\.py)\)")
DOCUMENTED = re.compile(r"^::: ([\w.]+)", re.MULTILINE)
FOLDER = "source"  # of the site, for the pages of code
ALONE = ("index.md", "choose.md", "understand.md", "extend.md", "api.md")  # the only pages under their tabs
HIDDEN = {**{page: ["navigation"] for page in ALONE}, "paper.md": ["navigation", "toc"]}  # which leaves more room


class Place(NamedTuple):
    """Where a name is defined."""

    path: str  # from the repository's root
    line: int
    name: str  # in full, by the module that holds the definition


def _file(module: str) -> str | None:
    """The file of a module of this repository."""
    parts = module.split(".")
    base = ROOT.joinpath("src" if parts[0] == "opvi" else "", *parts)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return path.relative_to(ROOT).as_posix()
    return None


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt | ast.alias, str | None]]:
    """Names that statements bind: with the definition, or with what is imported and from where."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node, None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node, None
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node, None) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            if node.names[0].name == "*":
                yield from _bindings(_tree(str(_file(str(node.module)))).body)
            yield from ((alias.asname or alias.name, alias, node.module) for alias in node.names)
        elif isinstance(node, ast.If):  # `if TYPE_CHECKING:`
            yield from _bindings(node.body)


def _within(module: str, parts: list[str]) -> Place | None:
    """The definition that `parts` lead to, from a module on; a name in it goes before a file of that name."""
    path = _file(module)
    if path is None:
        return None
    if not parts:
        return Place(path, 1, module)
    for name, node, source in _bindings(_tree(path).body):
        if name != parts[0]:
            continue
        if not isinstance(node, ast.alias):
            found = _member(path, module, node, parts)
        elif source == module:  # a package that imports its own module
            found = _within(f"{source}.{node.name}", parts[1:])
        else:
            found = _within(str(source), [node.name, *parts[1:]])
        if found:
            return found
    return _within(f"{module}.{parts[0]}", parts[1:])


def _member(path: str, module: str, node: ast.stmt, parts: list[str]) -> Place | None:
    """A definition at the top of a module, or a member of a class there."""
    for part in parts[1:]:
        body = node.body if isinstance(node, ast.ClassDef) else []
        node = next((inner for name, inner, _ in _bindings(body) if name == part), None)  # type: ignore[assignment]
        if node is None:
            return None
    return Place(path, node.lineno, ".".join([module, *parts]))


def definition(name: str) -> Place | None:
    """Where a dotted name is defined, through as many imports as it takes; None if there is no such name."""
    parts = name.split(".")
    first = next((i for i in range(1, len(parts) + 1) if _file(".".join(parts[:i]))), None)
    return None if first is None else _within(".".join(parts[:first]), parts[first:])


def place(name: str, path: str) -> Place:
    """Where a name that a page links to stands, or an error that says what is wrong with the link.

    Args:
        name: `opvi.schedules.power`, `test_buckets`, or the path itself for the whole file.
        path: the file the link points at.
    """
    if not (ROOT / path).exists():
        raise LookupError(f"a page links to `{name}` in {path}, but there is no such file.")
    if name == path:
        return Place(path, 1, name)
    whole = name.startswith(("opvi.", "paper."))
    found = definition(name if whole else f"{path.removesuffix('.py').replace('/', '.')}.{name}")
    if found is None:
        raise LookupError(f"a page links to `{name}` in {path}, but there is no such name.")
    if found.path != path:
        raise LookupError(f"a page links to `{name}` in {path}, but it stands in {found.path}.")
    return found


@cache
def _documented() -> dict[str, str]:
    """The entries of the API page: the public name of each definition."""
    entries = DOCUMENTED.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    return {found.name: entry for entry in entries if (found := definition(entry))}


def anchor(found: Place) -> str | None:
    """The public name by which the API page has a definition, or the class it belongs to; None if it has neither."""
    name, entries = found.name, _documented()
    while _file(name) is None:  # a module is no entry
        if name in entries:
            return entries[name]
        module, last = name.rsplit(".", 1)
        if module in entries and not last.startswith("_") and _has_docstring(found.path, last):
            return f"{entries[module]}.{last}"
        name = module
    return None


def _has_docstring(path: str, name: str) -> bool:
    """Whether the API page shows a member of a module: what has no docstring is left out."""
    nodes = (node for found, node, _ in _bindings(_tree(path).body) if found == name)
    return any(isinstance(node, ast.FunctionDef | ast.ClassDef) and bool(ast.get_docstring(node)) for node in nodes)


def page_of(path: str) -> str:
    """The page that shows a file of code."""
    return f"{FOLDER}/{path.removeprefix('src/').removesuffix('.py')}.md"


def linked(markdown: str, depth: int = 0) -> str:
    """A page with its links to code made whole; `depth` is the number of folders it lies in."""

    def link(match: re.Match[str]) -> str:
        name, path = match.groups()
        found = place(name, path)
        code = "../" * depth + page_of(path)
        if name == path:
            return f"[`{name}`]({code})"
        target = anchor(found)
        there = f"{code}#L-{found.line}"
        shown = re.sub(r"[._]", r"\g<0><wbr>", name)  # long names may break here
        text = f"[<code>{shown}</code>]" + (f"[{target}]" if target else f"({there})")
        return f"{text} <small>[{Path(path).name}:{found.line}]({there})</small>"

    return LINK.sub(link, markdown)


STYLE = """<style>
.highlight span:target { background: var(--md-code-hl-color--light); display: inline-block; min-width: 100%; }
.highlight span[id^="L-"] { scroll-margin-top: 5rem; }
</style>"""


def code_page(path: str) -> str:
    """A file of code as a page, with an anchor for every line."""
    from pygments import highlight
    from pygments.lexers import PythonLexer
    from pymdownx.highlight import BlockHtmlFormatter

    options = {"linenos": "pymdownx-inline", "linespans": "L", "cssclass": "highlight", "wrapcode": True}
    code = (ROOT / path).read_text(encoding="utf-8")
    shown = highlight(code, PythonLexer(stripnl=False), BlockHtmlFormatter(**options))
    head = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# `{path}`\n\n"
    return f"{head}{STYLE}\n\n{shown}\n"


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add a page for every file of code that some page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    pages = [file.content_string for file in files.documentation_pages()]
    for path in sorted({path for page in pages for _, path in LINK.findall(page) if (ROOT / path).exists()}):
        page = File.generated(config, page_of(path), content=code_page(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make the links to code whole."""
    from mkdocs.exceptions import PluginError

    if page.file.src_uri.startswith(f"{FOLDER}/"):
        return markdown
    if page.file.src_uri in HIDDEN:
        page.meta["hide"] = HIDDEN[page.file.src_uri]
    try:
        return linked(markdown, page.file.src_uri.count("/"))
    except LookupError as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
