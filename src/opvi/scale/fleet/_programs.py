"""Starts, advances and queries many models by one compiled program each, as words of memory.

Programs are static in the sampler, so fleets of equal samplers share what is traced.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Predictive
from opvi.running._engine import looped
from opvi.running._kept import Program, place
from opvi.types import Array, Batch, Key, Prediction, Sampler, Start, State, Tree

# Of what a program calls: such a call of jaxlib (seen in 0.10.2) hands parts of its work to XLA's threads and waits for
# them inside one of these; where as many calls run as there are threads, all wait forever.
WAITING = ("@lapack_", "stablehlo.fft")


class Form(NamedTuple):
    """How a model's key and state are laid out in a record, as consecutive words. Hashable."""

    structure: Tree  # of a state
    shapes: tuple[tuple[int, ...], ...]  # of the key's numbers, then of the state's leaves
    dtypes: tuple[np.dtype, ...]
    impl: str  # the kind of key
    word: np.dtype  # uint32, or bytes where a leaf has smaller numbers

    @classmethod
    def of(cls, key: Key, state: State) -> "Form":
        """Return the form of models with this kind of key and state (or its shapes)."""
        leaves, structure = jax.tree.flatten(state)
        numbers = jax.eval_shape(jax.random.key_data, key)
        dtypes = tuple(np.dtype(leaf.dtype) for leaf in (numbers, *leaves))
        word = np.dtype(np.uint32 if min(kind.itemsize for kind in dtypes) >= 4 else np.uint8)
        return cls(structure, (numbers.shape, *(leaf.shape for leaf in leaves)), dtypes, _impl(key), word)

    @property
    def ends(self) -> list[int]:
        """Where each leaf ends, in words."""
        sizes = [
            math.prod(shape) * kind.itemsize // self.word.itemsize
            for shape, kind in zip(self.shapes, self.dtypes, strict=True)
        ]
        return np.cumsum(sizes).tolist()

    def models(self, words: np.ndarray) -> tuple[np.ndarray, Tree]:
        """Return keys as numbers, and states, from words `[models, words]` on the host."""
        parts = np.split(words, self.ends[:-1], 1)
        leaves = [
            np.ascontiguousarray(part).reshape(-1).view(kind).reshape(len(words), *shape)
            for part, kind, shape in zip(parts, self.dtypes, self.shapes, strict=True)
        ]
        return leaves[0], jax.tree.unflatten(self.structure, leaves[1:])

    def rounds(self, words: np.ndarray) -> np.ndarray:
        """Return how many rounds models have done, from their words on the host."""
        place = 1 + jax.tree.unflatten(self.structure, range(len(self.shapes) - 1)).round
        ends = self.ends
        part: np.ndarray = np.ascontiguousarray(words[:, ends[place - 1] : ends[place]])
        return part.view(self.dtypes[place])[:, 0]

    def unpacked(self, words: Array) -> tuple[Key, State]:
        """Return key and state of a model's words, in a program."""
        leaves = []
        for begin, end, kind, shape in zip([0, *self.ends], self.ends, self.dtypes, self.shapes, strict=False):
            part, ratio = words[begin:end], kind.itemsize // self.word.itemsize
            part = part.reshape(-1, ratio) if ratio > 1 else part
            part = part != 0 if kind.kind == "b" else jax.lax.bitcast_convert_type(part, kind)
            leaves.append(part.reshape(shape))
        return jax.random.wrap_key_data(leaves[0], impl=self.impl), jax.tree.unflatten(self.structure, leaves[1:])

    def packed(self, key: Key, state: State) -> Array:
        """Return the words of a model, in a program."""
        leaves = [jax.random.key_data(key), *jax.tree.leaves(state)]
        whole = [leaf.astype(self.word) if leaf.dtype == bool else leaf for leaf in leaves]
        return jnp.concatenate([jax.lax.bitcast_convert_type(leaf, self.word).reshape(-1) for leaf in whole])


def _impl(key: Key) -> str:
    return str(jax.random.key_impl(key))


@partial(jax.jit, static_argnums=0)
def _step(sampler: Sampler, key: Key, state: State, batch: Batch) -> Tree:
    return sampler.step(key, state, batch)


def waits(sampler: Sampler, key: Key, state: State, batch: Batch) -> bool:
    """Return whether two concurrent steps could deadlock on this machine; raise what the step raises about shapes."""
    text = _step.lower(sampler, key, state, batch).as_text()
    return jax.default_backend() == "cpu" and any(call in text for call in WAITING)


def ready(jitted: Any, settings: tuple[Tree, ...], arguments: tuple[Tree, ...]) -> Callable[..., Tree]:
    """Return the compiled program for arguments of these shapes: from disk, if it is or can be kept."""
    if place(jitted, settings, arguments) is None:
        return jitted.lower(*settings, *arguments).compile()
    return _kept(jitted, len(settings)).ready(*settings, *arguments)


@cache
def _kept(jitted: Callable[..., Tree], settings: int) -> Program:
    return Program(jitted, settings, None, None)


def folded(key: Key, words: Array) -> Key:
    """Return the key of one model, from the fleet's key and the two words of its id's hash."""
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])


