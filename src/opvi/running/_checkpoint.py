r"""One file, written completely or not at all, checked when read, and never executed.

A file is a header (a line that names the format, its version, a checksum of all the rest, the length of the
description), a description as JSON, and the bytes of the arrays in the order in which it names them:

    {"tree": {"state": {"particles": null, "optimizer": [{"count": null, "mu": null}]}, "rows": 1200},
     "arrays": {"state/particles": {"dtype": "float32", "shape": [100, 2]}, …}}

The tree is plain data: dictionaries (also for the fields of states), lists (also for tuples), numbers, strings. Where
it says null and the path (with `/` in a name written `~1`, and `~` written `~0`) is an array's, the array belongs.
No class is named, so code may move and be renamed; loading imports nothing and makes nothing but plain data.
"""

import hashlib
import io
import json
import math
import os
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from opvi.types import Tree, as_key

MAGIC, VERSION = b"opvi checkpoint\n", 2
# What samplers did not have before, and the setting that says whether they do.
NEWER = {
    "memory": "one: see `memory_rows`",
    "gates": "them: see `fading_above`",
    "levels": "them: see `levels`",
    "process": "one: see `process`",
    "seats": "them: see `seats`",
}
HEADER = struct.Struct("<16sI32sQ")  # the magic, the version, SHA-256 of what follows, length of the description
LARGEST_DESCRIPTION = 1 << 26  # bytes
MOST_VALUES = 1 << 20  # in a description: objects take fifty times as much memory as their JSON
MOST_SIDES = 32  # of an array
LARGEST_TEXT = 1 << 26  # bytes of other files that describe something
PIECE = 1 << 20  # bytes that are hashed at a time
WHOLE = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
DTYPES = {"bool", *WHOLE, "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"}
KEYS = {"threefry2x32", "rbg", "unsafe_rbg"}  # the kinds of JAX's random keys


class CheckpointError(ValueError):
    """A file that is not a checkpoint, is damaged, comes from another version, or does not fit."""

    def __init__(self, message: str):
        # Names in a file may hold anything, such as what a terminal takes for commands.
        super().__init__("".join(letter if letter.isprintable() else "?" for letter in message))


def save(path: str | Path, tree: Tree) -> Path:
    """Write a state, or any pytree that holds states, arrays, JAX keys, numbers and strings.

    The file appears under its name only when all of it is on disk; a crash or a full disk in between leaves what
    was there before.

    Args:
        path: the file; its folder must exist.
        tree: e.g. a sampler's state, or `{"state": state, "key": key, "rows": 1200}`.
    """
    write_whole(Path(path), packed(tree))
    return Path(path)


def packed(tree: Tree) -> list[bytes | memoryview]:
    """Return the parts of a checkpoint file."""
    arrays: dict[str, Any] = {}
    parts: list[np.ndarray] = []
    plain = _plain(tree, "", arrays, parts)
    description = json.dumps({"tree": plain, "arrays": arrays}, allow_nan=False).encode()
    _refuse_large(description)
    blocks = [memoryview(description), *(a.reshape(-1).view(np.uint8).data for a in parts)]
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return [HEADER.pack(MAGIC, VERSION, digest.digest(), len(description)), *blocks]


def load(path: str | Path, like: Tree = None) -> Tree:
    """Return what was saved, bit for bit.

    Args:
        path: the file.
        like: what the result looks like: a state, or a sampler (whose state has that form), or a dictionary of them, in
            which entries of the file may be left out. JAX arrays must have the same shape, NumPy's as many axes.
            Without it, states come back as dictionaries of their fields, tuples as lists, and arrays as NumPy's.
    """
    tree = read(Path(path))
    try:
        return shaped(tree, like)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read(path: Path) -> Tree:
    """Return what was saved as plain data."""
    with opened(path) as file:
        return _read(file, os.fstat(file.fileno()).st_size, path)


def unpacked(data: bytes, path: Path) -> Tree:
    """Return the plain data in the bytes of a checkpoint; `path` says where they come from."""
    return _read(io.BytesIO(data), len(data), path)


