"""Many small arrays as few."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opvi.running._packed import SMALL, layout_of, on_host, opened, packed


@pytest.mark.parametrize("numbers", [np, jnp])
def test_what_is_packed_is_opened_again(numbers):
    tree = {
        "whole": np.arange(6, dtype=np.int32).reshape(2, 3),
        "none": None,
        "few": (np.float32(2.5) * np.ones(()), np.ones((0, 4)), -np.arange(3.0)),
        "many": np.arange(SMALL + 1.0),
        "most": np.arange(float(SMALL)),
        "flags": np.array([True, False]),
        "last": np.int32([7]),
    }
    tree = jax.tree.map(lambda leaf: leaf.astype(np.float32) if leaf.dtype.kind == "f" else leaf, tree)
    layout = layout_of(tree)
    held = packed(layout, tree, numbers)
    assert [str(part.dtype) for part in held.small] == ["bool", "float32", "int32"]
    assert len(held.large) == 1
    for again in (opened(layout, held), opened(layout, on_host(held))):
        assert jax.tree.structure(again) == layout.structure
        for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)
    assert hash(layout) == hash(layout_of(tree))
    assert not np.shares_memory(on_host(held).small[1], np.asarray(held.small[1]))  # which the next row overwrites
