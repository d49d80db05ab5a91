"""Predictions waiting for their labels."""

import math
import threading
import uuid
from typing import NamedTuple

import numpy as np

from opvi.adapters._tables import Json
from opvi.adapters._tables._messages import Row

MOST_ROWS = 100_000  # that wait; the oldest tickets are given up
LOW, HIGH = "q0.05", "q0.95"  # the interval that should hold 90 % of the labels


class Held(NamedTuple):
    """A request and its prediction."""

    rows: list[Row]
    said: list[Json | None]  # None for a row without a prediction


class Tickets:
    """Requests by ticket, in memory, and how good their predictions were once the labels came."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._rows = 0
        self._lock = threading.Lock()
        self.given_up = 0  # rows whose label never came
        self.scored = 0
        self.sums = {"absolute_error": 0.0, "squared_error": 0.0, "covered": 0.0, "loss": 0.0, "wrong": 0.0}
        self.with_interval = 0

    def keep(self, ticket: str, rows: list[Row], said: list[Json | None]) -> str:
        """Keep a request; return its ticket, a new one if none was given."""
        ticket = ticket or uuid.uuid4().hex
        with self._lock:
            self._drop(ticket)
            self._held[ticket] = Held(rows, said)
            self._rows += len(rows)
            while self._rows > MOST_ROWS:
                self.given_up += self._drop(next(iter(self._held)))
        return ticket

    def _drop(self, ticket: str) -> int:
        held = self._held.pop(ticket, None)
        rows = len(held.rows) if held else 0
        self._rows -= rows
        return rows

    def find(self, ticket: str) -> Held | None:
        """Return the request kept under a ticket."""
        return self._held.get(ticket)

    @property
    def waiting(self) -> int:
        """The number of rows whose labels have not come yet."""
        return self._rows

    def settle(self, ticket: str, labels: dict[int, float | str]) -> list[Json]:
        """Score predictions by the labels, given by row index; return the scores. The ticket is used up."""
        with self._lock:
            held = self._held.get(ticket)
            self._drop(ticket)
            if held is None:
                return []
            out = []
            for place, label in labels.items():
                said = held.said[place]
                if said is not None:
                    score = scored(said, label)
                    self.scored += 1
                    self.with_interval += "covered" in score
                    for name, value in score.items():
                        self.sums[name] += float(value)
                    out.append({"row": place, **score})
            return out


def scored(said: Json, label: float | str) -> Json:
    """Return how well a row was predicted: errors and coverage of a number, loss and error of a class."""
    if "probabilities" in said:
        p = said["probabilities"].get(label, 0.0)  # 0 for a class that was not known then
        return {"loss": -math.log(max(p, float(np.finfo(np.float32).tiny))), "wrong": said["prediction"] != label}
    error = float(label) - said["mean"]
    score: Json = {"absolute_error": abs(error), "squared_error": error**2}
    if LOW in said and HIGH in said:
        score["covered"] = said[LOW] <= float(label) <= said[HIGH]
    return score
