"""Rows that come one by one: whole networks learn batches, last layers the rows in between."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi._cpu import inline_device
from opvi.filters._covariance import Blocks, within
from opvi.predictive import Predictive
from opvi.running import Engine
from opvi.running._row_by_row import RowByRow
from opvi.tracking import _levels as levels
from opvi.tracking._regressor_between import last_layers
from opvi.tracking._scaling import divisor

SAMPLER = opvi.regressor(2, hidden=(3,), particles=4, memory_rows=64)


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, 2)).astype(np.float32)
    return X, (np.sin(X[:, 0]) + X[:, 1] + 0.1 * rng.normal(size=count)).astype(np.float32)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.fixture(scope="module")
def fed():
    """What has learnt 67 rows, of which 7 wait; pickled, since learning more changes it."""
    made = RowByRow(SAMPLER, 0)
    X, y = rows(67)
    for at in range(67):
        made.feed((X[at : at + 1], y[at : at + 1]))
    return pickle.dumps(made)


@pytest.mark.slow
def test_whole_networks_are_those_of_batches_bit_for_bit(fed):
    made, plain = pickle.loads(fed), Engine(SAMPLER, 0, batch=20)
    plain.feed(rows(67))
    assert same(made.whole.state, plain.state)
    assert len(made.waiting) == 7
    assert int(made.state.rows) == 67  # and these have seen all
    assert made.whole.state.particles.devices() == made.whole.key.devices() == {inline_device()}  # in this thread


@pytest.mark.slow
def test_a_pickled_model_resumes_bit_for_bit(fed):
    one, other = pickle.loads(fed), pickle.loads(fed)
    X, y = rows(30, seed=1)
    one.feed((X, y))
    other.feed((X[:9], y[:9]))
    other = pickle.loads(pickle.dumps(other))
    other.feed((X[9:], y[9:]))
    assert same(one.state, other.state)
    assert same(one.whole.state, other.whole.state)


@pytest.mark.slow
def test_predictions_know_of_rows_that_wait(fed):
    made, x = pickle.loads(fed), np.array([[0.3, 0.2]], np.float32)

    def said():
        return made.ask(x, Predictive.mean)[0]

    before, batches = said(), np.asarray(made.whole.state.particles)
    for _ in range(5):
        made.feed((x, np.full(1, before + 0.5, np.float32)))
    assert said() > before + 0.1
    assert np.array_equal(made.whole.state.particles, batches)


@pytest.mark.slow
def test_a_copy_learns_the_first_rows_and_last_layers_those_in_between():
    made, (X, y), learnt = RowByRow(SAMPLER, 0), rows(20), []
    for at in range(19):
        made.feed((X[at : at + 1], y[at : at + 1]))
        learnt.append(int(made.first.state.rows))
        assert int(made.state.rows) == at + 1
    assert learnt == [1, 2, 3, 3, 5, 5, 5, 8, 8, 8, 8, *[12] * 6, 18, 18]
    older = RowByRow.__new__(RowByRow)  # as an older opvi pickled it
    older.__setstate__({"whole": made.whole, "ahead": made.first, "waiting": made.waiting})
    assert older.first is made.first
    assert len(older.engines) == 3
    older.feed((X[19:], y[19:]))
    assert older.first is None
    assert int(older.state.rows) == 20


@pytest.mark.slow
def test_a_row_is_looked_at_once_and_answered_as_many_are(fed):
    one, other = pickle.loads(fed), pickle.loads(fed)
    X, y = rows(4, seed=3)
    together = one.ask(X, Predictive.mean)
    np.testing.assert_allclose(one.ask(X[:1], Predictive.mean), together[:1], rtol=1e-4)  # the process cancels digits
    other.ask(X[1:2], Predictive.mean)  # another row
    for made in (one, other):
        made.feed((X[:1], y[:1]))
    assert same(one.state, other.state)
    assert not np.array_equal(one.ask(X[:1], Predictive.mean), together[:1])


@pytest.mark.slow
def test_a_row_that_is_not_finite_teaches_nothing(fed):
    made, (X, y) = pickle.loads(fed), rows(1)
    particles, remembered = np.array(made.state.particles), int(made.state.memory.seen)
    for x, target in ((X * np.nan, y), (X, y * np.inf)):
        made.ahead.feed((x, target), None)
        assert np.array_equal(made.state.particles, particles)
        assert int(made.state.memory.seen) == remembered
    assert np.isfinite(made.ask(X, Predictive.mean)).all()


@pytest.mark.slow
def test_what_errors_taught_outlives_the_batch(fed):
    made = pickle.loads(fed)
    scale = made.state.scale
    made.ahead.state = made.state._replace(scale=scale._replace(sd=2 * scale.sd))  # units that the batch will change
    known, rescaled = made.state.calibration, divisor(made.state.scale)[-1] ** 2
    sizes = float(known.error * rescaled), float(known.rounds), np.array(made.state.memory.last)
    made.settle()
    now = made.state
    assert float(now.calibration.error * divisor(now.scale)[-1] ** 2) == pytest.approx(sizes[0], rel=1e-4)
    assert float(now.calibration.rounds) == sizes[1] > 2
    assert np.array_equal(now.memory.last, sizes[2])
    assert (np.asarray(now.memory.last[1]) > 0).all()
    # The first half of the last layers takes the covariances of whole networks, the others keep their own.
    whole = last_layers(made.whole.state.past.matrices, SAMPLER.blocks, SAMPLER.between.blocks)
    assert np.allclose(now.past.matrices[:2], whole[:2])
    assert not np.allclose(now.past.matrices[2:], whole[2:])


@pytest.mark.slow
def test_a_jump_is_learnt_before_the_batch_is_full(fed):
    made = pickle.loads(fed)
    X, y = rows(12, seed=2)
    counts = []
    for at in range(12):
        made.feed((X[at : at + 1], y[at : at + 1] + 40))
        counts.append(len(made.waiting))
    assert 0 in counts[:11]
    assert float(made.ask(X[:1], Predictive.mean)[0]) > 20


def test_covariances_of_last_layers_are_found_in_blocks():
    sampler = opvi.regressor(3, hidden=(4,), particles=1)
    dim, last = sampler.network.dim, sampler.between.blocks
    whole = within(*sampler.network.units, 12 * dim)
    assert len(whole.order) > 1
    rng = np.random.default_rng(0)
    root = rng.normal(size=(dim + 1, dim + 1))
    C = (root @ root.T).astype(np.float32)
    C[dim:] = C[:, dim:] = 0  # padding
    matrices = jnp.asarray(C[whole.order[:, :, None], whole.order[:, None, :]])[None]
    found = np.asarray(last_layers(matrices, whole, last))[0, 0]
    block = np.zeros(dim, int)
    for k, order in enumerate(whole.order):
        block[order[order < dim]] = k
    mine = np.arange(dim - 5, dim)
    expected = np.where(block[mine][:, None] == block[mine][None], C[np.ix_(mine, mine)], 0)
    assert np.array_equal(found, expected)
    all_ = Blocks(np.arange(dim)[None], dim)
    assert np.array_equal(last_layers(jnp.asarray(C[None, None, :dim, :dim]), all_, last)[0, 0], C[np.ix_(mine, mine)])


def test_a_part_of_the_weights_is_gathered_and_put_back():
    part, w = Blocks(np.arange(3, 5)[None], 5), jnp.arange(10.0).reshape(2, 5)
    assert np.array_equal(part.gather(w)[:, 0], w[:, 3:])
    assert np.array_equal(part.scatter(part.gather(w)), w.at[:, :3].set(0))


def test_the_last_errors_are_discounted_row_by_row():
    errors, weight = jnp.array([1.0, -2.0, 4.0]), jnp.array([1.0, 1.0, 0.0])
    at_once = levels.discounted(jnp.ones((2, 2)), errors, weight)
    expected = [[rate**2 + rate - 2, rate**2 + rate + 1] for rate in levels.LAST_RATES]
    assert np.allclose(at_once, np.array(expected).T)
