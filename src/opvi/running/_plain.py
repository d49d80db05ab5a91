"""A sampler as plain data: its settings, and the names of opvi's and JAX's own classes and functions."""

import dataclasses
from importlib import import_module
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

OWN = ("opvi", "jax")  # packages whose classes and functions may be named


def plainly(value: Any) -> Any:
    """Return settings as dictionaries, lists, numbers, strings and arrays; raise a TypeError for a user's objects."""
    if value is None or isinstance(value, bool | int | float | str | np.ndarray):
        return value
    if isinstance(value, dict):
        if all(isinstance(name, str) for name in value):
            return {"dict": {name: plainly(one) for name, one in value.items()}}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plainly(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return {"of": _name(type(value)), "fields": fields}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        named = zip(value._fields, value, strict=True)
        return {"of": _name(type(value)), "fields": {name: plainly(one) for name, one in named}}
    elif isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [plainly(one) for one in value]}
    elif isinstance(value, np.dtype):
        return {"dtype": value.str}
    elif isinstance(value, PyTreeDef):
        return {"structure": plainly(jax.tree.unflatten(value, range(value.num_leaves)))}
    elif callable(value):
        return {"named": _name(value)}
    raise TypeError(f"{value!r} cannot be written as plain data.")


def from_plain(data: Any) -> Any:
    """Return what `plainly` wrote. Nothing but opvi's and JAX's own classes and functions is looked up by name."""
    if not isinstance(data, dict):
        return data
    if "of" in data:
        made = _found(data["of"])
        if not (isinstance(made, type) and (dataclasses.is_dataclass(made) or hasattr(made, "_fields"))):
            raise ValueError(f"{data['of']} holds no settings.")
        return made(**{name: from_plain(value) for name, value in data["fields"].items()})
    if "named" in data:
        return _found(data["named"])
    if "dict" in data:
        return {name: from_plain(value) for name, value in data["dict"].items()}
    if "dtype" in data:
        return np.dtype(data["dtype"])
    if "structure" in data:
        return jax.tree.structure(from_plain(data["structure"]))
    return tuple(map(from_plain, data["tuple"])) if "tuple" in data else [from_plain(one) for one in data["list"]]


def _name(value: Any) -> str:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not module or not name or module.split(".")[0] not in OWN or _found(f"{module}:{name}") is not value:
        raise TypeError(f"{value!r} is not a class or function of opvi or JAX.")
    return f"{module}:{name}"


def _found(name: str) -> Any:
    module, _, path = name.partition(":")
    if module.split(".")[0] not in OWN or not path.isidentifier():
        raise TypeError(f"{name!r} is not a class or function of opvi or JAX.")
    found = getattr(import_module(module), path, None)
    if isinstance(found, ModuleType):
        raise TypeError(f"{name!r} is a module.")
    return found
