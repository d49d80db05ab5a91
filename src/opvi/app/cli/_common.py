"""What the commands share."""

import argparse
from collections.abc import Callable


class CommandError(Exception):
    """Something the user can put right; its message says how."""


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def between(low: int, high: int) -> Callable[[str], int]:
    """Whole numbers from `low` to `high`."""

    def whole(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} does not lie between {low} and {high}")
        return value

    return whole


def above_zero(text: str) -> float:
    """A finite number greater than 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number greater than 0")
    return value


def one_blas_thread() -> None:
    """BLAS threads that wait for small matrices take time from XLA's own, several times what they save."""
    import scipy.linalg  # noqa: F401  # whose BLAS JAX calls; it must be loaded to be told
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=1)


def need_rich() -> None:
    """An error with the remedy where rich is not installed."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise CommandError("this command needs rich, which is not installed: pip install 'opvi[cli]'.") from None
