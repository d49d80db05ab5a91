"""Compiled programs found by what they were made from: the next process neither traces nor lowers nor compiles them.

JAX finds a compiled program by what is lowered, so a process that has all its programs on disk would still trace each
of them, which takes longer than reading it. Here it is found by the function, its settings, the shapes of its
arguments, the options of the compiler and opvi's own sources.
"""

import gc
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jax.monitoring
import numpy as np

from opvi._cpu import give_back, inline_device
from opvi.running._plain import from_plain, plainly
from opvi.running._programs import LARGEST, kept_in, machine
from opvi.running._trusted import read_private
from opvi.types import Array, Tree

MOST = 400  # programs kept; those used longest ago make room. One takes 50 KB to 2 MB
WORTH_KEEPING = 0.05  # seconds that a program took to trace, lower and compile: to read one takes a fourth of that
LARGE = 1 << 20  # bytes of a program after whose reading memory is given back
SQUEEZED = 1  # of zlib's levels: the others take longer and gain a fifth
SWITCHES = ("jax_default_matmul_precision", "jax_enable_x64", "jax_default_device")  # others change no program of ours
HIT = "/jax/compilation_cache/cache_hits"
LATEST = "jax_persistent_cache_min_compile_time_secs"
LINES = "jax_traceback_in_locations_limit"
IDLE = (  # how names of settings begin that change no program; the devices are named apart
    *("jax_compilation_cache_", "jax_persistent_cache_", "jax_enable_compilation_cache"),
    *("jax_raise_persistent_cache_errors", "jax_explain_cache_misses", "jax_log_compiles", "jax_logging_level"),
    *("jax_debug_log_modules", "jax_traceback_filtering", LINES, "jax_platforms", "jax_platform_name"),
)

Options = dict[str, int | bool | str]  # of the compiler

_compiling = threading.RLock()
_found_by_jax: list[None] = []  # one for each program


class Program:
    """A compiled function whose first arguments are settings; called like the function.

    It is JAX's own, compiled by `jax.jit`, where no programs are kept, on several devices, and for settings that hold
    functions of the user.

    Args:
        function: a function of a module.
        settings: how many of its arguments are hashable settings.
        options: what is asked of the compiler.
        in_place: the argument that may be overwritten.
    """

    def __init__(self, function: Callable[..., Tree], settings: int, options: Options | None, in_place: int | None):
        def traced(*arguments: Tree) -> Tree:
            with uncollected():
                return function(*arguments)

        traced.__name__ = function.__name__
        donated = () if in_place is None else (in_place,)
        self.function, self.settings, self.options, self.in_place = function, settings, options, in_place
        self._jitted: Any = jax.jit(
            traced, static_argnums=tuple(range(settings)), donate_argnums=donated, compiler_options=options
        )
        self._found: dict[Any, Any] = {}
        self._let_go: set[Any] = set()

    def __call__(self, *arguments: Tree) -> Tree:
        """Return the function's result."""
        if kept_in() is None:
            return self._jitted(*arguments)
        return self.ready(*arguments)(*arguments[self.settings :])

    def ready(self, *arguments: Tree) -> Callable[..., Tree]:
        """Return the program for arguments of these shapes, without those that are settings; nothing is run."""
        known = self._known(arguments)
        found = self._found.get(known)
        if found is None:
            made = self._made(arguments[: self.settings], arguments[self.settings :])
            found = self._found.setdefault(known, made)
        return found

    def let_go(self, *arguments: Tree) -> None:
        """Free the memory of the program for arguments of these shapes, if it is on disk; done once.

        Whoever needs it again, such as the next model, reads it from there, and it stays.
        """
        known = self._known(arguments)
        if known not in self._found or known in self._let_go:
            return
        path = place(
            self.function, arguments[: self.settings], arguments[self.settings :], (self.options, self.in_place)
        )
        if path is not None and path.exists():
            self._let_go.add(known)
            del self._found[known]
            give_back()

    def _known(self, arguments: tuple[Tree, ...]) -> tuple[Hashable, ...]:
        """Return what tells a program from others of the same function."""
        settings, arrays = arguments[: self.settings], arguments[self.settings :]
        leaves, tree = jax.tree.flatten(arrays)
        shapes = tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
        return settings, tree, shapes, device_of(leaves), *[getattr(jax.config, name) for name in SWITCHES]

    def _made(self, settings: tuple[Hashable, ...], arrays: tuple[Tree, ...]) -> Callable[..., Tree]:
        """Return the program for arrays of these shapes: from disk, or compiled now and kept for others."""
        path = place(self.function, settings, arrays, (self.options, self.in_place))
        if path is None:
            return lambda *given: self._jitted(*settings, *given)
        found = _loaded(path, arrays)
        if found is not None:
            return found
        _listen()
        began, found_before = time.monotonic(), len(_found_by_jax)
        with _compiling, _set(LATEST, 1e9), _set(LINES, 0), uncollected():  # not kept twice; without lines of sources
            lowered = self._jitted.lower(*settings, *arrays)
            give_back()  # what is free now is not needed beside what the compiler takes
            compiled = lowered.compile()
            del lowered
            self._jitted.clear_cache()  # it is not needed again: 5 to 10 MB
        # What JAX has read from its own cache, XLA would write without its code.
        if time.monotonic() - began > WORTH_KEEPING and len(_found_by_jax) == found_before:
            _keep(path, compiled)
        give_back()
        return compiled

    def _cache_size(self) -> int:
        return self._jitted._cache_size() + len(self._found)


