r"""Kronecker-factored Gauss–Newton particles: curvature that grows linearly with the parameters, for MLPs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._factors import diagonal, inverse, solve_positive
from opvi._steps import (
    PARTICLES,
    StepInfo,
    TargetSampler,
    compiled,
    predicted_rows,
    root_mean_square,
    row_densities,
    stand_ins,
    tick,
)
from opvi.filters._covariance import exactly
from opvi.filters._robust import checked_robust, trust_in_labels, trust_in_targets, unweighable
from opvi.predictive import Classes, Distribution, Normal, Predictive, predict
from opvi.targets import Architecture, Target, as_particles, cast, check_batch, draw
from opvi.targets._mlp import Bent, Layer, Layers, Passed, activation_and_slope, backward, forward
from opvi.types import Array, Batch, Key, Particles, Scalar, Start, State, Tree

FIRST_MEMORY = 400.0  # rows; early factors are stale, so that memory grows with the rows seen
FIRST_OUTPUTS = 0.01  # the output curvature before any row, which counts as one round
REFRESH_ALWAYS = 100  # rows at the start over which every round inverts afresh
REFRESH_BELOW = 0.7  # invert afresh once forgetting has worn the damping down to this share
REFRESH_EVERY = 500  # rounds at the latest, because rounding adds up
DAMPING, WANDERING_DAMPING = 0.03, 0.3
SMALL = 1e-6


class Factor(NamedTuple):
    """A layer's curvature, $A \\otimes G$: a sum over inputs, a mean over outputs. All particles share one A of X."""

    inputs: Array | None  # A: [1, i+1, i+1] for the first layer, else [n, i+1, i+1]; None if the weights wander
    inverse: Array  # of the damped A
    outputs: Array  # G: [n, o, o]


class KFACState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    factors: list[Factor]
    kept: Scalar  # the share of the damping that forgetting has left in the inverses
    round: Array
    rows: Array


Learnt = tuple[KFACState, StepInfo]


class Seen(NamedTuple):
    """Activations and gradients of all particles at each layer, for a batch."""

    inputs: list[Array]  # [n, B, i+1], with a 1 for the bias; of the first layer [1, B, i+1]
    slopes: list[Array]  # [n, B, o]: gradient of the log density
    roots: list[Array]  # [n, B·K, o]: root of the curvature, weighted
    sums: Array  # [n, B, o]: the first layer's outputs before the activation
    outputs: Array  # [n, B, C]
    head_root: Array  # [n, B, C, K]
    log_density: Array  # [n, B]
    weight: Array  # [B]: what the rows are learnt by


class Round(NamedTuple):
    """How much a round remembers and learns."""

    lam: Scalar  # λ of A
    gain: Scalar  # of G
    back: Scalar  # how far the variance of wandering weights goes back to the prior's
    fresh: Array  # whether to invert A afresh


