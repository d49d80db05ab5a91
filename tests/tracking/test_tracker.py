"""The front door and what stands behind it: the choice, calibration by predicting first, replay, the watch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.tracking.experts._networks import usual_settings

KEY = jax.random.key(0)
OWN = opvi.target(lambda v: -(v**2).sum() / 2, lambda v, y: -((y - v[0]) ** 2) / 2, lambda key: jnp.zeros(1))


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        (opvi.gaussian_mixture(), {}, "IBIS, 512 particles, rows stored in up to 64 MB: the posterior of all rows"),
        (OWN, {"memory": 2e6, "particles": 100}, "IBIS, 100 particles, rows stored in up to 2 MB"),
        (OWN, {"memory": 0}, "SL-OPVI, 100 particles, no stored rows (`memory=0`)"),
        (opvi.linear_regression(2, noise=opvi.targets.Gamma()), {}, "IBIS, 512 particles"),
        (opvi.linear_regression(100), {}, "IBIS, 128 particles"),
        (opvi.linear_regression(1000), {}, "Gauss–Newton"),
        (opvi.mlp(3, (4,)), {}, "IBIS"),
        (opvi.mlp(8, (50,), prior_variance=None), {}, "full covariances: 501 parameters take 20 of 64 MB"),
        (opvi.mlp(8, (50,), prior_variance=None), {"budget": 5e6}, "blocks of"),
        (opvi.mlp(8, (50,), prior_variance=None), {"half_life": math.inf}, "nothing is forgotten"),
        (opvi.mlp(8, (50,), opvi.bernoulli()), {}, "nothing is forgotten"),
        (opvi.mlp(300, (40,), opvi.categorical(), outputs=3, prior_variance=None), {"budget": 1e6}, "KFAC"),
        (opvi.mlp(8, (150,), prior_variance=opvi.targets.Gamma()), {}, "first-order OPVI"),
    ],
)
def test_the_choice_and_its_reason(target, options, says):
    tracker = opvi.tracker(target, **options)
    assert says in tracker.about
    assert str(tracker) == tracker.about
    assert "\n" not in tracker.about
    assert tracker.about.startswith("not the posterior:") == ("IBIS" not in says)


def test_labels_may_come_as_any_kind_of_number():
    """By their types alone: a 0 or 1 of any kind is kept as those of the first batch are."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(20, 2)).astype(np.float32), rng.integers(0, 2, 20)
    sampler = opvi.tracker(opvi.logistic_regression(2), particles=10)
    start = sampler.make_room(sampler.init(KEY), opvi.batch((X, y.astype(np.int32))))
    for data in ((X, y.astype(np.int64)), (X, y.astype(np.float32)), (X, y.astype(bool))):
        kept, _ = jax.eval_shape(sampler.step, KEY, start, opvi.batch(data))
        assert jax.tree.map(lambda a: (a.shape, a.dtype), kept) == jax.tree.map(lambda a: (a.shape, a.dtype), start)


def test_equal_settings_are_equal():
    assert opvi.regressor(2, hidden=(3,)) == opvi.regressor(2, hidden=[3])
    assert hash(opvi.regressor(2, hidden=(3,))) == hash(opvi.regressor(2, hidden=[3]))
    assert opvi.regressor(2, hidden=(3,)) != opvi.regressor(2, hidden=(4,))
    assert opvi.regressor(2, half_life=50) != opvi.regressor(2)
    with pytest.raises(ValueError, match=r"3\.0"):  # equal to 3, and no width
        opvi.regressor(2, hidden=(3.0,))
    own = usual_settings(5)._replace(bias=np.full(5, 2.0))
    mine = opvi.regressor(2, hidden=(3,), particles=5, settings=own)
    assert mine == opvi.regressor(2, hidden=(3,), particles=5, settings=own)
    assert mine != opvi.regressor(2, hidden=(3,), particles=5)
    with pytest.raises(ValueError, match="`settings` is for 5 particles, but there are 4"):
        opvi.regressor(2, particles=4, settings=own)


def test_wrong_orders_are_refused():
    target = opvi.mlp(8, (150,), prior_variance=opvi.targets.Gamma())
    with pytest.raises(ValueError, match="`memory` is -1, but must be a number of bytes of at least 0"):
        opvi.tracker(target, memory=-1)
    with pytest.raises(ValueError, match="`half_life` is 50"):
        opvi.tracker(target, half_life=50)
    with pytest.raises(TypeError, match="`target` is a int, but a tracker needs an `opvi.Target`"):
        opvi.tracker(5)
    for name in ("particles", "budget"):
        with pytest.raises(ValueError, match=f"`{name}` is 0, but must be greater than 0"):
            opvi.tracker(target, **{name: 0})
    tracker = opvi.tracker(opvi.gaussian_mixture())
    state = tracker.init(KEY)
    with pytest.raises(TypeError, match="no `predict`"):
        tracker.predict(state, np.zeros(2))


def test_rows_unlike_the_example_are_refused():
    target = opvi.logistic_regression(2)
    X, y = np.zeros((4, 2), np.float32), np.zeros(4, np.int32)
    keepers = (
        opvi.ibis(target, example=(X[:, :1], y)),
        opvi.replay(opvi.svgd(target, step=1e-3), (X[:, :1], y)),
    )
    for algorithm in keepers:
        state = algorithm.init(KEY, 3)
        with pytest.raises(ValueError, match=r"leaves of shape \(4, 2\), \(4,\), but the `example` given has rows"):
            algorithm.step(KEY, state, opvi.batch((X, y)))


