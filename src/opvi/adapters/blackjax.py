r"""SVGD with blackjax's calls: `from opvi.adapters import blackjax` in place of `import blackjax`."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from opvi.flows import fields
from opvi.flows.kernels import Bandwidth, Kernel, median, rbf
from opvi.types import Array, ArrayLike, Tree


class SVGDState(NamedTuple):
    """Blackjax's fields, by the same names."""

    particles: Tree  # a pytree, stacked along a leading axis
    kernel_parameters: dict[str, Array]
    opt_state: Tree


class SamplingAlgorithm(NamedTuple):
    """`init(particles)` and `step(state, **grad_params)`."""

    init: Callable[..., SVGDState]
    step: Callable[..., SVGDState]


def svgd(
    grad_logdensity_fn: Callable[..., Tree],
    optimizer: optax.GradientTransformation,
    kernel: Kernel | None = None,
    bandwidth: Bandwidth | None = None,
) -> SamplingAlgorithm:
    r"""Stein variational gradient descent (Liu and Wang, 2016), called as `blackjax.svgd` is.

    $$x_i \gets x_i + \alpha\, \tfrac1n \sum_j \big[ K(x_j, x_i) \nabla \log p(x_j) + \nabla_{x_j} K(x_j, x_i) \big]$$

    It moves particles as blackjax does, up to rounding: the bandwidth of the first step is the one given to `init`, and
    that of a later step follows from the particles of the step before. Memory grows as $n^2 + nd$
    where blackjax's grows as $n^2 d$, and nothing that a caller holds is changed in place.

    For streams, use `opvi.svgd(target, step=...)`.

    Args:
        grad_logdensity_fn: $\nabla \log p$ of one particle, a pytree; `step` passes its keywords on to it.
        optimizer: any of optax's.
        kernel: of `opvi.flows.kernels`; `rbf()` if omitted.
        bandwidth: a rule of `opvi.flows.kernels`; `median()`, which is blackjax's, if omitted.
    """
    if kernel is not None and not isinstance(kernel, Kernel):
        raise TypeError(
            f"`kernel` is a {type(kernel).__name__}, but radial kernels are named by their profile here: "
            "`opvi.flows.kernels.rbf()`, which is blackjax's `rbf_kernel`, or `opvi.flows.kernels.imq()`."
        )
    rule = bandwidth or median()

    def init(initial_position: Tree, kernel_parameters: dict[str, ArrayLike] | None = None) -> SVGDState:
        sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(initial_position)}
        if len(sizes) != 1 or min(sizes) < (2,):
            raise ValueError(
                f"`initial_position` has leaves whose leading axes are {sorted(sizes)}, but must be a pytree of arrays "
                "with one leading axis of at least 2 particles."
            )
        if kernel_parameters is not None and set(kernel_parameters) != {"length_scale"}:
            raise ValueError(f"`kernel_parameters` is {kernel_parameters}, but must be {{'length_scale': …}} or None.")
        position = jax.tree.map(jnp.asarray, initial_position)
        h = (kernel_parameters or {"length_scale": 1.0})["length_scale"]
        parameters = {"length_scale": jnp.asarray(h, _matrix(position).dtype)}
        return SVGDState(position, parameters, optimizer.init(position))

    def step(state: SVGDState, **grad_params: Tree) -> SVGDState:
        first = jax.tree.map(lambda leaf: leaf[0], state.particles)
        _, unravel = ravel_pytree(first)
        x = _matrix(state.particles)
        scores = _matrix(jax.vmap(lambda p: grad_logdensity_fn(p, **grad_params))(state.particles))
        h = state.kernel_parameters["length_scale"]
        drift, repulsion, _ = fields.svgd(kernel or rbf(), lambda _: h)(x, scores.astype(x.dtype))
        ascent = jax.vmap(unravel)(drift + repulsion)
        descent = jax.tree.map(jnp.negative, ascent)
        updates, opt_state = optimizer.update(descent, state.opt_state, state.particles)
        particles = optax.apply_updates(state.particles, updates)
        return SVGDState(particles, {"length_scale": rule(_matrix(particles))}, opt_state)

    return SamplingAlgorithm(init, step)


def _matrix(tree: Tree) -> Array:
    """Return a stacked pytree as `[n, d]`."""
    leaves = jax.tree.leaves(tree)
    return jnp.concatenate([jnp.reshape(leaf, (len(leaf), -1)) for leaf in leaves], 1)
