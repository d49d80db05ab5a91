r"""Choosing batch sizes: what a schedule costs in rows, and what gradient error it leaves."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from opvi.flows.schedules import BatchRule, as_batch_rule
from opvi.running._stream import rows_of_round
from opvi.types import ArrayLike


class Design(NamedTuple):
    """What to expect of a batch-size rule, one entry per T."""

    rows: np.ndarray  # [T]: used in total
    error: np.ndarray  # [T]: ε_t
    error_sum: np.ndarray  # [T]: E_T
    squared_error_sum: np.ndarray  # [T]: Σ ε²
    proved_order: np.ndarray  # [T]: max(1, √(T·E_T), V_T), for any errors
    unbiased_order: np.ndarray  # [T]: max(1, Σ ε², V_T), for errors of mean 0, as those of drawn batches are


def design(
    batch_size: int | BatchRule | Callable[[int], int],
    rounds: int,
    spread: float,
    *,
    total: int | None = None,
    path: ArrayLike = 0.0,
) -> Design:
    r"""Return the rows that a batch-size rule will take over T rounds, and the errors that it will leave.

    $$\epsilon_t = \Lambda \sqrt{1/B_t - 1/N}, \qquad E_T = \sum_{t \le T} \epsilon_t$$

    For $B_t = \lceil t^\rho \rceil$ the error sum grows as $T^{1-\rho/2}$, the rows as $T^{1+\rho}$.

    Args:
        batch_size: a number or a rule, as `opvi.stream` takes it.
        rounds: T.
        spread: $\Lambda$, e.g. the last one that `watch_noise` or `watch` measured.
        total: N, if batches are drawn without replacement from N rows; None for an endless source.
        path: $V_T$, a number or one per T, if the posterior moves.
    """
    if rounds < 1:
        raise ValueError(f"`rounds` is {rounds}, but must be at least 1.")
    if not 0 <= spread < np.inf:
        raise ValueError(f"`spread` is {spread!r}, but Λ must be a finite number of at least 0.")
    rule = as_batch_rule(batch_size)
    sizes = np.array([rows_of_round(rule, t) for t in range(1, rounds + 1)], float)
    if total is not None and sizes.max() > total:
        raise ValueError(f"the rule asks for {int(sizes.max())} rows, but `total` is {total}. Take a slower rule.")
    error = spread * np.sqrt(1 / sizes - (0 if total is None else 1 / total))
    E, squares = np.cumsum(error), np.cumsum(error**2)
    V = np.broadcast_to(np.asarray(path, float), error.shape)
    proved = np.maximum(np.maximum(1, np.sqrt(np.arange(1, rounds + 1) * E)), V)
    return Design(np.cumsum(sizes), error, E, squares, proved, np.maximum(np.maximum(1, squares), V))


def slope(values: ArrayLike, first: int, last: int | None = None) -> float:
    """Return the slope of log value against log T, over T = first, 2·first, 4·first, … up to `last`."""
    y = np.asarray(values, float)
    last = len(y) if last is None else last
    if not 2 <= 2 * first <= last <= len(y):
        raise ValueError(
            f"`first` is {first} and `last` is {last}, but a slope over {len(y)} rounds needs "
            f"1 ≤ first, 2·first ≤ last and last ≤ {len(y)}."
        )
    T = first * 2 ** np.arange(int(np.log2(last / first)) + 1)
    return float(np.polyfit(np.log(T), np.log(y[T - 1]), 1)[0])


def design_table(designs: Mapping[str, Design]) -> str:
    """Return designs side by side at their last round, as a Markdown table; slopes over the last factor of 4 in T."""
    lines = [
        "| batches | rows | E_T | slope | Σε² | slope | order, any errors | order, unbiased |",
        "|---" + "|---:" * 7 + "|",
    ]
    for name, plan in designs.items():
        T = len(plan.rows)
        sums = plan.error_sum, plan.squared_error_sum
        grown = [slope(values, T // 4) if T >= 4 else np.nan for values in sums]
        orders = [f"{order[-1]:,.4g}" for order in (plan.proved_order, plan.unbiased_order)]
        cells = [f"{int(plan.rows[-1]):,}", f"{plan.error_sum[-1]:,.4g}", f"{grown[0]:.3f}"]
        cells += [f"{plan.squared_error_sum[-1]:,.4g}", f"{grown[1]:.3f}", *orders]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
