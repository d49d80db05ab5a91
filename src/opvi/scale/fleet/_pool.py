r"""What the models of many keys have in common: a Gaussian population, learnt from their posteriors."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from opvi.filters._gauss_newton import GaussNewton
from opvi.filters._merging import Natural, gaussian, posterior_of, prior_of, with_posterior
from opvi.types import Sampler, State, Tree

STEPS = 500
CLOSE = 1e-6  # relative change of mean and covariance at which the population is settled


class Population(NamedTuple):
    r"""The distribution of the models' parameters, $x_k \sim N(m, S)$."""

    mean: np.ndarray  # m: [d]
    covariance: np.ndarray  # S: [d, d]
    models: int  # from which it was learnt


def pooled(sampler: Sampler, states: State, inputs: Tree = None) -> Population:
    r"""Return the population that the models come from, by maximum likelihood (empirical Bayes).

    What model k's rows say of $x_k$, its posterior over its prior, is a Gaussian with natural parameters
    $\eta_k, \Lambda_k$. EM repeats, exactly for linear-Gaussian models,

    $$C_k = (\Lambda_k + S^{-1})^{-1}, \quad \mu_k = C_k (\eta_k + S^{-1} m), \qquad
      m = \overline{\mu_k}, \quad S = \overline{C_k + (\mu_k - m)(\mu_k - m)^\top}$$

    Args:
        sampler: `opvi.gauss_newton` of a linear model with Gaussian prior and noise; others are refused.
        states: the models' states, leaves `[models, ...]`.
        inputs: some rows of inputs, for targets that are not opvi's own.
    """
    prior = prior_of(sampler, inputs)
    said = _likelihood(sampler, states, prior)
    said = Natural(*(part[np.asarray(states.round) > 0] for part in said))
    count, d = said.shift.shape
    mean, covariance = prior.mean, prior.covariance
    if count <= d:  # so few say nothing of a covariance
        return Population(mean, covariance, count)
    for _ in range(STEPS):
        base = gaussian(mean, covariance)
        each = Natural(said.shift + base.shift, said.precision + base.precision)
        C, mu = each.covariance, each.mean
        before, mean = (mean, covariance), mu.mean(0)
        covariance = (C + (mu - mean)[:, :, None] * (mu - mean)[:, None, :]).mean(0)
        scale = np.sqrt(np.diag(covariance))
        moved = (
            np.abs((mean - before[0]) / scale).max(),
            np.abs((covariance - before[1]) / np.outer(scale, scale)).max(),
        )
        if max(moved) < CLOSE:
            break
    return Population(mean, covariance, count)


def with_population(sampler: Sampler, states: State, population: Population, inputs: Tree = None) -> State:
    """Return states with the population as the prior instead of the sampler's own."""
    base, said = gaussian(*population[:2]), _likelihood(sampler, states, prior_of(sampler, inputs))
    posterior = Natural(said.shift + base.shift, said.precision + base.precision)
    made = with_posterior(states, posterior)  # type: ignore[arg-type]
    return made._replace(round=jnp.maximum(made.round, 1))  # at round 0 a sampler would go by its prior


def _likelihood(sampler: Sampler, states: State, prior: Natural) -> Natural:
    """Return what the rows alone say: posteriors divided by the prior."""
    assert isinstance(sampler, GaussNewton)
    found = posterior_of(sampler, states, prior)
    return Natural(found.shift - prior.shift, found.precision - prior.precision)
