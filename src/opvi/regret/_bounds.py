r"""What the theory promises for $R(T)$: Theorem 1 as printed, corrected, by orders, and tight.

All bounds are on the expected regret of online gradient descent, and take the rounds' gradient errors
$\epsilon_t$ ($E\|e_t\|^2 \le \epsilon_t^2$) and the path length $V_T$ so far; they return one number per T.
"""

import math

import numpy as np

from opvi.types import ArrayLike

Rounds = ArrayLike  # a number, or one per round


def printed_bound(errors: Rounds, path: Rounds, *, step: float, smoothness: float, diameter: float) -> np.ndarray:
    r"""Return Theorem 1 as printed. It rests on a false lemma (see `lemma_bound`) and is not a valid bound.

    $$\frac{R}{\xi} \Big(R + \sum_t \sqrt{2\alpha^2\epsilon_t^2 + 2\alpha\epsilon_t R} + V_T\Big), \qquad
      \xi = 2\alpha - 4L\alpha^2$$

    Assumes: a convex set of diameter R that holds every decision and comparator; convex, L-smooth costs; comparators
    where the gradient vanishes; a constant step $\alpha < 1/(2L)$.
    """
    return corrected_bound(errors, path, step=step, smoothness=smoothness, diameter=diameter) / 2


def corrected_bound(errors: Rounds, path: Rounds, *, step: float, smoothness: float, diameter: float) -> np.ndarray:
    r"""Return Theorem 1 with Lemma 1 corrected: twice what is printed. Errors may be biased.

    $$\frac{2R}{\xi} \Big(R + \sum_t \sqrt{2\alpha^2\epsilon_t^2 + 2\alpha\epsilon_t R} + V_T\Big), \qquad
      \xi = 2\alpha - 4L\alpha^2$$

    Assumes: a convex set of diameter R that holds every decision and comparator; convex, L-smooth costs; comparators
    where the gradient vanishes; a constant step $\alpha < 1/(2L)$.
    """
    e, V = _sums(errors, path)
    a, R = _step(step, smoothness, 2), _diameter(diameter)
    per_round = np.cumsum(np.sqrt(2 * a**2 * e**2 + 2 * a * e * R))
    return 2 * R / (2 * a - 4 * smoothness * a**2) * (R + per_round + V)


def order_bound(errors: Rounds, path: Rounds, *, step: float, smoothness: float, diameter: float) -> np.ndarray:
    r"""Return the corrected theorem in terms of $E_T$ alone, which shows its order: $\max(1, \sqrt{T E_T}, V_T)$.

    $$\frac{2R}{\xi} \Big(R + \sqrt2\, \alpha E_T + \sqrt{2 \alpha R\, T E_T} + V_T\Big), \qquad
      \xi = 2\alpha - 4L\alpha^2$$

    The paper prints the order $\max(1, E_T, V_T)$, which its proof does not support.

    Assumes: what `corrected_bound` does.
    """
    e, V = _sums(errors, path)
    a, R = _step(step, smoothness, 2), _diameter(diameter)
    T, E = np.arange(1, len(e) + 1), np.cumsum(e)
    xi = 2 * a - 4 * smoothness * a**2
    return 2 * R / xi * (R + math.sqrt(2) * a * E + np.sqrt(2 * a * R * T * E) + V)


def tight_bound(errors: Rounds, path: Rounds, *, step: Rounds, smoothness: float, diameter: float) -> np.ndarray:
    r"""Return the bound for unbiased errors, whose order is $\max(1, \sum_t \epsilon_t^2, V_T)$.

    $$\frac{R^2 + 2 R V_T + \alpha^2 \sum_t \epsilon_t^2}{2\alpha - 2L\alpha^2}, \quad\text{for steps that shrink}\quad
      \frac{R^2/\alpha_T + 2 R V_T/\alpha_T + \sum_t \alpha_t \epsilon_t^2}{2 - 2L\alpha_1}$$

    Assumes: decisions and comparators no further apart than R; convex, L-smooth costs; comparators where the gradient
    vanishes; errors with mean 0 given the past; steps that never grow, with $\alpha_1 < 1/L$.

    Args:
        errors: $\epsilon_t$ of every round.
        path: $V_T$ at every T.
        step: $\alpha$, or the steps of all rounds.
        smoothness: L.
        diameter: R.
    """
    e, V = _sums(errors, path)
    steps = np.broadcast_to(np.asarray(step, float), e.shape) if np.ndim(step) == 0 else np.asarray(step, float)
    if steps.shape != e.shape or (np.diff(steps) > 0).any():
        raise ValueError(
            f"`step` has shape {steps.shape}{' and grows' if steps.shape == e.shape else ''}, but must be a number, or "
            f"{len(e)} numbers that never grow, one per round."
        )
    _step(float(steps.min()), smoothness, 1)
    largest, R = _step(float(steps[0]), smoothness, 1), _diameter(diameter)
    return (R**2 / steps + 2 * R * V / steps + np.cumsum(steps * e**2)) / (2 - 2 * smoothness * largest)


