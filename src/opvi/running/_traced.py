"""What JAX has traced, kept on disk: the next process neither runs opvi's Python again nor lowers what comes of it.

A compiled program is found by what it was compiled from, so a process that has all its programs on disk still traces
each of them, which takes longer than reading it. Here the result of tracing is found by the function, its settings, the
shapes of its arguments and opvi's own sources.
"""

import gc
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np

from opvi.running._plain import plainly
from opvi.running._programs import kept_in
from opvi.types import Tree

MOST = 200  # results kept; those used longest ago make room. One takes 50 to 300 KB

_named: set[type] = set()  # tuples whose names JAX has been told


def traced(function: Callable[..., Tree], settings: tuple[Any, ...], arguments: tuple[Tree, ...]) -> Tree:
    """Return `function(*settings, *arguments)`, by what another process has traced if that is on disk.

    Nothing is kept, and the function is traced as ever, if no programs are kept, without `flatbuffers`, on several
    devices, and for settings that hold functions of the user.
    """
    with _uncollected():
        return _by_disk(function, settings, arguments)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within this block garbage is not collected: tracing makes a million objects, and nearly all of them stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _by_disk(function: Callable[..., Tree], settings: tuple[Any, ...], arguments: tuple[Tree, ...]) -> Tree:
    path = _place(function, settings, arguments)
    if path is None:
        return function(*settings, *arguments)
    from jax import export

    _name_tuples()
    found = _found(path)
    if found is not None:
        return found.call(*arguments)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    try:
        result = export.export(jax.jit(lambda *given: function(*settings, *given)))(*shapes)
        _write(path, result.serialize())
    except (ValueError, TypeError, NotImplementedError, OSError):  # what JAX cannot write down, or the disk
        return function(*settings, *arguments)
    return result.call(*arguments)


def placed(state: Tree) -> Tree:
    """Return a state with every array committed to its device, where results of tracing are kept.

    Programs return committed arrays. Given a state in which only some are, JAX would compile once more.
    """
    if kept_in() is None or jax.device_count() > 1:
        return state
    if all(getattr(leaf, "committed", False) for leaf in jax.tree.leaves(state)):
        return state
    return jax.device_put(state, jax.devices()[0])


def _place(function: Callable[..., Tree], settings: tuple[Any, ...], arguments: tuple[Tree, ...]) -> Path | None:
    folder = kept_in()
    if folder is None or jax.device_count() > 1 or find_spec("flatbuffers") is None:
        return None
    try:
        said = plainly((function, settings))
    except TypeError:
        return None
    leaves, tree = jax.tree.flatten(arguments)
    about = [
        said,
        str(tree),
        [(leaf.shape, str(leaf.dtype)) for leaf in leaves],
        {name: str(getattr(jax.config, name, None)) for name in sorted(jax.config.values)},
        _sources(),
    ]
    known = json.dumps(about, default=_array)
    return folder / "traced" / hashlib.sha256(known.encode()).hexdigest()


def _array(value: np.ndarray) -> list[Any]:
    return [value.dtype.str, value.shape, value.tobytes().hex()]


@cache
def _sources() -> str:
    """Name the code that is traced: opvi's own, JAX's, and optax's."""
    root = Path(__file__).parents[1]
    told = hashlib.sha256(" ".join(version(name) for name in ("jax", "jaxlib", "optax", "numpy")).encode())
    for path in sorted(root.rglob("*.py")):
        told.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode())
        told.update(path.read_bytes())
    return told.hexdigest()


def _name_tuples() -> None:
    """Tell JAX the names of the tuples that opvi's states are made of, as far as they are loaded."""
    from jax import export

    for module in [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "opvi"]:
        for value in list(vars(module).values()):
            named = isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")
            if named and value.__module__.split(".")[0] == "opvi" and value not in _named:
                name = f"{value.__module__}:{value.__qualname__}"
                export.register_namedtuple_serialization(value, serialized_name=name)
                _named.add(value)


def _found(path: Path) -> Any:
    """Return what was traced, None if it is not there or cannot be used, for whatever reason: then it is traced."""
    from jax import export

    kept = _read(path)
    try:
        return None if kept is None else export.deserialize(kept)
    except Exception:
        return None


def _read(path: Path) -> bytearray | None:
    """Return what is kept; None if there is nothing intact."""
    try:
        held = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    digest, kept = held[:32], held[32:]
    return bytearray(kept) if hashlib.sha256(kept).digest() == digest else None


def _write(path: Path, kept: bytes | bytearray) -> None:
    path.parent.mkdir(exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix="new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(kept).digest() + kept)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    for old in sorted(path.parent.iterdir(), key=_used, reverse=True)[MOST:]:
        old.unlink(missing_ok=True)


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process removed it
        return 0.0
