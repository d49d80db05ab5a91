r"""The log evidence, from draws: a bridge between them and a Gaussian in coordinates in which they are nearly round."""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.filters._prior import gaussian_prior
from opvi.filters._straight import Straight, straight
from opvi.targets import Target
from opvi.types import Array, Key, Particles

DRAWS = 6400
LARGEST_ERROR = 0.1  # nats: above, the evidence is said to be uncertain
ROUNDS = 1000  # of the bridge's fixed point, at most


class Ratios(NamedTuple):
    """Log densities beside those of a Gaussian."""

    draws: Array  # [n]
    proposed: Array  # [n]: at draws of the Gaussian


class Evidence(NamedTuple):
    """The log of an integral, in nats."""

    value: float
    error: float  # its standard error


def ratios(
    key: Key, log_density: Callable[[Array], Array], values: Callable[[Particles], Array], draws: Particles
) -> tuple[Ratios, Ratios]:
    """Return the ratios of each half of the draws to a Gaussian that is fitted to the other half.

    Args:
        key: the key for draws of the Gaussians.
        log_density: about the log density of one point, whose curvature says where the Gaussian bends.
        values: the log densities of points `[n, d]`, not normalised.
        draws: `[2, n, d]`.
    """

    def of(given: tuple[Key, Particles, Particles]) -> Ratios:
        key, fitted, others = given
        to = straight(log_density, fitted)
        u = jax.random.normal(key, others.shape, others.dtype)
        return Ratios(_ratios(values, to, jax.vmap(to.into)(others)), _ratios(values, to, u))

    found = jax.lax.map(of, (jax.random.split(key, 2), draws, draws[::-1]))
    return jax.tree.map(lambda a: a[0], found), jax.tree.map(lambda a: a[1], found)


def _ratios(values: Callable[[Particles], Array], to: Straight, u: Array) -> Array:
    x, volume = jax.vmap(to.out)(u)
    volume += jnp.log(to.size).sum() + jnp.log(to.scale).sum()
    return values(x) + volume + (u**2).sum(1) / 2 + u.shape[1] * math.log(2 * math.pi) / 2


def bridged(found: Ratios) -> Evidence:
    r"""Return the log integral of a density by the optimal bridge to a normalised one (Meng, Wong, 1996).

    $$Z = \frac{\sum_j p(x'_j) / (p(x'_j) + Z q(x'_j))}{\sum_i q(x_i) / (p(x_i) + Z q(x_i))}$$

    with draws x of p/Z and x' of q, as many of each.
    """
    at, proposed = (np.asarray(ratio, float) for ratio in found)
    proposed = np.where(np.isnan(proposed), -np.inf, proposed)
    log_z = float(np.median(at))
    for _ in range(ROUNDS):
        of_proposed = 1 / (1 + np.exp(np.minimum(log_z - proposed, 700)))
        of_draws = 1 / (1 + np.exp(np.minimum(at - log_z, 700)))
        change = math.log(of_proposed.mean()) - math.log(of_draws.mean())
        log_z += change
        if not abs(change) > 1e-6:
            break
    parts = (part.var() / part.mean() ** 2 / len(part) for part in (of_proposed, of_draws))
    return Evidence(log_z, math.sqrt(sum(parts)))


def joined(halves: tuple[Ratios, Ratios]) -> Evidence:
    """Return one estimate from those of both halves of the draws."""
    one, two = (bridged(half) for half in halves)
    apart = abs(one.value - two.value) / 2
    return Evidence((one.value + two.value) / 2, max(apart, math.hypot(one.error, two.error) / 2))


def added(total: Array, value: Array) -> Array:
    """Return a sum and what rounding left out of it, `[2]`, with a value added: beside many rows, one would vanish."""
    value = value + total[1]
    new = total[0] + value
    part = new - total[0]
    return jnp.stack([new, (total[0] - (new - part)) + (value - part)])


def warn_if_uncertain(found: Evidence) -> None:
    """Warn if draws and the Gaussian have too little in common."""
    if not found.error <= LARGEST_ERROR:
        warnings.warn(
            f"the log evidence has a standard error of {found.error:.2f} nats: ask again with other keys, "
            "`log_evidence(state, 1)`, `log_evidence(state, 2)`, …, and take the mean.",
            UserWarning,
            stacklevel=3,
        )


def log_mass(target: Target) -> float:
    """Return the log integral of a Gaussian prior's density, which may lack a constant; others are taken as given."""
    prior = gaussian_prior(target)
    if prior is None:
        return 0.0
    volume = np.log(prior.variance).sum() if prior.covariance is None else np.linalg.slogdet(prior.covariance)[1]
    top = float(target.log_prior(target.unravel(jnp.asarray(prior.mean, jnp.zeros(()).dtype))))
    return top + (target.dim * math.log(2 * math.pi) + float(volume)) / 2
