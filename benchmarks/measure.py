"""Timing callables side by side, and the result that every benchmark hands to the table."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Timing:
    """Repeats of one call, in milliseconds. `first` is the call before them: it compiles."""

    first: float
    repeats: list[float]

    @property
    def median(self) -> float:
        return float(np.median(self.repeats))

    def each(self, count: int) -> "Timing":
        """Return the same for one of `count` things done in a call."""
        return Timing(self.first / count, [value / count for value in self.repeats])

    def summary(self) -> dict[str, Any]:
        low, high = np.percentile(self.repeats, [25, 75])
        return {"median": self.median, "quartiles": [float(low), float(high)], **asdict(self)}


@dataclass(frozen=True)
class Result:
    """One line of the table: a value, its target, and the raw numbers behind it."""

    what: str
    size: str
    value: float
    unit: str  # "×" is a ratio peer / opvi, of which more is better; of anything else less is better
    target: float | None = None
    timings: dict[str, Timing] = field(default_factory=dict)  # the first is opvi's, the second its peer's
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value >= self.target if self.unit == "×" else self.value <= self.target

    def summary(self) -> dict[str, Any]:
        timings = {name: timing.summary() for name, timing in self.timings.items()}
        return {**asdict(self), "met": self.met, "timings": timings}


def milliseconds(call: Callable[[], Any]) -> float:
    """Return how long a call takes until its arrays are ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return 1e3 * (time.perf_counter() - start)


def interleave(
    calls: Mapping[str, Callable[[], Any]], *, seconds: float = 2.5, at_least: int = 3, at_most: int = 400
) -> dict[str, Timing]:
    """Time calls in turn, A B A B …, so that whatever else the machine does hits all of them alike."""
    first = {name: milliseconds(call) for name, call in calls.items()}
    repeats: dict[str, list[float]] = {name: [] for name in calls}
    start = time.perf_counter()
    for done in range(at_most):
        if done >= at_least and time.perf_counter() - start > seconds:
            break
        for name, call in calls.items():
            repeats[name].append(milliseconds(call))
    return {name: Timing(first[name], repeats[name]) for name in calls}


def ratio(what: str, size: str, timings: dict[str, Timing], target: float | None = None, **extra: Any) -> Result:
    """How many times faster the first call is than the second, by their medians."""
    ours, peer = timings.values()
    return Result(what, size, peer.median / ours.median, "×", target, timings, extra)
