"""Models in the style of NumPyro's examples, with 200 rows each."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import distributions as dist
from numpyro.contrib.module import random_flax_module

Rows = object
Model = Callable[..., None]
RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3)).astype(np.float32)
NOISE = RNG.normal(size=200).astype(np.float32)
MEAN = (X @ np.array([1.0, -0.5, 0.0])).astype(np.float32)  # by double precision: the same bits on any machine
GROUP = np.arange(200, dtype=np.int32) % 6
LABEL = (RNG.uniform(size=200) < 1 / (1 + np.exp(-MEAN))).astype(np.int32)
COUNT = RNG.poisson(np.exp(0.5 * MEAN + 0.3 * NOISE)).astype(np.int32)
TRIES = RNG.integers(10, 60, size=200).astype(np.int32)
HITS = RNG.binomial(TRIES, 1 / (1 + np.exp(1 - 0.4 * NOISE))).astype(np.int32)
SERIES = np.zeros(202, np.float32)
for _t in range(2, 202):
    SERIES[_t] = 0.6 * SERIES[_t - 1] - 0.3 * SERIES[_t - 2] + NOISE[_t - 2]
CLUSTER = np.array([-4.0, 0.0, 3.0], np.float32)[RNG.choice(3, size=200, p=[0.2, 0.5, 0.3])] + 0.7 * NOISE
PAIR = (RNG.normal(size=(200, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])).astype(np.float32)
GRADE = np.digitize(MEAN + RNG.logistic(size=200), [-1.0, 0.5, 2.0]).astype(np.int32)


def slopes(scale: float = 1.0) -> jax.Array:
    """Linear regression with three slopes."""
    return numpyro.sample("slopes", dist.Normal(0, scale).expand([3]).to_event(1))


def logistic(x: jax.Array, y: jax.Array) -> None:
    """As in covtype: no plate."""
    numpyro.sample("y", dist.Bernoulli(logits=x @ slopes()), obs=y)


def subsampled(x: jax.Array, y: jax.Array) -> None:
    """As in hmcecs: a plate that would draw a part of the rows."""
    w = slopes()
    with numpyro.plate("rows", 200, subsample_size=len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def robust(x: jax.Array, y: jax.Array) -> None:
    """Regression with outliers."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.StudentT(4.0, x @ slopes(), scale), obs=y)


def pooled(tries: jax.Array, hits: jax.Array) -> None:
    """Baseball: one chance for all."""
    chance = numpyro.sample("chance", dist.Uniform(0, 1))
    numpyro.sample("hits", dist.Binomial(tries, probs=chance), obs=hits)


def not_pooled(tries: jax.Array, hits: jax.Array) -> None:
    """Baseball: every player has his own chance, and the chances have a common mean."""
    mean = numpyro.sample("mean", dist.Normal(-1, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("players", len(hits)):
        own = numpyro.sample("own", dist.Normal(mean, spread))
        numpyro.sample("hits", dist.Binomial(tries, logits=own), obs=hits)


def beta_binomial(tries: jax.Array, hits: jax.Array) -> None:
    """Baseball: chances between 0 and 1, partially pooled."""
    mean = numpyro.sample("mean", dist.Uniform(0, 1))
    size = numpyro.sample("size", dist.LogNormal(2.0, 1.0))
    with numpyro.plate("players", len(hits)):
        own = numpyro.sample("own", dist.Beta(mean * size + 0.1, (1 - mean) * size + 0.1))
        numpyro.sample("hits", dist.Binomial(tries, probs=own), obs=hits)


def departments(group: jax.Array, x: jax.Array, y: jax.Array) -> None:
    """As in ucbadmit: intercepts and slopes of groups, correlated."""
    centre = numpyro.sample("centre", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("departments", 6):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
    own = centre + z @ (scale[:, None] * root).T
    numpyro.sample("y", dist.Bernoulli(logits=own[group, 0] + own[group, 1] * x[:, 0]), obs=y)


def horseshoe(x: jax.Array, y: jax.Array) -> None:
    """Half-Cauchy scales."""
    own = numpyro.sample("own", dist.HalfCauchy(1.0).expand([3]).to_event(1))
    shared = numpyro.sample("shared", dist.HalfCauchy(1.0))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(x @ (slopes() * own * shared), noise), obs=y)


def negative_binomial(x: jax.Array, y: jax.Array) -> None:
    """Counts that vary more than Poisson's."""
    c = numpyro.sample("c", dist.Gamma(2.0, 0.5))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(x @ slopes()), c), obs=y)


def zero_inflated(x: jax.Array, y: jax.Array) -> None:
    """More zeros than Poisson's."""
    gate = numpyro.sample("gate", dist.Beta(1.0, 4.0))
    numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(x @ slopes())), obs=y)


