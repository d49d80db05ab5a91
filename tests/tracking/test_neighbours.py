"""Places, the search for the nearest rows, and the metric, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.tracking.experts import _metric as metrics
from opvi.tracking.experts import _nearest as neighbours

RNG = np.random.default_rng(0)


def rows(count, columns=3):
    stored = np.zeros((neighbours.room(count), columns), np.float32)
    stored[:count] = RNG.normal(size=(count, columns))
    return stored, RNG.normal(size=(7, columns)).astype(np.float32)


def search(stored, filled, asked, view=lambda x: x):
    return [np.asarray(a) for a in neighbours.nearest(jnp.asarray(stored), jnp.int32(filled), view, jnp.asarray(asked))]


def closest(stored, asked, count=8):
    far = ((stored[None] - asked[:, None]) ** 2).sum(-1)
    return np.argsort(far, 1)[:, :count]


def test_of_few_rows_exactly_the_nearest_are_found():
    stored, asked = rows(500)
    found, there = search(stored, 500, asked)
    assert there.all()
    np.testing.assert_array_equal(found, closest(stored[:500], asked))
    found, _ = search(stored, 500, 2 * asked, lambda x: 2 * x)  # another unit
    np.testing.assert_array_equal(found, closest(stored[:500], asked))


def test_of_many_rows_nearly_all_of_the_nearest_are_found():
    stored, asked = rows(9000)
    found, there = search(stored, 9000, asked)
    true = closest(stored[:9000], asked)
    shared = np.mean([len(set(a) & set(b)) / 8 for a, b in zip(found, true, strict=True)])
    assert there.all()
    assert shared > 0.9
    np.testing.assert_array_equal(found[:, 0], true[:, 0])  # the nearest of all is never passed over


def test_empty_places_are_no_neighbours():
    stored, asked = rows(3)
    found, there = search(stored, 3, asked)
    assert there.sum(1).tolist() == [3] * 7
    assert (np.sort(found[:, :3], 1) == [0, 1, 2]).all()
    assert not search(stored, 0, asked)[1].any()


def test_near_rows_weigh_by_distances_relative_to_their_mean():
    stored, asked = rows(400)
    near = neighbours.near(jnp.asarray(stored), jnp.int32(400), lambda x: x, jnp.asarray(asked))
    far = np.sort(((stored[None, :400] - asked[:, None]) ** 2).sum(-1), 1)[:, :8]
    weight = 1 / (far / far.mean(1, keepdims=True) + 0.01)
    np.testing.assert_allclose(near.closeness, weight / weight.max(1, keepdims=True), rtol=1e-3)
    np.testing.assert_allclose(near.squared, far.mean(1), rtol=1e-4)


def test_rows_fill_the_places_in_turn_and_padding_takes_none():
    here = jnp.asarray([True, False, True, True])
    place, seen = neighbours.places(jnp.int32(5), here, 100)
    assert place[jnp.asarray([0, 2, 3])].tolist() == [5, 6, 7]
    assert int(place[1]) >= 100
    assert int(seen) == 8


def test_later_rows_replace_random_ones_however_they_are_cut():
    ones = jnp.ones(2000, bool)
    kept = np.full(200, -1)
    place, seen = neighbours.places(jnp.int32(0), ones, 200)
    for number, where in enumerate(np.asarray(place)):
        if where < 200:
            kept[where] = number
    again = np.full(200, -1)
    count = jnp.int32(0)
    for begin in range(0, 2000, 20):
        part, count = neighbours.places(count, ones[:20], 200)
        for number, where in enumerate(np.asarray(part)):
            if where < 200:
                again[where] = begin + number
    np.testing.assert_array_equal(kept, again)
    assert int(seen) == int(count) == 2000
    assert kept.min() >= 0
    # A row is still there after 200 others with probability (1 - 1/200)^200; 200 places have a standard error of 0.034.
    assert np.mean(kept >= 1800) == pytest.approx(1 - np.exp(-1), abs=0.1)


def test_the_metric_follows_the_gradients():
    slope = jnp.asarray(RNG.normal(size=(20, 2)) * [3.0, 0.5], jnp.float32)
    metric = metrics.update(metrics.start(2, jnp.float32), slope, jnp.ones(20))
    value, vector = np.linalg.eigh(np.asarray(slope, float).T @ np.asarray(slope, float) / 20)
    value = value + 1e-4 * value.mean()
    root = vector * (value / value.mean()) ** 0.375 @ vector.T
    np.testing.assert_allclose(metric.root, root, rtol=1e-3)
    # Later batches move a running mean, padding does not.
    more = metrics.update(metric, 2 * slope, jnp.ones(20))
    np.testing.assert_allclose(more.slopes, 2.5 * metric.slopes, rtol=1e-5)
    same = metrics.update(metric, 2 * slope, jnp.zeros(20))
    bad = metrics.update(metric, jnp.nan * slope, jnp.ones(20))
    for other in (same, bad):
        jax.tree.map(np.testing.assert_array_equal, other, metric)


def test_many_columns_are_told_apart_one_by_one():
    slope = jnp.ones((20, 65)).at[:, 0].set(4.0)
    root = metrics.update(metrics.start(65, jnp.float32), slope, jnp.ones(20)).root
    assert root.shape == (65,)
    np.testing.assert_allclose(root[0] / root[1], 16**0.375, rtol=1e-2)


def test_what_is_missing_is_at_the_mean():
    metric = metrics.start(2, jnp.float32)
    np.testing.assert_array_equal(metrics.through(metric, jnp.asarray([[jnp.nan, 2.0]])), [[0.0, 2.0]])


def test_rows_kept_follow_the_columns():
    assert neighbours.kept(None, 8, 5, True) == 65_536
    assert neighbours.kept(None, 95, 5, True) == 40_000  # what 16 MB hold
    assert neighbours.kept(None, 401, 5, True) == neighbours.kept(None, 8, 5, False) == 0
    assert neighbours.kept(7, 8, 5, False) == 7


@pytest.mark.parametrize("rows", [-1, 2.5, "many", True, 2**20 + 1])
def test_rows_to_remember_are_a_number_that_can_be_searched(rows):
    with pytest.raises(ValueError, match="must be a whole number of rows from 0 to 1,048,576"):
        opvi.regressor(2, memory_rows=rows)


def test_rows_are_put_in_their_places_and_dropped_past_the_end():
    old, new = RNG.normal(size=(6, 2)).astype(np.float32), RNG.normal(size=(3, 2)).astype(np.float32)
    want = old.copy()
    want[[4, 1]] = new[[0, 2]]
    found = jax.jit(neighbours.put)(jnp.asarray(old), jnp.array([4, 6, 1]), jnp.asarray(new))
    np.testing.assert_array_equal(found, want)
