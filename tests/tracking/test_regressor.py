"""The regressor out of the box: raw data in, calibrated predictions out, and nothing that can break it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opvi
from opvi.tracking._wrappers import _scaling as scaling
from opvi.tracking.experts import Rows
from opvi.tracking.experts import Units as Change
from opvi.tracking.experts._networks import Networks, usual_settings
from tests.tracking.parts import nets, units

FEATURES = 3
SMALL = opvi.regressor(FEATURES, hidden=(6,), particles=5)
KEY = jax.random.key(0)


def finite(state):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def drawn(rows, seed=0, noise=0.1):
    """Features and targets in awkward units."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, FEATURES))
    y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] / 2 + noise * rng.normal(size=rows)
    return X * [1e3, 1e-4, 1] + [5e4, 0, -3], 70 * y + 500


def stepped(state, X, y, size=20):
    """Learn in batches, by the step whose program all tests share; return the state, and what each step said."""
    infos = []
    for at in range(0, len(X), size):
        state, info = SMALL.step(KEY, state, opvi.batch((X[at : at + size], y[at : at + size])))
        infos.append(info)
    return state, jax.tree.map(lambda *each: np.stack(each), *infos)


@pytest.fixture(scope="module")
def learnt():
    X, y = drawn(1600)
    state, infos = stepped(SMALL.init(KEY), X[:1500], y[:1500])
    return state, infos, X[1500:], y[1500:]


def test_it_learns_raw_data_in_one_pass(learnt):
    state, infos, X, y = learnt
    predictive = SMALL.predict(state, X)
    assert float(opvi.metrics.rmse(predictive, jnp.asarray(y, jnp.float32))) < 0.5 * y.std()
    # The reported scores were made before learning: they improve, in the units of y.
    errors = np.sqrt(infos.squared_error)
    assert np.mean(errors[-20:]) < 0.6 * np.mean(errors[1:6])
    assert np.mean(infos.log_predictive[-20:]) > np.mean(infos.log_predictive[5:15])
    assert int(state.rows) == 1500
    assert finite(state)


def test_its_intervals_cover_as_often_as_they_say(learnt):
    """The last 500 rows before learning from them: 90 % within 5 standard errors (drift of the learner included)."""
    state, _, _, _ = learnt
    X, y = drawn(2500, seed=3)
    covered = []
    for start in range(0, 1000, 100):
        rows = slice(start, start + 100)
        low, high = SMALL.predict(state, X[rows]).interval(0.9)
        covered.append(((np.asarray(low) <= y[rows]) & (y[rows] <= np.asarray(high))).mean())
        state, _ = stepped(state, X[rows], y[rows])
    assert np.mean(covered) == pytest.approx(0.9, abs=5 * 0.3 / np.sqrt(1000))


def test_units_do_not_matter(learnt):
    """The same data in other units give the same predictions in those units."""
    X, y = drawn(300, seed=1)
    means = []
    for unit in (1.0, 1024.0):  # a power of two: float32 scales exactly
        state, _ = stepped(SMALL.init(KEY), X * unit, y / unit)
        means.append(np.asarray(SMALL.predict(state, X[:50] * unit).mean()) * unit)
    np.testing.assert_allclose(means[0], means[1], rtol=1e-3)


def test_predictions_of_a_batch_do_not_depend_on_its_company(learnt):
    state, _, X, _ = learnt
    alone = SMALL.predict(state, X[:7])
    together = SMALL.predict(state, X)
    np.testing.assert_allclose(alone.mean(), together.mean()[:7], rtol=1e-4)
    np.testing.assert_allclose(alone.sd(), together.sd()[:7], rtol=1e-3)


