r"""Six posteriors of posteriordb as targets over unconstrained parameters, with maps back to the named ones.

A positive parameter $\sigma$ is sampled as $\log \sigma$, a share $\theta$ as its logit, ordered means as the first
one and the log of the gap; each log prior includes the log of the Jacobian.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi.types import Array, Data, Particles
from paper.data import ReferencePosterior

START = 2.0  # starting particles are uniform in ±START on the unconstrained scale


class Posterior(NamedTuple):
    """A model with its rows, and draws from long runs of a reference sampler."""

    target: opvi.Target
    rows: Data
    batch_size: int  # rows per round
    constrained: Callable[[Particles], Array]  # [n, d] -> [n, k], in the order of `reference.names`
    reference: ReferencePosterior


def posterior(reference: ReferencePosterior) -> Posterior:
    """The model of that name, over its own data."""
    return MODELS[reference.name](reference)


def _normal(x: Array, mean: Any, sd: Any) -> Array:
    return -0.5 * ((x - mean) / sd) ** 2 - jnp.log(sd) - 0.5 * math.log(2 * math.pi)


def _half_cauchy(log_x: Array, scale: float) -> Array:
    """The log density of $\\log x$, Jacobian included."""
    return -jnp.log1p((jnp.exp(log_x) / scale) ** 2) + log_x


def _half_normal(log_x: Array, scale: float) -> Array:
    return -0.5 * (jnp.exp(log_x) / scale) ** 2 + log_x


def _target(d: int, log_prior: Callable[[Array], Array], log_likelihood: Callable[[Array, Data], Array]) -> opvi.Target:
    return opvi.target(
        log_prior, log_likelihood, lambda key: jax.random.uniform(key, (d,), minval=-START, maxval=START)
    )


def _regression(
    reference: ReferencePosterior, X: np.ndarray, y: np.ndarray, batch_size: int, log_prior: Callable[[Array], Array]
) -> Posterior:
    """$y \\sim N(X b, \\sigma^2)$ with parameters $(b, \\log \\sigma)$."""

    def log_likelihood(v: Array, rows: Data) -> Array:
        inputs, output = rows
        return _normal(output, inputs @ v[:-1], jnp.exp(v[-1]))

    def constrained(particles: Particles) -> Array:
        return jnp.concatenate([particles[:, :-1], jnp.exp(particles[:, -1:])], 1)

    target = _target(X.shape[1] + 1, log_prior, log_likelihood)
    return Posterior(target, (X, y), batch_size, constrained, reference)


def _kidscore(reference: ReferencePosterior) -> Posterior:
    y = reference.data["kid_score"].astype(float)
    X = np.stack([np.ones(len(y)), reference.data["mom_iq"]], 1)
    return _regression(reference, X, y, 8, lambda v: _half_cauchy(v[-1], 2.5))


def _mesquite(reference: ReferencePosterior) -> Posterior:
    data = reference.data
    logs = [np.log(data[k]) for k in ("diam1", "diam2", "canopy_height", "total_height", "density")]
    y = np.log(data["weight"])
    X = np.stack([np.ones(len(y)), *logs, data["group"].astype(float)], 1)
    return _regression(reference, X, y, len(y), lambda v: v[-1])  # flat, and proper only once it has seen 9 rows


def _sblrc(reference: ReferencePosterior) -> Posterior:
    def log_prior(v: Array) -> Array:
        return -0.5 * ((v[:-1] / 10) ** 2).sum() + _half_normal(v[-1], 10)

    return _regression(reference, reference.data["X"], reference.data["y"], 2, log_prior)


def _autoregression(reference: ReferencePosterior) -> Posterior:
    y, lags = reference.data["y"], int(reference.data["K"])
    past = [y[lags - k : len(y) - k] for k in range(1, lags + 1)]
    X = np.stack([np.ones(len(y) - lags), *past], 1)

    def log_prior(v: Array) -> Array:
        return -0.5 * ((v[:-1] / 10) ** 2).sum() + _half_cauchy(v[-1], 2.5)

    return _regression(reference, X, y[lags:], 3, log_prior)


def _schools(reference: ReferencePosterior) -> Posterior:
    y, sigma = reference.data["y"].astype(float), reference.data["sigma"].astype(float)
    rows = (y, sigma, np.arange(len(y)))

    def log_prior(v: Array) -> Array:
        return -0.5 * (v[0] / 5) ** 2 + _half_cauchy(v[1], 5.0) - 0.5 * (v[2:] ** 2).sum()

    def log_likelihood(v: Array, rows: Data) -> Array:
        y, sigma, school = rows
        return _normal(y, v[0] + jnp.exp(v[1]) * v[2:][school], sigma)

    def constrained(x: Particles) -> Array:
        mu, tau = x[:, :1], jnp.exp(x[:, 1:2])
        return jnp.concatenate([mu, tau, mu + tau * x[:, 2:]], 1)

    return Posterior(_target(len(y) + 2, log_prior, log_likelihood), rows, len(y), constrained, reference)


def _two_normals(reference: ReferencePosterior) -> Posterior:
    """Parameters: the first mean, the log of the gap to the second, two log sds, and the logit of the first's share."""

    def means(v: Array) -> tuple[Array, Array]:
        return v[0], v[0] + jnp.exp(v[1])

    def log_prior(v: Array) -> Array:
        first, second = means(v)
        share = 5 * (jax.nn.log_sigmoid(v[4]) + jax.nn.log_sigmoid(-v[4]))  # Beta(5, 5), Jacobian included
        return (
            -((first / 2) ** 2 + (second / 2) ** 2) / 2 + v[1] + _half_normal(v[2], 2) + _half_normal(v[3], 2) + share
        )

    def log_likelihood(v: Array, y: Array) -> Array:
        first, second = means(v)
        one = jax.nn.log_sigmoid(v[4]) + _normal(y, first, jnp.exp(v[2]))
        return jnp.logaddexp(one, jax.nn.log_sigmoid(-v[4]) + _normal(y, second, jnp.exp(v[3])))

    def constrained(x: Particles) -> Array:
        first, gap, deviation_1, deviation_2, logit = x.T
        columns = [first, first + jnp.exp(gap), jnp.exp(deviation_1), jnp.exp(deviation_2), jax.nn.sigmoid(logit)]
        return jnp.stack(columns, 1)

    return Posterior(_target(5, log_prior, log_likelihood), reference.data["y"], 20, constrained, reference)


MODELS: dict[str, Callable[[ReferencePosterior], Posterior]] = {
    "arK-arK": _autoregression,
    "eight_schools-eight_schools_noncentered": _schools,
    "kidiq-kidscore_momiq": _kidscore,
    "low_dim_gauss_mix-low_dim_gauss_mix": _two_normals,
    "mesquite-logmesquite": _mesquite,
    "sblrc-blr": _sblrc,
}
