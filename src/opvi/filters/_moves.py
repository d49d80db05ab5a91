r"""Moves that leave a density invariant: Hamiltonian trajectories in the particles' own coordinates."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.filters._surrogates import Frame
from opvi.types import Array, Key, Particles, Scalar

LEAPS = 8  # of a trajectory
STEP = 0.5  # to begin with, times d^(-1/4), in standard deviations of the particles
WANTED = 0.8  # share of trajectories that are accepted
SHORTEST = 0.1  # share of the step that a trajectory takes at least: narrow places need short ones


class Moved(NamedTuple):
    """The positions of particles after each of several moves."""

    places: Array  # [moves, n, d]
    accepted: Scalar  # share of the trajectories


class _Chains(NamedTuple):
    u: Array  # [n, d], in the frame
    value: Array  # [n]: log density
    slope: Array  # [n, d]
    step: Scalar


def moved(key: Key, log_density: Callable[[Array], Array], x: Particles, own: Frame, first: int, moves: int) -> Moved:
    r"""Move every particle along Hamiltonian trajectories, each accepted with probability $\min(1, e^{-\Delta H})$.

    Particles distributed as the density stay so; others approach it, as far as trajectories reach.
    Steps are randomised, $\epsilon u$ with u log-uniform, and $\epsilon$ follows the share accepted.

    Args:
        key: the key for momenta, steps and acceptance.
        log_density: the log density of one point; particles never go where it is not finite.
        x: where to begin.
        own: coordinates in which the density is roughly round.
        first: the number of moves before those that are returned.
        moves: the number of moves that are returned.
    """
    n, d = x.shape
    value_and_grad = jax.vmap(jax.value_and_grad(lambda u: log_density(own.centre + own.root @ u)))

    def move(at: _Chains, i: Array) -> tuple[_Chains, tuple[Array, Scalar]]:
        one, two, three = jax.random.split(jax.random.fold_in(key, i), 3)
        p = jax.random.normal(one, at.u.shape, x.dtype)
        length = at.step * SHORTEST ** jax.random.uniform(two, (n, 1), x.dtype)

        def leap(_: int, place: tuple[Array, ...]) -> tuple[Array, ...]:
            v, q, _value, g = place
            q = q + length / 2 * g
            v = v + length * q
            value, g = value_and_grad(v)
            return v, q + length / 2 * g, value, g

        v, q, value, g = jax.lax.fori_loop(0, LEAPS, leap, (at.u, p, at.value, at.slope))
        gain = value - at.value + ((p**2).sum(1) - (q**2).sum(1)) / 2
        chance = jnp.where(jnp.isfinite(gain) & jnp.isfinite(g).all(1), jnp.exp(jnp.minimum(gain, 0)), 0)
        yes = jax.random.uniform(three, (n,), x.dtype) < chance
        u, slope = (jnp.where(yes[:, None], new, old) for new, old in ((v, at.u), (g, at.slope)))
        step = at.step * jnp.exp(0.5 * (chance.mean() - WANTED))
        return _Chains(u, jnp.where(yes, value, at.value), slope, step), (u, chance.mean())

    u = own.into(x)
    begin = _Chains(u, *value_and_grad(u), jnp.asarray(STEP * d**-0.25, x.dtype))
    _, (places, accepted) = jax.lax.scan(move, begin, jnp.arange(first + moves))
    return Moved(jax.vmap(own.out)(places[first:]), accepted[first:].mean())
