"""Forked processes: JAX's threads are not inherited, so the first call there raises an error instead of hanging.

All front doors ask: `run`, engines, estimators, River models, keyed models, `opvi.predict`, and every sampler's own
`init`, `step`, `predict` and `draws`. What is computed with JAX alone is its own affair; it warns when a process forks.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from jax._src import xla_bridge

from opvi.types import as_key

_hopeless = False  # whether this process was forked from one that had used JAX


def _mark() -> None:
    global _hopeless
    began = getattr(xla_bridge, "backends_are_initialized", lambda: True)
    _hopeless = _hopeless or began()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark)


def refuse_forked() -> None:
    """Raise an error in a process that was forked after JAX was used, where any computation can hang forever."""
    if _hopeless:
        raise RuntimeError(
            "this process was forked from one that had used JAX, whose threads a fork leaves behind, so computing here "
            "would hang. Start processes in another way: `multiprocessing.get_context('spawn')` (or 'forkserver'), "
            "`ProcessPoolExecutor(mp_context=…)`, or joblib's default, loky. Or use threads."
        )


KEY_AT = {"init": 1, "step": 1, "draws": 2}  # which argument is the key, counted with `self`


class Unforked:
    """A sampler whose methods, including those of subclasses, raise that error, and take an integer for a key."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for name in ("init", "step", "predict", "draws"):
            if name in vars(cls):
                setattr(cls, name, _asking(vars(cls)[name], KEY_AT.get(name)))


def _asking(method: Callable[..., Any], key_at: int | None) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        refuse_forked()
        if key_at is not None:
            if len(arguments) > key_at and isinstance(arguments[key_at], int | np.integer):
                arguments = (*arguments[:key_at], as_key(arguments[key_at]), *arguments[key_at + 1 :])
            elif isinstance(named.get("key"), int | np.integer):
                named["key"] = as_key(named["key"])
        return method(*arguments, **named)

    return call