@dataclass(frozen=True)
class KFAC(TargetSampler):
    """Settings of `kfac`."""

    others: tuple[Target, ...]  # as the target, but for their activation; each has as many particles
    damping: float
    half_life: float
    wander: bool
    largest_change: float
    robust: float | None = field(default=None, kw_only=True)

    @property
    def targets(self) -> tuple[Target, ...]:
        """All targets, in the order of their particles."""
        return self.target, *self.others

    @property
    def architectures(self) -> list[Architecture]:
        """Their layers."""
        return _architectures(self.targets)

    def init(self, key: Key, particles: Start = None) -> KFACState:
        """Return the state before any row."""
        w = _dealt(self.targets, key, self.particles if particles is None else particles)
        n, dtype = len(w), w.dtype
        factors = []
        for index, (fan_in, fan_out) in enumerate(self.architectures[0].mlp.shapes):
            nothing = jnp.zeros((n if index else 1, fan_in + 1, fan_in + 1), dtype)
            start = jnp.tile(FIRST_OUTPUTS * jnp.eye(fan_out, dtype=dtype)[None], (n, 1, 1))
            factors.append(Factor(None if self.wander else nothing, nothing, start))
        zero = jnp.zeros((), jnp.int32)
        return KFACState(w, factors, jnp.zeros((), dtype), zero, zero)

    def step(self, key: Key, state: KFACState, batch: Batch) -> tuple[KFACState, StepInfo]:
        """Learn from a batch."""
        # The half-life is an argument: samplers that differ in it alone are one program.
        half_life = jnp.asarray(self.half_life, state.particles.dtype)
        return replace(self, half_life=math.inf)._step(key, state, batch, half_life)

    @compiled
    @exactly
    def _step(self, key: Key, state: KFACState, batch: Batch, half_life: Scalar) -> tuple[KFACState, StepInfo]:
        w, mlp = state.particles, self.architectures[0].mlp
        batch = cast(batch, w.dtype)
        check_batch(self.target, w[0], batch)
        clock = tick(state, batch)
        now = _pace(self, state, batch.weight.sum(), clock.round, half_life)
        layers = jax.vmap(mlp.split)(w)
        seen = _look(self, layers, batch)
        root_weight, total = jnp.sqrt(seen.weight), jnp.maximum(seen.weight.sum(), 1e-30)
        factors, moves, first = [], [], seen.sums
        for index, old in enumerate(state.factors):
            root, a = seen.roots[index], seen.inputs[index]
            G = (1 - now.gain) * old.outputs + now.gain * (root.mT @ root) / total
            A, inverse, Pa, left = _renewed(self, index, old, a * root_weight[None, :, None], G, now)
            shifted = G + (left + SMALL)[:, None, None] * jnp.eye(G.shape[-1], dtype=G.dtype)[None]
            step = solve_positive(shifted, (seen.slopes[index] * root_weight[None, :, None]).mT).mT  # δ G⁻¹
            if index == 0:
                first = first + jnp.broadcast_to(a @ Pa, (len(w), *a.shape[1:2] * 2)) @ step
                Pa = jnp.broadcast_to(Pa, (len(w), *Pa.shape[1:]))
            move = Pa @ step
            factors.append(Factor(A, inverse, G))
            moves.append(Layer(move[:, :-1], move[:, -1]))
        change = _outputs(self, jax.tree.map(jnp.add, layers, tuple(moves)), first) - seen.outputs
        moved = jnp.einsum("nbck,nbc->nbk", seen.head_root, change)
        divergence = 0.5 * ((moved**2).sum(2) * seen.weight[None]).sum(1) / total
        scale = jnp.minimum(1, jnp.sqrt(self.largest_change / (divergence + 1e-9)))
        move = scale[:, None] * jax.vmap(mlp.join)(moves)
        log_predictive, predicted = predicted_rows(batch, seen.log_density)
        good = jnp.isfinite((move**2).sum(1)) & ~jnp.isnan(log_predictive)
        move = jnp.where(good[:, None], move, 0)
        # The factors belong to all particles together: one bad batch must not spoil them.
        all_good = good.all() & jnp.isfinite(_diagonals(factors))
        kept = jnp.where(now.fresh, 1, state.kept * now.lam)
        factors, kept = jax.tree.map(
            lambda new, old: jnp.where(all_good, new, old), (factors, kept), (state.factors, state.kept)
        )
        info = StepInfo(clock.rows, log_predictive, root_mean_square(move), good.any(), predicted)
        # One bad particle does not end the run: it takes the place of another of its own target.
        learnt = ~jnp.isnan(log_predictive)
        info = info._replace(restarted=jnp.where(learnt & good.any(), (~good).sum(), 0))
        groups = good.reshape(len(self.targets), -1)
        size, keys = groups.shape[1], jax.random.split(jax.random.fold_in(key, clock.round), len(groups))
        which = jax.vmap(stand_ins)(keys, groups)
        which += size * jnp.arange(len(groups), dtype=which.dtype)[:, None]
        return KFACState((w + move)[which.reshape(-1)], factors, kept, clock.round, clock.rows), info

    def predict(self, state: State, x: Tree) -> Predictive:
        """Return the posterior predictive at inputs x, each particle with its own activation."""
        groups = jnp.split(state.particles, len(self.targets))
        said = [predict(t, w, x).components for t, w in zip(self.targets, groups, strict=True)]
        return Predictive(jax.tree.map(lambda *parts: jnp.concatenate(parts), *said))