@pytest.mark.slow
def test_padding_does_not_count(learnt):
    state, _, X, y = learnt
    plain, info = SMALL.step(KEY, state, opvi.batch((X[:1], y[:1])))
    padded, same = SMALL.step(KEY, state, opvi.batch((X[:1], y[:1]), pad_to=20))
    assert not np.array_equal(plain.particles, state.particles)
    np.testing.assert_allclose(plain.particles, padded.particles, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(info.log_predictive, same.log_predictive, rtol=1e-3)
    np.testing.assert_allclose(nets(plain).past.matrices, nets(padded).past.matrices, rtol=1e-3, atol=1e-5)
    assert int(plain.rows) == int(padded.rows) == 1501
    empty, _ = SMALL.step(KEY, state, opvi.batch((X[:20], y[:20]), weight=np.zeros(20)))
    np.testing.assert_array_equal(empty.particles, state.particles)


def test_rows_without_weight_may_come_before_those_with_weight(learnt):
    state, _, X, y = learnt
    last = np.arange(20) >= 17
    there = opvi.batch((X[:20], y[:20]), weight=last.astype(np.float32))
    alone = opvi.batch((X[17:20], y[17:20]), pad_to=20)
    (one, _), (other, _) = (SMALL.step(KEY, state, rows) for rows in (there, alone))
    np.testing.assert_allclose(one.particles, other.particles, rtol=1e-4, atol=1e-5)
    assert np.abs(one.particles - state.particles).max() > 1e-3  # and they taught something


@pytest.mark.parametrize("made", [SMALL, opvi.classifier(SMALL.features, 2)])
def test_a_batch_without_rows_is_refused(made):
    state = jax.eval_shape(made.init, KEY)
    nothing = opvi.Batch((np.zeros((0, SMALL.features), np.float32), np.zeros(0, np.float32)), np.ones(0, np.float32))
    with pytest.raises(ValueError, match="a batch has 0 rows, but needs at least 1"):
        jax.eval_shape(made.step, KEY, state, nothing)


@pytest.mark.slow
def test_large_batches_are_learnt_piece_by_piece():
    """One batch of 640 rows learns about as much as 32 batches of 20."""
    X, y = drawn(2000, seed=2)
    scores = []
    for size in (20, 640):
        state, _ = stepped(SMALL.init(KEY), X[:1920], y[:1920], size)
        scores.append(float(opvi.metrics.rmse(SMALL.predict(state, X[1920:]), jnp.asarray(y[1920:], jnp.float32))))
    assert scores[1] == pytest.approx(scores[0], rel=0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("where", ["X", "y"])
def test_a_poisoned_batch_teaches_nothing(learnt, bad, where):
    state, _, X, y = learnt
    X, y = X[:20].copy(), y[:20].copy()
    (X if where == "X" else y)[3] = bad
    after, info = SMALL.step(KEY, state, opvi.batch((X.astype(np.float32), y.astype(np.float32))))
    assert not info.finite
    np.testing.assert_array_equal(after.particles, state.particles)
    assert finite(after)


def test_one_outlier_moves_little(learnt):
    state, _, X, y = learnt
    y = y[:20].copy()
    y[5] = 1e7
    after, info = SMALL.step(KEY, state, opvi.batch((X[:20], y)))
    assert info.finite
    before_and_after = (SMALL.predict(s, X).mean() for s in (state, after))
    assert float(np.abs(np.subtract(*before_and_after)).max()) < 3 * y[:5].std()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    size=st.sampled_from([1, 20]),
    unit=st.sampled_from([1e-6, 1e-3, 1.0, 1e6]),
    shape=st.sampled_from(["plain", "constant feature", "duplicated rows", "constant target", "jumps"]),
    seed=st.integers(0, 10_000),
)
def test_whatever_comes_the_state_stays_finite_and_predicts(size, unit, shape, seed):
    rng = np.random.default_rng(seed)
    state = SMALL.init(jax.random.key(seed))
    for step in range(4):
        X, y = rng.normal(size=(size, FEATURES)) * unit, rng.normal(size=size) * unit
        if shape == "constant feature":
            X[:, 0] = unit
        elif shape == "duplicated rows":
            X[:], y[:] = X[:1], y[:1]
        elif shape == "constant target":
            y[:] = 3 * unit
        elif shape == "jumps":
            X, y = X * 10.0 ** (4 * step), y * 10.0 ** (3 * step)
        state, info = SMALL.step(KEY, state, opvi.batch((X.astype(np.float32), y.astype(np.float32))))
        assert info.finite
    assert finite(state)
    predictive = SMALL.predict(state, np.zeros((8, FEATURES)))
    assert np.isfinite(predictive.mean()).all()
    assert (np.asarray(predictive.sd()) > 0).all()


@pytest.mark.slow
def test_memory_cuts_covariances_into_blocks():
    full = nets(SMALL.init(KEY)).past.matrices
    tight = opvi.regressor(FEATURES, hidden=(6,), particles=5, budget=full.nbytes / 3)
    state, history = opvi.run(tight, opvi.stream(drawn(1200), 20), KEY)
    assert nets(state).past.matrices.nbytes <= full.nbytes / 2
    assert nets(state).past.matrices.shape[1] > 1
    assert "blocks" in tight.about
    assert "full covariances" in SMALL.about
    errors = np.sqrt(history.info.squared_error)
    assert np.mean(errors[-10:]) < 0.8 * np.mean(errors[1:6])


def test_errors_name_the_value_the_rule_and_the_remedy(learnt):
    state, _, X, y = learnt
    with pytest.raises(ValueError, match=r"`features` is 0"):
        opvi.regressor(0)
    for hidden in (5, (0,), "50"):
        with pytest.raises(ValueError, match="must be the width of each hidden layer"):
            opvi.regressor(2, hidden=hidden)
        with pytest.raises(ValueError, match="must be the width of each hidden layer"):
            opvi.classifier(2, 2, hidden=hidden)
    with pytest.raises(ValueError, match=r"`half_life` is -1"):
        opvi.regressor(2, half_life=-1)
    with pytest.raises(ValueError, match=r"`levels` is 'yes', but must be True or False"):
        opvi.regressor(2, levels="yes")
    with pytest.raises(ValueError, match=r"takes \(20, 3\)"):
        SMALL.step(KEY, state, opvi.batch((X[:20, :2], y[:20])))
    with pytest.raises(ValueError, match=r"`x` has rows of shape \(2,\)"):
        SMALL.predict(state, X[:5, :2])


@pytest.mark.slow
def test_a_thousand_rounds_leave_the_state_as_small_and_sound_as_it_was():
    """A short form of the run over ten million rows in docs/results."""
    tracker = opvi.regressor(1, hidden=(2,), particles=5, memory_rows=1000)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(12_000, 1)).astype(np.float32)
    y = (np.tanh(X[:, 0]) + 0.1 * rng.normal(size=12_000)).astype(np.float32)
    start = tracker.init(KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, history = opvi.run(tracker, opvi.stream((X, y), 20, passes=2), KEY)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [leaf.shape for leaf in jax.tree.leaves(start)]
    errors = history.info.squared_error
    assert errors[-1000:].mean() == pytest.approx(0.01, rel=0.15)  # 20,000 errors: 1 % of standard error
    assert finite(state)


@pytest.mark.slow
def test_columns_that_hang_together_do_not_blow_up():
    """One-hot columns add up to the bias, and their cycle is that of the batches: the data leave directions open, whose
    variances fell below rounding (1e-7 here, negative after 20,000 rows) and then grew without end (RMSE 1e5)."""
    rows = 10_000
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, rows)).astype(np.float32)
    X = np.concatenate([np.stack([a, b], 1), np.eye(3, dtype=np.float32)[np.arange(rows) % 3]], 1)
    y = 3 * a - b + 0.1 * rng.normal(size=rows).astype(np.float32)
    tracker = opvi.regressor(5, hidden=(), particles=2, half_life=100.0)
    state, history = opvi.run(tracker, opvi.stream((X, y), 20), 0)
    assert np.sqrt(history.info.squared_error[100:].mean()) < 0.12
    least = np.linalg.eigvalsh(np.asarray(nets(state).past.matrices, float))[..., 0]
    assert least.min() > 1e-6


