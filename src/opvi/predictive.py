"""Predictions from particles: a mixture of what each particle says, with its uncertainty taken apart."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm

from opvi.distributions import Bernoulli, Categorical, Distribution, Normal
from opvi.targets import Target
from opvi.types import Array, Key, Particles

QUANTILE_STEPS = 60  # halvings of the bracket; more than a float's digits


class Uncertainty(NamedTuple):
    """A prediction's uncertainty in two parts that add up to the whole.

    Regression: variances (law of total variance). Classification: entropies in nats, where the
    epistemic part is the mutual information between y and the parameters.
    """

    epistemic: Array  # what more data would take away
    aleatoric: Array  # what no amount of data takes away


class Predictive(NamedTuple):
    """The posterior predictive distribution at new inputs: an even mixture over particles."""

    components: Distribution  # leaves [n, B] or [n, B, C]

    def _normal(self, what: str) -> Normal:
        if isinstance(self.components, Normal):
            return self.components
        name = type(self.components).__name__
        raise TypeError(f"{what} is not defined for a {name} head. Use `probabilities()` for classes.")

    def _discrete(self) -> Bernoulli | Categorical:
        if isinstance(self.components, Normal):
            raise TypeError(
                "class probabilities are not defined for a Normal head. Use `mean()`, `sd()`, `quantile()`."
            )
        return self.components

    def aligned(self, y: Any) -> Array:
        """y as an array with one value a row; anything else would broadcast to a wrong answer without a word."""
        rows = jax.tree.leaves(self.components)[0].shape[1]
        y = jnp.asarray(y)
        if y.shape != (rows,):
            raise ValueError(f"`y` has shape {y.shape}, but there are predictions for {rows} rows: shape ({rows},).")
        return y

    def mean(self) -> Array:
        """The predictive mean; for a Bernoulli head, the probability of 1."""
        if isinstance(self.components, Normal):
            return self.components.mean.mean(0)
        if isinstance(self.components, Bernoulli):
            return self.probabilities()[:, 1]
        raise TypeError("the mean of class indices means nothing. Use `probabilities()` or `classes()`.")

    def sd(self) -> Array:
        """The predictive standard deviation: parameters and noise."""
        self._normal("a standard deviation")
        parts = self.uncertainty()
        return jnp.sqrt(parts.epistemic + parts.aleatoric)

    def uncertainty(self) -> Uncertainty:
        """Epistemic and aleatoric parts, row by row."""
        if isinstance(self.components, Normal):
            return Uncertainty(self.components.mean.var(0), self.components.variance.mean(0))
        log_p = self._discrete().log_probabilities()
        total = _entropy(self.log_probabilities())
        aleatoric = _entropy(log_p).mean(0)
        return Uncertainty(jnp.maximum(total - aleatoric, 0), aleatoric)

    def log_density(self, y: Array) -> Array:
        """The log predictive density of y, row by row."""
        values = self.components.log_density(self.aligned(y)[None])
        return logsumexp(values, axis=0) - math.log(len(values))

    def cdf(self, y: Array) -> Array:
        """P(Y ≤ y), row by row; uniform over rows if the model is calibrated."""
        normal = self._normal("a distribution function")
        z = (jnp.asarray(y)[None] - normal.mean) / jnp.sqrt(normal.variance)
        return norm.cdf(z).mean(0)

    def quantile(self, q: Any) -> Array:
        """Quantiles of the mixture (not of its Gaussian approximation): shape `[B]`, or `[len(q), B]`."""
        normal = self._normal("a quantile")
        q = jnp.asarray(q, normal.mean.dtype)
        if not bool(((q > 0) & (q < 1)).all()):
            raise ValueError(f"`q` is {q}, but a quantile's level must lie strictly between 0 and 1.")
        # Every component's own quantile brackets the mixture's.
        mean, sd = normal.mean, jnp.sqrt(normal.variance)
        levels = q.reshape(-1)
        edges = mean[None] + sd[None] * norm.ppf(levels)[:, None, None]
        bracket = edges.min(1), edges.max(1)

        def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bracket
            middle = (low + high) / 2
            below = jax.vmap(self.cdf)(middle) < levels[:, None]
            return jnp.where(below, middle, low), jnp.where(below, high, middle)

        low, high = jax.lax.fori_loop(0, QUANTILE_STEPS, halve, bracket)
        return ((low + high) / 2).reshape(*q.shape, -1)

    def interval(self, coverage: float = 0.9) -> tuple[Array, Array]:
        """The central interval that holds y with probability `coverage`."""
        if not 0 < coverage < 1:
            raise ValueError(f"`coverage` is {coverage}, but must lie strictly between 0 and 1.")
        low, high = self.quantile([(1 - coverage) / 2, (1 + coverage) / 2])
        return low, high

    def log_probabilities(self) -> Array:
        """Log class probabilities, `[B, C]`."""
        log_p = self._discrete().log_probabilities()
        return logsumexp(log_p, axis=0) - math.log(len(log_p))

    def probabilities(self) -> Array:
        """Class probabilities, `[B, C]`."""
        return jnp.exp(self.log_probabilities())

    def classes(self) -> Array:
        """The most probable class of each row."""
        return self.log_probabilities().argmax(-1)

    def sample(self, key: Key, draws: int) -> Array:
        """`draws` draws of y at every row: `[draws, B]`; each from a particle picked at random."""
        pick, noise = jax.random.split(key)
        n = len(jax.tree.leaves(self.components)[0])
        index = jax.random.randint(pick, (draws,), 0, n)
        return jax.tree.map(lambda leaf: leaf[index], self.components).sample(noise)


def _entropy(log_p: Array) -> Array:
    return -(jnp.exp(log_p) * jnp.where(jnp.isfinite(log_p), log_p, 0)).sum(-1)


def predict(target: Target, particles: Particles, x: Any) -> Predictive:
    """The posterior predictive at inputs x.

    Args:
        target: one with `predict`: every ready-made regression and classification model has it.
        particles: `state.particles`.
        x: inputs with a leading axis of rows, as the model takes them.
    """
    one = target.predict
    if one is None:
        raise TypeError("this target has no `predict`; give one: `opvi.target(..., predict=...)`.")
    x = jax.tree.map(lambda a: jnp.asarray(a, particles.dtype), x)
    return Predictive(jax.vmap(lambda theta: one(target.unravel(theta), x))(particles))
