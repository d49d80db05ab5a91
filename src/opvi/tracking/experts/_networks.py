r"""Networks that learn as extended Kalman filters, each with a covariance and a memory of its own."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.filters import _covariance as covariance
from opvi.filters import _kalman as kalman
from opvi.filters._covariance import Blocks, Covariance, variances, when, within
from opvi.targets import MLP, Layer
from opvi.tracking._mixing import _members as members
from opvi.tracking._mixing._members import USUAL_ROWS, Members
from opvi.tracking._mixing._running import running_mean
from opvi.tracking._placed import placed
from opvi.tracking.experts import _layers as layers
from opvi.tracking.experts import _pace as pacing
from opvi.tracking.experts._expert import BaseExpert, Belief, Context, Rows, Units
from opvi.types import Array, Key, Particles, Scalar

LARGEST_INPUT = 10.0  # standard deviations; one wild value must not steer a network
LARGEST_GROWTH = 4.0  # forgetting never lets a variance exceed this many times the prior's
ERROR_ROUNDS = 20.0  # of the usual size, over which a network's squared error is averaged
PAIR = 5  # rows learnt at once while warming up, where each few are linearised after those before
LARGEST_SURPRISE = 5.0  # standard deviations; an outlier teaches no more than this
BIAS_SPREAD = 0.5  # of the hidden biases, at the start


class Settings(NamedTuple):
    """What sets one network apart from another: a number for each."""

    kind: tuple[float, ...]  # of the activation: `TANH`, `RELU` or `SINE`
    share: tuple[float, ...]  # the noise taken in learning, as a share of the network's own squared error
    smallest: tuple[float, ...]  # and its floor
    bias: tuple[float, ...]  # prior variance of the hidden biases, relative to that of the weights
    forgetting: tuple[float, ...]  # the factor for every USUAL_ROWS rows


class NetworksState(NamedTuple):
    """What the next rows need, and nothing else."""

    particles: Particles  # [n, d]
    past: Covariance
    members: Members  # how the networks are weighed
    error: Array  # [n]: running squared error of each, y standardised
    rounds: Scalar  # of USUAL_ROWS rows, behind these
    rows: Scalar
    begin: Particles  # [n, d]: the networks before any row
    pace: Array | None  # how fast to forget, and why: `_pace`; None with a given half-life
    trail: Particles | None  # [n, d]: a running mean of the networks


class Linearised(NamedTuple):
    """What every network predicts, and how that depends on its weights."""

    mean: Array  # [n, B]
    variance: Array  # [n, B]: without noise
    J: Array  # [n, K, B, D]: the Jacobian, in blocks
    JC: Array  # and its product with the covariance
    first: Array  # [n, B, units]: the slopes at the first layer's sums


@dataclass(frozen=True)
class Networks(BaseExpert):
    """Settings of networks with one output each."""

    hidden: tuple[int, ...]
    settings: Settings
    paced: bool  # whether they forget faster while errors repeat the latest moves
    warm_up: int  # rows that are learnt a few at a time
    budget: float  # bytes for all covariances

    @property
    def count(self) -> int:
        """The number of networks."""
        return len(self.settings.kind)

    def network(self, columns: int) -> MLP:
        """Return the layers of one network."""
        return MLP((columns, *self.hidden, 1), bias_spread=BIAS_SPREAD)

    def blocks(self, columns: int) -> Blocks:
        """Return how a covariance is cut to fit the budget."""
        return _blocks(self.network(columns), self.budget / 4 / self.count)

    def each(self, name: str, dtype: Any) -> Array:
        """Return one of the settings as an array `[n]`."""
        return jnp.asarray(getattr(self.settings, name), dtype)

    def init(self, key: Key, columns: int, dtype: Any) -> NetworksState:
        """Return the state before any row."""
        network = self.network(columns)
        w = jax.vmap(lambda k: network.join(network.init(k)))(jax.random.split(key, self.count)).astype(dtype)
        return self.starting(w)

    def starting(self, w: Particles) -> NetworksState:
        """Return the state of networks with these weights before any row."""
        zero = jnp.zeros((), w.dtype)
        return NetworksState(
            w,
            covariance.start(_prior(self, _columns(self, w), w.dtype)),
            members.start(self.count, w.dtype),
            jnp.ones(self.count, w.dtype),
            zero,
            zero,
            w,
            pacing.start(w.dtype) if self.paced else None,
            w if self.paced else None,
        )

    def predict(self, state: NetworksState, rows: Rows) -> Belief:
        """Return the networks' weighted mean."""
        seen = _linearise(self, state, _inputs(rows))
        mean, variance = members.combine(state.members, seen.mean, seen.variance)
        return Belief(mean, variance, slope=_slopes(self, state, seen.first), work=seen)

    def learn(self, key: Key, state: NetworksState, rows: Rows, context: Context) -> NetworksState:
        """Learn from rows: one Kalman update of every network."""
        seen: Linearised = context.belief.work
        scored = context.scored * context.trust
        new = _learn_errors(state, seen.mean, rows.y, scored, context.trust)
        if state.pace is not None and state.trail is not None:
            move = context.belief.mean - state.members.weights @ _means(self, state.trail, _inputs(rows))
            pace = pacing.learn(state.pace, rows.y - context.belief.mean, move, scored, context.error)
            new = new._replace(pace=pace)
        early = (new.rows <= self.warm_up) & (len(rows.weight) > PAIR)  # few rows are all first
        weight = rows.weight * context.trust
        new = _absorb(self, new, seen, rows._replace(weight=weight), early | context.renewed, context.renewed)
        if new.pace is not None and state.trail is not None:
            new = new._replace(trail=pacing.follow(state.trail, new.particles, new.pace, scored.sum()))
        return new

    def relearn(self, state: NetworksState, rows: Rows) -> NetworksState:
        """Learn from rows seen before, which teach the weights and nothing else."""
        seen, no = _linearise(self, state, _inputs(rows)), jnp.array(False)
        new = _absorb(self, state, seen, rows, no, no)
        return state._replace(particles=new.particles, past=new.past)

    def rescale(self, state: NetworksState, units: Units) -> NetworksState:
        """Return the same functions in new units."""
        columns = len(units.shift)
        network = self.network(columns)
        change = layers.bounded_change(units, _first_doubt(self, state, columns) if self.hidden else None)
        matrices = layers.covariances_in(network, self.blocks(columns), change, state.past.matrices)
        express = jax.vmap(lambda w: layers.re_express(network, change, w, units.begins))
        return state._replace(
            particles=express(state.particles),
            trail=None if state.trail is None else express(state.trail),
            past=state.past._replace(matrices=matrices),
            error=state.error * units.output_ratio**2,
            members=members.rescale(state.members, units.output_ratio),
        )

    def forget(self, state: NetworksState, keep: Scalar) -> NetworksState:
        """Return networks as little sure of themselves as after a share `keep` of the rows; 0: those before any row."""
        fresh = self.starting(state.begin)
        prior = _prior(self, _columns(self, state.begin), state.error.dtype)
        none = jnp.zeros((*prior.shape[:2], 1, prior.shape[2]), prior.dtype)
        gamma = jnp.broadcast_to(jnp.maximum(keep, 1e-3), (self.count,)).astype(prior.dtype)
        past = covariance.shed(state.past, none, gamma, LARGEST_GROWTH * prior)
        kept = state._replace(past=past, pace=pacing.without_trail(state.pace))
        return jax.tree.map(lambda a, b: jnp.where(keep > 0, a, b), kept, fresh)

    def widen(self, state: NetworksState, fresh: NetworksState) -> NetworksState:
        """Return the networks with more columns, whose weights are as in the fresh ones."""
        columns, wide = _columns(self, state.begin), _columns(self, fresh.begin)
        width, dim = self.network(columns).shapes[0][1], self.network(wide).dim
        places = np.r_[0 : columns * width, wide * width : dim]
        matrices = layers.widened_covariances(
            state.past.matrices, fresh.past.matrices, (self.blocks(columns), self.blocks(wide)), places
        )
        return state._replace(
            particles=placed(fresh.particles, (slice(None), places), state.particles),
            begin=placed(fresh.begin, (slice(None), places), state.begin),
            trail=None if state.trail is None else placed(fresh.particles, (slice(None), places), state.particles),
            pace=pacing.without_trail(state.pace),
            past=state.past._replace(matrices=matrices),
        )