# --- calibration of any sampler -----------------------------------------------------------------


def test_class_probabilities_include_the_covariances():
    target = opvi.mlp(2, (3,), opvi.bernoulli(), activation=jnp.tanh)
    sampler = opvi.gauss_newton(target)
    tracker = opvi.calibrated(sampler, target, particles=2)
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)  # more than are averaged at once
    state = tracker.init(KEY)
    found = tracker.predict(state, x)
    assert found.components.logit.shape == (2, 40)
    expected = jax.jit(lambda inner: sampler.predict(inner, x).mean())(state.inner)
    np.testing.assert_allclose(found.mean(), expected, atol=1e-5)


@pytest.mark.slow
def test_calibrating_changes_no_bit_of_the_particles():
    target = opvi.mlp(2, (3,), prior_variance=None)
    sampler = opvi.gauss_newton(target, noise=opvi.filters.AdaptiveNoise())
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2)).astype(np.float32)
    y = (X[:, 0] - X[:, 1] ** 2 + 0.3 * rng.normal(size=200)).astype(np.float32)
    plain, _ = opvi.run(sampler, opvi.stream((X, y), 20), KEY, particles=4)
    tracker = opvi.calibrated(sampler, target, particles=4)
    calibrated, history = opvi.run(tracker, opvi.stream((X, y), 20), KEY)
    np.testing.assert_array_equal(plain.particles, calibrated.particles)
    assert np.isfinite(history.info.log_predictive).all()
    predictive = tracker.predict(calibrated, X)
    weights = np.asarray(calibrated.own.members.weights)
    means = opvi.predict(target, plain.particles, X).components.mean
    np.testing.assert_allclose(predictive.mean(), weights @ np.asarray(means), rtol=1e-4, atol=1e-5)


def test_the_temperature_is_found_by_predicting_first():
    """Labels drawn at half the model's temperature: sharper is better, and 4,000 labels say by how much."""
    target = opvi.softmax_regression(4, 3)
    frozen = opvi.svgd(target, step=1e-12)  # so that only the temperature is learnt
    particles = jnp.tile(opvi.draw(target, 1, 1), (2, 1))
    x = np.random.default_rng(0).normal(size=(4000, 4)).astype(np.float32)
    log_p = opvi.predict(target, particles, x).log_probabilities()
    p = np.exp(2 * np.asarray(log_p, float))
    y = (np.random.default_rng(2).random((4000, 1)) > np.cumsum(p / p.sum(1, keepdims=True), 1)).sum(1)
    tracker = opvi.calibrated(frozen, target)
    state, _ = opvi.run(tracker, opvi.stream((x, y), 100), 0, particles=particles)
    assert float(tracker.predict(state, x[:5]).temperature) == pytest.approx(0.5, rel=0.2)
    np.testing.assert_allclose(state.particles, particles, atol=1e-6)


# --- replay -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_replay_learns_more_from_the_same_rows_and_keeps_nothing_poisoned():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 2)).astype(np.float32)
    y = (np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=600)).astype(np.float32)
    target = opvi.mlp(2, (8,), activation=jnp.tanh)
    errors = []
    for steps in (1, 5):
        algorithm = opvi.replay(opvi.tracking.first_order(target), (X[:1], y[:1]), memory_rows=100, steps=steps)
        with jax.numpy_dtype_promotion("standard"):  # optax's NAdam mixes dtypes
            state, _ = opvi.run(algorithm, opvi.stream((X[:500], y[:500]), 20), KEY, particles=5)
        errors.append(float(opvi.metrics.rmse(opvi.predict(target, state.particles, X[500:]), y[500:])))
        assert int(state.rows) == 500
        assert int(state.round) == 25
    assert errors[1] < 0.8 * errors[0]
    with jax.numpy_dtype_promotion("standard"):
        after, info = algorithm.step(KEY, state, opvi.batch((np.full((20, 2), np.nan, np.float32), y[:20])))
    assert not info.finite
    np.testing.assert_array_equal(after.own.rows[0], state.own.rows[0])
    np.testing.assert_array_equal(after.particles, state.particles)
    with pytest.raises(ValueError, match="`memory_rows` and `steps` are 0 and 5"):
        opvi.replay(algorithm, X, memory_rows=0)


# --- the watch ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_watch_reports_a_change_and_nothing_else():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(4000, 1)).astype(np.float32)
    y = (np.where(np.arange(4000) < 2800, 1, -1) * X[:, 0] + 0.2 * rng.normal(size=4000)).astype(np.float32)
    tracker = opvi.watched(opvi.regressor(1, hidden=(), particles=4))
    state, history = opvi.run(tracker, opvi.stream((X, y), 20), KEY)
    at = np.flatnonzero(history.info.changed) * 20
    assert len(at) >= 1
    assert 2800 <= at[0] < 2800 + 20 * 20
    assert (at < 2800).sum() == 0
    assert int(state.own.changes) == len(at)
    assert np.isfinite(tracker.predict(state, X[:5]).mean()).all()
