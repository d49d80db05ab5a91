"""Rows that come one by one, as JSON objects in messages and requests, joined into blocks."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from opvi.adapters._tables._block import MOST_COLUMNS, Block, Rejected, shown
from opvi.adapters._tables._jsonlines import DECODER, WORDS, BadLineError, refuse_surrogates

Row = dict[str, object]  # numbers as text; a list or an object stands for itself


def rows_of(text: bytes) -> list[Row]:
    """Return the rows of a JSON object, or of an array of objects; raise a `BadLineError` with the reason."""
    try:
        found = DECODER.decode(text.decode())
    except UnicodeDecodeError:
        raise BadLineError("bytes that are not UTF-8") from None
    except RecursionError:
        raise BadLineError("JSON that is nested too deeply") from None
    except BadLineError:
        raise
    except ValueError as error:
        raise BadLineError(f"invalid JSON: {error}") from None
    rows = found if type(found) is list else [found]
    for row in rows:
        if type(row) is not dict:
            raise BadLineError('valid JSON, but no object: a row is written {"column": value, ...}')
        if len(row) > MOST_COLUMNS:
            raise BadLineError(f"{len(row):,} keys, but a row has at most {MOST_COLUMNS:,}")
        if b"\\u" in text:
            refuse_surrogates(row)
    return rows


def block_of(rows: Sequence[Row | Rejected], first: int, wanted: frozenset[str]) -> Block:
    """Return rows as a block; what is no row takes its place among the malformed ones.

    Args:
        rows: in their order.
        first: number of the first one.
        wanted: the columns to keep; other keys are not looked at.
    """
    columns: dict[str, list[str | None]] = {}
    nested: dict[str, list[int]] = {}
    malformed: list[Rejected] = []
    good = 0
    for place, row in enumerate(rows):
        if isinstance(row, Rejected):
            malformed.append(row._replace(row=first + place, text=shown(row.text)))
            continue
        for name, value in row.items():
            if value is None or name not in wanted:
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
    for values in columns.values():
        values.extend([None] * (good - len(values)))
    arrays = {name: pa.array(values, pa.string()) for name, values in columns.items()}
    at = {name: np.array(there) for name, there in nested.items()}
    return Block(arrays, first, len(rows), malformed, None, at, open=True)
