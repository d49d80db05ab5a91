"""The nouns every layer shares: batches, algorithms, field values and errors."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Key = jax.Array
Particles = jax.Array  # [n, d]
Scores = jax.Array  # [n, d]
Params = Any  # the user's pytree: one particle, unravelled
Data = Any  # a pytree of arrays that share a leading axis of rows
Scalar = jax.Array
LARGEST_VALUE = 1e18  # of a number in the data: in float32 the square of a larger one is close to infinity


class Batch(NamedTuple):
    """The rows of one round.

    Rows are padded to a bucket size so that growing batches compile few times. A padded row repeats
    a real one (so that no log or division meets an invented value) and weighs 0.
    """

    data: Data
    weight: Array  # [B]: 1 for a row, 0 for padding, w for a row that counts w times


class Algorithm(NamedTuple):
    """A sampler as two pure functions.

    `init(key, particles)` gives the state; `particles` is a count to draw, an `[n, d]` matrix, or a
    stacked pytree. `step(key, state, batch)` gives `(state, info)`. Pass the *same* key to every
    step: the step folds the round number into it, so looping, scanning and resuming agree.
    """

    init: Callable[[Key, Any], Any]
    step: Callable[[Key, Any, Batch], tuple[Any, Any]]


class Tracker(NamedTuple):
    """A sampler that knows how to predict: everything a stream of data needs, chosen and set up.

    `init` and `step` are an `Algorithm`'s (`init(key)` draws the recommended number of particles), so
    `opvi.run(tracker, stream, key)` takes it. `predict(state, x)` gives the posterior predictive. `relearn(key,
    state, batch)` learns from rows seen before: neither calibration nor scaling nor counts hear of them.
    """

    init: Callable[..., Any]
    step: Callable[[Key, Any, Batch], tuple[Any, Any]]
    predict: Callable[[Any, Any], Any]
    about: str  # one line: what was picked, and why
    relearn: Callable[[Key, Any, Batch], Any] | None = None  # gives the state

    def __str__(self) -> str:
        return self.about


class FieldValue(NamedTuple):
    """A velocity at every particle, its two parts kept apart so that either can be re-weighted."""

    drift: Array  # [n, d], towards the posterior's mass
    repulsion: Array  # [n, d], away from the other particles
    bandwidth: Scalar


Field = Callable[[Particles, Scores], FieldValue]
Schedule = float | Callable[[Array], Any]  # a number, or a function of the round t = 1, 2, …
# κ(rows of this batch, rows seen including this batch) -> factor on the batch's summed gradient
LikelihoodScale = Callable[[Array, Array], Array]


class DivergedError(FloatingPointError):
    """A round's update was not finite. `state` and `history` hold everything up to the round before."""

    def __init__(self, message: str, state: Any = None, history: Any = None):
        super().__init__(message)
        self.state = state
        self.history = history


def as_key(key: Any) -> Key:
    """A JAX key from a key or an integer seed."""
    if isinstance(key, int | np.integer):
        return jax.random.key(int(key))
    if isinstance(key, jax.Array):
        return key
    raise TypeError(f"`key` is {key!r}, but a JAX key or an integer seed is needed, e.g. `key=0`.")


def at_round(schedule: Schedule, t: Array) -> Array:
    """The value of a schedule at round t, in t's dtype."""
    value = schedule(t) if callable(schedule) else schedule
    return jnp.asarray(value).astype(t.dtype)


def shapes_of(tree: Any) -> str:
    """The shapes of a pytree's leaves, for error messages."""
    return ", ".join(str(np.shape(leaf)) for leaf in jax.tree.leaves(tree)) or "no arrays"
