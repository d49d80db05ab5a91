"""What drives particles along a field: a step size, a schedule, or an optax optimizer, as a value."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from opvi._steps import positive_step
from opvi.types import Array, Schedule, Tree, at_round


@runtime_checkable
class Optimizer(Protocol):
    """An optax optimizer. Two made by `optimizer(...)` with the same settings are equal."""

    def init(self, params: Array) -> Tree:
        """Return the state before any step."""

    def update(self, updates: Array, state: Tree, params: Array) -> tuple[Array, Tree]:
        """Return the move, and the new state."""


@dataclass(frozen=True)
class _Made:
    make: Callable[..., Any]
    given: tuple[object, ...]
    named: tuple[tuple[str, object], ...]

    def init(self, params: Array) -> Tree:
        return self.make(*self.given, **dict(self.named)).init(params)

    def update(self, updates: Array, state: Tree, params: Array) -> tuple[Array, Tree]:
        return self.make(*self.given, **dict(self.named)).update(updates, state, params)


def optimizer(make: Callable[..., Any], *given: object, **named: object) -> Optimizer:
    """An optax optimizer as a value: `optimizer(optax.adam, 0.01)`.

    Two of optax's own are never equal, so samplers made of them share no compiled program; with these they do.

    Args:
        make: optax's function, e.g. `optax.adam`.
        given: its arguments, all hashable; a schedule as a function of a module, not as a lambda.
        named: its named arguments.
    """
    return _Made(make, given, tuple(sorted(named.items())))


@dataclass(frozen=True)
class _FromRoundOne:
    """A schedule of t = 1, 2, … for optax, which counts from 0."""

    schedule: Schedule

    def __call__(self, count: Array) -> Array:
        return at_round(self.schedule, count.astype(float) + 1)


def as_optimizer(step: Schedule | Optimizer) -> Optimizer:
    """Return an optimizer from a step size, a schedule of t = 1, 2, …, or an optimizer."""
    if isinstance(step, Optimizer):
        return step
    import optax  # not loaded with opvi: most samplers never need it

    return optimizer(optax.sgd, _FromRoundOne(step) if callable(step) else positive_step(step))
