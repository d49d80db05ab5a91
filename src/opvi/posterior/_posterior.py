"""Named draws from a posterior, and a table of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from opvi.posterior._effective import effective_numbers
from opvi.types import Particles

QUANTILES = {"5 %": 0.05, "median": 0.5, "95 %": 0.95}
MOST_LINES = 60  # of a table that is printed


@dataclass(frozen=True)
class Summary:
    """A table of a posterior, one line for each number. Printed, it is aligned."""

    names: list[str]  # of the lines, e.g. "slope" or "level[2]"
    table: dict[str, np.ndarray]  # column -> one number per line: mean, sd, 5 %, median, 95 %, effective
    draws: int
    about: str  # what the draws are from

    def __getitem__(self, name: str) -> dict[str, float]:
        """Return a line, by its name."""
        if name not in self.names:
            raise KeyError(f"{name!r} is not a line of this table; its lines are: {', '.join(self.names[:20])}.")
        return {column: float(values[self.names.index(name)]) for column, values in self.table.items()}

    def __str__(self) -> str:
        lines = [["", *self.table]]
        for i, name in enumerate(self.names[:MOST_LINES]):
            *numbers, effective = (float(values[i]) for values in self.table.values())
            lines.append([name, *_written(numbers, numbers[1]), f"{effective:.0f}"])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = [
            "  ".join(
                [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
            )
            for line in lines
        ]
        more = len(self.names) - MOST_LINES
        rest = [f"… and {more:,} more: `.table` has all"] if more > 0 else []
        return "\n".join([*shown, *rest, f"{self.draws:,} draws; {self.about}"])


@dataclass(frozen=True, eq=False)
class Posterior(Mapping[str, np.ndarray]):
    """Draws from a posterior by the names of the model's parameters: `posterior["slope"]` is an array `[n, ...]`.

    Made by `sampler.posterior(state)`. Sites of a NumPyro model are in the model's own units, deterministic ones
    included.
    """

    draws: dict[str, np.ndarray]  # name -> [n, ...]
    matrix: Particles  # [n, d]: the same draws as the target's functions take them, e.g. `opvi.predict`
    rows: int  # learnt
    rounds: int
    about: str  # the sampler, in a line
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)  # name -> names of its axes, where they have some

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.draws:
            raise KeyError(f"{name!r} is not a parameter of this model; its parameters are: {', '.join(self.draws)}.")
        return self.draws[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.draws)

    def __len__(self) -> int:
        return len(self.draws)

    def summary(self) -> Summary:
        """Return a table: mean, sd, quantiles, and the number of independent draws that these are worth."""
        names, columns = [], []
        for name, values in self.draws.items():
            values = np.asarray(values, float)
            for index in np.ndindex(values.shape[1:]):
                names.append(f"{name}[{', '.join(map(str, index))}]" if index else name)
            columns.append(values.reshape(len(values), -1))
        x = np.concatenate(columns, 1)
        table = {"mean": x.mean(0), "sd": x.std(0)}
        table |= dict(zip(QUANTILES, np.quantile(x, list(QUANTILES.values()), axis=0), strict=True))
        table["effective"] = effective_numbers(x, np.asarray(self.matrix))
        return Summary(names, table, len(x), f"{self.rows:,} rows learnt")

    def to_arviz(
        self,
        coords: Mapping[str, Sequence[object]] | None = None,
        dims: Mapping[str, Sequence[str]] | None = None,
    ) -> Any:
        """Return the draws as ArviZ's container, one chain; `opvi.to_arviz(sampler, state, data)` adds predictions.

        Args:
            coords: name of a dimension -> its labels, as ArviZ takes them.
            dims: name of a variable -> the names of its dimensions, after chain and draw; axes of NumPyro sites have
                the names of their plates.
        """
        adapter = import_module("opvi.adapters.arviz")  # which needs ArviZ
        return adapter.as_container({"posterior": self.draws}, self, coords, dims)

    def __str__(self) -> str:
        return str(self.summary())

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {values.shape}" for name, values in self.draws.items())
        return f"Posterior({shapes}; {self.rows:,} rows learnt)"


def _written(numbers: list[float], sd: float) -> list[str]:
    """Return numbers with as many decimals as show three digits of the standard deviation."""
    if not (math.isfinite(sd) and sd > 0):
        return [f"{number:.4g}" for number in numbers]
    decimals = max(0, 2 - math.ceil(math.log10(sd)) + 1)
    if decimals > 8 or max(abs(number) for number in numbers) >= 1e9:
        return [f"{number:.4g}" for number in numbers]
    return [f"{number:.{decimals}f}" for number in numbers]
