r"""What a sampler without stored rows says about its draws: how far they can be trusted, and what to do."""

import math
from typing import NamedTuple

import numpy as np

from opvi.filters.sl_opvi._trajectories import LARGEST_OFF, TRAVELLED
from opvi.types import Array

LARGEST_LOSS = 0.1  # of what surrogates missed, in standard deviations
FEWEST = 0.1  # share of the particles: an effective number below is too small
LARGEST_STEIN = 6.0  # standard errors: far beyond chance, for draws that miss the density that is tracked
REFUSED = 0.2  # share of moves accepted: with less, nothing is known
REMEDY = "store rows: `opvi.ibis(target)`"


class Diagnosis(NamedTuple):
    """How far draws can be trusted, and how far the particles are from them."""

    effective: float  # number of particles, by their weights
    shift: float  # of a mean, the largest, in standard deviations: particles beside draws
    narrow: float  # the smallest standard deviation of the particles, as a share of that of the draws
    wide: float  # the largest
    accepted: float  # share of the moves that make draws of particles
    remembered: float  # largest correlation between the particles that draws began at and where they are
    most: float  # what chance may make of that correlation: above, draws are not independent of the particles
    off: float  # what that leaves of the particles' errors in a mean or sd of the draws, in standard deviations
    travelled: float  # largest change of a mean or spread in the second half of the moves, in standard errors
    lost: float  # what the surrogate of all rows may have moved a mean by, in standard deviations, the largest
    particles: int
    rows: int  # seen
    stein: float = math.nan  # Stein's discrepancy between draws and the density that is tracked, in standard errors

    def concerns(self) -> list[str]:
        """Return what is wrong with the draws and what to do about it; nothing if they can be trusted."""
        found = concerns_of_surrogate(self.lost, self.rows)
        if not math.isfinite(self.shift + self.remembered + self.travelled) or self.accepted < REFUSED:
            found.append(f"moves from the particles are refused, so that nothing is known about them: {REMEDY}.")
        elif self.remembered > self.most or self.off > LARGEST_OFF:
            found.append(
                f"draws have not forgotten the particles they began at (correlation {self.remembered:.2f}), and a mean "
                f"or sd may be off by {self.off:.2f} sd or more: write hierarchies non-centred, or {REMEDY}."
            )
        elif self.travelled > TRAVELLED:
            found.append(
                f"draws have not arrived (a mean or spread still changes by {self.travelled:.1f} standard errors): "
                f"write hierarchies non-centred, or {REMEDY}."
            )
        elif self.stein > LARGEST_STEIN:
            found.append(
                f"draws do not have the density that is tracked (Stein's discrepancy is {self.stein:.1f} standard "
                f"errors): {REMEDY}."
            )
        return found + concerns_of_weights(self.effective, self.particles)

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.concerns()


def concerns_of_surrogate(lost: float, rows: int) -> list[str]:
    """Return concerns about rows that are represented only by a surrogate."""
    if lost <= LARGEST_LOSS:
        return []
    return [f"{rows:,} rows are known by a polynomial alone, which may have moved a mean by {lost:.2f} sd: {REMEDY}."]


def concerns_of_weights(effective: float, particles: int) -> list[str]:
    """Return concerns about particles that carry no weight."""
    if effective >= FEWEST * particles:
        return []
    return [f"{effective:.0f} of {particles} particles carry the weight: take {4 * particles} particles."]


def effective_number(log_weights: Array) -> float:
    """Return the number of particles, by their weights."""
    w = np.exp(np.asarray(log_weights, float))
    return float(w.sum() ** 2 / (w**2).sum())
