r"""Saving and loading: one file, written whole or not at all, checked when read, and never executed.

`Checkpoints` keeps the last few of a run in a folder, and lets one process at a time write there.

A file is a line that names the format and its version, a checksum of all the rest, a description of the tree as
JSON, and the arrays' bytes. Loading builds arrays, plain containers and the state classes of opvi and optax, and
nothing else.
"""

import fcntl
import hashlib
import json
import math
import os
import struct
import tempfile
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

MAGIC, VERSION = b"opvi checkpoint\n", 1
HEADER = struct.Struct("<16sI32sQ")  # the magic, the version, SHA-256 of what follows, length of the description
TRUSTED = ("opvi", "optax")  # packages whose NamedTuples may stand in a file
LARGEST_DESCRIPTION = 1 << 28  # bytes
ENDING, DAMAGED = ".opvi", ".damaged"


class CheckpointError(ValueError):
    """A file that is no checkpoint, is damaged, or comes from another version."""


def save(path: str | Path, tree: Any) -> Path:
    """Write a state, or any pytree that holds states, arrays, numbers and texts.

    The file appears under its name only when all of it is on the disk; a crash or a full disk on the way leaves what
    was there before.

    Args:
        path: the file; its folder must exist.
        tree: e.g. a sampler's state, or `{"state": state, "key": key, "rows": 1200}`.
    """
    path = Path(path)
    arrays: list[np.ndarray] = []
    description = json.dumps(_describe(tree, arrays, "")).encode()
    parts = [description, *(np.ascontiguousarray(a).tobytes() for a in arrays)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    header = HEADER.pack(MAGIC, VERSION, digest.digest(), len(description))
    write_whole(path, [header, *parts])
    return path


def load(path: str | Path) -> Any:
    """What was saved, bit for bit, with arrays on the default device."""
    path = Path(path)
    data = path.read_bytes()
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise CheckpointError(f"{path} is no opvi checkpoint, or only the beginning of one. It was not read.")
    _, version, digest, size = HEADER.unpack_from(data)
    if version > VERSION:
        raise CheckpointError(
            f"{path} has format {version}, but this opvi reads up to {VERSION}: it was written by a newer one. "
            "Install that (`pip install --upgrade opvi`)."
        )
    body = memoryview(data)[HEADER.size :]
    if hashlib.sha256(body).digest() != digest:
        raise CheckpointError(f"{path} is damaged: its contents do not match their checksum. Use an older checkpoint.")
    if size > min(len(body), LARGEST_DESCRIPTION):
        raise CheckpointError(f"{path} is damaged: it says that its description has {size} bytes. Use an older one.")
    try:
        arrays = _Arrays(body[size:])
        tree = _build(json.loads(bytes(body[:size])), arrays)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} does not describe a state that this opvi knows ({error}).") from error
    if arrays.rest():
        raise CheckpointError(f"{path} holds {arrays.rest()} bytes more than it describes.")
    return tree


class LockedError(RuntimeError):
    """Another process writes to this folder."""