def _read(file: IO[bytes], whole: int, path: Path) -> Tree:
    """Return the plain data in a file of so many bytes: its header, sizes and checksum come before all else."""
    head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise CheckpointError(f"{path} is not an opvi checkpoint, or a truncated one. It was not read.")
    _, version, digest, size = HEADER.unpack(head)
    if version > VERSION:
        raise CheckpointError(
            f"{path} has format {version}, but this opvi reads format {VERSION}: it was written by a newer one. "
            "Install that (`pip install --upgrade opvi`)."
        )
    if version < VERSION:
        raise CheckpointError(
            f"{path} has format {version}, which no released opvi wrote and this one does not read. Learn again from "
            "the data."
        )
    if whole > memory():
        raise CheckpointError(
            f"{path} has {whole / 2**30:,.0f} GiB, more than the memory of this machine. It was not read."
        )
    if size > min(whole - HEADER.size, LARGEST_DESCRIPTION):
        raise CheckpointError(f"{path} does not describe a checkpoint: its description would have {size} bytes.")
    if _digest(file) != digest:
        raise CheckpointError(f"{path} is damaged: its contents do not match their checksum. Use an older checkpoint.")
    file.seek(HEADER.size)
    try:
        description = file.read(size)
        _refuse_large(description)
        found = json.loads(description, object_pairs_hook=_distinct, parse_constant=_refused, parse_float=_finite)
        if not isinstance(found, dict) or set(found) != {"tree", "arrays"} or not isinstance(found["arrays"], dict):
            raise ValueError("it is not a tree with arrays")
        arrays = dict(_arrays(found["arrays"], file, whole - HEADER.size - size))
        tree = _filled(found["tree"], "", arrays)
        if arrays:
            raise ValueError(f"`{next(iter(arrays))}` has no place in its tree")
    except (TypeError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path} does not describe a checkpoint: {error}.") from None
    return tree


def _digest(file: IO[bytes]) -> bytes:
    """Return the checksum of the rest of a file, of which a piece is in memory at a time."""
    digest = hashlib.sha256()
    while piece := file.read(PIECE):
        digest.update(piece)
    return digest.digest()


def _refuse_large(description: bytes) -> None:
    """Refuse a description with so many values that they would fill the memory; nothing is read for that."""
    marks = sum(description.count(mark) for mark in (b",", b"[", b"{"))
    if len(description) > LARGEST_DESCRIPTION or marks > MOST_VALUES:
        raise ValueError(
            f"its description has {len(description):,} bytes and about {marks:,} values besides arrays, but at most "
            f"{LARGEST_DESCRIPTION:,} and {MOST_VALUES:,} are saved and read. Make arrays of long lists of numbers"
        )


def memory() -> int:
    """Return the memory of this machine in bytes; without limit where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 1 << 62


def write_whole(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file with all of these parts or not at all."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder, so nothing was saved. Make it first: `mkdir`.")
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
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, too."""
    if os.name == "nt":  # Windows has no such thing
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, if need be; when this returns, their names are on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_folder(path.parent)


def bytes_of(path: Path) -> bytes:
    """Return the contents of a regular file that is not large; refuse anything else at once, without waiting."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST_TEXT:
            raise CheckpointError(f"{path} has {size:,} bytes, but at most {LARGEST_TEXT:,} are read. It was not.")
        return file.read()


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a regular file; refuse anything else at once, without waiting."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    if stat.S_ISREG(path.stat().st_mode):  # a device may act on being opened
        with os.fdopen(os.open(path, flags), "rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                yield file
                return
    raise CheckpointError(f"{path} is not a regular file, so it was not read.")


# --- trees as plain data ------------------------------------------------------------------------


def _below(path: str, name: object) -> str:
    """Return the path of a part."""
    escaped = str(name).replace("~", "~0").replace("/", "~1")
    return f"{path}/{escaped}" if path else escaped


def _plain(tree: Tree, path: str, arrays: dict[str, Any], parts: list[np.ndarray]) -> Any:
    """Return the tree with None in place of every array; arrays are described and appended to the parts."""

    def put(array: np.ndarray, **more: str | bool) -> None:
        arrays[path] = {"dtype": array.dtype.name, "shape": array.shape, **more}
        parts.append(np.ascontiguousarray(array.astype(_dtype(array.dtype.name), copy=False)))

    where = f"`{path}`" if path else "the tree"
    if tree is None or isinstance(tree, bool | str):
        return tree
    if isinstance(tree, int | float) and not isinstance(tree, np.generic):
        if isinstance(tree, int) or math.isfinite(tree):
            return tree
        put(np.array(tree), number=True)  # JSON has no word for it
    elif isinstance(tree, dict):
        odd = [name for name in tree if not isinstance(name, str)]
        if odd:
            raise TypeError(f"{where} is a dictionary with the key {odd[0]!r}, but only strings can be saved as keys.")
        return {name: _plain(value, _below(path, name), arrays, parts) for name, value in tree.items()}
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return _plain(dict(zip(tree._fields, tree, strict=True)), path, arrays, parts)
    elif isinstance(tree, list | tuple):
        return [_plain(value, _below(path, i), arrays, parts) for i, value in enumerate(tree)]
    elif _is_key(tree):
        put(np.asarray(jax.random.key_data(tree)), key=str(jax.random.key_impl(tree)))
    elif isinstance(tree, jax.Array | np.ndarray | np.generic):
        array = np.asarray(tree)
        if array.dtype.name not in DTYPES:
            raise TypeError(f"{where} is an array of dtype {array.dtype}, but only numbers are saved.")
        put(array)
    else:
        raise TypeError(
            f"{where} is a {type(tree).__name__}, but a checkpoint holds arrays, JAX keys, numbers, strings and plain "
            "containers of them."
        )
    return None


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _dtype(name: str) -> np.dtype:
    """Return a number's dtype, in the byte order of a file."""
    if name not in DTYPES:
        raise ValueError(f"there is no numeric dtype {name!r}")
    if name.startswith(("bfloat", "float8")):
        return np.dtype(getattr(jnp, name))
    return np.dtype(name).newbyteorder("<")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in a dictionary")
    return found


