"""Trackers by their settings, so that models with equal settings share their compiled programs."""

from functools import lru_cache

import numpy as np

from opvi.tracking._classifier import classifier
from opvi.tracking._regressor import regressor
from opvi.tracking._remembering import remembering
from opvi.types import Tracker

KEPT = 64  # trackers; the programs of those used least recently are freed


@lru_cache(KEPT)
def shared_regressor(
    features: int, *, hidden: tuple[int, ...], particles: int, half_life: float | None, memory_rows: int, warm_up: int
) -> Tracker:
    """`opvi.regressor`, with `memory_rows` rows kept to learn from again."""
    made = regressor(features, hidden=hidden, particles=particles, half_life=half_life, warm_up=warm_up)
    return remembering(made, memory_rows, example=_row(features)) if memory_rows else made  # type: ignore


@lru_cache(KEPT)
def shared_classifier(
    features: int, classes: int, *, hidden: tuple[int, ...], particles: int, half_life: float | None, memory_rows: int
) -> Tracker:
    """`opvi.classifier`, with `memory_rows` rows kept to learn from again."""
    made = classifier(features, classes, hidden=hidden, particles=particles, half_life=half_life)
    return remembering(made, memory_rows, example=_row(features)) if memory_rows else made  # type: ignore


def _row(features: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((1, features), np.float32), np.zeros(1, np.float32)