def usual_settings(count: int, half_life: float | None = None) -> Settings:
    """Return settings of five groups in turn: {tanh, ReLU} × {bold, careful} and bold sine.

    Without a half-life, every fifth turn has a shorter memory.
    """
    bold, careful = (0.3, 0.01, 1.0), (0.05, 0.001, 8.0)
    groups = [(kind, *rest) for kind in (layers.TANH, layers.RELU) for rest in (bold, careful)]
    groups.append((layers.SINE, *bold))
    forgetting = FORGETTING if half_life is None else (0.5 ** (USUAL_ROWS / half_life),)
    rows = [(*groups[i % len(groups)], forgetting[i // len(groups) % len(forgetting)]) for i in range(count)]
    return Settings(*zip(*rows, strict=True))


FORGETTING = (0.998, 0.99, 0.995)  # for 20 rows, of the groups in turn


@lru_cache(256)
def _blocks(network: MLP, largest: float) -> Blocks:
    return within(*network.units, largest)


def _columns(sampler: Networks, w: Particles) -> int:
    """Return how many columns networks with these weights see."""
    empty = sampler.network(0).dim
    return (w.shape[1] - empty) // (sampler.hidden[0] if sampler.hidden else 1)


def _inputs(rows: Rows) -> Array:
    return jnp.clip(rows.z, -LARGEST_INPUT, LARGEST_INPUT)


def _linearise(sampler: Networks, state: NetworksState, z: Array) -> Linearised:
    """Return what the networks predict at standardised inputs z `[B, F]`."""
    network, blocks = sampler.network(z.shape[1]), sampler.blocks(z.shape[1])
    outputs = jax.vmap(lambda w, kind: layers.outputs(network, w, kind, z))
    mean, jacobian = outputs(state.particles, sampler.each("kind", z.dtype))
    J = jnp.moveaxis(blocks.gather(jacobian), 1, 2)
    JC = kalman.times(J, state.past)
    inputs, width = network.shapes[0]
    first = jacobian[:, :, inputs * width : (inputs + 1) * width]  # in its biases
    return Linearised(mean, jnp.maximum((JC * J).sum((1, 3)), 0), J, JC, first)


def _means(sampler: Networks, particles: Particles, z: Array) -> Array:
    """Return what each network predicts, `[n, B]`."""
    each = jax.vmap(lambda w, kind: layers.output(sampler.network(z.shape[1]), w, kind, z))
    return each(particles, sampler.each("kind", z.dtype))


def _slopes(sampler: Networks, state: NetworksState, first: Array) -> Array:
    r"""Return the gradients of the weighted mean in z `[B, F]`, from those at the first layer's sums."""
    width = first.shape[2]
    inputs = _columns(sampler, state.particles)
    weights = state.particles[:, : inputs * width].reshape(-1, inputs, width)
    return jnp.einsum("nbh,nfh->bf", first, weights * state.members.weights[:, None, None])


def _learn_errors(state: NetworksState, mean: Array, y: Array, scored: Array, trust: Array) -> NetworksState:
    """Return the state after errors of predictions made before learning."""
    residual, share = mean - y[None], scored.sum() / USUAL_ROWS
    # Not w but w²: w times the squared error would be c² however far the row is off.
    error = (residual**2 * (scored * trust)[None]).sum(1) / jnp.maximum((scored * trust).sum(), 1e-30)
    error = running_mean(state.error, error, state.rounds, share, ERROR_ROUNDS)
    return state._replace(
        members=members.learn(state.members, residual, scored),
        error=jnp.where(share > 0, jnp.maximum(error, 0), state.error),
        rounds=state.rounds + share,
    )


def _absorb(
    sampler: Networks, state: NetworksState, seen: Linearised, rows: Rows, renew: Array, moved: Array
) -> NetworksState:
    """Return the state after a Kalman update of every network, each with its own noise.

    Args:
        sampler: the settings.
        state: before the rows.
        seen: what the networks predict for them.
        rows: inputs, targets and weights.
        renew: whether to linearise every few rows at the networks as moved by those before.
        moved: whether the networks have changed since they were `seen`.
    """
    z, target, weight = _inputs(rows), rows.y, rows.weight
    size, fill = min(PAIR, len(weight)), -len(weight) % min(PAIR, len(weight))
    columns, dtype = z.shape[1], z.dtype
    blocks = sampler.blocks(columns)
    z, target, weight = (jnp.pad(a, [(0, fill), *[(0, 0)] * (a.ndim - 1)]) for a in (z, target, weight))
    R = jnp.maximum(sampler.each("share", dtype) * state.error, sampler.each("smallest", dtype))
    root = jnp.sqrt(weight[None] / R[:, None])

    def look(seen: Linearised, target: Array, root: Array) -> kalman.Look:
        A, AC = (part * root[:, None, :, None] for part in (seen.J, seen.JC))
        return kalman.Look(A, AC, (target[None] - seen.mean) * root)

    def again(p: Array, move: Array) -> kalman.Look:
        here = [jax.lax.dynamic_slice_in_dim(a, p * size, size, axis) for a, axis in ((z, 0), (target, 0), (root, 1))]
        there = state._replace(particles=state.particles + blocks.scatter(move))
        return look(_linearise(sampler, there, here[0]), *here[1:])

    some = ((0, 0), (0, fill))
    wide = seen._replace(
        mean=jnp.pad(seen.mean, some),
        **{name: jnp.pad(getattr(seen, name), ((0, 0), *some, (0, 0))) for name in ("J", "JC")},
    )
    filled = jnp.max(jnp.where(weight > 0, jnp.arange(1, len(weight) + 1, dtype=jnp.int32), 0))
    total = weight.sum()
    forgetting = sampler.each("forgetting", dtype) ** (total / USUAL_ROWS * pacing.faster(state.pace))
    largest = LARGEST_GROWTH * _prior(sampler, columns, dtype)

    def update(parts: tuple[Particles, Covariance]) -> tuple[Particles, Covariance]:
        gain, move = kalman.in_turn(look(wide, target, root), again, renew, moved, LARGEST_SURPRISE, size, filled)
        done = kalman.absorb(parts[1], gain, move, forgetting, largest)
        return parts[0] + blocks.scatter(done.move), done.past

    particles, past = when(total > 0, update, (state.particles, state.past))
    return state._replace(particles=particles, past=past, rows=state.rows + total)


def _prior(sampler: Networks, columns: int, dtype: Any) -> Array:
    """Return the prior variances `[n, K, D]`; 1 in the padding.

    They are 1/(inputs + 1), for hidden biases a multiple of that, and 1 for the last bias.
    """
    network = sampler.network(columns)
    parts = network.prior_variances

    def one(bias: Scalar) -> Array:
        hidden = [Layer(jnp.full_like(bias, v.weights), bias * v.bias) for v in parts[:-1]]
        last = Layer(jnp.full_like(bias, parts[-1].weights), jnp.full_like(bias, parts[-1].bias))
        return network.join([*hidden, last])

    gathered = sampler.blocks(columns).gather(jax.vmap(one)(sampler.each("bias", dtype)))
    return jnp.where(gathered > 0, gathered, 1)


def _first_doubt(sampler: Networks, state: NetworksState, columns: int) -> Array:
    """Return the variance of each column's weights in the first layer, as a share of the prior's `[F]`."""
    share = variances(state.past) / _prior(sampler, columns, state.error.dtype)
    width = sampler.network(columns).shapes[0][1]
    return sampler.blocks(columns).scatter(share)[:, : columns * width].mean(0).reshape(columns, width).mean(1)


def longest_half_life(settings: Settings) -> float:
    """Return the longest half-life of the networks, in rows."""
    longest = max(settings.forgetting)
    return math.inf if longest >= 1 else USUAL_ROWS * math.log(0.5) / math.log(longest)
