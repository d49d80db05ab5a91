r"""Draws from the posterior: particles, resampled and moved on all rows until they have forgotten where they began."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.filters._covariance import exactly
from opvi.filters.ibis._rejuvenation import Chains, Density, Frame, move_chains, rejuvenate
from opvi.targets import Target
from opvi.types import Array, Key, Particles

BETWEEN = 2  # moves between two draws of a chain


class Drawn(NamedTuple):
    """Draws, and the chains that made them."""

    places: Array  # [sweeps, n, d]
    chains: Chains
    frame: Frame


@partial(jax.jit, static_argnums=(0, 1))
@exactly
def sweep_chains(
    target: Target, sweeps: int, key: Key, x: Particles, log_weights: Array, density: Density, step: Array
) -> Drawn:
    """Return where resampled particles are after several sweeps of moves, the first one long enough to forget."""
    one, two = jax.random.split(key)
    chains, frame, density = rejuvenate(target, one, x, log_weights, density, step)

    def sweep(s: Array, given: tuple[Chains, Array]) -> tuple[Chains, Array]:
        chains, places = given
        began = frame.into(chains.x)
        moves = jnp.where(s == 0, 0, BETWEEN)

        def move(_: Array, at: Chains) -> Chains:
            return move_chains(target, two, density, frame, began, at)

        chains = jax.lax.fori_loop(0, moves, move, chains)
        return chains, places.at[s].set(chains.x)

    places = jnp.zeros((sweeps, *x.shape), x.dtype)
    chains, places = jax.lax.fori_loop(0, sweeps, sweep, (chains, places))
    return Drawn(places, chains, frame)


def sweeps_for(n: int, chains: int) -> int:
    """Return the number of sweeps that give n draws: a power of two, so that few programs serve all numbers."""
    return 1 << math.ceil(math.log2(max(1, -(-n // chains))))
