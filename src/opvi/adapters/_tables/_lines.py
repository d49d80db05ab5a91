"""Bytes cut into whole lines, and lines of CSV into records, so that one bad line costs one row.

A line ends with a line feed, or with a carriage return and a line feed. A record of CSV is

1. a line with an even number of quotes, if every field in quotes ends where its last quote stands;
2. a line with an odd number of quotes, if these stand inside fields that do not begin with one (`5" pipe,3`);
3. several lines, if a quoted field spans them, no other field contains a quote, the number of fields is
   right, and all of it has at most 1 MiB.

Any other line is rejected alone, and reading continues with the line after it: a stray quote cannot swallow the file.
"""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from opvi.adapters._tables._block import LONGEST_LINE, PIECE, ROWS, Content, TableError, shown

QUOTE, NEWLINE = ord('"'), ord("\n")
TOO_LONG = f"a line of more than {PIECE:,} bytes, but a row has at most that"


class Records(NamedTuple):
    """Whole records, one after the other, each ended by a line feed."""

    text: bytes
    rows: int  # rejected ones included
    bad: list[tuple[int, str, str]]  # position, reason and text of the rows that are not in `text`
    content: Content  # of all of them


def whole_lines(pieces: Iterable[bytes]) -> Iterator[bytes | str]:
    """Yield whole lines, at most 8,192 at once, as bytes ending with a line feed; overlong ones cut, as text.

    Blank lines are kept. Carriage returns before a line feed are removed.
    """
    held: list[bytes] = []
    length, overlong, passed = 0, False, 0
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if overlong:
            start = piece.find(b"\n") + 1
            passed += start or len(piece)
            if passed > LONGEST_LINE:
                raise TableError(
                    f"a line has more than {LONGEST_LINE >> 20} MiB, so this is not a table of rows, and "
                    "reading stopped. Look for a file that was damaged, or compressed twice."
                )
            if not start:
                continue
            piece, end, overlong = piece[start:], end - start, False
        if end:
            held.append(piece[:end])
            yield from _cut(b"".join(held))
            held, length = [], 0
        if end < len(piece):
            held.append(piece[end:])
            length += len(piece) - end
        if length > PIECE + 1:  # the one more may be a carriage return
            yield shown(b"".join(held))
            held, length, overlong, passed = [], 0, True, length
    if held:
        yield from _cut(b"".join(held) + b"\n")


def _cut(text: bytes) -> Iterator[bytes | str]:
    """Blocks of lines, and overlong lines by themselves."""
    text = text.replace(b"\r\n", b"\n") if b"\r\n" in text else text
    ends = line_ends(text)
    start = 0
    if len(text) > PIECE:
        lengths = np.diff(ends, prepend=0) - 1
        for line in np.flatnonzero(lengths > PIECE).tolist():
            first = int(ends[line - 1]) if line else 0
            yield from _blocks(text, start, first, ends)
            yield shown(text[first : first + PIECE])
            start = int(ends[line])
    yield from _blocks(text, start, len(text), ends)


def _blocks(text: bytes, start: int, stop: int, ends: np.ndarray) -> Iterator[bytes]:
    while start < stop:
        last = int(np.searchsorted(ends, start, "right")) + ROWS - 1
        end = min(stop, int(ends[last])) if last < len(ends) else stop
        yield text[start:end]
        start = end


def line_ends(text: bytes) -> np.ndarray:
    """The position after each line feed."""
    return np.flatnonzero(np.frombuffer(text, np.uint8) == NEWLINE) + 1


def without_blank_lines(text: bytes) -> bytes:
    """Return the same lines without empty ones."""
    if b"\n\n" in text or text.startswith(b"\n"):
        text = re.sub(rb"\n{2,}", b"\n", text)
        return text.removeprefix(b"\n")
    return text