def kfac(
    target: Target | Sequence[Target],
    *,
    damping: float | None = None,
    half_life: float = math.inf,
    wander: bool = False,
    largest_change: float = 0.2,
    robust: float | None = None,
) -> KFAC:
    r"""Natural-gradient steps $A^{-1} (a^\top \delta)\, G^{-1}$ for each layer of an MLP, one batch per round.

    $$A \gets \lambda_t A + a^\top a, \qquad G \gets (1 - w_t) G + w_t\, \overline{\delta \delta^\top}$$

    A is a sum, so steps shrink like $1/t$ by themselves, without a horizon or a step size. Particles are an ensemble
    of networks that learn well, not a posterior, and `draws` are these particles. The prior's precision times
    `damping` is split between the two factors by their traces. With `wander` the weights
    do a random walk instead of old rows fading, which follows faster changes:

    $$P \gets \rho P + (1 - \rho) P_0, \qquad P \gets (P^{-1} + a^\top a)^{-1}, \qquad P \approx A^{-1}$$

    Args:
        target: `opvi.mlp(...)` with any head; batches are pairs `(X, y)`. Or several targets that differ in their
            activation: each gets the same number of particles, and all share the first layer's A, the costliest factor.
        damping: the share of the prior's precision that damps the curvature; .03, or .3 for weights that wander.
        half_life: in rows; inputs older than that count half. Infinite by default. With `wander`, the
            number of rows over which a variance returns half-way to the prior's.
        wander: forget by a random walk of the weights.
        largest_change: bound on the mean KL divergence between predictions before and after a step.
        robust: None believes every row. A number c, in standard deviations of the particles' prediction: the likelihood
            of a row whose error r is larger gets the power $(c/r)^2$; a label predicted with probability p has
            $r^2 = (1-p)/p$. For Gaussian and class heads.
    """
    targets = (target,) if isinstance(target, Target) else tuple(target)
    _architectures(targets)
    damping = (WANDERING_DAMPING if wander else DAMPING) if damping is None else damping
    if not damping > 0 or not half_life > 0 or not largest_change > 0:
        raise ValueError(
            f"`damping`, `half_life` and `largest_change` are {damping}, {half_life}, {largest_change}; "
            "each must be greater than 0."
        )
    one, *others = targets
    usual = PARTICLES // len(targets) * len(targets)
    robust = checked_robust(robust)
    return KFAC(one, tuple(others), damping, half_life, wander, largest_change, particles=usual, robust=robust)


def in_turn(samplers: Sequence[KFAC], key: Key, states: Sequence[KFACState], batch: Batch) -> list[Learnt]:
    """Return what the steps of several samplers return.

    Those that differ only in their half-life share a loop: XLA would compile the same function again for each call.
    """
    done: dict[int, Learnt] = {}
    for one in dict.fromkeys(replace(sampler, half_life=math.inf) for sampler in samplers):
        alike = [i for i, sampler in enumerate(samplers) if replace(sampler, half_life=math.inf) == one]
        if len(alike) == 1:
            done[alike[0]] = samplers[alike[0]].step(key, states[alike[0]], batch)
            continue
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(states[i] for i in alike))
        half_lives = jnp.asarray([samplers[i].half_life for i in alike], stacked.particles.dtype)
        learnt = jax.lax.map(partial(_stepped, one, key, batch), (stacked, half_lives))
        done |= {i: jax.tree.map(partial(_taken, place), learnt) for place, i in enumerate(alike)}
    return [done[i] for i in range(len(samplers))]


def _taken(place: int, leaf: Array) -> Array:
    return jax.lax.index_in_dim(leaf, place, keepdims=False)


def _stepped(sampler: KFAC, key: Key, batch: Batch, given: tuple[KFACState, Scalar]) -> Learnt:
    state, half_life = given
    return sampler._step(key, state, batch, half_life)


