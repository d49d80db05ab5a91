"""Find every number of README.md and of the pages in docs/results/*.json: `python docs/check_numbers.py`.

- A section (heading to heading) names the files that its numbers come from: `docs/results/NAME.json`, the command that
  made one (the file's "command"), or the invisible `<!-- numbers: NAME.json -->`. What is named before the first
  subheading holds for subsections, too. Code, formulas, the targets of links and what a page's own blocks printed
  are passed over.
- A number is found if one of these files holds it, rounded as printed; a unit may move the point (0.9 is 90 %, 0.002 s
  are 2 ms). Of an experiment's trials the mean and the standard deviation count. A table that has the header of a
  file's own "table" (or of one of its "tables") must have its rows.
- Whole numbers without a unit may also be settings of any file, stand in the page's code, or be small.
- Settings and definitions that no file holds are declared in stated.json: the page, the number (with words around it,
  to say which), why, and the code that says so, if any. Entries that are not needed any more are errors.

`python docs/check_numbers.py --where docs/scale.md` tells where each number was found.
"""

import argparse
import bisect
import fnmatch
import json
import math
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
STATED = "stated.json"
SMALL = 12  # whole numbers up to here are words: two modes, ten lines
LONG = 8  # lists of more numbers are curves: nobody speaks of a single entry
UNREAD = {"load", "commit", "date", "version", "versions", "made_with", "python", "sources"}  # keys: of the machine,
UNREAD |= {"repeats", "quartiles", "first"}  # and the raw timings behind a median

UNITS: dict[str, tuple[float, ...]] = {  # what a file's number may be multiplied by
    "%": (100,),
    "×": (1,),
    **dict.fromkeys(["s", "second", "seconds"], (1, 1e-3)),
    **dict.fromkeys(["ms", "milliseconds"], (1, 1e3)),
    **dict.fromkeys(["µs", "microseconds"], (1, 1e3, 1e6)),
    **dict.fromkeys(["min", "minutes"], (1, 1 / 60)),
    **{"kB": (1, 1e-3), "MB": (1, 1e-6), "GB": (1, 1e-3, 1e-9), "GiB": (1, 2**-30), "million": (1e-6,)},
}
UNIT = "|".join(re.escape(unit) for unit in sorted(UNITS, key=len, reverse=True))
NUMBER = re.compile(
    r"(?<![\w.,])(?P<digits>(?:(?<![\w)\]])[-+−])?"  # a sign, unless it joins two words
    r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:e[-+−]?\d+)?)(?![\d²³⁴-⁹])"
    rf"(?:\s*(?P<unit>{UNIT})(?![\w/])|(?!\w))"
)

OF_WHAT = re.compile(r"^(?:mean|sd) of |[._](?:mean|sd|standard_error)$")  # in a key: the number itself, or its spread

