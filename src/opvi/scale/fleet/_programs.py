"""The pure core of a fleet: many models started, advanced and asked by one compiled program each.

Programs are static in the sampler, so fleets of equal samplers share them, and jit's cache is the only one.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from opvi.running._engine import looped
from opvi.types import Array, Batch, Key, Prediction, Sampler, Start, State, Tree

MODELS = 1024  # or batches, in one call of a program; fewer where they are large
CALL_BYTES = 1 << 24
ACCELERATOR_LANES = 1024
# Of what a program calls: such a call of jaxlib (seen in 0.10.2) hands parts of its work to XLA's threads and waits for
# them inside one of these; where as many calls run as there are threads, all wait for ever.
WAITING = ("@lapack_", "stablehlo.fft")


@partial(jax.jit, static_argnums=0)
def _step(sampler: Sampler, key: Key, state: State, batch: Batch) -> Tree:
    return sampler.step(key, state, batch)


def waits(sampler: Sampler, key: Key, state: State, batch: Batch) -> bool:
    """Return whether two steps at once could lock up on this machine; raise what the step raises about shapes."""
    text = _step.lower(sampler, key, state, batch).as_text()
    return jax.default_backend() == "cpu" and any(call in text for call in WAITING)


def fits(one: int) -> int:
    """Return how many things of `one` bytes go into a call."""
    return max(1, CALL_BYTES // max(one, 1))


def folded(key: Key, words: Array) -> Key:
    """Return the key of one model, from the fleet's and the two words of its id's hash."""
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])


@partial(jax.jit, static_argnums=(0, 1))
def start(sampler: Sampler, drawn: int | None, given: Start, key: Key, words: Array, count: Array) -> Tree:
    """Return keys (as numbers) and first states of the first `count` models of `words [models, 2]`, one by one."""
    particles = [value for value in (drawn, given) if value is not None]

    def one(words: Array) -> tuple[Array, State]:
        mine = folded(key, words)
        return jax.random.key_data(mine), sampler.init(mine, *particles)

    return _each(one, words, count)


@partial(jax.jit, static_argnums=0)
def answer(sampler: Sampler, states: Tree, at: Array, x: Tree, count: Array) -> Tree:
    """Return what model `at[i]` predicts for row i, for the first `count` rows of x."""

    def one(item: tuple[Array, Tree]) -> Prediction:
        index, row = item
        state = jax.tree.map(lambda leaf: leaf[index], states)
        return sampler.predict(state, jax.tree.map(lambda leaf: leaf[None], row))

    return _each(one, (at, x), count)


def _each(function: Callable[[Tree], Tree], items: Tree, count: Array) -> Tree:
    """Return the function of the first `count` items, stacked."""
    return looped(lambda _, item: ((), function(item)), (), items, count)[1]


@partial(jax.jit, static_argnums=(0, 1))
def advance(
    sampler: Sampler, lanes: int, keys: Key, states: Tree, at: Array, batches: Batch, count: Array
) -> tuple[Tree, Tree]:
    r"""Return states after the first `count` tiles of batches, and the steps' Info, `[tiles, lanes]`.

    $$x^{(m_{il})} \gets \mathrm{step}(k^{(m_{il})}, x^{(m_{il})}, D_{il}), \qquad l = 1, …, \mathrm{lanes}
      \text{ by vmap, tile } i \text{ after tile } i - 1$$

    One lane calls the step as it is, so a model gets the bits that it gets alone. More lanes compute the same
    numbers, rounded in another order.

    Args:
        sampler: of every model.
        lanes: models side by side.
        keys: of the models, `[models]`.
        states: leaves `[models, ...]`.
        at: $m$, the models that the batches of a tile are for, `[tiles, lanes]`: distinct within a tile, and
            `models` for an empty place.
        batches: leaves `[tiles, lanes, rows, ...]`.
        count: tiles to go through.
    """
    many = sampler.step if lanes == 1 else jax.vmap(sampler.step)
    if lanes == 1:
        at, batches = jax.tree.map(lambda leaf: leaf[:, 0], (at, batches))

    def one(states: Tree, tile: tuple[Array, Batch]) -> tuple[Tree, Tree]:
        here, batch = tile
        mine = jax.tree.map(lambda leaf: leaf[here], states)  # an empty place reads the last model, writes nowhere
        new, info = many(keys[here], mine, batch)
        if hasattr(info, "predicted"):  # as large as the data
            info = info._replace(predicted=None)  # type: ignore[attr-defined]
        return jax.tree.map(lambda leaf, value: leaf.at[here].set(value, mode="drop"), states, new), info

    states, infos = looped(one, states, (at, batches), count)
    return states, infos if lanes > 1 else jax.tree.map(lambda leaf: leaf[:, None], infos)


def tiles_of(model: np.ndarray, wave: np.ndarray, lanes: int, models: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the models of each tile, `[tiles, lanes]`, and which item stands in each place (-1 for none).

    Args:
        model: of each item.
        wave: the items of one model are numbered 0, 1, … and must be learnt in this order.
        lanes: places in a tile.
        models: what stands for no model.
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
