r"""What changes from round to round: batch sizes, prior weight, likelihood scale, step sizes.

Rounds count from $t = 1$. Wherever the library takes a schedule, a plain number works too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from opvi.types import Array, LikelihoodScale

# --- batch sizes: plain integers, decided on the host before anything is traced ---------------


@dataclass(frozen=True)
class BatchRule:
    """How many rows round t takes, and the padded size that stands for it in compiled code."""

    size: Callable[[int], int]
    bucket: Callable[[int], int]


SMALLEST_BUCKET = 8  # below this, one more compiled program costs more than the padding it saves


def power_of_two(size: int) -> int:
    """Return the smallest power of two, from 8 on, that holds `size` rows."""
    return max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"`{name}` is {value!r}, but must be greater than 0.")


def static(size: int) -> BatchRule:
    """$B_t = B$: every round takes `size` rows."""
    _positive("size", size)
    return BatchRule(_Always(size), _Always(size))


@dataclass(frozen=True)
class _Always:
    size: int

    def __call__(self, _: int) -> int:
        return self.size


def full(total: int) -> BatchRule:
    """$B_t = N$: every round takes all `total` rows. Not online; the reference the paper compares with."""
    return static(total)


def power(rho: float = 0.55) -> BatchRule:
    r"""$B_t = \lceil t^\rho \rceil$, the paper's growing batch."""
    _positive("rho", rho)
    return BatchRule(_Power(rho), power_of_two)


@dataclass(frozen=True)
class _Power:
    rho: float

    def __call__(self, t: int) -> int:
        return math.ceil(t**self.rho)


def saturating(rho: float, total: int) -> BatchRule:
    r"""$B_t = \lceil N t^\rho / (N + t^\rho) \rceil$, for which $\epsilon_t = \Lambda t^{-\rho/2}$."""
    _positive("rho", rho)
    _positive("total", total)
    return BatchRule(_Saturating(rho, total), power_of_two)


@dataclass(frozen=True)
class _Saturating:
    rho: float
    total: int

    def __call__(self, t: int) -> int:
        return math.ceil(self.total * t**self.rho / (self.total + t**self.rho))


def sizes(values: Sequence[int]) -> BatchRule:
    """The listed sizes, one per round."""
    listed = tuple(int(v) for v in values)
    return BatchRule(_Listed(listed), _Always(listed[0]) if len(set(listed)) == 1 else power_of_two)


@dataclass(frozen=True)
class _Listed:
    values: tuple[int, ...]

    def __call__(self, t: int) -> int:
        if t > len(self.values):
            raise ValueError(f"round {t} asks for a batch size, but only {len(self.values)} were listed.")
        return self.values[t - 1]


def as_batch_rule(rule: "int | BatchRule | Callable[[int], int]") -> BatchRule:
    """Return a rule from a number (static), a rule, or any function of the round."""
    if isinstance(rule, BatchRule):
        return rule
    if isinstance(rule, int | np.integer) and not isinstance(rule, bool):
        return static(int(rule))
    if callable(rule):
        return BatchRule(rule, power_of_two)
    raise TypeError(f"`batch_size` is {rule!r}; give a number of rows or a rule such as `opvi.schedules.power(0.55)`.")


def within_budget(rule: "int | BatchRule | Callable[[int], int]", rounds: int, rows: int) -> BatchRule:
    """Return the same growth, spread so that `rounds` rounds take exactly `rows` rows (FITDS).

    Sizes are the differences of the rule's cumulative share of the budget, rounded; so the shape of
    the rule is kept and the total is exact. Every round takes at least one row.
    """
    rule = as_batch_rule(rule)
    if rows < rounds:
        raise ValueError(f"a budget of {rows} rows cannot fill {rounds} rounds; allow at least one row per round.")
    share = np.cumsum([rule.size(t) for t in range(1, rounds + 1)], dtype=float)
    # One row per round is set aside first: rounding can then never leave a round empty.
    extra = np.floor(share / share[-1] * (rows - rounds) + 0.5).astype(int)
    return sizes((1 + np.diff(extra, prepend=0)).tolist())


# --- prior weight -----------------------------------------------------------------------------


def vanishing(t: Array) -> Array:
    r"""$\eta_t = 6 / (\pi^2 t^2)$, which sums to 1 over an endless stream."""
    return 6.0 / (jnp.pi**2 * t**2)


# --- likelihood scale -------------------------------------------------------------------------


def batch_sum(batch_rows: Array, seen_rows: Array) -> Array:
    r"""$\kappa_t = 1$: the batch's own likelihood, as the paper's equation has it."""
    return jnp.ones_like(batch_rows)


def batch_mean(batch_rows: Array, seen_rows: Array) -> Array:
    r"""$\kappa_t = 1/B_t$: the mean over the batch, as in online MAP."""
    return 1.0 / batch_rows


def dataset(total: int) -> LikelihoodScale:
    r"""$\kappa_t = N/B_t$: the batch stands for a data set of known size `total`."""
    _positive("total", total)
    return _Dataset(total)


@dataclass(frozen=True)
class _Dataset:
    total: int

    def __call__(self, batch_rows: Array, seen_rows: Array) -> Array:
        return self.total / batch_rows


def seen(batch_rows: Array, seen_rows: Array) -> Array:
    r"""$\kappa_t = N_t/B_t$: the batch stands for all rows so far; the total need not be known."""
    return seen_rows / batch_rows


# --- step sizes -------------------------------------------------------------------------------


def decaying(initial: float, power: float = 0.55) -> Callable[[Array], Array]:
    r"""$\alpha_t = \alpha\, t^{-p}$."""
    _positive("initial", initial)
    return _Decaying(float(initial), float(power))


@dataclass(frozen=True)
class _Decaying:
    initial: float
    power: float

    def __call__(self, t: Array) -> Array:
        return self.initial * t**-self.power