def _finite(word: str) -> float:
    return float(word) if math.isfinite(float(word)) else _refused(word)


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _arrays(described: dict[str, Any], file: IO[bytes], left: int) -> Iterator[tuple[str, Any]]:
    """Return the arrays in the rest of a file, which has `left` bytes, by their paths."""
    for path, about in described.items():
        if not isinstance(about, dict) or not {"dtype", "shape"} <= set(about) <= {"dtype", "shape", "key", "number"}:
            raise ValueError(f"`{path}` is not an array")
        shape = about["shape"]
        if not _is_shape(shape):
            raise ValueError(f"`{path}` has the shape {str(shape)[:60]}")
        dtype = _dtype(about["dtype"])
        size = dtype.itemsize * math.prod(shape)
        if size > left:
            raise ValueError(f"it ends before `{path}` does")
        array = np.zeros(shape, dtype)
        if size and file.readinto(array.reshape(-1).view(np.uint8).data) != size:  # type: ignore[attr-defined]
            raise ValueError(f"it ends before `{path}` does")
        left -= size
        array = array.astype(dtype.newbyteorder("="), copy=False)
        if "key" in about:
            if about["key"] not in KEYS:
                raise ValueError(f"`{path}` is a key of the kind {about['key']!r}")
            yield path, jax.random.wrap_key_data(jnp.asarray(array), impl=about["key"])
        else:
            yield path, float(array) if "number" in about else array
    if left:
        raise ValueError(f"it holds {left} bytes more than it describes")


def _is_shape(shape: object) -> bool:
    """Return whether this is the shape of an array, before its numbers, which may have any size, are multiplied."""
    if type(shape) is not list or len(shape) > MOST_SIDES:
        return False
    return all(type(side) is int and 0 <= side < 1 << 60 for side in shape)


def _filled(node: Any, path: str, arrays: dict[str, Any]) -> Tree:
    """Return the plain tree with the arrays put in."""
    if node is None:
        return arrays.pop(path, None)
    if isinstance(node, dict):
        return {name: _filled(value, _below(path, name), arrays) for name, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, _below(path, i), arrays) for i, value in enumerate(node)]
    return node


# --- plain data as states -----------------------------------------------------------------------


