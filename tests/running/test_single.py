"""A classifier's rows one by one: whole networks learn batches, and what is cheap learns the rows in between."""

import pickle

import jax
import numpy as np
import pytest

import opvi
from opvi.predictive import Predictive
from opvi.running import Engine
from opvi.running._row_by_row import RowByRow
from tests.running.test_row_by_row import same

SAMPLER = opvi.classifier(2, 3, hidden=(3,), particles=4, memory_rows=64)


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, 2)).astype(np.float32)
    return X, (X[:, 0] + 0.3 * rng.normal(size=count) > 0).astype(np.int32) + (X[:, 1] > 1)


@pytest.fixture(scope="module")
def few():
    """What has learnt 7 rows, all of which wait; pickled, so that no test sees another's rows."""
    made, (X, y) = RowByRow(SAMPLER, 0), rows(67)
    made.feed((X[:7], y[:7]))
    return pickle.dumps(made)


@pytest.fixture(scope="module")
def many(few):
    made = pickle.loads(few)
    X, y = rows(67)
    made.feed((X[7:], y[7:]))
    return pickle.dumps(made)


@pytest.mark.slow
def test_a_question_before_a_row_changes_nothing(few):
    one, other = pickle.loads(few), pickle.loads(few)
    X, y = rows(5, seed=1)
    for at in range(5):
        here = slice(at, at + 1)
        one.ask(X[here], Predictive.probabilities)
        other.ask(X[:1] + 9, Predictive.probabilities)  # another row
        for made in (one, other):
            made.feed((X[here], y[here]))
    assert same(one.state, other.state)
    assert int(one.state.rows) == 12


@pytest.mark.slow
def test_a_state_from_elsewhere_is_looked_at_again(few):
    made, (x, _) = pickle.loads(few), rows(1, seed=1)
    before = made.ask(x, Predictive.probabilities)
    made.ahead.state = made.state._replace(log_weights=made.state.log_weights[::-1])
    assert not np.array_equal(made.ask(x, Predictive.probabilities), before)


@pytest.mark.slow
def test_one_row_is_answered_as_many_are(few):
    made, (X, _) = pickle.loads(few), rows(3, seed=1)
    together = made.ask(X, Predictive.probabilities)
    each = [made.ask(X[at : at + 1], Predictive.probabilities)[0] for at in range(3)]
    np.testing.assert_allclose(each, together, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.sum(each, 1), 1, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("label", "value"), [(7, 0.0), (1, np.nan)])
def test_a_row_without_a_class_or_a_number_teaches_nothing(few, label, value):
    made = pickle.loads(few)
    kept = made.state
    made.ahead.feed((np.full((1, 2), value, np.float32), np.full(1, label, np.int32)), None)
    assert same(made.state._replace(round=kept.round), kept)


@pytest.mark.slow
def test_whole_networks_are_those_of_batches_bit_for_bit(many):
    made, plain = pickle.loads(many), Engine(SAMPLER, 0, batch=20)
    plain.feed(rows(67))
    assert same(made.whole.state, plain.state)
    assert len(made.waiting) == 7
    assert int(made.state.rows) == 67


@pytest.mark.slow
def test_what_single_rows_taught_outlives_the_batch(many):
    made = pickle.loads(many)
    kept = jax.tree.map(np.array, made.state)
    made.settle()
    now = made.state
    for name in ("linear", "log_weights", "exponents", "memory"):
        assert same(getattr(now, name), getattr(kept, name)), name
    for name in ("moments", "first", "odd"):
        assert same(getattr(now, name), getattr(made.whole.state, name)), name
    assert same(now.held.networks, tuple(net.particles for net in made.whole.state.networks))
    assert not same(now.held.networks, kept.held.networks)
    assert int(now.held.stored) == 67 > int(kept.held.stored) == 60


@pytest.mark.slow
def test_a_pickled_model_resumes_bit_for_bit(many):
    one, other = pickle.loads(many), pickle.loads(many)
    X, y = rows(30, seed=1)
    one.feed((X, y))
    other.feed((X[:9], y[:9]))
    other = pickle.loads(pickle.dumps(other))
    other.feed((X[9:], y[9:]))
    assert same(one.state, other.state)
    assert same(one.whole.state, other.whole.state)


@pytest.mark.slow
def test_labels_that_repeat_are_foreseen_before_the_batch_is_full(many):
    made, x = pickle.loads(many), np.array([[0.9, 0.0]], np.float32)
    before = made.ask(x, Predictive.probabilities)[0, 2]
    for _ in range(8):
        made.feed((x, np.full(1, 2, np.int32)))
    assert made.ask(x, Predictive.probabilities)[0, 2] > max(0.5, before + 0.2)


def test_classifiers_without_networks_or_remembered_rows_have_nothing_in_between():
    assert SAMPLER.between is not None
    assert opvi.classifier(2, 3, hidden=(3,), particles=4, memory_rows=0).between is None
    assert opvi.classifier(2, 3, hidden=(), memory_rows=64).between is None
