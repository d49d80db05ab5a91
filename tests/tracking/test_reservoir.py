"""One reservoir: a uniform sample of the rows learnt, whatever the batches look like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.tracking import _reservoir as reservoirs

KEY = jax.random.key(0)
EXAMPLE = (np.zeros((1, 2), np.float32), np.zeros(1, np.int32))


def rows_from(first, count, kind=np.int32):
    """Rows whose columns and y are their number."""
    number = np.arange(first, first + count)
    return np.repeat(number[:, None], 2, 1).astype(np.float32), number.astype(kind)


@jax.jit
def offered(key, reservoir, batch, good=True):
    return reservoirs.offer(key, reservoir, batch, jnp.asarray(good))


def test_it_is_a_uniform_sample_of_whole_rows():
    """2,000 runs of 30 rows into 6 places: each row is kept in 1/5 of them, within 5 standard errors."""
    start = reservoirs.empty(reservoirs.layout_of(EXAMPLE), 6, jnp.float32)
    batches = [opvi.batch(rows_from(first, 10), pad_to=12) for first in (0, 10, 20)]

    @jax.jit
    @jax.vmap
    def kept(key):
        reservoir = start
        for batch in batches:
            reservoir = reservoirs.offer(key, reservoir, batch, jnp.array(True))
        return reservoir

    all_kept = kept(jax.random.split(KEY, 2000))
    X, y = (np.asarray(leaf) for leaf in all_kept.rows)
    assert (all_kept.seen == 30).all()
    np.testing.assert_array_equal(X, np.repeat(y[..., None], 2, 2))  # x and y of one row stay together
    np.testing.assert_allclose(np.bincount(y.ravel(), minlength=30) / 2000, 0.2, atol=5 * np.sqrt(0.16 / 2000))
    assert all(len(set(run)) == 6 for run in y)  # no row twice
    pairs = np.array([[(a in run) and (b in run) for a, b in ((0, 29), (3, 4), (28, 29))] for run in y.tolist()])
    chance = 6 * 5 / (30 * 29)  # of a pair of rows; within 5 standard errors
    np.testing.assert_allclose(pairs.mean(0), chance, atol=5 * np.sqrt(chance / 2000))


def test_the_sample_does_not_depend_on_how_rows_are_cut():
    samples = []
    for sizes, room in (([40], 40), ([1] * 40, 1), ([7, 20, 13], 20)):
        reservoir, first = reservoirs.empty(reservoirs.layout_of(EXAMPLE), 5, jnp.float32), 0
        for size in sizes:
            reservoir = offered(KEY, reservoir, opvi.batch(rows_from(first, size), pad_to=room))
            first += size
        samples.append(np.asarray(reservoir.rows[1]))
    np.testing.assert_array_equal(samples[0], samples[1])
    np.testing.assert_array_equal(samples[0], samples[2])
    assert len(set(samples[0])) == 5


def test_refused_and_padded_rows_leave_no_trace():
    start = reservoirs.empty(reservoirs.layout_of(EXAMPLE), 8, jnp.float32)
    reservoir = offered(KEY, start, opvi.batch(rows_from(1, 3), pad_to=20))
    assert int(reservoir.seen) == int(reservoir.filled) == 3
    refused = offered(KEY, reservoir, opvi.batch(rows_from(100, 20)), False)
    assert jax.tree.all(jax.tree.map(np.array_equal, refused, reservoir))
    last = offered(KEY, refused, opvi.batch(rows_from(4, 5), pad_to=20))
    np.testing.assert_array_equal(last.rows[1], np.arange(1, 9))
    drawn = reservoirs.draw(KEY, reservoir, 500)
    assert set(np.asarray(drawn[1]).tolist()) == {1, 2, 3}


@pytest.mark.parametrize("poison_first", [True, False])
def test_a_refused_batch_leaves_no_phantom_rows(poison_first):
    """The rows kept are those learnt, though the stream counted the refused ones too."""
    plain = opvi.langevin(opvi.linear_regression(2), step=1e-4)
    sampler = opvi.remembering(plain, 50, again=0, example=rows_from(0, 1, np.float32))
    state = sampler.init(KEY, 3)
    good, bad = rows_from(1, 20, np.float32), (np.full((20, 2), np.nan, np.float32), np.zeros(20, np.float32))
    for data in (bad, good) if poison_first else (good, bad):
        state, _ = sampler.step(KEY, state, opvi.batch(data))
    X, y = opvi.tracking.kept_rows(state)
    np.testing.assert_array_equal(y, good[1])
    np.testing.assert_array_equal(X, good[0])


def test_the_rows_kept_are_found_in_any_state():
    plain = opvi.langevin(opvi.linear_regression(2), step=1e-9)
    rows = rows_from(0, 60, np.float32)
    keeper = opvi.remembering(opvi.watched(opvi.replay(plain, rows, memory_rows=30)), 4, again=0, example=rows)
    state, _ = opvi.run(keeper, opvi.stream(rows, 20), 0, particles=3)
    assert opvi.tracking.kept_rows(state)[1].shape == (4,)  # of two reservoirs the outermost
    assert opvi.tracking.kept_rows(state.inner)[1].shape == (30,)
    with pytest.raises(TypeError, match=r"opvi\.remembering"):
        opvi.tracking.kept_rows(plain.init(KEY, 3))
    with pytest.raises(ValueError, match="give `example="):
        opvi.remembering(plain, 5, again=0)
    with pytest.raises(TypeError, match="has no `relearn`"):
        opvi.remembering(plain, 5, example=EXAMPLE)
    with pytest.raises(ValueError, match="`memory_rows` and `again` are 0 and 0"):
        opvi.remembering(plain, 0, again=0, example=EXAMPLE)


def test_numbers_are_not_kept_as_whole_ones():
    start = reservoirs.empty(reservoirs.layout_of(EXAMPLE), 3, jnp.float32)
    with pytest.raises(TypeError, match="float32, but the example's are int32"):
        reservoirs.offer(KEY, start, opvi.batch(rows_from(0, 5, np.float32)), jnp.array(True))
