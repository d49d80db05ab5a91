"""Ids and rows as a caller gives them, checked and turned into arrays."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple, TypeGuard

import jax
import numpy as np

from opvi.running._rows import as_rows, row_count
from opvi.types import LARGEST_VALUE, ArrayLike, Data, Tree

Id = str | int


def is_id(name: object) -> TypeGuard[Id]:
    """Return whether this can be an id: a string or a whole number."""
    return isinstance(name, str | int | np.integer) and not isinstance(name, bool)


def checked_id(name: object) -> Id:
    """Return an id; refuse values that cannot be one."""
    if not is_id(name):
        raise TypeError(f"{name!r} is a {type(name).__name__}, but an id is a string or a whole number.")
    return str(name) if isinstance(name, str) else int(name)


def checked_ids(ids: ArrayLike) -> list[Id]:
    """Return the ids of rows as a list."""
    if isinstance(ids, str | bytes | set | dict) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) != 1:
        raise TypeError(f"`ids` is {ids!r}, but one id per row is needed: a list or an array of them, `[id]`.")
    names = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not set(map(type, names)) <= {str, int}:  # the usual kinds need no closer look
        names = [checked_id(name) for name in names]
    return names


def as_bytes(name: Id) -> bytes:
    """Return an id as bytes, the same on every machine; 1 and "1" differ."""
    return f"{type(name).__name__}:{name}".encode("utf-8", "surrogatepass")


def from_bytes(data: bytes) -> Id:
    """Return the id from which `as_bytes` made these bytes."""
    kind, name = data.decode("utf-8", "surrogatepass").split(":", 1)
    return int(name) if kind == "int" else name


def hashed(names: Iterable[Id]) -> np.ndarray:
    """Return 64 bits per id as two words, the same on every machine."""
    digests = b"".join(hashlib.blake2b(as_bytes(name), digest_size=8).digest() for name in names)
    return np.frombuffer(digests, "<u4").astype(np.uint32).reshape(-1, 2)


def coded(names: list[Id]) -> tuple[list[Id], np.ndarray]:
    """Return the distinct names in order of first appearance, and for each name its index among them."""
    if len(names) == 1:
        return names, np.zeros(1, np.int64)
    places: dict[Id, int] = {}
    code = np.array([places.setdefault(name, len(places)) for name in names], np.int64)
    return list(places), code


def as_arrays(data: Data, inside: bool = False) -> Data:
    """Return rows as NumPy arrays, with tuples for lists: a saved fleet does not distinguish them.

    A list of numbers, or of such lists, is an array. If lengths differ, it is a container, but not inside another.
    """
    try:
        if isinstance(data, list) and _numbers(data):
            return np.array(data)
    except ValueError as error:
        if inside:
            raise ValueError(f"the rows do not have one shape: {error}") from error
    if isinstance(data, list) or type(data) is tuple:
        odd = [part for part in data if part is None or isinstance(part, str | bytes)]
        if odd:
            raise ValueError(f"the rows hold {odd[0]!r}, a {type(odd[0]).__name__}, but numbers are needed.")
        return tuple(as_arrays(part, True) for part in data)
    if isinstance(data, dict):
        return {name: as_arrays(part, True) for name, part in data.items()}
    try:
        return jax.tree.map(np.asarray, data, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(f"the rows do not have one shape: {error}") from error


def _numbers(data: object) -> bool:
    """Return whether this is a number, or a list or tuple of such."""
    if isinstance(data, list | tuple):
        return len(data) > 0 and all(map(_numbers, data))
    return isinstance(data, int | float | np.number)


class Layout(NamedTuple):
    """What rows look like: their tree, and for each leaf a row's shape and its dtype in storage."""

    structure: Tree  # jax does not export the type
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @property
    def kinds(self) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype of each leaf."""
        return list(zip(self.shapes, self.dtypes, strict=True))

    @classmethod
    def of(cls, rows: Data, dtype: np.dtype) -> "Layout":
        """Return the layout of rows given as arrays; floats are stored in `dtype`."""
        row_count(rows)
        leaves, structure = jax.tree.flatten(as_rows(jax.tree.map(lambda leaf: leaf[:0], rows), dtype))
        return cls(structure, tuple(leaf.shape[1:] for leaf in leaves), tuple(leaf.dtype for leaf in leaves))

    def leaves(self, rows: Data) -> list[np.ndarray]:
        """Return the rows' leaves in the dtypes of this layout; refuse rows of another one."""
        leaves, structure = jax.tree.flatten(rows)
        same = structure == self.structure and all(
            leaf.shape[1:] == shape and (leaf.dtype == dtype or np.can_cast(leaf.dtype, dtype, "same_kind"))
            for leaf, (shape, dtype) in zip(leaves, self.kinds, strict=True)
        )
        if not same:
            here = jax.tree.map(lambda leaf: f"{leaf.dtype} {leaf.shape[1:]}", rows)
            raise ValueError(
                f"the rows changed: one was {self.described()}, and now is {here}. Every row must have the same "
                'leaves; `on_bad="skip"` leaves others out and counts them.'
            )
        return [np.asarray(leaf, dtype) for leaf, dtype in zip(leaves, self.dtypes, strict=True)]

    def tree(self, leaves: list[Tree]) -> Tree:
        """Return leaves in the tree of the rows."""
        return jax.tree.unflatten(self.structure, leaves)

    def described(self) -> Tree:
        """Describe the leaves in words."""
        return self.tree([f"{dtype.name} {shape}" for shape, dtype in self.kinds])

    def empty(self) -> Data:
        """Return an empty set of rows of this layout."""
        return self.tree([np.zeros((0, *shape), dtype) for shape, dtype in self.kinds])


def sound(leaves: list[np.ndarray]) -> bool:
    """Return whether all numbers are finite, and small enough to be squared."""
    return all(leaf.dtype.kind != "f" or bool((np.abs(leaf) <= LARGEST_VALUE).all()) for leaf in leaves)


def filled_up(waiting: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Return waiting rows `[models, rows - 1, ...]` as batches; where `here [models, rows]` is false, the first row."""
    waiting = np.concatenate([waiting, waiting[:, :1]], 1)
    return np.where(here.reshape(*here.shape, *(1,) * (waiting.ndim - 2)), waiting, waiting[:, :1])


def without_keys(value: Tree) -> Tree:
    """Return a key of JAX as its numbers, anything else as it is."""
    is_key = isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value)) if is_key else value
