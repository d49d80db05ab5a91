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


def test_scans_over_rows_are_refused_with_a_remedy():
    def autoregression(y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))

        def step(before, now):
            numpyro.sample("y", dist.Normal(slope * before, 1.0), obs=now)
            return now, None

        scan(step, y[0], y[1:])

    with pytest.raises(ValueError, match="lies in a scan.*rows before it.*columns"):
        from_numpyro(autoregression, Y)
