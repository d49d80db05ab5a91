r"""Targets from networks: any `apply` function, a Bayesian MLP, and the linear models as its special case."""

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Distribution
from opvi.targets._heads import Gamma, Head, bernoulli, categorical, gaussian
from opvi.targets._mlp import MLP
from opvi.targets._target import Architecture, Method, Target, target
from opvi.types import Array, Data, Key, Params

WIDER = 2.0, 9.0  # priors of networks for classes, hidden and last layers, over the variances of starting weights


@dataclass(frozen=True)
class _Network:
    """A Bayesian network; its methods are those of its target."""

    apply: Callable[[Params, Array], Array]
    start: Callable[[Key], Params]
    head: Head
    precision_prior: Gamma | None  # of all weights; None: their variances are known
    variances: tuple[float, ...]  # of the parts of the weights
    parts: Hashable  # their pytree; jax does not export the type

    def init(self, key: Key) -> Params:
        params = {"weights": self.start(key)}
        if self.head.noise_prior is not None:  # precision 1: the noise of standardised targets before any fit
            params["log_noise_precision"] = jnp.zeros(())
        if self.precision_prior is not None:
            params["log_prior_precision"] = self.precision_prior.sample_log(jax.random.fold_in(key, 1))
        return params

    def log_prior(self, params: Params) -> Array:
        weights = params["weights"]
        if self.precision_prior is not None:
            log_precision = params["log_prior_precision"]
            count = sum(leaf.size for leaf in jax.tree.leaves(weights))
            total = 0.5 * count * log_precision - 0.5 * jnp.exp(log_precision) * _squares(weights)
            total += self.precision_prior.log_density_of_log(log_precision)
        else:
            parts = self.parts.flatten_up_to(weights)  # type: ignore[attr-defined]
            total = sum(-0.5 * _squares(part) / v for part, v in zip(parts, self.variances, strict=True))
        if self.head.noise_prior is not None:
            total += self.head.noise_prior.log_density_of_log(params["log_noise_precision"])
        return total

    def predict(self, params: Params, x: Array) -> Distribution:
        return self.head.distribution(self.apply(params["weights"], x), params.get("log_noise_precision"))

    @property
    def example(self) -> Data | None:
        """An example row `(x, y)` of an MLP; unknown for other networks."""
        mlp = getattr(self.apply, "of", None)
        if not isinstance(mlp, MLP):
            return None
        whole = self.head.classes
        return np.zeros((1, mlp.sizes[0]), np.float32), np.zeros(1, np.int32 if whole else np.float32)

    def log_likelihood(self, params: Params, batch: Data) -> Array:
        x, y = batch
        return self.predict(params, x).log_density(y)


def _squares(params: Params) -> Array:
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
        head: `opvi.gaussian(...)`, `opvi.bernoulli()`, `opvi.categorical()`, or of `opvi.targets` `student_t(...)`,
            `poisson()` or `negative_binomial(...)`.
        prior_variance: $\lambda^{-1}$; a Gamma prior on $\lambda$ to infer it; or a pytree of numbers, one for each
            part of the parameters.
    """
    inferred = prior_variance if isinstance(prior_variance, Gamma) else None
    variances, parts = jax.tree.flatten(() if inferred else prior_variance)
    if not all(v > 0 for v in variances):
        raise ValueError(f"`prior_variance` is {prior_variance!r}, but must be greater than 0.")
    net = _Network(apply, init, head, inferred, tuple(map(float, variances)), parts)
    return target(*(Method(net, name) for name in ("log_prior", "log_likelihood", "init", "predict")))


def mlp(
    features: int,
    hidden: Sequence[int] = (50,),
    head: Head | None = None,
    *,
    outputs: int = 1,
    activation: Callable[[Array], Array] = jax.nn.relu,
    prior_variance: float | Gamma | Literal["auto"] | None = "auto",
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
        head: Gaussian with noise variance 1 if omitted.
        outputs: classes for a categorical head, otherwise 1.
        activation: between layers.
        prior_variance: see `network`; None makes it each layer's starting variance, and 1 for the last bias. "auto" is
            1, except for networks with hidden layers and a Bernoulli or categorical head: twice the starting
            variances, nine times in the last layer. With 1 for every weight, a wide network would be certain of its
            classes before any row; with the starting variances it could never become certain.
        weight_spread: $s$; 1 suits tanh, $\sqrt 2$ ReLU.
        bias_spread: standard deviation of the hidden layers' starting biases.
        output_spread: $s$ of the last layer, where it differs.
    """
    hidden = tuple(hidden)
    sizes = tuple(operator.index(size) for size in (features, *hidden, outputs))
    if min(sizes) < 1:
        raise ValueError(f"layer sizes are {sizes}, but each must be at least 1.")
    head = head or gaussian()
    wider = (1.0, 1.0)
    if prior_variance == "auto":
        prior_variance = 1.0
        if hidden and head.classes:
            prior_variance, wider = None, WIDER
    elif isinstance(prior_variance, str):
        raise ValueError(f'`prior_variance` is {prior_variance!r}, but must be a number, a `Gamma`, None or "auto".')
    inferred = prior_variance if isinstance(prior_variance, Gamma) else None
    given = None if isinstance(prior_variance, Gamma) else prior_variance
    net = MLP(sizes, activation, weight_spread, bias_spread, output_spread, given, wider)
    made = network(Method(net, "apply"), Method(net, "init"), head, prior_variance=inferred or net.prior_variances)
    if inferred or head.noise_prior is not None:  # no layer has a variance to name
        return made
    return replace(made, architecture=Architecture(net, head))


def linear_regression(features: int, *, noise: float | Gamma = 1.0, prior_variance: float | Gamma = 1.0) -> Target:
    r"""$y \sim N(Xw + b, \sigma^2)$ with a Gaussian prior on w and b: conjugate when both variances are given."""
    return mlp(features, (), gaussian(noise), prior_variance=prior_variance)


def logistic_regression(features: int, *, prior_variance: float | Gamma = 1.0) -> Target:
    r"""$P(y = 1) = \sigma(Xw + b)$ with a Gaussian prior on w and b."""
    return mlp(features, (), bernoulli(), prior_variance=prior_variance)


def softmax_regression(features: int, classes: int, *, prior_variance: float | Gamma = 1.0) -> Target:
    r"""$P(y = c) = \mathrm{softmax}(XW + b)_c$ with a Gaussian prior on W and b."""
    return mlp(features, (), categorical(), outputs=classes, prior_variance=prior_variance)
