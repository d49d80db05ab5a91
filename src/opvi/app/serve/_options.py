"""How a run is served."""

from typing import NamedTuple

from opvi.running._saving import SAVE_EVERY

BACKLOG = 100_000  # rows that may wait to be learnt
MOST_BYTES = 1 << 23  # of a body


class Options(NamedTuple):
    """How a run is served."""

    name: str  # of the model
    backlog: int = BACKLOG
    most_bytes: int = MOST_BYTES
    save_every: float = SAVE_EVERY
