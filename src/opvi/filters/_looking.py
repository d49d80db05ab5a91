"""What a batch shows to Gauss–Newton: the model linearised at every particle, and how far each row is believed."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from opvi._steps import Clock, row_densities
from opvi.filters import _kalman as kalman
from opvi.filters._prior import distribution, linearise
from opvi.filters._robust import trust_in_labels, trust_in_targets, unweighable
from opvi.predictive import Classes, Normal
from opvi.targets import Target
from opvi.types import Array, Batch, Particles

LARGEST_CHANGE = 0.2  # mean KL divergence of a curved model's class probabilities, before and after a step
MEMORY_OF_ERRORS = 20.0  # rounds over which a particle's squared prediction error is averaged


class AdaptiveNoise(NamedTuple):
    r"""Observation noise $R = \max(c\,\bar e, R_{\min})$ from a particle's own running squared error $\bar e$.

    The noise must be smaller than the error while the network is still learning, hence a share $c < 1$.
    """

    share: float = 0.3
    smallest: float = 0.01

    def of(self, error: Array, like: Array) -> Array:
        """Return the variances `[n, B]`."""
        return jnp.broadcast_to(jnp.maximum(self.share * error, self.smallest)[:, None], like.shape)


class Regression(NamedTuple):
    """What a Gaussian head sees of a batch."""

    residual: Array  # [n, B]
    noise: Array  # [n, B]: variances

    def surprise(self, new: kalman.Gain, batch: Batch) -> Array:
        """Return the first particle's residuals, made independent and of unit variance: `[B]`."""
        return new.inverse[0] @ (self.residual[0] * jnp.sqrt(batch.weight / self.noise[0]))


class Seen(NamedTuple):
    """What a batch looks like at every particle."""

    rows: Array  # [n, R + 1, d]: the curvature's rows A, and the gradient last
    log_density: Array  # [n, B]
    error: Array  # [n]
    regression: Regression | None
    batch: Batch  # with the weights that its rows are learnt by


def look(
    target: Target,
    noise: AdaptiveNoise | None,
    w: Particles,
    error: Array,
    batch: Batch,
    clock: Clock,
    robust: float | None,
) -> Seen:
    """Linearise the model at every particle. Labels get their weights here, targets in `believed`."""
    x, y = batch.data
    dist = jax.vmap(lambda v: distribution(target, v, x))(w)
    log_density = jax.vmap(lambda p: p.log_density(y))(dist)
    regression = None
    if isinstance(dist, Normal):
        if noise is not None:
            if robust is None:
                error = _running_error(dist.mean - y[None], error, batch.weight, clock)
            dist = dist._replace(variance=noise.of(error, dist.variance))
        regression = Regression(y[None] - dist.mean, dist.variance)
    elif robust is not None:
        if not isinstance(dist, Classes):
            raise TypeError(unweighable(dist))
        batch = batch._replace(weight=batch.weight * trust_in_labels(row_densities(log_density), robust))
    A, gradient = jax.vmap(partial(linearise, target), (0, 0, None, None))(w, dist, batch.data, batch.weight)
    return Seen(jnp.concatenate([A, gradient[:, None]], 1), log_density, error, regression, batch)


def believed(
    noise: AdaptiveNoise | None, seen: Seen, rows: Array, product: Array, clock: Clock, robust: float | None
) -> tuple[Seen, Array, Array]:
    """Return what is seen, its rows and their products `[n, K, R + 1, D]`, with targets weighed by their errors.

    The predictive variance needs the products with the covariances, and scaling these rows is all that is left to do.
    """
    if robust is None or seen.regression is None:
        return seen, rows, product
    residual, R = seen.regression
    weight, error = seen.batch.weight, seen.error
    doubt = (rows * product).sum((1, 3))[:, :-1] * R / jnp.where(weight > 0, weight, 1)[None]
    expected = R if noise is None else jnp.maximum(error[:, None], R)
    power = trust_in_targets(seen.batch.data[1], seen.batch.data[1][None] - residual, expected + doubt, robust)
    batch = seen.batch._replace(weight=weight * power)
    new = R
    if noise is not None:
        # Not w but w²: w times the squared error would be c² however far the row is off.
        error = _running_error(residual, error, batch.weight * power, clock)
        new = noise.of(error, R)
    scale = jnp.sqrt(power[None] * R / new)
    along = residual * jnp.sqrt(batch.weight[None] / new)

    def scaled(of: Array) -> Array:
        A = of[:, :, :-1] * scale[:, None, :, None]
        return jnp.concatenate([A, jnp.einsum("nkrd,nr->nkd", A, along)[:, :, None]], 2)

    seen = seen._replace(error=error, regression=Regression(residual, new), batch=batch)
    return seen, scaled(rows), scaled(product)


def held_back(seen: Seen, rows: Array, move: Array) -> Array:
    """Return how much of its move each particle makes: as much as leaves class probabilities near what they were."""
    if seen.regression is not None:
        return jnp.ones(len(move), move.dtype)
    moved = jnp.einsum("nkrd,nkd->nr", rows[:, :, :-1], move)
    divergence = 0.5 * (moved**2).sum(1) / jnp.maximum(seen.batch.weight.sum(), 1e-30)
    return jnp.minimum(1, jnp.sqrt(LARGEST_CHANGE / (divergence + 1e-9)))


def _running_error(residual: Array, error: Array, weight: Array, clock: Clock) -> Array:
    """Return each particle's squared error, averaged over the last rounds: `[n]`."""
    squared = (residual**2 * weight[None]).sum(1) / jnp.maximum(weight.sum(), 1e-30)
    gain = 1 / jnp.minimum(clock.t, MEMORY_OF_ERRORS)
    return (1 - gain) * error + gain * squared
