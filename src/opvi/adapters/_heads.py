"""Distributions of NumPyro's observed sites as predictions of opvi."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import distributions as dist

from opvi.adapters._sites import Site, own_scale
from opvi.predictive import Bernoulli, Categorical, Distribution, NegativeBinomial, Normal, Poisson, StudentT


def head(site: Site, ratio: dict[str, float]) -> Distribution | None:
    """Return the distribution of an observed site, row by row, if it is one of opvi's."""
    fn = site["fn"]
    if fn.event_shape or len(fn.batch_shape) != 1 or own_scale(site, ratio) is not None:
        return None
    base = fn.base_dist if isinstance(fn, dist.ExpandedDistribution) else fn
    rows = fn.batch_shape
    if type(base) is dist.Normal:
        mean = jnp.broadcast_to(base.loc, rows)
        return Normal(mean, jnp.broadcast_to(base.scale**2, rows).astype(mean.dtype))
    if type(base) in (dist.BernoulliLogits, dist.BernoulliProbs):
        return Bernoulli(jnp.broadcast_to(base.logits, rows))
    if type(base) in (dist.CategoricalLogits, dist.CategoricalProbs):
        return Categorical(jnp.broadcast_to(base.logits, (*rows, base.logits.shape[-1])))
    if type(base) is dist.OrderedLogistic:
        log_p = jnp.log(base.probs)
        return Categorical(jnp.broadcast_to(log_p, (*rows, log_p.shape[-1])))
    if type(base) is dist.Poisson:
        return Poisson(jnp.broadcast_to(jnp.log(base.rate), rows))
    return _negative_binomial(base, rows) or _student_t(base, rows)


def _negative_binomial(base: Any, rows: tuple[int, ...]) -> NegativeBinomial | None:
    """Return a Gamma–Poisson distribution, which is what NumPyro's negative binomials are."""
    if not isinstance(base, dist.GammaPoisson):
        return None
    concentration, rate = jnp.broadcast_to(base.concentration, rows), jnp.broadcast_to(base.rate, rows)
    return NegativeBinomial(jnp.log(concentration / rate), concentration)


def _student_t(base: Any, rows: tuple[int, ...]) -> StudentT | None:
    """Return Student's t where its degrees of freedom are given and leave it a variance."""
    if type(base) is not dist.StudentT or isinstance(base.df, jax.core.Tracer) or not (np.asarray(base.df) > 2).all():
        return None
    mean, scale, dof = (jnp.broadcast_to(leaf, rows) for leaf in (base.loc, base.scale, base.df))
    return StudentT(mean, scale**2 * dof / (dof - 2), dof, jnp.zeros_like(mean))
