"""Predictions of a head whose outputs are themselves uncertain: Gaussian, with a covariance for every row."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from opvi._factors import eigenvectors
from opvi.predictive import Bernoulli, Categorical, Classes, Distribution, Normal, Predictive, StudentT
from opvi.types import Array

NODES = 16  # of the quadrature over a logit
DRAWS = 64  # of the logits of several classes, in pairs of opposite sign


def averaged(dist: Distribution, covariance: Array) -> Classes:
    """Return class probabilities of every particle, averaged over the uncertainty of its outputs; as `spread_out`."""
    spread = spread_out(dist, covariance)
    log_p = spread.components.log_probabilities()  # type: ignore[union-attr]
    log_p = log_p.reshape(len(covariance), -1, *log_p.shape[1:])  # [n, draws or nodes, B, C]
    weights = spread.log_mixture_weights().reshape(*log_p.shape[:2])
    log_p = logsumexp(log_p + jax.nn.log_softmax(weights)[:, :, None, None], axis=1)
    return Categorical(log_p) if isinstance(dist, Categorical) else Bernoulli(log_p[..., 1] - log_p[..., 0])


def spread_out(dist: Distribution, covariance: Array) -> Predictive:
    """Return the mixture of the particles' heads, averaged over the uncertainty of their outputs.

    Args:
        dist: the heads of n particles, leaves `[n, B, ...]`.
        covariance: the covariances of their outputs, `[n, B, C, C]`.
    """
    if isinstance(dist, Normal):
        spread = jnp.maximum(covariance[..., 0, 0], 0)
        return Predictive(StudentT(dist.mean, dist.variance + spread, jnp.full_like(spread, jnp.inf), spread))
    if not isinstance(dist, Categorical):  # one output, which comes first
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        sd = jnp.sqrt(jnp.maximum(covariance[..., 0, 0], 0))
        output = dist[0][:, None] + sd[:, None] * jnp.asarray(nodes, sd.dtype)[None, :, None]  # [n, nodes, B]
        log_weights = jnp.asarray(np.log(weights / weights.sum()) - np.log(len(sd)), sd.dtype)
        others = [jnp.repeat(leaf, NODES, 0) for leaf in dist[1:]]
        return Predictive(type(dist)(output.reshape(-1, output.shape[-1]), *others), jnp.tile(log_weights, len(sd)))
    values, V = eigenvectors((covariance + covariance.mT) / 2)
    root = V * jnp.sqrt(jnp.maximum(values, 0))[..., None, :]
    half = jax.random.normal(jax.random.key(0), (DRAWS // 2, root.shape[-1]), root.dtype)
    z = jnp.concatenate([half, -half])
    logits = dist.logits[:, None] + jnp.einsum("nbcd,kd->nkbc", root, z)
    return Predictive(Categorical(logits.reshape(-1, *logits.shape[2:])))
