"""Rows taken back: the posterior of a linear-Gaussian model as if it had never seen them."""

import math

import jax.numpy as jnp
import numpy as np

from opvi.filters._gauss_newton import GaussNewtonState
from opvi.filters._merging import Natural, never_forgetting, posterior_of, prior_of, with_posterior
from opvi.filters._prior import distribution, jacobian
from opvi.predictive import Normal
from opvi.targets import cast
from opvi.types import ArrayLike, Batch, Data, Sampler, State

ROUNDING = 1e-5  # of the largest precision, in units of the prior's, that a state may have lost
SMALLEST = 0.1  # of the prior's precision


def withdraw(sampler: Sampler, state: State, data: Data, weight: ArrayLike | None = None) -> State:
    r"""Return the posterior without some of the rows that it was learnt from.

    $$p(x \mid D \setminus r) \propto p(x \mid D) \, / \, p(r \mid x)$$

    With rows A of the Jacobian and noise R the precision becomes $\Lambda - A^\top R^{-1} A$, worked out in float64. It
    is exact up to the rounding of the state, as is `log_evidence`, for models that are linear in their parameters, have
    a Gaussian prior and known Gaussian noise, and forget nothing. Others are refused: they do not know what a row has
    done to them.

    Args:
        sampler: `opvi.gauss_newton(target, forgetting=1)`, that of the state.
        state: learnt on these rows and others.
        data: rows `(X, y)` as they were learnt.
        weight: how often each counted; 1 if omitted.
    """
    before: GaussNewtonState = state  # type: ignore[assignment]
    x, y = cast(Batch(data, jnp.zeros(())), before.particles.dtype).data
    if len(x) != len(y):
        raise ValueError(f"`data` has {len(x)} rows of X and {len(y)} of y, but a row has both.")
    prior = prior_of(sampler, x)
    sampler = never_forgetting(sampler)
    w = np.ones(len(y)) if weight is None else np.asarray(weight, float)
    if w.shape != y.shape or not (np.isfinite(w) & (w >= 0)).all():
        raise ValueError(f"`weight` has shape {w.shape}, but must be {len(y)} finite numbers of at least 0.")
    rows = int(before.rows) - round(float(w.sum()))
    if rows < 0:
        raise ValueError(f"{w.sum():g} rows are to be withdrawn, but the state has learnt {int(before.rows)}.")
    zero = jnp.zeros(sampler.target.dim, before.particles.dtype)
    said = distribution(sampler.target, zero, x)
    assert isinstance(said, Normal)
    A = np.asarray(jacobian(sampler.target, zero, x)[:, 0], float)
    target, noise = (np.asarray(a, float) for a in (y - said.mean, said.variance))
    whole = posterior_of(sampler, state, prior)
    rest = Natural(whole.shift - A.T @ (w / noise * target), whole.precision - A.T @ (A * (w / noise)[:, None]))
    if not _possible(whole, rest, prior) or not np.isfinite(rest.shift).all():
        raise ValueError(
            "without these rows less than the prior would remain: this state did not learn them, or not with these "
            "values and weights."
        )
    learnt = whole.normaliser() - rest.normaliser()
    learnt -= (w * (target**2 / noise + np.log(2 * math.pi * noise))).sum() / 2  # log p(r | the other rows)
    return with_posterior(before, rest)._replace(
        log_evidence=jnp.asarray(float(before.log_evidence) - learnt, before.particles.dtype),
        rows=jnp.asarray(rows, jnp.int32),
    )


def _possible(whole: Natural, rest: Natural, prior: Natural) -> bool:
    """Return whether what is left is at least the prior, but for what a state's rounding may hide."""
    if not np.isfinite(rest.precision).all():
        return False
    back = np.linalg.inv(np.linalg.cholesky(prior.precision))
    least = np.linalg.eigvalsh(back @ rest.precision @ back.T)[0]
    rounding = ROUNDING * np.linalg.eigvalsh(back @ whole.precision @ back.T)[-1]
    return bool(least > max(SMALLEST, 1 - rounding))
