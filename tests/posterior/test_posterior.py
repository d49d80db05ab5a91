"""Named draws and their table, effective numbers, Pareto-smoothed weights, probability integral transforms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi._steps import posterior_of
from opvi.posterior import (
    Posterior,
    calibration_of,
    concerns_of_predictions,
    effective_numbers,
    pareto_k,
    smooth_weights,
    unevenness,
)

RNG = np.random.default_rng(0)
LINE = opvi.target(
    lambda p: -(p["slope"] ** 2).sum() / 2 - p["base"] ** 2 / 2,
    lambda p, rows: -((rows[1] - rows[0] @ p["slope"] - p["base"]) ** 2) / 2,
    lambda key: {"slope": jax.random.normal(key, (2,)), "base": jnp.ones(())},
)


def test_draws_have_the_names_of_the_parameters():
    sampler = opvi.langevin(LINE, step=0.1)
    state = sampler.init(0, 50)
    posterior = sampler.posterior(state, key=1, n=100)
    assert set(posterior) == {"slope", "base"}
    assert posterior["slope"].shape == (100, 2)
    np.testing.assert_array_equal(posterior.matrix, sampler.draws(state, jax.random.key(1), 100))
    np.testing.assert_array_equal(posterior["slope"], posterior.matrix[:, 1:])  # after `base`, in order of names
    with pytest.raises(KeyError, match="'slop' is not a parameter of this model; its parameters are: base, slope"):
        posterior["slop"]
    alone = opvi.langevin(opvi.gaussian_mixture(), step=0.1)
    assert list(alone.posterior(alone.init(0))) == ["theta"]


def test_a_table_of_them():
    x = RNG.normal([0.0, 1000.0], [1.0, 20.0], (4000, 2))
    posterior = Posterior({"a": x[:, 0], "b": x[:, 1:]}, x, 12, 3, "ours")
    made = posterior.summary()
    assert made.names == ["a", "b[0]"]
    line = made["b[0]"]
    assert line["mean"] == pytest.approx(1000, abs=5 * 20 / 4000**0.5)
    assert line["95 %"] == pytest.approx(1000 + 1.645 * 20, abs=5 * 2.1 * 20 / 4000**0.5)
    assert line["effective"] == 4000
    lines = str(made).splitlines()
    assert len({len(one) for one in lines[:3]}) == 1  # aligned
    assert lines[-1] == "4,000 draws; 12 rows learnt"
    assert str(posterior) == str(made)
    big = Posterior({"w": np.zeros((2, 100))}, np.zeros((2, 100)), 0, 0, "").summary()
    assert "… and 40 more" in str(big)


def test_effective_numbers_of_chains_of_repeats_and_of_independent_draws():
    n, rho = 4000, 0.8
    independent = RNG.normal(size=(n, 1))
    assert effective_numbers(independent) == n
    noise = RNG.normal(size=(n // 20, 20)) * np.sqrt(1 - rho**2)
    chains = [RNG.normal(size=20)]
    for one in noise[1:]:
        chains.append(rho * chains[-1] + one)
    expected = n * (1 - rho) / (1 + rho)
    together = np.stack(chains).reshape(-1, 1)  # one draw of each chain after the other
    assert effective_numbers(together)[0] == pytest.approx(expected, rel=0.3)
    assert effective_numbers(np.stack(chains, 1).reshape(-1, 1))[0] == pytest.approx(expected, rel=0.3)
    repeats = RNG.permutation(np.tile(RNG.normal(size=(100, 1)), (10, 1)))
    assert effective_numbers(repeats)[0] <= 100
    assert np.isnan(effective_numbers(independent * np.nan))


def test_what_is_not_the_posterior_says_so_once():
    sampler = dataclasses.replace(opvi.langevin(LINE, step=0.1), about="not the posterior: a test")
    state = sampler.init(0, 5)
    with pytest.warns(UserWarning, match="^these draws are not the posterior: a test"):
        sampler.posterior(state)
    sampler.posterior(state)  # a second warning would be an error


def test_wrappers_and_samplers_without_a_target():
    wrapped = opvi.calibrated(
        opvi.langevin(opvi.linear_regression(1), step=0.1), opvi.linear_regression(1), particles=5
    )
    assert posterior_of(wrapped, wrapped.init(0), 0, 7)["weights.0.bias"].shape == (7, 1)
    regressor = opvi.regressor(1, hidden=(), particles=4)
    assert posterior_of(regressor, regressor.init(0), 0, 7)["weights"].shape == (7, 2)


def test_pareto_k():
    rng = np.random.default_rng(1)
    tails = rng.pareto(1 / 0.8, size=(20_000, 1))
    k = pareto_k(np.log(np.concatenate([tails, rng.uniform(size=tails.shape), np.ones_like(tails)], 1)))
    assert abs(k[0] - 0.8) < 0.15
    assert k[1] < 0
    assert k[2] == -np.inf


@pytest.mark.filterwarnings("ignore")
def test_smoothed_weights_are_arvizs():
    arviz = pytest.importorskip("opvi.adapters.arviz").arviz
    if not hasattr(arviz, "psislw"):
        pytest.skip("ArviZ 1 keeps it elsewhere")
    log_weights = RNG.normal(size=(500, 4)) * [0.1, 1.0, 2.0, 4.0]
    ours = smooth_weights(log_weights)
    theirs, k = arviz.psislw(log_weights.T.copy())
    np.testing.assert_allclose(ours.k, k, atol=1e-6)
    np.testing.assert_allclose(ours.log_weights, np.asarray(theirs).T, atol=1e-6)
    np.testing.assert_allclose(np.exp(ours.log_weights).sum(0), 1)


def test_unevenness():
    assert unevenness(np.linspace(0.005, 0.995, 100)) < 0.2
    assert unevenness(np.full(100, 0.5)) == pytest.approx(5)
    x = RNG.uniform(size=300)
    low, high = np.floor(x * 4) / 4, np.floor(x * 4) / 4 + 0.25  # a count with four values, all as likely
    assert unevenness(high, low) < 1.5
    assert unevenness(high) > 3  # as if it were continuous
    assert unevenness(high**3, low**3) > 3
    assert np.isnan(unevenness(np.array([np.nan])))


@pytest.mark.parametrize(("dispersion", "flagged"), [(None, False), (2.0, True)], ids=["Poisson", "overdispersed"])
def test_overdispersed_counts_are_flagged(dispersion, flagged):
    """Counts of mean 20; with a gamma-distributed rate, about half are in the Poisson's 90 % intervals."""
    from scipy.stats import poisson

    n, rows, mean = 200, 400, 20.0
    rate = mean if dispersion is None else mean * RNG.gamma(dispersion, 1 / dispersion, rows)
    y = RNG.poisson(rate, rows)
    centre = y.mean() if flagged else mean
    draws = (centre + np.sqrt(mean / rows) * RNG.normal(size=n))[:, None]
    found = calibration_of(poisson.logpmf(y, draws), poisson.cdf(y, draws), poisson.cdf(y - 1, draws))
    said = concerns_of_predictions(found)
    assert bool(said) == flagged
    if flagged:
        assert found.inside < 0.65
        assert "too narrow" in said[0]
        assert f"hold {found.inside:.0%}" in said[0]
    else:
        assert found.spread == pytest.approx(1, abs=4 * 12 / np.sqrt(180 * rows))
        wide = concerns_of_predictions(found._replace(uneven=5.0, spread=0.5))
        assert "too wide" in wide[0]
        assert "a term" in concerns_of_predictions(found._replace(uneven=5.0, spread=1.0))[0]
