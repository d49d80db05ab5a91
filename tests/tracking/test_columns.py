"""Moments of columns with values that stand for "none"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.running import Engine
from opvi.tracking._wrappers import _columns as columns
from opvi.tracking._wrappers import _scaling as scaling

ROOM, FEATURES = 20, 3
learn = jax.jit(columns.learn)


def learnt(X, sizes, begin=None):
    """The moments after rows in pieces of these sizes, padded to one length, and the shares of odd values."""
    held = (
        scaling.start(FEATURES, np.float32),
        columns.no_rows(ROOM, FEATURES, np.float32),
        jnp.zeros(FEATURES, np.float32),
    )
    held = begin or held
    for rows in np.split(X.astype(np.float32), np.cumsum(sizes)[:-1]):
        x = np.zeros((ROOM, FEATURES), np.float32)
        x[: len(rows)] = rows
        held = learn(*held, x, (np.arange(ROOM) < len(rows)).astype(np.float32))
    return held


def drawn(rows, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, FEATURES)) * [1, 100, 0.01] + [0, 5, -3]


@pytest.mark.parametrize("sizes", [[20] * 10, [1] * 30 + [17] * 10])
def test_moments_of_plain_rows_are_theirs_in_any_pieces(sizes):
    X = drawn(200)
    moments, _, odd = learnt(X, sizes)
    assert float(moments.seen) == 200
    np.testing.assert_allclose(moments.mean, X.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(moments.square, X.var(0) * 200, rtol=1e-3)
    assert not np.any(odd)


@pytest.mark.parametrize("sizes", [[20] * 10, [1] * 30 + [17] * 10])
def test_values_that_stand_for_none_leave_no_trace(sizes):
    """Some of the first rows, and a twentieth of the others."""
    X, hit = drawn(200), np.random.default_rng(1).random((200, FEATURES)) < 0.05
    hit[[2, 7], [0, 1]] = True
    moments, _, _ = learnt(np.where(hit, -99_999.0, X), sizes)
    clean = np.where(hit, np.nan, X)
    mean, sd = np.nanmean(clean, 0), np.nanstd(clean, 0)
    np.testing.assert_allclose(np.sqrt(moments.square / 200), sd, rtol=0.08)
    np.testing.assert_allclose((np.asarray(moments.mean) - mean) / sd, 0, atol=0.03)


def test_a_column_that_moves_for_good_is_followed():
    X = drawn(400)
    X[200:, 2] += 1000
    moments, _, odd = learnt(X, [20] * 20)
    np.testing.assert_allclose(moments.mean[2], X[200:, 2].mean(), atol=0.01)
    np.testing.assert_allclose(np.sqrt(moments.square[2] / 400), 0.01, rtol=0.2)
    assert float(odd[2]) == 0


def test_an_indicator_is_a_value_however_rare_it_was():
    """Once among the first rows, not for 20,000, then in every tenth row: those are no gaps."""
    X = drawn(20_400)
    X[:, 0] = 0
    X[[3, *range(20_000, 20_400, 10)], 0] = 1
    X[20_005, 1] = -99_999
    moments, _, _ = learnt(X, [20] * 1020)
    np.testing.assert_allclose(moments.mean[0], X[:, 0].mean(), rtol=0.05)  # the first is clipped
    assert abs(float(moments.mean[1]) - 5) < 3


def test_a_state_whose_first_rows_are_elsewhere_goes_on():
    """Saved by a version that did not keep them."""
    X = drawn(400)
    moments, first, odd = learnt(X[:200], [20] * 10)
    after, kept, _ = learnt(X[200:], [20] * 10, (moments, jnp.zeros_like(first), odd))
    np.testing.assert_allclose(after.mean, X.mean(0), rtol=1e-4, atol=1e-4)
    assert not np.any(kept)


def test_a_classifier_keeps_what_the_other_values_say():
    """One entry in a hundred is -999: on rows without one, predictions are as good as without them."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(600, FEATURES))
    y = (X @ [2, -1, 1] + 0.3 * rng.logistic(size=600) > 0).astype(np.int32)
    hit = rng.random(X.shape) < 0.01
    hit[3, 0] = True
    late = ~hit.any(1) & (np.arange(600) >= 200)

    def score(X):
        engine = Engine(opvi.classifier(FEATURES, 2, hidden=()), 0)
        return engine.feed((X.astype(np.float32), y)).info.predicted.log_density.ravel()[late].mean()

    assert score(np.where(hit, -999.0, X)) > score(X) - 0.01
