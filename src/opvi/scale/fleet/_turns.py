"""Methods that threads run in turn."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """Return the method, run by one thread at a time: whoever has the object's `_lock`."""

    @wraps(method)
    def locked(self: Any, *given: Any, **named: Any) -> Any:
        with self._lock:
            return method(self, *given, **named)

    return cast(Method, locked)