def _by_target(sampler: KFAC, function: Callable[[Bent, Tree], Tree], of_particles: Tree) -> Tree:
    """Apply `function(activate, …)` to every particle, with the activation of its own target."""
    parts = jax.tree.map(lambda leaf: leaf.reshape(len(sampler.targets), -1, *leaf.shape[1:]), of_particles)
    said = [
        jax.vmap(partial(function, activation_and_slope(each.mlp.activation)))(jax.tree.map(itemgetter(i), parts))
        for i, each in enumerate(sampler.architectures)
    ]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *said)


def _look(sampler: KFAC, layers: Layers, batch: Batch) -> Seen:
    """Pass the batch through all networks, forward and back."""
    x, y = batch.data
    n = len(layers[0].bias)
    # Every particle has its own x: a product for each, and no transposed copy of the weights.
    given = layers, jnp.broadcast_to(x[None], (n, *x.shape))
    passed: Passed = _by_target(sampler, lambda activate, of_one: forward(of_one[0], of_one[1], activate), given)
    head = sampler.architectures[0].head.distribution
    slope, root = jax.vmap(lambda z: head(z, None).curvature(y))(passed.outputs)  # [n, B, C], [n, B, C, K]
    log_density = jax.vmap(lambda z: head(z, None).log_density(y))(passed.outputs)
    weight = batch.weight
    if sampler.robust is not None:
        weight = weight * _trust(jax.vmap(lambda z: head(z, None))(passed.outputs), log_density, y, sampler.robust)
    weighted = jnp.moveaxis(root, 3, 1) * jnp.sqrt(weight)[None, None, :, None]
    back = jax.vmap(jax.vmap(backward, (None, None, 0)))(layers, passed, jnp.concatenate([slope[:, None], weighted], 1))
    slopes = [leaf[:, 0] for leaf in back]
    roots = [leaf[:, 1:].reshape(n, -1, leaf.shape[-1]) for leaf in back]
    inputs = [with_one(x)[None], *map(with_one, passed.inputs[1:])]
    return Seen(inputs, slopes, roots, passed.sums[0], passed.outputs, root, log_density, weight)


def _trust(dist: Distribution, log_density: Array, y: Array, largest: float) -> Array:
    """Return the powers of the rows' likelihoods, from the predictions of all particles."""
    if isinstance(dist, Normal):
        return trust_in_targets(y, dist.mean, dist.variance, largest)
    if isinstance(dist, Classes):
        return trust_in_labels(row_densities(log_density), largest)
    raise TypeError(unweighable(dist))


def _outputs(sampler: KFAC, layers: Layers, first: Array) -> Array:
    """Return the networks' outputs, given the first layer's sums."""

    def one(activate: Bent, given: tuple[Layers, Array]) -> Array:
        others, sums = given
        return forward(others, activate(sums)[0], activate).outputs

    return _by_target(sampler, one, (layers[1:], first)) if len(layers) > 1 else first


def _pace(sampler: KFAC, state: KFACState, rows: Scalar, round_: Array, half_life: Scalar) -> Round:
    """Return how much this round remembers and learns."""
    before = state.rows.astype(rows.dtype)
    average = jnp.where(rows > 0, rows / (before + 2 * rows), 0)
    ratio = 2 ** (-rows / half_life)
    if sampler.wander:
        first = state.rows == 0
        return Round(jnp.ones_like(rows), jnp.maximum(1 - ratio, average), jnp.where(first, 1, 1 - ratio), first)
    growing = ((before + FIRST_MEMORY) / (before + rows + FIRST_MEMORY)) ** 2
    lam = jnp.minimum(growing, ratio)
    early = (state.rows < REFRESH_ALWAYS) | (round_ % REFRESH_EVERY == 0)
    fresh = early | (state.kept * lam < REFRESH_BELOW)
    return Round(lam, jnp.maximum(1 - lam, average), jnp.zeros_like(rows), fresh)


