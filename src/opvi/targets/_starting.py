"""Where particles start: drawn by the target's `init` or from its prior, or given."""

import jax
import jax.numpy as jnp
import numpy as np

from opvi.targets._prior import draw_gaussian, gaussian_prior
from opvi.targets._target import Target
from opvi.types import Key, Particles, Seed, Start, as_key

REDRAWS = 20  # times that starting particles are drawn before one is refused


def draw(target: Target, key: Seed, n: int) -> Particles:
    """Return n starting particles as an `[n, d]` matrix; those that are not finite are drawn again."""
    one = as_key(key)
    x = _drawn(target, one, n)
    if isinstance(x, jax.core.Tracer):
        return x
    for again in range(1, REDRAWS):
        bad = ~np.isfinite(np.asarray(x)).all(1)
        if not bad.any():
            break
        x = jnp.where(bad[:, None], _drawn(target, jax.random.fold_in(one, again), n), x)
    return x


def _drawn(target: Target, key: Key, n: int) -> Particles:
    return jax.vmap(lambda k: target.ravel(target.init(k)))(jax.random.split(key, n))


def as_particles(target: Target, key: Seed, particles: Start, *, at_least: int = 1) -> Particles:
    """Return an `[n, d]` matrix from a count (drawn), a matrix, or a pytree stacked along a leading axis.

    A sampler that needs at least 2 particles needs different ones. Where `init` always returns the same, they are drawn
    from the prior if that is Gaussian, and refused otherwise.
    """
    if isinstance(particles, int | np.integer) and not isinstance(particles, bool):
        x = draw(target, key, _enough(int(particles), at_least))
        x = _different(target, as_key(key), x) if at_least > 1 else x
    elif isinstance(particles, jax.Array | np.ndarray) and np.ndim(particles) == 2:
        x = jnp.asarray(particles)
    else:
        try:
            x = jax.vmap(target.ravel)(particles)
        except Exception as error:
            raise TypeError(
                f"`particles` is a {type(particles).__name__}, but must be a count to draw, a matrix of shape "
                f"(n, {target.dim}), or the target's parameters stacked along a leading axis. ({error})"
            ) from error
    _enough(len(x), at_least, x.shape)
    if x.shape[1] != target.dim:
        raise ValueError(
            f"`particles` has shape {x.shape}, but this target has {target.dim} parameters, so a matrix of "
            f"shape (n, {target.dim}) is needed. Draw one with `opvi.draw(target, key, n)`."
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"`particles` has dtype {x.dtype}, but must be floating point: `particles.astype(float)`.")
    if not isinstance(x, jax.core.Tracer) and not np.isfinite(x).all():  # a traced start has no values yet
        raise ValueError("`particles` holds NaN or infinity; every starting particle must be finite.")
    return x


def _different(target: Target, key: Key, x: Particles) -> Particles:
    """Return drawn particles that are not all the same; refuse those of an `init` that cannot give others."""
    if isinstance(x, jax.core.Tracer) or (np.asarray(x) != np.asarray(x)[0]).any() or len(x) < 2:
        return x
    prior = gaussian_prior(target)
    if prior is None:
        raise ValueError(
            f"`init` of this target returned the same parameters for {len(x)} keys, but particles that all start in "
            "one place stay there: they feel the same forces. Draw them from the key, best from the prior, e.g. "
            f"`lambda key: jax.random.normal(key, ({target.dim},))`, or give different `particles`. For a point "
            "estimate use `opvi.online_map`."
        )
    return draw_gaussian(prior, key, len(x), x.dtype)


def _enough(n: int, at_least: int, shape: tuple[int, ...] | None = None) -> int:
    if n < at_least:
        got = f"has shape {shape}" if shape else f"is {n}"
        why = "repulsion needs" if at_least > 1 else "a sampler needs"
        remedy = " For a point estimate use `opvi.online_map`." if at_least > 1 else ""
        raise ValueError(f"`particles` {got}, but {why} at least {at_least} rows.{remedy}")
    return n
