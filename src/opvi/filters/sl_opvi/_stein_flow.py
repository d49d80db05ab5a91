r"""Follows a moving density with particles: a Stein flow in whitened coordinates, in small changes."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._factors import eigenvectors, solve
from opvi.filters.sl_opvi._mode_weights import modes, resampled, reweighted
from opvi.flows.kernels import centred, squared_distances
from opvi.types import Array, Key, Particles, Scalar, Scores

SAMPLE = 64  # particles whose Hessians are averaged, fewer in many dimensions
FLAT = 1e-6  # eigenvalues below this share of the largest count as this share
BANDWIDTH = 0.2  # times d²: narrow enough to spread particles evenly in a plane, wide enough to see others in 10
LINEAR = 0.25  # weight of the linear kernel
LARGEST_SCORE = 5.0  # root mean square of a whitened score; a typical one has 1
CHANGE = 0.8  # of log weights, in standard deviations, between two neighbouring densities
RESAMPLING = 2**21
IMPOSSIBLE = 2**20  # folded into keys: more than the looks of any round
HOPELESS = (20.0, 5.0)  # a + b·√d: log densities so far below the median's hold no mass


class Whitening(NamedTuple):
    """Coordinates $z = x W$ in which a mode of the target is roughly round, and the inverse $x = z W^{-1}$."""

    into: Array  # [d, d]
    back: Array  # [d, d]


def some(x: Particles) -> Particles:
    """Return a few particles, evenly spaced, for expensive computations; fewer in many dimensions."""
    n, d = x.shape
    wanted = max(4, min(SAMPLE, 2000 // d))
    return x[:: -(-n // wanted)]


def whitening(log_density: Callable[[Array], Array], x: Particles) -> Whitening:
    r"""Whiten by the mean curvature $A = |\mathrm{mean}_i\, {-\nabla^2} \log p(x_i)|$, made positive.

    The mean over particles approximates Fisher's $\mathrm E\,[s s^\top]$: the width of a mode, however many modes
    there are, where the particles' covariance would see the distance between modes. A particle counts at
    most as much as the median one, so that a few at the bottom of a funnel do not freeze the rest.
    """
    H = -jax.vmap(jax.hessian(log_density))(some(x))
    sound = jnp.isfinite(H).all((1, 2))
    H = jnp.where(sound[:, None, None], H, 0)
    spread = jnp.std(x, 0)
    stiffness = jnp.abs(H * spread[None, :, None] * spread[None, None, :]).sum((1, 2))
    share = jnp.minimum(1, jnp.median(stiffness) / jnp.maximum(stiffness, jnp.finfo(x.dtype).tiny))
    A = (H * share[:, None, None]).sum(0) / jnp.maximum(sound.sum(dtype=x.dtype), 1)
    values, V = eigenvectors((A + A.T) / 2)
    values = jnp.abs(values)
    root = jnp.sqrt(jnp.maximum(values, FLAT * values.max()))
    return Whitening(V * root[None, :], V.T / root[:, None])


def stein_field(z: Particles, s: Scores) -> Array:
    r"""Row-normalised SVGD by a Gaussian kernel, and SVGD by the linear kernel $1 + z^\top C^{-1} z'$.

    $$v_i = \frac{\sum_j K_{ij} (s_j + (z_i - z_j)/h)}{\sum_j K_{ij}}
      + c \big[\bar s + \big(I + \tfrac1n \textstyle\sum_j s_j \tilde z_j^\top\big) C^{-1} \tilde z_i\big]$$

    The first part gives the shape, the second corrects mean and covariance quickly. Fewer particles than
    dimensions span only n - 1 directions: repulsion is then d/(n - 1) times as strong, for the right variances.
    """
    n, d = z.shape
    z = centred(z)
    h = BANDWIDTH * d**2
    repulsion = max(1.0, d / (n - 1))
    K = jnp.exp(-squared_distances(z, z) / (2 * h))
    K = K / K.sum(1, keepdims=True)
    shape = K @ s + repulsion / h * (z - K @ z)
    identity = jnp.eye(d, dtype=z.dtype)
    C = z.T @ z / n
    C = C + (1e-3 * jnp.trace(C) / d + jnp.finfo(z.dtype).tiny) * identity
    balance = solve(C, repulsion * identity + z.T @ s / n)
    return shape + LINEAR * (s.mean(0, keepdims=True) + z @ balance)


def move(gradient: Callable[[Particles], Scores], W: Whitening, x: Particles, step: float) -> tuple[Particles, Array]:
    """Return the particles after one bounded step along the Stein field, and the field."""
    d = x.shape[1]
    s, bend = jax.linearize(gradient, x)
    s = only_finite(s) @ W.back.T  # where there is no gradient, the others alone move a particle
    size = jnp.sqrt((s**2).mean(1, keepdims=True))
    v = stein_field(x @ W.into, s * jnp.minimum(1, LARGEST_SCORE / jnp.maximum(size, 1)))
    length = (v**2).sum(1, keepdims=True)
    bent = jnp.abs((only_finite(bend(v @ W.back)) @ W.back.T * v).sum(1, keepdims=True))
    curvature = bent / jnp.maximum(length, jnp.finfo(x.dtype).tiny)
    slower = jnp.maximum(jnp.maximum(step * jnp.sqrt(length / d), curvature), 1)
    return x + step * (v / slower) @ W.back, v


def only_finite(rows: Array) -> Array:
    """Return rows `[n, d]`, with 0 for those that are not finite."""
    return jnp.where(jnp.isfinite(rows).all(1, keepdims=True), rows, 0)


def relocate(key: Key, x: Particles, value: Array) -> Particles:
    """Move particles with an impossible or undefined log density next to others."""
    n, d = x.shape
    known = jnp.isfinite(value)
    middle = jnp.nanmedian(jnp.where(known, value, jnp.nan))
    alive = known & (value > middle - (HOPELESS[0] + HOPELESS[1] * math.sqrt(d)))
    alive = alive | ~alive.any()
    living_first = jnp.argsort(~alive, stable=True)
    a, b, c = x[living_first[jax.random.randint(key, (3, n), 0, alive.sum())]]
    return jnp.where(alive[:, None], x, a + 0.2 * (b - c))


class Pace(NamedTuple):
    """How long a flow runs: steps per evaluation of the curvature, the most evaluations, and when it has settled."""

    steps: int = 5
    looks: int = 200
    settled: float = 0.01  # root mean square of the whitened field
    step: float = 0.5


Carry = tuple[Particles, Array, Whitening, Scalar, Scalar, Array]  # … log weights, …, the field's size, β, looks so far


def follow(
    key: Key,
    log_density: Callable[[Array, Scalar], Array],
    x: Particles,
    log_weights: Array,
    pace: Pace,
    settled: Scalar,
    warm_up: Array,
) -> tuple[Particles, Array, Whitening, Scalar]:
    r"""Move particles from $p_0$ to $p_1$ along $p_\beta$, each density close enough to the last to be followed.

    Args:
        key: the key for relocations.
        log_density: $\log p_\beta(x)$ of one point and of $\beta$, linear in $\beta$.
        x: particles distributed as $p_0$.
        log_weights: their log weights, `[n]`.
        pace: how long the flow runs.
        settled: the root mean square of the field below which the flow at $\beta = 1$ ends.
        warm_up: the number of initial evaluations at $\beta = 0$.

    Returns:
        The particles, their log weights, the last whitening and the last field's root mean square.
    """
    n, d = x.shape

    def look(carry: Carry) -> Carry:
        x, log_weights, _, _, beta, k = carry
        slope = jax.vmap(jax.grad(log_density, 1), (0, None))(x, beta)
        # Where rows are impossible there is nothing to follow: such particles are relocated before all else.
        known = jnp.isfinite(slope)
        x = relocate(jax.random.fold_in(key, IMPOSSIBLE + k), x, jnp.where(known, 0, -jnp.inf))
        given, before = slope, beta
        slope = jnp.sort(jnp.where(known, slope, jnp.nanmedian(jnp.where(known, slope, jnp.nan))))
        spread = (slope[(3 * n) // 4] - slope[n // 4]) / 1.35  # of a normal distribution, the standard deviation
        beta = jnp.where(k < warm_up, 0, jnp.minimum(beta + CHANGE / jnp.maximum(spread, CHANGE), 1))
        gained = jnp.where(known, (beta - before) * given, -jnp.inf)
        there, value = x, jax.vmap(log_density, (0, None))(x, beta)
        x = relocate(jax.random.fold_in(key, k), x, value)
        W = whitening(lambda v: log_density(v, beta), x)
        same = modes(there @ W.into, there, value, lambda v: log_density(v, beta))
        log_weights = reweighted(log_weights, gained, same)
        x, log_weights = resampled(jax.random.fold_in(key, RESAMPLING + k), x, log_weights, same)
        gradient = jax.vmap(jax.grad(lambda v: log_density(v, beta)))

        def inner(_: int, carry: tuple[Particles, Scalar]) -> tuple[Particles, Scalar]:
            x, v = move(gradient, W, carry[0], pace.step)
            return x, jnp.sqrt((v**2).mean())

        moved, size = jax.lax.fori_loop(0, pace.steps, inner, (x, jnp.zeros((), x.dtype)))
        possible = jnp.isfinite(jax.vmap(log_density, (0, None))(moved, beta))
        return jnp.where(possible[:, None], moved, x), log_weights, W, size, beta, k + 1

    def unsettled(carry: Carry) -> Array:
        *_, size, beta, k = carry
        return (k < 1) | (k < pace.looks) & ((beta < 1) | (size > settled))

    zero = jnp.zeros((), x.dtype)
    none = Whitening(*[jnp.eye(d, dtype=x.dtype)] * 2)
    first = x, log_weights, none, zero, zero, jnp.zeros((), jnp.int32)
    x, log_weights, W, size, beta, k = jax.lax.while_loop(unsettled, look, first)
    last = jnp.isfinite(jax.vmap(log_density, (0, None))(x, beta))
    return relocate(jax.random.fold_in(key, IMPOSSIBLE + k), x, jnp.where(last, 0, -jnp.inf)), log_weights, W, size
