"""One learner at a time: a model that two threads teach at once loses what one of them taught."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from opvi._forks import refuse_forked

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")
MARK = "_learner"  # the attribute that says who learns; never saved


@contextmanager
def sole_learner(model: Any) -> Iterator[None]:
    """Within this block one thread teaches a model; another one that tries gets an error. Readers are not affected."""
    refuse_forked()
    mine = (threading.get_ident(), object())
    owner = model.__dict__.setdefault(MARK, mine)  # one step of the interpreter: no thread comes in between
    if owner[0] != mine[0]:
        raise RuntimeError(
            f"this {type(model).__name__} is learning in another thread, and one model learns in one thread at a time. "
            "Wait for it, take a lock, or give each thread a model of its own; predicting meanwhile is fine."
        )
    try:
        yield
    finally:
        if owner is mine:  # not of a call within the call
            del model.__dict__[MARK]


def one_learner(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
    """Return a method that only one thread at a time may run, because it teaches a model."""

    @wraps(method)
    def alone(self: M, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with sole_learner(self):
            return method(self, *args, **kwargs)

    return alone


def without_mark(held: dict[str, Any]) -> dict[str, Any]:
    """Return attributes to save or copy."""
    return {name: value for name, value in held.items() if name != MARK}
