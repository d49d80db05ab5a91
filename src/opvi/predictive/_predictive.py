"""Predictions from particles: a mixture of what each particle says, with its uncertainty split into parts."""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from opvi._forks import refuse_forked
from opvi.predictive._counts import NegativeBinomial, Poisson
from opvi.predictive._distributions import Bernoulli, Categorical, Classes, Distribution, Numeric, StudentT
from opvi.types import Array, ArrayLike, Params, Particles, Scalar, Seed, Tree, as_key

QUANTILE_STEPS = {4: 30, 8: 60}  # halvings of the bracket, by the bytes of a number: more than it has digits


class Uncertainty(NamedTuple):
    """A prediction's uncertainty in two parts that add up to the whole.

    Regression: variances (law of total variance). Classification: entropies in nats, where the
    epistemic part is the mutual information between y and the parameters.
    """

    epistemic: Array  # what more data would take away
    aleatoric: Array  # what no amount of data takes away


class Predictive(NamedTuple):
    """The posterior predictive distribution at new inputs: a mixture over particles."""

    components: Distribution  # leaves [n, B] or [n, B, C]
    log_weights: Array | None = None  # [n] or [n, B], normalised over n; None: all weigh the same
    temperature: Scalar | None = None  # of class probabilities, applied to the mixture: p^(1/T), normalised

    def _numeric(self, what: str) -> Numeric:
        if not isinstance(self.components, Classes):
            return self.components
        name = type(self.components).__name__
        raise TypeError(f"{what} is not defined for a {name} head. Use `probabilities()` for classes.")

    def _discrete(self) -> Classes:
        if isinstance(self.components, Classes):
            return self.components
        name = type(self.components).__name__
        raise TypeError(f"class probabilities are not defined for a {name} head. Use `mean()`, `sd()`, `quantile()`.")

    def log_mixture_weights(self) -> Array:
        """Return the normalised log weights of the components: `[n, 1]` or `[n, B]`."""
        first = jax.tree.leaves(self.components)[0]
        if self.log_weights is None:
            return jnp.full((len(first), 1), -math.log(len(first)), first.dtype)
        return self.log_weights.reshape(len(first), -1)

    def _average(self, values: Array) -> Array:
        """Return the weighted mean over components: `[n, B, ...]` to `[B, ...]`."""
        weights = jnp.exp(self.log_mixture_weights())
        return (weights.reshape(*weights.shape, *(1,) * (values.ndim - 2)) * values).sum(0)

    def aligned(self, y: ArrayLike) -> Array:
        """Return y as an array with one value per row; anything else would silently broadcast to a wrong answer."""
        rows = jax.tree.leaves(self.components)[0].shape[1]
        y = jnp.asarray(y)
        if y.shape != (rows,):
            raise ValueError(f"`y` has shape {y.shape}, but there are predictions for {rows} rows: shape ({rows},).")
        return y

    def mean(self) -> Array:
        """Return the predictive mean; for a Bernoulli head, the probability of 1."""
        if not isinstance(self.components, Classes):
            return self._average(self.components.mean)
        if isinstance(self.components, Bernoulli):
            return self.probabilities()[:, 1]
        raise TypeError("the mean of class indices has no meaning. Use `probabilities()` or `classes()`.")

    def sd(self) -> Array:
        """Return the predictive standard deviation: parameters and noise."""
        self._numeric("a standard deviation")
        parts = self.uncertainty()
        return jnp.sqrt(parts.epistemic + parts.aleatoric)

    def uncertainty(self) -> Uncertainty:
        """Return the epistemic and aleatoric parts, row by row."""
        if not isinstance(self.components, Classes):
            c = self.components
            spread = self._average(c.spread) if isinstance(c, StudentT) else jnp.zeros((), c.mean.dtype)
            between = self._average((c.mean - self.mean()[None]) ** 2)
            return Uncertainty(between + spread, self._average(c.variance) - spread)
        log_p = self._tempered(self._discrete().log_probabilities())
        total = _entropy(self.log_probabilities())
        aleatoric = self._average(_entropy(log_p))
        return Uncertainty(jnp.maximum(total - aleatoric, 0), aleatoric)

    def log_density(self, y: Array) -> Array:
        """Return the log predictive density of y, row by row."""
        if self.temperature is not None:
            return Categorical(self.log_probabilities()).log_density(self.aligned(y))
        values = self.components.log_density(self.aligned(y)[None])
        return logsumexp(values + self.log_mixture_weights(), axis=0)

    def cdf(self, y: Array) -> Array:
        """Return P(Y ≤ y), row by row; for continuous y, uniform over rows if the model is calibrated."""
        return self._average(self._numeric("a distribution function").cdf(jnp.asarray(y)[None]))

    def quantile(self, q: ArrayLike) -> Array:
        """Return quantiles of the mixture (not of its Gaussian approximation): shape `[B]`, or `[len(q), B]`.

        Args:
            q: levels, the same for all rows; or, `[Q, B]`, those of each row. Traced ones are not checked.
        """
        mean = self._numeric("a quantile").mean
        if not isinstance(q, jax.core.Tracer):
            q = np.asarray(q)  # not a JAX array: the check works inside a compiled function as well
            if not ((q > 0) & (q < 1)).all():
                raise ValueError(f"`q` is {q}, but a quantile's level must lie strictly between 0 and 1.")
        q = jnp.asarray(q, mean.dtype)
        levels = q if q.ndim == 2 else q.reshape(-1, 1)
        # Cantelli's inequality brackets the quantiles of any distribution by its mean and deviation.
        middle, sd = self.mean()[None], self.sd()[None]
        bracket = middle - sd * jnp.sqrt((1 - levels) / levels), middle + sd * jnp.sqrt(levels / (1 - levels))

        inside = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((self, q)))
        low, high = (_halved if inside else _compiled)(self, levels, bracket)
        found = ((low + high) / 2).reshape(*q.shape[: 1 if q.ndim else 0], mean.shape[1])
        return jnp.round(found) if isinstance(self.components, Poisson | NegativeBinomial) else found

    def interval(self, coverage: float = 0.9) -> tuple[Array, Array]:
        """Return the central interval that holds y with probability `coverage`."""
        if not 0 < coverage < 1:
            raise ValueError(f"`coverage` is {coverage}, but must lie strictly between 0 and 1.")
        low, high = self.quantile([(1 - coverage) / 2, (1 + coverage) / 2])
        return low, high

    def _tempered(self, log_p: Array) -> Array:
        return log_p if self.temperature is None else jax.nn.log_softmax(log_p / self.temperature, -1)

    def log_probabilities(self) -> Array:
        """Return log class probabilities, `[B, C]`."""
        log_p = self._discrete().log_probabilities()
        return self._tempered(logsumexp(log_p + self.log_mixture_weights()[..., None], axis=0))

    def probabilities(self) -> Array:
        """Return class probabilities, `[B, C]`."""
        return jnp.exp(self.log_probabilities())

    def classes(self) -> Array:
        """Return the most probable class of each row."""
        return self.log_probabilities().argmax(-1)

    def sample(self, key: Seed, draws: int) -> Array:
        """Return draws of y at every row, `[draws, B]`, each from a particle picked at random by its weight."""
        pick, noise = jax.random.split(as_key(key))
        if self.temperature is not None:
            logits = self.log_probabilities()
            return jax.random.categorical(noise, logits, shape=(draws, len(logits)))
        weights = self.log_mixture_weights()
        index = jax.random.categorical(pick, weights, axis=0, shape=(draws, weights.shape[1]))

        def chosen(leaf: Array) -> Array:
            leaf = jnp.asarray(leaf)  # NumPy's take no traced index
            return leaf[index[:, 0]] if index.shape[1] == 1 else leaf[index, jnp.arange(leaf.shape[1])[None]]

        return jax.tree.map(chosen, self.components).sample(noise)


