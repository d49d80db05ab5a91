"""Class probabilities of networks, and how those of the labels depend on the inputs."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from opvi.targets import Target
from opvi.types import Array, Particles

AT_ONCE = 4096  # rows; for more, particles predict one after the other: all hidden units at once take much memory


def log_probabilities(target: Target, particles: Particles, z: Array) -> Array:
    """Return the log probabilities of every particle, `[n, B, C]`."""

    def one(w: Array) -> Array:
        return target.predict(target.unravel(w), z).log_probabilities()  # type: ignore[misc, union-attr]

    return jax.lax.map(one, particles) if len(z) > AT_ONCE else jax.vmap(one)(particles)


def of_networks(networks: Sequence[tuple[Target, Particles]], z: Array) -> Array:
    """Return the log probabilities of every particle of several networks, `[K, n, B, C]`; equal targets go together."""
    said: dict[int, Array] = {}
    for target in dict.fromkeys(target for target, _ in networks):
        alike = [i for i, (other, _) in enumerate(networks) if other == target]
        together = log_probabilities(target, jnp.concatenate([networks[i][1] for i in alike]), z)
        said |= dict(zip(alike, jnp.split(together, len(alike)), strict=True))
    return jnp.stack([said[i] for i in range(len(networks))])


def in_pieces(said: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a function `[B, F]` → `[K, B, C]` that processes many rows in pieces of a power of two."""

    def whole(z: Array) -> Array:
        if len(z) <= AT_ONCE:
            return said(z)
        parts = jax.lax.map(said, z.reshape(-1, AT_ONCE, z.shape[1]))
        return jnp.moveaxis(parts, 0, 1).reshape(parts.shape[1], len(z), -1)

    return whole


def chosen(log_p: Array, y: Array) -> Array:
    """Return the log probabilities `[K, B]` of the labels."""
    return jnp.take_along_axis(log_p, jnp.broadcast_to(y[None, :, None], (*log_p.shape[:2], 1)), 2)[..., 0]


def slopes(networks: Sequence[tuple[Target, Particles]], z: Array, y: Array) -> Array:
    """Return the gradients, in z `[B, F]`, of the labels' log probabilities in the even mixture of all networks."""

    def log_score(z: Array) -> Array:
        log_p = of_networks(networks, z)
        return logsumexp(chosen(log_p.reshape(-1, *log_p.shape[2:]), y), axis=0).sum()

    return jax.grad(log_score)(z) if networks else jnp.zeros_like(z)
