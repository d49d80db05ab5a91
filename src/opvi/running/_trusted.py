"""Folders and files that nobody else can have put there: programs are machine code, and whoever writes them is obeyed.

A folder is trusted if it is this user's and nobody else may write to it, and if nobody else can put another in its
place: every folder above it is this user's or the system's, and others may not write there, or only where a name
belongs to whoever made it (`/tmp`). Each is opened from the handle of the one above and never through a link, so that
what is looked at is what is used.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

HANDLES = hasattr(os, "geteuid") and os.open in os.supports_dir_fd and os.mkdir in os.supports_dir_fd
PLAIN = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0) | PLAIN  # some may be passed and not read
FILE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | PLAIN
OTHERS, GROUP = stat.S_IWOTH, stat.S_IWGRP


def made_private(folder: Path) -> Path | None:
    """Make a folder, if need be; return the first one, of those above it and itself, that others control, or None.

    Args:
        folder: its absolute name, without links.
    """
    if not HANDLES:  # Windows: a user's own folders are nobody else's
        folder.mkdir(0o700, parents=True, exist_ok=True)
        return None
    handle, at = os.open(folder.anchor, FOLDER), Path(folder.anchor)
    try:
        for name in folder.parts[1:]:
            if not _is_steady(os.fstat(handle)):
                return at
            below = _opened(name, handle)
            os.close(handle)
            handle, at = below, at / name
        return None if is_own(os.fstat(handle)) else at
    finally:
        os.close(handle)


def _opened(name: str, above: int) -> int:
    """Return the handle of a folder inside another, which is made if it is not there."""
    try:
        return os.open(name, FOLDER, dir_fd=above)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process was faster
            os.mkdir(name, 0o700, dir_fd=above)
        return os.open(name, FOLDER, dir_fd=above)


def read_private(path: Path) -> bytes | None:
    """Return the contents of a file of one's own in a folder of one's own; None if it is not there, or is not that."""
    if not HANDLES:
        return path.read_bytes() if path.is_file() else None
    with suppress(OSError):
        above = os.open(path.parent, FOLDER)
        try:
            if not is_own(os.fstat(above)):
                return None
            handle = os.open(path.name, FILE, dir_fd=above)
        finally:
            os.close(above)
        with os.fdopen(handle, "rb") as file:
            about = os.fstat(handle)
            if is_own(about) and stat.S_ISREG(about.st_mode):
                with suppress(OSError):
                    os.utime(handle)  # by which the oldest programs are found
                return file.read()
    return None


def is_own(about: os.stat_result) -> bool:
    """Return whether a file or folder is this user's, and nobody else may write to it."""
    if not HANDLES:
        return True
    return about.st_uid == os.geteuid() and not about.st_mode & (GROUP | OTHERS) and not stat.S_ISLNK(about.st_mode)


def _is_steady(about: os.stat_result) -> bool:
    """Return whether names in a folder stay what they are, whatever other users do."""
    if about.st_uid not in (0, os.geteuid()):
        return False
    open_to = about.st_mode & OTHERS or (about.st_mode & GROUP and not _is_private_group(about.st_gid))
    return not open_to or bool(about.st_mode & stat.S_ISVTX)


def _is_private_group(number: int) -> bool:
    """Return whether a group is this user's alone, as many systems make one for every user."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