def _halved(predictive: Predictive, levels: Array, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return brackets of the quantiles at these levels, `[Q, 1]`, halved until no digit is left."""

    def halve(_: int, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low + high) / 2
        below = jax.vmap(predictive.cdf)(middle) < levels
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    return jax.lax.fori_loop(0, QUANTILE_STEPS.get(levels.dtype.itemsize, 30), halve, bracket)


_compiled = jax.jit(_halved)  # outside of compiled functions: JAX would compile the loop anew for every question


def _entropy(log_p: Array) -> Array:
    return -(jnp.exp(log_p) * jnp.where(jnp.isfinite(log_p), log_p, 0)).sum(-1)


class PredictsRows(Protocol):
    """What `predict` needs of a target."""

    @property
    def predict(self) -> Callable[[Params, Tree], Distribution] | None:
        """Return what the model says about y at inputs x."""

    @property
    def unravel(self) -> Callable[[Array], Params]:
        """Return a vector as the model's parameters."""


def predict(target: PredictsRows, particles: Particles, x: Tree) -> Predictive:
    """Return the posterior predictive at inputs x.

    Args:
        target: one with `predict`: every ready-made regression and classification model has it.
        particles: `[n, d]`, such as the draws in `sampler.posterior(state).matrix`.
        x: inputs with a leading axis of rows, as the model takes them.
    """
    refuse_forked()
    one = target.predict
    if one is None:
        raise TypeError("this target has no `predict`; give one: `opvi.target(..., predict=...)`.")
    x = jax.tree.map(lambda a: jnp.asarray(a, particles.dtype), x)
    with jax.default_matmul_precision("highest"):  # as on a CPU, on every device
        return Predictive(jax.vmap(lambda theta: one(target.unravel(theta), x))(particles))
