r"""Draws from the posterior: particles, resampled and moved on all rows until they have forgotten where they began."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.filters._covariance import exactly
from opvi.filters.ibis._rejuvenation import Chains, Density, Limits, move_until_forgotten, resample_chains
from opvi.targets import Target
from opvi.types import Array, Key, Particles

REMEMBERED, NOISE = 0.05, 3.0  # a + b / √chains: larger correlations with where chains began are not chance
MOST_MOVES = 150  # between two draws of a chain


class Drawn(NamedTuple):
    """Draws, and the chains that made them."""

    places: Array  # [sweeps, n, d]
    accepted: Array  # share of the trajectories
    remembered: Array  # largest correlation, over parameters and sweeps, with where chains were a sweep before


@partial(jax.jit, static_argnums=(0, 1))
@exactly
def sweep_chains(
    target: Target, sweeps: int, key: Key, x: Particles, log_weights: Array, density: Density, step: Array
) -> Drawn:
    """Return where resampled particles are after several sweeps of moves, the first one long enough to forget."""
    chains, frame, density = resample_chains(target, key, x, log_weights, density, step)
    moving = jax.random.fold_in(key, 0)
    thorough = Limits(memory_limit(len(x)) / 2, memory_limit(len(x)), MOST_MOVES)

    def sweep(s: Array, given: tuple[Chains, Array, Array]) -> tuple[Chains, Array, Array]:
        chains, places, slowest = given
        chains = move_until_forgotten(target, moving, density, frame, chains, thorough)
        return chains, places.at[s].set(chains.x), jnp.maximum(slowest, chains.slowest)

    begin = chains, jnp.zeros((sweeps, *x.shape), x.dtype), jnp.zeros((), x.dtype)
    chains, places, slowest = jax.lax.fori_loop(0, sweeps, sweep, begin)
    return Drawn(places, chains.accepted, slowest)


def memory_limit(chains: int) -> float:
    """Return the correlation above which chains remember where they began; below, it may be chance."""
    return REMEMBERED + NOISE / math.sqrt(chains)


def sweeps_for(n: int, chains: int) -> int:
    """Return the number of sweeps that give n draws: a power of two, so that few programs serve all numbers."""
    return 1 << math.ceil(math.log2(max(1, -(-n // chains))))
