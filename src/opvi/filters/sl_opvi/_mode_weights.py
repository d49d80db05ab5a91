r"""Weights of particles in separate modes, between which no flow moves particles."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi.filters._covariance import exactly
from opvi.flows.kernels import centred, squared_distances
from opvi.types import Array, Key, Particles

APART = 4.0  # times the median distance to the nearest neighbour: further away, particles are not in touch
FURTHER = 1.5  # the same, times the distance to the neighbour with which a mode would be large
VALLEY = 1.0  # nats by which a log density falls between modes, at least
KEPT = 0.1  # share of the particles that a mode keeps, however little it weighs
SMALLEST = -60.0  # of a log weight, beside the largest
FEWEST = 0.5  # share of the particles: with a smaller effective number they are resampled


@exactly
def modes(z: Particles, x: Particles, value: Array, log_density: Callable[[Array], Array]) -> Array:
    """Return which particles share a mode, `[n, n]`: those connected by a chain of close neighbours.

    Groups of particles are also connected where the density does not fall between them. In one dimension the outermost
    particles of a mode are many times as far apart as the median ones, and are not modes of their own.

    Args:
        z: particles in coordinates in which a mode is roughly round.
        x: the same particles in the coordinates of the density.
        value: their log densities, `[n]`.
        log_density: the log density of one point.
    """
    n = len(z)
    z = centred(z)
    r = squared_distances(z, z)
    nearest = jnp.where(jnp.eye(n, dtype=bool), jnp.inf, r).min(1)
    same = _connected(r <= APART**2 * jnp.median(nearest), z)

    def bridged(given: tuple[Array, Array]) -> tuple[Array, Array]:
        """Connect each group with the nearest other one, unless there is a valley half-way between them."""
        same, _ = given
        away = jnp.where(same > 0, jnp.inf, r)
        other, near = away.argmin(1), away.min(1)
        lower = jnp.minimum(value, value[other])
        level = jax.vmap(log_density)((x + x[other]) / 2) >= lower - VALLEY
        level &= jnp.isfinite(lower) & jnp.isfinite(near)
        level &= near <= jnp.where(same > 0, near[None], jnp.inf).min(1)  # further away, half-way is still inside
        link = jax.nn.one_hot(other, n, dtype=bool) & level[:, None]
        return _connected((same > 0) | link | link.T, z), level.any()

    # Two groups may have one another as the nearest: each pass at least halves the number of groups.
    return jax.lax.while_loop(lambda given: given[1], bridged, (same, (same == 0).any()))[0]


def _connected(close: Array, z: Particles) -> Array:
    """Return which particles are connected, `[n, n]`, if these are close to one another."""
    n = len(z)
    linked = jnp.maximum(close.astype(z.dtype), jnp.eye(n, dtype=z.dtype))
    for _ in range(max(1, math.ceil(math.log2(n)))):  # neighbours of neighbours, and so on
        linked = jnp.minimum(linked @ linked, 1)
    return linked


@exactly
def large_modes(z: Particles) -> Array:
    """Return which particles share a mode, `[n, n]`; those in modes of few count to the nearest large one."""
    r = ((z[:, None] - z[None]) ** 2).sum(-1)  # not by products: modes may be narrow beside the distance between them
    fewest = KEPT * len(z)
    same = _connected(r <= FURTHER**2 * jnp.median(jnp.sort(r, 1)[:, max(1, int(fewest))]), z)
    large = same.sum(1) >= fewest
    nearest = jnp.where(large[None], r, jnp.inf).argmin(1)
    label = same.argmax(1)
    label = jnp.where(large, label, label[nearest])
    label = jnp.where(large.any(), label, 0)
    return (label[:, None] == label[None]).astype(z.dtype)


class Weighed(NamedTuple):
    """Particles with weights."""

    particles: Particles
    log_weights: Array  # [n]


def reweighted(log_weights: Array, gained: Array, same: Array) -> Array:
    r"""Return the particles' log weights after a change of their log density.

    $$W_m \gets W_m \operatorname{mean}_{i \in m} e^{g_i}, \qquad w_i = W_m / n_m$$

    with $W_m$ the weight of mode m and $n_m$ the number of its particles, which the flow spreads over the mode. In a
    single mode all particles have the same weight.

    Args:
        log_weights: `[n]`.
        gained: g, `[n]`.
        same: which particles share a mode, `[n, n]`.
    """
    count = same.sum(1)
    mass = same @ jnp.exp(log_weights - log_weights.max())
    new = jnp.log(mass / count) + jnp.log((same @ jnp.exp(gained - gained.max())) / count)
    new = jax.nn.log_softmax(jnp.maximum(new - new.max(), SMALLEST))
    return jnp.where(jnp.isfinite(new).all(), new, log_weights)


def resampled(key: Key, x: Particles, log_weights: Array, same: Array) -> Weighed:
    """Return particles with more even weights if their effective number has fallen.

    They are drawn by the roots of their weights, and a mode keeps at least `KEPT` of all particles if it had them: one
    of little weight can come back. Copies are moved slightly apart.
    """
    n = len(x)
    q = jax.nn.softmax(log_weights / 2)
    share, before = same @ q, same.sum(1) / n
    q = q * jnp.maximum(1, jnp.minimum(KEPT, before) / jnp.maximum(share, jnp.finfo(q.dtype).tiny))
    q = q / q.sum()
    at, near = jax.random.split(key)
    places = (jnp.arange(n, dtype=x.dtype) + jax.random.uniform(at, (), x.dtype)) / n
    which = jnp.searchsorted(jnp.cumsum(q), places).clip(0, n - 1)
    copy = jnp.concatenate([jnp.zeros(1, bool), which[1:] == which[:-1]])
    r = squared_distances(centred(x), centred(x))
    nearest = jnp.sqrt(jnp.where(jnp.eye(n, dtype=bool), jnp.inf, r).min(1) / x.shape[1])
    aside = jax.random.normal(near, x.shape, x.dtype) * nearest[which][:, None]
    moved = x[which] + jnp.where(copy[:, None], aside, 0)
    # A resampling that evens nothing out, because all modes are at their least, is left out.
    effective, after = (1 / (jnp.exp(jax.nn.log_softmax(w)) ** 2).sum() for w in (log_weights, log_weights / 2))
    due = (effective < FEWEST * n) & (after > 1.1 * effective) & ((share > KEPT) | (before < KEPT)).any()
    new = jax.nn.log_softmax((log_weights - jnp.log(q))[which])
    return Weighed(jnp.where(due, moved, x), jnp.where(due, new, log_weights))
