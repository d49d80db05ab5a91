r"""Forecasts of numbers: mixtures of Student-t and normal distributions, and their scores.

A method that predicts points gets a normal distribution from its own past errors (`Band`).
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, stdtr
from scipy.stats import norm, t

NODES = 121  # of the grid on which a distribution function is integrated
REACH = 12.0  # standard deviations that the grid covers on either side
MEMORY = 0.995  # of a band, per row: about the last 200 errors count


class Numbers(NamedTuple):
    """A mixture with equal weights for each of B rows: K components by mean, variance and degrees of freedom."""

    mean: np.ndarray  # [B, K]
    variance: np.ndarray  # [B, K]
    dof: np.ndarray | None = None  # [B, K], greater than 2; None for normal distributions

    def point(self) -> np.ndarray:
        """Return the means of the rows."""
        return self.mean.mean(1)

    def _scale(self) -> np.ndarray:
        if self.dof is None:
            return np.sqrt(self.variance)
        finite = np.where(np.isinf(self.dof), 1e9, self.dof)
        return np.sqrt(self.variance * (finite - 2) / finite)

    def log_density(self, y: np.ndarray) -> np.ndarray:
        """Return the log density of each row's y."""
        scale = self._scale()
        if self.dof is None:
            parts = norm.logpdf(y[:, None], self.mean, scale)
        else:
            parts = t.logpdf(y[:, None], self.dof, self.mean, scale)
        return np.logaddexp.reduce(parts, axis=1) - np.log(self.mean.shape[1])

    def cdf(self, y: np.ndarray) -> np.ndarray:
        """Return P(Y ≤ y) of each row: uniform if the method is calibrated."""
        z = (y[:, None] - self.mean) / self._scale()
        parts = ndtr(z) if self.dof is None else np.where(np.isinf(self.dof), ndtr(z), stdtr(self.dof, z))
        return parts.mean(1)

    def crps(self, y: np.ndarray) -> np.ndarray:
        r"""Return $\int (F(z) - [z \ge y])^2 dz$ of each row: in closed form for one normal, else on a grid."""
        if self.dof is None and self.mean.shape[1] == 1:
            s, z = np.sqrt(self.variance[:, 0]), (y - self.mean[:, 0]) / np.sqrt(self.variance[:, 0])
            return s * (z * (2 * ndtr(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
        u = np.linspace(-1, 1, NODES)
        nodes = np.sinh(4 * u) / np.sinh(4) * REACH  # close together in the middle
        sd = np.sqrt(self.variance.mean(1) + self.mean.var(1))
        z = self.point()[:, None] + sd[:, None] * nodes
        F = self._on_grid(z)
        step = np.diff(z, axis=1)
        below = np.zeros_like(F)  # ∫ F² up to each node
        below[:, 1:] = np.cumsum((F[:, 1:] ** 2 + F[:, :-1] ** 2) / 2 * step, 1)
        above = np.zeros_like(F)  # ∫ (1 - F)² up to each node
        above[:, 1:] = np.cumsum(((1 - F[:, 1:]) ** 2 + (1 - F[:, :-1]) ** 2) / 2 * step, 1)
        inside = np.clip(y, z[:, 0], z[:, -1])
        to = [
            np.array([np.interp(v, a, b) for v, a, b in zip(inside, z, part, strict=True)]) for part in (below, above)
        ]
        return to[0] + above[:, -1] - to[1] + np.abs(y - inside)

    def _on_grid(self, z: np.ndarray) -> np.ndarray:
        """Return the distribution function `[B, nodes]`, component by component, from tables."""
        scale, F = self._scale(), np.zeros_like(z)
        for k in range(self.mean.shape[1]):
            standard = (z - self.mean[:, k, None]) / scale[:, k, None]
            if self.dof is None:
                F += ndtr(standard)
                continue
            for dof in np.unique(self.dof[:, k]):
                rows = self.dof[:, k] == dof
                F[rows] += np.interp(standard[rows], *_table(float(dof)))
        return F / self.mean.shape[1]


@cache
def _table(dof: float) -> tuple[np.ndarray, np.ndarray]:
    z = np.sinh(np.linspace(-6, 6, 4001))
    return z, ndtr(z) if np.isinf(dof) else stdtr(dof, z)


class Band:
    """A normal distribution around points, as wide as past errors were."""

    def __init__(self) -> None:
        self.total, self.square, self.first = 0.0, 0.0, 1.0

    def around(self, point: np.ndarray) -> Numbers:
        """Return the distributions of some rows."""
        variance = self.square / self.total if self.total else self.first
        return Numbers(point[:, None], np.full((len(point), 1), max(variance, 1e-12)))

    def learn(self, point: np.ndarray | None, y: np.ndarray) -> None:
        """Learn from the errors of predictions made before learning; None if nothing had been learnt by then."""
        if point is None:
            self.first = float(y.var()) or 1.0
            return
        for error in y - point:
            self.total = MEMORY * self.total + 1
            self.square = MEMORY * self.square + min(float(error) ** 2, 1e30)
