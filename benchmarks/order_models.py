"""Streams in awkward orders: models, seeded rows and permutations, for `benchmarks.orders`."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax.scipy.special import gammaln
from jax.scipy.stats import norm
from numpyro import distributions as dist
from scipy.special import digamma, polygamma
from scipy.special import gammaln as log_gamma

import opvi
from opvi.types import Tree
from paper import data

ROWS = 2000
SEED = 39_000  # of the rows: no test and no setting saw them
Order = Callable[["Rows", np.random.Generator], np.ndarray]


class Exact(NamedTuple):
    """A posterior in closed form: of every parameter in the flat vector."""

    mean: np.ndarray
    sd: np.ndarray
    log_evidence: float


class Rows(NamedTuple):
    """The rows of a stream as they come, and what they can be sorted by."""

    data: Tree
    y: np.ndarray
    x: np.ndarray
    residual: np.ndarray


class Family(NamedTuple):
    """A model with its rows; orders are permutations, so that they all share one posterior."""

    name: str
    make: Callable[[], tuple[opvi.Target, Rows]]
    orders: tuple[str, ...]
    exact: Callable[[Rows], Exact] | None = None
    unit_normal: bool = False  # a ready-made model's prior is N(0, I), its density may lack the constant

    @property
    def target(self) -> opvi.Target:
        return made(self.name)[0]

    @property
    def rows(self) -> Rows:
        return made(self.name)[1]

    def in_order(self, order: str) -> Tree:
        """Return the rows' arrays in an order."""
        index = ORDERS[order](self.rows, np.random.default_rng([SEED, 7]))
        return jax.tree.map(lambda leaf: leaf[index], self.rows.data)

    def prior_gap(self) -> float:
        """Return what must be added to the log prior so that it integrates to 1."""
        if not self.unit_normal:
            return 0.0
        zero = float(self.target.log_prior(self.target.unravel(jnp.zeros(self.target.dim))))
        return -self.target.dim / 2 * math.log(2 * math.pi) - zero


@cache
def made(name: str) -> tuple[opvi.Target, Rows]:
    """Return a family's target and rows, the same objects every time: runs then share compiled programs."""
    return FAMILIES[name].make()


def generator(number: int) -> np.random.Generator:
    """Return a model's own generator."""
    return np.random.default_rng([SEED, number])


