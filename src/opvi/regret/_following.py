"""What all watches share: they continue their sums from chunk to chunk, and know a particle set that is not theirs."""

from abc import ABC, abstractmethod

import numpy as np

from opvi.running._run import Chunk
from opvi.targets import Target
from opvi.types import Particles


class Following(ABC):
    """A callback that follows a run through its chunks."""

    def __init__(self) -> None:
        self.last = 0  # the last round watched
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Forget the sums: the rounds to come do not continue the last ones."""

    def rounds(self, chunk: Chunk, count: int) -> np.ndarray:
        """Return the chunk's rounds; begin anew if they do not continue where the last chunk ended."""
        t = np.arange(chunk.round - count + 1, chunk.round + 1)
        if t[0] != self.last + 1:
            self.begin()
        self.last = chunk.round
        return t


def of_target(target: Target, particles: Particles) -> Particles:
    """Return the particles, refused unless they can be parameters of the target."""
    if particles.ndim != 2 or particles.shape[1] != target.dim:
        raise ValueError(
            f"the sampler's particles have shape {particles.shape}, but the target of this watch has {target.dim} "
            "parameters. Give the watch the sampler's own target."
        )
    return particles
