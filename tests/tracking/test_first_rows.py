"""However the first rows come, what is learnt from them is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.tracking._inside import find, replaced
from opvi.tracking._wrappers import _first_rows as starting
from opvi.tracking._wrappers._scaling import Moments
from opvi.tracking.experts._neighbours import NeighboursState
from opvi.types import Batch
from tests.tracking.parts import head, nets, units

FEATURES = 3
SMALL = opvi.regressor(FEATURES, hidden=(6,), particles=5)  # as in test_regressor.py: programs are compiled once
KEY = jax.random.key(0)


def drawn(rows, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, FEATURES))
    y = np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=rows)
    return X * [1e3, 1e-2, 1] + [5e3, 0, -3], 70 * y + 500


def learnt(X, y, sizes):
    """The state after batches of these sizes, padded to 20 rows but for single ones."""
    state, at = SMALL.init(KEY), 0
    for size in sizes:
        rows = slice(at, at + size)
        state, _ = SMALL.step(KEY, state, opvi.batch((X[rows], y[rows]), pad_to=1 if size == 1 else 20))
        at += size
    return state


@pytest.fixture(scope="module")
def together():
    return learnt(*drawn(60), [20, 20, 20])


def off(state, other, sd):
    """Root mean squared difference of predictions."""
    X = drawn(50, seed=1)[0]
    means = [np.asarray(SMALL.predict(s, X).mean()) for s in (state, other)]
    return np.sqrt(np.mean(np.subtract(*means) ** 2)) / sd


@pytest.mark.parametrize("sizes", [[1] * 60, [7] * 8 + [4]])
def test_rows_teach_the_same_in_any_company(together, sizes):
    X, y = drawn(60)
    state = learnt(X, y, sizes)
    np.testing.assert_allclose(units(state).moments.mean, units(together).moments.mean, rtol=1e-4)
    assert int(state.rows) == 60
    assert off(state, together, y.std()) < 0.15


def test_few_rows_are_learnt_in_their_own_units():
    """After 8 rows, one by one: as after all 8 at once, and nothing is scored yet."""
    X, y = drawn(8)
    one_by_one, at_once = learnt(X, y, [1] * 8), learnt(X, y, [8])
    for state in (one_by_one, at_once):
        assert float(head(state).rounds) == 0
        moments, scale = units(state)[:2]
        assert int(starting.count(state.model.own)) == int(state.rows) == float(moments.seen) == 8
        assert int(find(state, NeighboursState).seen) == 8
        np.testing.assert_allclose(scale.mean[:-1], X.mean(0), rtol=1e-3)
        np.testing.assert_allclose(scale.sd[:-1], X.std(0), rtol=1e-3)
    assert off(one_by_one, at_once, y.std()) < 0.1
    assert float(jnp.abs(one_by_one.particles - nets(one_by_one).begin).max()) > 0.1


def test_an_empty_batch_before_the_first_rows_are_enough_changes_nothing():
    X, y = drawn(8)
    state = learnt(X, y, [8])
    after, _ = SMALL.step(KEY, state, opvi.batch((X, y), weight=np.zeros(8), pad_to=20))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after._replace(round=state.round)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_wild_target_among_the_first_does_not_set_the_units(together):
    X, y = drawn(60)
    wild = y.copy()
    wild[0] = 1e7
    state = learnt(X, wild, [1] * 60)
    assert float(units(state).scale.sd[-1]) < 3 * float(units(together).scale.sd[-1])
    assert off(state, together, y.std()) < 0.5


def drawn_by_the_thousand(seed=3):
    rng = np.random.default_rng(seed)
    X = rng.uniform(size=(600, FEATURES))
    return X, np.sin(4 * X[:, 0]) + X[:, 1] + 0.05 * rng.normal(size=600)


def predicted(X, y):
    state, history = opvi.run(SMALL, opvi.stream((X, y), 20), KEY, record=_means)
    return state, np.asarray(history.record).ravel()


def _means(state, info, batch):
    return info.predicted.mean


@pytest.mark.slow
def test_values_that_stand_for_none_cost_little():
    """One row in 16 has a -999, one of the first among them: errors on the others, from row 200 on."""
    X, y = drawn_by_the_thousand()
    dirty, hit = X.copy(), np.zeros(600, bool)
    for place, column in ((3, 0), *((at, at // 16 % FEATURES) for at in range(30, 600, 16))):
        dirty[place, column], hit[place] = -999, True
    late = ~hit & (np.arange(600) >= 200)
    (_, clean), (state, said) = predicted(X, y), predicted(dirty, y)
    errors = [np.sqrt(np.mean((y - mean)[late] ** 2)) for mean in (clean, said)]
    assert errors[1] < 1.15 * errors[0]
    np.testing.assert_allclose(units(state).scale.sd[:-1], X.std(0), rtol=0.2)


def test_a_value_that_stands_for_none_does_not_say_where_a_column_is():
    """When units change, it is the same as the column's mean in a row of a tenth of the weight."""
    X, y = drawn_by_the_thousand()
    X = 3 * X
    state, _ = predicted(X[:200], y[:200])
    # Columns four times as wide: networks stay the same where columns are now.
    moments = units(state).moments
    state = replaced(state, Moments, lambda _: moments._replace(seen=moments.seen + 10, square=16 * moments.square))
    x, weight = X[200:220].astype(np.float32), np.ones(20, np.float32)
    learnt = []
    for value, share in ((-999, 1), (units(state).scale.mean[0], 0.1)):
        x[7, 0], weight[7] = value, share
        batch = Batch((jnp.asarray(x), jnp.asarray(y[200:220], jnp.float32)), jnp.asarray(weight))
        learnt.append(SMALL.step(KEY, state, batch)[0])
    assert (units(learnt[0]).scale.sd[:-1] > 3 * units(state).scale.sd[:-1]).all()
    np.testing.assert_allclose(learnt[0].particles, learnt[1].particles, atol=0.05)  # the mean in the new units


def test_a_column_that_moves_for_good_is_followed():
    """Not missing values but a sensor with another zero: what was learnt of it stays learnt."""
    X, y = drawn_by_the_thousand()
    _, still = predicted(X, y)
    X[300:, 0] += 1000
    state, said = predicted(X, y)
    assert abs(float(units(state).scale.mean[0]) - X[300:, 0].mean()) < 0.2
    errors = [np.sqrt(np.mean((y - mean)[400:] ** 2)) for mean in (still, said)]
    assert errors[1] < 1.5 * errors[0]


def test_values_after_a_rest_are_values():
    """A column of rounding errors around 0 that is something else now and then; one with more of the same -999."""
    rng = np.random.default_rng(5)
    X, _ = drawn_by_the_thousand()
    awake = rng.random(600) < 0.4
    X[:, 0] = np.where(awake, rng.uniform(size=600), 1e-17 * rng.uniform(size=600))
    X[rng.permutation(20)[:6], 1] = -999
    state, said = predicted(X, np.where(awake, 3 * X[:, 0], 0) + 0.05 * rng.normal(size=600))
    np.testing.assert_allclose(units(state).scale.sd[:-1], [X[:, 0].std(), X[20:, 1].std(), X[:, 2].std()], rtol=0.2)
    assert np.isfinite(said).all()
    assert np.abs(said[200:] - 3 * X[200:, 0]).mean() < 0.1
