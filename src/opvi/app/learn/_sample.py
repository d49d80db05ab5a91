"""A few rows kept for the report's feature effects: a uniform sample of all that were learnt."""

from typing import NamedTuple

import numpy as np

ROWS = 256


class Sample(NamedTuple):
    """Encoded rows, and how many there were to choose from."""

    x: np.ndarray  # [ROWS, k]
    seen: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Those in use."""
        return self.x[: min(int(self.seen), ROWS)]


def start(features: int) -> Sample:
    """Empty."""
    return Sample(np.zeros((ROWS, features), np.float32), np.zeros((), np.int64))


def keep(sample: Sample, x: np.ndarray, seed: int) -> Sample:
    """The sample after some more rows: the s-th enters with probability ROWS / s, in place of a random one.

    What is drawn for a row depends on its number alone, so the sample is the same however a run is cut.
    """
    number = int(sample.seen) + np.arange(len(x), dtype=np.uint64)
    place = np.where(number < ROWS, number, _mixed(number, seed) % (number + np.uint64(1)))
    entering = np.flatnonzero(place < ROWS)
    kept = sample.x.copy()
    for row in entering:  # in order: a later row replaces an earlier one
        kept[int(place[row])] = x[row]
    return Sample(kept, sample.seen + len(x))


def _mixed(number: np.ndarray, seed: int) -> np.ndarray:
    """Random-looking 64-bit numbers, one for each number (the finaliser of splitmix64)."""
    z = (number + np.uint64(seed % 2**32 + 1) * np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
