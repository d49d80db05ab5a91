r"""Kronecker-factored Gauss–Newton particles: curvature that grows linearly with the parameters, for MLPs."""

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi.algorithms.common import StepInfo, compiled, log_predictive_of, root_mean_square, tick
from opvi.targets import Layer, Target, as_particles, cast, check_batch
from opvi.types import Algorithm, Array, Batch, Key, Particles

REFRESH_EVERY = 25  # rounds between fresh inverses; in between they are updated by Woodbury's identity
SMALL = 1e-6


class Factor(NamedTuple):
    """A layer's curvature, $A \\otimes G$: a sum over inputs, a mean over outputs."""

    inputs: Array  # [i+1, i+1] for the first layer, whose inputs all particles share; else [n, i+1, i+1]
    inverse: Array  # of the damped inputs
    outputs: Array  # [n, o, o]


class KFACState(NamedTuple):
    """What the next round needs, and nothing else."""

    particles: Particles
    factors: list[Factor]
    round: Array
    rows: Array


class Passed(NamedTuple):
    """What one particle's pass over a batch leaves at each layer."""

    inputs: list[Array]  # [B, i+1], with a 1 for the bias
    slopes: list[Array]  # [B, o]: gradient of the log density, weighted
    roots: list[Array]  # [B·K, o]: root of the curvature, weighted
    outputs: Array  # [B, C]
    head_root: Array  # [B, C, K]
    log_density: Array  # [B]


