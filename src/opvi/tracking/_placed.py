"""Arrays of a smaller model placed in those of a wider one, on the host."""

from typing import Any

import jax.numpy as jnp
import numpy as np


def placed(into: Any, where: Any, what: Any) -> Any:
    """Return an array with part of it replaced."""
    out = np.array(into)
    out[where] = np.asarray(what)
    return jnp.asarray(out)