def lemma_bound(
    distance: ArrayLike,
    gap: ArrayLike,
    error: ArrayLike,
    *,
    step: float,
    smoothness: float,
    diameter: float,
    printed: bool = False,
) -> np.ndarray:
    r"""Return the largest distance from a step's end to the comparator: Lemma 1, corrected or as printed.

    $$E\|w_{t+1} - w^*_t\| \le \|w_t - w^*_t\| - \frac{\xi}{2R} \big(f_t(w_t) - f_t(w^*_t)\big)
      + \sqrt{2\alpha^2\epsilon_t^2 + 2\alpha\epsilon_t R}$$

    Printed with $\xi/R$, it is false: a Huber cost with no error breaks it. Assumes: what `corrected_bound` does.

    Args:
        distance: $\|w_t - w^*_t\|$.
        gap: $f_t(w_t) - f_t(w^*_t)$.
        error: $\epsilon_t$.
        printed: take $\xi/R$.
    """
    a, R = _step(step, smoothness, 2), _diameter(diameter)
    d, g, e = (np.asarray(value, float) for value in (distance, gap, error))
    if (d > R).any():
        raise ValueError(f"`distance` is up to {d.max():g}, but the set's `diameter` is {R:g}. Give a larger one.")
    xi = 2 * a - 4 * smoothness * a**2
    return d - xi / (R if printed else 2 * R) * g + np.sqrt(2 * a**2 * e**2 + 2 * a * e * R)


def _sums(errors: Rounds, path: Rounds) -> tuple[np.ndarray, np.ndarray]:
    e = np.asarray(errors, float)
    if e.ndim != 1 or not len(e) or not (np.isfinite(e) & (e >= 0)).all():
        raise ValueError(
            f"`errors` has shape {e.shape}, but must be finite numbers of at least 0, one per round: `account.error`, "
            "or its root mean square over runs."
        )
    V = np.broadcast_to(np.asarray(path, float), e.shape) if np.ndim(path) == 0 else np.asarray(path, float)
    if V.shape != e.shape or not (np.isfinite(V) & (V >= 0)).all() or (np.diff(V) < 0).any():
        raise ValueError(
            f"`path` has shape {V.shape}, but must be {len(e)} finite sums that never shrink: `account.path`."
        )
    return e, V


def _step(step: float, smoothness: float, factor: int) -> float:
    """Return the step, which must be below 1/L (for the tight bound) or 1/(2L)."""
    if not 0 < smoothness < math.inf:
        raise ValueError(
            f"`smoothness` is {smoothness!r}, but the bound needs a finite L above 0. Estimate it: "
            "`opvi.regret.smoothness(cost, rounds=1)`."
        )
    if not 0 < step < 1 / (factor * smoothness):
        limit = "1/L" if factor == 1 else f"1/({factor}L)"
        raise ValueError(
            f"`step` is {step:g}, but this bound holds for steps above 0 and below {limit} = "
            f"{1 / (factor * smoothness):g} only. Take a smaller step."
        )
    return float(step)


def _diameter(diameter: float) -> float:
    if not 0 < diameter < math.inf:
        raise ValueError(
            f"`diameter` is {diameter!r}, but the bound needs a bounded set. Project onto one, "
            "`opvi.online_map(..., projection=opvi.flows.ball(radius))` with R = 2·radius, or take the distances "
            "measured: `opvi.regret.diameter(account)`."
        )
    return float(diameter)
