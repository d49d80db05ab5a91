r"""Moves that leave a density invariant: Hamiltonian trajectories in coordinates in which it is roughly round."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import stand_ins
from opvi.filters._covariance import exactly
from opvi.filters._straight import Straight, linear, straight
from opvi.filters.sl_opvi._surrogates import Frame
from opvi.types import Array, Key, Particles, Scalar

LEAPS = 8  # of a trajectory
STEP = 0.5  # to begin with, times d^(-1/4), in standard deviations of the particles
WANTED = 0.8  # share of trajectories that are accepted
SHORTEST = 0.1  # share of the step that a trajectory takes at least: narrow places need short ones

FITTED = 4, 12, 28  # moves before which coordinates are fitted to where chains are
MOVED, STUCK = 1e-3, 0.5  # distance, in sds, and share of chains that must have moved further: else nothing is to fit

LONG_LEAPS, LONG_SHORTEST = 64, 0.003  # the same for chains that have not forgotten where they began
LONG_MOVES = 20  # between two looks at what chains remember
MOST_LOOKS = 16  # then draws are taken, and the diagnosis reports what they remember
REMEMBERED, NOISE = 0.05, 3.0  # a + b/√chains: correlations above this are memory
SURE = 0.75  # share of all limits: below, chains have arrived though their moves were few
CHANCE = 1.5  # of a correlation, in its standard errors: what is taken off before it counts
LARGEST_OFF = 0.08  # of a mean or standard deviation, in standard deviations
TRAVELLED = 4.0  # standard errors: larger changes are not chance
LARGEST_CORRELATION = 0.95
FARTHEST = 4.0  # standard deviations: those beyond count as this far
STILL, OUTSIDE = 2.0, 3.0  # standard deviations: the range of a frozen chain at most, its distance at least
THAWING = 2**20  # folded into keys: more than all moves
FEW = 0.03  # share of the chains: if more have hardly moved, moves are slow, and those far outside may belong there


class Arrival(NamedTuple):
    """What says that chains have arrived where they should be, or not."""

    remembered: Scalar  # largest correlation between where chains began and where they are
    off: Scalar  # what that leaves of the largest difference of a mean or standard deviation to where they began
    travelled: Scalar  # largest change of a mean or spread since half-way, in its standard errors


class Moved(NamedTuple):
    """The positions of particles after each of several moves."""

    places: Array  # [moves, n, d]
    accepted: Scalar  # share of the trajectories
    arrival: Arrival  # when the first place was taken
    looks: Array  # the number of times that `LONG_MOVES` long trajectories were added


class _Chains(NamedTuple):
    u: Array  # [n, d], in the coordinates of a map
    step: Scalar


class _Progress(NamedTuple):
    chains: _Chains
    map: Straight  # from the chains' coordinates to parameters
    again: Array  # whether to fit it to where chains are now
    middle: Array  # [n, d]: where chains were about half as many moves ago
    lowest: Array  # [n, d]: of all places so far
    highest: Array
    moves: Array  # made so far
    due: Array  # moves after which to look at what chains remember
    looks: Array  # long ones
    arrival: Arrival
    accepted: Scalar  # summed over the places taken
    taken: Array
    places: Array


def _move(
    key: Key, value_and_grad: Callable[[Array], tuple[Array, Array]], at: _Chains, long: Array
) -> tuple[_Chains, Scalar]:
    """Move every chain along one trajectory, a long one or not; also return the mean chance of acceptance."""
    n, kind = len(at.u), at.u.dtype
    one, two, three = jax.random.split(key, 3)
    p = jax.random.normal(one, at.u.shape, kind)
    shortest = jnp.where(long, LONG_SHORTEST, SHORTEST).astype(kind)
    length = at.step * shortest ** jax.random.uniform(two, (n, 1), kind)

    def leap(i: int, place: tuple[Array, ...]) -> tuple[Array, ...]:
        v, q, value, g, first = place
        size = jnp.where(i == 0, 0, length)  # the first time, to see where chains are
        q = q + size / 2 * g
        v = v + size * q
        value, g = value_and_grad(v)
        return v, q + size / 2 * g, value, g, jnp.where(i == 0, value, first)

    leaps = jnp.where(long, LONG_LEAPS, LEAPS)
    nothing = jnp.zeros(n, kind)
    v, q, value, g, first = jax.lax.fori_loop(0, leaps + 1, leap, (at.u, p, nothing, jnp.zeros_like(p), nothing))
    gain = value - first + ((p**2).sum(1) - (q**2).sum(1)) / 2
    chance = jnp.where(jnp.isfinite(gain) & jnp.isfinite(g).all(1), jnp.exp(jnp.minimum(gain, 0)), 0)
    yes = jax.random.uniform(three, (n,), kind) < chance
    step = at.step * jnp.exp(0.5 * (chance.mean() - WANTED))
    return _Chains(jnp.where(yes[:, None], v, at.u), step), chance.mean()


def _thawed(key: Key, same: Array, count: Array, of_chains: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return all that is known of chains, with others in place of those that are frozen."""
    _, _, now, _, lowest, highest = of_chains
    good = ~frozen_chains(now, highest - lowest, same)
    which = stand_ins(jax.random.fold_in(jax.random.fold_in(key, THAWING), count), good)
    return tuple(a[which] for a in of_chains)


