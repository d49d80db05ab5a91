"""Parts of a composition's state, found and replaced by their kind."""

from collections.abc import Callable
from typing import Any, TypeVar

from opvi.types import Tree

Part = TypeVar("Part")


def find(tree: Tree, kind: type[Part]) -> Part | None:
    """Return the first part of this kind, depth first; None if there is none."""
    if isinstance(tree, kind):
        return tree
    if isinstance(tree, tuple):
        found = (find(part, kind) for part in tree)
        return next((one for one in found if one is not None), None)
    return None


def replaced(tree: Tree, kind: type[Any], change: Callable[[Any], Any]) -> Tree:
    """Return the tree with every part of this kind changed."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple):
        parts = [replaced(part, kind, change) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree
