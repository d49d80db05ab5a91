r"""What remains of rows: their log likelihood as a polynomial around the particles."""

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._factors import eigenvectors
from opvi.filters._covariance import exactly
from opvi.flows.kernels import centred
from opvi.types import Array, Particles

RIDGE = 1e-6  # share of the trace that keeps small systems solvable
LARGEST_DEGREE = 6
NEGLIGIBLE = 0.02  # of a log density, root mean square over the particles


class Frame(NamedTuple):
    """Coordinates $u = (x - c) L^{-T}$ in which particles have mean 0 and covariance 1."""

    centre: Array  # [d]
    root: Array  # [d, d]: L, lower triangular
    inverse: Array  # [d, d]: L^-1

    def into(self, x: Array) -> Array:
        """Return points, `[n, d]` or `[d]`, in the coordinates u."""
        return (x - (self.centre if x.ndim == 1 else self.centre[None])) @ self.inverse.T

    def out(self, u: Array) -> Array:
        """Return points u, `[n, d]`, as x."""
        return self.centre[None] + u @ self.root.T


@exactly
def frame(x: Particles) -> Frame:
    """Return the coordinates fitted to these particles; a ridge handles few or coinciding ones."""
    d = x.shape[1]
    u = centred(x)
    C = u.T @ u / len(x)
    C = C + jnp.diag(RIDGE * jnp.diagonal(C) + jnp.finfo(x.dtype).tiny ** 0.5)
    if len(x) <= 2 * d:  # the sample covariance is not of full rank
        C = C / 2 + jnp.diag(jnp.diagonal(C)) / 2
    L = jnp.linalg.cholesky(C)
    return Frame(x.mean(0), L, jax.scipy.linalg.solve_triangular(L, jnp.eye(d, dtype=x.dtype), lower=True))


# --- polynomials, fitted to values ------------------------------------------------------------


@cache
def monomials(d: int, degree: int) -> np.ndarray:
    """Return every product of at most `degree` coordinates as indices into $(1, u_1, …, u_d)$: `[m, degree]`."""
    return np.array(list(itertools.combinations_with_replacement(range(d + 1), degree)))


def count(d: int, degree: int) -> int:
    """Return the number of coefficients of a polynomial."""
    return math.comb(d + degree, degree)


def features(u: Array, degree: int) -> Array:
    """Return all monomials at one point: `[m]`, the constant first."""
    return jnp.concatenate([jnp.ones(1, u.dtype), u])[monomials(len(u), degree)].prod(-1)


