"""The pure core of a fleet: many models started, advanced and asked by one compiled program each."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opvi.types import Array, Batch, Key

MODELS = 1024  # or batches, in one call of a program; fewer where they are large
CALL_BYTES = 1 << 24
ACCELERATOR_LANES = 1024
# Of what a program calls: such a call of jaxlib (seen in 0.10.2) hands parts of its work to XLA's threads and waits for
# them inside one of these; where as many calls run as there are threads, all wait for ever.
WAITING = ("@lapack_", "stablehlo.fft")


def waits(step: Callable[..., Any], *arguments: Any) -> bool:
    """Whether two such steps at once could lock up on this machine; raises what the step raises about shapes."""
    text = jax.jit(step).lower(*arguments).as_text()
    return jax.default_backend() == "cpu" and any(call in text for call in WAITING)


def fits(one: int) -> int:
    """How many things of `one` bytes go into a call."""
    return max(1, CALL_BYTES // max(one, 1))


def folded(key: Key, words: Array) -> Key:
    """The key of one model, from the fleet's and the two words of its id's hash."""
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])


@partial(jax.jit, static_argnums=(0, 1))
def start(init: Callable[..., Any], drawn: int | None, given: Any, key: Key, words: Array, count: Array) -> Any:
    """Keys (as numbers) and first states of the first `count` models of `words [models, 2]`, one after the other."""

    def one(words: Array) -> Any:
        mine = folded(key, words)
        particles = [value for value in (drawn, given) if value is not None]
        return jax.random.key_data(mine), init(mine, *particles)

    return _each(one, words, count)


@partial(jax.jit, static_argnums=0)
def answer(predict: Callable[..., Any], states: Any, at: Array, x: Any, count: Array) -> Any:
    """What model `at[i]` predicts for row i, for the first `count` rows of x."""

    def one(item: Any) -> Any:
        index, row = item
        state = jax.tree.map(lambda leaf: leaf[index], states)
        return predict(state, jax.tree.map(lambda leaf: leaf[None], row))

    return _each(one, (at, x), count)


def _each(function: Callable[[Any], Any], items: Any, count: Array) -> Any:
    """The function of the first `count` items, stacked. A traced count: any number of them, one program."""
    first = jax.tree.map(lambda leaf: leaf[0], items)
    room = len(jax.tree.leaves(items)[0])
    out = jax.tree.map(lambda s: jnp.zeros((room, *s.shape), s.dtype), jax.eval_shape(function, first))

    def body(i: Array, out: Any) -> Any:
        value = function(jax.tree.map(lambda leaf: leaf[i], items))
        return jax.tree.map(lambda rows, leaf: rows.at[i].set(leaf), out, value)

    return jax.lax.fori_loop(0, count, body, out)


def advance(
    step: Callable[..., Any], lanes: int, keys: Key, states: Any, at: Array, batches: Batch, count: Array
) -> tuple[Any, Any]:
    r"""States after the first `count` tiles of batches, and the steps' Info, `[tiles, lanes]`.

    $$x^{(m_{il})} \gets \mathrm{step}(k^{(m_{il})}, x^{(m_{il})}, D_{il}), \qquad l = 1, …, \mathrm{lanes}
      \text{ by vmap, tile } i \text{ after tile } i - 1$$

    One lane calls the step as it is, so a model gets the bits that it gets alone. More lanes compute the same
    numbers, rounded in another order.

    Args:
        step: of an algorithm.
        lanes: models side by side.
        keys: of the models, `[models]`.
        states: leaves `[models, ...]`.
        at: $m$, the models that the batches of a tile are for, `[tiles, lanes]`: distinct within a tile, and
            `models` for an empty place.
        batches: leaves `[tiles, lanes, rows, ...]`.
        count: tiles to go through.
    """
    many = step if lanes == 1 else jax.vmap(step)

    def one(states: Any, i: Array) -> Any:
        here = at[i, 0] if lanes == 1 else at[i]
        batch = jax.tree.map(lambda leaf: leaf[i, 0] if lanes == 1 else leaf[i], batches)
        mine = jax.tree.map(lambda leaf: leaf[here], states)  # an empty place reads the last model, writes nowhere
        new, info = many(keys[here], mine, batch)
        return jax.tree.map(lambda leaf, value: leaf.at[here].set(value, mode="drop"), states, new), info

    told = jax.eval_shape(one, states, jnp.int32(0))[1]
    infos = jax.tree.map(lambda s: jnp.zeros((len(at), *s.shape), s.dtype), told)

    def tile(i: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        states, infos = carry
        states, info = one(states, i)
        return states, jax.tree.map(lambda rows, leaf: rows.at[i].set(leaf), infos, info)

    states, infos = jax.lax.fori_loop(0, count, tile, (states, infos))
    return states, infos if lanes > 1 else jax.tree.map(lambda leaf: leaf[:, None], infos)


def compiled_advance(step: Callable[..., Any], lanes: int, *arguments: Any) -> Callable[..., tuple[Any, Any]]:
    """`advance` for arguments of these shapes: compiled here, so that it can be called from any thread."""
    leaves, tree = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    return _compiled_advance(step, lanes, tree, shapes, jax.default_backend(), jax.config.read("jax_enable_x64"))


@lru_cache(16)
def _compiled_advance(
    step: Callable[..., Any], lanes: int, tree: Any, shapes: tuple[Any, ...], backend: str, long: bool
) -> Callable[..., tuple[Any, Any]]:
    arguments = tree.unflatten([jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes])
    return jax.jit(partial(advance, step, lanes)).lower(*arguments).compile()


def tiles_of(model: np.ndarray, wave: np.ndarray, lanes: int, models: int) -> tuple[np.ndarray, np.ndarray]:
    """The models of each tile, `[tiles, lanes]`, and which item stands in each place (-1 for none).

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


def size_of(tree: Any) -> int:
    """Bytes of arrays, or of their shapes."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
