"""Stored rows, and what draws say of them, block by block."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._steps import posterior_draws, target_of
from opvi.targets import Target, cast
from opvi.types import Array, Batch, Data, Particles, Sampler, Seed, State, as_key

BLOCK = 512  # rows at once


class RowsAtDraws(NamedTuple):
    """Some stored rows at draws from the posterior."""

    data: Data
    weight: np.ndarray  # [rows]
    log_likelihood: np.ndarray  # [n, rows]


class Stored(NamedTuple):
    """A model, draws from its posterior, and the rows that its sampler stores."""

    target: Target
    draws: Particles  # [n, d]
    data: Data  # leaves [rows, ...]
    weight: np.ndarray  # [rows]: all above 0

    def blocks(self) -> Iterator[RowsAtDraws]:
        """Yield the rows with their log likelihoods; all blocks have one shape, and so one program."""
        rows = len(self.weight)
        size = min(BLOCK, rows)
        for start in range(0, rows, size):
            places = np.minimum(np.arange(start, start + size), rows - 1)
            data = jax.tree.map(lambda leaf, at=places: leaf[at], self.data)
            found = np.asarray(log_likelihoods(self.target, self.draws, data), float)
            here = min(size, rows - start)
            data = jax.tree.map(lambda leaf, here=here: leaf[:here], data)
            yield RowsAtDraws(data, self.weight[start : start + here], found[:, :here])


def stored(sampler: Sampler, state: State, key: Seed, n: int) -> Stored:
    """Return what a sampler has stored of its rows, and draws from its posterior."""
    target, rows_of = target_of(sampler), getattr(sampler, "stored_rows", None)
    if target is None:
        raise TypeError(f"a {type(sampler).__name__} has no single target, so rows have no likelihood to look at.")
    if rows_of is None:
        raise TypeError(
            f"a {type(sampler).__name__} stores no rows, so none can be left out. `opvi.tracker(target)` stores them; "
            "for scores of rows before they were learnt use `opvi.compare_models`."
        )
    data, weight = rows_of(state)
    weight = np.asarray(weight, float) if len(jax.tree.leaves(weight)) else np.zeros(0)
    places = np.flatnonzero(weight > 0)
    if not len(places):
        raise ValueError("no row is stored: the sampler has learnt none yet.")
    draws = posterior_draws(sampler, state, as_key(key), n)
    data = jax.tree.map(lambda leaf: np.asarray(leaf)[places], data)
    return Stored(target, draws, cast(Batch(data, jnp.ones(len(places))), draws.dtype).data, weight[places])


@partial(jax.jit, static_argnums=0)
def log_likelihoods(target: Target, draws: Particles, data: Data) -> Array:
    """Return the log likelihood of each row at each draw, `[n, rows]`."""
    return jax.vmap(lambda v: target.log_likelihood(target.unravel(v), data))(draws)