@cache
def _nodes(d: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points that determine a polynomial, and the matrix from its values there to its coefficients."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(3 * count(d, degree), d)).clip(-2.5, 2.5)
    Phi = np.concatenate([np.ones((len(points), 1)), points], 1)[:, monomials(d, degree)].prod(-1)
    return points, np.linalg.pinv(Phi)


class Polynomial(NamedTuple):
    """A polynomial in the coordinates of a frame."""

    frame: Frame
    coefficients: Array  # [m]

    @property
    def degree(self) -> int:
        """The largest number of factors in a term."""
        d, m = len(self.frame.centre), len(self.coefficients)
        return next(k for k in itertools.count() if count(d, k) == m)

    def value(self, x: Array) -> Array:
        """Return the value at one point."""
        return self.coefficients @ features(self.frame.into(x), self.degree)

    def scaled(self, gamma: Array) -> "Polynomial":
        """Return the function times a number."""
        return Polynomial(self.frame, gamma * self.coefficients)

    def within(self, new: Frame) -> "Polynomial":
        """Return the same function, up to a constant, in another frame, exactly, from its values at enough points."""
        points, solve = (jnp.asarray(a, new.centre.dtype) for a in _nodes(len(new.centre), self.degree))
        values = jax.vmap(self.value)(new.out(points))
        return Polynomial(new, solve @ (values - values.mean()))

    def trimmed(self, x: Particles) -> "Polynomial":
        r"""Return the same function with terms beyond the second order only as far as they matter at these points.

        Rounding errors there would grow with the sixth power of the distance as the particles move.
        """
        d, degree = len(self.frame.centre), self.degree
        if degree == 2:
            return self
        low = (monomials(d, degree) == 0).sum(1) >= degree - 2
        Phi = jax.vmap(lambda v: features(v, degree))(self.frame.into(x))
        values = centred((Phi @ self.coefficients)[:, None])[:, 0]
        quadratic = fit(self.frame.into(x), 2)
        rest = quadratic.residual(values)
        size = (rest**2).mean()
        share = size / (size + NEGLIGIBLE**2)
        plain = jnp.zeros_like(self.coefficients).at[np.flatnonzero(low)].set(quadratic.coefficients(values))
        return self._replace(coefficients=share * self.coefficients + (1 - share) * plain)


class Fit(NamedTuple):
    """A least-squares fit of polynomials over some points."""

    basis: Array  # [n, m], orthonormal columns
    triangle: Array  # [m, m]: features = basis @ triangle

    def residual(self, values: Array) -> Array:
        """Return the part of the values that no polynomial explains."""
        return values - self.basis @ (self.basis.T @ values)

    def coefficients(self, values: Array) -> Array:
        """Return the coefficients of the polynomial nearest to the values."""
        return jax.scipy.linalg.solve_triangular(self.triangle, self.basis.T @ values, lower=False)


def fit(u: Particles, degree: int) -> Fit:
    """Prepare a least-squares fit at these points of a frame."""
    Phi = jax.vmap(lambda v: features(v, degree))(u)
    # Rows of a small ridge: particles that coincide must not make the system singular.
    scale = jnp.sqrt(RIDGE * (Phi**2).sum(0))
    Q, R = jnp.linalg.qr(jnp.concatenate([Phi, jnp.diag(scale)]))
    return Fit(Q[: len(u)], R)


# --- quadratics, from gradients and Hessians --------------------------------------------------


class Quadratic(NamedTuple):
    r"""$g^\top (x - c) - \tfrac12 (x - c)^\top H (x - c)$, where there are too few particles to fit values."""

    centre: Array  # [d]
    gradient: Array  # [d]
    curvature: Array  # [d, d]

    def value(self, x: Array) -> Array:
        """Return the value at one point."""
        u = x - self.centre
        return self.gradient @ u - u @ self.curvature @ u / 2

    def scaled(self, gamma: Array) -> "Quadratic":
        """Return the function times a number."""
        return Quadratic(self.centre, gamma * self.gradient, gamma * self.curvature)

    def plus(self, function: Callable[[Array], Array], x: Particles, some: Particles) -> "Quadratic":
        r"""Add a function by its statistical linearisation over particles: mean gradient and mean curvature.

        Args:
            function: a function of one point.
            x: the particles whose gradients are averaged.
            some: the particles whose Hessians are averaged.
        """
        centre = x.mean(0)
        g = jax.vmap(jax.grad(function))(x).mean(0)
        H = -jax.vmap(jax.hessian(function))(some).mean(0)
        old = self.gradient - self.curvature @ (centre - self.centre)
        # Where the sum bends upwards it would grow without bound, and draw particles away from all data.
        return Quadratic(centre, old + g, positive(self.curvature + H))


@exactly
def positive(A: Array) -> Array:
    """Return the matrix with its negative eigenvalues set to 0."""
    values, V = eigenvectors((A + A.T) / 2)
    return (V * jnp.maximum(values, 0)[None]) @ V.T


Surrogate = Polynomial | Quadratic


def empty_surrogate(x: Particles) -> Surrogate:
    """Return the surrogate of no rows, of the largest degree that this many particles can support."""
    n, d = x.shape
    degree = LARGEST_DEGREE
    while degree > 2 and 3 * count(d, degree) > n:
        degree -= 2
    if degree == 2 and 4 * count(d, degree) > n:
        return Quadratic(x.mean(0), jnp.zeros(d, x.dtype), jnp.zeros((d, d), x.dtype))
    return Polynomial(frame(x), jnp.zeros(count(d, degree), x.dtype))
