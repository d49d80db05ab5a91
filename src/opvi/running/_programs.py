"""Compiled programs kept on disk, so that the next process does not wait for them again."""

import hashlib
import os
import platform
import sys
from functools import cache
from pathlib import Path

import jax
import jax.monitoring

from opvi._cpu import give_back

SWITCH = "OPVI_PROGRAMS"  # "off", or the folder
LARGEST = 1 << 28  # bytes that JAX's own files may take, and those of `_kept`; the programs used longest ago make room
WORTH_KEEPING = 0.2  # seconds that a program took to compile

_asked = False
_folder: Path | None = None


def kept_in() -> Path | None:
    """Return the folder that `keep_programs` chose, None if it chose none or JAX has been given another since."""
    if _folder is None:
        return None
    # Not `config.values`, which looks up all settings at each call.
    return _folder if getattr(jax.config, "jax_compilation_cache_dir", None) == str(_folder) else None


def keep_programs() -> Path | None:
    """Let JAX keep compiled programs in the user's cache folder, and return the folder.

    JAX itself reads, writes, locks and bounds it. Nothing is changed, and the result is None, if JAX has a folder
    already (`JAX_COMPILATION_CACHE_DIR`), if the variable OPVI_PROGRAMS is "off", if the folder cannot be written, or
    if a GPU is used, whose own caches serve. Called by estimators, River models and the command line; the first call
    decides.
    """
    global _asked, _folder
    _tidy()
    wanted = os.environ.get(SWITCH, "")
    if _asked or wanted.lower() in ("off", "0", "no") or jax.config.values["jax_compilation_cache_dir"]:
        return None
    _asked = True
    folder = Path(wanted).expanduser() if wanted else _user_cache() / "opvi" / "programs" / machine()
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)  # it holds machine code, which others must not write
        _swept(folder)
    except OSError:
        return None
    if not os.access(folder, os.W_OK | os.X_OK):
        return None
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    _folder = folder
    return folder


@cache
def _tidy() -> None:
    """After each program that took long to compile or to read, give back the memory that it took."""
    jax.monitoring.register_event_duration_secs_listener(_made)


def _made(event: str, duration_secs: float, **_: object) -> None:
    if event.endswith("backend_compile_duration") and duration_secs > WORTH_KEEPING:
        give_back()


def _user_cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    if given:
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    return Path.home() / "Library" / "Caches" if sys.platform == "darwin" else Path.home() / ".cache"


@cache
def machine() -> str:
    """Return a name for the processor, JAX version and flags, because programs fit only these."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    known = f"{platform.machine()} {flags} {os.environ.get('XLA_FLAGS', '')}"
    return f"jax-{jax.__version__}-{hashlib.sha256(known.encode()).hexdigest()[:12]}"


def _swept(folder: Path) -> None:
    """Remove unfinished files of killed processes, on which JAX's own bookkeeping would fail forever."""
    for path in folder.glob("*-cache"):
        used = path.with_name(path.name.removesuffix("-cache") + "-atime")
        if not used.exists() or used.stat().st_size != 8 or not path.stat().st_size:
            path.unlink(missing_ok=True)
            used.unlink(missing_ok=True)