def shaped(tree: Tree, like: Tree, path: str = "", exact: bool = False) -> Tree:
    """Return plain data in the form of `like`; with `exact`, dictionaries may not have other entries."""
    where = f"`{path}`" if path else "what was saved"
    if like is None and not exact:
        return tree
    if callable(getattr(like, "init", None)) and callable(getattr(like, "step", None)):
        like = _state_of(like, tree)
    if isinstance(like, dict) or hasattr(like, "_fields"):
        exact = exact or not isinstance(like, dict)
        entries = dict(like) if isinstance(like, dict) else dict(zip(like._fields, like, strict=True))
        if not isinstance(tree, dict):
            raise CheckpointError(f"{where} is {_kind(tree)}, but entries {sorted(entries)} are expected.")
        # What is None here, or has a number as its default, may be newer than the file.
        newer: dict[str, Any] = {name: None for name, part in entries.items() if part is None}
        for name, number in getattr(like, "_field_defaults", {}).items():
            if isinstance(number, float) and hasattr(entries[name], "shape"):
                newer[name] = np.full(entries[name].shape, number, entries[name].dtype)
        tree = {**newer, **tree}
        odd = sorted(set(entries) - set(tree)) or (sorted(set(tree) - set(entries)) if exact else [])
        if odd:
            side = "is missing" if odd[0] in entries else "is not expected"
            other = "It was saved by another sampler or version."
            if odd[0] in NEWER:
                had = "without" if odd[0] in entries else "with"
                other = f"It was saved by a sampler {had} {NEWER[odd[0]]}."
            raise CheckpointError(f"`{_below(path, odd[0])}` {side}. {other}")
        made = {name: shaped(tree[name], entries.get(name), _below(path, name), exact) for name in tree}
        return made if isinstance(like, dict) else type(like)(**made)
    if isinstance(like, tuple) and not like and not hasattr(like, "_fields") and isinstance(tree, list | dict):
        return _grown(tree)  # rows in a form that only their first batch had
    if isinstance(like, list | tuple):
        if not isinstance(tree, list) or len(tree) != len(like):
            raise CheckpointError(f"{where} is {_kind(tree)}, but a list of {len(like)} entries is expected.")
        return type(like)(shaped(tree[i], part, _below(path, i), True) for i, part in enumerate(like))
    return _leaf(tree, like, where)


def _grown(tree: Tree) -> Tree:
    """Return what was saved with tuples in place of lists, on the device."""
    if isinstance(tree, dict):
        return {name: _grown(part) for name, part in tree.items()}
    return tuple(_grown(part) for part in tree) if isinstance(tree, list) else jax.device_put(tree)


def _leaf(found: Any, like: Any, where: str) -> Any:
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        fits = isinstance(found, np.ndarray | jax.Array) and _is_key(found) == _is_key(like)
        on_device = isinstance(like, jax.Array | jax.ShapeDtypeStruct) and not _is_key(like)
        if fits and on_device and jax.dtypes.canonicalize_dtype(found.dtype) != found.dtype:
            raise CheckpointError(
                f"{where} has dtype {found.dtype}, which JAX would truncate to 32 bits. Enable 64 bits before "
                "loading: `jax.config.update('jax_enable_x64', True)`."
            )
        fits = fits and found.dtype == like.dtype and found.ndim == like.ndim
        grows = isinstance(like, np.ndarray) or like.shape[:1] == (
            0,
        )  # NumPy's arrays, and room that was empty at first
        if not fits or (found.shape != like.shape and not grows):
            raise CheckpointError(f"{where} is {_kind(found)}, but {_kind(like)} is expected.")
        return jax.device_put(found) if on_device else found  # nothing is compiled, as `jnp.asarray` would
    if not (isinstance(found, type(like)) or (isinstance(like, int | float) and isinstance(found, int | float))):
        raise CheckpointError(f"{where} is {_kind(found)}, but {_kind(like)} is expected.")
    return found


def _state_of(sampler: Any, tree: Tree) -> Tree:
    """Return the form of a sampler's state, with as many particles as were saved, without computing anything."""
    key = as_key(0)
    count = _particles(tree)
    try:
        usual = jax.eval_shape(lambda: sampler.init(key))
        if count is None or count == len(usual.particles):
            return usual
    except TypeError:  # it has no usual number
        if count is None:
            raise
    try:
        return jax.eval_shape(lambda: sampler.init(key, count))
    except ValueError as error:
        raise CheckpointError(f"it holds {count} particles: {error}") from None


def _particles(tree: Tree) -> int | None:
    """Return the number of particles in a state or the one it wraps; None for a state with several sets."""
    if not isinstance(tree, dict):
        return None
    found = tree.get("particles")
    return len(found) if isinstance(found, np.ndarray) and found.ndim else _particles(tree.get("inner"))


def _kind(value: Any) -> str:
    """Return the kind of a value, for messages."""
    if isinstance(value, dict):
        return f"a dictionary of {sorted(value)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} entries"
    if hasattr(value, "dtype"):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    return "nothing" if value is None else repr(value)
