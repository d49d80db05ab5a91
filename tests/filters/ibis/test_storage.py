"""Which rows are stored, and what those stand for that are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opvi.filters.ibis._storage import (
    Limits,
    faded,
    keep,
    no_storage,
    room_needed,
    stands_for,
    with_room,
    write_beyond,
)
from opvi.types import Batch

MOST, SIZE = 16, 5


def stored_after(key, limits, rows, gamma=1.0):
    """Storage after rows 0, 1, 2, … in batches of five, and how often each was said to have left."""
    data = jnp.arange(rows, dtype=jnp.float32)
    storage = with_room(no_storage(1, jnp.float32), data, MOST + SIZE)
    left = np.zeros(rows)
    store = jax.jit(keep, static_argnums=2)
    for first in range(0, rows, SIZE):
        batch = Batch(data[first : first + SIZE], jnp.ones(SIZE))
        top = jnp.minimum(storage.arrived, MOST)
        storage, weight = write_beyond(storage, batch, top)
        storage, leaving = store(
            jax.random.fold_in(key, first), faded(storage, jnp.float32(gamma)), limits, weight, top
        )
        gone = np.asarray(storage.data)[int(top) : int(top) + SIZE][np.asarray(leaving) > 0].astype(int)
        left[gone] += 1
        storage = storage._replace(arrived=storage.arrived + SIZE)
    return storage, left


def test_every_row_is_stored_or_has_left_once():
    storage, left = stored_after(jax.random.key(0), Limits(MOST, None), 100)
    here = np.zeros(100)
    here[np.asarray(storage.data)[np.asarray(storage.weight) > 0].astype(int)] += 1
    np.testing.assert_array_equal(here + left, 1)
    assert here.sum() == MOST
    # Each stored row stands for itself and for its share of the others.
    np.testing.assert_allclose(np.asarray(stands_for(storage, SIZE)).sum() + MOST, 100, rtol=1e-5)


def test_all_rows_are_stored_with_the_same_probability():
    """Of 400 runs, each of 40 rows is stored in 160, give or take four standard errors."""
    count = np.zeros(40)
    run = jax.jit(jax.vmap(lambda key: _final(key)))
    for row in np.asarray(run(jax.random.split(jax.random.key(1), 400))).astype(int):
        count[row] += 1
    np.testing.assert_allclose(count, 160, atol=4.5 * np.sqrt(400 * 0.4 * 0.6))


def _final(key):
    data = jnp.arange(40, dtype=jnp.float32)
    storage = with_room(no_storage(1, jnp.float32), data, MOST + SIZE)
    for first in range(0, 40, SIZE):
        top = jnp.minimum(storage.arrived, MOST)
        storage, weight = write_beyond(storage, Batch(data[first : first + SIZE], jnp.ones(SIZE)), top)
        storage = keep(jax.random.fold_in(key, first), storage, Limits(MOST, None), weight, top).storage
        storage = storage._replace(arrived=storage.arrived + SIZE)
    return storage.data[:MOST]


def test_rows_that_fade_make_room_in_turn():
    limits = Limits(1000, 1.0)  # a thousandth after ten rows
    assert limits.cyclic
    assert limits.most == 10
    data = jnp.arange(40, dtype=jnp.float32)
    storage = with_room(no_storage(1, jnp.float32), data, limits.most + SIZE)
    for first in range(0, 40, SIZE):
        top = jnp.minimum(storage.arrived, limits.most)
        storage, weight = write_beyond(storage, Batch(data[first : first + SIZE], jnp.ones(SIZE)), top)
        storage = faded(storage, jnp.float32(2.0**-SIZE))
        storage = keep(jax.random.key(0), storage, limits, jnp.asarray(weight), top).storage
        storage = storage._replace(arrived=storage.arrived + SIZE)
    here = np.asarray(storage.weight)[: limits.most]
    np.testing.assert_array_equal(np.sort(np.asarray(storage.data)[: limits.most][here == 1]), np.arange(35, 40))
    np.testing.assert_array_equal(here[here < 1], 2.0**-SIZE)


@pytest.mark.parametrize(("count", "coming"), [(0, 20), (4000, 200), (100_000, 640)])
def test_room_is_enough_and_has_few_sizes(count, coming):
    limits = Limits(1_000_000, None)
    data = np.zeros((1, 9), np.float32)
    room = room_needed(limits, data, count, coming, 20)
    assert room >= count + coming + 20
    assert np.log(room / 16_384) / np.log(4) == pytest.approx(round(np.log(room / 16_384) / np.log(4)))
    assert room_needed(Limits(50, None), data, count + 50, coming, 20) == 50 + 32, "never more than the memory"