def random_rates(x: jax.Array, y: jax.Array) -> None:
    """Counts whose rates vary from row to row."""
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    w = slopes()
    with numpyro.plate("rows", len(y)):
        noise = numpyro.sample("noise", dist.Normal(0, 1))
        numpyro.sample("y", dist.Poisson(jnp.exp(x @ w + spread * noise)), obs=y)


def ordinal(x: jax.Array, y: jax.Array) -> None:
    """Ordinal regression."""
    ordered = dist.transforms.OrderedTransform()
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(dist.Normal(0, 1).expand([3]), ordered))
    numpyro.sample("y", dist.OrderedLogistic(x @ slopes(), cuts), obs=y)


def autoregression(lags: jax.Array, y: jax.Array) -> None:
    """AR(2), a row with its two lags."""
    a = numpyro.sample("a", dist.Normal(0, 1).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(lags @ a, noise), obs=y)


def correlation(y: jax.Array) -> None:
    """Two numbers per row with an LKJ prior."""
    root = numpyro.sample("root", dist.LKJCholesky(2, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale[:, None] * root), obs=y)


def levels(group: jax.Array, y: jax.Array) -> None:
    """Six groups with a common spread, centred: a funnel where data are few."""
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 6):
        level = numpyro.sample("level", dist.Normal(mean, spread))
    numpyro.sample("y", dist.Normal(level[group], 1.0), obs=y)


def clusters(y: jax.Array) -> None:
    """Three components with ordered means."""
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    first = numpyro.sample("first", dist.Normal(0, 5))
    gaps = numpyro.sample("gaps", dist.LogNormal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    means = first + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gaps)])
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(share), dist.Normal(means, scale)), obs=y)


def one_normal(y: jax.Array) -> None:
    """One distribution for all rows."""
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    numpyro.sample("y", dist.Normal(numpyro.sample("mean", dist.Normal(0, 1)), scale), obs=y)


def waves(x: jax.Array, y: jax.Array) -> None:
    """As in hsgp: a smooth function by fixed waves."""
    length, size = (numpyro.sample(name, dist.LogNormal(0, 0.5)) for name in ("length", "size"))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([6]).to_event(1))
    k = jnp.arange(1, 7) * jnp.pi / 6
    density = size * jnp.exp(-0.25 * (length * k) ** 2)
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(jnp.sin(k * (x[:, :1] + 3)) @ (density * w), noise), obs=y)


def network(x: jax.Array, y: jax.Array) -> None:
    """As in bnn: two hidden layers, an unknown precision."""
    for i, shape in enumerate([(3, 4), (4, 4), (4, 1)]):
        w = numpyro.sample(f"w{i}", dist.Normal(0, 1).expand(shape).to_event(2))
        x = jnp.tanh(x @ w) if i < 2 else x @ w
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(x[:, 0], precision**-0.5), obs=y)


def flax_network(x: jax.Array, y: jax.Array) -> None:
    """A flax module under a prior."""
    net = random_flax_module("net", nn.Dense(1), dist.Normal(0, 1), input_shape=(3,))
    numpyro.sample("y", dist.Normal(net(x)[:, 0], numpyro.sample("noise", dist.HalfNormal(1.0))), obs=y)


NUMBER = MEAN + NOISE
MODELS: dict[str, tuple[Model, Rows]] = {
    "logistic": (logistic, (X, LABEL)),
    "subsampled": (subsampled, (X, LABEL)),
    "robust": (robust, (X, NUMBER)),
    "pooled": (pooled, (TRIES, HITS)),
    "not pooled": (not_pooled, (TRIES, HITS)),
    "beta-binomial": (beta_binomial, (TRIES, HITS)),
    "departments": (departments, (GROUP, X, LABEL)),
    "horseshoe": (horseshoe, (X, NUMBER)),
    "negative binomial": (negative_binomial, (X, COUNT)),
    "zero-inflated": (zero_inflated, (X, COUNT)),
    "random rates": (random_rates, (X, COUNT)),
    "ordinal": (ordinal, (X, GRADE)),
    "AR(2)": (autoregression, (np.stack([SERIES[1:-1], SERIES[:-2]], 1), SERIES[2:])),
    "LKJ": (correlation, PAIR),
    "levels": (levels, (GROUP, NUMBER)),
    "clusters": (clusters, CLUSTER),
    "one normal": (one_normal, NUMBER),
    "waves": (waves, (X, NUMBER)),
    "network": (network, (X, NUMBER)),
    "flax network": (flax_network, (X, NUMBER)),
}
