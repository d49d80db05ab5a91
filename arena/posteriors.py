"""Streams whose posterior is known exactly after every row: in closed form, on a grid, or by long reference runs."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import norm

import opvi
from arena.streams import Source

PRIOR, NOISE = 1.0, 0.25  # variances
EXACT = 2000  # draws that stand for an exact posterior
LOOKS = 4  # at the posterior, evenly spaced


class Problem(NamedTuple):
    """A model, its rows, and the exact posterior after some of them."""

    target: opvi.Target
    rows: Any  # a pytree of arrays with one leading axis
    batch: int
    looks: tuple[int, ...]  # rows after which the posterior is compared
    exact: Callable[[int], np.ndarray]  # of rows seen: [m, k] draws or quantiles
    view: Callable[[np.ndarray], np.ndarray]  # of draws [n, d]: [n, k], what is compared
    link: str = ""  # "normal" or "logistic" where y follows x·w, for filters


def _same(draws: np.ndarray) -> np.ndarray:
    return draws


def _looks(rows: int, batch: int) -> tuple[int, ...]:
    return tuple(rows * (k + 1) // LOOKS // batch * batch for k in range(LOOKS))


def normal_row(v: jax.Array, data: Any) -> jax.Array:
    """Return the log likelihood of $y \\sim N(x w, 0.25)$."""
    return -((data[1] - data[0] @ v) ** 2) / (2 * NOISE)


def logistic_row(v: jax.Array, data: Any) -> jax.Array:
    """Return the log likelihood of a label that is 1 with probability $\\sigma(x w)$."""
    eta = data[0] @ v
    return data[1] * jax.nn.log_sigmoid(eta) + (1 - data[1]) * jax.nn.log_sigmoid(-eta)


def _normal_prior(v: jax.Array) -> jax.Array:
    return -(v**2).sum() / (2 * PRIOR)


def _start(d: int, key: jax.Array) -> jax.Array:
    return jnp.sqrt(PRIOR) * jax.random.normal(key, (d,))


@cache
def _weights(d: int, row: Callable[..., jax.Array]) -> opvi.Target:
    """Return a model of d weights; the same one for all seeds, so that programs are kept."""
    return opvi.target(_normal_prior, row, partial(_start, d))


@cache
def _loaded(name: str) -> Any:
    from paper.data import posteriordb
    from paper.posteriors import posterior

    return posterior(posteriordb(name))


def linear(seed: int, rows: int) -> Problem:
    """Conjugate linear regression with five weights."""
    rng = np.random.default_rng(5000 + seed)
    X = rng.normal(size=(rows, 5)) * np.array([1, 1, 2, 0.5, 1])
    X[:, 1] += 0.8 * X[:, 0]
    y = X @ rng.normal(size=5) + np.sqrt(NOISE) * rng.normal(size=rows)
    data = X.astype(np.float32), y.astype(np.float32)

    def exact(seen: int) -> np.ndarray:
        x, target = (np.asarray(a[:seen], float) for a in data)
        C = np.linalg.inv(np.eye(5) / PRIOR + x.T @ x / NOISE)
        levels = (np.arange(EXACT) + 0.5) / EXACT
        return norm.ppf(levels)[:, None] * np.sqrt(np.diag(C)) + C @ x.T @ target / NOISE

    return Problem(_weights(5, normal_row), data, 20, _looks(rows, 20), exact, _same, "normal")


def logistic(seed: int, rows: int) -> Problem:
    """Logistic regression with two weights, whose posterior is computed on a grid."""
    rng = np.random.default_rng(6000 + seed)
    X = np.column_stack([np.ones(rows), rng.normal(size=rows)])
    y = rng.random(rows) < 1 / (1 + np.exp(-X @ np.array([-0.5, 1.5])))
    data = X.astype(np.float32), y.astype(np.float32)
    axis = np.linspace(-4, 4, 201)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)

    def exact(seen: int) -> np.ndarray:
        eta = grid @ X[:seen].T
        log = -(grid**2).sum(1) / (2 * PRIOR) - np.logaddexp(0, np.where(y[:seen], -eta, eta)).sum(1)
        mass = np.exp(log - log.max()).reshape(len(axis), len(axis))
        levels = (np.arange(EXACT) + 0.5) / EXACT
        marginals = [mass.sum(1), mass.sum(0)]
        return np.stack([np.interp(levels, (np.cumsum(m) - m / 2) / m.sum(), axis) for m in marginals], 1)

    return Problem(_weights(2, logistic_row), data, 20, _looks(rows, 20), exact, _same, "logistic")


def mixture(seed: int, rows: int) -> Problem:
    """The paper's mixture with two mirrored modes, on a grid; both are compared in one half."""
    from paper.mixture import exact_posterior, to_midpoint_gap, to_theta

    data = np.asarray(opvi.targets.sample_mixture(jax.random.key(7000 + seed), rows))

    def folded(draws: np.ndarray) -> np.ndarray:
        return to_theta(to_midpoint_gap(draws), folded=True)

    def exact(seen: int) -> np.ndarray:
        return folded(exact_posterior(data[:seen]).draw(EXACT, seed, stratified=True))

    return Problem(opvi.gaussian_mixture(), data, 20, _looks(rows, 20), exact, folded)


def reference(name: str, seed: int, rows: int) -> Problem:
    """A posterior of posteriordb, compared after its last row; the seed is the method's."""
    model = _loaded(name)
    data = jax.tree.map(lambda a: a.astype(np.float32) if a.dtype.kind == "f" else a, model.rows)
    count = len(jax.tree.leaves(data)[0])
    draws = model.reference.draws

    def view(particles: np.ndarray) -> np.ndarray:
        return np.asarray(model.constrained(jnp.asarray(particles)), float)

    def exact(seen: int) -> np.ndarray:
        return draws

    return Problem(model.target, data, model.batch_size, (count,), exact, view)


POSTERIORS: dict[str, Source] = {
    "posterior: linear": Source("posterior", 400, linear, "five weights, conjugate"),
    "posterior: logistic": Source("posterior", 400, logistic, "two weights, on a grid"),
    "posterior: mixture": Source("posterior", 400, mixture, "two mirrored modes, on a grid"),
    "posterior: kidscore": Source(
        "posterior", 434, partial(reference, "kidiq-kidscore_momiq"), "posteriordb's, at the end"
    ),
    "posterior: two normals": Source(
        "posterior", 1000, partial(reference, "low_dim_gauss_mix-low_dim_gauss_mix"), "posteriordb's, at the end"
    ),
}
