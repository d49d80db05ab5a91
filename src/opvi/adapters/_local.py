r"""Latent variables of single rows, summed out: $\log p(r \mid \theta) = \log \int p(r, z \mid \theta)\, dz$."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from scipy.stats import norm, qmc

from opvi.types import Array

STEPS = 10  # of Newton's method, towards the most likely z
LONGEST = 3.0  # of them, in standard deviations of z
HERMITE = 16  # nodes for one number per row
NODES = 128  # for several
WIDER = 1.2  # times the standard deviations at the top: what is far out must be met by some nodes
LIKELY = 1e-3  # least curvature


def log_integral(log_joint: Callable[[Array], Array], dim: int, dtype: jnp.dtype) -> Array:
    r"""Return $\log \int e^{h(z)} dz$ over a vector, by nodes around the maximum of h, which Newton's method finds.

    One number: Gauss–Hermite nodes, exact for a Gaussian times a polynomial of degree 31. Several: a fixed quasi-random
    sample of a Gaussian with the curvature at the maximum. Gradients are those of the sum at its nodes.
    """
    gradient, curvature = jax.grad(log_joint), jax.hessian(log_joint)

    def root(z: Array) -> Array:
        """Return R, where R Rᵀ is the covariance implied by the curvature at z."""
        A = -curvature(z)
        if dim == 1:
            return jax.lax.rsqrt(jnp.maximum(jnp.abs(A), LIKELY))
        values, V = jnp.linalg.eigh((A + A.T) / 2)
        return V * jax.lax.rsqrt(jnp.maximum(jnp.abs(values), LIKELY))[None, :]

    def newton(_: int, z: Array) -> Array:
        R = root(z)
        away = R.T @ gradient(z)
        away = away * jnp.minimum(1, LONGEST / jnp.maximum(jnp.sqrt((away**2).sum()), 1e-30))
        new = z + R @ away
        return jnp.where(jnp.isfinite(new).all(), new, z)

    top = jax.lax.fori_loop(0, STEPS, newton, jnp.zeros(dim, dtype))
    R = jax.lax.stop_gradient(root(top))
    e, log_weights = (jnp.asarray(a, dtype) for a in _nodes(dim))
    z = jax.lax.stop_gradient(top)[None, :] + e @ R.T
    log_volume = jnp.log(jnp.abs(R[0, 0])) if dim == 1 else jnp.linalg.slogdet(R)[1]
    return logsumexp(jax.vmap(log_joint)(z) + log_weights) + log_volume


def _nodes(dim: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Return points $e_k$ `[K, dim]` and log weights with $\int f(e)\, de \approx \sum_k w_k f(e_k)$."""
    if dim == 1:
        e, w = np.polynomial.hermite_e.hermegauss(HERMITE)
        return e[:, None], np.log(w) + e**2 / 2
    e = WIDER * norm.ppf(qmc.Sobol(dim, seed=0).random(NODES))
    return e, -norm.logpdf(e, scale=WIDER).sum(1) - np.log(NODES)
