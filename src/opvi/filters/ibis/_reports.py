r"""What a sampler of stored rows says about its draws: their evidence, and how far they can be trusted."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.filters._covariance import exactly
from opvi.filters._evidence import Ratios, ratios
from opvi.filters.ibis._rejuvenation import (
    Density,
    anchor,
    log_prior,
    make_surrogate,
)
from opvi.filters.ibis._sums import (
    Rows,
    add_precisely,
    all_rows,
    block_of,
    blocks_in,
    row_likelihoods,
    sum_values,
)
from opvi.posterior import Calibration, calibration_of, concerns_of_predictions, pareto_k
from opvi.predictive import NegativeBinomial, Normal, Poisson, StudentT
from opvi.targets import Target
from opvi.types import Array, Data, Key, Particles

LARGEST_LOSS = 0.1  # standard deviations by which a mean may be off
STANDARD_ERRORS = 3.0  # what a mean may be off by, beside its standard error
FEWEST_ACCEPTED = 0.2  # share of the moves: with less, nothing is known
LOOKED_AT = 1000  # rows whose likelihoods and predictions are looked at
SUSPECTS = 16  # rows whose log likelihoods vary most over draws: the others' weights have no longer tails


class Diagnosis(NamedTuple):
    """How far draws can be trusted, and how far the particles are from them."""

    effective: float  # number of particles, by their weights
    shift: float  # of a mean, the largest, in standard deviations: particles beside draws
    narrow: float  # the smallest standard deviation of the particles, as a share of that of the draws
    wide: float  # the largest
    accepted: float  # share of the moves that make draws of particles
    remembered: float  # largest correlation between draws of a chain
    limit: float  # of that: above, it is not chance
    lost: float  # what rows that are not stored may have moved a mean by, in standard deviations
    misfit: float  # nats, over draws: the part of that which comes from the density's shape
    rows: int  # seen
    stored: int
    particles: int
    pareto: float = math.nan  # largest Pareto k, over rows stored, of the weights that leave a row out
    predictions: Calibration | None = None  # of rows stored, each left out; None for models without P(Y ≤ y)

    def concerns(self) -> list[str]:
        """Return what is wrong with the draws or the model and what to do about it; nothing if both can be trusted."""
        found = self.concerns_of_draws()
        return found if self.predictions is None else found + concerns_of_predictions(self.predictions)

    def concerns_of_draws(self) -> list[str]:
        """Return what is wrong with the draws: why they may not be the posterior's."""
        found = concerns_of_memory(self.lost, self.rows, self.stored)
        nuts = "use NUTS, or write the model in parameters that depend less on one another"
        if not self.accepted >= FEWEST_ACCEPTED or not math.isfinite(self.shift + self.remembered):
            found.append(f"moves of the particles are refused, so that no bound is known for their errors: {nuts}.")
        elif self.remembered > self.limit:
            found.append(
                f"draws have not forgotten the particles they began at (correlation {self.remembered:.2f}), so that no "
                f"bound is known for their errors: {nuts}."
            )
        return found

    @property
    def right(self) -> bool:
        """Whether nothing is wrong with the draws; a model may have the right posterior and be wrong."""
        return not self.concerns_of_draws()


def concerns_of_memory(lost: float, rows: int, stored: int) -> list[str]:
    """Return concerns about rows that are not stored any more."""
    if lost <= LARGEST_LOSS:
        return []
    return [
        f"{rows - stored:,} of {rows:,} rows did not fit into `memory`, which may have moved a mean by {lost:.2f} sd: "
        f"give {math.ceil(rows / max(stored, 1))} times as much memory."
    ]


def density_of(target: Target, density: Density, x: Particles) -> tuple[Density, Array]:
    """Return the density anchored at the particles' mean, and that mean."""
    mean = x.mean(0)
    off = x - mean[None]
    return anchor(target, density, mean, off.T @ off / len(x)), mean


@partial(jax.jit, static_argnums=0)
@exactly
def evidence_ratios(
    target: Target, key: Key, density: Density, draws: Particles
) -> tuple[tuple[Ratios, Ratios], Array]:
    """Return the density's ratios to Gaussians fitted to halves of draws `[2, n, d]`, and the constant they lack."""
    density, mean = density_of(target, density, draws.reshape(-1, target.dim))
    surrogate, _ = make_surrogate(target, jax.random.fold_in(key, 0), density, mean)
    picked = jnp.minimum(jnp.arange(len(surrogate.sample.picked)), density.rows.filled - 1)
    few = surrogate.sample._replace(
        picked=jnp.where(surrogate.sample.alone, surrogate.sample.picked, picked),
        weight=jnp.where(
            surrogate.sample.alone,
            surrogate.sample.weight,
            jnp.where(jnp.arange(len(picked)) < density.rows.filled, density.rows.weight[picked], 0),
        ),
    )
    rows = jax.tree.map(lambda leaf: leaf[few.picked], density.rows.data)

    def by_sample(v: Array) -> Array:
        correction = jnp.where(surrogate.sample.alone, surrogate.correction(v), 0)
        return log_prior(target, density, v) + row_likelihoods(target, v, rows) @ few.weight + correction

    def exact(x: Particles) -> Array:
        of_prior = jax.vmap(lambda v: log_prior(target, density, v))(x)
        return sum_values(target, density.rows, x, mean) + of_prior

    found = ratios(jax.random.fold_in(key, 1), by_sample, exact, draws)
    return found, constant_of(target, density, mean)