def by(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the rows sorted, largest first; ties in random order."""
    return np.lexsort((rng.uniform(size=len(values)), -values))


def drift(rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Return an order in which y drifts: sorted by the rank of y plus as much noise."""
    rank = np.argsort(by(rows.y, rng))
    return np.argsort(rank + rng.uniform(0, len(rank), len(rank)))


def nearly(rows: Rows, rng: np.random.Generator) -> np.ndarray:
    """Return rows nearly sorted by y: a tenth of noise in the ranks."""
    rank = np.argsort(by(rows.y, rng))
    return np.argsort(rank + rng.uniform(0, 0.1 * len(rank), len(rank)))


ORDERS: dict[str, Order] = {
    "natural": lambda rows, _: np.arange(len(rows.y)),
    "shuffled": lambda rows, rng: rng.permutation(len(rows.y)),
    "by y": lambda rows, rng: by(rows.y, rng),
    "by x": lambda rows, rng: by(rows.x, rng),
    "by residual": lambda rows, rng: by(rows.residual, rng),
    "drifting": drift,
    "nearly by y": nearly,
    "outliers first": lambda rows, rng: by(np.abs(rows.residual), rng),
}
FIVE = ("shuffled", "by y", "by x", "by residual", "drifting")
WIDE = ("shuffled", "by y", "drifting")  # what is sorted by one of many columns is nearly shuffled


def plain(log_prior: Callable, log_likelihood: Callable, dim: int) -> opvi.Target:
    """Return a target over one flat vector, started near 0."""
    return opvi.target(log_prior, log_likelihood, lambda key: 0.3 * jax.random.normal(key, (dim,)))


def standard(v: jax.Array) -> jax.Array:
    """Return the log density of N(0, I)."""
    return norm.logpdf(v).sum()


def columns(rng: np.random.Generator, count: int, rows: int = ROWS) -> np.ndarray:
    """Return inputs."""
    return rng.normal(size=(rows, count)).astype(np.float32)


def numbers(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, np.float32)


# Models. Every one returns the target and its rows; parameters are unconstrained, and priors integrate to 1.


def elec2(rows: int) -> tuple[opvi.Target, Rows]:
    """An electricity market: whether the price went up, by logistic regression on eight columns."""
    X, y = data.elec2()
    X = numbers((X - X.mean(0)) / X.std(0))[:rows]
    y = y[:rows].astype(np.int32)
    return opvi.logistic_regression(X.shape[1]), Rows((X, y), y, X[:, 0], y - y.mean())


def logistic(rows: int, dim: int = 200) -> tuple[opvi.Target, Rows]:
    """Logistic regression with many coefficients."""
    rng = generator(1)
    X = columns(rng, dim - 1)[:rows]
    logit = X @ (2 / math.sqrt(dim) * rng.normal(size=dim - 1)) + 0.3
    chance = 1 / (1 + np.exp(-logit))
    y = (generator(2).uniform(size=ROWS)[:rows] < chance).astype(np.int32)
    return opvi.logistic_regression(dim - 1), Rows((X, y), y, X[:, 0], y - chance)


def poisson(trend: float = 0.0) -> tuple[opvi.Target, Rows]:
    """Counts by six columns; with a trend, their rate grows by that share around its middle, which no column says."""
    rng = generator(3)
    X = columns(rng, 6)
    rate = np.exp(X @ (0.3 * rng.normal(size=6)) + 1.0) * (1 + trend * np.linspace(-1, 1, ROWS))
    y = rng.poisson(rate)

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        eta = rows[0] @ v[1:] + v[0]
        return rows[1] * eta - jnp.exp(eta) - gammaln(rows[1] + 1.0)

    return plain(standard, log_likelihood, 7), Rows((X, numbers(y)), y, X[:, 0], y - rate)


def student() -> tuple[opvi.Target, Rows]:
    """Student-t regression with four degrees of freedom, an unknown scale, and one row in twenty far off."""
    rng = generator(4)
    X = columns(rng, 4)
    mean = X @ [1.0, -0.5, 0.3, 0.8] + 0.5
    y = mean + 0.7 * rng.standard_t(4, ROWS)
    y[rng.choice(ROWS, ROWS // 20, replace=False)] += 15.0

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        z = (rows[1] - rows[0] @ v[1:5] - v[0]) * jnp.exp(-v[5])
        return math.lgamma(2.5) - math.lgamma(2) - math.log(4 * math.pi) / 2 - v[5] - 2.5 * jnp.log1p(z**2 / 4)

    def log_prior(v: jax.Array) -> jax.Array:
        return norm.logpdf(v[:5], 0, 3).sum() + norm.logpdf(v[5])

    return plain(log_prior, log_likelihood, 6), Rows((X, numbers(y)), y, X[:, 0], y - mean)


def hierarchy() -> tuple[opvi.Target, Rows]:
    """Eight groups, non-centred: a mean, the logarithms of two scales, and every group's deviation in units."""
    rng = generator(5)
    group = rng.integers(8, size=ROWS).astype(np.int32)
    level = 1.0 + 0.6 * rng.normal(size=8)
    y = level[group] + 1.2 * rng.normal(size=ROWS)

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        mean = v[0] + jnp.exp(v[1]) * v[3:][rows[0]]
        return norm.logpdf(rows[1], mean, jnp.exp(v[2]))

    def log_prior(v: jax.Array) -> jax.Array:
        return norm.logpdf(v[0], 0, 3) + standard(v[1:])

    return plain(log_prior, log_likelihood, 11), Rows((group, numbers(y)), y, group, y - level[group])


def hierarchy_exact(rows: Rows) -> Exact:
    """By a grid over the logarithms of both scales: all else is Gaussian given them."""
    group, y = rows.data[0], rows.data[1].astype(float)
    count = np.bincount(group, minlength=8)
    total = np.bincount(group, y, minlength=8)
    noise = np.log(np.sqrt((y - (total / np.maximum(count, 1))[group]).var()))
    log_tau, log_sigma = np.linspace(-4, 3, 561), noise + np.linspace(-6, 6, 97) / math.sqrt(2 * len(y))
    design = np.broadcast_to(np.hstack([np.ones((8, 1)), np.eye(8)]), (len(log_tau), 8, 9)).copy()
    design[:, :, 1:] *= np.exp(log_tau)[:, None, None]
    before = np.diag([1 / 9, *[1.0] * 8])
    parts = []
    for value in log_sigma:
        square = math.exp(2 * value)
        precision = before + np.einsum("tgi,g,tgj->tij", design, count / square, design)
        h = np.einsum("tgi,g->ti", design, total / square)
        cosquare = np.linalg.inv(precision)
        mean = np.einsum("tij,tj->ti", cosquare, h)
        mass = (np.einsum("ti,ti->t", h, mean) - np.linalg.slogdet(precision)[1] - 2 * math.log(3)) / 2
        mass -= (y @ y) / (2 * square) + len(y) / 2 * (math.log(2 * math.pi) + 2 * value)
        mass -= (log_tau**2 + value**2) / 2 + math.log(2 * math.pi)  # both priors
        parts.append((mass, mean, np.einsum("tii->ti", cosquare)))
    mass, mean, variance = (np.stack(part) for part in zip(*parts, strict=True))
    top = mass.max()
    share = np.exp(mass - top)
    evidence = math.log(share.sum() * (log_tau[1] - log_tau[0]) * (log_sigma[1] - log_sigma[0])) + top
    share /= share.sum()
    scales = np.stack([np.broadcast_to(log_tau, mass.shape), np.broadcast_to(log_sigma[:, None], mass.shape)], -1)
    mean = np.concatenate([mean[..., :1], scales, mean[..., 1:]], -1)
    variance = np.concatenate([variance[..., :1], 0 * scales, variance[..., 1:]], -1)
    center = np.einsum("st,sti->i", share, mean)
    spread = np.einsum("st,sti->i", share, variance + (mean - center) ** 2)
    return Exact(center, np.sqrt(spread), float(evidence))


def item_response(persons: int, items: int = 40) -> tuple[opvi.Target, Rows]:
    """Two-parameter item response: a row is a person's answers, whose ability is summed out over a grid."""
    rng = generator(6)
    ability = rng.normal(size=ROWS)
    slope, difficulty = np.exp(0.4 * rng.normal(size=items)), rng.normal(size=items)
    chance = 1 / (1 + np.exp(-slope * (ability[:, None] - difficulty)))
    y = (rng.uniform(size=chance.shape) < chance).astype(np.float32)[:persons]
    node = np.linspace(-5, 5, 41)
    share = np.exp(-(node**2) / 2)
    at, log_share = numbers(node), numbers(np.log(share / share.sum()))

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        logit = jnp.exp(v[:items])[:, None] * (at - v[items:, None])  # [items, nodes]
        of_person = rows[0] @ logit - jax.nn.softplus(logit).sum(0)
        return jax.nn.logsumexp(of_person + log_share, axis=-1)

    def log_prior(v: jax.Array) -> jax.Array:
        return norm.logpdf(v[:items], 0, 0.5).sum() + standard(v[items:])

    score = y.sum(1)
    return plain(log_prior, log_likelihood, 2 * items), Rows((y,), score, y[:, 0], score - chance[:persons].sum(1))


def two_modes() -> tuple[opvi.Target, Rows]:
    """A mixture of two known halves whose means may change places; the prior prefers one of the places."""
    rng = generator(7)
    y = np.where(rng.uniform(size=ROWS) < 0.5, 2.0, -2.0) + rng.normal(size=ROWS)
    at, scale = np.array([1.0, -1.0], np.float32), 3.0

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        return jnp.logaddexp(norm.logpdf(rows[0], v[0]), norm.logpdf(rows[0], v[1])) - math.log(2)

    target = opvi.target(
        lambda v: norm.logpdf(v, at, scale).sum(),
        log_likelihood,
        lambda key: at + scale * jax.random.normal(key, (2,)),
    )
    return target, Rows((numbers(y),), y, np.abs(y), y - np.sign(y) * 2)


def two_modes_exact(rows: Rows) -> Exact:
    """By a grid around the mode, and its mirror image, which the prior alone weighs differently."""
    y = rows.data[0].astype(float)
    half, points = 8 / math.sqrt(len(y) / 2) * 1.2, 161
    low, high = y[y < 0].mean(), y[y > 0].mean()
    one, two = (np.linspace(at - half, at + half, points) for at in (high, low))
    density = np.zeros((points, points))
    for value in y:
        density += np.logaddexp(-((value - one[:, None]) ** 2) / 2, -((value - two[None]) ** 2) / 2)
    density -= len(y) * (math.log(2) + math.log(2 * math.pi) / 2)

    def prior(v0: np.ndarray, v1: np.ndarray) -> np.ndarray:
        return -((v0 - 1) ** 2 + (v1 + 1) ** 2) / 18 - math.log(2 * math.pi * 9)

    as_is, mirrored = density + prior(one[:, None], two[None]), density + prior(two[None], one[:, None])
    top = max(as_is.max(), mirrored.max())
    p, q = np.exp(as_is - top), np.exp(mirrored - top)
    total = p.sum() + q.sum()
    first = ((p * one[:, None]).sum() + (q * two[None]).sum()) / total
    second = ((p * two[None]).sum() + (q * one[:, None]).sum()) / total
    squares = [
        ((p * one[:, None] ** 2).sum() + (q * two[None] ** 2).sum()) / total,
        ((p * two[None] ** 2).sum() + (q * one[:, None] ** 2).sum()) / total,
    ]
    mean = np.array([first, second])
    cell = (one[1] - one[0]) * (two[1] - two[0])
    return Exact(mean, np.sqrt(np.array(squares) - mean**2), float(np.log(total * cell) + top))


def negative_binomial() -> tuple[opvi.Target, Rows]:
    """Overdispersed counts by four columns; the last parameter is the logarithm of the size."""
    rng = generator(8)
    X = columns(rng, 4)
    rate = np.exp(X @ [0.4, -0.3, 0.2, 0.1] + 1.2)
    y = rng.poisson(rate * rng.gamma(2.0, 1 / 2.0, ROWS))

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        eta, size, y = rows[0] @ v[1:5] + v[0], jnp.exp(v[5]), rows[1]
        total = jnp.logaddexp(eta, v[5])
        return gammaln(y + size) - gammaln(size) - gammaln(y + 1.0) + size * (v[5] - total) + y * (eta - total)

    return plain(standard, log_likelihood, 6), Rows((X, numbers(y)), y, X[:, 0], y - rate)


def huber() -> tuple[opvi.Target, Rows]:
    """Robust regression: Huber's density, normal in the middle and Laplace in the tails, with an unknown scale."""
    rng = generator(9)
    X = columns(rng, 4)
    mean = X @ [0.5, 0.9, -0.7, 0.2] - 0.4
    y = mean + 0.8 * rng.laplace(size=ROWS)
    k = 1.345
    middle = math.sqrt(2 * math.pi) * math.erf(k / math.sqrt(2))
    constant = math.log(middle + 2 * math.exp(-(k**2) / 2) / k)

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        z = jnp.abs(rows[1] - rows[0] @ v[1:5] - v[0]) * jnp.exp(-v[5])
        return -jnp.where(z < k, z**2 / 2, k * z - k**2 / 2) - v[5] - constant

    def log_prior(v: jax.Array) -> jax.Array:
        return norm.logpdf(v[:5], 0, 3).sum() + norm.logpdf(v[5])

    return plain(log_prior, log_likelihood, 6), Rows((X, numbers(y)), y, X[:, 0], y - mean)


SHAPE, RATE, WIDTH = 3.0, 2.0, 2.0  # of the conjugate prior: s² ~ IG(SHAPE, RATE), w | s² ~ N(0, WIDTH² s² I)


def linear() -> tuple[opvi.Target, Rows]:
    """Linear regression with unknown noise, conjugate; the last parameter is the logarithm of the variance."""
    rng = generator(10)
    X = columns(rng, 5)
    X = np.column_stack([np.ones(ROWS), X]).astype(np.float32)
    mean = X @ [0.3, 1.0, -1.0, 0.5, 0.0, 2.0]
    y = mean + 1.5 * rng.normal(size=ROWS)

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        return norm.logpdf(rows[1], rows[0] @ v[:6], jnp.exp(v[6] / 2))

    def log_prior(v: jax.Array) -> jax.Array:
        of_variance = SHAPE * math.log(RATE) - math.lgamma(SHAPE) - SHAPE * v[6] - RATE * jnp.exp(-v[6])
        return of_variance + norm.logpdf(v[:6], 0, WIDTH * jnp.exp(v[6] / 2)).sum()

    return plain(log_prior, log_likelihood, 7), Rows((X, numbers(y)), y, X[:, 1], y - mean)


def linear_exact(rows: Rows) -> Exact:
    """The normal inverse-gamma posterior."""
    X, y = (leaf.astype(float) for leaf in rows.data)
    precision = np.eye(X.shape[1]) / WIDTH**2 + X.T @ X
    covariance = np.linalg.inv(precision)
    w = covariance @ X.T @ y
    a, b = SHAPE + len(y) / 2, RATE + (y @ y - w @ precision @ w) / 2
    sd = np.sqrt(b / (a - 1) * np.diag(covariance))
    evidence = log_gamma(a) - log_gamma(SHAPE) + SHAPE * np.log(RATE) - a * np.log(b) - len(y) / 2 * np.log(2 * np.pi)
    evidence += (np.linalg.slogdet(covariance)[1] - 2 * X.shape[1] * np.log(WIDTH)) / 2
    mean = np.append(w, np.log(b) - digamma(a))
    return Exact(mean, np.append(sd, np.sqrt(polygamma(1, a))), float(evidence))


def ordinal() -> tuple[opvi.Target, Rows]:
    """Ordered logit with four grades: three slopes, the first cut, and the logarithms of the gaps between cuts."""
    rng = generator(11)
    X = columns(rng, 3)
    mean = X @ [1.0, -0.5, 0.4]
    grade = np.digitize(mean + rng.logistic(size=ROWS), [-1.0, 0.5, 2.0]).astype(np.int32)

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        cut = v[3] + jnp.concatenate([jnp.zeros(1, v.dtype), jnp.exp(v[4:]).cumsum()])
        eta = rows[0] @ v[:3]
        far = jnp.array([40.0], v.dtype)
        edges = jnp.concatenate([cut[:1] - far, cut, cut[-1:] + far])
        below, above = edges[rows[1]] - eta, edges[rows[1] + 1] - eta
        # log(σ(above) − σ(below)), without a difference of numbers near each other
        gap = jnp.log(-jnp.expm1(below - above))
        return jax.nn.log_sigmoid(above) + jax.nn.log_sigmoid(-below) + gap

    def log_prior(v: jax.Array) -> jax.Array:
        return standard(v[:3]) + norm.logpdf(v[3], 0, 3) + standard(v[4:])

    return plain(log_prior, log_likelihood, 6), Rows((X, grade), grade, X[:, 0], grade - mean)


def weibull() -> tuple[opvi.Target, Rows]:
    """Survival times by four columns, a third of them censored; the last parameter is the logarithm of the shape."""
    rng = generator(12)
    X = columns(rng, 4)
    mean = X @ [0.5, -0.4, 0.3, 0.0] + 1.0
    time = np.exp(mean) * rng.weibull(1.5, ROWS)
    end = np.exp(1.6) * rng.uniform(0.2, 1.8, ROWS)
    seen = numbers(time <= end)
    log_time = numbers(np.log(np.minimum(time, end)))

    def log_likelihood(v: jax.Array, rows: tuple) -> jax.Array:
        X, log_time, seen = rows
        z = jnp.exp(v[5]) * (log_time - X @ v[1:5] - v[0])
        return seen * (v[5] - log_time + z) - jnp.exp(z)

    return plain(standard, log_likelihood, 6), Rows((X, log_time, seen), log_time, X[:, 0], log_time - mean)


def counts_in_groups() -> tuple[opvi.Target, Rows]:
    """A hierarchical Poisson model as NumPyro's users write it: six levels around their mean, and a weekend."""
    rng = generator(13)
    group = rng.integers(6, size=ROWS).astype(np.int32)
    weekend = numbers(rng.uniform(size=ROWS) < 2 / 7)
    level = 1.5 + 0.7 * rng.normal(size=6)
    rate = np.exp(level[group] + 0.3 * weekend)
    y = rng.poisson(rate)

    def model(group: jax.Array, weekend: jax.Array, counts: jax.Array | None = None) -> None:
        mean = numpyro.sample("mean", dist.Normal(1, 1))
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("groups", 6):
            level = numpyro.sample("level", dist.Normal(mean, spread))
        effect = numpyro.sample("weekend effect", dist.Normal(0, 1))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("counts", dist.Poisson(jnp.exp(level[group] + effect * weekend)), obs=counts)

    rows = (group, weekend), y.astype(np.int32)
    target = opvi.from_numpyro(model, example=rows)
    return target, Rows(rows, y, group, y - rate)


FAMILIES = {
    family.name: family
    for family in (
        Family("linear", linear, FIVE, linear_exact),
        Family("two modes", two_modes, FIVE, two_modes_exact),
        Family("poisson", poisson, (*FIVE, "nearly by y")),
        Family("poisson, trend 30 %", partial(poisson, 0.3), ("natural",)),
        Family("poisson, trend 60 %", partial(poisson, 0.6), ("natural",)),
        Family("student-t", student, (*FIVE, "outliers first")),
        Family("hierarchy", hierarchy, FIVE, hierarchy_exact),
        Family("negative binomial", negative_binomial, FIVE),
        Family("huber", huber, FIVE),
        Family("ordinal", ordinal, FIVE),
        Family("weibull", weibull, FIVE),
        Family("counts in groups", counts_in_groups, FIVE),
        Family("elec2, 1,000 rows", partial(elec2, 1_000), ("natural", "shuffled"), unit_normal=True),
        Family("elec2, 10,000 rows", partial(elec2, 10_000), ("natural", "shuffled"), unit_normal=True),
        Family("elec2, 45,312 rows", partial(elec2, 45_312), ("natural", "shuffled"), unit_normal=True),
        Family("logistic 200, 500 rows", partial(logistic, 500), WIDE, unit_normal=True),
        Family("logistic 200, 2,000 rows", partial(logistic, 2_000), WIDE, unit_normal=True),
        Family("item response, 500 persons", partial(item_response, 500), WIDE),
        Family("item response, 2,000 persons", partial(item_response, 2_000), WIDE),
    )
}
