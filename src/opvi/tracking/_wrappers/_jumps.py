r"""The posterior probability that the data have jumped, from how well rows were predicted.

Before a jump, rows follow their predictives. After it, which comes with a small probability h at every row, they follow
others: here, the same ones with all errors 3 times as large. With $\Lambda$ the ratio of the two densities of n rows,
the odds of a jump at or before them are (Shiryaev)

$$o \gets \frac{o + 1 - (1 - h)^n}{(1 - h)^n}\, \Lambda, \qquad P(\text{jump}) = \frac{o}{1 + o}.$$

While predictions are right, the expected ratio is 1: an alarm at odds of 19 is wrong at most once in 19/h rows.
"""

import math

import jax.numpy as jnp

from opvi.tracking._mixing._quantiles import squared_quantile
from opvi.types import Array, Scalar

HAZARD = 1e-5  # h
ALARM = 0.95
SIZE = 3.0  # of errors after a jump; also found if they are at least twice as large as predicted
REACH = 9.0  # no squared error counts for more, in units of its predicted size
WARM_UP = 10.0  # batches of the usual size after a start or a jump: until then, sizes of errors are not known
KEPT = 1 / 30  # of the past, after a jump that is not one of y's level or unit
FAR = 0.4  # log distance to the nearest rows, less the usual one: there no row has been
LARGEST = 1e6  # odds


def after(odds: Scalar | float, log_ratio: Scalar, rows: Scalar) -> Scalar:
    """Return the odds after some rows, given the logarithm of their ratio Λ."""
    quiet = rows * math.log1p(-HAZARD)  # the log probability of no jump in between
    new = (odds - jnp.expm1(quiet)) * jnp.exp(jnp.minimum(log_ratio - quiet, 30))
    return jnp.where(jnp.isfinite(new), jnp.minimum(new, LARGEST), odds)


def wider(level: Array, weight: Array) -> Scalar:
    """Return the log ratio for larger errors, from the levels P(Y ≤ y) of rows and their weights."""
    return (
        (jnp.minimum(squared_quantile(jnp.where(weight > 0, level, 0.5)), REACH) * (1 - SIZE**-2) / 2 - math.log(SIZE))
        * weight
    ).sum()


def probability(odds: Scalar) -> Scalar:
    """Return the posterior probability of a jump."""
    return odds / (1 + odds)
