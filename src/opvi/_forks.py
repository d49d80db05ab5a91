"""Forked processes: JAX's threads do not come along, so the first call there raises an error instead of hanging.

All front doors ask: `run`, engines, estimators, River models, and every sampler's own `step`. What is computed with JAX
alone, keys and a bare `init` or `predict` among it, is its own affair; it warns when a process forks.
"""

import os

from jax._src import xla_bridge

_hopeless = False  # whether this process was forked from one that had used JAX


def _mark() -> None:
    global _hopeless
    began = getattr(xla_bridge, "backends_are_initialized", lambda: True)
    _hopeless = _hopeless or began()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark)


def refuse_forked() -> None:
    """Raise an error in a process that was forked after JAX was used, where any computation can wait for ever."""
    if _hopeless:
        raise RuntimeError(
            "this process was forked from one that had used JAX, whose threads a fork leaves behind, so computing here "
            "would hang. Start processes in another way: `multiprocessing.get_context('spawn')` (or 'forkserver'), "
            "`ProcessPoolExecutor(mp_context=…)`, or joblib's default, loky. Or use threads."
        )
