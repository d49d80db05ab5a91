"""Whether stored rows look like what the model predicts of them."""

from functools import partial
from typing import Any

import jax
import numpy as np

from opvi.checks._rows import stored
from opvi.posterior import Calibration, calibration_of
from opvi.predictive import NegativeBinomial, Normal, Poisson, StudentT
from opvi.targets import Target
from opvi.types import Array, Data, Particles, Sampler, Seed, State, as_key

MOST = 2000  # rows that are looked at


def calibration(sampler: Sampler, state: State, key: Seed = 0, n: int = 1000) -> Calibration:
    """Return how the rows that a sampler stores look beside what the model predicts of each from all others.

    `opvi.posterior.concerns_of_predictions(calibration)` says it in words. It is nan for classes, which have no
    intervals.

    Args:
        sampler: one that stores rows, such as `opvi.tracker(target)`, of a target that predicts numbers or counts.
        state: where it stands.
        key: a JAX key or an integer seed for the draws.
        n: draws from the posterior.
    """
    known = stored(sampler, state, key, n)
    rows = len(known.weight)
    if rows > MOST:
        few = np.random.default_rng(0).choice(rows, MOST, replace=False)
        known = known._replace(data=jax.tree.map(lambda leaf: leaf[few], known.data), weight=known.weight[few])
    likelihoods, below, before = [], [], []
    for block in known.blocks():
        found = transforms(known.target, known.draws, block.data, key)
        if found is None:
            return Calibration(np.nan, np.nan, np.nan, rows)
        likelihoods.append(block.log_likelihood)
        below.append(np.asarray(found[0], float))
        before.append(np.asarray(found[1], float))
    return calibration_of(*(np.concatenate(parts, 1) for parts in (likelihoods, below, before)))


def transforms(target: Target, draws: Particles, data: Data, key: Seed = 0) -> tuple[Array, Array] | None:
    """Return P(Y ≤ y) and P(Y < y) of each row by each draw, `[n, rows]`; None where there is no such thing."""
    pair = isinstance(data, tuple | list) and len(data) == 2
    if target.predict is not None and pair:
        return _by_distribution(target, draws, data)
    named: Any = target
    if not hasattr(named, "program"):  # no NumPyro model, which draws its sites
        return None
    drawn, observed = named.sample(as_key(key), draws, data), named.program.observations(data)
    if len(drawn) != 1:
        return None
    name, values = next(iter(drawn.items()))
    y = np.asarray(observed[name])
    if values.ndim != 2 or y.shape != values.shape[1:]:
        return None
    return values <= y[None], values < y[None]


@partial(jax.jit, static_argnums=0)
def _by_distribution(target: Target, draws: Particles, data: Data) -> tuple[Array, Array] | None:
    said = jax.vmap(lambda v: target.predict(target.unravel(v), data[0]))(draws)  # type: ignore[misc]
    y = data[1][None].astype(draws.dtype)
    if isinstance(said, Poisson | NegativeBinomial):
        return said.cdf(y), said.cdf(y - 1)
    if isinstance(said, Normal | StudentT):
        return said.cdf(y), said.cdf(y)
    return None
