"""Rows as NumPyro's examples have them: latents of single rows, one distribution for all, networks, scans."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import random_flax_module
from numpyro.infer.util import potential_energy
from scipy import integrate, stats

import opvi
from opvi import from_numpyro

RNG = np.random.default_rng(0)
Y = RNG.normal(1.0, 2.0, size=6).astype(np.float32)
COUNT = RNG.poisson(5.0, size=6)


@pytest.fixture(autouse=True)
def _defaults_of_jax():
    """NumPyro itself does not compute under the suite's strictness."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def effects(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(y)):
        effect = numpyro.sample("effect", dist.Normal(mean, spread))
        numpyro.sample("y", dist.Normal(effect, 0.5), obs=y)


def overdispersed(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        rate = numpyro.sample("rate", dist.LogNormal(mean, 0.7))
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def pairs(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        level = numpyro.sample("level", dist.Normal(mean, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(level, 0.5).to_event(1), obs=y)


@pytest.mark.slow
def test_latents_of_rows_are_summed_out():
    target = from_numpyro(effects, Y)
    assert target.dim == 2
    theta = {"mean": jnp.array(0.4), "spread": jnp.log(jnp.array(0.8))}
    exact = stats.norm.logpdf(Y, 0.4, np.hypot(0.8, 0.5))
    np.testing.assert_allclose(jax.jit(target.log_likelihood)(theta, Y), exact, rtol=1e-4)
    slope = jax.jit(jax.grad(lambda theta: target.log_likelihood(theta, Y).sum()))(theta)["mean"]
    np.testing.assert_allclose(slope, ((Y - 0.4) / (0.8**2 + 0.5**2)).sum(), rtol=1e-3)
    particles = jnp.stack([target.ravel(theta)] * 3)
    assert list(target.constrain(particles)) == ["mean", "spread"]
    assert target.log_likelihoods(particles, Y)["y"].shape == (3, 6)
    assert target.sample(0, particles, Y)["y"].shape == (3, 6)


@pytest.mark.slow
def test_a_latent_with_a_support_is_summed_out_by_quadrature():
    target = from_numpyro(overdispersed, COUNT)

    def exact(k):
        joint = lambda z: np.exp(stats.norm.logpdf(z, 0.9, 0.7) + stats.poisson.logpmf(k, np.exp(z)))  # noqa: E731
        return np.log(integrate.quad(joint, -6, 8)[0])

    found = jax.jit(target.log_likelihood)({"mean": jnp.array(0.9)}, COUNT)
    np.testing.assert_allclose(found, [exact(k) for k in COUNT], atol=2e-4)


@pytest.mark.slow
def test_several_latents_of_a_row_are_summed_out_by_weighed_points():
    y = RNG.normal(size=(5, 2)).astype(np.float32)
    found = jax.jit(from_numpyro(pairs, y).log_likelihood)({"mean": jnp.array(0.3)}, y)
    exact = stats.norm.logpdf(y, 0.3, np.hypot(1.0, 0.5)).sum(1)
    np.testing.assert_allclose(found, exact, atol=0.02)


def test_one_distribution_may_be_that_of_all_rows():
    def plated(y):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(mean, 2.0), obs=y)

    def scalar(y):
        numpyro.sample("y", dist.Normal(numpyro.sample("mean", dist.Normal(0, 1)), 2.0), obs=y)

    theta = {"mean": jnp.array(0.3)}
    ours, theirs = (from_numpyro(model, Y).log_likelihood(theta, Y) for model in (scalar, plated))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_a_flax_network_with_a_prior_on_all_weights():
    def model(x, y):
        net = random_flax_module("net", nn.Dense(1), dist.Normal(0, 1), input_shape=(2,))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(net(x)[:, 0], 0.5), obs=y)

    x = RNG.normal(size=(6, 2)).astype(np.float32)
    target = from_numpyro(model, (x, Y))
    assert target.dim == 3
    particle = opvi.draw(target, 0, 1)
    sites = target.constrain(particle)
    mean = x @ np.asarray(sites["net/kernel"][0])[:, 0] + np.asarray(sites["net/bias"][0])
    exact = stats.norm.logpdf(Y, mean, 0.5)
    np.testing.assert_allclose(target.log_likelihood(target.unravel(particle[0]), (x, Y)), exact, rtol=1e-4)
    assert target.predict is not None


def autoregression(y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))

    def step(before, now):
        numpyro.sample("y", dist.Normal(slope * before, spread), obs=now)
        return now, slope * before

    _, mean = scan(step, y[1], y[2:])  # in a batch of two rows there would be nothing to scan
    numpyro.deterministic("mean", mean)
    numpyro.deterministic("variance", spread**2)


