"""Compiled programs kept on disk, so that the next process does not wait for them again."""

import hashlib
import os
import platform
import re
import shutil
import sys
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import jax
import jax.monitoring

from opvi._cpu import give_back
from opvi.running._trusted import is_own, made_private

SWITCH = "OPVI_PROGRAMS"  # the folder, or one of OFF
OFF = ("off", "0", "no", "false", "none")
LARGEST = 1 << 28  # bytes that JAX's own files may take, and those of `_kept`; the programs used longest ago make room
WORTH_KEEPING = 0.2  # seconds that a program took to compile
OURS = re.compile(r"jax-[^-]+-[0-9a-f]{12}")  # what `machine` returns
UNUSED = 60 * 86_400  # seconds, after which the programs of another JAX version or processor are removed

_asked = False
_folder: Path | None = None


def kept_in() -> Path | None:
    """Return the folder that `keep_programs` chose; None if it chose none, or JAX's cache has been switched off."""
    # Not `config.values`, which looks up all settings at each call.
    return _folder if getattr(jax.config, "jax_enable_compilation_cache", True) else None


def keep_programs() -> Path | None:
    """Keep compiled programs on disk from now on, and return their folder; None if they are not kept.

    The folder is that of the variable OPVI_PROGRAMS, else `opvi` inside the folder that JAX was given
    (`JAX_COMPILATION_CACHE_DIR`), else one in the user's cache folder. `_kept` writes to `whole` inside it. Programs
    that only JAX can keep lie beside that, and JAX itself reads, writes, locks and bounds them; if it was given a
    folder, its settings stay as they are.

    Nothing is kept if OPVI_PROGRAMS is "off", if JAX's cache is switched off (`JAX_ENABLE_COMPILATION_CACHE`), if JAX's
    folder is remote, if the folder cannot be written, or if others may write to it or replace it (see `_trusted`).
    Called by estimators, River models, fleets and the command line; the first call decides.
    """
    global _asked, _folder
    _tidy()
    wanted, given = os.environ.get(SWITCH, ""), jax.config.values["jax_compilation_cache_dir"]
    if wanted.lower() in OFF or not jax.config.values["jax_enable_compilation_cache"]:
        return None
    if _asked:
        return kept_in()
    _asked = True
    try:
        folder = _chosen(wanted, given)
        if folder is None:
            return None
        folder = folder.resolve()  # links in its name are followed once, and what they lead to is looked at
        new = not folder.exists()
        odd = made_private(folder) or made_private(folder / "whole")
        if odd is not None:
            if wanted:
                _warn(
                    f"{SWITCH} is {wanted!r}, but {odd} is a folder that others own or may write to. They could run "
                    "code as you, so programs are not kept there. Name a folder whose parents are yours or the "
                    f"system's, or allow nobody else to write there: `chmod go-w {odd}`."
                )
            return None
        for path in (*folder.glob("*-cache"), *folder.glob("*-atime")):  # JAX does not look at whose they are
            if not is_own(path.lstat()):
                path.unlink(missing_ok=True)
        if not given:
            _swept(folder)
        if new and not wanted and not given:
            _clear(folder.parent)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"{folder} cannot be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        if wanted:
            why = str(error).rstrip(".")
            _warn(f"{SWITCH} is {wanted!r}, but programs cannot be kept there: {why}. Name another folder, or `off`.")
        return None
    if not given:
        jax.config.update("jax_compilation_cache_max_size", LARGEST)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING)
        jax.config.update("jax_compilation_cache_dir", str(folder))
    _folder = folder
    return folder


def _warn(message: str) -> None:
    """Warn whoever named a folder that is not used; folders that nobody named are left out silently."""
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _chosen(wanted: str, given: str | None) -> Path | None:
    """Return the folder for what the user wants and JAX was given; None if that is remote."""
    if wanted:
        return Path(wanted).expanduser().absolute()
    if given and "://" in given:
        return None
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)  # as JAX would: others may read it
        return Path(given).absolute() / "opvi"
    return _user_cache() / "opvi" / "programs" / machine()


@cache
def _tidy() -> None:
    """After each program that took long to compile or to read, give back the memory that it took."""
    jax.monitoring.register_event_duration_secs_listener(_made)


def _made(event: str, duration_secs: float, **_: object) -> None:
    if event.endswith("backend_compile_duration") and duration_secs > WORTH_KEEPING:
        give_back()


def _user_cache() -> Path:
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # its specification says that others are ignored
        return given
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


def _clear(programs: Path) -> None:
    """Remove our folders of other JAX versions and processors if no program there was used for a long time."""
    for folder in programs.iterdir():
        if OURS.fullmatch(folder.name):
            with suppress(OSError):  # another process may remove it, too
                if max(path.stat().st_mtime for path in (folder, *folder.rglob("*"))) < time.time() - UNUSED:
                    shutil.rmtree(folder)
