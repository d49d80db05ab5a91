"""Labels that come later: questions are kept with their answers, and scored and learnt when the labels are there."""

from collections import OrderedDict
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Predictive
from opvi.running._engine import Engine, Fed, program
from opvi.running._rows import as_rows, padded, row_count, weights
from opvi.types import Array, ArrayLike, Tree


class Ticket(NamedTuple):
    """A question whose labels have not come: plain numbers, to be kept beside the rows' own names."""

    number: int
    rows: int


class Settled(NamedTuple):
    """How well a question was answered, and what was learnt from its labels."""

    log_density: np.ndarray  # [rows]: of the labels, by the prediction that was made when the question was asked
    fed: Fed | None  # what `Engine.feed` returned; None: the rows wait for a full batch


class Tickets:
    """An engine's questions whose labels come later.

    `ask` predicts rows and keeps them under a ticket; `feed` scores that prediction by the labels, and only then learns
    the rows. What is learnt is what `engine.feed` learns from the same rows in the order of their labels. The score is
    that of the prediction made in time; the sampler's own `Info` scores the rows when they are learnt.

    Tickets live in memory and are pickled together with their engine. `opvi.save` and the checkpoints of `opvi.run`
    hold states, and no tickets. At most `most` rows wait at once: the oldest tickets are given up for new ones.

    Args:
        engine: what learns; it may be fed and asked by itself, too.
        most: rows that may wait, each with its inputs and its whole predictive distribution.
    """

    def __init__(self, engine: Engine, *, most: int = 10_000):
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise ValueError(f"`most` is {most!r}, but must be a whole number of rows of at least 1.")
        self.engine, self.most = engine, most
        self.given_up = 0  # rows whose labels came too late, or never
        self.scored = 0.0  # rows, by their weights
        self.total = 0.0  # of their log densities
        self.waiting = 0  # rows whose labels have not come
        self._next = 0
        self._held: OrderedDict[int, tuple[Tree, Predictive]] = OrderedDict()

    @property
    def log_predictive(self) -> float:
        """The mean log density of all labels so far, each by the prediction made when it was asked for."""
        return self.total / self.scored if self.scored else float("nan")

    def ask(self, x: Tree) -> Ticket:
        """Predict rows, keep them and the predictions, and return their ticket."""
        x = jax.tree.map(np.array, as_rows(x, self.engine.dtype))  # a copy: the caller's arrays may change
        _refuse_gaps("x", x)
        rows = row_count(x)
        if rows > self.most:
            raise ValueError(f"`x` has {rows} rows, but at most {self.most} may wait. Give a larger `most`.")
        said = self.engine.ask(x, _by_rows)
        ticket, self._next = Ticket(self._next, rows), self._next + 1
        self._held[ticket.number] = x, said
        self.waiting += rows
        while self.waiting > self.most:
            _, (old, _) = self._held.popitem(last=False)
            self._give_up(row_count(old))
        return ticket

    def predictive(self, ticket: Ticket) -> Predictive:
        """Return what was predicted when the ticket was made."""
        return _predictive(self._found(ticket)[1])

    def feed(self, ticket: Ticket, y: ArrayLike, weight: ArrayLike | None = None, *, last: bool = False) -> Settled:
        """Score what was predicted by labels, and learn the rows; the ticket is used up, unless this fails.

        Args:
            ticket: what `ask` returned.
            y: a label for each of its rows.
            weight: how often each counts; 1 if omitted.
            last: as for `Engine.feed`: learn rows that do not fill a batch, too.
        """
        x, said = held = self._found(ticket)
        label = as_rows(np.asarray(y), self.engine.dtype)
        if label.shape != (ticket.rows,):
            raise ValueError(f"`y` has shape {label.shape}, but the ticket needs ({ticket.rows},): a label per row.")
        _refuse_gaps("y", label)
        counted = weights(weight, ticket.rows)
        room = 1 << (ticket.rows - 1).bit_length()  # few sizes are compiled
        density = np.asarray(program(_densities, 0, True)(padded(said, room), padded(label, room)))[: ticket.rows]
        if self._held.pop(ticket.number, None) is None:
            self._found(ticket)  # another thread was faster
        try:
            fed = self.engine.feed((x, label), counted, last=last)
        except BaseException:
            self._held[ticket.number] = held
            self._held.move_to_end(ticket.number, last=False)
            raise
        self.waiting -= ticket.rows
        self.scored += float(counted.sum())
        self.total += float((density * counted).sum())
        return Settled(density, fed)

    def drop(self, ticket: Ticket) -> None:
        """Drop a ticket whose labels will not come."""
        self._found(ticket)
        self._give_up(row_count(self._held.pop(ticket.number)[0]))

    def _give_up(self, rows: int) -> None:
        self.waiting -= rows
        self.given_up += rows

    def _found(self, ticket: Ticket) -> tuple[Tree, Predictive]:
        if not isinstance(ticket, Ticket):
            raise TypeError(f"`ticket` is {ticket!r}, but must be what `ask` returned.")
        held = self._held.get(ticket.number)
        if held is None:
            raise KeyError(
                f"ticket {ticket.number} is not open: it was used, or given up because more than {self.most} rows "
                "waited. Its rows can still be learnt, unscored: `engine.feed((X, y))`."
            )
        return held


def _refuse_gaps(name: str, tree: Tree) -> None:
    for leaf in jax.tree.leaves(tree):
        bad = ~np.isfinite(leaf).reshape(len(leaf), -1).all(1)
        if bad.any():
            raise ValueError(f"`{name}` is not finite in row {bad.argmax()}, so it could not be scored. Leave it out.")


def _by_rows(said: Predictive) -> Predictive:
    """Return a prediction with its rows on the first axis, as `Engine.ask` wants them."""
    rows = jax.tree.leaves(said.components)[0].shape[1]

    def first(leaf: Array) -> Array:
        return jnp.moveaxis(jnp.broadcast_to(leaf, (len(leaf), rows, *leaf.shape[2:])), 1, 0)

    return Predictive(
        jax.tree.map(first, said.components),
        None if said.log_weights is None else first(said.log_mixture_weights()),
        None if said.temperature is None else jnp.broadcast_to(said.temperature, (rows,)),
    )


def _predictive(rows: Predictive) -> Predictive:
    """Return what `_by_rows` was given. The temperature is one for all rows."""

    def back(leaf: Array) -> Array:
        return jnp.moveaxis(jnp.asarray(leaf), 0, 1)

    return Predictive(
        jax.tree.map(back, rows.components),
        None if rows.log_weights is None else back(rows.log_weights),
        None if rows.temperature is None else jnp.asarray(rows.temperature)[0],
    )


def _densities(rows: Predictive, y: Array) -> Array:
    return _predictive(rows).log_density(y)
