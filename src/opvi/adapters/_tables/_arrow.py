"""Arrow's arrays from values, and values from its arrays, without pandas, which pyarrow's own ways import first."""

import numpy as np
import pyarrow as pa

from opvi.types import ArrayLike


def as_arrow(values: ArrayLike) -> pa.Array:
    """Return values as Arrow's, the usual ones from their bytes: `pa.array` would import pandas first."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind in "fiu":
        there = None if values.dtype.kind != "f" else pa.py_buffer(np.packbits(~np.isnan(values), bitorder="little"))
        kind = pa.from_numpy_dtype(values.dtype)
        return pa.Array.from_buffers(kind, len(values), [there, pa.py_buffer(np.ascontiguousarray(values))])
    if isinstance(values, list) and all(type(value) is str for value in values):
        strings = [value.encode() for value in values]
        ends = np.cumsum([0, *map(len, strings)])
        if ends[-1] <= np.iinfo(np.int32).max:
            parts = [None, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(b"".join(strings))]
            return pa.Array.from_buffers(pa.string(), len(values), parts)
    return pa.array(values)


def in_numpy(array: pa.Array, gap: float = np.nan) -> np.ndarray:
    """Return numbers or booleans; `gap` for gaps, with which numbers become floats if it is one."""
    if pa.types.is_boolean(array.type):
        return in_numpy(array.cast(pa.uint8()), gap).astype(bool)
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return array.to_numpy(zero_copy_only=False)
    if array.null_count:
        one = np.array([gap])
        kind = pa.from_numpy_dtype(one.dtype)
        array = array.cast(kind, safe=False).fill_null(pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(one)])[0])
    held = np.frombuffer(array.buffers()[1] or b"", array.type.to_pandas_dtype())
    return held[array.offset : array.offset + len(array)].copy()
