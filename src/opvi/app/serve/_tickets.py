"""Predictions waiting for their labels."""

import json
import math
import threading
import uuid
from typing import NamedTuple

import numpy as np

from opvi.adapters._tables import Json

MOST_ROWS = 100_000  # that wait; the oldest tickets are given up
MOST_BYTES = 1 << 26  # of requests that wait and of their predictions
OVERHEAD = 500  # bytes of a ticket besides its request and its predictions
LOW, HIGH = "q0.05", "q0.95"  # the interval that should hold 90 % of the labels


class Held(NamedTuple):
    """A request and its prediction, as they were read and sent."""

    body: bytes  # the rows
    rows: int
    said: bytes  # JSON: a prediction for each row, null for a row without one

    @property
    def size(self) -> int:
        """The bytes that it takes, about."""
        return len(self.body) + len(self.said) + OVERHEAD


class Tickets:
    """Requests by ticket, in memory, and how good their predictions were once the labels came."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._rows = self._bytes = 0
        self._lock = threading.Lock()
        self.given_up = 0  # rows whose label never came
        self.scored = 0
        self.sums = {"absolute_error": 0.0, "squared_error": 0.0, "covered": 0.0, "loss": 0.0, "wrong": 0.0}
        self.with_interval = 0

    def keep(self, ticket: str, held: Held) -> None:
        """Keep a request under a ticket; one that was there and got no label is given up, as are the oldest ones."""
        with self._lock:
            self.given_up += self._drop(ticket)
            self._held[ticket] = held
            self._rows += held.rows
            self._bytes += held.size
            while self._rows > MOST_ROWS or self._bytes > MOST_BYTES:
                self.given_up += self._drop(next(iter(self._held)))

    def _drop(self, ticket: str) -> int:
        held = self._held.pop(ticket, None)
        if held is None:
            return 0
        self._rows -= held.rows
        self._bytes -= held.size
        return held.rows

    def find(self, ticket: str) -> Held | None:
        """Return the request kept under a ticket."""
        return self._held.get(ticket)

    @property
    def waiting(self) -> int:
        """The number of rows whose labels have not come yet."""
        return self._rows

    def settle(self, ticket: str, held: Held, labels: dict[int, float | str]) -> list[Json]:
        """Score predictions by the labels, given by row index; return the scores. The ticket is used up.

        A later request that was kept under the same name meanwhile is a ticket of its own, and stays.
        """
        predictions = json.loads(held.said)
        with self._lock:
            if self._held.get(ticket) is held:
                self._drop(ticket)
            out = []
            for place, label in labels.items():
                said = predictions[place]
                if said is not None:
                    score = scored(said, label)
                    self.scored += 1
                    self.with_interval += "covered" in score
                    for name, value in score.items():
                        self.sums[name] += float(value)
                    out.append({"row": place, **score})
            return out


def new_ticket() -> str:
    """Return a name that nobody has used."""
    return uuid.uuid4().hex


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
