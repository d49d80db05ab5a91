r"""Posteriors of linear-Gaussian models as natural parameters, to exchange them, add them up or change their prior."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from opvi.filters._gauss_newton import GaussNewton, GaussNewtonState
from opvi.filters._prior import distribution, gaussian_prior, linear_outputs
from opvi.predictive import Normal
from opvi.types import Sampler, State, Tree


class Natural(NamedTuple):
    r"""Gaussians as $\eta = \Lambda \mu$ and $\Lambda$, in float64: products of densities are sums of these."""

    shift: np.ndarray  # [..., d]
    precision: np.ndarray  # [..., d, d]

    @property
    def mean(self) -> np.ndarray:
        """The mean."""
        return np.linalg.solve(self.precision, self.shift[..., None])[..., 0]

    @property
    def covariance(self) -> np.ndarray:
        """The covariance."""
        return np.linalg.inv(self.precision)

    def normaliser(self) -> np.ndarray:
        r"""Return $\log \int e^{\eta^\top x - x^\top \Lambda x / 2} \, dx$."""
        quadratic = (self.shift * self.mean).sum(-1) - np.linalg.slogdet(self.precision)[1]
        return (quadratic + self.shift.shape[-1] * math.log(2 * math.pi)) / 2


def gaussian(mean: np.ndarray, covariance: np.ndarray) -> Natural:
    """Return the natural parameters of Gaussians."""
    precision = np.linalg.inv(np.asarray(covariance, float))
    return Natural((precision @ np.asarray(mean, float)[..., None])[..., 0], precision)


def prior_of(sampler: Sampler, inputs: Tree = None) -> Natural:
    """Return the prior of a linear-Gaussian model; refuse all other models.

    Args:
        sampler: `gauss_newton` of a target that is linear in its parameters, with a Gaussian prior and known Gaussian
            noise.
        inputs: some rows of inputs, for targets that are not opvi's own.
    """
    if isinstance(sampler, GaussNewton) and sampler.robust is not None:
        raise ValueError(
            f"`robust` is {sampler.robust:g}: what each row counts depends on the rows before it, so nothing exact can "
            "be done to the posterior afterwards. Use `robust=None`."
        )
    if not isinstance(sampler, GaussNewton) or sampler.noise is not None:
        raise TypeError(
            f"`sampler` is a {type(sampler).__name__}, whose posterior is not one Gaussian with known noise. That of "
            "`opvi.gauss_newton(opvi.linear_regression(d))` is."
        )
    target, prior = sampler.target, gaussian_prior(sampler.target)
    if inputs is None and target.architecture is not None:
        inputs = np.zeros((1, target.architecture.mlp.sizes[0]), np.float32)
    if inputs is None:
        raise ValueError("the outputs of this target are unknown: give some rows of `inputs` to evaluate them.")
    regression = isinstance(distribution(target, jnp.zeros(target.dim), inputs), Normal)
    if prior is None or not regression or not linear_outputs(target, inputs):
        raise TypeError(
            "this target is not a linear model with a Gaussian prior and Gaussian noise, so its posterior is not a "
            "Gaussian and cannot be computed exactly. `opvi.linear_regression` is one."
        )
    return gaussian(prior.mean, np.diag(prior.variance) if prior.covariance is None else prior.covariance)


def posterior_of(sampler: GaussNewton, states: State, prior: Natural) -> Natural:
    """Return the posteriors of states with leaves `[..., n, d]` and so on; the prior if no row was learnt."""
    matrices = np.asarray(states.past.matrices)  # type: ignore[attr-defined]
    if matrices.shape[-3] > 1:
        raise ValueError(
            f"the covariance was cut into {matrices.shape[-3]} blocks. Give the sampler a larger `budget`."
        )
    found = gaussian(np.asarray(states.particles)[..., 0, :], matrices[..., 0, 0, :, :])
    begun = np.asarray(states.round) > 0
    return Natural(
        np.where(begun[..., None], found.shift, prior.shift),
        np.where(begun[..., None, None], found.precision, prior.precision),
    )


def with_posterior(states: GaussNewtonState, posterior: Natural) -> GaussNewtonState:
    """Return states with the particles and covariances of these posteriors."""
    w, C = states.particles, states.past.matrices
    mean = np.broadcast_to(posterior.mean[..., None, :], w.shape)
    covariance = np.broadcast_to(posterior.covariance[..., None, None, :, :], C.shape)
    past = states.past._replace(matrices=jnp.asarray(covariance, C.dtype))
    return states._replace(particles=jnp.asarray(mean, w.dtype), past=past)


def never_forgetting(sampler: Sampler) -> GaussNewton:
    """Return the sampler; refuse one that forgets."""
    assert isinstance(sampler, GaussNewton)
    if sampler.forgetting != 1.0 or sampler.half_life not in (None, math.inf):
        raise ValueError(
            "this sampler forgets, so the age of a row and its remaining weight are unknown. Use `forgetting=1`."
        )
    return sampler


def merge(sampler: Sampler, *states: State, inputs: Tree = None) -> State:
    r"""Return the posterior given all rows, from posteriors learnt on parts of them.

    $$p(x \mid D_1, \dots, D_k) \propto p_0(x)^{1-k} \prod_i p(x \mid D_i)$$

    It is exact, as is `log_evidence`, for models that are linear in their parameters, have a Gaussian prior and known
    Gaussian noise, and forget nothing; others are refused.

    Args:
        sampler: `opvi.gauss_newton(target, forgetting=1)`, shared by all states.
        states: states learnt on different rows, all from the sampler's own prior.
        inputs: some rows of inputs, for targets that are not opvi's own.
    """
    prior = prior_of(sampler, inputs)
    sampler = never_forgetting(sampler)
    if not states:
        raise ValueError("there are no states to merge; give at least one.")
    parts = [posterior_of(sampler, state, prior) for state in states]
    rest = 1 - len(parts)
    whole = Natural(*(sum(each) + rest * base for each, base in zip(zip(*parts, strict=True), prior, strict=True)))
    evidence = float(whole.normaliser() - rest * prior.normaliser())
    for state, part in zip(states, parts, strict=True):
        evidence += float(state.log_evidence - part.normaliser())  # type: ignore[attr-defined]
    first: GaussNewtonState = states[0]  # type: ignore[assignment]
    return with_posterior(first, whole)._replace(
        log_evidence=jnp.asarray(evidence, first.particles.dtype),
        round=jnp.asarray(sum(int(state.round) for state in states), jnp.int32),
        rows=jnp.asarray(sum(int(state.rows) for state in states), jnp.int32),
    )
