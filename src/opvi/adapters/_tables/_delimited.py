"""CSV and its kin: a header, then blocks whose values are text."""

import re
from collections.abc import Iterator
from csv import reader
from io import StringIO
from itertools import chain, product

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from opvi.adapters._tables._arrow import in_numpy
from opvi.adapters._tables._block import MOST_COLUMNS, Block, Rejected, TableError, cut, quoted, shown
from opvi.adapters._tables._encodings import LATIN, AsUtf8
from opvi.adapters._tables._feeds import Feed, Reader
from opvi.adapters._tables._lines import Grammar, Records, csv_records, whole_lines
from opvi.adapters._tables._spelling import MISSING

BOM = b"\xef\xbb\xbf"  # some programs write it before UTF-8
LONGEST_HEADER = 1 << 17  # bytes
SEPARATOR = re.compile(rb"sep=([,;\t|])\n", re.IGNORECASE)
DELIMITERS = ",\t;|"
MARKS = ["".join(letters) for word in sorted(MISSING) for letters in product(*({c, c.upper()} for c in word))]
NUMBER = re.compile(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\s*", re.ASCII)


class Delimited(Reader):
    """The rows of a CSV file or pipe after its header."""

    def __init__(self, feed: Feed, pieces: Iterator[bytes], delimiter: str | None):
        self.feed, self.delimiter = feed, delimiter
        text = AsUtf8(pieces)
        if text.encoding:
            name = {LATIN: "Windows' Latin-1"}.get(text.encoding, "Unicode text of spreadsheets")
            self.notes = [f"{feed.name} is not UTF-8: it is read as {text.encoding}, {name}"]
        lines = whole_lines(self.counted(text))
        header, rest = self._header(lines)
        self.columns, self.handed = self._names(header), len(header) + 1
        self._records = csv_records(chain([rest] if rest else [], lines), self.grammar, len(self.columns))

    def _header(self, lines: Iterator[bytes | str]) -> tuple[bytes, bytes]:
        """Return the first record, which may span several lines, and the bytes read after it."""
        text = b""
        for more in lines:
            if isinstance(more, str):
                text += more.encode()
                break
            text = (text + more if text else more.removeprefix(BOM)).lstrip(b"\n")
            if not text:
                continue
            if (said := SEPARATOR.match(text)) is not None:  # what Excel writes before the names
                self.delimiter, text = said[1].decode(), text[said.end() :]
            if not text:
                continue
            end = text.index(b"\n") + 1
            self.grammar = Grammar(self.delimiter or _delimiter(text[:end]))
            while end and end <= LONGEST_HEADER:
                if self.grammar.line.fullmatch(text, 0, end) or self.grammar.several.fullmatch(text, 0, end):
                    return text[: end - 1], text[end:]
                end = text.find(b"\n", end) + 1
            if end:
                break
        if not text:
            raise TableError(f"{self.feed.name} is empty, but a CSV file begins with a line of column names.")
        raise TableError(
            f"{self.feed.name} begins with {quoted(shown(text))}, which is not a line of column names. A CSV file is "
            "text in UTF-8 whose first line names the columns, separated by commas, tabs, semicolons or bars."
        )

    def _names(self, header: bytes) -> list[str]:
        try:
            text = header.decode()
        except UnicodeDecodeError:
            text = ""
        if not text or "\0" in text:
            raise TableError(
                f"{self.feed.name} begins with {quoted(shown(header))}, which is not UTF-8 text. Convert it, e.g. "
                "`iconv -f latin1 -t utf-8`."
            )
        fields = [field.strip() for field in next(reader(StringIO(text, newline=""), delimiter=self.grammar.delimiter))]
        if len(fields) > MOST_COLUMNS:
            raise TableError(f"{self.feed.name} has {len(fields):,} columns, but at most {MOST_COLUMNS:,} are read.")
        if all(NUMBER.fullmatch(field) for field in fields):
            raise TableError(
                f"{self.feed.name} begins with numbers ({quoted(text)}), but its first line must name the columns. "
                "Add such a line."
            )
        names = [field or f"column {place}" for place, field in enumerate(fields, 1)]
        refuse_duplicates(names, self.feed.name)
        return names

    def blocks(self, skip: int, columns: list[str] | None) -> Iterator[Block]:
        """Blocks of text; those before row `skip` are not parsed."""
        wanted = range(len(self.columns)) if columns is None else [self.columns.index(name) for name in columns]
        first = 0
        for records in self._records:
            self.handed += len(records.text) + sum(len(text) for _, _, text in records.bad)
            if first + records.rows > skip:
                block = self._parse(records, first, list(wanted))._replace(content=records.content)
                other = self._other_header(block)
                if other is not None:
                    yield from [cut(block, first, other)] * (other > first)
                    raise TableError(
                        f"{self.feed.name} names its columns again in row {other:,}, and otherwise, so what follows "
                        "would be read under the wrong names. Was another file joined to this one? Learn from it by "
                        "itself, or write its columns in the order of this one."
                    )
                yield block
            else:
                yield Block({}, first, records.rows, [], content=records.content)
            first += records.rows

    def _other_header(self, block: Block) -> int | None:
        """Return the first row that is another line of column names, which are not in the order of the first line.

        Most of its values are names of columns, all of them differ, and none is a number.
        """
        if len(block.columns) < 2 or not len(block.numbers):
            return None
        names = list(block.columns)
        known = pa.array(names)
        first = next(iter(block.columns.values()))
        for place in np.flatnonzero(in_numpy(pc.is_in(pc.ascii_trim_whitespace(first), value_set=known))).tolist():
            values = [str(column[place].as_py() or "").strip() for column in block.columns.values()]
            met = len(set(values) & set(names))
            plain = len(set(values)) == len(values) and not any(map(NUMBER.fullmatch, values))
            if values != names and plain and 2 * met > len(names):
                return int(block.numbers[place])
        return None

    def _parse(self, records: Records, first: int, wanted: list[int]) -> Block:
        malformed = [Rejected(first + at, reason, text) for at, reason, text in records.bad]
        names = [str(place) for place in range(len(self.columns))]
        uneven: list[tuple[int, str, str]] = []

        def note(row: csv.InvalidRow) -> str:
            counts = f"{row.actual_columns} fields, but the header has {row.expected_columns}"
            uneven.append((row.number - 1, counts, shown(row.text)))
            return "skip"

        if not records.text:
            return Block({self.columns[i]: pa.array([], pa.string()) for i in wanted}, first, records.rows, malformed)
        table = csv.read_csv(
            pa.py_buffer(records.text),
            csv.ReadOptions(use_threads=False, block_size=len(records.text) + 1, column_names=names),
            csv.ParseOptions(delimiter=self.grammar.delimiter, newlines_in_values=True, invalid_row_handler=note),
            csv.ConvertOptions(
                check_utf8=False,  # lines are checked before
                column_types=dict.fromkeys(names, pa.string()),
                strings_can_be_null=True,
                null_values=MARKS,
                include_columns=[names[i] for i in wanted],
            ),
        )
        if uneven:
            bad = {at for at, _, _ in records.bad}
            places = [at for at in range(records.rows) if at not in bad]  # of the records that stand in the text
            malformed += [Rejected(first + places[at], reason, text) for at, reason, text in uneven]
            malformed.sort()
        arrays = {self.columns[i]: table.column(names[i]).combine_chunks() for i in wanted}
        return Block(arrays, first, records.rows, malformed)


def _delimiter(header: bytes) -> str:
    """Return the candidate that occurs most often outside quotes; a comma if none does."""
    outside = re.sub(rb'"[^"]*+"', b"", header)
    return max(DELIMITERS, key=lambda d: outside.count(d.encode()))


def refuse_duplicates(names: list[str], source: str) -> None:
    """Raise an error if two columns have the same name."""
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise TableError(
            f"{source} has several columns named {quoted(twice)}, but each needs a name of its own. Rename them; if "
            "the first line holds values, add a line of names before it."
        )
