"""Rows on the host: counted, checked, joined, and padded to few distinct shapes."""

import math
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np

from opvi.types import LARGEST_VALUE, ArrayLike, Batch, Data, Tree, shapes_of

OnBad = Literal["raise", "skip"]
ALIGNED = 64  # bytes


def row_count(data: Data) -> int:
    """Return the common length of all leaves."""
    leaves = jax.tree.leaves(data)
    if not leaves or any(np.ndim(leaf) == 0 for leaf in leaves):
        raise ValueError(f"data has leaves of shape {shapes_of(data)}, but needs arrays with a leading axis of rows.")
    lengths = {len(leaf) for leaf in leaves}
    if len(lengths) > 1:
        raise ValueError(f"data has leaves of shape {shapes_of(data)}, but all must have the same number of rows.")
    return lengths.pop()


def taken(data: Data, rows: slice | np.ndarray) -> Data:
    """Return some of the rows; a slice is not copied."""
    return jax.tree.map(lambda a: a[rows], data)


def joined(parts: Sequence[Tree]) -> Tree:
    """Return the parts as one, joined along the first axis."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def padded(data: Data, rows: int) -> Data:
    """Return the data padded to this many rows with copies of the first, so that no row is invented."""

    def fill(a: np.ndarray) -> np.ndarray:
        return a if len(a) == rows else np.concatenate([a, np.repeat(a[:1], rows - len(a), 0)])

    return jax.tree.map(fill, data)


def with_room(data: Data, rows: int, filled: int = 0) -> Data:
    """Return the data at the start of this many rows, padded with copies of the first until so many are filled.

    What the others hold is undefined: no program may use it. They cost nothing, however wide they are: they are neither
    written nor copied, because XLA takes arrays as they are if they start at a multiple of 64 bytes.
    """

    def place(a: np.ndarray) -> np.ndarray:
        if len(a) == rows:
            return a
        shape = (rows, *a.shape[1:])
        held = np.empty(math.prod(shape) * a.itemsize + ALIGNED, np.uint8)
        start = -held.__array_interface__["data"][0] % ALIGNED
        room = np.ndarray(shape, a.dtype, held, start)
        room[: len(a)] = a
        room[len(a) : filled] = a[:1]
        return room

    return jax.tree.map(place, data)


def weights(weight: ArrayLike | None, rows: int) -> np.ndarray:
    """Return how often each row counts, checked; 1 if omitted."""
    if weight is None:
        return np.ones(rows, np.float32)
    weight = np.asarray(weight)
    if weight.shape != (rows,) or not (np.isfinite(weight) & (weight >= 0)).all():
        raise ValueError(
            f"`weight` must be {rows} finite numbers of at least 0, one per row; it has shape {weight.shape}."
        )
    return weight


def batch(data: Data, weight: ArrayLike | None = None, *, pad_to: int | None = None) -> Batch:
    """Return rows as one `Batch`, padded to `pad_to` rows with weight 0.

    Args:
        data: a pytree of arrays with one leading axis of rows, e.g. `(X, y)`.
        weight: how often each row counts; 1 if omitted.
        pad_to: the padded number of rows; no padding if omitted.
    """
    data = jax.tree.map(np.asarray, data)
    rows = row_count(data)
    if rows == 0:
        raise ValueError("a batch has 0 rows, but needs at least 1.")
    if pad_to is not None and pad_to < rows:
        raise ValueError(f"`pad_to` is {pad_to}, but the batch has {rows} rows already.")
    weight = weights(weight, rows)
    missing = np.zeros((pad_to or rows) - rows, weight.dtype)
    return Batch(padded(data, pad_to or rows), np.concatenate([weight, missing]))  # type: ignore[arg-type]


def cut(rows: Batch, size: int) -> Batch:
    """Return rows as stacked batches `[rounds, size, ...]`; the last one is padded with weight 0."""
    count, rest = divmod(len(rows.weight), size)
    parts = []
    if count:
        whole = taken(rows, slice(count * size))
        parts.append(jax.tree.map(lambda a: a.reshape(count, size, *a.shape[1:]), whole))
    if rest:
        last = batch(*taken(rows, slice(count * size, None)), pad_to=size)
        parts.append(jax.tree.map(lambda a: a[None], last))
    return joined(parts)


def as_rows(data: Data, dtype: np.dtype) -> Data:
    """Return NumPy arrays with one leading axis of rows, floats in `dtype`, other numbers as JAX takes them."""

    def array(leaf: ArrayLike) -> np.ndarray:
        a = np.asarray(leaf)
        if a.dtype.kind in "OSUMm":
            raise TypeError(f"data has a leaf of dtype {a.dtype}, but rows are numbers. Encode strings and objects.")
        if a.dtype.kind == "f":
            return a.astype(dtype, copy=False)
        kind = jax.dtypes.canonicalize_dtype(a.dtype)
        whole = a.dtype.kind in "iu" and kind.itemsize < a.dtype.itemsize and a.size
        if whole and not (np.iinfo(kind).min <= a.min() and a.max() <= np.iinfo(kind).max):
            raise ValueError(
                f"data has whole numbers from {a.min()} to {a.max()}, which JAX would truncate to 32 "
                "bits and so confuse. Number the classes from 0, make the numbers floats, or enable 64 bits: "
                "`jax.config.update('jax_enable_x64', True)`."
            )
        return a.astype(kind, copy=False)

    return jax.tree.map(array, data)


def without_bad_rows(data: Data, on_bad: OnBad) -> tuple[Data, int]:
    """Return the rows that are all finite, and how many were left out; or raise, if requested."""
    bad = np.zeros(row_count(data), bool)
    for leaf in jax.tree.leaves(data):
        if leaf.dtype.kind in "fc":
            sound = np.abs(leaf) <= LARGEST_VALUE  # False for NaN
            bad |= ~sound.all(axis=tuple(range(1, leaf.ndim)))
        elif leaf.dtype.kind not in "iub":
            raise TypeError(
                f"data has a leaf of dtype {leaf.dtype}, but a stream carries numbers. Encode strings and objects."
            )
    if not bad.any():
        return data, 0
    if on_bad == "raise":
        raise ValueError(
            f"{bad.sum()} of {len(bad)} rows hold NaN, infinity or a number beyond {LARGEST_VALUE:g} (the first is row "
            f"{int(bad.argmax())}), but every number must be finite, and its square as well. "
            'Clean the data, or leave such rows out and count them: `on_bad="skip"`.'
        )
    return taken(data, ~bad), int(bad.sum())


def size_of(tree: Tree) -> int:
    """Return the bytes of arrays, or of their shapes."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
