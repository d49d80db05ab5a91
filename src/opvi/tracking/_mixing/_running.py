"""Running means that forget how they began."""

import jax.numpy as jnp

from opvi.types import Array, Scalar

ONE_ROUND = 0.99  # but for rounding, in batches of the usual size


def running_mean(old: Array, new: Array, rounds: Scalar, share: Scalar, longest: float) -> Array:
    """Return a running mean that starts at 1 and forgets that start after one batch of the usual size.

    Args:
        old: the mean before.
        new: the mean of the new rows.
        rounds: the number of batches of the usual size before them.
        share: the size of the new rows, in batches of the usual size.
        longest: the number of batches over which the mean is eventually taken.
    """
    part = jnp.clip(1 - rounds, 0, share)
    gain = jnp.minimum(1, share / jnp.minimum(1 + 0.5 * rounds, longest))
    return jnp.where(rounds < ONE_ROUND, old - part + part * new, (1 - gain) * old + gain * new)
