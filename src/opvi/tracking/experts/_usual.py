"""The experts of the recommended regressor, in the sizes that suit a table."""

from collections.abc import Sequence
from typing import NamedTuple

from opvi.tracking._wrappers._relevance import Relevance
from opvi.tracking.experts import _nearest as nearest
from opvi.tracking.experts import _neighbours as neighbours
from opvi.tracking.experts._expert import BaseExpert
from opvi.tracking.experts._layers import checked_widths
from opvi.tracking.experts._levels import WIDEST as WIDEST_LEVELS
from opvi.tracking.experts._levels import Levels
from opvi.tracking.experts._linear import WIDEST as WIDEST_LINE
from opvi.tracking.experts._linear import Linear
from opvi.tracking.experts._neighbours import Neighbours
from opvi.tracking.experts._networks import Networks, Settings, usual_settings
from opvi.tracking.experts._process import WIDEST as WIDEST_PROCESS
from opvi.tracking.experts._process import Process

EARLY_ROWS = 400  # until then rows are learnt five at a time, and the scale follows small changes
LINEAR_MODELS = 20  # they are small
RELEVANCE = 10  # columns; of more, some are likely to be useless


class Size(NamedTuple):
    """What a table of at most `columns` can afford."""

    columns: float  # at most
    width: int  # of the hidden layer
    networks: int
    budget: float  # bytes for all covariances


BUDGET = 64e6
SIZES = (Size(24, 30, 6, BUDGET), Size(64, 20, 5, 10e6), Size(400, 16, 5, 20e6), Size(float("inf"), 10, 5, 40e6))


def widths_for(features: int) -> tuple[int, ...]:
    """Return the widths of the hidden layers that suit so many columns."""
    return (next(size.width for size in SIZES if features <= size.columns),)


def usual(
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
) -> tuple[BaseExpert, ...]:
    """Return the experts of `opvi.regressor`, with the same settings, in order to add others to them."""
    size = next(size for size in SIZES if features <= size.columns)
    widths = widths_for(features) if hidden is None else checked_widths(hidden)
    if particles is None:
        particles = size.networks if widths else LINEAR_MODELS
    if budget is None:  # at least a hidden unit with all its weights is seen as a whole
        budget = max(size.budget, 4.0 * sum(widths[:1]) * (features + 3) ** 2 * particles)
    chosen = usual_settings(particles, half_life) if settings is None else settings
    nets: BaseExpert = Networks(widths, chosen, half_life is None, warm_up, budget)
    if widths and features > RELEVANCE:
        nets = Relevance(nets)
    kept = nearest.kept(memory_rows, features, neighbours.FACTS, bool(widths))
    found: list[BaseExpert] = [nets]
    if widths and process and features <= WIDEST_PROCESS:
        found.append(Process(half_life))
    if widths and features <= WIDEST_LINE:
        found.append(Linear())
    if kept:
        found.append(Neighbours(kept, half_life))
    if kept and levels and features <= WIDEST_LEVELS:
        found.append(Levels(half_life))
    return tuple(found)