BLOCK = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<!`)(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
NAMED = re.compile(r"<!--\s*numbers:(.*?)-->", re.DOTALL)
OUTPUT = re.compile(r"<!-- output -->.*?<!-- end -->", re.DOTALL)  # written by docs/execute.py
HEADING = re.compile(r"^(#{1,6}) .*$", re.MULTILINE)
MARKUP = [
    *(OUTPUT, BLOCK, CODE, COMMENT),
    re.compile(r"\$\$.*?\$\$|\$(?:[^$\n]|\n(?!\s*\n))+?\$", re.DOTALL),  # formulas
    re.compile(r"(?<=\])\([^)\n]*\)|(?<=[\])])\{[^}\n]*\}|https?://\S+|^\[[^\]\n]+\]: .*$", re.MULTILINE),  # links
    re.compile(r"</?[a-zA-Z][^>]*>"),  # tags
    re.compile(r"^\s*\d+\.\s", re.MULTILINE),  # items of a list
]
NAMES = [
    re.compile(
        r"\b(?:Python|JAX|jax|jaxlib|ArviZ|NumPyro|River)\s+\d+(?:\.\d+)*|\b\d+\.\d+\.\d+\b|arXiv:[\d.]+"
    ),  # versions
    re.compile(r"\b\d+(?:-\d+){2,}\b"),  # dates, and layers of a network: 8-50-1
    re.compile(r"\^[-−]?\d*\.?\d+"),  # exponents: t^.55
    re.compile(r"\b\d+(?:\.\d+)? ?%(?=\s(?:interval|credible|band))"),  # the level of an interval defines it
]


class Number(NamedTuple):
    """A number as it is printed."""

    text: str
    value: float
    half: float  # of a unit of its last digit: what rounding may change
    scales: tuple[float, ...]
    measured: bool  # has digits after the point, a unit, or a ±: no mere count
    start: int
    end: int


class Problem(NamedTuple):
    """What is wrong, where, and what to do."""

    page: str
    line: int
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.what}\n    {self.remedy}"


# --- numbers in texts ----------------------------------------------------------------------------


def numbers(text: str, columns: Sequence[str] = ()) -> Iterator[Number]:
    """The numbers of a text, or of a table's row: then the column's header may hold the unit."""
    for found in NUMBER.finditer(text):
        digits, unit, end = found["digits"], found["unit"], found.end()
        if unit == "×" and re.match(r"\s*\d", text[end:]):  # 131,072 × 2 is a size
            unit, end = None, found.end("digits")
        column = text.count("|", 0, found.start()) - 1
        if not unit and 0 <= column < len(columns):
            unit = next(iter(re.findall(rf"(?<!\w)(?:{UNIT})(?!\w)", columns[column].replace("×", ""))), None)
        plain = digits.replace(",", "").replace("−", "-")
        mantissa, _, exponent = plain.partition("e")
        if len(exponent) > 3:  # a hash that looks like a number
            continue
        places = len(mantissa.partition(".")[2])
        beside = text[: found.start()].rstrip()[-1:] + text[end:].lstrip()[:1]
        measured = bool(places or exponent or unit or "±" in beside)
        half = 0.5 * 10.0 ** (int(exponent or 0) - places)
        yield Number(digits, float(plain), half, UNITS.get(unit or "", (1,)), measured, found.start(), end)


def prose(text: str, patterns: Sequence[re.Pattern[str]] = (*MARKUP, *NAMES)) -> str:
    """A page with spaces for what is passed over, so that the rest stays where it is."""
    for pattern in patterns:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)
    return text


def cells(line: str) -> list[str]:
    """Of a table's line; none of other lines."""
    line = line.strip()
    return [cell.strip() for cell in line[1:].removesuffix("|").split("|")] if line.startswith("|") else []


# --- numbers in files -----------------------------------------------------------------------------


class Source:
    """The numbers of a results file in order, each with its key; a ' after the key marks one within a text."""

    def __init__(self, name: str, content: Any):
        self.name = name
        about = content if isinstance(content, dict) else {}
        said = about.get("command") or about.get("machine", {}).get("command", "")
        self.command = re.sub(r" --out \S+", "", said)
        self.tables = [about["table"]] if "table" in about else about.get("tables", [])
        leaves = sorted({leaf for leaf in _leaves(content, "") if not math.isnan(leaf[0])})  # nan has no place in order
        self.values, self.keys = [value for value, _ in leaves], [key for _, key in leaves]
        self.settings = {value: key for value, key in leaves if "settings" in key or key.endswith("'")}

    def find(self, number: Number) -> list[str]:
        """The keys of those that are this number once they are rounded to the same digits."""
        slack = number.half * (1 + 1e-9) + 1e-12 * abs(number.value)
        out: list[str] = []
        for scale in number.scales:
            low, high = (number.value - slack) / scale, (number.value + slack) / scale
            out += self.keys[bisect.bisect_left(self.values, low) : bisect.bisect_right(self.values, high)]
        return out

    def same(self, mean: Number, spread: Number) -> list[str]:
        """The keys of what has this mean, with this spread: `0.20 ± 0.14` is one finding, not two."""
        subjects = {OF_WHAT.sub("", key) for key in self.find(mean)}
        return [key for key in self.find(spread) if OF_WHAT.sub("", key) in subjects]


def _leaves(content: Any, key: str) -> Iterator[tuple[float, str]]:
    if isinstance(content, dict):
        for name in content.keys() - UNREAD:
            below = f"{key}.{name}".removeprefix(".")
            yield from ((number.value, f"{below}'") for number in numbers(prose(name.replace("_", " "), NAMES)))
            yield from (_over_trials if name == "trials" else _leaves)(content[name], below)
    elif isinstance(content, list):
        if len(content) <= LONG or not all(isinstance(entry, int | float) for entry in content):
            for index, entry in enumerate(content):
                yield from _leaves(entry, f"{key}[{index}]")
    elif isinstance(content, str):
        for number in numbers(prose(content, NAMES)):
            yield number.value / (100 if number.scales == UNITS["%"] else 1), f"{key}'"
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield float(content), key


def _over_trials(trials: dict[str, Any], key: str) -> Iterator[tuple[float, str]]:
    """Of several trials not the single ones are spoken of, but all together."""
    records = list(trials.values())
    for name in (
        records[0].keys() - {"seconds"} if records else ()
    ):  # the first trial compiles; the table has the median
        values = [record[name] for record in records if name in record]
        if isinstance(values[0], dict):
            yield from _over_trials(dict(enumerate(values)), f"{key}.{name}")
        elif all(isinstance(value, int | float) for value in values):
            yield statistics.fmean(values), f"mean of {key}.{name}"
            if len(values) > 1:
                yield statistics.stdev(values), f"sd of {key}.{name}"


@cache
def sources() -> dict[str, Source]:
    """Every results file, by name."""
    paths = sorted(path for path in RESULTS.glob("*.json") if path.name != STATED)
    return {path.name: Source(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in paths}


# --- which files a section names --------------------------------------------------------------------


def named(text: str) -> list[str]:
    """By path, in a comment, or by the command that made one."""
    patterns = [name for found in NAMED.findall(text) for name in re.findall(r"[\w*.-]+\.json", found)]
    patterns += re.findall(r"results/([\w*.-]+\.json)", text)
    said = [found.group().strip("`") for found in CODE.finditer(text)]
    said += [line.removeprefix("$ ") for block in BLOCK.finditer(text) for line in block.group().split("\n")]
    patterns += [name for command in said for name in _made_by(re.sub(r" --out \S+", "", " ".join(command.split())))]
    patterns = [pattern for pattern in patterns if pattern not in ("*.json", "NAME.json", STATED)]
    return list(dict.fromkeys(name for pattern in patterns for name in fnmatch.filter(sources(), pattern) or [pattern]))