def test_slow_columns_that_occur_twice_do_not_wind_up():
    """Which of two equal columns counts is never known, and must not make the model forget that together they do."""
    rng, at = np.random.default_rng(1), np.arange(600)
    turn, z = 2 * np.pi * (at - at % 5) / 1752, rng.normal(size=600)
    X, y = np.c_[z, np.sin(turn), np.cos(turn), np.sin(turn), np.cos(turn)], 3 * z + 0.2 * rng.normal(size=600)
    _, history = opvi.run(opvi.regressor(5, hidden=()), opvi.stream((X, y), 20), 0)
    assert np.sqrt(history.info.squared_error[15:].mean()) < 0.3


def test_a_half_life_halves_what_is_known():
    """The information on a weight whose column stands at its mean, 200 rows later: half, as the half-life is 200."""
    sampler = opvi.regressor(2, hidden=(), particles=2, half_life=200.0, warm_up=0)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1600, 2)).astype(np.float32)
    y = (X @ [1.0, -1.0] + 0.1 * rng.normal(size=1600)).astype(np.float32)
    before, _ = opvi.run(sampler, opvi.stream((X, y), 20), KEY)
    still = X[:200].copy()
    still[:, 1] = float(units(before).scale.mean[1])
    after, _ = opvi.run(sampler, opvi.stream((still, still[:, 0]), 20), KEY, state=before)
    np.testing.assert_array_equal(units(after).scale.sd, units(before).scale.sd)  # the units are the same

    def information(state):
        return np.linalg.inv(np.asarray(nets(state).past.matrices[:, 0], float))[:, 1, 1]

    np.testing.assert_allclose(information(after) / information(before), 0.5, rtol=0.02)


