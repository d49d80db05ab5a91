r"""Which targets to believe: garbage is weighted down, a jump of all targets is followed.

With r a row's error in units of the errors so far, the row's likelihood is raised to the power
$w = \min(1, (c / r)^2)$, as by `robust` of the filters. Far garbage counts almost nothing, while the tails of heavy
noise still count. If most rows are that far off, the model is wrong, not the rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.filters import _robust as robust
from opvi.tracking import _scaling as scaling
from opvi.tracking._calibration import Calibration, Combined
from opvi.tracking._scaling import Scale
from opvi.types import Array, Scalar

LARGEST = 10.0  # c, in units of the errors so far
SURPRISE = 5.0  # the same, for a row to be a surprise
JUMP = 0.5  # this share of surprising rows among the last few is a jump
JUMP_HALF_LIFE = 7.5  # rows, of the memory of that share
ONE_SIDED = 0.9  # this share of the surprising rows on one side is a jump of the level
JUMP_ROUNDS = 3.0  # of the usual size; sooner after a jump, another one means that the level was not all
AFTER_JUMP = 0.4  # of the share is kept, so that rows that are still far off are noticed soon
RENEWED = 20.0  # rows that the past counts for after a jump that is not one of the level
UNEVEN = 3.0  # times the usual squared error, left by a jump of the level: it is not all
FITTED = 5.0  # rows, at least, to find out whether y is the old prediction in new units
SAME = 3.0  # times the usual squared error, in the new units: that it is
FARTHEST = 1e6  # units of y: farther errors are no new unit
NORMAL = 1.4826  # a Gaussian's standard deviation over its median absolute deviation


class Believed(NamedTuple):
    """How far some targets are trusted before they are learnt."""

    trust: Array  # [B]: the power w of each row's likelihood
    y: Array  # [B]: what is not believed is moved towards its prediction
    surprised: Array  # [2]: shares of the last few rows that were far above and far below their prediction
    jump: Array  # whether these are most
    shift: Scalar  # in units of y's scale: the part of a jump that is the same for all rows
    ratio: Scalar  # of y's unit after a jump to the one before
    known: Array  # whether these two are all
    renew: Array  # whether they say nothing: the past is of no use
    recent: Array  # [6]: moments of the last few surprising rows, for `_units`


def believe(
    known: Calibration,
    one: Combined,
    scale: Scale,
    before: tuple[Array | float, Array | float],
    rows: tuple[Array, Array],
    begun: Array,
) -> Believed:
    """Return how far targets are trusted, given what was predicted.

    Args:
        known: the size of the errors so far, initially 1.
        one: the prediction.
        scale: its units.
        before: the shares of the last few rows that were far above and far below, and the moments of those.
        rows: y and weights.
        begun: whether there is a scale yet; if not, all targets are trusted.
    """
    y, weight = rows
    unit = scaling.divisor(scale)[-1]
    error = (y - scale.mean[-1]) / unit - one.mean
    expected = known.error * jnp.maximum(jnp.exp(one.log_shape), 1) + one.variance
    surprising = error**2 > SURPRISE**2 * expected
    share = jnp.where(begun, _surprised(before[0], error, surprising, weight), 0)
    recent = jnp.where(begun, _moments(before[1], one.mean, error, jnp.where(surprising, weight, 0), weight.sum()), 0)
    jump = share.sum() > JUMP
    level = share.max() > ONE_SIDED * share.sum()
    shift = jnp.where(jump & level, median(error, jnp.where(surprising, weight, 0)), 0)
    rest = median((error - shift) ** 2 / expected, weight)
    w = jnp.where(begun & ~jump, trust(error**2 / expected), 1)
    more = jump & (~level | (rest > SURPRISE**2) | (known.rounds < JUMP_ROUNDS))
    units = _units(recent, known.error)
    uneven = (rest > UNEVEN) | (units.spread > UNEVEN * known.error)
    same = jump & (more | uneven) & units.same & (known.rounds >= JUMP_ROUNDS)
    return Believed(
        w,
        y - (1 - w) * error * unit,
        jnp.where(jump, AFTER_JUMP * share, share),
        jump,
        jnp.where(same, units.shift, shift),
        jnp.where(same, units.ratio, 1),
        jump & (same | ~uneven),
        more & ~same,
        jnp.where(jump, 0, recent),
    )


class Units(NamedTuple):
    """Targets in units of the old ones: t = shift + ratio · prediction."""

    shift: Scalar
    ratio: Scalar
    spread: Scalar  # mean square of what a shift alone leaves
    same: Array  # whether that is all that happened


def _units(recent: Array, usual: Scalar) -> Units:
    """Return the line through the last few surprising rows, by least squares."""
    count, m, e, m_e, m_m, e_e = recent
    some = jnp.maximum(count, 1e-30)
    across, along = m_e - m * e / some, jnp.maximum(m_m - m**2 / some, 1e-30)
    more = across / along
    ratio = 1 + more
    left = e_e - e**2 / some
    spread, rest = left / some, (left - more * across) / jnp.maximum(count - 2, 1)
    good = (count >= FITTED) & (ratio > 0) & (rest < SAME * usual * ratio**2)
    return Units((e - more * m) / some, ratio, jnp.where(count >= FITTED, spread, 0), good)


def _moments(old: Array | float, mean: Array, error: Array, weight: Array, rows: Scalar) -> Array:
    """Return the sums of 1, m, e, m e, m² and e² over the last few rows, discounted; e is the error of m."""
    e = jnp.clip(error, -FARTHEST, FARTHEST)
    sums = jnp.stack([jnp.ones_like(e), mean, e, mean * e, mean**2, e**2]) @ weight
    return 0.5 ** (rows / JUMP_HALF_LIFE) * old + sums


def trust(squared: Array) -> Array:
    """Return the power w of each row's likelihood, from its squared error in squared units of the errors so far."""
    return robust.trust(squared, LARGEST)


