r"""What Gauss–Newton particles say about their draws: how much they contradict one another, and recent errors."""

import math
from typing import NamedTuple

import numpy as np

from opvi.filters._looking import AdaptiveNoise
from opvi.targets import Target
from opvi.types import Array

APART = 1.0  # standard deviations: particles farther apart are not explained by what they say of themselves
NO_BOUND = "rows were linearised where particles stood as they came, and what that moved the draws by has no bound"


class Diagnosis(NamedTuple):
    """What is known of how far draws are from the posterior. No number bounds that, unless `exact` is 1."""

    exact: float  # 1: the model is linear with Gaussian noise, of which the filter is the posterior; 0: it is not so
    apart: float  # of particles' means, in the standard deviations that they say they have: the largest; nan of one
    error: float  # root mean square of predictions lately, by particle, on average; nan where nothing measures it
    noise: float  # standard deviation of the noise that is assumed beside it
    particles: int
    rows: int  # seen

    def concerns(self) -> list[str]:
        """Return what is wrong with the draws and what to do about it; nothing only where the filter is exact."""
        if self.exact:
            return []
        found = [f"this is not the posterior: {NO_BOUND}. Store rows: `opvi.ibis(target)`."]
        if self.apart > APART:
            found.append(
                f"particles are {self.apart:.1f} of their own standard deviations apart, so that at most one of them "
                "has the right mean or width: more rows may bring them together."
            )
        if self.error > self.noise:
            found.append(
                f"errors of predictions were {self.error / self.noise:.2f} times the noise that is assumed, and widths "
                "of draws are those of the noise: for intervals use predictions, which `opvi.calibrated` corrects."
            )
        return found

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.concerns()


def diagnose(
    target: Target,
    noise: AdaptiveNoise | None,
    believes_all: bool,
    whole: bool,
    particles: Array,
    variance: Array,
    error: Array,
    rows: int,
) -> Diagnosis:
    """Return the diagnosis of particles `[n, d]` with variances `[n, d]` of their own and squared errors `[n]`."""
    x, own = np.asarray(particles, float), np.asarray(variance, float)
    mlp = None if target.architecture is None else target.architecture
    linear = mlp is not None and len(mlp.mlp.shapes) == 1 and not mlp.head.classes
    measured = noise is not None and rows > 0
    squared = np.asarray(error, float)
    assumed = np.maximum(noise.share * squared, noise.smallest) if noise is not None else np.full(1, math.nan)
    between = np.sqrt(x.var(0, ddof=1) / own.mean(0)) if len(x) > 1 else np.full(1, math.nan)
    return Diagnosis(
        exact=float(linear and believes_all and whole and noise is None),
        apart=float(between.max()),
        error=float(np.sqrt(squared.mean())) if measured else math.nan,
        noise=float(np.sqrt(assumed.mean())) if measured else math.nan,
        particles=len(x),
        rows=rows,
    )
