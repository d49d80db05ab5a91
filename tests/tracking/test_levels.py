"""The levels of values that repeat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.tracking.experts import Context, Rows, Units
from opvi.tracking.experts import _levels as levels
from opvi.tracking.experts._levels import Levels


def rows_of(x, weight=None):
    x = jnp.asarray(x, jnp.float32)
    weight = jnp.ones(len(x)) if weight is None else jnp.asarray(weight, jnp.float32)
    none = jnp.zeros(len(x))
    return Rows(x, jnp.zeros_like(x), none, weight, none, none)


def learnt(x, error, weight=None, half_life=None):
    expert, rows = Levels(half_life), rows_of(x, weight)
    state = expert.init(None, rows.x.shape[1], jnp.float32)
    belief = expert.predict(state, rows)
    one, zero = jnp.ones(len(rows.x)), jnp.zeros(())
    context = Context(belief, one, rows.weight, jnp.asarray(error, jnp.float32), rows.z, zero, zero, zero > 0)
    return jax.jit(expert.learn)(None, state, rows, context)


def asked(state, x, half_life=None):
    said = jax.jit(Levels(half_life).predict)(state, rows_of(x)).mean
    return np.asarray(said).T.reshape(len(x), -1, len(levels.RATES))


def test_a_level_is_the_discounted_mean_of_the_errors_at_its_value():
    table = learnt([[7, 1], [7, 2], [3, 2], [7, 0.0]], [1.0, 4.0, 9.0, -2.0], [1, 0.5, 1, 1])
    found = asked(table, [[7, -0.0], [3, 5], [np.nan, 2]])
    for r, rate in enumerate(levels.RATES):
        first = rate * (rate**0.5 * 1 + 0.5 * 4) - 2, rate * (rate**0.5 + 0.5) + 1
        np.testing.assert_allclose(found[0, 0, r], first[0] / (first[1] + levels.SHRINKAGE), rtol=1e-5)
        np.testing.assert_allclose(found[0, 1, r], -2 / 1.5, rtol=1e-5)  # -0 is 0
        np.testing.assert_allclose(found[1, :, r], [9 / 1.5, 0], rtol=1e-5)  # a value that was never there
        second = rate * 0.5 * 4 + 9, rate * 0.5 + 1
        np.testing.assert_allclose(found[2, :, r], [0, second[0] / (second[1] + levels.SHRINKAGE)], rtol=1e-5)


def test_values_in_one_slot_take_turns_and_nothing_comes_of_rows_without_weight_or_value():
    values = np.arange(5000.0)[:, None]
    place = np.asarray(levels._places(jnp.asarray(values, jnp.float32)))
    other = np.flatnonzero(place[1:, 0] == place[0, 0])[0] + 1.0
    assert len(np.unique(place)) > 1000  # spread over all slots
    table = learnt([[0.0], [other]], [5.0, 8.0])
    assert not asked(table, [[0.0]]).any()
    assert asked(table, [[other]]).all()
    nothing = learnt([[1.0], [np.nan], [2.0]], [5.0, 5.0, np.nan], [0, 1, 1])
    assert not np.asarray(nothing.table).any()


def test_levels_fade_by_the_half_life():
    table = learnt([[1.0]], [6.0], half_life=10.0)
    later = table._replace(clock=table.clock + 10)
    np.testing.assert_allclose(asked(later, [[1.0]], 10.0), 3 / (0.5 + levels.SHRINKAGE))


def test_levels_follow_the_units_of_y():
    table, one = learnt([[1.0]], [6.0]), jnp.ones(1)
    units = Units(0 * one, one, one > 1, 0 * one, jnp.float32(0.5), jnp.float32(3.0))
    np.testing.assert_allclose(asked(Levels().rescale(table, units), [[1.0]]), asked(table, [[1.0]]) / 2)


@pytest.fixture(scope="module")
def individuals():
    """Thirty individuals with a level each, in random order."""
    rng = np.random.default_rng(5)
    who, x = rng.integers(0, 30, 400), rng.normal(size=400)
    y = 3 * rng.normal(size=30)[who] + x + 0.3 * rng.normal(size=400)
    return np.stack([x, who], 1).astype(np.float32), y.astype(np.float32)


def run(made, data):
    engine = opvi.running.Engine(made, 0, batch=20)
    return engine, np.asarray(engine.feed(data).info.predicted.mean).ravel()


@pytest.mark.slow
def test_a_regressor_learns_the_levels_of_individuals(individuals):
    X, y = individuals
    settings = {"hidden": (5,), "particles": 2, "memory_rows": 500, "process": False}  # which would find them by itself
    with_, without = (opvi.regressor(2, levels=on, **settings) for on in (True, False))
    engine, said = run(with_, individuals)
    _, plain = run(without, individuals)
    error, before = (np.sqrt(np.mean((mean - y)[200:] ** 2)) for mean in (said, plain))
    assert error < 0.65 * before
    # A question is answered as the row is predicted before it is learnt.
    ahead = np.asarray(engine.sampler.predict(engine.state, X[:20]).mean())
    np.testing.assert_allclose(ahead, np.asarray(engine.feed((X[:20], y[:20])).info.predicted.mean).ravel(), atol=1e-4)


@pytest.mark.slow
def test_measurements_are_predicted_as_without_levels(individuals):
    rng = np.random.default_rng(6)
    X = rng.normal(size=(300, 2)).astype(np.float32)
    made = [opvi.regressor(2, hidden=(5,), particles=2, memory_rows=500, levels=on) for on in (True, False)]
    (_, said), (_, plain) = (run(one, (X, X[:, 0] ** 2)) for one in made)
    np.testing.assert_allclose(said, plain, atol=1e-5)


def test_models_without_rows_and_wide_ones_have_no_levels():
    assert Levels() in opvi.regressor(64).experts
    for made in (opvi.regressor(65), opvi.regressor(3, memory_rows=0), opvi.regressor(3, hidden=())):
        assert Levels() not in made.experts
