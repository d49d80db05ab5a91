"""Data frames with strings, categories, dates and gaps, encoded as numbers as in `opvi learn`."""

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from opvi.adapters._tables import Block, Schema

FIRST_ROWS = 10_000  # from which a frame's columns are understood


def is_frame(X: Any) -> bool:
    """Return whether X is a data frame: pandas, polars (also lazy), pyarrow, or a DuckDB relation."""
    return not isinstance(X, np.ndarray) and hasattr(type(X), "columns")


def collected(X: Any) -> Any:
    """Return a lazy frame's rows, and others as they are."""
    if hasattr(X, "collect_schema") and hasattr(X, "collect"):
        return X.collect()  # polars
    if type(X).__module__.startswith(("duckdb", "_duckdb")):
        import pyarrow

        return pyarrow.table(X)
    return X


def is_plain(X: Any) -> bool:
    """Return whether a frame holds only numbers without gaps, and so is just an array with names."""
    if hasattr(X, "to_dicts"):  # polars
        plain = all(kind.is_numeric() or str(kind) == "Boolean" for kind in X.dtypes)
        return plain and not any(series.null_count() or _has_nan(series.to_numpy()) for series in X.get_columns())
    if hasattr(X, "iloc"):  # pandas
        return all(getattr(kind, "kind", "O") in "fiub" for kind in X.dtypes) and not X.isna().to_numpy().any()
    return False


def _has_nan(values: np.ndarray) -> bool:
    return values.dtype.kind == "f" and bool(np.isnan(values).any())


def block_of(X: Any) -> "Block":
    """Return a frame as a block of a table."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise ImportError(
            "a data frame with strings, dates or gaps is encoded by pyarrow: `pip install 'opvi[cli]'`. Or encode it "
            "yourself, and give numbers."
        ) from error
    from opvi.adapters._tables import Block
    from opvi.adapters._tables._parquet import as_strings, is_text

    columns = {}
    for name, array in _arrays(X, pa).items():
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        columns[name] = as_strings(array)[0] if is_text(array.type) else array
    rows = len(next(iter(columns.values()))) if columns else 0
    return Block(columns, 0, rows, [])


def _arrays(X: Any, pa: Any) -> dict[str, Any]:
    """Return the columns by name, as pyarrow arrays."""
    if not hasattr(X, "iloc"):
        table = pa.table(X) if hasattr(X, "__arrow_c_stream__") else X.to_arrow()
        return {str(name): table.column(place) for place, name in enumerate(table.column_names)}
    out = {}
    for place, name in enumerate(X.columns):
        column = X.iloc[:, place]
        try:
            out[str(name)] = pa.Array.from_pandas(column)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):  # objects of several kinds
            gaps = column.isna().to_numpy()
            texts = [None if gap else str(value) for gap, value in zip(gaps, column, strict=True)]
            out[str(name)] = pa.array(texts, pa.string())
    return out


def understood(X: Any, shuffled: bool = False) -> "Schema":
    """Return how the columns of a frame become numbers; its rows may be learnt in random order."""
    from opvi.adapters._tables import TableError
    from opvi.adapters._tables._infer import infer_inputs

    try:
        return infer_inputs([block_of(X)], FIRST_ROWS, shuffled=shuffled)
    except TableError as error:
        raise ValueError(str(error)) from None


def left_out(X: Any, schema: "Schema") -> str:
    """Return the columns of a frame that are not learnt from, each with its reason; empty if there are none."""
    from opvi.adapters._tables._block import quoted

    used, parts = {column.name for column in schema.columns}, []
    for name in map(str, getattr(X, "column_names", X.columns)):
        if name not in used:
            begins = f"column {quoted(name)} left out: "
            why = next((note.removeprefix(begins) for note in schema.notes if note.startswith(begins)), "it is empty")
            parts.append(f"{quoted(name)} ({why})")
    return ", ".join(parts)


def encoded(X: Any, schema: "Schema") -> np.ndarray:
    """Return a frame as numbers `[rows, features]`; a row that breaks the schema is an error."""
    block = block_of(X)
    absent = schema.absent(list(block.columns))
    if absent:
        raise ValueError(
            f"X has no column {absent[0]!r}, from which the estimator has learnt. Add it; it may be empty."
        )
    out = schema.encode(block, with_target=False)
    if out.rejected:
        one = out.rejected[0]
        raise ValueError(f"row {one.row} of X: {one.reason}. Fix it, or make it a gap (None or NaN).")
    return out.x
