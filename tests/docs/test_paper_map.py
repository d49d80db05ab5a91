"""The paper's map and the pages on extending: nothing is left out, and every name and line they point at is there."""

import importlib
import re
import tomllib

import pytest

from tests.docs.test_api_page import HOOK, ROOT

PAGES = [path for path in ROOT.glob("docs/**/*.md") if HOOK.LINK.search(path.read_text(encoding="utf-8"))]
MAP, CORRECTIONS, EXTEND, INTERNALS = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    for name in ("paper", "corrections", "extend", "internals")
)

# What the paper's LaTeX source numbers, by label; an equation's label may stand for the lines around it.
EQUATIONS = {
    "eq:aim": [1],
    "eq:reg_def": [2],
    "eq:err_def": [3],
    "eq:err": [4],
    "eq:grad": [5],
    "eq:ek": [6],
    "eq:err_comp": [7],
    "eq:svgd_vec": [8],
    "eq:flow": [9],
    "eq:online_kl": [10],
    "eq:wass_update": [11],
    "theorem:T2, its equation": [12],
    "eq:l1": [13],
    "eq:fact": [14],
    "eq:grad, again": [15, 16],
    "eq:l1_first": [17, 18, 19, 20, 21],
    "eq1": [22, 23, 24, 25, 26, 27, 28],
    "eq:rel": [29, 30, 31, 32],
}
OTHERS = {
    "assm:bound": "Assumption 1",
    "assm:lipschitz": "Assumption 2",
    "assm:gradient": "Assumption 3",
    "theorem:T1": "Theorem 4",
    "ass:g_bounded": "Assumption 5",
    "ass:g_L": "Assumption 6",
    "lemma:L2": "Lemma 7",
    "theorem:T2": "Theorem 8",
    "lemma:L1": "Lemma 9",
    "alg:main": "Algorithm 1",
    "fig:wass": "Figure 1",
    "fig:toy": "Figure 2",
    "fig:cl": "Figure 3",
    "tab:bnn": "Table 1",
}


def rows() -> list[list[str]]:
    """The cells of the tables that map the paper."""
    tables = re.findall(r"^\| paper \|.*\n\|[-|]+\n((?:\|.*\n)+)", MAP, re.MULTILINE)
    return [line.strip("| \n").split(" | ") for table in tables for line in table.splitlines()]


def items(cell: str) -> list[str]:
    """`$(15)$, $(16)$` and `$(17)$–$(21)$` and `Lemma 9, $(13)$`, one by one."""
    found = []
    for part in cell.split(", "):
        ends = [int(number) for number in re.findall(r"\$\((\d+)\)\$", part)]
        found += [f"({n})" for n in range(ends[0], ends[-1] + 1)] if ends and part.startswith("$") else [part]
    return found


def test_every_numbered_item_of_the_paper_has_one_row():
    wanted = [f"({n})" for numbers in EQUATIONS.values() for n in numbers] + list(OTHERS.values())
    mapped = [item for row in rows() for item in items(row[0])]
    assert [item for item in wanted if mapped.count(item) != 1] == []


def test_every_row_says_what_and_where_or_that_it_is_not_there():
    for row in rows():
        assert len(row) == 4, row[0]
        assert all(cell.strip() for cell in row), row[0]
        if not re.search(r"\]\(\.\./(?:src|paper)/", row[2]):
            assert re.match(r"–|proof of|used by|never", row[2]), (
                f"{row[0]}: neither code nor a word that there is none"
            )


def test_every_correction_is_referred_to():
    corrections = re.findall(r"^\| (C\d+) \|", CORRECTIONS, re.MULTILINE)
    assert corrections == [f"C{n}" for n in range(1, len(corrections) + 1)]
    said = {name for row in rows() for name in re.findall(r"\bC\d+\b", " ".join(row))}
    assert said == set(corrections)
    assert f"C1 to C{len(corrections)} are" in MAP
    assert f"C1 to C{len(corrections)}, as" in CORRECTIONS


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_to_code_lead_to_a_definition(page):
    """The line is that of the definition, and the name can be imported."""
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"\]\((?:\.\./)+(?:src|paper|tests|benchmarks)/", text)) == len(HOOK.LINK.findall(text))
    for name, path in HOOK.LINK.findall(text):
        found = HOOK.place(name, path)
        if name == path:
            continue
        line = (ROOT / path).read_text(encoding="utf-8").splitlines()[found.line - 1]
        last = name.split(".")[-1]
        assert re.match(rf"\s*(?:def|class) {last}\b|\s*{last}\b\s*[:=]", line), f"{name}: {line}"
        if name.startswith(("opvi.", "paper.")):
            assert imported(name) is not None