def moved(
    key: Key,
    log_density: Callable[[Array], Array],
    x: Particles,
    own: Frame,
    first: int,
    moves: int,
    same: Array,
    early: int = 0,
) -> Moved:
    r"""Move every particle along Hamiltonian trajectories, each accepted with probability $\min(1, e^{-\Delta H})$.

    Particles distributed as the density stay so; others approach it, as far as trajectories reach.
    Steps are randomised, $\epsilon u$ with u log-uniform, and $\epsilon$ follows the share accepted.
    Chains that have not forgotten where they began get longer trajectories, of steps that vary more, for a while.
    Coordinates are fitted to where chains are, several times before the first place is taken and not after it.

    Args:
        key: the key for momenta, steps and acceptance.
        log_density: the log density of one point; particles never go where it is not finite.
        x: where to begin.
        own: coordinates in which the density is roughly round, to begin with.
        first: the number of moves before those that are returned, at least.
        moves: the number of moves that are returned.
        same: weights `[n, n]` with which the chains of a mode are averaged, row by row.
        early: a smaller number of moves that is enough for chains that have clearly arrived by then; 0 for none.
    """
    n, start = len(x), own.into(x)

    def refitted(given: tuple[Straight, _Chains]) -> tuple[Straight, _Chains]:
        """Return a map fitted to where chains are, and the same places by its coordinates."""
        to, chains = given
        now = jax.vmap(to.out)(chains.u)[0]
        new = straight(log_density, now)
        u = jax.vmap(new.into)(now)
        yes = (jnp.abs(own.into(now) - start).max(1) > MOVED).mean() > STUCK
        yes &= jnp.isfinite(u).all() & jnp.isfinite(jax.vmap(new.out)(u)[0]).all()
        return jax.tree.map(lambda a, b: jnp.where(yes, a, b), (new, chains._replace(u=u)), given)

    def body(at: _Progress) -> _Progress:
        fit = (at.moves[None] == jnp.array(FITTED, jnp.int32)).any() & (at.taken == 0) | at.again
        to, chains = jax.lax.cond(fit, refitted, lambda given: given, (at.map, at.chains))
        ready = at.moves >= at.due
        chains, chance = _move(jax.random.fold_in(key, at.moves), _seen(log_density, to), chains, at.looks > 0)
        x = jax.vmap(to.out)(chains.u)[0]
        now, made = own.into(x), at.moves + 1
        look = made == at.due
        lowest, highest = jnp.minimum(at.lowest, now), jnp.maximum(at.highest, now)
        of_chains, thaw = (chains.u, x, now, at.middle, lowest, highest), partial(_thawed, key, same, at.moves)
        u, x, now, middle, lowest, highest = jax.lax.cond(look & (made >= first), thaw, lambda given: given, of_chains)
        chains = chains._replace(u=u)
        arrival = jax.lax.cond(look, lambda u: arrived(start, middle, u, same), lambda _: at.arrival, now)
        soon = look & (made < first)
        wait = soon & _unsettled(arrival, n, SURE)
        more = look & ~soon & _unsettled(arrival, n) & (at.looks < MOST_LOOKS)
        half = (made == first // 2) | (made == early // 2)
        half |= look & (at.looks & (at.looks - 1) == 0)  # look 0, 1, 2, 4, …
        # What is written before chains are ready is written over by the first place that counts.
        places = jax.lax.dynamic_update_index_in_dim(at.places, x, at.taken, 0)
        return _Progress(
            chains,
            to,
            more,
            jnp.where(half, now, middle),
            lowest,
            highest,
            made,
            jnp.where(wait, first, jnp.where(more, at.due + LONG_MOVES, at.due)),
            at.looks + more.astype(jnp.int32),
            arrival,
            at.accepted + jnp.where(ready, chance, 0),
            at.taken + ready.astype(jnp.int32),
            places,
        )

    begin = _at_first(start, own, early or first, moves)
    end = jax.lax.while_loop(lambda at: at.taken < moves, body, begin)
    return Moved(end.places, end.accepted / moves, end.arrival, end.looks)


def _at_first(start: Array, own: Frame, due: int, moves: int) -> _Progress:
    """Return chains that have not moved yet."""
    (n, d), kind = start.shape, start.dtype
    zero, none = jnp.zeros((), kind), jnp.zeros((), jnp.int32)
    chains = _Chains(start, jnp.asarray(STEP * d**-0.25, kind))
    to, arrival = linear(own.centre, own.root, own.inverse), Arrival(zero, zero, zero)
    places = jnp.zeros((moves, n, d), kind)
    return _Progress(chains, to, zero > 0, start, start, start, none, none + due, none, arrival, zero, none, places)


def _seen(log_density: Callable[[Array], Array], to: Straight) -> Callable[[Array], tuple[Array, Array]]:
    """Return the log density of points `[n, d]` in a map's coordinates, and its gradients."""

    def value(u: Array) -> Array:
        x, volume = to.out(u)
        return log_density(x) + volume

    return jax.vmap(jax.value_and_grad(value))


def frozen_chains(now: Array, spans: Array, same: Array) -> Array:
    """Return which chains, a few far outside, have hardly moved at all: they began where no trajectory leads away from.

    A particle of a wide prior may be left in a place that is narrow and holds no mass, as far out as 7 standard
    deviations. Of 400 chains, the four that begin there would add a third to a variance.

    Args:
        now: where chains are, `[n, d]`.
        spans: the distance between the outermost places that each has been at, `[n, d]`.
        same: weights `[n, n]` with which the chains of a mode are averaged.
    """
    off = now - same @ now
    sd = jnp.sqrt(same @ off**2) + jnp.finfo(now.dtype).tiny ** 0.5
    still, outside = (spans / sd).max(1) < STILL, (jnp.abs(off) / sd).max(1) > OUTSIDE
    return still & outside & (still.mean() <= FEW)


def remembered_limit(chains: int) -> float:
    """Return the correlation above which chains remember where they began; below, it may be chance."""
    return REMEMBERED + NOISE / math.sqrt(chains)


def _unsettled(arrival: Arrival, chains: int, share: float = 1.0) -> Array:
    limits = remembered_limit(chains), LARGEST_OFF, TRAVELLED
    return jnp.stack([value > share * limit for value, limit in zip(arrival, limits, strict=True)]).any()


def arrived(start: Array, middle: Array, now: Array, same: Array) -> Arrival:
    r"""Return whether chains have arrived, judged by means over chains of coordinates u and of their squares.

    With correlation $\rho$ between the start and now, $\rho / (1 - \rho)$ of the change since the start is still to
    come, if errors fall as correlations do. Chains that began too close together have nothing to remember, but may
    still be on their way: hence the change since half-way.

    Args:
        start: where chains began, `[n, d]`.
        middle: where they were half-way.
        now: where they are.
        same: weights `[n, n]` with which the chains of a mode are averaged.
    """
    n, d = now.shape
    mean, sd = now.mean(0, keepdims=True), now.std(0, keepdims=True) + jnp.finfo(now.dtype).tiny ** 0.5
    began, were, are = (_features((u - mean) / sd) for u in (start, middle, now))
    rho = correlations(start, now, same)
    left = jnp.maximum(rho - CHANCE / math.sqrt(n), 0)
    left = left / (1 - jnp.minimum(left, LARGEST_CORRELATION))
    scale = jnp.repeat(jnp.array([1, 0.5], now.dtype), d)  # half the change of a variance is that of the sd
    change = are - were
    error = jnp.maximum(change.std(0) / math.sqrt(n), jnp.finfo(now.dtype).tiny ** 0.5)
    return Arrival(
        rho.max(),
        (left * scale * jnp.abs((are - began).mean(0))).max(),
        (jnp.abs(change.mean(0)) / error).max(),
    )


@exactly
def correlations(then: Array, now: Array, same: Array) -> Array:
    """Return correlations of coordinates and of squares over chains, `[2d]`; within modes, as chains may stay there."""

    def standard(u: Array) -> Array:
        u = u - same @ u
        return u / jnp.maximum(jnp.sqrt((u**2).mean(0, keepdims=True)), jnp.finfo(u.dtype).tiny ** 0.5)

    one, two = (standard(_features(standard(u))) for u in (then, now))
    return (one * two).mean(0)


def _features(u: Array) -> Array:
    """Return standardised coordinates and their squares, `[n, 2d]`; those far out count as nearer."""
    u = u.clip(-FARTHEST, FARTHEST)
    return jnp.concatenate([u, u**2], 1)
