"""Every number of README and of the pages is in docs/results, and the script that says so notices when one is not."""

import importlib.util
import json
import re
import statistics
from pathlib import Path

import pytest

from paper import kin8nm
from paper import results as results_of

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("check_numbers", ROOT / "docs" / "check_numbers.py")
check = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check)


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of results with two files: an experiment's and a benchmark's."""
    trials = {"0": {"rmse": 0.1, "curve": [0.7] * 20}, "1": {"rmse": 0.3, "curve": [0.8] * 20}}
    table = {"header": ["method", "RMSE"], "rows": [["ours", "0.200 ± 0.141"], ["theirs", "0.45"]]}
    files = {
        "speed.json": {
            "machine": {"command": "python -m speed --rows 9 --out there", "load": [3.21]},
            "results": [{"size": "n=1,024", "seconds": 0.0123456, "share": 0.055, "bytes": 45_600_000}],
        },
        "experiment.json": {
            "command": "opvi try --seeds 2",
            "settings": {"particles": 37, "layers": "8-50-1, steps of 0.25"},
            "rows": {"ours": {"settings": {}, "trials": trials}},
            "table": table,
        },
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    monkeypatch.setattr(check, "RESULTS", tmp_path)
    check.sources.cache_clear()
    yield tmp_path
    check.sources.cache_clear()


def missing(text, stated=()):
    return [problem.what.split("  in: ")[0] for problem in check.Page("page.md", text, stated).problems]


def in_speed(text):
    return missing(f"<!-- numbers: speed.json -->\n{text}\n")


def test_all_numbers_of_all_pages_are_found():
    stated = check.declared()
    pages = check.read(check.texts(), stated)
    problems = [problem for page in pages for problem in page.problems] + list(check.stale(pages, stated))
    assert not problems, "\n".join(map(str, problems))
    assert sum(len(page.found) for page in pages) > 500


TABLES = [path for path in sorted((ROOT / "docs" / "results").glob("*.json")) if '"table"' in path.read_text("utf-8")]
TABLES.remove(ROOT / "docs" / "results" / "plan.json")  # worked out on paper, from other files


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_in_files_follow_from_their_trials(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    header, checked = content["table"]["header"], 0
    for name, *row in content["table"]["rows"]:
        trials = list(content["rows"][name]["trials"].values())
        for column, cell in zip(header[1:], row, strict=True):
            if "±" in cell and "printed" not in column:
                mean, sd = next(iter(check.numbers(cell))), cell.split("± ")[1]
                keys = [key for key, value in trials[0].items() if isinstance(value, float)]
                found = [[trial[key] for trial in trials] for key in keys]
                assert any(
                    abs(statistics.fmean(values) - mean.value) <= 1.001 * mean.half
                    and abs(statistics.stdev(values) - float(sd)) <= 1.001 * mean.half
                    for values in found
                ), (name, column, cell)
                checked += 1
    assert checked


def test_differences_are_taken_trial_by_trial(tmp_path):
    book = results_of.Book(tmp_path / "book.json", {"made_with": {}})
    for seed, (ours, theirs) in enumerate([(1.0, 0.5), (3.0, 1.5)]):
        for name, value in (("ours", ours), ("theirs", theirs)):
            book.add(results_of.Row(name, {}, lambda seed: {}), seed, {"rmse": value})
    found = results_of.paired([("ours", "theirs")], "rmse", book)
    assert found == {"ours less theirs, rmse": {"mean": 1.0, "standard_error": 0.5}}


def test_the_papers_table_is_that_of_the_experiment():
    printed = json.loads((ROOT / "docs" / "results" / "paper.json").read_text(encoding="utf-8"))["Table 1, kin8nm"]
    assert {name: tuple(row.values()) for name, row in printed.items()} == kin8nm.PRINTED


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("docs/trackers.md", r"takes 0\.\d+(\d) ms per row"),
        ("docs/trackers-measured.md", r"\| kin8nm \| 0\.\d+ ± 0\.\d+(\d) \|"),
        ("docs/scale-costs.md", r"\| 8 devices \| \d+(\d) \|"),
        ("docs/learn-columns.md", r"at least 9(\d) % of a column"),
    ],
)
def test_a_changed_digit_of_a_page_is_noticed(page, words):
    text, stated = check.texts()[page], [entry for entry in check.declared() if entry["page"] == page]
    digit = re.search(words, text)
    changed = text[: digit.start(1)] + str((int(digit[1]) + 1) % 10) + text[digit.end(1) :]
    before, after = (len(check.Page(page, said, stated).problems) for said in (text, changed))
    assert after == before + 1


@pytest.mark.parametrize(
    "said", ["0.0123 s", "0.01", "12.3 ms", "12,346 µs", "5.5 %", "6 %", "45.6 MB", "| 1,024 × 2 |"]
)
def test_found_as_printed(results, said):
    assert in_speed(said) == []


@pytest.mark.parametrize(
    "said", ["0.0124 s", "12.4 ms", "5.5", "0.55 %", "45.6 kB", "-0.0123", "4.5e-2", "3.21", "9.0 s ± 14"]
)
def test_not_found(results, said):
    assert len(in_speed(said)) >= 1


def test_the_unit_may_stand_in_the_header(results):
    table = "| size | ms | bytes |\n|---|---:|---:|\n| small | {} | 45,600,000 |"
    assert in_speed(table.format("12.3")) == []
    assert in_speed(table.format("13")) == ["13"]


def test_trials_count_together_and_curves_not_at_all(results):
    text = "`opvi try --seeds 2` found 0.20 ± 0.14."
    assert missing(text) == []
    assert missing(text.replace("0.20 ± 0.14", "0.30")) == ["0.30"]  # one of the trials
    assert missing(text.replace("0.20 ± 0.14", "0.80")) == ["0.80"]  # in a curve
    assert missing(text.replace("0.14", "0.25")) == ["0.25"]  # in the file, but not the spread of this mean


def test_a_files_own_table_is_copied_as_it_is(results):
    text = (
        "docs/results/experiment.json\n\n| method | RMSE |\n| --- | ---: |\n| ours | 0.200 ± 0.141 |\n| theirs | {} |\n"
    )
    assert missing(text.format("0.45")) == []
    (problem,) = missing(text.format("0.25"))  # a number that the file has elsewhere
    assert "is no row of experiment.json" in problem


def test_a_section_has_its_own_files_and_those_around_it(results):
    page = "# Title\n\n## One\n{}\n### Below\n12.3 ms\n## Two\n12.3 ms\n"
    assert missing(page.format("`docs/results/speed.json`")) == ["12.3"]  # of section two
    assert missing(page.format("")) == ["12.3", "12.3"]
    assert missing("`docs/results/speed.json`\n\n" + page.format("")) == []
    assert missing(page.format("Run `python -m speed --rows 9`:")) == ["12.3"]
    assert missing(page.format("Run `python -m speed`, which is enough to tell:")) == ["12.3"]
    assert "names slow.json, which is not in docs/results" in missing(page.format("docs/results/slow.json"))


def test_counts_may_be_settings_or_stand_in_the_pages_code(results):
    assert missing("37 particles of 5 kinds in 2024") == []
    assert missing("38 particles") == ["38"]
    assert missing("4,000 rows\n```python\nROWS = 4_000\n```\n") == []
    assert missing("37 s") == ["37"]  # a time is no setting


def test_what_is_no_number_of_the_page(results):
    text = """Python 3.11, 8-50-1, 2024-01-31, $x = 3.14$, `y = 2.72`, [link](a-1.5.md),