def kfac(
    target: Target,
    *,
    damping: float = 0.03,
    half_life: float = math.inf,
    largest_change: float = 0.2,
) -> Algorithm:
    r"""Natural-gradient steps $A^{-1} (a^\top \delta)\, G^{-1}$ for each layer of an MLP, one batch a round.

    $$A \gets \lambda_t A + a^\top a, \qquad G \gets (1 - w_t) G + w_t\, \overline{\delta \delta^\top}$$

    A is a sum, so steps shrink like $1/t$ by themselves; no horizon and no step size are needed. The
    prior's precision times `damping` is split between both factors by their traces.

    Args:
        target: `opvi.mlp(...)` with any head; batches are pairs `(X, y)`.
        damping: the share of the prior's precision that damps the curvature.
        half_life: in rounds; inputs older than that count half. Without end by default.
        largest_change: bound on the mean KL divergence between predictions before and after a step.
    """
    architecture = target.architecture
    if architecture is None:
        raise TypeError(
            "Kronecker factors need the layers of an MLP: a target made by `opvi.mlp(...)`, with variances as numbers "
            "(or None) and not as `Gamma` priors."
        )
    if not damping > 0 or not half_life > 0 or not largest_change > 0:
        raise ValueError(
            f"`damping`, `half_life` and `largest_change` are {damping}, {half_life}, {largest_change}; "
            "each must be greater than 0."
        )
    forget_rate = 1 - 0.5 ** (1 / half_life)
    sizes = architecture.sizes
    layers = list(itertools.pairwise(sizes))
    damp = [math.sqrt(damping / variance) for variance in architecture.prior_variances]  # √α, for either factor

    def init(key: Key, particles: Any) -> KFACState:
        w = as_particles(target, key, particles)
        n, dtype = len(w), w.dtype
        factors = []
        for index, (fan_in, fan_out) in enumerate(layers):
            shape = (fan_in + 1,) * 2 if index == 0 else (n, fan_in + 1, fan_in + 1)
            start = jnp.tile(0.01 * jnp.eye(fan_out, dtype=dtype)[None], (n, 1, 1))
            factors.append(Factor(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), start))
        zero = jnp.zeros((), jnp.int32)
        return KFACState(w, factors, zero, zero)

    def pass_over(w: Array, data: Any, weight: Array) -> Passed:
        x, y = data
        weights = target.unravel(w)["weights"]
        inputs, bends = [], []
        for layer in weights:
            a = jnp.concatenate([x, jnp.ones((len(x), 1), x.dtype)], 1)
            z = a @ jnp.concatenate([layer.weights, layer.bias[None]])
            inputs.append(a)
            x, bend = jax.jvp(architecture.activation, (z,), (jnp.ones_like(z),))
            bends.append(bend)
        dist = architecture.head.distribution(z, None)
        slope, head_root = dist.curvature(y)
        root = jnp.swapaxes(head_root, 1, 2)  # [B, K, C]
        slopes, roots = [], []
        for layer, bend in zip(reversed(weights), [None, *reversed(bends[:-1])], strict=True):
            if bend is not None:
                slope, root = slope * bend, root * bend[:, None, :]
            slopes.append(slope * weight[:, None])
            roots.append((root * jnp.sqrt(weight)[:, None, None]).reshape(-1, root.shape[-1]))
            slope, root = slope @ layer.weights.T, root @ layer.weights.T
        return Passed(inputs, slopes[::-1], roots[::-1], z, head_root, dist.log_density(y))

    def outputs(weights: list[Layer], x: Array) -> Array:
        for index, layer in enumerate(weights):
            x = architecture.activation(x) if index else x
            x = x @ layer.weights + layer.bias[None]
        return x

    def renew(A: Array, inverse: Array, a: Array, lam: Array, shift: Array, fresh: Array) -> Array:
        """$(A + \\text{shift}\\, I)^{-1}$ afresh, or from the last inverse: $(\\lambda P^{-1} + a^\\top a)^{-1}$."""

        def afresh(_: Any) -> Array:
            return jnp.linalg.inv(A + shift * jnp.eye(len(A), dtype=A.dtype))

        def updated(_: Any) -> Array:
            Pa = inverse @ a.T
            small = a @ Pa + lam * jnp.eye(len(a), dtype=a.dtype)
            return (inverse - Pa @ jnp.linalg.solve(small, Pa.T)) / lam

        return jax.lax.cond(fresh, afresh, updated, None)

    @compiled
    def step_(key: Key, state: KFACState, batch: Batch) -> tuple[KFACState, StepInfo]:
        w = state.particles
        batch = cast(batch, w.dtype)
        check_batch(target, w[0], batch)
        clock = tick(state, batch)
        weight, total = batch.weight, jnp.maximum(batch.weight.sum(), 1)
        x, _ = batch.data
        # Early on old factors are stale, so memory grows with t up to the half-life.
        lam = 1 - jnp.maximum(forget_rate, 2 / (clock.t + 20))
        gain = jnp.maximum(1 - lam, 1 / (clock.t + 1))
        fresh = (clock.round % REFRESH_EVERY == 0) | (clock.round < 6)
        seen = jax.vmap(pass_over, (0, None, None))(w, batch.data, weight)
        factors, moves = [], []
        for index, old in enumerate(state.factors):
            a = seen.inputs[index] * jnp.sqrt(weight)[None, :, None]
            G = (1 - gain) * old.outputs + gain * jnp.einsum(
                "nbi,nbj->nij", seen.roots[index], seen.roots[index]
            ) / total
            mean_G = jnp.trace(G, axis1=1, axis2=2) / G.shape[-1] + SMALL  # [n]
            if index == 0:  # every particle sees the same inputs
                A = lam * old.inputs + a[0].T @ a[0]
                ratio = jnp.sqrt((jnp.trace(A) / len(A) + SMALL) / mean_G.mean())
                inverse = renew(A, old.inverse, a[0], lam, ratio * damp[index], fresh)
                Pa = jnp.broadcast_to((inverse @ seen.inputs[index][0].T)[None], (len(w), len(inverse), len(weight)))
                ratio = jnp.broadcast_to(ratio, mean_G.shape)
            else:
                A = lam * old.inputs + jnp.einsum("nbi,nbj->nij", a, a)
                ratio = jnp.sqrt((jnp.trace(A, axis1=1, axis2=2) / A.shape[-1] + SMALL) / mean_G)
                inverse = jax.vmap(renew, (0, 0, 0, None, 0, None))(A, old.inverse, a, lam, ratio * damp[index], fresh)
                Pa = jnp.einsum("nij,nbj->nib", inverse, seen.inputs[index])
            shifted = G + (damp[index] / ratio + SMALL)[:, None, None] * jnp.eye(G.shape[-1], dtype=G.dtype)[None]
            step = jnp.swapaxes(jnp.linalg.solve(shifted, jnp.swapaxes(seen.slopes[index], 1, 2)), 1, 2)  # δ G⁻¹
            move = jnp.einsum("nib,nbo->nio", Pa, step)
            factors.append(Factor(A, inverse, G))
            moves.append(Layer(move[:, :-1], move[:, -1]))

        def bounded(w: Array, move: list[Layer], before: Array, head_root: Array) -> Array:
            """The step, shortened where it would change the predictions too much."""
            weights = target.unravel(w)["weights"]
            change = outputs(jax.tree.map(jnp.add, weights, move), x) - before
            moved = jnp.einsum("bck,bc->bk", head_root, change)
            divergence = 0.5 * ((moved**2).sum(1) * weight).sum() / total
            scale = jnp.minimum(1, jnp.sqrt(largest_change / (divergence + 1e-9)))
            return scale * target.ravel({"weights": move})

        move = jax.vmap(bounded)(w, moves, seen.outputs, seen.head_root)
        log_predictive = log_predictive_of(seen.log_density, batch)
        good = jnp.isfinite(move).all(1) & ~jnp.isnan(log_predictive)
        move = jnp.where(good[:, None], move, 0)
        # The factors belong to all particles together: one bad batch must not spoil them.
        all_good = good.all()
        factors = jax.tree.map(lambda new, old: jnp.where(all_good, new, old), factors, state.factors)
        info = StepInfo(clock.rows, log_predictive, root_mean_square(move), all_good)
        return KFACState(w + move, factors, clock.round, clock.rows), info

    return Algorithm(init, step_)