def _renewed(
    sampler: KFAC, index: int, old: Factor, a: Array, G: Array, now: Round
) -> tuple[Array | None, Array, Array, Array]:
    """Return A, its damped inverse P, the gain $P a^T$, and the remaining damping for G; a is weighted."""
    # α of each target: the precision that both factors' damping multiplies to.
    alphas = sampler.damping / np.array([a.mlp.start_variances[index] for a in sampler.architectures])
    mean_G = diagonal(G).mean(1) + SMALL  # [n]
    alpha = jnp.repeat(jnp.asarray(alphas, G.dtype), len(G) // len(alphas))  # [n]
    level, common = mean_G, alpha
    if index == 0:  # one for all
        level, common = jnp.nanmean(mean_G)[None], jnp.full(1, np.exp(np.log(alphas).mean()), G.dtype)
    if old.inputs is None:
        eye = jnp.eye(old.inverse.shape[-1], dtype=G.dtype)[None]
        inverse = (1 - now.back) * old.inverse + now.back * (level / common)[:, None, None] * eye
        return None, *_updated(inverse, a, now.lam), sampler.damping * mean_G
    A = now.lam * old.inputs + a.mT @ a
    mean_A = diagonal(A).mean(1) + SMALL
    shift = jnp.sqrt(mean_A / level * common)
    inverse, gain = jax.lax.cond(now.fresh, lambda: _afresh(A, a, shift), lambda: _updated(old.inverse, a, now.lam))
    return A, inverse, gain, alpha / shift


def _architectures(targets: Sequence[Target]) -> list[Architecture]:
    """Return the targets' layers; refuse targets unless all have the same layers."""
    out = [t.architecture for t in targets if t.architecture]
    if not out or len(out) < len(targets):
        raise TypeError(
            "Kronecker factors need the layers of an MLP: a target made by `opvi.mlp(...)`, with variances as numbers "
            "(or None) and not as `Gamma` priors."
        )
    if len({a.mlp.sizes for a in out}) > 1:
        raise ValueError(f"the targets have layers {[a.mlp.sizes for a in out]}, but all must have the same sizes.")
    return out


def _dealt(targets: Sequence[Target], key: Key, particles: Start) -> Particles:
    """Return starting particles, the same number for each target, target by target."""
    counted = isinstance(particles, int | np.integer) and len(targets) > 1
    w = None if counted else as_particles(targets[0], key, particles)
    n = int(particles) if w is None else len(w)
    if n < len(targets) or n % len(targets):
        raise ValueError(f"`particles` is {n}, but {len(targets)} targets need a multiple of {len(targets)}.")
    if w is not None:
        return w
    each = n // len(targets)
    return jnp.concatenate([draw(t, jax.random.fold_in(key, i), each) for i, t in enumerate(targets)])


def with_one(x: Array) -> Array:
    """Return the inputs with a 1 for the bias."""
    return jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1), x.dtype)], -1)


def _afresh(A: Array, a: Array, shift: Array) -> tuple[Array, Array]:
    r"""Return $P = (A + \text{shift}\, I)^{-1}$ and $P a^\top$."""
    P = inverse(A + shift[:, None, None] * jnp.eye(A.shape[-1], dtype=A.dtype)[None])
    P = (P + P.mT) / 2
    return P, P @ a.mT


def _updated(P: Array, a: Array, lam: Scalar) -> tuple[Array, Array]:
    r"""Return $(\lambda P^{-1} + a^\top a)^{-1}$ and its product with $a^\top$, by Woodbury's identity."""
    Pa = P @ a.mT
    gain = solve_positive(a @ Pa + lam * jnp.eye(a.shape[1], dtype=a.dtype)[None], Pa.mT).mT
    P = (P - gain @ Pa.mT) / lam
    return (P + P.mT) / 2, gain


def _diagonals(factors: list[Factor]) -> Scalar:
    """Return a number that is finite only if every factor's diagonal is."""
    leaves = jax.tree.leaves(factors)
    return sum(((diagonal(leaf) ** 2).sum() for leaf in leaves), jnp.zeros((), leaves[0].dtype))
