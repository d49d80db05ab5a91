"""Many small arrays as few: what a call of a compiled program costs grows with the number of arrays."""

import math
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi.types import Array, Tree

SMALL = 4096  # numbers of an array that is packed; to copy more costs more than to pass them


class Layout(NamedTuple):
    """Where each array of a tree is. Hashable, so that it may be one of a program's settings."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    structure: Tree


class Packed(NamedTuple):
    """The arrays of a tree."""

    small: tuple[Array, ...]  # one for each dtype, in alphabetical order
    large: tuple[Array, ...]  # as they are


def layout_of(tree: Tree) -> Layout:
    """Return where each array of a tree will be."""
    leaves, structure = jax.tree.flatten(tree)
    return Layout(tuple(leaf.shape for leaf in leaves), tuple(str(leaf.dtype) for leaf in leaves), structure)


def packed(layout: Layout, tree: Tree, numbers: ModuleType = jnp) -> Packed:
    """Return a tree with its small arrays joined, by NumPy or by JAX."""
    leaves = jax.tree.leaves(tree)
    joined: dict[str, list[Array]] = {kind: [] for kind in _kinds(layout)}
    large = []
    for leaf, shape, kind in zip(leaves, layout.shapes, layout.dtypes, strict=True):
        if math.prod(shape) > SMALL:
            large.append(leaf)
        else:
            joined[kind].append(numbers.asarray(leaf).reshape(-1))
    return Packed(tuple(numbers.concatenate(parts) for parts in joined.values()), tuple(large))


def opened(layout: Layout, held: Packed) -> Tree:
    """Return the tree."""
    small, large = dict(zip(_kinds(layout), held.small, strict=True)), iter(held.large)
    begin, leaves = dict.fromkeys(small, 0), []
    for shape, kind in zip(layout.shapes, layout.dtypes, strict=True):
        size = math.prod(shape)
        if size > SMALL:
            leaves.append(next(large))
            continue
        leaves.append(small[kind][begin[kind] : begin[kind] + size].reshape(shape))
        begin[kind] += size
    return jax.tree.unflatten(layout.structure, leaves)


def on_host(held: Packed) -> Packed:
    """Return copies of the small arrays, which NumPy can take apart at once."""
    return held._replace(small=tuple(np.array(part) for part in held.small))  # type: ignore[misc]


def _kinds(layout: Layout) -> list[str]:
    return sorted({kind for shape, kind in zip(layout.shapes, layout.dtypes, strict=True) if math.prod(shape) <= SMALL})
