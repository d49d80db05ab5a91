r"""A bank of trackers: their predictions mixed by weights that follow the prequential score."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from opvi._forks import Unforked
from opvi._steps import checked_count, compiled, mean_over, one_more, posterior_draws
from opvi.filters._covariance import exactly
from opvi.predictive import Predictive
from opvi.types import Array, Batch, Key, Particles, Predicted, Sampler, Scalar, Start, State, Tree

ROUND = 20  # rows over which a weight changes by `rate`, and `share` is given back
LARGEST_RATIO = 10.0  # one row that a member alone foresaw must not hand it the whole bank


def start(members: int, dtype: jnp.dtype) -> Array:
    """Return equal log weights `[K]`."""
    return jnp.full(members, -math.log(members), dtype)


def update(log_weights: Array, log_density: Array, weight: Array, *, rate: float = 0.5, share: float = 0.002) -> Array:
    r"""Return the log weights after a batch to which member k gave the densities $p_k(y_b)$.

    $$w_k \gets (1 - \sigma)\, \frac{w_k e^{\eta g_k}}{\sum_j w_j e^{\eta g_j}} + \frac{\sigma}{K}, \qquad
      g_k = \operatorname{mean}_b \frac{p_k(y_b)}{\sum_j w_j p_j(y_b)}$$

    g is the gradient of the mixture's mean log score, so the mixture does as well as the best fixed *mixture*, and
    the fixed share lets it follow when another one becomes best.

    Args:
        log_weights: $\log w$, `[K]`.
        log_density: $\log p_k(y_b)$, `[K, B]`.
        weight: the weights of the rows, `[B]`.
        rate: $\eta$ for 20 rows; proportionally larger for more.
        share: $\sigma$ for 20 rows; 0 assumes that the best member stays the best.
    """
    total = weight.sum()
    mixture = logsumexp(log_weights[:, None] + log_density, axis=0)
    ratio = jnp.exp(jnp.minimum(log_density - mixture[None], math.log(LARGEST_RATIO)))
    gradient = (ratio * weight[None]).sum(1) / jnp.maximum(total, 1e-30)
    rounds = total / ROUND
    log_weights = jax.nn.log_softmax(log_weights + rate * rounds * gradient)
    if share == 0:
        return log_weights
    kept = (1 - share) ** rounds
    return jnp.logaddexp(log_weights + jnp.log(kept), jnp.log1p(-kept) - math.log(len(log_weights)))


class BankState(NamedTuple):
    """What the next round needs, and nothing else."""

    members: tuple[State, ...]
    log_weights: Array  # [K]
    round: Array
    rows: Array

    @property
    def particles(self) -> Array:
        """The first member's particles."""
        return self.members[0].particles


class BankInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array
    log_predictive: Scalar
    drift: Scalar
    finite: Array
    weights: Array  # [K]: before the round
    predicted: Predicted | None = None  # for each row, before learning


@dataclass(frozen=True)
class Bank(Unforked):
    """Settings of `bank`."""

    members: tuple[Sampler, ...]
    rate: float
    share: float

    def init(self, key: Key, particles: Start = None) -> BankState:
        """Return the state before any row, every member with particles of its own."""
        states = tuple(m.init(jax.random.fold_in(key, i), particles) for i, m in enumerate(self.members))
        zero = jnp.zeros((), jnp.int32)
        return BankState(states, start(len(states), states[0].particles.dtype), zero, zero)

    @compiled
    @exactly
    def step(self, key: Key, state: BankState, batch: Batch) -> tuple[BankState, BankInfo]:
        """Predict a batch `(X, y)`, and let every member learn from it."""
        x, y = batch.data
        log_density = jnp.stack([p.log_density(y) for p in _each(self, state, x)])
        pairs = enumerate(zip(self.members, state.members, strict=True))
        done = [m.step(jax.random.fold_in(key, i), s, batch) for i, (m, s) in pairs]
        states, infos = tuple(s for s, _ in done), [info for _, info in done]
        weight = jnp.asarray(batch.weight).astype(log_density.dtype)
        rows = logsumexp(state.log_weights[:, None] + log_density, axis=0)
        log_weights = update(state.log_weights, log_density, weight, rate=self.rate, share=self.share)
        good = jnp.isfinite(log_weights).all()
        info = BankInfo(
            infos[0].rows,
            mean_over(batch._replace(weight=weight), rows),
            jnp.stack([i.drift for i in infos]).mean(),
            jnp.stack([i.finite for i in infos]).all() & good,
            jnp.exp(state.log_weights),
            Predicted(rows),
        )
        log_weights = jnp.where(good, log_weights, state.log_weights)
        return BankState(states, log_weights, one_more(state.round), infos[0].rows), info

    def predict(self, state: BankState, x: Tree) -> Predictive:
        """Return the mixture of the members' predictives at inputs x."""
        return mixed(_each(self, state, x), state.log_weights)

    def draws(self, state: BankState, key: Key, n: int) -> Particles:
        """Return n draws from the posterior: pick a member by its weight, then draw from it."""
        sizes = {member.particles.shape[1] for member in state.members}
        if len(sizes) > 1:
            raise ValueError(
                f"the members of this bank have {sorted(sizes)} parameters, so that their draws are not one sample. "
                "Draw from one of them: `sampler.members[0].draws(state.members[0], key, n)`."
            )
        n, pairs = checked_count(n), enumerate(zip(self.members, state.members, strict=True))
        each = jnp.stack([posterior_draws(m, s, jax.random.fold_in(key, i), n) for i, (m, s) in pairs])
        which = jax.random.categorical(jax.random.fold_in(key, len(each)), state.log_weights, shape=(n,))
        return each[which, jnp.arange(n)]

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""
        return f"a bank of {len(self.members)} trackers, mixed by their prequential scores"

    def __str__(self) -> str:
        return self.about


def bank(members: Sequence[Sampler], *, rate: float = 0.5, share: float = 0.002) -> Bank:
    r"""Combine several trackers into one: each learns by itself, and `update`'s weights mix their predictions.

    $$p(y \mid x) = \sum_k w_k\, p_k(y \mid x)$$

    Args:
        members: trackers of the same y, whose predictives have components of one kind.
        rate: see `update`.
        share: see `update`.
    """
    if not members:
        raise ValueError("`members` is empty, but a bank needs at least one tracker.")
    if not rate >= 0 or not 0 <= share < 1:
        raise ValueError(f"`rate` and `share` are {rate} and {share}, but rate ≥ 0 and 0 ≤ share < 1 are needed.")
    return Bank(tuple(members), rate, share)


def _each(sampler: Bank, state: BankState, x: Tree) -> list[Predictive]:
    pairs = zip(sampler.members, state.members, strict=True)
    return [m.predict(s, x) for m, s in pairs]  # type: ignore[misc]


def mixed(predictives: Sequence[Predictive], log_weights: Array) -> Predictive:
    """Return one predictive that has the components of several."""
    parts, weights = [], []
    for p, log_weight in zip(predictives, log_weights, strict=True):
        if p.temperature is not None:
            raise TypeError(
                "a member's predictive has a temperature, but a mixture is made of plain components. "
                "Calibrate the bank as a whole: `opvi.tracking._temperature`."
            )
        own = p.log_weights
        n, rows = jax.tree.leaves(p.components)[0].shape[:2]
        own = jnp.full((n, 1), -math.log(n), log_weight.dtype) if own is None else own.reshape(n, -1)
        parts.append(p.components)
        weights.append(jnp.broadcast_to(own + log_weight, (n, rows)))
    components = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return Predictive(components, jnp.concatenate(weights))
