r"""Is it the posterior? What a tracker can say about itself from its particles and stored rows."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from opvi.filters._moves import LARGEST_OFF, TRAVELLED
from opvi.types import Sampler, Tree

FIRST_DOUBT = 32  # rounds before the first diagnosis; the next is due after twice as many
LARGEST_LOSS = 0.1  # of what surrogates missed, in standard deviations
FEWEST = 0.1  # share of the particles: an effective number below is too small
LARGEST_STEIN = 6.0  # standard errors: far beyond chance, for draws that miss the density that is tracked
REFUSED = 0.2  # share of moves accepted: with less, nothing is known


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
    lost: float  # what surrogates of rows gone may have moved a mean by, in standard deviations, the largest
    particles: int
    rows: int  # seen
    stored: int  # of them; the others are known by a surrogate
    stein: float = math.nan  # Stein's discrepancy between draws and the density that is tracked, in standard errors
    pareto: float = math.nan  # largest Pareto k, over the rows stored, of the weights that leave a row out
    uneven: float = math.nan  # Kolmogorov's distance · √rows of predictions of rows, P(Y ≤ y), from uniform

    def concerns(self) -> list[str]:
        """Return what is wrong with the draws and what to do about it; nothing if they can be trusted."""
        found = concerns_of_surrogates(self.lost, self.rows, self.stored)
        whole = self.stored >= self.rows
        nuts = f"use NUTS: the {self.rows:,} rows are all stored" if whole else "use NUTS"
        if not math.isfinite(self.shift + self.remembered + self.travelled) or self.accepted < REFUSED:
            found.append(f"moves from the particles are refused, so that nothing is known about them: {nuts}.")
        elif self.remembered > self.most or self.off > LARGEST_OFF:
            found.append(
                f"draws have not forgotten the particles they began at (correlation {self.remembered:.2f}), and a mean "
                f"or sd may be off by {self.off:.2f} sd or more: write hierarchies non-centred, or {nuts}."
            )
        elif self.travelled > TRAVELLED:
            found.append(
                f"draws have not arrived (a mean or spread still changes by {self.travelled:.1f} standard errors): "
                f"write hierarchies non-centred, or {nuts}."
            )
        elif self.stein > LARGEST_STEIN:
            found.append(
                f"draws do not have the density that is tracked (Stein's discrepancy is {self.stein:.1f} standard "
                f"errors): {nuts}."
            )
        return found + concerns_of_weights(self.effective, self.particles)

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


def concerns_of_weights(effective: float, particles: int) -> list[str]:
    """Return concerns about particles that carry no weight."""
    if effective >= FEWEST * particles:
        return []
    return [f"{effective:.0f} of {particles} particles carry the weight: take {4 * particles} particles."]


@dataclass
class Doubts:
    """Diagnoses of a run, as `doubts` asks for them."""

    diagnosis: Callable[[Tree], Diagnosis]
    due: int = field(default=FIRST_DOUBT)
    said: bool = field(default=False)

    def __call__(self, chunk: Tree) -> dict[str, float] | None:
        """Return the diagnosis if one is due, and warn of the first concerns."""
        if chunk.round < self.due:
            return None
        while self.due <= chunk.round:
            self.due *= 2
        found = self.diagnosis(chunk.state)
        concerns = found.concerns()
        if concerns and not self.said:
            self.said = True
            about = f"after round {chunk.round} this may not be the posterior: {' '.join(concerns)}"
            warnings.warn(about, UserWarning, stacklevel=2)
        return {name: float(value) for name, value in found._asdict().items()}


def doubts(sampler: Sampler) -> Doubts:
    """Return a callback of `opvi.run` that diagnoses after 32, 64, 128, … rounds, and warns once.

    A diagnosis costs about a step, so that those of a run usually cost less than a tenth of its steps.
    What they said is in `history.callbacks`.

    Args:
        sampler: one with `diagnosis`, such as `opvi.tracker(target)` of up to 50 parameters. Give `opvi.run` the
            callback and `every=32`.
    """
    diagnosis = getattr(sampler, "diagnosis", None)
    if diagnosis is None:
        raise TypeError(
            f"a {type(sampler).__name__} has no `diagnosis`; `opvi.sl_opvi` has, which `opvi.tracker` picks for models "
            "with up to 50 parameters."
        )
    return Doubts(diagnosis)
