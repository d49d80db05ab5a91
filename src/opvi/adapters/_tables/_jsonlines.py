"""JSON lines: one object per line, whose keys are the columns; numbers and booleans are kept as text."""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pyarrow as pa

from opvi.adapters._tables._block import CELLS, MOST_COLUMNS, ROWS, Block, Content, Rejected, TableError, quoted, shown
from opvi.adapters._tables._feeds import Feed, Reader
from opvi.adapters._tables._lines import TOO_LONG, whole_lines

Texts = dict[str, list[str | None]]  # of the columns, by their names
WORDS = {True: "true", False: "false"}


class BadLineError(ValueError):
    """A line that is not a row; the message is the reason."""


class JsonLines(Reader):
    """The rows of a file or pipe of JSON lines. `columns` are the keys of the first lines."""

    def __init__(self, feed: Feed, pieces: Iterator[bytes]):
        self.feed = feed
        lines = whole_lines(self.counted(pieces))
        first = next((text for text in lines if isinstance(text, str) or text.strip()), None)
        if first is None:
            raise TableError(f"{feed.name} is empty, but JSON lines have an object on every line.")
        if isinstance(first, bytes):
            first = first.removeprefix(b"\xef\xbb\xbf")
            if first.lstrip().startswith(b"["):
                raise TableError(
                    f"{feed.name} begins with `[`: one JSON array, which can only be read as a whole. Write an object "
                    "per line, e.g. `jq -c '.[]' data.json > data.jsonl`."
                )
        self._lines: Iterator[bytes | str] = chain([first], lines)
        self.columns: list[str] = []
        if isinstance(first, bytes):
            known: dict[str, None] = {}
            for block in _parse(first, 0, None):
                known.update(dict.fromkeys(block.columns))
            self.columns = list(known)

    def blocks(self, skip: int, columns: list[str] | None) -> Iterator[Block]:
        """Blocks of text; those before row `skip` are not parsed."""
        wanted = None if columns is None else frozenset(columns)
        first = 0
        for text in self._lines:
            self.handed += len(text)
            if isinstance(text, str):
                malformed = [Rejected(first, TOO_LONG, text)] if first >= skip else []
                yield Block({}, first, 1, malformed, open=True, content=Content.of([text.encode()]))
                first += 1
                continue
            if first < skip:
                lines = [line for line in text.split(b"\n") if line.strip()]
                if first + len(lines) <= skip:
                    yield Block({}, first, len(lines), [], open=True, content=_content(lines))
                    first += len(lines)
                    continue
            for block in _parse(text, first, wanted):
                first += block.rows
                yield block


def _parse(text: bytes, first: int, wanted: frozenset[str] | None) -> Iterator[Block]:
    """Yield blocks of whole lines, smaller ones if rows are wide."""
    columns: Texts = {}
    nested: dict[str, list[int]] = {}
    malformed: list[Rejected] = []
    lines: list[bytes] = []
    good = 0
    for line in text.split(b"\n"):
        if not line.strip():
            continue
        try:
            row = as_row(decoded(line, DECODER), b"\\u" in line)
        except BadLineError as error:
            malformed.append(Rejected(first + len(lines), str(error), shown(line)))
        else:
            for name, value in row.items():
                if value is None or (wanted is not None and name not in wanted):
                    continue
                values = columns.setdefault(name, [])
                values.extend([None] * (good - len(values)))
                if type(value) is str:
                    values.append(value)
                elif type(value) is bool:
                    values.append(WORDS[value])
                else:
                    values.append(None)
                    nested.setdefault(name, []).append(good)
            good += 1
        lines.append(line)
        if len(lines) >= ROWS or len(columns) * good > CELLS:
            yield _block(columns, first, lines, good, malformed, nested)
            columns, nested, malformed, first, good, lines = {}, {}, [], first + len(lines), 0, []
    if lines:
        yield _block(columns, first, lines, good, malformed, nested)


def _block(
    columns: Texts, first: int, lines: list[bytes], good: int, malformed: list[Rejected], nested: dict[str, list[int]]
) -> Block:
    for values in columns.values():
        values.extend([None] * (good - len(values)))
    arrays = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    at = {name: np.array(rows) for name, rows in nested.items()}
    return Block(arrays, first, len(lines), malformed, None, at, open=True, content=_content(lines))


def _content(lines: list[bytes]) -> Content:
    return Content.of([line + b"\n" for line in lines])


def decoded(text: bytes, decoder: json.JSONDecoder) -> object:
    """Return the decoded JSON, or raise a `BadLineError` with the reason."""
    try:
        return decoder.decode(text.decode())
    except UnicodeDecodeError:
        raise BadLineError("bytes that are not UTF-8") from None
    except RecursionError:
        raise BadLineError("JSON that is nested too deeply") from None
    except BadLineError:
        raise
    except ValueError as error:
        raise BadLineError(f"invalid JSON: {error}") from None


def as_row(found: object, escaped: bool) -> dict[str, object]:
    """Return a JSON object as a row; raise a `BadLineError` if it is not one.

    Args:
        found: the object.
        escaped: whether characters are written as escapes, which may contain lone surrogates.
    """
    if type(found) is not dict:
        raise BadLineError('valid JSON, but not an object: a row is written {"column": value, ...}')
    if len(found) > MOST_COLUMNS:
        raise BadLineError(f"{len(found):,} keys, but a row has at most {MOST_COLUMNS:,}")
    if escaped:
        _refuse_surrogates(found)
    return found


def _refuse_surrogates(row: dict[str, object]) -> None:
    """Refuse lone surrogates, which are not text."""
    for name, value in row.items():
        try:
            name.encode()
            _ = value.encode() if type(value) is str else b""
        except UnicodeEncodeError:
            raise BadLineError("an escape that is a lone surrogate") from None


def distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object; refuse duplicate keys."""
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise BadLineError(f"the key {quoted(twice)} occurs twice")
    return out


def constant(name: str) -> str | None:
    """Return what NaN and Infinity stand for."""
    return None if name == "NaN" else name  # "Infinity" is refused as a number later


DECODER = json.JSONDecoder(parse_float=str, parse_int=str, parse_constant=constant, object_pairs_hook=distinct)
