r"""Calibration of class probabilities: a temperature, and exponents for the members of a bank."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi._factors import diagonal, solve
from opvi.types import Array, Scalar

ROUND = 20  # rows that WANDERING refers to
FIRST_VARIANCE = 0.1  # of the first exponent, the inverse temperature, before any row
MEMBER_VARIANCE = 0.01  # of the others
WANDERING = 1e-5  # variance that each exponent gains in 20 rows: the best ones change slowly
LARGEST_VARIANCE = 0.1  # members that always agree would wander apart without end
LARGEST_CHANGE = 0.2  # mean KL divergence between the predictions before and after an update
SMOOTHING = 0.005  # probability dealt out evenly first: a member that is surely wrong must not veto the others


class Exponents(NamedTuple):
    """The exponents and how well they are known."""

    value: Array  # [K]
    covariance: Array  # [K, K]


def start(members: int, dtype: Any) -> Exponents:
    """Return exponents that use the first member as it is (temperature 1) and ignore the others."""
    variance = jnp.full(members, MEMBER_VARIANCE, dtype).at[0].set(FIRST_VARIANCE)
    return Exponents(jnp.zeros(members, dtype).at[0].set(1), jnp.diag(variance))


def pool(exponents: Exponents, log_p: Array) -> Array:
    r"""Return calibrated log probabilities `[B, C]` from log probabilities `[K, B, C]`.

    $$p(c) \propto \prod_k p_k(c)^{\beta_k}$$

    With one member, $1/\beta$ is its temperature. Exponents may be negative: what a slow member says and a fast one
    no longer says is a trend.
    """
    return jax.nn.log_softmax(jnp.einsum("kbc,k->bc", _features(log_p), exponents.value))


def update(exponents: Exponents, log_p: Array, y: Array, weight: Array) -> Exponents:
    """Update the exponents with the labels of a batch: one step of an extended Kalman filter."""
    beta, P = exponents
    f = _features(log_p)
    p = jax.nn.softmax(jnp.einsum("kbc,k->bc", f, beta))
    error = (jax.nn.one_hot(y, p.shape[1], dtype=p.dtype) - p) * weight[:, None]
    mean = jnp.einsum("kbc,bc->kb", f, p)
    away = f - mean[:, :, None]
    H = jnp.einsum("kbc,jbc->kj", away * (p * weight[:, None])[None], away)
    P = solve(jnp.eye(len(beta), dtype=p.dtype) + P @ H, P)
    P = (P + P.T) / 2
    step = P @ jnp.einsum("kbc,bc->k", f, error)
    total = weight.sum()
    divergence = 0.5 * (step @ H @ step) / jnp.maximum(total, 1e-30)
    step = step * jnp.minimum(1, jnp.sqrt(LARGEST_CHANGE / (jnp.maximum(divergence, 0) + 1e-9)))
    P = P + WANDERING * total / ROUND * jnp.eye(len(beta), dtype=p.dtype)
    shrink = jnp.sqrt(jnp.minimum(1, LARGEST_VARIANCE / jnp.maximum(diagonal(P), 1e-30)))
    P = P * shrink[:, None] * shrink[None, :]
    new = Exponents(beta + step, P)
    good = jnp.isfinite(new.value).all() & jnp.isfinite(P).all()
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, exponents)


def temperature(exponents: Exponents) -> Scalar:
    """Return the temperature of a single member."""
    return 1 / exponents.value[0]


def _features(log_p: Array) -> Array:
    """Return log probabilities, slightly smoothed, with mean 0 over the classes."""
    classes = log_p.shape[-1]
    smooth = jnp.log((1 - SMOOTHING) * jnp.exp(log_p) + SMOOTHING / classes)
    return smooth - smooth.mean(-1, keepdims=True)
