r"""Coordinates in which a funnel is round: scales of some parameters depend on others."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._factors import solve_positive
from opvi.filters._covariance import exactly
from opvi.types import Array, Particles

POINTS = 100  # whose curvatures are looked at, at least
STRONG = 0.2  # change of a log scale that counts, for one standard deviation of another parameter
STEEPEST = 5.0  # of a log scale: the farthest from 0
FITS = 4  # of means and scales, by turns
SMALLEST = 1e-4  # residuals count as at least this, in standard deviations
RIDGE, RIDGE_OF_SCALES = 1e-4, 0.05  # share of a variance that keeps small systems solvable


class Straight(NamedTuple):
    r"""A map from coordinates u, roughly N(0, I), to parameters x, some of which drive the scales of the others.

    $$z = A z + b + e^s (g + l u), \qquad s = S z, \qquad x = c + \sigma z$$

    A is strictly lower triangular in an order in which drivers come first, and S has rows of the others and columns of
    the drivers only.
    """

    centre: Array  # [d]: c
    scale: Array  # [d]: σ
    steep: Array  # [d, d]: S
    forward: Array  # [d, d]: (I - A)^-1
    backward: Array  # [d, d]: I - A
    base: Array  # [d]: b
    shift: Array  # [d]: g
    size: Array  # [d]: l

    def out(self, u: Array) -> tuple[Array, Array]:
        """Return x for u, `[d]`, and the log determinant of the map, up to a constant."""
        v = self.shift + self.size * u
        s = bounded(self.steep @ (self.forward @ (self.base + v)))  # drivers have s = 0: they are right already
        return self.centre + self.scale * (self.forward @ (self.base + jnp.exp(s) * v)), s.sum()

    def into(self, x: Array) -> Array:
        """Return u for x, `[d]`."""
        z = (x - self.centre) / self.scale
        s = bounded(self.steep @ z)
        return ((self.backward @ z - self.base) * jnp.exp(-s) - self.shift) / self.size


def linear(centre: Array, root: Array, inverse: Array) -> Straight:
    """Return a map without drivers: x = centre + root u."""
    one, zero = jnp.ones_like(centre), jnp.zeros_like(centre)
    return Straight(centre, one, jnp.zeros_like(root), root, inverse, zero, zero, one)


def bounded(s: Array) -> Array:
    """Return log scales that are not too far from 0."""
    return STEEPEST * jnp.tanh(s / STEEPEST)


@exactly
def straight(log_density: Callable[[Array], Array], x: Particles) -> Straight:
    """Return the map fitted to these particles; it is linear where no scale depends on other parameters.

    Which parameters are drivers is seen in the curvatures of the density. Then means, by weighted least squares, and
    log squared residuals, by least squares, are fitted by turns.
    """
    (n, d), kind = x.shape, x.dtype
    centre, scale = x.mean(0), x.std(0) + jnp.finfo(kind).tiny ** 0.5
    z = (x - centre[None]) / scale[None]
    steep = steepness(log_density, x, z, scale)
    c = jnp.where(jnp.abs(steep) > STRONG, steep, 0) ** 2
    excess = c.sum(0) - c.sum(1)
    driver = excess > 0
    place = jnp.argsort(jnp.argsort(-excess))
    before = place[None] < place[:, None]
    drives = before & driver[None] & ~driver[:, None]
    always = jnp.ones((d, 1), bool)
    X = jnp.concatenate([jnp.ones((n, 1), kind), z], 1)
    P = jnp.broadcast_to((X.T @ X / n)[None], (d, d + 1, d + 1))

    use = jnp.concatenate([always, before, drives.any(1, keepdims=True)], 1)

    def fit(_: int, given: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return S as it was used and as it is next, coefficients `[d, d + 2]` of 1, z and exp(s), and sizes l."""
        steep = given[1]
        s = bounded(z @ steep.T).T
        rows = jnp.concatenate([X[None] * jnp.exp(-s)[:, :, None], jnp.ones((d, n, 1), kind)], 2)
        of = z.T * jnp.exp(-s)
        c = solved(jnp.einsum("inp,inq->ipq", rows, rows) / n, jnp.einsum("inp,in->ip", rows, of) / n, use)
        left = of - jnp.einsum("inp,ip->in", rows, c)
        log = jnp.log(jnp.maximum(jnp.abs(left) * jnp.exp(s), SMALLEST)).T
        new = solved(P, (X.T @ log / n).T, jnp.concatenate([always, drives], 1))[:, 1:]
        return steep, new, c, jnp.sqrt((left**2).mean(1))

    steep = jnp.where(drives, steep, 0)
    steep, _, c, size = jax.lax.fori_loop(0, 1 + FITS, fit, (steep, steep, jnp.zeros((d, d + 2), kind), scale))
    backward = jnp.eye(d, dtype=kind) - c[:, 1:-1]
    size = size + jnp.finfo(kind).tiny ** 0.5
    return Straight(centre, scale, steep, jnp.linalg.inv(backward), backward, c[:, 0], c[:, -1], size)


def solved(M: Array, columns: Array, use: Array) -> Array:
    """Return the solutions `[d, p]` of systems with matrices `[d, p, p]`, of those unknowns that are used."""
    use = use.astype(M.dtype)
    M = M * use[:, :, None] * use[:, None, :]
    ridge = RIDGE * jnp.einsum("ipp->ip", M) + 1 - use
    return solve_positive(M + jax.vmap(jnp.diag)(ridge), (columns * use)[:, :, None])[:, :, 0] * use


def steepness(log_density: Callable[[Array], Array], x: Particles, z: Array, scale: Array) -> Array:
    """Return how the log of each parameter's scale given all others changes with each of them, in sds: `[d, d]`.

    These scales are known from the curvatures, so that few particles are enough, wherever they are.
    """
    n, d = x.shape
    every = -(-n // max(POINTS, 2 * d))
    x, z = x[::every], z[::every]
    bend = jnp.abs(jnp.einsum("nii->ni", jax.vmap(jax.hessian(log_density))(x))) * scale[None] ** 2
    log = -jnp.log(jnp.where(jnp.isfinite(bend), bend, 1).clip(1e-6, 1e6)) / 2
    X = jnp.concatenate([jnp.ones_like(z[:, :1]), z], 1)
    G = X.T @ X / len(X)
    found = solve_positive(G + jnp.diag(RIDGE_OF_SCALES * jnp.diagonal(G)), X.T @ log / len(X))[1:].T
    return found * (1 - jnp.eye(d, dtype=x.dtype))
