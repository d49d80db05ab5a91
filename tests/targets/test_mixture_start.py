"""The mixture's particles start as draws from its prior."""

import jax
import numpy as np

import opvi


def test_the_mixture_starts_from_its_prior():
    """The variances of 4,000 draws lie within 5 standard errors, 11 %, of the prior's; so do means and correlation."""
    count, variance = 4000, np.array([9.0, 0.25])
    target = opvi.gaussian_mixture(prior_variance=(9.0, 0.25))
    draws = np.asarray(opvi.draw(target, jax.random.key(0), count), float)
    np.testing.assert_allclose(draws.var(0), variance, rtol=5 * np.sqrt(2 / count))
    np.testing.assert_allclose(draws.mean(0) / np.sqrt(variance), 0, atol=5 / np.sqrt(count))
    assert abs(np.corrcoef(draws.T)[0, 1]) < 5 / np.sqrt(count)
