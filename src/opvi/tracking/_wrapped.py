"""What wrappers of samplers share: one state, one Info, and methods that pass through."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from opvi._forks import Unforked
from opvi._steps import posterior_draws, posterior_of
from opvi.posterior import Posterior
from opvi.types import (
    Array,
    Batch,
    Info,
    Key,
    Particles,
    Predicted,
    Prediction,
    Sampler,
    Scalar,
    Seed,
    Start,
    State,
    Tree,
)


class Wrapped(NamedTuple):
    """A sampler's state, and what its wrapper keeps beside it."""

    inner: State  # the sampler's
    own: Tree  # the wrapper's
    round: Array
    rows: Array  # as the stream counts them: a replaying wrapper steps its sampler several times per round

    @property
    def particles(self) -> Particles:
        """The wrapped sampler's particles."""
        return self.inner.particles


class WrappedInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array
    log_predictive: Scalar  # mean log predictive density of the batch, before learning from it
    drift: Scalar
    finite: Array
    predicted: Predicted | None  # for each row, before learning
    changed: Array | None  # True: the data changed; None where nobody watches
    inner: Info  # the sampler's own, without what it predicted
    probability: Scalar | None = None  # that the data have jumped; None where nobody watches


def wrapped_info(info: Info) -> WrappedInfo:
    """Return a sampler's Info as its wrapper passes it on; predictions are stored once, in the outermost."""
    predicted = getattr(info, "predicted", None)
    inner = info if predicted is None else info._replace(predicted=None)  # type: ignore[attr-defined]
    changed, probability = getattr(info, "changed", None), getattr(info, "probability", None)
    return WrappedInfo(info.rows, info.log_predictive, info.drift, info.finite, predicted, changed, inner, probability)


@dataclass(frozen=True)
class Wrapper(Unforked):
    """A sampler around another one: what it does not change passes through, so wrappers compose in any order."""

    sampler: Sampler

    def init(self, key: Key, particles: Start = None) -> Wrapped:
        """Return the state before any row."""
        inner = self.sampler.init(key, particles)
        return Wrapped(inner, self.beginning(inner), inner.round, inner.rows)

    def beginning(self, inner: State) -> Tree:
        """Return what the wrapper keeps before any row."""
        raise NotImplementedError

    def predict(self, state: Wrapped, x: Tree) -> Prediction:
        """Return the sampler's posterior predictive at inputs x."""
        return self.sampler.predict(state.inner, x)

    def draws(self, state: Wrapped, key: Key, n: int) -> Particles:
        """Return n draws from the sampler's posterior."""
        return posterior_draws(self.sampler, state.inner, key, n)

    def posterior(self, state: Wrapped, key: Seed = 0, n: int = 1000) -> Posterior:
        """Return n named draws from the sampler's posterior."""
        return posterior_of(self, state, key, n)

    @property
    def stored_rows(self) -> Callable[..., object]:
        """The rows that the sampler stores. Missing, as an attribute, where the sampler stores none."""
        return partial(_passed, self.sampler.stored_rows)  # type: ignore[attr-defined]

    @property
    def diagnosis(self) -> Callable[..., object]:
        """How far the sampler's posterior can be trusted. Missing, as an attribute, where the sampler lacks it."""
        return partial(_passed, self.sampler.diagnosis)  # type: ignore[attr-defined]

    @property
    def concerns(self) -> Callable[..., object]:
        """What the sampler can say about that at no cost. Missing, as an attribute, where the sampler lacks it."""
        return partial(_passed, self.sampler.concerns)  # type: ignore[attr-defined]

    @property
    def log_evidence(self) -> Callable[..., object]:
        """The sampler's log density of the rows so far. Missing, as an attribute, where the sampler lacks it."""
        return partial(_passed, self.sampler.log_evidence)  # type: ignore[attr-defined]

    @property
    def relearn(self) -> Callable[[Key, Wrapped, Batch], Wrapped]:
        """Learn from rows seen before: parameters only. Missing, as an attribute, where the sampler lacks it."""
        return partial(_relearn, self.sampler.relearn)  # type: ignore[attr-defined]

    @property
    def make_room(self) -> Callable[..., Wrapped]:
        """Give a sampler that stores rows room for more. Missing, as an attribute, where the sampler stores none."""
        return partial(_give_room, self.sampler.make_room)  # type: ignore[attr-defined]

    @property
    def renews(self) -> bool:
        """Whether the sampler acts on jumps of the data by itself."""
        return getattr(self.sampler, "renews", False)

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""
        return getattr(self.sampler, "about", "")

    def __str__(self) -> str:
        return self.about


def _passed(method: Callable[..., object], state: Wrapped, *more: object) -> object:
    return method(state.inner, *more)


def _give_room(make_room: Callable[..., State], state: Wrapped, batch: Batch, rounds: int = 1) -> Wrapped:
    return state._replace(inner=make_room(state.inner, batch, rounds))


def _relearn(relearn: Callable[[Key, State, Batch], State], key: Key, state: Wrapped, batch: Batch) -> Wrapped:
    return state._replace(inner=relearn(key, state.inner, batch))
