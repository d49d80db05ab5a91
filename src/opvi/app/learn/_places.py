"""How far the sources of a run were read."""

from typing import NamedTuple

from opvi.adapters._tables import Block, RowSource


class Place(NamedTuple):
    """How far a source was read."""

    name: str
    fingerprint: str | None
    format: str | None
    row: int  # the next to read
    position: int = 0  # the rest of the cursor; an older opvi had none
    digest: str | None = None
    unended: bool = False  # whether the last row had no end of a line, and may have been learnt before it was whole

    def after(self, source: RowSource, block: Block) -> "Place":
        """Return the position after a block that was learnt."""
        cursor = source.passed(block)
        return Place(self.name, source.fingerprint, self.format, *cursor, block.unended)