def among_themselves(y: Array, weight: Array) -> tuple[Array, Array]:
    """Return the trust in the first targets, judged against each other, and the targets with outliers clipped."""
    centre = median(y, weight)
    unit = NORMAL * median(jnp.abs(y - centre), weight)
    w = jnp.where(unit > 0, trust(((y - centre) / jnp.where(unit > 0, unit, 1)) ** 2), 1)
    return w, centre + w * (y - centre)


@jax.jit
def median(values: Array, weight: Array) -> Scalar:
    """Return the median of the values with a weight; 0 if there is none."""
    some, order = weight > 0, np.arange(len(weight))
    values = jnp.where(some, values, jnp.inf)
    # Rows are few: to count those below each takes less to compile than to sort.
    below = (values[:, None] > values[None]) | ((values[:, None] == values[None]) & (order[:, None] > order[None]))
    rank, middle = below.sum(1, dtype=values.dtype), (some.sum(dtype=values.dtype) - 1) / 2
    central = some & (jnp.abs(rank - middle) < 0.75)  # one row, or two
    return jnp.where(central, values, 0).sum() / jnp.maximum(central.sum(dtype=values.dtype), 1)


def _surprised(share: Array | float, error: Array, surprising: Array, weight: Array) -> Array:
    """Return the shares of rows far above and far below among the last few, including a batch."""
    return recent(share, surprising[:, None] & jnp.stack([error > 0, error < 0], 1), weight)


def recent(share: Array | float, of: Array, weight: Array) -> Array:
    """Return the shares of the last few rows for which conditions hold, including a batch `[B, K]`."""
    rows = weight.sum()
    keep = 0.5 ** (rows / JUMP_HALF_LIFE)
    return keep * share + (1 - keep) * jnp.where(of, weight[:, None], 0).sum(0) / jnp.maximum(rows, 1e-30)