@cache
def _listen() -> None:
    """Note each program that JAX finds in its own cache: another version of opvi may have left some there."""
    jax.monitoring.register_event_listener(_heard)


def _heard(event: str, **_: object) -> None:
    if event == HIT:
        _found_by_jax.append(None)


@contextmanager
def uncollected() -> Iterator[None]:
    """Within this block garbage is not collected: tracing makes a million objects, and nearly all of them stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _set(name: str, value: float) -> Iterator[None]:
    """Within this block JAX has another setting."""
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


def place(
    function: Callable[..., Tree],
    settings: tuple[Hashable, ...],
    arrays: tuple[Tree, ...],
    how: tuple[Options | None, int | None] = (None, None),
) -> Path | None:
    """Return the file of a program; None if it cannot be kept."""
    folder = kept_in()
    if folder is None or jax.device_count() > 1:
        return None
    try:
        said = plainly((function, tuple(map(_by_name, settings))))
    except TypeError:
        return None
    leaves, tree = jax.tree.flatten(arrays)
    about = [
        said,
        str(tree),
        device_of(leaves) is None,
        [(leaf.shape, str(leaf.dtype)) for leaf in leaves],
        how,
        {name: str(getattr(jax.config, name, None)) for name in sorted(jax.config.values) if not name.startswith(IDLE)},
        (jax.devices()[0].platform, jax.devices()[0].device_kind),
        machine(),
        _sources(),
    ]
    known = json.dumps(about, default=_array)
    return folder / "whole" / hashlib.sha256(known.encode()).hexdigest()


def device_of(leaves: list[Array]) -> jax.Device | None:
    """Return `inline_device()` if that is where arrays are; None otherwise."""
    if (inline := inline_device()) is None:
        return None
    first = next((leaf for leaf in leaves if isinstance(leaf, jax.Array)), None)
    return inline if first is not None and first.devices() == {inline} else None


def _by_name(setting: Hashable) -> Hashable:
    """Return the name of a method of opvi's own classes, such as `Predictive.mean`; other settings as they are."""
    module, path = getattr(setting, "__module__", ""), getattr(setting, "__qualname__", "").split(".")
    if not isinstance(setting, FunctionType) or module.split(".")[0] != "opvi" or len(path) != 2:
        return setting
    owner = getattr(sys.modules[module], path[0], None)
    return f"{module}:{'.'.join(path)}" if getattr(owner, path[1], None) is setting else setting


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


@cache
def _lapack_found() -> None:
    """Let JAX look up LAPACK's functions, as it does when it lowers one: a program from disk finds them there."""
    try:
        from jaxlib.lapack import prepare_lapack_call

        prepare_lapack_call("potrf_ffi", np.dtype(np.float32))
    except (ImportError, AttributeError, TypeError):  # not public: seen in 0.10
        jax.jit(jax.lax.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), np.float32))


def _loaded(path: Path, arrays: tuple[Tree, ...]) -> Any:
    """Return a program from disk; None if it is not there or cannot be used, for whatever reason: then it is made."""
    kept = _read(path)
    if kept is None:
        return None
    from jax.experimental import serialize_executable

    try:
        told, _, program = zlib.decompress(kept).partition(b"\n")
        if b"lapack" in program:  # its functions' names begin so; SciPy, which has them, takes a while to load
            _lapack_found()
        if len(program) > LARGE:
            give_back()
        given, returned = jax.tree.structure((arrays, {})), from_plain(json.loads(told))
        device = device_of(jax.tree.leaves(arrays))
        found = serialize_executable.deserialize_and_load(program, given, returned, device and device.client)
    except Exception:
        return None
    if len(program) > LARGE:
        give_back()
    return found


def _keep(path: Path, compiled: Any) -> None:
    """Write a program to disk, unless JAX or the disk cannot."""
    from jax.experimental import serialize_executable

    try:
        program, _, returned = serialize_executable.serialize(compiled)
        _write(path, zlib.compress(json.dumps(plainly(returned)).encode() + b"\n" + program, SQUEEZED))
    except (ValueError, TypeError, NotImplementedError, OSError, RuntimeError):
        return


def _read(path: Path) -> bytes | None:
    """Return what is kept; None if there is nothing intact that this user wrote."""
    held = read_private(path)
    if held is None:
        return None
    digest, kept = held[:32], held[32:]
    return kept if hashlib.sha256(kept).digest() == digest else None


def _write(path: Path, kept: bytes) -> None:
    path.parent.mkdir(0o700, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix="new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(kept).digest() + kept)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    room, files = LARGEST, sorted(map(_used, path.parent.iterdir()), reverse=True)
    for number, (_, size, old) in enumerate(files):
        room -= size
        if number >= MOST or room < 0:
            old.unlink(missing_ok=True)


def _used(path: Path) -> tuple[float, int, Path]:
    """Return when a file was last used, and its size."""
    try:
        about = path.stat()
        return about.st_mtime, about.st_size, path
    except OSError:  # another process removed it
        return 0.0, 0, path
