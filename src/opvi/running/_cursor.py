"""How far a source was read, and what was read: enough to recognise it later, even if it has grown."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from opvi.types import Batch


class Cursor(NamedTuple):
    """The position after the last row learnt; plain values, saved with every checkpoint."""

    row: int = 0  # rows passed
    position: int = 0  # bytes passed, or what else the source counts by, such as a broker's sequence number
    digest: str | None = None  # SHA-256 of everything passed; None where nobody knows it


class Trail:
    """A running hash of everything consumed. The digest does not depend on how rows are cut into calls."""

    def __init__(self) -> None:
        self.row = self.position = 0
        self._hash = hashlib.sha256()

    def add(self, content: bytes | memoryview, rows: int) -> None:
        """Add some rows, given their content."""
        self._hash.update(content)
        self.row += rows
        self.position += len(content)

    def after(self, batches: Iterable[Batch]) -> "Trail":
        """Return the trail after some batches, each counted as one row; this trail is not changed."""
        out = Trail()
        out.row, out.position, out._hash = self.row, self.position, self._hash.copy()
        for batch in batches:
            for leaf in map(np.asarray, jax.tree.leaves(batch)):
                out.add(f"{leaf.dtype}{leaf.shape}".encode(), 0)
                out.add(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, 0)
            out.row += 1
        return out

    @property
    def cursor(self) -> Cursor:
        """Return the current position."""
        return Cursor(self.row, self.position, self._hash.hexdigest())
