r"""Targets from networks: any `apply` function, a Bayesian MLP, and the linear models as its special case."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi.predictive import Bernoulli, Categorical, Distribution, Normal
from opvi.targets._mlp import MLP
from opvi.targets._target import Target, target
from opvi.types import Array, Key, Params


class Gamma(NamedTuple):
    """A Gamma prior on a precision, by shape and rate. The paper uses Gamma(1, 0.1): mean 10."""

    shape: float = 1.0
    rate: float = 0.1

    def log_density_of_log(self, log_precision: Array) -> Array:
        """The density of the logarithm, Jacobian included, up to a constant."""
        return self.shape * log_precision - self.rate * jnp.exp(log_precision)

    def sample_log(self, key: Key) -> Array:
        """The logarithm of a draw."""
        return jnp.log(jax.random.gamma(key, self.shape)) - math.log(self.rate)


class Head(NamedTuple):
    """How a network's outputs become a distribution of y."""

    distribution: Callable[[Array, Array | None], Distribution]  # (outputs, log noise precision)
    noise_prior: Gamma | None = None


def _one_output(outputs: Array, head: str) -> Array:
    if outputs.ndim == 2 and outputs.shape[1] == 1:
        return outputs[:, 0]
    if outputs.ndim != 1:
        raise ValueError(
            f"`apply` returned shape {outputs.shape}, but the {head} head takes one output a row: (B,) or (B, 1)."
        )
    return outputs


def gaussian(noise: float | Gamma = 1.0) -> Head:
    """A head for numbers: y = output + noise. `noise` is its variance, or a Gamma prior on its precision, to infer."""
    if not isinstance(noise, Gamma) and not noise > 0:
        raise ValueError(f"`noise` is {noise!r}, but a variance must be greater than 0.")

    def distribution(outputs: Array, log_precision: Array | None) -> Normal:
        mean = _one_output(outputs, "gaussian")
        variance = jnp.asarray(noise, mean.dtype) if log_precision is None else jnp.exp(-log_precision)
        return Normal(mean, jnp.broadcast_to(variance, mean.shape))

    return Head(distribution, noise if isinstance(noise, Gamma) else None)


def bernoulli() -> Head:
    """A head for two classes: y is 0 or 1, and the output is the logit of 1."""
    return Head(lambda outputs, _: Bernoulli(_one_output(outputs, "bernoulli")))


def categorical() -> Head:
    """A head for several classes: y is a class index, and the outputs are one logit a class."""

    def distribution(outputs: Array, _: Array | None) -> Categorical:
        if outputs.ndim != 2:
            raise ValueError(f"`apply` returned shape {outputs.shape}, but the categorical head takes (B, classes).")
        return Categorical(outputs)

    return Head(distribution)


def _squares(params: Params) -> Any:
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(params))


def network(
    apply: Callable[[Params, Array], Array],
    init: Callable[[Key], Params],
    head: Head,
    *,
    prior_variance: float | Gamma | Params = 1.0,
) -> Target:
    r"""A Bayesian network from its `apply`: your own, flax's `model.apply`, or an equinox module's call.

    $$w \sim N(0, \lambda^{-1} I), \qquad y \mid x \sim \mathrm{head}(\mathrm{apply}(w, x))$$

    Batches are pairs `(X, y)`.

    Args:
        apply: `apply(params, X)` gives the outputs of a batch: `[B]`, `[B, 1]` or `[B, classes]`.
        init: draws one set of parameters from a key.
        head: `opvi.gaussian(...)`, `opvi.bernoulli()` or `opvi.categorical()`.
        prior_variance: $\lambda^{-1}$; a Gamma prior on $\lambda$ to infer it; or a pytree of numbers, one for each
            part of the parameters.
    """
    precision_prior = prior_variance if isinstance(prior_variance, Gamma) else None
    if precision_prior is None and not all(v > 0 for v in jax.tree.leaves(prior_variance)):
        raise ValueError(f"`prior_variance` is {prior_variance!r}, but must be greater than 0.")

    def init_all(key: Key) -> Params:
        params = {"weights": init(key)}
        if head.noise_prior is not None:  # precision 1: the noise of standardised targets before any fit
            params["log_noise_precision"] = jnp.zeros(())
        if precision_prior is not None:
            params["log_prior_precision"] = precision_prior.sample_log(jax.random.fold_in(key, 1))
        return params

    def log_prior(params: Params) -> Array:
        weights = params["weights"]
        if precision_prior is not None:
            log_precision = params["log_prior_precision"]
            count = sum(leaf.size for leaf in jax.tree.leaves(weights))
            total = 0.5 * count * log_precision - 0.5 * jnp.exp(log_precision) * _squares(weights)
            total += precision_prior.log_density_of_log(log_precision)
        else:
            parts = jax.tree.map(lambda v, part: -0.5 * _squares(part) / v, prior_variance, weights)
            total = sum(jax.tree.leaves(parts))
        if head.noise_prior is not None:
            total += head.noise_prior.log_density_of_log(params["log_noise_precision"])
        return total

    def predict(params: Params, x: Array) -> Distribution:
        return head.distribution(apply(params["weights"], x), params.get("log_noise_precision"))

    def log_likelihood(params: Params, batch: Any) -> Array:
        x, y = batch
        return predict(params, x).log_density(y)

    return target(log_prior, log_likelihood, init_all, predict)


