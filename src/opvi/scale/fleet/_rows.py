"""Ids and rows as a fleet's callers give them, checked and turned into arrays."""

import hashlib
from collections.abc import Iterable
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Predictive
from opvi.scale.fleet._table import Id
from opvi.types import ArrayLike, Data


def is_id(name: object) -> TypeGuard[Id]:
    """Return whether this can be an id: a string or a whole number."""
    return isinstance(name, str | int | np.integer) and not isinstance(name, bool)


def checked_id(name: object) -> Id:
    """Return an id, refused unless it can be one."""
    if not is_id(name):
        raise TypeError(f"{name!r} is a {type(name).__name__}, but an id is a string or a whole number.")
    return str(name) if isinstance(name, str) else int(name)


def checked_ids(ids: ArrayLike) -> list[Id]:
    """Return the ids of rows as a list."""
    if isinstance(ids, str | bytes | set | dict) or not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) != 1:
        raise TypeError(f"`ids` is {ids!r}, but one id per row is needed: a list or an array of them, `[id]`.")
    names = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not {type(name) for name in names} <= {str, int}:  # the usual kinds need no closer look
        names = [checked_id(name) for name in names]
    return names


def hashed(names: list[Id]) -> np.ndarray:
    """Return 64 bits per id as two words, the same on every machine; 1 and "1" differ."""
    texts = (f"{type(name).__name__}:{name}".encode("utf-8", "surrogatepass") for name in names)
    digests = b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, "<u4").astype(np.uint32).reshape(-1, 2)


def as_arrays(data: Data) -> Data:
    """Return rows as NumPy arrays, in tuples for lists: a saved fleet does not tell them apart."""
    if isinstance(data, list) or type(data) is tuple:
        return tuple(map(as_arrays, data))
    if isinstance(data, dict):
        return {name: as_arrays(part) for name, part in data.items()}
    try:
        return jax.tree.map(np.asarray, data, is_leaf=lambda node: node is None)
    except ValueError as error:
        raise ValueError(f"the rows do not have one shape: {error}") from error


def filled_up(waiting: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Return waiting rows `[models, rows - 1, ...]` as batches; where none is `here [models, rows]`, the first."""
    waiting = np.concatenate([waiting, waiting[:, :1]], 1)
    return np.where(here.reshape(*here.shape, *(1,) * (waiting.ndim - 2)), waiting, waiting[:, :1])


def by_row(out: Predictive) -> Predictive:
    """Return predictives of one row each, stacked, as one predictive of all rows."""
    components = jax.tree.map(lambda leaf: jnp.asarray(np.moveaxis(leaf, 0, 1)[:, :, 0]), out.components)
    weights = (
        None if out.log_weights is None else jnp.asarray(np.reshape(out.log_weights, (len(out.log_weights), -1)).T)
    )
    temperature = None if out.temperature is None else jnp.asarray(np.reshape(out.temperature, (-1, 1)))
    return Predictive(components, weights, temperature)
