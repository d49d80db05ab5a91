"""Wrappers share one state, compose in any order, and change only what they say."""

from functools import partial

import jax
import numpy as np
import pytest

import opvi

KEY = jax.random.key(0)
TARGET = opvi.linear_regression(2)
LINE = opvi.regressor(2, hidden=(), particles=2)
EXAMPLE = (np.zeros((1, 2), np.float32), np.zeros(1, np.float32))


def drawn(rows, turns_at=None):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, 2))
    sign = np.where(np.arange(rows) < (rows if turns_at is None else turns_at), 1, -1)
    y = sign * (X[:, 0] - X[:, 1] / 2) + 0.1 * rng.normal(size=rows)
    return X.astype(np.float32), y.astype(np.float32)


def small():
    return opvi.regressor(2, hidden=(3,), particles=5)


def wrapped(sampler, order):
    for wrapper in order:
        sampler = wrapper(sampler)
    return sampler


def runs(orders, sampler, data, particles=None):
    return [opvi.run(wrapped(sampler, order), opvi.stream(data, 20), KEY, particles=particles) for order in orders]


def assert_same_particles(done):
    first = np.asarray(done[0][0].particles)
    assert np.isfinite(first).all()
    for state, _ in done[1:]:
        np.testing.assert_array_equal(state.particles, first)


@pytest.mark.slow
def test_the_regressor_learns_the_same_bits_whatever_the_order():
    """Watched or not, and a sample kept or not: no bit of the particles differs; learning rows again is what counts."""
    remember = partial(opvi.remembering, memory_rows=50, example=EXAMPLE)
    keep = partial(opvi.remembering, memory_rows=20, again=0, example=EXAMPLE)
    done = runs([(opvi.watched, remember), (remember, opvi.watched)], LINE, drawn(300))
    assert_same_particles(done)
    without = runs([(), (opvi.watched, keep)], LINE, drawn(300))
    assert_same_particles(without)
    assert not np.array_equal(done[0][0].particles, without[0][0].particles)


@pytest.mark.slow
def test_any_sampler_learns_the_same_bits_whatever_the_order():
    calibrate = partial(opvi.calibrated, target=TARGET, particles=4)
    again = partial(opvi.replay, example=EXAMPLE, memory_rows=40, steps=3)
    keep = partial(opvi.remembering, memory_rows=10, again=0, example=EXAMPLE)
    sampler = opvi.langevin(TARGET, step=1e-3)
    orders = [
        (opvi.watched, calibrate, again),
        (again, opvi.watched, calibrate),
        (calibrate, again, opvi.watched),
        (keep, again),
    ]
    done = runs(orders, sampler, drawn(100), particles=4)
    assert_same_particles(done)
    for state, history in done:
        assert int(state.rows) == history.info.rows[-1] == 100
        assert int(state.round) == 5
    plain, _ = opvi.run(sampler, opvi.stream(drawn(100), 20), KEY, particles=4)
    assert not np.array_equal(done[0][0].particles, plain.particles)


@pytest.mark.slow
@pytest.mark.parametrize("order", [0, 1])
def test_a_change_is_heard_of_through_every_wrapper(order):
    remember = partial(opvi.remembering, memory_rows=20, again=0, example=EXAMPLE)
    orders = [(opvi.watched, remember), (remember, opvi.watched)]
    ((state, history),) = runs(
        orders[order : order + 1], opvi.regressor(2, hidden=(), particles=3), drawn(3000, turns_at=2400)
    )
    at = np.flatnonzero(history.info.changed)
    np.testing.assert_array_equal(at, np.flatnonzero(history.info.probability > 0.95))
    assert len(at) >= 1
    assert (at >= 120).all()
    assert at[0] < 140
    watch = state if isinstance(state.own, opvi.tracking._drift.Detector) else state.inner
    assert int(watch.own.changes) == len(at)


def test_what_nobody_watches_says_nothing_of_changes():
    sampler = opvi.remembering(LINE, 20, again=0, example=EXAMPLE)
    _, info = jax.eval_shape(sampler.step, KEY, sampler.init(KEY), opvi.batch(drawn(20)))
    assert info.changed is None
    assert info.probability is not None  # the regressor's own


def test_samplers_that_do_not_act_on_jumps_say_so():
    said = "; jumps of the data are reported, and nothing else is done"
    assert opvi.watched(LINE).renews
    assert not opvi.watched(opvi.langevin(TARGET, step=1e-3)).renews
    for quiet in (opvi.classifier(2, 2, hidden=()), opvi.regressor(2, hidden=(), particles=2, half_life=50)):
        assert opvi.watched(quiet).about == quiet.about + said
    assert opvi.watched(opvi.remembering(LINE, 9, again=0, example=EXAMPLE)).renews


@pytest.mark.slow
def test_learning_again_passes_through():
    outer = opvi.watched(opvi.remembering(LINE, 20, example=EXAMPLE))
    state, batch = outer.init(KEY), opvi.batch(drawn(20))
    for _ in range(3):  # the first rows wait
        state, _ = outer.step(KEY, state, batch)
    again = outer.relearn(KEY, state, batch)
    np.testing.assert_array_equal(again.particles, LINE.relearn(KEY, state.inner.inner, batch).particles)
    assert not np.array_equal(again.particles, state.particles)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.own, state.own))
    assert jax.tree.all(jax.tree.map(np.array_equal, again.inner.own, state.inner.own))
    assert not hasattr(opvi.watched(opvi.langevin(TARGET, step=1e-3)), "relearn")


def test_equal_settings_are_equal_and_what_they_say_passes_through():
    sampler = opvi.langevin(TARGET, step=1e-3)
    for make in (
        opvi.watched,
        partial(opvi.calibrated, target=TARGET),
        partial(opvi.replay, example=EXAMPLE),
        partial(opvi.remembering, memory_rows=9, again=0, example=EXAMPLE),
    ):
        assert make(sampler) == make(sampler)
        assert hash(make(sampler)) == hash(make(sampler))
        assert make(sampler) != make(opvi.langevin(TARGET, step=1e-2))
    told = opvi.watched(opvi.remembering(small(), 1000, example=EXAMPLE))
    assert str(told) == told.about == f"{small().about}; learns again from 1,000 rows kept"
    assert opvi.remembering(small(), 9, again=0, example=EXAMPLE).about.endswith("; keeps a sample of 9 rows")
    assert opvi.calibrated(sampler, TARGET, about="mine").about == "mine"