class Grammar:
    """What a record may look like, for one delimiter."""

    def __init__(self, delimiter: str):
        self.delimiter = delimiter
        d = re.escape(delimiter.encode())
        quoted = rb'"(?:[^"]++|"")*+"'
        bare = rb'(?!")[^%s\r\n]*+' % d
        clean = rb'[^"%s\r\n]*+' % d
        line = rb'"(?:[^"\n]++|"")*+"'  # in quotes on one line
        field = rb"(?:%s|%s)" % (line, bare)
        self.line = re.compile(rb"%s(?:%s%s)*+\n" % (field, d, field))
        self.block = re.compile(rb"(?:%s(?:%s%s)*+\n)*+" % (field, d, field))
        strict = rb"(?:%s|%s)" % (quoted, clean)
        self.several = re.compile(rb"%s(?:%s%s)*+\n" % (strict, d, strict))
        self.opens = re.compile(rb'(?:%s%s)*+"(?:[^"]++|"")*+' % (strict, d))
        self.field = re.compile(rb"%s(?:%s|\n)" % (strict, d))

    def count(self, record: bytes) -> int:
        """Return the number of fields of a record that spans several lines."""
        return sum(1 for _ in self.field.finditer(record))


def csv_records(lines: Iterable[bytes | str], grammar: Grammar, fields: int) -> Iterator[Records]:
    """Yield CSV records by the rule above. Only an open quoted field waits for the next lines."""
    waiting: list[bytes] = []
    length = 0
    for text in lines:
        if isinstance(text, str):
            if waiting:
                yield _records(b"".join(waiting), grammar, fields, final=True)[0]
                waiting, length = [], 0
            yield Records(b"", 1, [(0, TOO_LONG, text)], Content.of([text.encode()]))
            continue
        waiting.append(text)
        length += len(text)
        if len(waiting) > 1 and length <= PIECE and b'"' not in text:
            continue  # still inside quotes
        records, rest = _records(b"".join(waiting), grammar, fields, final=False)
        waiting, length = [rest] if rest else [], len(rest)
        if records.rows:
            yield records
    if waiting:
        yield _records(b"".join(waiting), grammar, fields, final=True)[0]


def _records(text: bytes, grammar: Grammar, fields: int, *, final: bool) -> tuple[Records, bytes]:
    """Return the records in whole lines, and the rest that is still undecided."""
    odd = _odd_lines(text) if b'"' in text else None
    if _is_utf8(text) and (
        grammar.block.fullmatch(text) if odd is not None and not odd.any() else odd is None and b"\r" not in text
    ):
        text = without_blank_lines(text)
        ends = line_ends(text)
        return Records(text, len(ends), [], Content(text, ends)), b""
    ends = line_ends(text)
    odd = np.zeros(len(ends), bool) if odd is None else odd
    following = np.append(np.flatnonzero(odd), len(ends))  # lines with an odd number of quotes, in order
    good, bad, every, row, line, start, begin = [], [], [], 0, 0, 0, 0
    while line < len(ends):
        end, last = int(ends[line]), line
        if end - start == 1:  # blank
            good.append(text[begin:start])
            begin, start, line = end, end, line + 1
            continue
        reason = _fault(text[start:end], grammar)
        if odd[line] and reason and grammar.opens.fullmatch(text, start, end):
            closing = int(following[np.searchsorted(following, line, "right")])
            if closing == len(ends) and not final and len(text) - start <= PIECE:
                break
            reason = "a quote that is opened and not closed"
            if closing < len(ends) and _is_record(text[start : int(ends[closing])], grammar, fields):
                reason, last, end = "", closing, int(ends[closing])
        if reason:
            good.append(text[begin:start])
            bad.append((row, reason, shown(text[start : end - 1])))
            begin = end
        every.append(text[start:end])
        row, line, start = row + 1, last + 1, end
    good.append(text[begin:start])
    return Records(b"".join(good), row, bad, Content.of(every)), text[start:]


def _is_record(text: bytes, grammar: Grammar, fields: int) -> bool:
    """Whether several lines are one record."""
    sound = len(text) <= PIECE + 1 and _is_utf8(text) and grammar.several.fullmatch(text)
    return bool(sound) and grammar.count(text) == fields


def _odd_lines(text: bytes) -> np.ndarray:
    """Which lines hold an odd number of quotes."""
    codes = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(codes == NEWLINE)
    quotes = np.flatnonzero(codes == QUOTE)
    upto = np.searchsorted(quotes, ends)
    return np.diff(upto, prepend=0) % 2 == 1


def _fault(line: bytes, grammar: Grammar) -> str:
    """Return what is wrong with a one-line record; an empty string if nothing is."""
    if not _is_utf8(line):
        return "bytes that are not UTF-8"
    if (b'"' in line or b"\r" in line) and not grammar.line.fullmatch(line):
        return "a quote in the wrong place" if b'"' in line else "a carriage return in the middle of a line"
    return ""


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