def imported(name: str) -> object:
    module, *rest = name.split(".")
    value: object = importlib.import_module(module)
    for part in rest:
        module = f"{module}.{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(module)
    return value


def test_a_link_gets_its_line_and_its_entry():
    line = HOOK.definition("opvi.schedules.power").line
    page = "see [`opvi.flows.schedules.power`](../src/opvi/flows/schedules.py)"
    there = f"source/opvi/flows/schedules.md#L-{line}"
    name, small = "opvi.<wbr>flows.<wbr>schedules.<wbr>power", f"<small>[schedules.py:{line}]({there})</small>"
    assert HOOK.linked(page) == f"see [<code>{name}</code>][opvi.schedules.power] {small}"  # the name the API page has
    assert f"](../{there})" in HOOK.linked(page.replace("(../", "(../../"), depth=1)
    whole = HOOK.linked("[`tests/flows/test_fields.py`](../tests/flows/test_fields.py)")
    assert whole.endswith("(source/tests/flows/test_fields.md)")
    alone = HOOK.linked("[`test_buckets`](../tests/flows/test_schedules.py)")  # no entry: the name leads to the line
    assert re.match(r"\[<code>.*</code>\]\(source/tests/flows/test_schedules\.md#L-\d+\) <small>", alone)


def test_a_re_export_leads_to_the_entry_of_its_definition():
    found = HOOK.place("opvi.targets.mlp", "src/opvi/targets/_networks.py")
    assert found.name == "opvi.targets._networks.mlp"
    assert HOOK.anchor(found) == "opvi.mlp"
    assert HOOK.anchor(HOOK.definition("opvi.targets.Target.log_prior")) == "opvi.Target"


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ("[`opvi.powder`](../src/opvi/flows/schedules.py)", "no such name"),
        ("[`opvi.Batch.train`](../src/opvi/types.py)", "no such name"),
        ("[`opvi.schedules.power`](../src/opvi/flows/fields.py)", "it stands in src/opvi/flows/schedules.py"),
        ("[`test_nothing`](../tests/flows/test_fields.py)", "no such name"),
        ("[`opvi.schedules.power`](../src/opvi/rates.py)", "no such file"),
    ],
)
def test_a_link_to_nothing_ends_the_build(link, message):
    with pytest.raises(LookupError, match=message):
        HOOK.linked(link)


def layers() -> list[str]:
    """Those of the contract on imports, from the top, as pages write them."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return [layer.replace(" |", ",") for layer in contract["contracts"][0]["layers"]]


def test_the_page_on_the_inside_has_the_layers_of_the_contract():
    shown = re.search(r"```text\n(app\n.*?)```", INTERNALS, re.DOTALL)
    first, *others = layers()
    assert shown[1].splitlines() == [first, *(f"→ {layer}" for layer in others)]


def test_the_map_for_contributors_has_the_rooms_of_the_contract():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| room, from the top .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)[1].splitlines()
    shown = [row.split(" | ")[0].removeprefix("| ").replace("`", "") for row in rows]
    assert shown == layers()
    for room in re.findall(r"\w+", " ".join(shown)):
        path = ROOT / "src" / "opvi" / room
        assert path.is_dir() or path.with_suffix(".py").exists(), room


def test_an_extension_takes_at_most_25_lines():
    """Lines of code up to the check, which begins after two empty lines with a statement that defines nothing."""
    blocks = re.findall(r"^```python\n(.*?)^```", EXTEND, re.DOTALL | re.MULTILINE)[1:]
    for block in blocks:
        parts = [part for part in re.split(r"\n\n\n", block) if re.match(r"(?:class|def|@)", part.lstrip())]
        code = [line for part in parts for line in part.splitlines() if line.strip()]
        code = code or [line for line in block.splitlines() if line.strip()]  # of parts that others define
        assert 0 < len(code) <= 25, block