kin8nm, t^.55, 0.4.2, the 95 % interval.

$$z = 1.41$$

```text
1.73
```

<!-- output -->
| a | 7.77 |
<!-- end -->

The block printed 7.77.
"""
    assert missing(text) == []
    assert missing(text.replace("printed 7.77", "printed 7.78")) == ["7.78"]


def test_declared_numbers_are_these_words_on_this_page(results):
    entry = {"page": "page.md", "number": "repulsion 0.1", "why": "a setting"}
    assert missing("With repulsion\n0.1 it is", [entry]) == []
    assert missing("With repulsion 0.15 it is, or 0.1", [entry]) == ["0.15", "0.1"]


def test_entries_that_are_not_needed_are_noticed(results):
    (results / "stated.json").write_text("[]")
    entry = {"page": "page.md", "number": "0.1", "why": "a setting"}
    for text, count in (("0.1", 0), ("0.2", 1)):
        assert len(list(check.stale(check.read({"page.md": text}, [entry]), [entry]))) == count
    said = {**entry, "code": ["pyproject.toml", "line-length = 120"]}
    assert not list(check.stale(check.read({"page.md": "0.1"}, [said]), [said]))
    said = {**entry, "code": ["pyproject.toml", "line-length = 121"]}
    (problem,) = check.stale(check.read({"page.md": "0.1"}, [said]), [said])
    assert "does not say" in problem.what


def test_numbers_are_found_among_some_that_are_none():
    content = {f"n{k}": float("nan") if k % 2 else (37 * k) % 200 + 0.5 for k in range(200)}
    found = check.Source("x.json", content)
    places = {key: found.find(next(check.numbers(str(value)))) for key, value in content.items() if value == value}
    assert places == {key: [key] for key in places}
