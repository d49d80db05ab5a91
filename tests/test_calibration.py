"""Simulation-based calibration: where parameters come from the prior, their ranks among posterior draws are uniform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm
from scipy import stats

import opvi
from opvi.types import StoresRows

WORLDS, ROWS, BATCH, RANKS = 160, 30, 15, 11  # eleven draws make twelve ranks
# What ranks do where draws are shifted, and where they are too narrow or too wide; each of mean 0 and variance 1.
SHIFT = stats.zscore(np.arange(RANKS + 1))
WIDTH = stats.zscore(SHIFT**2)


def said(w, x):
    return opvi.Normal(x @ w, jnp.full(x.shape[:1], 0.5, x.dtype))


def start(key):
    return jax.random.normal(key, (2,))


def log_prior(w):
    return norm.logpdf(w).sum()


LINE = opvi.target(log_prior, lambda w, rows: said(w, rows[0]).log_density(rows[1]), start, said)
LOGIT = opvi.target(log_prior, lambda w, rows: jax.nn.log_sigmoid(rows[1] * (rows[0] @ w)), start)
OPTIMISED = {"xla_backend_optimization_level": 2, "xla_llvm_disable_expensive_passes": False}
PACE = opvi.filters.Pace(looks=30)
CASES = {
    "gauss_newton": (opvi.gauss_newton(LINE, half_life=float("inf")), LINE, 4),
    "gain_one": (opvi.gain_one(LINE, substeps=1), LINE, 40),
    "ibis": (opvi.ibis(LOGIT), LOGIT, 128),
    "sl_opvi": (opvi.sl_opvi(LINE, pace=PACE), LINE, 40),
}


@pytest.mark.slow  # 160 posteriors of each sampler
@pytest.mark.parametrize("name", CASES)
def test_ranks_of_the_truth_are_uniform(name):
    sampler, target, particles = CASES[name]

    def world(key):
        one, two, three, four = jax.random.split(key, 4)
        w = start(one)
        x = jax.random.normal(two, (ROWS, 2))
        if target is LINE:
            y = x @ w + jnp.sqrt(0.5) * jax.random.normal(three, (ROWS,))
        else:
            y = jnp.where(jax.random.uniform(three, (ROWS,)) < jax.nn.sigmoid(x @ w), 1.0, -1.0)
        rows = opvi.Batch((x.reshape(-1, BATCH, 2), y.reshape(-1, BATCH)), jnp.ones((ROWS // BATCH, BATCH)))
        state = sampler.init(four, particles)
        if isinstance(sampler, StoresRows):
            state = sampler.make_room(state, jax.tree.map(lambda a: a[0], rows), ROWS // BATCH)
        return w, jax.lax.scan(lambda state, batch: (sampler.step(key, state, batch)[0], None), state, rows)[0]

    truth, states = jax.jit(lambda keys: jax.lax.map(world, keys))(jax.random.split(jax.random.key(1), WORLDS))
    # One by one: chains that have not arrived take longer, and should not keep those of other worlds waiting.
    # Optimised, unlike most of the suite: a small program that runs for long.
    draw = jax.jit(lambda of: jax.lax.map(lambda one: sampler.draws(*one, RANKS), of), compiler_options=OPTIMISED)
    draws = draw((states, jax.random.split(jax.random.key(2), WORLDS)))
    ranks = np.asarray((draws < truth[:, None]).sum(1))  # [worlds, 2]
    for column in ranks.T:
        assert stats.chisquare(np.bincount(column, minlength=RANKS + 1)).pvalue > 1e-3
        # Finds draws a quarter too narrow three times in four; twelve counts would need 240 worlds for that.
        moved = SHIFT[column].sum() ** 2 + WIDTH[column].sum() ** 2
        assert stats.chi2.sf(moved / WORLDS, 2) > 1e-3
