"""Discrete latent variables of single rows: all that they can be."""

import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from opvi.adapters import _sites
from opvi.types import Array, Data

MOST = 1024  # combinations that are summed over

Choice = tuple[str, tuple[int, ...], tuple[int, ...]]  # a site, the shape of a row's value, what each entry can be


def choices(model: _sites.Model, row: Data, names: Sequence[str]) -> tuple[Choice, ...]:
    """Return what discrete sites can be for one row; refuse those that can be too much."""
    if not names:
        return ()
    _, sites = _sites.draw(model, row, jax.random.key(0))
    found = tuple((name, jnp.shape(sites[name]["value"]), _support(sites[name])) for name in names)
    count = math.prod(len(values) ** math.prod(shape) for _, shape, values in found)
    if count > MOST:
        raise ValueError(
            f"the discrete latent sites of a row ({', '.join(names)}) can be {count:,} different things together, and "
            f"are summed over up to {MOST:,}. Sum them out in the model, e.g. a chain by its forward recursion in a "
            "`numpyro.factor` inside the data plate."
        )
    return found


def _support(site: _sites.Site) -> tuple[int, ...]:
    fn = site["fn"]
    if not fn.has_enumerate_support or fn.event_shape:
        raise TypeError(
            f"site '{site['name']}' is latent and discrete ({type(_sites.base(fn)).__name__}) with values that cannot "
            "be listed. Sum it out in the model, or observe it."
        )
    return tuple(np.asarray(fn.enumerate_support(expand=False)).ravel().tolist())


def combinations(found: tuple[Choice, ...]) -> dict[str, Array]:
    """Return every combination of values: name -> `[combinations, ...]`."""
    sizes = [math.prod(shape) for _, shape, _ in found]
    cells = [values for (_, _, values), size in zip(found, sizes, strict=True) for _ in range(size)]
    every = np.array(list(itertools.product(*cells)), np.int32)
    parts = np.split(every, np.cumsum(sizes)[:-1], axis=1)
    return {
        name: jnp.asarray(part.reshape(len(every), *shape)) for (name, shape, _), part in zip(found, parts, strict=True)
    }
