"""How far a source was read, and what was read: enough to recognise it again, whole or longer."""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from opvi.types import Batch


class Cursor(NamedTuple):
    """The place behind the last row that was learnt; plain values, saved with every checkpoint."""

    row: int = 0  # rows passed
    position: int = 0  # bytes passed, or what else the source counts by, such as a broker's sequence number
    digest: str | None = None  # SHA-256 of everything passed; None where nobody knows it


class Trail:
    """A running hash of everything consumed. However the rows are cut into calls, the digest is the same."""

    def __init__(self) -> None:
        self.row = self.position = 0
        self._hash = hashlib.sha256()

    def add(self, content: bytes | memoryview, rows: int) -> None:
        """Pass some rows, whose content this is."""
        self._hash.update(content)
        self.row += rows
        self.position += len(content)

    def after(self, batches: Iterable[Batch]) -> "Trail":
        """Return the trail behind some batches, each of which counts as one row; this one stays where it is."""
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
        """Return the place so far."""
        return Cursor(self.row, self.position, self._hash.hexdigest())