class Checkpoints:
    """The last few checkpoints of one run, in a folder of their own.

    `with Checkpoints(folder) as kept:` makes the folder and locks it against other writers until the block, or the
    process, ends. Reading (`newest`) needs no lock.

    Args:
        folder: only checkpoints belong there.
        keep: how many of the last ones stay. A damaged one falls back to the one before it.
    """

    def __init__(self, folder: str | Path, keep: int = 3):
        if keep < 1:
            raise ValueError(f"`keep` is {keep}, but at least 1 checkpoint must stay.")
        self.folder, self.keep = Path(folder), keep
        self.damaged: list[str] = []  # what `newest` passed over, and why
        self._lock: int | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system opens it again when the process ends
        except OSError:
            owner = os.read(lock, 20).decode(errors="replace").strip()
            os.close(lock)
            raise LockedError(
                f"{self.folder} is being written to by process {owner or '(unknown)'}. Wait for it, stop it, or choose "
                "another folder."
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        self._lock = lock
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def save(self, number: int, tree: Any) -> Path:
        """Save under a number that grows, such as the rounds done; older ones beyond `keep` are deleted."""
        path = save(self.folder / f"{number:015d}{ENDING}", tree)
        old = [other for other in self._paths() if other != path][self.keep - 1 :]
        for other in [*old, *self.folder.glob(".*.part")]:  # parts: of a process killed while it wrote
            other.unlink(missing_ok=True)
        return path

    def newest(self) -> Any:
        """The newest checkpoint that is whole, or None if there is none; what was passed over is in `damaged`.

        Whoever holds the lock sets damaged files aside under another name.
        """
        for path in self._paths():
            try:
                if path.is_symlink():
                    raise CheckpointError(f"{path} is a link, but a run's files must lie in its own folder.")
                return load(path)
            except FileNotFoundError:  # a running process has deleted it since
                return self.newest()
            except (CheckpointError, OSError) as error:
                self.damaged.append(str(error))
                if self._lock is not None:
                    path.rename(path.with_suffix(DAMAGED))
        return None

    @property
    def begun(self) -> bool:
        """Whether anything was saved here."""
        return bool(self._paths())

    def _paths(self) -> list[Path]:
        """The newest first."""
        return sorted(self.folder.glob(f"[0-9]*{ENDING}"), reverse=True)


def write_whole(path: Path, parts: list[bytes]) -> None:
    """A file with all of these parts, or none: nothing is there before all of it is."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is no folder, so nothing was saved. Make it first: `mkdir`.")
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, is on the disk
    finally:
        os.close(folder)


# --- trees as JSON ------------------------------------------------------------------------------


def _describe(tree: Any, arrays: list[np.ndarray], where: str) -> Any:
    """The tree with every array replaced by its dtype and shape; arrays are appended to the list."""
    if tree is None or isinstance(tree, bool | str):
        return tree
    if isinstance(tree, int | float) and not isinstance(tree, np.generic):
        return {"number": tree.hex() if isinstance(tree, float) else str(tree), "is": type(tree).__name__}
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"{where or 'the tree'} is a dict with keys that are no texts, which cannot be saved.")
        return {"dict": {key: _describe(value, arrays, f"{where}.{key}") for key, value in tree.items()}}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        kind = type(tree)
        if kind.__module__.split(".")[0] not in TRUSTED:
            raise TypeError(
                f"{where or 'the tree'} is a {kind.__module__}.{kind.__qualname__}, but only classes of "
                f"{' and '.join(TRUSTED)} are restored by name. Save its fields instead: `{where}._asdict()`."
            )
        fields = {name: _describe(getattr(tree, name), arrays, f"{where}.{name}") for name in tree._fields}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": fields}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [_describe(value, arrays, f"{where}[{i}]") for i, value in enumerate(tree)]}
    if isinstance(tree, jax.Array) and jnp.issubdtype(tree.dtype, jax.dtypes.prng_key):
        return {"key": str(jax.random.key_impl(tree)), "data": _describe(jax.random.key_data(tree), arrays, where)}
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        array = np.asarray(tree)
        if array.dtype.kind not in "fiubV" or array.dtype.names:
            raise TypeError(f"{where or 'the tree'} is an array of dtype {array.dtype}, but only numbers are saved.")
        arrays.append(array)
        return {"array": array.dtype.name, "shape": array.shape, "jax": isinstance(tree, jax.Array)}
    raise TypeError(
        f"{where or 'the tree'} is a {type(tree).__name__}, but a checkpoint holds arrays, numbers, texts and plain "
        "containers of them."
    )


class _Arrays:
    """Hands out the arrays of a file, one after the other."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def next(self, name: str, shape: list[int]) -> np.ndarray:
        dtype = np.dtype(getattr(jnp, name)) if name.startswith(("bfloat", "float8")) else np.dtype(name)
        if dtype.kind not in "fiubV" or not all(isinstance(k, int) and k >= 0 for k in shape):
            raise ValueError(f"an array of dtype {name} and shape {shape}")
        size = dtype.itemsize * math.prod(shape)
        if size > self.rest():
            raise CheckpointError("it ends before its last array.")
        part = self.data[self.at : self.at + size]
        self.at += size
        return np.frombuffer(part, dtype).reshape(shape).copy()

    def rest(self) -> int:
        return len(self.data) - self.at


def _build(node: Any, arrays: _Arrays) -> Any:
    if node is None or isinstance(node, bool | str):
        return node
    if "array" in node:
        array = arrays.next(node["array"], node["shape"])
        if node["jax"] and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
            raise CheckpointError(
                f"it holds arrays of dtype {array.dtype}, which JAX would cut to 32 bits as it is set up now. Switch "
                "long ones on before loading: `jax.config.update('jax_enable_x64', True)`."
            )
        return jnp.asarray(array) if node["jax"] else array
    if "number" in node:
        return float.fromhex(node["number"]) if node["is"] == "float" else int(node["number"])
    if "key" in node:
        return jax.random.wrap_key_data(_build(node["data"], arrays), impl=node["key"])
    if "dict" in node:
        return {key: _build(value, arrays) for key, value in node["dict"].items()}
    if "list" in node:
        return [_build(value, arrays) for value in node["list"]]
    if "tuple" in node:
        return tuple(_build(value, arrays) for value in node["tuple"])
    kind = _class(node["class"])
    if set(kind._fields) != set(node["fields"]):
        raise CheckpointError(
            f"it holds a {node['class']} with the fields {sorted(node['fields'])}, but this opvi's has "
            f"{sorted(kind._fields)}. It was written by another version of opvi or optax: load it with that."
        )
    return kind(**{name: _build(value, arrays) for name, value in node["fields"].items()})


def _class(name: str) -> Any:
    """A state's class, found by name among those of trusted packages."""
    module, _, qualified = name.partition(":")
    if module.split(".")[0] not in TRUSTED:
        raise CheckpointError(f"it asks for the class {name}, but only those of {' and '.join(TRUSTED)} are made.")
    try:
        found: Any = import_module(module)
        for part in qualified.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        found = None
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise CheckpointError(
            f"it asks for the class {name}, which is no state of this opvi. It was written by another version: "
            "load it with that."
        )
    return found
