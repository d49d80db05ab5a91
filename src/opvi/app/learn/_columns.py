"""Statistics of each column: its gaps, and how far its values have moved since the first rows."""

from typing import NamedTuple, Self

import numpy as np

from opvi.adapters._tables import Encoded, Schema
from opvi.app.report import ColumnTold
from opvi.running import Fed

FIRST = 1000  # rows that later ones are compared with
RECENT = 1000  # rows: those before count less and less


class ColumnSums(NamedTuple):
    """Sums over the rows learnt; plain arrays, saved with every checkpoint.

    All but the gaps are summed batch by batch, so they do not depend on where a run was cut.
    """

    rows: np.ndarray  # that `gaps` is about
    gaps: np.ndarray  # [columns of the source]
    first: np.ndarray  # [3, inputs]: of the first rows, how many, sum, sum of squares, around `shift`
    recent: np.ndarray  # [2, inputs]: of all, with fading weights: weight, sum
    shift: np.ndarray  # [inputs]: the first row's, so that squares of large numbers do not cancel

    @classmethod
    def start(cls, schema: Schema) -> Self:
        """Return sums before any row."""
        inputs = len(schema.features)
        zero, gaps = np.zeros((), np.int64), np.zeros(len(schema.columns), np.int64)
        return cls(zero, gaps, np.zeros((3, inputs)), np.zeros((2, inputs)), np.full(inputs, np.nan))

    def met(self, encoded: Encoded) -> Self:
        """Return the sums with the gaps of some rows."""
        return self._replace(rows=self.rows + len(encoded.row), gaps=self.gaps + encoded.gaps)

    def add(self, fed: Fed) -> Self:
        """Return the sums after some more batches."""
        x, there = np.asarray(fed.data[0], float), fed.weight > 0
        first, recent, shift = self.first.copy(), self.recent.copy(), self.shift
        for rows in (part[known] for part, known in zip(x, there, strict=True) if known.any()):
            shift = np.where(np.isnan(shift), rows[0], shift)
            apart = rows - shift
            if first[0, 0] < FIRST:
                first += np.stack([np.full(len(shift), len(rows)), apart.sum(0), (apart**2).sum(0)])
            recent *= 0.5 ** (len(rows) / RECENT)
            recent += np.stack([np.full(len(shift), len(rows)), apart.sum(0)])
        return self._replace(first=first, recent=recent, shift=shift)

    def moved(self) -> np.ndarray:
        """Return how far the mean of each input is from that of the first rows, in their standard deviations."""
        count = np.maximum(self.first[0], 1)
        mean = self.first[1] / count
        variance = np.maximum(self.first[2] / count - mean**2, 0)
        now = self.recent[1] / np.maximum(self.recent[0], 1e-30)
        still = np.isclose(now, mean, rtol=1e-9, atol=1e-9)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(still, 0.0, np.abs(now - mean) / np.sqrt(variance))

    def told(self, schema: Schema) -> list[ColumnTold]:
        """Return what the report says about each column; dates always move, so they get no number."""
        moved = self.moved() if self.recent[0].any() else np.full(len(schema.features), np.nan)
        shares = self.gaps / max(int(self.rows), 1)
        out, at = [], 0
        for column, share in zip(schema.columns, shares.tolist(), strict=True):
            inputs = len(column.features)
            far = np.nan if column.kind == "date" else float(moved[at : at + inputs].max())
            out.append(ColumnTold(column.name, column.kind, inputs, share, far))
            at += inputs
        return out
