"""What the commands share."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # where a command adds its own


DOUBLED = re.compile(r"(?<=[^./\s])\.\.(?=\s|$)")  # a full stop, and not `…/..` or `...`


def one_stop(message: str) -> str:
    """Return a message without doubled full stops: what a library said ends with one, or does not."""
    return DOUBLED.sub(".", message)


class CommandError(Exception):
    """An error that the user can fix; its message says how."""

    def __init__(self, message: str):
        super().__init__(one_stop(message))


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def between(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high`."""

    def whole(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} does not lie between {low} and {high}")
        return value

    return whole


def address(text: str) -> str:
    """Return a web address."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address such as https://host/path")
    return text


def above_zero(text: str) -> float:
    """Return a finite number greater than 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number greater than 0")
    return value


def add_save_every(command: argparse.ArgumentParser) -> None:
    """Add the option for the time between checkpoints."""
    command.add_argument(
        "--save-every",
        type=above_zero,
        default=30.0,
        metavar="SECONDS",
        help="seconds between checkpoints (default: 30)",
    )


def prepare(learns: bool = True) -> None:
    """Raise an error with the remedy if a library of the extra `cli` is missing; restrict BLAS to one thread.

    More threads would wait for small matrices and take time from XLA's own. Without learning, nothing calls SciPy's.
    """
    absent = [name for name in ("rich", "pyarrow", "jinja2") if find_spec(name) is None]
    if absent:
        raise CommandError(f"this command needs {absent[0]}, which is not installed: pip install 'opvi[cli]'.")
    if learns:
        import scipy.linalg  # noqa: F401  # whose BLAS JAX calls; it must be loaded to be told
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=1)


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Turn errors that the user can fix into a `CommandError`, which shows no traceback."""
    from opvi.adapters._tables import TableError
    from opvi.app.learn import RunError
    from opvi.running import CheckpointError, LockedError

    try:
        yield
    except (RunError, TableError, CheckpointError, LockedError) as error:
        raise CommandError(str(error)) from None
    except BrokenPipeError:  # whoever read the output has enough
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115  # or Python complains when it flushes at the end
    except OSError as error:
        where = error.filename or folder
        raise CommandError(
            f"{where}: {error.strerror or error}. Choose another place or fix its permissions."
        ) from None