def _made_by(command: str) -> list[str]:
    """Options may be left out where that leaves one file."""
    if not command.startswith(("opvi ", "python -m ")):
        return []
    same = [name for name, source in sources().items() if source.command == command]
    longer = [name for name, source in sources().items() if source.command.startswith(command + " ")]
    return same or (longer if len(longer) == 1 else [])


def sections(text: str) -> Iterator[tuple[int, int, list[str]]]:
    """Beginning, end and files of each section: those it names, then those that the sections around it name."""
    heads = [(found.start(), len(found[1])) for found in HEADING.finditer(prose(text, [BLOCK, COMMENT]))]
    around: list[tuple[int, list[str]]] = []
    for (start, level), (end, _) in zip([(0, 0), *heads], [*heads, (len(text), 0)], strict=True):
        around = [*(entry for entry in around if entry[0] < level), (level, named(text[start:end]))]
        yield start, end, [name for _, names in reversed(around) for name in names]


# --- pages -------------------------------------------------------------------------------------------


class Page:
    """Where each number of a page is found, and what is wrong with the others."""

    def __init__(self, name: str, text: str, stated: Sequence[dict[str, Any]] = ()):
        self.name, self.text, self.plain = name, text, prose(text)
        self.found: list[tuple[int, str, str]] = []  # line, number, where
        self.problems: list[Problem] = []
        self.used: list[dict[str, Any]] = []
        self.stated: list[tuple[int, int, dict[str, Any]]] = []
        for entry in stated:
            words = r"\s+".join(map(re.escape, entry["number"].split()))
            self.stated += [(*found.span(), entry) for found in re.finditer(words, self.plain)]
        self.printed = Source("the page's own output", OUTPUT.findall(text))
        code = "\n".join(block.group() for block in BLOCK.finditer(text))
        self.code = {number.value for number in numbers(re.sub(r"(?<=\d)_(?=\d)", "", code))}
        for start, end, files in sections(text):
            self._read(start, [sources()[name] for name in files if name in sources()], end)
        self.problems += [
            Problem(name, 1, f"names {file}, which is not in docs/results", "Correct the name.")
            for file in sorted({file for _, _, files in sections(text) for file in files} - sources().keys())
        ]

    def _read(self, start: int, known: list[Source], end: int) -> None:
        lines = self.text[start:end].splitlines(keepends=True)
        rows = [cells(line) for line in lines]
        columns: list[str] = []
        own = None
        for index, line in enumerate(lines):
            plain = self.plain[start : start + len(line)]
            if not rows[index] or not rows[index - 1]:  # no table, or its header
                columns, own = [], _table(rows[index:], known)
            if own and columns and not set("".join(rows[index])) <= set("-: "):
                self._row(rows[index], *own, self._at(start))
            else:
                self._line(plain, columns, known, start)
            columns = columns or cells(plain)
            start += len(line)

    def _at(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1

    def _row(self, row: list[str], source: Source, table: list[list[str]], at: int) -> None:
        """A row of a table that a file holds must be as it is there."""
        if row in table:
            self.found.append((at, row[0], f"{source.name}: table"))
            return
        best = max(table, key=lambda one: sum(a == b for a, b in zip(one, row, strict=True)))
        what = f"| {' | '.join(row)} |  is no row of {source.name}"
        self.problems.append(Problem(self.name, at, what, f"The row most like it there: | {' | '.join(best)} |"))

    def _line(self, line: str, columns: list[str], known: list[Source], start: int) -> None:
        last: Number | None = None
        for number in numbers(line, columns):
            mean = last if last and line[last.end : number.start].strip() == "±" else None
            where, at = self._where(number, mean, known, start), self._at(start)
            last = number
            if where:
                self.found.append((at, number.text, where))
                continue
            said = self.text[start + max(0, number.start - 60) : start + min(len(line), number.end + 40)]
            files = ", ".join(source.name for source in known)
            remedy = f"It is not in {files}." if files else "The section names no results file."
            remedy += f" Correct it, name its file (<!-- numbers: NAME.json -->), or declare a setting in {STATED}."
            self.problems.append(Problem(self.name, at, f"{number.text}  in: {' '.join(said.split())}", remedy))

    def _where(self, number: Number, mean: Number | None, known: list[Source], start: int) -> str | None:
        for first, last, entry in self.stated:
            if first <= start + number.start and start + number.end <= last:
                self.used.append(entry)
                return f"{STATED}: {entry['why']}"
        count = not number.measured
        if count and (abs(number.value) <= SMALL or 2010 <= number.value <= 2030):
            return "small, or a year"
        for source in [*known, self.printed]:
            if keys := source.same(mean, number) if mean else source.find(number):
                return f"{source.name}: {keys[0]}"
        if count and number.value in self.code:
            return "the page's own code"
        elsewhere = (source for source in sources().values() if count and number.value in source.settings)
        return next((f"setting in {source.name}: {source.settings[number.value]}" for source in elsewhere), None)


def _table(rows: list[list[str]], known: list[Source]) -> tuple[Source, list[list[str]]] | None:
    """The file whose table begins here, and its rows: of those with this header the one that has most of them."""
    body = rows[2 : next((index for index, row in enumerate(rows) if not row), len(rows))]
    same = [(source, table["rows"]) for source in known for table in source.tables if table["header"] == rows[0]]
    return max(same, key=lambda one: sum(row in one[1] for row in body), default=None)


# --- all of them ---------------------------------------------------------------------------------------


def texts() -> dict[str, str]:
    """README and its kin, and the pages of the site; the API comes from docstrings."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").glob("*.md")]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(paths) if path.stem != "api"}


def declared() -> list[dict[str, Any]]:
    """The entries of stated.json."""
    return json.loads((RESULTS / STATED).read_text(encoding="utf-8"))


def read(pages: dict[str, str], stated: list[dict[str, Any]]) -> list[Page]:
    """Each page with what is declared for it."""
    return [Page(name, text, [entry for entry in stated if entry["page"] == name]) for name, text in pages.items()]


def stale(pages: list[Page], stated: list[dict[str, Any]]) -> Iterator[Problem]:
    """Entries that no number needs, and those whose code says something else by now."""
    used = {id(entry) for page in pages for entry in page.used}
    for line, entry in enumerate(stated, 2):  # an entry a line
        about = f"{entry['number']!r} of {entry['page']}"
        if id(entry) not in used:
            yield Problem(
                f"docs/results/{STATED}", line, f"{about} is not on the page", "Correct the entry, or delete it."
            )
        file, words = entry.get("code", (None, ""))
        if file and not ((ROOT / file).exists() and words in (ROOT / file).read_text(encoding="utf-8")):
            yield Problem(
                f"docs/results/{STATED}",
                line,
                f"{about}: {file} does not say {words!r}",
                "Correct the page and the entry.",
            )


def main() -> None:
    """What is wrong on any page; or where the numbers of some pages are found."""
    parser = argparse.ArgumentParser(description="Find every number of README and docs in docs/results/*.json.")
    parser.add_argument("--where", nargs="+", metavar="PAGE", help="tell where each number of these pages is found")
    options = parser.parse_args()
    stated = declared()
    pages = read(texts(), stated)
    problems = [*(problem for page in pages for problem in page.problems), *stale(pages, stated)]
    if options.where:
        wanted = {Path(name).resolve().relative_to(ROOT).as_posix() for name in options.where}
        for page in pages:
            print(
                *(f"{page.name}:{at}: {text}  {where}" for at, text, where in page.found if page.name in wanted),
                sep="\n",
            )
        problems = [problem for problem in problems if problem.page in wanted]
    print(*problems, sep="\n")
    total = sum(len(page.found) for page in pages)
    print(f"{len(pages)} pages, {len(sources())} results files: {total} numbers found, {len(problems)} problems.")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
