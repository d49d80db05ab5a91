"""What a stack and the wrappers around it say to each other."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from opvi._forks import Unforked
from opvi.tracking.experts._expert import Rows, Units
from opvi.types import Array, Key, Scalar, Tree


class Forecast(NamedTuple):
    """What a stack says of some rows, and what it will need in order to learn them."""

    one: Tree  # the head's own form of a prediction
    base: Array  # [B]: what stage 0 says
    beliefs: tuple[Tree, ...]  # what every expert says
    mean: Array  # [K, B]: of the experts of stage 0, bounded
    near: Array  # [K, B]: their weights, as if no row were far outside
    weights: Array  # [K, B]: and their weights
    terms: Array  # [B, T]: the corrections
    features: Array  # [B, k]: what the size of errors may depend on
    far: Array  # [B]: how far outside of what was seen, from 0 to 1
    novelty: Array  # [B]: log distance to what was seen, less the usual one


class Outcome(NamedTuple):
    """How a forecast did, once the targets are known."""

    scores: Tree  # the head's
    log_density: Array  # [B]
    level: Array  # [B]: P(Y ≤ y)
    mean: Array  # [B]
    squared: Array  # [B]: squared errors, in units of what was expected
    usual: Scalar  # running mean squared error
    rounds: Scalar  # of 20 rows, that this is known from


class Lesson(NamedTuple):
    """What wrappers say about rows that are to be learnt."""

    trust: Array  # [B]: the power of each row's likelihood
    scored: Array  # [B]: weights of the rows whose errors count
    renewed: Array  # whether the past was forgotten after the forecast


class Report(NamedTuple):
    """What wrappers found in some rows."""

    trust: Array  # [B]
    probability: Scalar  # that the data have changed
    shift: Scalar  # y is the old one in new units: the shift of its mean, in old deviations
    ratio: Scalar  # and the ratio of the deviations
    renew: Array  # whether the past says nothing of y's units


class Layer(Protocol):
    """A stack, or a wrapper around one."""

    def init(self, key: Key, columns: int, dtype: Any) -> Tree: ...
    def predict(self, state: Any, rows: Rows) -> Forecast: ...
    def score(self, state: Any, forecast: Forecast, y: Array) -> Outcome: ...
    def distribution(self, state: Any, forecast: Forecast) -> Tree: ...
    def learn(
        self, key: Key, state: Any, rows: Rows, forecast: Forecast, outcome: Outcome, lesson: Lesson
    ) -> tuple[Tree, Report]: ...
    def relearn(self, key: Key, state: Any, rows: Rows) -> Tree: ...
    def rescale(self, state: Any, units: Units) -> Tree: ...
    def forget(self, state: Any, keep: Scalar) -> Tree: ...
    def widen(self, state: Any, fresh: Any) -> Tree: ...


class Nested(NamedTuple):
    """A wrapper's state."""

    own: Tree  # the wrapper's
    inner: Tree  # of what it wraps


@dataclass(frozen=True)
class LayerWrapper(Unforked):
    """A wrapper that passes everything through; its subclasses change what they are for."""

    inner: Any

    def begin(self, columns: int, dtype: Any) -> Tree:
        """Return the wrapper's own state before any row."""
        raise NotImplementedError

    def init(self, key: Key, columns: int, dtype: Any) -> Nested:
        """Return the state before any row."""
        return Nested(self.begin(columns, dtype), self.inner.init(key, columns, dtype))

    def predict(self, state: Nested, rows: Rows) -> Forecast:
        """Return the inner forecast."""
        return self.inner.predict(state.inner, rows)

    def score(self, state: Nested, forecast: Forecast, y: Array) -> Outcome:
        """Return how a forecast did."""
        return self.inner.score(state.inner, forecast, y)

    def distribution(self, state: Nested, forecast: Forecast) -> Tree:
        """Return the components of the predictive."""
        return self.inner.distribution(state.inner, forecast)

    def relearn(self, key: Key, state: Nested, rows: Rows) -> Nested:
        """Learn from rows seen before, which teach the experts and nothing else."""
        return state._replace(inner=self.inner.relearn(key, state.inner, rows))

    def rescale(self, state: Nested, units: Units) -> Nested:
        """Return the same knowledge in new units."""
        return state._replace(inner=self.inner.rescale(state.inner, units))

    def forget(self, state: Nested, keep: Scalar) -> Nested:
        """Return a state in which the past counts for a share `keep`."""
        return state._replace(inner=self.inner.forget(state.inner, keep))

    def widen(self, state: Nested, fresh: Nested) -> Nested:
        """Return the state with more columns."""
        return state._replace(inner=self.inner.widen(state.inner, fresh.inner))