class Architecture(NamedTuple):
    """What an MLP is made of, for samplers that work layer by layer."""

    mlp: MLP
    head: Head


def mlp(
    features: int,
    hidden: Sequence[int] = (50,),
    head: Head | None = None,
    *,
    outputs: int = 1,
    activation: Callable[[Array], Array] = jax.nn.relu,
    prior_variance: float | Gamma | None = 1.0,
    weight_spread: float = 1.0,
    bias_spread: float = 0.0,
    output_spread: float | None = None,
) -> Target:
    r"""A fully connected Bayesian network.

    Starting weights are $N(0, s^2/(\text{inputs}+1))$, which keeps outputs near unit size; standardise X, and y
    for a Gaussian head.

    Args:
        features: columns of X.
        hidden: width of each hidden layer; `()` is the linear model.
        head: Gaussian with noise variance 1 if not given.
        outputs: classes for a categorical head, otherwise 1.
        activation: between layers.
        prior_variance: see `network`; None makes it each layer's starting variance, and 1 for the last bias.
        weight_spread: $s$; 1 suits tanh, $\sqrt 2$ ReLU.
        bias_spread: standard deviation of the hidden layers' starting biases.
        output_spread: $s$ of the last layer, where it differs.
    """
    sizes = (features, *hidden, outputs)
    if min(sizes) < 1:
        raise ValueError(f"layer sizes are {sizes}, but each must be at least 1.")

    head = head or gaussian()
    inferred = prior_variance if isinstance(prior_variance, Gamma) else None
    given = None if isinstance(prior_variance, Gamma) else prior_variance
    net = MLP(sizes, activation, weight_spread, bias_spread, output_spread, given)
    made = network(net.apply, net.init, head, prior_variance=inferred or net.prior_variances)
    if inferred or head.noise_prior is not None:  # no layer has a variance to name
        return made
    return made._replace(architecture=Architecture(net, head))


def linear_regression(features: int, *, noise: float | Gamma = 1.0, prior_variance: float | Gamma = 1.0) -> Target:
    r"""$y \sim N(Xw + b, \sigma^2)$ with a Gaussian prior on w and b: conjugate when both variances are given."""
    return mlp(features, (), gaussian(noise), prior_variance=prior_variance)


def logistic_regression(features: int, *, prior_variance: float | Gamma = 1.0) -> Target:
    r"""$P(y = 1) = \sigma(Xw + b)$ with a Gaussian prior on w and b."""
    return mlp(features, (), bernoulli(), prior_variance=prior_variance)


def softmax_regression(features: int, classes: int, *, prior_variance: float | Gamma = 1.0) -> Target:
    r"""$P(y = c) = \mathrm{softmax}(XW + b)_c$ with a Gaussian prior on W and b."""
    return mlp(features, (), categorical(), outputs=classes, prior_variance=prior_variance)
