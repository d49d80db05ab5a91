r"""How fast networks forget: a factor on all their half-lives, moved by whether they are late or hasty.

A trail follows the particles w: $\bar w \gets \bar w + \kappa (w - \bar w)$, with a half-life of 150 rows. With m and
$\bar m$ the predictions of a row by both, before it is learnt, and the networks' weights,

$$r = y - m, \qquad q = m - \bar m, \qquad \beta = \sum r q \Big/ \sum q^2.$$

The errors of a filter that forgets as fast as the truth moves have nothing to do with its latest moves: $\beta = 0$. If
it forgets too slowly, the next error asks for more of the same move, and β is how much more; too fast, and the moves
were noise, which the next error takes back.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.tracking._mixing._members import USUAL_ROWS
from opvi.types import Array, Scalar

TRAIL = 150.0  # rows, the half-life of the trail
MEMORY = 500.0  # rows, the half-life of the sums
LATE = 0.4  # β above this is late
HASTY = 0.15  # below this, hasty
SURE_LATE = 2.5  # standard deviations of β, from 0
SURE_HASTY = 2.0  # the same, from HASTY
STEP, LARGEST_STEP = 1.0, 3.0  # of the logarithm to base 2; the first one is large
FASTEST = -6.0  # that logarithm
REACH = 3.0  # no error counts for more, in units of the errors so far


class Pace(NamedTuple):
    """The parts of the array that a state keeps."""

    log2: Scalar  # of the factor on all half-lives; at most 0
    rows: Scalar  # since the trail began; 0: there is none
    cross: Scalar  # discounted sum over blocks of 20 rows: of r q, in units of the block's r² + q²
    own: Scalar  # the same of q²
    noise: Scalar  # the same of the squares of what `cross` sums
    products: Scalar  # r q of the rows since the last block
    moves: Scalar  # and their q²
    errors: Scalar  # and their r²


def start(dtype: jnp.dtype) -> Array:
    """Return the pace before any row: that of the settings."""
    return jnp.zeros(len(Pace._fields), dtype)


def faster(pace: Array | None) -> Scalar | float:
    """Return how many times faster than the settings say the networks forget."""
    return 1.0 if pace is None else jnp.exp2(-pace[0])


def without_trail(pace: Array | None) -> Array | None:
    """Return the same pace, with nothing known about moves."""
    return None if pace is None else jnp.where(np.arange(len(pace)) == 0, pace, 0)


def learn(pace: Array, error: Array, move: Array, weight: Array, size: Scalar) -> Array:
    """Return the pace after some rows.

    Args:
        pace: before them.
        error: r.
        move: q.
        weight: the rows' weights; 0 in all of them changes nothing.
        size: the usual squared error.
    """
    known, rows = Pace(*pace), weight.sum()
    bound = REACH * jnp.sqrt(size)
    weight = jnp.where(known.rows > 0, weight, 0)
    r, q, total = jnp.clip(error, -bound, bound), move, known.rows + rows
    parts = [p + (a * b * weight).sum() for p, a, b in zip(pace[5:], (r, q, r), (q, q, r), strict=True)]
    full = jnp.floor(total / USUAL_ROWS) > jnp.floor(known.rows / USUAL_ROWS)
    # In units of its own, no block outweighs the others: those in which the networks leap to where the truth went.
    unit = jnp.where(full, 1 / jnp.maximum(parts[1] + parts[2], 1e-30), 0)
    keep, block = 0.5 ** (rows / MEMORY), (parts[0] * unit, parts[1] * unit)
    cross, own, noise = (
        keep * old + new
        for old, new in zip((known.cross, known.own, known.noise), (*block, block[0] ** 2), strict=True)
    )
    sd = jnp.sqrt(noise)
    late = full & (cross > LATE * own) & (cross > SURE_LATE * sd)
    hasty = full & (cross - HASTY * own < -SURE_HASTY * sd)
    more = jnp.log2(jnp.maximum(cross, 1e-30) / jnp.maximum(LATE * own, 1e-30))
    down = jnp.clip(more, jnp.where(known.log2 < 0, STEP, LARGEST_STEP), LARGEST_STEP)
    log2 = jnp.clip(known.log2 + jnp.where(late, -down, jnp.where(hasty, STEP, 0)), FASTEST, 0)
    moved = log2 != known.log2
    sums = [jnp.where(moved, 0, value) for value in (cross, own, noise)]
    sums += [jnp.where(full, 0, value) for value in parts]
    total = jnp.where(
        total > 2 * MEMORY, MEMORY + jax.lax.rem(total, jnp.full_like(total, USUAL_ROWS)), total
    )  # a larger count would stand still
    learnt = jnp.stack([log2, total, *sums])
    return jnp.where(jnp.isfinite(learnt).all(), learnt, pace)


def follow(trail: Array, particles: Array, pace: Array, rows: Scalar) -> Array:
    """Return the trail after the particles have moved, `rows` of weight later; without one, it begins with them."""
    keep = jnp.where(pace[1] > rows, 0.5 ** (rows / TRAIL), 0)
    return keep * trail + (1 - keep) * particles