NETS = Networks((6,), usual_settings(3), False, 0, 1e6)


def rows_of(z):
    return Rows(z, z, *[jnp.zeros(len(z))] * 4)


@pytest.mark.parametrize("hidden", [(), (6,)])
def test_what_networks_believe_does_not_depend_on_their_units(hidden):
    """Means and variances of all networks in the units of y, before and after a change of scale."""
    expert = Networks(hidden, usual_settings(3), False, 0, 1e6)
    state = expert.init(KEY, 2, jnp.float32)
    state = state._replace(past=state.past._replace(matrices=0.01 * state.past.matrices))  # they have learnt something
    shift, ratio = jnp.array([0.5, -0.3]), jnp.array([2.0, 0.5])
    change = Change(shift, ratio, jnp.zeros(2, bool), jnp.zeros(2), jnp.float32(0.4), jnp.float32(1.5))
    z = jax.random.normal(jax.random.key(1), (7, 2))
    before = expert.predict(state, rows_of(z)).work
    after = expert.predict(expert.rescale(state, change), rows_of((z - shift[None]) / ratio[None])).work
    np.testing.assert_allclose(after.mean, 0.4 * before.mean + 1.5, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.variance, 0.16 * before.variance, rtol=1e-3, atol=1e-6)


def test_slopes_are_the_gradients_of_the_weighted_mean():
    state, z = NETS.init(KEY, 2, jnp.float32), jnp.array([[0.3, -1.0], [2.0, 0.5]])
    found = NETS.predict(state, rows_of(z)).slope
    wanted = jax.grad(lambda z: NETS.predict(state, rows_of(z)).mean.sum())(z)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_networks_that_forget_all_are_those_before_any_row():
    state = NETS.init(KEY, 2, jnp.float32)
    moved = state._replace(particles=state.particles + 1, error=state.error / 7)
    jax.tree.map(np.testing.assert_array_equal, NETS.forget(moved, jnp.float32(0)), state)
    some = NETS.forget(moved._replace(past=state.past._replace(matrices=0.01 * state.past.matrices)), jnp.float32(0.1))
    np.testing.assert_array_equal(some.particles, moved.particles)
    np.testing.assert_allclose(some.past.matrices, 0.1 * state.past.matrices, rtol=0.01)


@pytest.mark.parametrize(("off", "followed"), [(0.045, [True, False, False]), (0.1, [True, True, False])])
def test_the_scale_follows_small_changes_while_few_rows_were_learnt(learnt, off, followed):
    state, _, X, _ = learnt
    known = units(state)
    scale = scaling.scale_of(known.moments)
    off = scale._replace(mean=scale.mean - off * scale.sd)
    rows = jnp.asarray(X[:20], jnp.float32), jnp.ones(20)
    due = []
    for age in (300.0, 900.0, 1100.0):
        seen, square = jnp.asarray(age), known.moments.square * age / known.moments.seen
        moments = known.moments._replace(seen=seen, square=square)
        new = known._replace(scale=off, scaled_at=seen, moments=moments)
        old = new._replace(moments=new.moments._replace(seen=new.moments.seen - 20))
        due.append(bool(SMALL.model.inner._due(old, new, *rows, jnp.array(False))[0]))
    assert due == followed


def test_a_target_that_stands_still_and_moves_again():
    """1,000 rows of the same target left the moments of a linear model NaN for ever."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, FEATURES))
    y = X[:, 0] + 0.1 * rng.normal(size=3000)
    y[1000:2000] = 1e5
    for made in (opvi.regressor(FEATURES, hidden=(), particles=5), SMALL):
        state, history = opvi.run(made, opvi.stream((X, y), 20), 0)
        assert finite(state)
        assert np.sqrt(history.info.squared_error[-20:].mean()) < 0.5