@partial(jax.jit, static_argnums=(0, 1, 2))
def start(
    sampler: Sampler, form: Form | None, drawn: int | None, given: Start, key: Key, words: Array, count: Array
) -> Tree:
    """Return the first `count` models of `words [models, 2]` as they start: as words, or without a form as states."""
    particles = [value for value in (drawn, given) if value is not None]

    def one(words: Array) -> Tree:
        mine = folded(key, words)
        state = sampler.init(mine, *particles)
        return state if form is None else form.packed(mine, state)

    return _each(one, words, count)


@partial(jax.jit, static_argnums=(0, 1))
def answer(sampler: Sampler, form: Form, models: Array, at: Array, x: Tree, count: Array) -> Tree:
    """Return what model `at[i]` predicts for row i, for the first `count` rows of x."""

    def one(item: tuple[Array, Tree]) -> Prediction:
        index, row = item
        return sampler.predict(form.unpacked(models[index])[1], jax.tree.map(lambda leaf: leaf[None], row))

    return _each(one, (at, x), count)


def _each(function: Callable[[Tree], Tree], items: Tree, count: Array) -> Tree:
    """Return the function of the first `count` items, stacked."""
    return looped(lambda _, item: ((), function(item)), (), items, count)[1]


def after(sampler: Sampler, form: Form, model: Array, batch: Batch) -> tuple[Array, Tree]:
    """Return a model after a batch, and the step's Info."""
    key, state = form.unpacked(model)
    state, info = sampler.step(key, state, batch)
    if hasattr(info, "predicted"):  # as large as the data
        info = info._replace(predicted=None)  # type: ignore[attr-defined]
    return form.packed(key, state), info


@partial(jax.jit, static_argnums=(0, 1, 2))
def advance(
    sampler: Sampler, form: Form, lanes: int, models: Array, at: Array, batches: Batch, count: Array
) -> tuple[Array, Tree]:
    r"""Return models after the first `count` tiles of batches, and the steps' Info, `[tiles, lanes]`.

    $$x^{(m_{il})} \gets \mathrm{step}(k^{(m_{il})}, x^{(m_{il})}, D_{il}), \qquad l = 1, …, \mathrm{lanes}
      \text{ by vmap, tile } i \text{ after tile } i - 1$$

    One lane calls the step directly, so a model gets the same bits as when run alone. More lanes compute the same
    numbers, rounded in another order.

    Args:
        sampler: the sampler of every model.
        form: the layout of their words.
        lanes: models side by side.
        models: `[models, words]`.
        at: $m$, the models that the batches of a tile are for, `[tiles, lanes]`: distinct within a tile, and
            `models` for an empty slot.
        batches: leaves `[tiles, lanes, rows, ...]`.
        count: the number of tiles to process.
    """
    many = partial(after, sampler, form)
    many = many if lanes == 1 else jax.vmap(many)
    if lanes == 1:
        at, batches = jax.tree.map(lambda leaf: leaf[:, 0], (at, batches))

    def one(models: Array, tile: tuple[Array, Batch]) -> tuple[Array, Tree]:
        here, batch = tile  # an empty place reads the last model, writes nowhere
        new, info = many(models[here], batch)
        return models.at[here].set(new, mode="drop"), info

    models, infos = looped(one, models, (at, batches), count)
    return models, infos if lanes > 1 else jax.tree.map(lambda leaf: leaf[:, None], infos)


def tiles_of(model: np.ndarray, wave: np.ndarray, lanes: int, models: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the models of each tile, `[tiles, lanes]`, and the item in each slot (-1 for none).

    Args:
        model: the model of each item.
        wave: the items of one model are numbered 0, 1, … and must be learnt in this order.
        lanes: slots in a tile.
        models: the number that stands for no model.
    """
    order = np.argsort(wave, kind="stable") if lanes > 1 else np.arange(len(model))
    sizes = np.bincount(wave[order]) if lanes > 1 else np.array([len(model)])
    tiles = -(-sizes // lanes)
    first = (np.cumsum(tiles) - tiles) * lanes - (np.cumsum(sizes) - sizes)
    place = np.arange(len(model)) + np.repeat(first, sizes)
    items = np.full(tiles.sum() * lanes, -1)
    items[place] = order
    at = np.where(items < 0, models, model[items]).astype(np.int32)
    return at.reshape(-1, lanes), items.reshape(-1, lanes)


def by_row(out: Predictive) -> Predictive:
    """Return predictives of one row each, stacked, as one predictive of all rows, whose arrays are NumPy's.

    JAX's functions take these as they are, with the same bits. To convert some would take as long as to predict a row,
    and for every new number of rows JAX would compile a program that does it.
    """
    components = jax.tree.map(lambda leaf: leaf[:, :, 0].swapaxes(0, 1), out.components)
    weights: Any = None if out.log_weights is None else np.reshape(out.log_weights, (len(out.log_weights), -1)).T
    temperature: Any = None if out.temperature is None else np.reshape(out.temperature, (-1, 1))
    return type(out)(components, weights, temperature)
