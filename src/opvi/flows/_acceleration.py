r"""Nesterov-type acceleration on the Wasserstein space (Liu et al., 2019): WAG and WNes, for any field."""

import math
from dataclasses import dataclass
from typing import Protocol

from opvi.types import Array, Particles, Scalar


class Acceleration(Protocol):
    """Where to evaluate the next field; frozen and hashable, like all parts of samplers."""

    def look_ahead(self, t: Scalar, x: Particles, x_old: Particles, y_old: Particles, move: Array) -> Particles:
        """Return $y_t$ from $x_t$, $x_{t-1}$, $y_{t-1}$ and the move $x_t - y_{t-1}$."""


def wag(alpha: float = 3.9) -> Acceleration:
    r"""Wasserstein accelerated gradient.

    $$x_t = y_{t-1} + \epsilon v(y_{t-1}), \qquad
      y_t = x_t + \tfrac{t-1}{t} (y_{t-1} - x_{t-1}) + \tfrac{t + \alpha - 2}{t}\, \epsilon v(y_{t-1})$$

    Args:
        alpha: $\alpha > 3$.
    """
    if not alpha > 3:
        raise ValueError(f"`alpha` is {alpha!r}, but WAG needs a factor greater than 3.")
    return _WAG(float(alpha))


@dataclass(frozen=True)
class _WAG:
    alpha: float

    def look_ahead(self, t: Scalar, x: Particles, x_old: Particles, y_old: Particles, move: Array) -> Particles:
        return x + (t - 1) / t * (y_old - x_old) + (t + self.alpha - 2) / t * move


def wnes(curvature: float = 0.01, shrink: float = 0.2) -> Acceleration:
    r"""Wasserstein Nesterov with constant momentum.

    $$x_t = y_{t-1} + \epsilon v(y_{t-1}), \qquad y_t = x_t + c\, (x_t - x_{t-1}), \qquad
      c = 1 + \beta - \frac{2 (1+\beta)(2+\beta) \mu}{\sqrt{\beta^2 + 4(1+\beta)\mu} - \beta + 2(1+\beta)\mu}$$

    with $\beta = s \sqrt{\mu}$. The default is a momentum of 0.82.

    Args:
        curvature: $\mu$ in (0, 1]: the target's strong convexity times the step size; 1 is no momentum.
        shrink: $s$, by how much the momentum stays below its critical value.
    """
    if not 0 < curvature <= 1 or not shrink >= 0:
        raise ValueError(
            f"`curvature` is {curvature!r} and `shrink` is {shrink!r}; WNes needs 0 < curvature ≤ 1 and shrink ≥ 0."
        )
    beta = shrink * math.sqrt(curvature)
    root = math.sqrt(beta**2 + 4 * (1 + beta) * curvature)
    momentum = 1 + beta - 2 * (1 + beta) * (2 + beta) * curvature / (root - beta + 2 * (1 + beta) * curvature)
    return _WNes(momentum)


@dataclass(frozen=True)
class _WNes:
    momentum: float

    def look_ahead(self, t: Scalar, x: Particles, x_old: Particles, y_old: Particles, move: Array) -> Particles:
        return x + self.momentum * (x - x_old)
