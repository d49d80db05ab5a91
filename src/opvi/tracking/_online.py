"""A composition of wrappers and experts as a sampler: batches cut, counted and refused if they are not finite."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opvi._forks import Unforked
from opvi._steps import compiled, in_one_program, pieces, root_mean_square, tick
from opvi.filters._covariance import exactly
from opvi.predictive import Predictive
from opvi.targets import cast
from opvi.tracking import _chunks as chunks
from opvi.tracking._mixing._layer import Nested
from opvi.types import Array, ArrayLike, Batch, Key, Particles, Predicted, Scalar, Start, Tree

PREDICT_ROWS = 256  # at once


class OnlineState(NamedTuple):
    """What the next round needs, and nothing else."""

    model: Nested
    round: Array
    rows: Array

    @property
    def particles(self) -> Particles:
        """The weights of the first expert that has particles, `[n, d]`."""
        found = _particles(self.model)
        return jnp.zeros((1, 0)) if found is None else found


class OnlineInfo(NamedTuple):
    """What a round did, for readers; never fed back."""

    rows: Array
    log_predictive: Scalar  # mean log predictive density of the batch, before learning from it
    squared_error: Scalar  # mean squared error of the predictions, before learning
    drift: Scalar
    finite: Array
    predicted: Predicted | None  # for each row, before learning
    probability: Scalar | None  # that the data have jumped


@dataclass(frozen=True)
class Online(Unforked):
    """Settings of a model of numbers."""

    features: int

    @property
    def model(self) -> Any:
        """The outermost wrapper."""
        raise NotImplementedError

    @in_one_program
    def init(self, key: Key, particles: Start = None) -> OnlineState:
        """Return the state before any row."""
        zero, dtype = jnp.zeros((), jnp.int32), jnp.zeros(()).dtype
        return OnlineState(self.model.init(key, self.features, dtype), zero, zero)

    @compiled
    @exactly
    def step(self, key: Key, state: OnlineState, batch: Batch) -> tuple[OnlineState, OnlineInfo]:
        """Predict a batch `(X, y)`, and learn from it."""
        dtype = state.particles.dtype
        batch = cast(batch, dtype)
        cut, weight, finite = chunks.cut(self.features, batch, dtype)
        clock, before = tick(state, batch), state.particles
        key = jax.random.fold_in(key, clock.round)

        def one(model: Nested, chunk: tuple[Array, ...]) -> tuple[Nested, Any]:
            return self.model.learn(key, model, *chunk)

        if len(cut[2]) == 1:
            model, said = one(state.model, tuple(leaf[0] for leaf in cut))
            said = jax.tree.map(lambda leaf: leaf[None], said)
        else:
            model, said = jax.lax.scan(one, state.model, cut)
        each = [jnp.where(finite, leaf.reshape(-1)[: len(weight)], jnp.nan) for leaf in said[:3]]
        predicted = Predicted(each[0], each[1], each[2])
        total = weight.sum()

        def mean(values: Array) -> Scalar:
            return jnp.where(total > 0, (values * weight).sum() / jnp.maximum(total, 1e-30), jnp.nan)

        squared = (batch.data[1].astype(dtype) - each[1]) ** 2
        rows = jnp.where(finite, clock.rows, state.rows)
        new = OnlineState(model, clock.round, rows)
        drift, probability = root_mean_square(new.particles - before), said.probability.max()
        return new, OnlineInfo(rows, mean(each[0]), mean(squared), drift, finite, predicted, probability)

    @compiled
    @exactly
    def relearn(self, key: Key, state: OnlineState, batch: Batch) -> OnlineState:
        """Learn from rows seen before, which teach the experts and nothing else."""
        dtype = state.particles.dtype
        cut = chunks.cut(self.features, cast(batch, dtype), dtype)[0]

        def again(model: Nested, chunk: tuple[Array, ...]) -> tuple[Nested, None]:
            return self.model.relearn(key, model, *chunk), None

        return state._replace(model=jax.lax.scan(again, state.model, cut)[0])

    def predict(self, state: OnlineState, x: ArrayLike) -> Predictive:
        """Return the posterior predictive at X, in the units of y."""
        x = jnp.asarray(x, state.particles.dtype)
        if x.ndim != 2 or x.shape[1] != self.features:
            raise ValueError(f"`x` has rows of shape {x.shape[1:]}, but this regressor takes ({self.features},).")
        rows = len(x)
        room = 1 << max(rows - 1, 0).bit_length()  # ragged numbers of rows compile few times
        said = _components(self, state, jnp.pad(x, ((0, room - rows), (0, 0))))
        return Predictive(jax.tree.map(lambda leaf: leaf[:, :rows], said))

    @property
    def about(self) -> str:
        """One line: what was chosen, and why."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.about


def _particles(tree: Tree) -> Particles | None:
    if hasattr(tree, "particles"):
        return tree.particles
    if isinstance(tree, tuple):
        found = (_particles(leaf) for leaf in tree)
        return next((one for one in found if one is not None), None)
    return None


@partial(jax.jit, static_argnums=0)
@exactly
def _components(sampler: Online, state: OnlineState, x: Array) -> Tree:
    """Return the components of the predictive at x, in the units of y."""
    nothing = jnp.zeros(len(x), x.dtype)

    def some(part: Array) -> Tree:
        zero = jnp.zeros(len(part), part.dtype)
        rows = sampler.model.rows(state.model, part, zero, zero)
        return sampler.model.distribution(state.model, sampler.model.predict(state.model, rows))

    if len(x) <= PREDICT_ROWS:  # a loop of one turn is more to compile
        return some(x)
    said = jax.lax.map(some, pieces(x, nothing, PREDICT_ROWS)[0])  # leaves [pieces, components, rows]
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1).reshape(leaf.shape[1], -1)[:, : len(x)], said)
