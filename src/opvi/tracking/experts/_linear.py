r"""A linear model, by recursive least squares with forgetting: what a stack trusts far outside of what was seen.

$$\hat w = (\textstyle\sum_i \lambda^{t-i} \rho_i\, z_i z_i^\top + \Lambda)^{-1} \sum_i \lambda^{t-i} \rho_i\, z_i y_i,
  \qquad \rho_i = \min(1, c / |r_i|)$$

with z the standardised inputs and 1, r the error of each row in standard deviations of its prediction, and
$\Lambda$ one row's worth of every column.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np

from opvi._factors import diagonal, inverse
from opvi.tracking._placed import placed
from opvi.tracking.experts._expert import BaseExpert, Belief, Context, Rows, Units
from opvi.types import Array, Key, Scalar

WIDEST = 64  # columns, for which it is recommended
FORGETTING = 0.999  # λ
ROBUST = 5.0  # c
NOISE_MEMORY = 0.9  # of the running mean squared error, for 20 rows
LARGEST = 9.0  # times that, which one row's squared error may count for
USUAL_ROWS = 20.0


class LinearState(NamedTuple):
    """Sums over rows, and the model that follows from them."""

    products: Array  # [F + 2, F + 2]: of 1, z and y
    covariance: Array  # [F + 1, F + 1], in units of the noise
    weights: Array  # [F + 1]
    noise: Scalar  # running mean squared error


@dataclass(frozen=True)
class Linear(BaseExpert):
    """Settings of a linear model."""

    far: ClassVar[bool] = True

    def init(self, key: Key, columns: int, dtype: Any) -> LinearState:
        """Return the model before any row."""
        room = jnp.zeros((columns + 2, columns + 2), dtype)
        return LinearState(room, jnp.eye(columns + 1, dtype=dtype), room[0, :-1], jnp.ones((), dtype))

    def predict(self, state: LinearState, rows: Rows) -> Belief:
        """Return the line at the rows, however far they are."""
        Z = _with_one(rows.z)
        known = ((Z @ state.covariance) * Z).sum(1)
        return Belief(
            Z @ state.weights, state.noise * jnp.maximum(known, 0), jnp.broadcast_to(state.noise, known.shape)
        )

    def learn(self, key: Key, state: LinearState, rows: Rows, context: Context) -> LinearState:
        """Return the model after rows."""
        weight, error = rows.weight * context.trust, rows.y - context.belief.mean
        total = weight.sum()
        expected = context.belief.variance + state.noise
        trust = jnp.minimum(1, ROBUST * jnp.sqrt(expected) / jnp.maximum(jnp.abs(error), 1e-30))
        M = jnp.concatenate([_with_one(rows.z), rows.y[:, None]], 1)
        products = FORGETTING**total * state.products + (M * (weight * trust)[:, None]).T @ M
        size = jnp.minimum(error**2 * state.noise / expected, LARGEST * state.noise)
        new = (size * weight).sum() / jnp.maximum(total, 1e-30)
        keep = NOISE_MEMORY ** (total / USUAL_ROWS)
        done = _solved(
            state._replace(products=products, noise=jnp.maximum(keep * state.noise + (1 - keep) * new, 1e-12))
        )
        good = (total > 0) & jnp.isfinite(done.weights).all() & jnp.isfinite(done.covariance).all()
        return LinearState(*(jnp.where(good, a, b) for a, b in zip(done, state, strict=True)))

    def rescale(self, state: LinearState, units: Units) -> LinearState:
        """Return the same line in new units."""
        to = jnp.diag(jnp.concatenate([jnp.ones(1, units.shift.dtype), 1 / units.ratio, units.output_ratio[None]]))
        to = to.at[1:-1, 0].set(-units.shift / units.ratio).at[-1, 0].set(units.output_shift)
        new = state._replace(products=to @ state.products @ to.T, noise=state.noise * units.output_ratio**2)
        return _solved(new)

    def forget(self, state: LinearState, keep: Scalar) -> LinearState:
        """Return the model with sums of a share of the rows."""
        products = keep * state.products
        return _solved(state._replace(products=products, noise=jnp.where(keep > 0, state.noise, 1)))

    def widen(self, state: LinearState, fresh: LinearState) -> LinearState:
        """Return the model of more columns, in which the rows so far have their means."""
        count = len(state.weights)
        some, both = np.r_[0:count], np.r_[0:count, len(fresh.weights)]
        return state._replace(
            products=placed(fresh.products, np.ix_(both, both), state.products),
            covariance=placed(fresh.covariance, np.ix_(some, some), state.covariance),
            weights=placed(fresh.weights, some, state.weights),
        )


def _with_one(z: Array) -> Array:
    return jnp.concatenate([jnp.ones_like(z[:, :1]), z], 1)


def _solved(state: LinearState) -> LinearState:
    """Return the model with the weights that follow from its sums."""
    A, b = state.products[:-1, :-1], state.products[:-1, -1]
    rows = jnp.maximum(A[0, 0], 1e-30)
    spread = jnp.maximum(diagonal(A) / rows - (A[0] / rows) ** 2, 0) + 1e-6
    ridge = jnp.where(np.arange(len(b)) == 0, 1e-6, spread)
    P = inverse(A + jnp.diag(ridge))
    P = (P + P.T) / 2
    return state._replace(covariance=P, weights=P @ b)
