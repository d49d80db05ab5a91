r"""Moves that leave a density invariant: Hamiltonian trajectories in the particles' own coordinates."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.filters._covariance import exactly
from opvi.filters._surrogates import Frame
from opvi.types import Array, Key, Particles, Scalar

LEAPS = 8  # of a trajectory
STEP = 0.5  # to begin with, times d^(-1/4), in standard deviations of the particles
WANTED = 0.8  # share of trajectories that are accepted
SHORTEST = 0.1  # share of the step that a trajectory takes at least: narrow places need short ones

LONG_LEAPS, LONG_SHORTEST = 64, 0.003  # the same for chains that have not forgotten where they began
LONG_MOVES = 20  # between two looks at what chains remember
MOST_LOOKS = 8  # then draws are taken, and the diagnosis reports what they remember
REMEMBERED, NOISE = 0.1, 3.0  # a + b/√chains: correlations above this are memory
TRAVELLED = 4.0  # standard errors: larger changes are not chance
FARTHEST = 4.0  # standard deviations: those beyond count as this far


class Moved(NamedTuple):
    """The positions of particles after each of several moves."""

    places: Array  # [moves, n, d]
    accepted: Scalar  # share of the trajectories
    remembered: Scalar  # largest correlation between where chains began and where the places begin
    travelled: Scalar  # largest change of a mean or spread since half-way, in its standard errors
    looks: Array  # the number of times that `LONG_MOVES` long trajectories were added


class _Chains(NamedTuple):
    u: Array  # [n, d], in the frame
    value: Array  # [n]: log density
    slope: Array  # [n, d]
    step: Scalar


class _Progress(NamedTuple):
    chains: _Chains
    middle: Array  # [n, d]: where chains were about half as many moves ago
    moves: Array  # made so far
    due: Array  # moves after which to look at what chains remember
    looks: Array  # long ones
    remembered: Scalar
    travelled: Scalar
    accepted: Scalar  # summed over the places taken
    taken: Array
    places: Array


def moved(
    key: Key,
    log_density: Callable[[Array], Array],
    x: Particles,
    own: Frame,
    first: int,
    moves: int,
    same: Array,
) -> Moved:
    r"""Move every particle along Hamiltonian trajectories, each accepted with probability $\min(1, e^{-\Delta H})$.

    Particles distributed as the density stay so; others approach it, as far as trajectories reach.
    Steps are randomised, $\epsilon u$ with u log-uniform, and $\epsilon$ follows the share accepted.
    Chains that have not forgotten where they began get longer trajectories, of steps that vary more, for a while.

    Args:
        key: the key for momenta, steps and acceptance.
        log_density: the log density of one point; particles never go where it is not finite.
        x: where to begin.
        own: coordinates in which the density is roughly round.
        first: the number of moves before those that are returned, at least.
        moves: the number of moves that are returned.
        same: weights `[n, n]` with which the chains of a mode are averaged, row by row.
    """
    n, d = x.shape
    value_and_grad = jax.vmap(jax.value_and_grad(lambda u: log_density(own.centre + own.root @ u)))

    def move(at: _Chains, i: Array, long: Array) -> tuple[_Chains, Scalar]:
        one, two, three = jax.random.split(jax.random.fold_in(key, i), 3)
        p = jax.random.normal(one, at.u.shape, x.dtype)
        shortest = jnp.where(long, LONG_SHORTEST, SHORTEST).astype(x.dtype)
        length = at.step * shortest ** jax.random.uniform(two, (n, 1), x.dtype)

        def leap(_: int, place: tuple[Array, ...]) -> tuple[Array, ...]:
            v, q, _value, g = place
            q = q + length / 2 * g
            v = v + length * q
            value, g = value_and_grad(v)
            return v, q + length / 2 * g, value, g

        leaps = jnp.where(long, LONG_LEAPS, LEAPS)
        v, q, value, g = jax.lax.fori_loop(0, leaps, leap, (at.u, p, at.value, at.slope))
        gain = value - at.value + ((p**2).sum(1) - (q**2).sum(1)) / 2
        chance = jnp.where(jnp.isfinite(gain) & jnp.isfinite(g).all(1), jnp.exp(jnp.minimum(gain, 0)), 0)
        yes = jax.random.uniform(three, (n,), x.dtype) < chance
        u, slope = (jnp.where(yes[:, None], new, old) for new, old in ((v, at.u), (g, at.slope)))
        step = at.step * jnp.exp(0.5 * (chance.mean() - WANTED))
        return _Chains(u, jnp.where(yes, value, at.value), slope, step), chance.mean()

    start = own.into(x)

    def body(at: _Progress) -> _Progress:
        ready = at.moves >= at.due
        chains, chance = move(at.chains, at.moves, at.looks > 0)
        made = at.moves + 1
        look = made == at.due
        remembered, travelled = jax.lax.cond(
            look,
            lambda u: (memory(start, u, same), travel(at.middle, u)),
            lambda _: (at.remembered, at.travelled),
            chains.u,
        )
        unsettled = (remembered > remembered_limit(n)) | (travelled > TRAVELLED)
        more = look & unsettled & (at.looks < MOST_LOOKS)
        half = (made == first // 2) | look & (at.looks & (at.looks - 1) == 0)  # look 0, 1, 2, 4, …
        # What is written before chains are ready is written over by the first place that counts.
        places = jax.lax.dynamic_update_index_in_dim(at.places, chains.u, at.taken, 0)
        return _Progress(
            chains,
            jnp.where(half, chains.u, at.middle),
            made,
            jnp.where(more, at.due + LONG_MOVES, at.due),
            at.looks + more.astype(jnp.int32),
            remembered,
            travelled,
            at.accepted + jnp.where(ready, chance, 0),
            at.taken + ready.astype(jnp.int32),
            places,
        )

    zero, none = jnp.zeros((), x.dtype), jnp.zeros((), jnp.int32)
    chains = _Chains(start, *value_and_grad(start), jnp.asarray(STEP * d**-0.25, x.dtype))
    begin = _Progress(
        chains, start, none, none + first, none, zero, zero, zero, none, jnp.zeros((moves, n, d), x.dtype)
    )
    end = jax.lax.while_loop(lambda at: at.taken < moves, body, begin)
    return Moved(jax.vmap(own.out)(end.places), end.accepted / moves, end.remembered, end.travelled, end.looks)


def remembered_limit(chains: int) -> float:
    """Return the correlation above which chains remember where they began; below, it may be chance."""
    return REMEMBERED + NOISE / math.sqrt(chains)


@exactly
def memory(then: Array, now: Array, same: Array) -> Scalar:
    """Return the largest correlation, over chains, between where they were and where they are.

    Correlations of coordinates and of their squares, within modes: chains need not leave the mode they began in.
    """

    def features(u: Array) -> Array:
        u = _standard(u - same @ u)
        u = jnp.concatenate([u, u**2], 1)
        return _standard(u - same @ u)

    return (features(then) * features(now)).mean(0).max()


def travel(then: Array, now: Array) -> Scalar:
    """Return the largest change, over coordinates and their squares, of the mean over chains, in standard errors.

    Chains that began too close together have nothing to remember, but may still be on their way.
    """
    mean, sd = now.mean(0, keepdims=True), now.std(0, keepdims=True) + jnp.finfo(now.dtype).tiny

    def features(u: Array) -> Array:
        u = ((u - mean) / sd).clip(-FARTHEST, FARTHEST)
        return jnp.concatenate([u, u**2], 1)

    change = features(now) - features(then)
    error = change.std(0) / math.sqrt(len(now))
    return (jnp.abs(change.mean(0)) / jnp.maximum(error, jnp.finfo(now.dtype).tiny ** 0.5)).max()


def _standard(u: Array) -> Array:
    """Return coordinates with mean 0 divided by their standard deviations; those far out are moved in."""
    sd = jnp.sqrt((u**2).mean(0, keepdims=True))
    return (u / jnp.maximum(sd, jnp.finfo(u.dtype).tiny ** 0.5)).clip(-FARTHEST, FARTHEST)
