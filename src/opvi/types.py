"""The types that all packages share: batches, samplers, states, infos, field values and errors."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Key = jax.Array
Particles = jax.Array  # [n, d]
Scores = jax.Array  # [n, d]
Scalar = jax.Array
ArrayLike = Any  # whatever `numpy.asarray` takes: an array of any library, a list, a number
DType = Any  # whatever `numpy.dtype` takes
Tree = Any  # a pytree of arrays
Params = Tree  # the user's pytree: one particle, unravelled
Data = Tree  # a pytree of arrays that share a leading axis of rows
Seed = Any  # a JAX key, or an integer from which one is made
Start = Any  # where particles start: a count to draw, an `[n, d]` matrix, a stacked pytree, or None for the usual count
LARGEST_VALUE = 1e18  # of a number in the data: in float32 the square of a larger one is close to infinity


class Batch(NamedTuple):
    """The rows of one round.

    Rows are padded to a bucket size so that growing batches compile few times. A padded row repeats
    a real one (so that no log or division meets an invented value) and weighs 0.
    """

    data: Data
    weight: Array  # [B]: 1 for a row, 0 for padding, w for a row that counts w times


class Predicted(NamedTuple):
    """What a sampler predicted for the rows of a batch before it learnt from them."""

    log_density: Array  # [B]: log predictive density, or log probability, of each y
    mean: Array | None = None  # [B]: of a number
    level: Array | None = None  # [B]: P(Y ≤ y) of a number, the probability integral transform
    probabilities: Array | None = None  # [B, C]: of the classes


class State(Protocol):
    """What the next round needs, and nothing else: a NamedTuple of arrays and of other states."""

    @property
    def particles(self) -> Particles:
        """The particles, `[n, d]`."""

    @property
    def round(self) -> Array:
        """The number of rounds done."""

    @property
    def rows(self) -> Array:
        """The number of rows learnt."""


class Info(Protocol):
    """What a round did, for readers; never fed back. A NamedTuple."""

    @property
    def rows(self) -> Array:
        """The number of rows learnt, this batch included."""

    @property
    def log_predictive(self) -> Scalar:
        """Mean log predictive density of the batch, before learning from it."""

    @property
    def drift(self) -> Scalar:
        """Root mean square of the score, or of the move of second-order particles."""

    @property
    def finite(self) -> Array:
        """False: an update was not finite, and what it would have moved stayed where it was."""

    @property
    def predicted(self) -> Predicted | None:
        """What was predicted for each row before learning; None where the sampler has no model of y."""


class Prediction(Protocol):
    """The posterior predictive at some rows, as far as every sampler's has it; see `opvi.Predictive`."""

    def mean(self) -> Array:
        """Return the predictive mean of each row."""

    def probabilities(self) -> Array:
        """Return the class probabilities of each row."""

    def log_density(self, y: Array) -> Array:
        """Return the log predictive density of y, row by row."""


S = TypeVar("S", bound=State)


class Sampler(Protocol[S]):
    """A sampler: a frozen, hashable dataclass whose fields are its settings and whose methods are pure.

    Samplers with equal settings are equal, so programs compiled for one serve the other. Pass the *same* key to
    every step: the step folds the round number into it, so looping, scanning and resuming agree.
    """

    def init(self, key: Key, particles: Start = None) -> S:
        """Return the state before any row; None draws the usual number of particles."""

    def step(self, key: Key, state: S, batch: Batch) -> tuple[S, Info]:
        """Predict the batch, learn from it, and return the new state with what happened."""

    def predict(self, state: S, x: Tree) -> Prediction:
        """Return the posterior predictive at inputs x."""

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""


class _HasRoom(type):
    """Asks an object for `make_room`, not its class: a wrapper has it only where the wrapped sampler has."""

    def __instancecheck__(cls, instance: object) -> bool:
        return hasattr(instance, "make_room")


class StoresRows(metaclass=_HasRoom):
    """A sampler whose state grows with the stream: whoever compiles a loop over batches asks it for room first."""

    def make_room(self, state: Any, batch: Batch, rounds: int = 1) -> Any:
        """Return the state with room for so many batches of this shape."""


class FieldValue(NamedTuple):
    """A velocity at every particle, its two parts kept apart so that either can be re-weighted."""

    drift: Array  # [n, d], towards the posterior's mass
    repulsion: Array  # [n, d], away from the other particles
    bandwidth: Scalar


THREEFRY, SEED_OFFSET = "threefry2x32", "jax_random_seed_offset"  # of JAX's random numbers

Field = Callable[[Particles, Scores], FieldValue]
Schedule = float | Callable[[Array], Array]  # a number, or a function of the round t = 1, 2, …
# κ(rows of this batch, rows seen including this batch) -> factor on the batch's summed gradient
LikelihoodScale = Callable[[Array, Array], Array]


class DivergedError(FloatingPointError):
    """A round's update was not finite. `state` and `history` hold everything up to the round before."""

    def __init__(self, message: str, state: State | None = None, history: tuple[object, ...] | None = None):
        super().__init__(message)
        self.state = state
        self.history = history


def as_key(key: Seed) -> Key:
    """Return a JAX key from a key or an integer seed."""
    if isinstance(key, int | np.integer):
        return _seeded(int(key))
    if isinstance(key, jax.Array):
        return key
    raise TypeError(f"`key` is {key!r}, but a JAX key or an integer seed is needed, e.g. `key=0`.")


def _seeded(seed: int) -> Key:
    """Return `jax.random.key(seed)`; by hand where that is plain, because JAX would compile two programs for it."""
    said = jax.config.values
    plain = said.get("jax_default_prng_impl") == THREEFRY and not said.get(SEED_OFFSET)
    if not plain or not 0 <= seed < 2**31:
        return jax.random.key(seed)
    return jax.random.wrap_key_data(jax.device_put(np.array([0, seed], np.uint32)), impl=THREEFRY)


def as_schedule(schedule: Schedule) -> Schedule:
    """Return a schedule that a sampler can be made of: a function as it is, any number as a float."""
    return schedule if callable(schedule) else float(schedule)


def at_round(schedule: Schedule, t: Array) -> Array:
    """Return the value of a schedule at round t, in t's dtype."""
    value = schedule(t) if callable(schedule) else schedule
    return jnp.asarray(value).astype(t.dtype)


def shapes_of(tree: Tree) -> str:
    """Return the shapes of a pytree's leaves, for error messages."""
    shapes = [str(np.shape(leaf)) for leaf in jax.tree.leaves(tree)]
    more = f" and {len(shapes) - 6:,} more" if len(shapes) > 6 else ""
    return ", ".join(shapes[:6]) + more or "no arrays"