def constant_of(target: Target, density: Density, mean: Array) -> Array:
    """Return the rows' log likelihood at a point, `[2]`: a sum and what rounding left out of it."""
    everything = all_rows(density.rows)

    def add(k: Array, total: Array) -> Array:
        data, weight = block_of(density.rows, everything, k)
        return add_precisely(total, row_likelihoods(target, mean, data) @ weight)

    total = jnp.zeros(2, mean.dtype) if density.beyond is None else density.beyond.value
    return jax.lax.fori_loop(0, blocks_in(density.rows, everything), add, total)


class AtDraws(NamedTuple):
    """Some of the rows, as draws see them."""

    rows: Array  # [n, m]: log likelihoods
    levels: tuple[Array, Array] | None  # [n, m]: P(Y ≤ y) and P(Y < y); None where there is no such thing
    misfit: Array  # nats by which rows that are not stored may change the density


@partial(jax.jit, static_argnums=0)
@exactly
def look_at_rows(target: Target, density: Density, draws: Particles, picked: Array) -> AtDraws:
    """Return what draws say of some rows."""
    density, mean = density_of(target, density, draws)
    data = jax.tree.map(lambda leaf: leaf[picked], density.rows.data)
    rows = jax.vmap(lambda v: row_likelihoods(target, v, data))(draws)
    return AtDraws(rows, levels_of(target, data, draws), misfit_of(target, density, mean, draws))


def levels_of(target: Target, data: Data, draws: Particles) -> tuple[Array, Array] | None:
    """Return P(Y ≤ y) and P(Y < y) of each row at each draw; None for models without such a thing."""
    if target.predict is None or not isinstance(data, tuple) or len(data) != 2:
        return None
    x, y = data
    predicted = jax.vmap(lambda v: target.predict(target.unravel(v), x))(draws)  # type: ignore[misc]
    if not isinstance(predicted, Normal | StudentT | Poisson | NegativeBinomial):
        return None
    y = y[None].astype(draws.dtype)
    below = jnp.broadcast_to(predicted.cdf(y), (len(draws), y.shape[1]))
    if isinstance(predicted, Normal | StudentT):
        return below, below
    return below, below - jnp.exp(predicted.log_density(y))


def misfit_of(target: Target, density: Density, mean: Array, draws: Particles) -> Array:
    r"""Return the standard error, over samples of rows, of the log density at draws: its root mean square in nats.

    A row's remainder beyond its quadratic is known for stored rows alone, each of which stands for $\kappa$ others.
    """
    if density.past is None:
        return jnp.zeros((), draws.dtype)
    past = density.past
    rows, everything = density.rows, all_rows(density.rows)

    def add(k: Array, total: Array) -> Array:
        data, weight = block_of(Rows(rows.data, past.stands_for * rows.weight, rows.filled), everything, k)

        def values(v: Array) -> Array:
            return row_likelihoods(target, v, data)

        gradients, hessians = jax.jacfwd(values)(mean), jax.jacfwd(jax.jacfwd(values))(mean)
        off = draws - mean[None]
        quadratic = off @ gradients.T + jnp.einsum("nd,kde,ne->nk", off, hessians, off) / 2
        remainder = jax.vmap(values)(draws) - values(mean)[None] - quadratic
        return total + (remainder**2) @ weight

    variance = jax.lax.fori_loop(0, blocks_in(rows, everything), add, jnp.zeros(len(draws), draws.dtype))
    return jnp.sqrt(variance.mean())


def lost_of(doubt: np.ndarray, cov: np.ndarray, misfit: float) -> float:
    """Return by how many standard deviations a mean may be off, given the covariance of the gradient's error."""
    shift = cov @ np.asarray(doubt, float) @ cov
    sd = np.sqrt(np.maximum(np.diag(shift), 0) / np.maximum(np.diag(cov), 1e-300))
    return float(STANDARD_ERRORS * math.hypot(sd.max(), misfit))


def measures_of(there: AtDraws) -> dict[str, Any]:
    """Return the largest Pareto k of the rows that vary most, and how rows look beside predictions of them."""
    rows = np.asarray(there.rows, float)
    suspects = rows[:, np.argsort(-rows.var(0), kind="stable")[:SUSPECTS]]
    found: dict[str, Any] = {"pareto": float(pareto_k(-suspects).max())}
    if there.levels is not None:
        found["predictions"] = calibration_of(rows, *(np.asarray(level, float) for level in there.levels))
    return found
