"""What an expert is: one way to predict a stream, which a stack weighs against others."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from opvi._forks import Unforked
from opvi.types import Array, Key, Scalar, Tree


class Rows(NamedTuple):
    """Rows of a stream, as experts see them."""

    x: Array  # [B, F]: as they came
    z: Array  # [B, F]: standardised by the rows before; 0 where a value is missing
    y: Array  # [B]: targets, standardised; 0 where rows are only asked about
    weight: Array  # [B]: how often each counts; 0 for padding
    base: Array  # [B]: what the experts of stage 0 say together; 0 for those themselves
    far: Array  # [B]: how far outside of what was seen, from 0 to 1


class Belief(NamedTuple):
    """What an expert says of each row."""

    mean: Array  # [B], or [members, B] of corrections that are weighed apart
    variance: Array  # [B]: of the mean, because the expert does not know better
    noise: Array | None = None  # of y around that mean; None: as much as the stack's errors so far
    novelty: Array | None = None  # [B]: log distance from what it has seen, less the usual one
    slope: Array | None = None  # [B, F]: gradient of the mean in z
    work: Tree = None  # what `learn` would have to compute again


class Context(NamedTuple):
    """What an expert is told about the rows that it learns."""

    belief: Belief  # what it said of them before
    trust: Array  # [B]: the power of each row's likelihood, less than 1 for an outlier
    scored: (
        Array  # [B]: weights of those whose errors count; 0 just after a change, when they say nothing of later ones
    )
    residual: Array  # [B]: y less the base, bounded
    slope: Array  # [B, F]: gradient of the base in z
    error: Scalar  # running mean squared error of the stack
    share: Scalar  # of this expert in the predictions of stage 0
    renewed: Array  # whether the expert has forgotten since it said its belief


class Units(NamedTuple):
    """A change of the units of rows: $z' = (z - s) / r$, $y' = r_y y + s_y$."""

    shift: Array  # s, [F]
    ratio: Array  # r, [F]: 1 where a column is constant
    begins: Array  # [F]: columns that were constant and begin to move
    now: Array  # [F]: current values, in the new units
    output_ratio: Scalar
    output_shift: Scalar


S = TypeVar("S")


class Expert(Protocol[S]):
    """One way to predict: a frozen dataclass whose fields are its settings."""

    stage: ClassVar[int]  # 0 predicts y, 1 corrects the residual of stage 0
    far: ClassVar[bool]  # whether it takes part only far outside of what was seen

    def init(self, key: Key, columns: int, dtype: Any) -> S:
        """Return the state before any row."""

    def predict(self, state: S, rows: Rows) -> Belief:
        """Say what the rows' targets will be."""

    def learn(self, key: Key, state: S, rows: Rows, context: Context) -> S:
        """Learn from rows."""

    def rescale(self, state: S, units: Units) -> S:
        """Return the same knowledge after units have changed."""

    def forget(self, state: S, keep: Scalar) -> S:
        """Return a state in which the past counts for a share `keep`; 0: as before any row."""

    def widen(self, state: S, fresh: S) -> S:
        """Return the state in the shape of a fresh one, which has more columns."""


@dataclass(frozen=True)
class BaseExpert(Unforked):
    """What most experts need not say: they predict y everywhere, and their state has no units."""

    stage: ClassVar[int] = 0
    far: ClassVar[bool] = False

    def rescale(self, state: Any, units: Units) -> Any:
        """Return the state as it is."""
        return state

    def forget(self, state: Any, keep: Scalar) -> Any:
        """Return the state as it is."""
        return state

    def widen(self, state: Any, fresh: Any) -> Any:
        """Return the state as it is."""
        return state
