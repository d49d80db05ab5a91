"""A sampler's settings as plain data, to check that a run is resumed by the sampler that began it."""

import dataclasses
import enum
import functools
import hashlib
from typing import Any

import jax
import numpy as np

from opvi.types import Tree


def settings(value: object) -> Tree:
    """Return a sampler as nested dictionaries and lists: its fields by name, functions by their qualified name.

    Its parts (this function also takes one) are named after their factories, in lower case. Modules are
    not named, because code may move; nor are the contents of other libraries' objects, such as optax optimizers,
    because they change with their versions.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        array = np.asarray(value)
        bytes_ = np.ascontiguousarray(array).tobytes()
        return {"dtype": str(array.dtype), "shape": list(array.shape), "sha256": hashlib.sha256(bytes_).hexdigest()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [f for f in dataclasses.fields(value) if f.compare]
        # What is switched off may be newer than the file it is compared with.
        parts = [f for f in parts if "off" not in f.metadata or getattr(value, f.name) != f.metadata["off"]]
        return {"is": _called(value), **{f.name: settings(getattr(value, f.name)) for f in parts}}
    if isinstance(value, enum.Enum):
        return value.name
    if hasattr(value, "_asdict"):
        return settings(value._asdict())
    if isinstance(value, dict):
        return {str(name): settings(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [settings(part) for part in value]
    if isinstance(value, functools.partial):
        return {
            "is": "partial",
            "of": settings(value.func),
            "given": settings(value.args),
            "named": settings(value.keywords),
        }
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if name is None:
        return {"is": _called(value)}
    return {"is": "function" if "<" in name else name.strip("_")}  # made within another, perhaps of another library


def _called(value: Any) -> str:
    return type(value).__name__.strip("_").lower()


def difference(before: Tree, now: Tree, path: str = "") -> str | None:
    """Return the first difference between two settings, in words; None if there is none."""
    if isinstance(before, dict) and isinstance(now, dict) and before.get("is") == now.get("is"):
        for name in {**before, **now}:
            below = f"{path}.{name}" if path else name
            told = difference(before.get(name), now.get(name), below)
            if told:
                return told
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = (difference(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(before, now, strict=True)))
        return next((told for told in parts if told), None)
    if before == now and type(before) is type(now):
        return None
    return f"`{path or 'sampler'}` was {_said(before)}, and is {_said(now)}"


def _said(value: Tree) -> str:
    return str(value.get("is", value)) if isinstance(value, dict) else repr(value)
