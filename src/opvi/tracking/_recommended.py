r"""The recommended models: experts, a stack, and wrappers around it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from opvi.tracking._mixing._stacking import Stack
from opvi.tracking._online import Online, OnlineState
from opvi.tracking._wrappers._change import Change
from opvi.tracking._wrappers._first_rows import FirstRows
from opvi.tracking._wrappers._robust import Robust
from opvi.tracking._wrappers._units import Units
from opvi.tracking.experts._expert import BaseExpert
from opvi.tracking.experts._levels import Levels
from opvi.tracking.experts._nearest import checked_rows
from opvi.tracking.experts._neighbours import Neighbours
from opvi.tracking.experts._networks import Networks, Settings
from opvi.tracking.experts._process import Process
from opvi.tracking.experts._usual import EARLY_ROWS, usual
from opvi.types import Sampler


@dataclass(frozen=True)
class Regressor(Online):
    """Settings of `regressor`."""

    experts: tuple[Any, ...]
    half_life: float | None
    warm_up: int
    memory_rows: int | None

    @cached_property
    def model(self) -> FirstRows:
        """The composition."""
        stack = Robust(Stack(self.experts))
        return FirstRows(Units(Change(stack, self.renews), self.warm_up))

    @property
    def renews(self) -> bool:
        """Whether most of the past is forgotten when the data have jumped; a given half-life overrides that."""
        return self.half_life is None

    @property
    def networking(self) -> Any:
        """The first expert that is made of networks; None if there is none."""
        return next((one for one in self.experts if isinstance(getattr(one, "expert", one), Networks)), None)

    @property
    def networks(self) -> Networks | None:
        """These networks."""
        return getattr(self.networking, "expert", self.networking)

    @property
    def hidden(self) -> tuple[int, ...]:
        """The widths of the networks' hidden layers."""
        return self.networks.hidden if self.networks else ()

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""
        nets, parts = self.networks, []
        if nets:
            sizes = "-".join(map(str, (self.features, *nets.hidden, 1)))
            count, size = nets.blocks(self.features).order.shape
            form = "full covariances" if count == 1 else f"covariances in {count} blocks of {size}"
            drift = "memories of 1,400 to 7,000 rows, shorter while it drifts"
            if self.half_life is not None:
                drift = f"half-life {self.half_life:g} rows"
            kind = "networks" if nets.hidden else "linear models"
            parts.append(f"{nets.count} {kind} {sizes} with {form}, learnt by extended Kalman filters; {drift}")
        others = [type(expert).__name__.lower() for expert in self.experts if expert != self.networking]
        return "regressor: " + "; ".join(parts + (["stacked with " + ", ".join(others)] if others else []))


