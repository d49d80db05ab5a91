r"""Is it the posterior? What a tracker can say about itself from its particles and stored rows."""

import math
from typing import NamedTuple

LARGEST_SHIFT = 0.15  # of a mean, in standard deviations
LARGEST_RATIO = 1.15  # of two standard deviations, either way
LARGEST_LOSS = 0.1  # of what surrogates missed, in standard deviations
FEWEST = 0.1  # share of the particles: an effective number below is too small
REFUSED = 0.2  # share of moves accepted: with less, nothing is known


class Diagnosis(NamedTuple):
    """How far particles are from what their sampler believes, and how far that is from the posterior."""

    effective: float  # number of particles, by their weights
    shift: float  # of a mean, the largest, in standard deviations: particles beside moves invariant for the belief
    narrow: float  # the smallest standard deviation of the particles, as a share of that of the moves
    wide: float  # the largest
    accepted: float  # share of the moves
    lost: float  # what surrogates of rows gone may have moved a mean by, in standard deviations, the largest
    particles: int
    rows: int  # seen
    stored: int  # of them; the others are known by a surrogate

    def concerns(self) -> list[str]:
        """Return what is wrong and what to do about it; nothing if the posterior can be trusted."""
        found = concerns_of_surrogates(self.lost, self.rows, self.stored)
        whole = self.stored >= self.rows
        nuts = f"use NUTS: the {self.rows:,} rows are all stored" if whole else "use NUTS"
        if not math.isfinite(self.shift) or self.accepted < REFUSED:
            found.append(f"moves from the particles are refused, so that nothing is known about them: {nuts}.")
        elif self.shift > LARGEST_SHIFT or self.narrow < 1 / LARGEST_RATIO or self.wide > LARGEST_RATIO:
            found.append(
                f"the particles' means are up to {self.shift:.2f} sd off and their sds {self.narrow:.2f} to "
                f"{self.wide:.2f} of the posterior's: take `sampler.draws`, which moves them, or more than "
                f"{self.particles} particles, or {nuts}."
            )
        if self.effective < FEWEST * self.particles:
            more = 4 * self.particles
            found.append(f"{self.effective:.0f} of {self.particles} particles carry the weight: take {more} particles.")
        return found

    @property
    def right(self) -> bool:
        """Whether nothing is wrong."""
        return not self.concerns()


def concerns_of_surrogates(lost: float, rows: int, stored: int) -> list[str]:
    """Return concerns about rows that are represented only by a surrogate."""
    if lost <= LARGEST_LOSS:
        return []
    wanted = -(-rows // 1000) * 1000
    return [
        f"{rows - stored:,} of {rows:,} rows are known by a surrogate, which may have moved a mean by {lost:.2f} sd: "
        f"store {wanted:,} rows, `opvi.sl_opvi(target, example=…, memory_rows={wanted})`."
    ]
