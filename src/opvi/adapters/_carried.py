"""A classifier that learns more classes than it began with, whatever samplers are wrapped around it."""

from opvi.tracking._widening import widened_classifier
from opvi.types import State


def room_for(classes: int) -> int:
    """Return how many classes a widened model gets: at least twice as many, because every size is compiled anew."""
    return 1 << (classes - 1).bit_length()


def carried(old: State, fresh: State) -> State:
    """Return a classifier's state, with everything its wrappers keep, in the shape of one with more classes."""
    if hasattr(old, "inner"):
        return old._replace(inner=carried(old.inner, fresh.inner))  # type: ignore[attr-defined]
    return widened_classifier(old, fresh)  # type: ignore[arg-type]