def regressor(
    features: int,
    *,
    hidden: Sequence[int] | None = None,
    particles: int | None = None,
    half_life: float | None = None,
    warm_up: int = EARLY_ROWS,
    budget: float | None = None,
    settings: Settings | None = None,
    memory_rows: int | None = None,
    levels: bool = True,
    process: bool = True,
    experts: Sequence[BaseExpert] | None = None,
) -> Regressor:
    r"""Predict numbers from raw data in one pass, with nothing to scale or tune.

    A stack of experts: networks that learn as extended Kalman filters,

    $$S = J C J^\top + R_i, \qquad w \gets w + C J^\top S^{-1} (y - f), \qquad
      C \gets (C - C J^\top S^{-1} J C) / \gamma_i,$$

    a Gaussian process of the last rows, a line for rows far outside of what was seen, and corrections by the nearest
    rows and by values that repeat. How much each counts follows from its predictions made before learning, and so do
    the noise, the spread and the tails of the predictive, a mixture of Student-t distributions. Inputs and outputs are
    standardised with the rows seen so far, outliers count less, and after a jump of the data most of the past is
    forgotten.

    Args:
        features: columns of X.
        hidden: width of each hidden layer; `()` for linear models. Chosen from the number of columns if omitted, as
            are `particles` and `budget`.
        particles: the number of networks; the groups of `opvi.experts.usual` take turns.
        half_life: in rows; data older than that count half. With None the networks have memories of different
            lengths, their weights learn which to trust, and all become shorter while errors repeat the latest moves.
        warm_up: this many rows at the start are learnt five at a time, on a scale that follows every batch: slower, and
            worth it while the model is far off.
        budget: bytes for all covariances. If the full matrices do not fit, they are cut into blocks.
        settings: what sets the networks apart.
        memory_rows: rows kept beside the networks; the errors and targets of the 8 nearest correct the mean, as far as
            that has helped. If omitted, as many as fit in 16 MB, at most 65,536, and none for linear models or for more
            than 400 columns; 0 for none.
        levels: also learn what the errors were at rows with the same value of a column, such as an ID (target
            encoding), where that has helped; in models that remember rows, of at most 64 columns.
        process: also fit a Gaussian process to the last 512 rows, which predicts better than networks while rows are
            few, at first or after a jump. Only beside networks of at most 64 columns.
        experts: others instead of these, see `opvi.experts`; `half_life`, `warm_up` and `memory_rows` then say nothing
            about them.
    """
    _check(features, particles, half_life, warm_up, budget)
    for name, value in (("levels", levels), ("process", process)):
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"`{name}` is {value!r}, but must be True or False.")
    kept = checked_rows(memory_rows)
    if experts is not None:
        return Regressor(features, tuple(experts), half_life, warm_up, kept)
    if settings is not None:
        settings = Settings(*(tuple(float(value) for value in values) for values in settings))
    found = usual(
        features,
        hidden=hidden,
        particles=particles,
        half_life=half_life,
        warm_up=warm_up,
        budget=budget,
        settings=settings,
        memory_rows=kept,
        levels=bool(levels),
        process=bool(process),
    )
    made = Regressor(features, found, half_life, warm_up, kept)
    if settings is not None and particles is not None and len(settings.kind) != particles:
        raise ValueError(f"`settings` is for {len(settings.kind)} particles, but there are {particles}.")
    return made


def _check(features: int, particles: int | None, half_life: float | None, warm_up: int, budget: float | None) -> None:
    for name, value in (("features", features), ("particles", 1 if particles is None else particles)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` is {value!r}, but must be a whole number of at least 1.")
    if half_life is not None and not half_life > 0:
        raise ValueError(f"`half_life` is {half_life}, but must be a number of rows greater than 0, or None.")
    if not warm_up >= 0:
        raise ValueError(f"`warm_up` is {warm_up}, but must be a number of rows of at least 0.")
    if budget is not None and not budget > 0:
        raise ValueError(f"`budget` is {budget}, but must be a number of bytes greater than 0.")


def widened_regressor(sampler: Regressor, old: OnlineState, fresh: OnlineState) -> OnlineState:
    """Return a regressor's state in the shape of a fresh one, which has more columns, keeping what was learnt.

    A column that has been constant so far is 0 to the experts, so that the prediction stays the same.

    Args:
        sampler: the wider regressor.
        old: the state of a narrower one with the same settings.
        fresh: the wider one's state before any row.
    """
    return old._replace(model=sampler.model.widen(old.model, fresh.model))


def without_rows(sampler: Sampler) -> Sampler:
    """Return the sampler without the rows that it would keep by default: those of many small models add up."""
    if hasattr(sampler, "sampler"):  # wrapped
        return replace(sampler, sampler=without_rows(sampler.sampler))  # type: ignore[type-var]
    if not isinstance(sampler, Regressor):
        named = getattr(sampler, "memory_rows", 0)
        return replace(sampler, memory_rows=0) if named is None else sampler  # type: ignore[type-var]
    asked = sampler.memory_rows is not None
    keep = [
        e for e in sampler.experts if not isinstance(e, Process) and (asked or not isinstance(e, Neighbours | Levels))
    ]
    return replace(sampler, experts=tuple(keep))
