"""Rows that arrive one by one, as JSON objects in messages and requests, joined into blocks."""

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from opvi.adapters._tables._block import Block, Rejected, shown
from opvi.adapters._tables._jsonlines import WORDS, BadLineError, as_row, constant, decoded, distinct
from opvi.adapters._tables._schema import Schema

SHOWN_NAMES, SHOWN_NAME = 20, 60  # fields that are named in an answer, and their letters
MOST_VALUES = 1 << 16  # in a message: to read as many takes a tenth of a second, in which nothing else is done


class Number(str):
    """A number in JSON's format, with a decimal point, whatever the table's own format is."""

    __slots__ = ()


Row = dict[str, object]  # strings, numbers, truth values; a list or an object stands for itself
DECODER = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=constant, object_pairs_hook=distinct)


def rows_of(text: bytes) -> list[Row]:
    """Return the rows of a JSON object, or of an array of objects; raise a `BadLineError` with the reason."""
    refuse_many_values(text)
    found = decoded(text, DECODER)
    escaped = b"\\u" in text
    return [as_row(row, escaped) for row in (found if type(found) is list else [found])]


def refuse_many_values(text: bytes) -> None:
    """Refuse JSON that would take long to read, or fifty times its bytes as objects; nothing is read for that."""
    marks = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if marks > MOST_VALUES:
        raise BadLineError(f"about {marks:,} values, but at most {MOST_VALUES:,} are read at once: send fewer rows")


def unlike(schema: Schema, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the fields that are not columns, as `ignored`, and columns that no row has, as `missing`; at most 20 each.

    A name that is misspelt is in both.
    """
    there = rows[0].keys() if len(rows) == 1 else set().union(*rows)
    known = schema.known
    if there == known:
        return {}
    out = {
        "ignored": sorted(there - known),
        "missing": sorted(known - there - {schema.target}),
    }
    return {word: [name[:SHOWN_NAME] for name in names[:SHOWN_NAMES]] for word, names in out.items() if names}


def block_of(rows: Sequence[Row | Rejected], first: int, schema: Schema | None = None) -> Block:
    """Return rows as a block; anything that is not a row is listed as malformed.

    Args:
        rows: the rows, in order.
        first: the number of the first row.
        schema: its columns are kept, in its format; all columns if there is none yet.
    """
    decimals = schema and {
        schema.target: schema.spelling.decimal,
        **{c.name: c.spelling.decimal for c in schema.columns},
    }
    columns: dict[str, list[str | None]] = {}
    nested: dict[str, list[int]] = {}
    malformed: list[Rejected] = []
    good = 0
    for place, row in enumerate(rows):
        if isinstance(row, Rejected):
            malformed.append(row._replace(row=first + place, text=shown(row.text)))
            continue
        for name, value in row.items():
            if value is None or (decimals is not None and name not in decimals):
                continue
            values = columns.get(name)
            if values is None:
                values = columns[name] = []
            if len(values) < good:
                values.extend([None] * (good - len(values)))
            if type(value) is str:
                values.append(value)
            elif type(value) is Number:
                point = "." if decimals is None else decimals[name]
                values.append(value if point == "." else value.replace(".", point))
            elif type(value) is bool:
                values.append(WORDS[value])
            else:
                values.append(None)
                nested.setdefault(name, []).append(good)
        good += 1
    for values in columns.values():
        values.extend([None] * (good - len(values)))
    arrays = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    at = {name: np.array(there) for name, there in nested.items()}
    return Block(arrays, first, len(rows), malformed, None, at, open=True)
