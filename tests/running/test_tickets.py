"""Labels that come later: scored by what was said in time, learnt when they come."""

import pickle

import jax
import numpy as np
import pytest

import opvi
from opvi.running import Engine, Ticket, Tickets
from opvi.running._tickets import _by_rows, _predictive

LINE = opvi.gauss_newton(opvi.linear_regression(2, noise=0.5), forgetting=1.0)


def rows(count: int = 12, seed: int = 0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((count, 2)).astype(np.float32)
    return X, (X @ [1.0, -2.0] + rng.standard_normal(count)).astype(np.float32)


def opened(sampler=LINE, **given):
    return Tickets(Engine(sampler, 0, batch=4), **given)


def test_the_score_is_that_of_the_prediction_made_in_time_and_learning_that_of_late_rows():
    X, y = rows()
    late = opened()
    first = late.ask(X[:4])
    then = late.predictive(first)
    now = LINE.predict(late.engine.state, X[:4])
    late.engine.feed((X[4:], y[4:]))  # others come in between
    settled = late.feed(first, y[:4])
    np.testing.assert_allclose(settled.log_density, now.log_density(y[:4]), rtol=1e-5)
    np.testing.assert_allclose(then.mean(), now.mean(), atol=1e-6)
    assert not np.allclose(settled.log_density, settled.fed.info.predicted.log_density, atol=0.1)  # that of today
    assert late.log_predictive == pytest.approx(settled.log_density.mean(), rel=1e-6)
    plain = Engine(LINE, 0, batch=4)
    plain.feed((X[4:], y[4:]))
    plain.feed((X[:4], y[:4]))
    for a, b in zip(*map(jax.tree.leaves, (late.engine.state, plain.state)), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(KeyError, match="ticket 0 is not open: it was used"):
        late.feed(first, y[:4])


@pytest.mark.slow
def test_labels_of_classes_weights_and_rows_that_wait_for_a_batch():
    sampler = opvi.calibrated(
        opvi.kfac(target := opvi.mlp(2, (3,), opvi.categorical(), outputs=3)), target, particles=2
    )
    X = rows()[0]
    late = opened(sampler)
    late.engine.feed((X, np.arange(12) % 3))
    ticket = late.ask(X[:3])
    said = sampler.predict(late.engine.state, X[:3])
    assert said.temperature is not None
    settled = late.feed(ticket, np.array([2, 1, 0]), [1.0, 0.0, 3.0])
    np.testing.assert_allclose(settled.log_density, said.log_density(np.array([2, 1, 0])), rtol=1e-4)
    assert settled.fed is None
    assert len(late.engine.waiting.weight) == 3
    assert late.scored == 4
    assert late.total == pytest.approx(float(settled.log_density @ [1, 0, 3]), rel=1e-5)


def test_a_mixture_keeps_its_weights():
    said = opvi.Predictive(opvi.Normal(np.zeros((2, 3)) + [[0.0], [5.0]], np.ones((2, 1))), np.log([0.9, 0.1]))
    back = _predictive(_by_rows(jax.tree.map(jax.numpy.asarray, said)))
    np.testing.assert_allclose(back.mean(), said.mean(), rtol=1e-6)
    np.testing.assert_allclose(back.log_density(np.ones(3)), said.log_density(np.ones(3)), rtol=1e-6)


def test_few_rows_wait_and_the_oldest_are_given_up():
    X, y = rows()
    late = opened(most=6)
    tickets = [late.ask(X[i : i + 3]) for i in (0, 3, 6)]
    assert (late.waiting, late.given_up) == (6, 3)
    with pytest.raises(KeyError, match="more than 6 rows"):
        late.feed(tickets[0], y[:3])
    late.drop(tickets[1])
    assert (late.waiting, late.given_up) == (3, 6)
    late.feed(tickets[2], y[6:9])
    assert late.waiting == 0
    assert np.isfinite(late.log_predictive)
    with pytest.raises(ValueError, match="at most 6 may wait"):
        late.ask(X)
    for most in (0, 2.5, True):
        with pytest.raises(ValueError, match="`most` is"):
            opened(most=most)


def test_what_fails_leaves_the_ticket_open_and_pickles_hold_tickets(monkeypatch):
    X, y = rows()
    late = opened()
    X_ours = X[:4].copy()
    ticket = late.ask(X_ours)
    X_ours[:] = 99  # the caller's own array
    with pytest.raises(ValueError, match="the ticket needs"):
        late.feed(ticket, y[:3])
    with pytest.raises(ValueError, match="data has leaves|shape"):
        late.feed(ticket, np.zeros((4, 2), np.float32))

    def stopped(*_, **__):
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(late.engine, "feed", stopped)
        with pytest.raises(InterruptedError):
            late.feed(ticket, y[:4])
    assert late.waiting == 4
    assert late.scored == 0
    again = pickle.loads(pickle.dumps(late))
    one, other = (each.feed(Ticket(*ticket), y[:4]) for each in (late, again))
    np.testing.assert_array_equal(one.log_density, other.log_density)
    np.testing.assert_array_equal(late.engine.state.particles, again.engine.state.particles)


@pytest.mark.parametrize(
    ("y", "kind", "match"),
    [
        ([0.0, np.nan, 0.0], ValueError, "row 1"),
        (np.zeros((3, 1)), ValueError, r"shape \(3, 1\)"),
        (["a", "b", "c"], TypeError, "numbers"),
    ],
)
def test_labels_that_cannot_be_scored_are_refused_and_lists_are_not(y, kind, match):
    x, _ = rows(3)
    tickets = opened()
    ticket = tickets.ask(x)
    with pytest.raises(kind, match=match):
        tickets.feed(ticket, y)
    with pytest.raises(ValueError, match="row 2"):
        tickets.ask(np.where(np.arange(3)[:, None] == 2, np.inf, x))
    with pytest.raises(TypeError, match="`ask` returned"):
        tickets.feed(7, [0.0])
    assert tickets.waiting == 3
    assert np.isfinite(tickets.feed(ticket, x[:, 0].tolist()).log_density).all()
