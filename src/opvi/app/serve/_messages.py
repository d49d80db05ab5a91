"""Messages between the server and the learner's process, over a pair of sockets."""

import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from opvi.adapters._tables import Schema
from opvi.app.learn._model import Settings
from opvi.app.serve._tickets import Held
from opvi.app.serve._worker import Answer
from opvi.types import Tree

FIGURES, PAGE = "figures", "page"  # what can be asked for


class Learn(NamedTuple):
    """A request to learn."""

    number: int  # by which its answer is known
    body: bytes
    key: str
    ticket: str


class Keep(NamedTuple):
    """A request whose label will come later."""

    ticket: str
    held: Held


class Give(NamedTuple):
    """A request for FIGURES or the PAGE."""

    number: int
    what: str


class End(NamedTuple):
    """A request to learn the durable rows, save and end."""


Order = Learn | Keep | Give | End


class Where(NamedTuple):
    """How far the learner has got."""

    logged: int  # rows that are durable
    learnt: int  # rows of those
    failed: str  # why it has stopped learning


class State(NamedTuple):
    """The state for predictions, as NumPy arrays."""

    schema: Schema
    settings: Settings
    room: int  # classes that the model has
    state: Tree
    where: Where


class Answers(NamedTuple):
    """Answers to requests to learn, by their numbers."""

    answers: list[tuple[int, Answer]]
    where: Where


class Given(NamedTuple):
    """The answer to a `Give`."""

    number: int
    content: bytes


class Ended(NamedTuple):
    """The end: everything is learnt and saved, or an error says why not."""

    error: Exception | None


Report = State | Answers | Given | Ended


class Speaker:
    """A connection that several threads may send on.

    Args:
        connection: the connection to the other process.
    """

    def __init__(self, connection: Connection):
        self._connection, self._lock = connection, threading.Lock()

    def say(self, message: object) -> None:
        """Send a message; it is dropped if the other process has gone."""
        with self._lock, suppress(OSError):
            self._connection.send(message)