def test_scans_over_rows_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match="lies in a scan.*rows before it.*columns.*series=True"):
        from_numpyro(autoregression, Y)


def test_a_row_can_be_a_whole_series():
    target = from_numpyro(autoregression, Y[None], series=True)
    params = target.init(jax.random.key(1))
    two = jnp.stack([jnp.asarray(Y), jnp.asarray(Y[::-1])])
    found = jax.jit(target.log_likelihood)(params, two)
    for series, ours in zip(two, found, strict=True):
        exact = -potential_energy(autoregression, (series,), {}, params)
        np.testing.assert_allclose(target.log_prior(params) + ours, exact, rtol=1e-5)
    particles = jnp.stack([target.ravel(params)] * 3)
    assert list(target.constrain(particles)) == ["slope", "spread", "variance"]  # not `mean`, which depends on the data
    assert target.log_likelihoods(particles, two)["y"].shape == (3, 2)
    drawn = target.sample(0, particles, two)["y"]
    assert drawn.shape == (3, 2, 4)
    assert len(np.unique(drawn)) == 24
    assert opvi.tracker(target).about.startswith("IBIS")


def captures(seen, sex):
    """A state of each row, alive or not, that follows its history; a chance of staying alive for every time."""
    found = numpyro.sample("found", dist.Uniform(0.0, 1.0))

    def step(alive, now):
        stays = numpyro.sample("stays", dist.Beta(2.0, 1.0))
        with numpyro.plate("rows", len(seen)):
            alive = numpyro.sample("alive", dist.Bernoulli(0.01 + 0.98 * stays * alive))
            numpyro.sample("seen", dist.Bernoulli(0.01 + 0.98 * found * alive), obs=now)
        return alive, None

    scan(step, jnp.ones(len(seen), int), seen.T)


def test_discrete_latents_of_rows_are_summed_out_in_scans_too():
    seen, sex = np.array([[1, 0, 1], [0, 0, 0], [1, 1, 0]]), np.zeros(3)
    target = from_numpyro(captures, (seen, sex))
    assert target.dim == 4  # `found`, and `stays` for each of the three times
    params = {"found": jnp.array(0.4), "stays": jnp.array([0.3, -0.2, 1.0])}
    found, stays = (1 / (1 + np.exp(-np.asarray(params[name]))) for name in ("found", "stays"))

    def forward(history):
        belief = np.array([0.0, 1.0])  # dead, alive
        for chance, now in zip(stays, history, strict=True):
            move = np.array([[0.99, 0.01], [0.99 - 0.98 * chance, 0.01 + 0.98 * chance]])
            sight = 0.01 + 0.98 * found * np.array([0, 1])
            belief = belief @ move * (sight if now else 1 - sight)
        return np.log(belief.sum())

    exact = [forward(history) for history in seen]
    np.testing.assert_allclose(jax.jit(target.log_likelihood)(params, (seen, sex)), exact, rtol=1e-5)
    prior = np.log(found * (1 - found)) + (stats.beta(2, 1).logpdf(stays) + np.log(stays * (1 - stays))).sum()
    np.testing.assert_allclose(target.log_prior(params), prior, rtol=1e-5)


def kinds(y, kind):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean * numpyro.sample("kind", kind), 1.0), obs=y)


def times(y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(slope * jnp.arange(len(y)), 1.0), obs=y)


def centred(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(y.mean(), scale), obs=y)


@pytest.mark.parametrize(
    ("model", "series", "said"),
    [
        (lambda y: kinds(y, dist.Poisson(2.0)), False, "site 'kind' is latent and discrete .Poisson. with values that"),
        (lambda y: kinds(y, dist.Categorical(jnp.ones(2000) / 2000)), False, "can be 2,000 different things"),
        (lambda y: kinds(y, dist.Bernoulli(0.5)), True, "site 'kind' is latent and discrete"),
        (times, False, "depends on the row's place in the batch.*as columns of its own.*series=True"),
        (centred, False, "depends on the row's place in the batch or on other rows"),
        (lambda y: numpyro.sample("mean", dist.Normal(0, 1)), True, "nothing that the model observes depends on"),
    ],
)
def test_rows_that_cannot_be_learnt_one_by_one_are_refused(model, series, said):
    with pytest.raises((TypeError, ValueError), match=said):
        from_numpyro(model, Y[None] if series else Y, series=series)
