r"""Fades out columns that do not help: a factor for each input, learnt from predictions made before learning.

Let $g_j = z_j\, \partial f / \partial z_j$ be what column j adds to a prediction, and e the error of that prediction.
$\sum e g_j$ is 0 for a column whose part is right, and $-\sum g_j^2$ for one that adds nothing but noise. The factor
follows the regression of e on $g_j$, and returns when the column begins to help. A column that errors correlate with,
or with its square, does not fade and returns: networks need many rows to learn from it. While rows are few, a Gaussian
process (`_process`) knows better which of many columns do not help, and those fade; those that help it do not.
"""

from typing import NamedTuple

import jax.numpy as jnp

from opvi.types import Array, Scalar

MEMORY = 0.98  # of the sums, for 20 rows
RATE = 0.2  # of the factors, for 20 rows
TOLERANCE = 0.25  # of a column's part may be too much, as it is in any network that has seen few rows
PATIENT_TOLERANCE = 0.4  # the same where networks begin again once columns have faded (`_seats`)
PATIENT = 20  # columns, up to which that holds: of more, most are likely to be useless
USUAL_ROWS = 20.0
LARGEST = 2.5  # standard deviations of an input
SMALLEST = 0.05  # from where a column can still return
CLEAR = 4.5  # standard deviations: of a sum that chance does not explain, in any of many columns
FEW = 10  # columns: in narrower tables one only fades if predictions are better without it
FEW_TOLERANCE = 0.5  # half of its part may be too much: with more, predictions without it are better
FEW_CLEAR = 1.0  # standard deviations by which they must be
FEW_SMALLEST = 0.2
FASTER = 3.0  # times as fast as by errors, columns fade that do not help a Gaussian process
CAUTION = 1.0  # squared errors that a column's part must add up to before it is judged


class Gates(NamedTuple):
    """A factor for each column, and the discounted sums behind it."""

    factor: Array  # [F]
    product: Array  # [F]: of errors and contributions
    square: Array  # [F]: of contributions
    error: Scalar  # squared errors
    seen: Scalar  # rows
    linear: Array | float = 0.0  # [F]: of errors and inputs
    bent: Array | float = 0.0  # [F]: of errors and squared inputs


def start(columns: int, dtype: jnp.dtype) -> Gates:
    """Return gates under which every column counts fully."""
    zero = jnp.zeros(columns, dtype)
    return Gates(jnp.ones(columns, dtype), zero, zero, jnp.zeros((), dtype), jnp.zeros((), dtype), zero, zero)


def through(gates: Gates | None, z: Array) -> Array:
    """Return the faded inputs."""
    return z if gates is None else z * gates.factor[None]


def at_full_size(gates: Gates | None, z: Array) -> Array:
    """Return faded inputs as they were, where columns are few: the size of errors may depend on those that fade.

    Of many columns, those that do not help the mean are too many to be looked at for this alone.
    """
    return z if gates is None or z.shape[1] > FEW else z / gates.factor[None]


def update(
    gates: Gates,
    z: Array,
    contributions: Array,
    error: Array,
    weight: Array,
    patient: bool = False,
    vanished: Array | None = None,
) -> Gates:
    """Return the factors after a batch.

    Args:
        gates: the gates before the batch.
        z: faded inputs `[B, F]`.
        contributions: what each column added to the predictions `[B, F]`.
        error: the errors of the predictions.
        weight: the weights of the rows.
        patient: whether more of a column's part may be too much, because networks begin again when it has faded.
        vanished: how surely columns do not help, by a Gaussian process, from 0 to 1; below 0, how surely they do.
    """
    rows = weight.sum()
    share = rows / USUAL_ROWS
    keep = MEMORY**share
    product = keep * gates.product + (contributions * (error * weight)[:, None]).sum(0)
    square = keep * gates.square + (contributions**2 * weight[:, None]).sum(0)
    squared, seen = keep * gates.error + (error**2 * weight).sum(), keep * gates.seen + rows
    slope = product / (square + CAUTION * squared / jnp.maximum(seen, 1))
    whole, known = jnp.clip(z / gates.factor[None], -LARGEST, LARGEST), (error * weight)[:, None]
    linear = keep * gates.linear + (whole * known).sum(0)
    bent = keep * gates.bent + ((whole**2 - 1) / jnp.sqrt(2.0) * known).sum(0)
    clear = jnp.maximum(jnp.abs(linear), jnp.abs(bent)) > CLEAR * jnp.sqrt(squared)
    down = _down(slope, product, square, squared / jnp.maximum(seen, 1), patient)
    push = jnp.clip(jnp.maximum(slope, 0) + down, -1, 1)
    if vanished is not None:
        push -= jnp.maximum(vanished, 0) * (FASTER + push)
        push = jnp.maximum(push, (1 + jnp.minimum(vanished, 0)) * push)  # what fades less may still return
    push = jnp.where(clear, 1, push)
    smallest = FEW_SMALLEST if len(slope) <= FEW else SMALLEST
    factor = jnp.clip(gates.factor * jnp.exp(RATE * share * push), smallest, 1)
    new = Gates(factor, product, square, squared, seen, linear, bent)
    good = jnp.isfinite(factor.sum() + product.sum() + square.sum() + squared + linear.sum() + bent.sum())
    return Gates(*(jnp.where(good, a, b) for a, b in zip(new, gates, strict=True)))


def _down(slope: Array, product: Array, square: Array, error: Scalar, patient: bool) -> Array:
    r"""Return how fast columns fade, none above 0.

    Without its part a column's squared errors would be larger by $\sum (e + g_j)^2 - e^2 = 2 \sum e g_j + \sum g_j^2$.
    Where columns are few, most of them help sooner or later, and one fades only if that is clearly below 0.
    """
    if len(slope) > FEW:
        return jnp.minimum(slope + (PATIENT_TOLERANCE if patient and len(slope) <= PATIENT else TOLERANCE), 0)
    harm = -(product + FEW_TOLERANCE * square)
    return jnp.where(harm > FEW_CLEAR * jnp.sqrt(square * error), jnp.minimum(slope + FEW_TOLERANCE, 0), 0)
