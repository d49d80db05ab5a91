"""The recommended classifier: learning, forgetting, calibration, odd batches and bad rows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opvi
from opvi.filters._linear_ekf import linear_ekf, predict_linear
from opvi.tracking._classifier import classifier, cut_rows
from opvi.tracking._probabilities import log_probabilities, of_networks

KEY = jax.random.key(0)
FEATURES, CLASSES = 3, 3


@pytest.fixture(scope="module")
def tracker():
    return classifier(FEATURES, CLASSES, hidden=(8,), particles=8)


@pytest.fixture(scope="module")
def start(tracker):
    return tracker.init(KEY)


@pytest.fixture(scope="module")
def simple():
    """One group of networks alone, which compiles several times faster: for what does not depend on the rest."""
    return classifier(FEATURES, CLASSES, hidden=(8,), particles=4, half_life=math.inf, linear=False)


def rows_of(seed, rows, turn=0.0):
    """Three sectors of a plane, turned by an angle, in odd units; the third feature says nothing."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, FEATURES))
    angle = (np.arctan2(X[:, 1], X[:, 0]) + turn) % (2 * np.pi)
    return (X * [1e3, 1e-3, 1.0] + [5e3, 0, 1]).astype(np.float32), (angle / (2 * np.pi) * CLASSES).astype(np.int32)


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def close(a, b, tolerance):
    def leaf(u, v):
        u, v = np.asarray(u, float), np.asarray(v, float)
        return np.abs(u - v).max() <= tolerance * max(np.abs(v).max(), 1.0)

    return jax.tree.all(jax.tree.map(leaf, a, b))


def finite(state):
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


def stepped(tracker, X, y):
    """Learn in batches of 20, by the step whose program all tests share; return the state, and what each step said."""
    state, infos = tracker.init(KEY), []
    for at in range(0, len(X), 20):
        state, info = tracker.step(KEY, state, opvi.batch((X[at : at + 20], y[at : at + 20])))
        infos.append(info._replace(predicted=None))
    return state, jax.tree.map(lambda *each: np.stack(each), *infos)


@pytest.fixture(scope="module")
def learnt(tracker):
    """2,000 rows, then 1,000 with the sectors turned half-way round."""
    first, second = rows_of(0, 2000), rows_of(1, 1000, np.pi)
    return stepped(tracker, *(np.concatenate(pair) for pair in zip(first, second, strict=True)))


def test_it_learns_from_raw_numbers(tracker, learnt):
    _, infos = learnt
    assert infos.finite.all()
    assert infos.rows[-1] == 3000
    assert infos.log_predictive[50:100].mean() > -0.35  # chance is -1.10
    np.testing.assert_allclose(infos.weights.sum(1), 1, rtol=1e-5)


@pytest.mark.slow
def test_it_forgets_by_itself(tracker, simple):
    """The sectors turn once in 1,500 rows: nobody says so, and old rows mislead the one that never forgets."""
    X, y = rows_of(1, 3000, np.linspace(0, 4 * np.pi, 3000))
    _, infos = stepped(tracker, X, y)
    _, history = opvi.run(simple, opvi.stream((X, y), 20), KEY, state=simple.init(KEY))
    scores = [said.log_predictive[50:] for said in (infos, history.info)]
    # 100 rounds of 20 rows: a difference of row scores of sd ~1 has a standard error of about .02
    assert scores[0].mean() > scores[1].mean() + 0.1
    assert scores[0].mean() > -0.6  # chance is -1.10


def test_predictions_are_calibrated_probabilities_taken_apart(tracker, learnt):
    state, _ = learnt
    X, y = rows_of(2, 1500, np.pi)
    predictive = tracker.predict(state, X)
    p = predictive.probabilities()
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-4)
    assert float(opvi.metrics.accuracy(predictive, y)) > 0.8
    # three sds of the error of a mean confidence over 1,500 rows, and what 1,000 rows cannot tell
    assert float(opvi.metrics.expected_calibration_error(predictive, y)) < 0.08
    parts = predictive.uncertainty()
    assert bool((parts.epistemic >= 0).all() & (parts.aleatoric >= 0).all())
    far = tracker.predict(state, X * 50).uncertainty()
    assert parts.epistemic.shape == far.epistemic.shape == (1500,)
    assert predictive.components.logits.shape == (8 + 3 + 4, 1500, CLASSES)  # networks, linear filters, remembered rows


def test_the_pool_is_what_info_scores(tracker, learnt):
    """`log_predictive` is the log density of `predict` before the step."""
    state, _ = learnt
    X, y = rows_of(3, 20, np.pi)
    _, info = tracker.step(KEY, state, opvi.batch((X, y)))
    expected = tracker.predict(state, X).log_density(y).mean()
    assert float(info.log_predictive) == pytest.approx(float(expected), abs=2e-4)


def test_protocol_and_purity(tracker, start):
    before = jax.tree.map(np.array, start)
    batch = opvi.batch(rows_of(0, 20))
    new, info = tracker.step(KEY, start, batch)
    again, _ = tracker.step(KEY, start, batch)
    assert same(start, before)
    assert same(new, again)
    assert jax.tree.structure(new) == jax.tree.structure(start)
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(start)]
    assert int(new.round) == 1
    assert int(new.rows) == int(info.rows) == 20
    assert new.particles.shape == (8, tracker.init(KEY, 4).particles.shape[1])
    assert "classifier" in str(tracker)


def test_padded_equals_unpadded():
    """Linear filters and what joins them; networks and memories have tests of their own."""
    filters = classifier(FEATURES, CLASSES, hidden=(), particles=4)
    start = filters.init(KEY)
    padded, _ = filters.step(KEY, start, opvi.batch(rows_of(4, 13), pad_to=20))
    unpadded, _ = filters.step(KEY, start, opvi.batch(rows_of(4, 13)))
    assert int(padded.rows) == 13
    assert close(padded, unpadded, 1e-4)


@pytest.mark.slow
def test_a_large_batch_learns_like_a_stream_of_twenties(tracker, learnt):
    state, _ = learnt
    X, y = rows_of(5, 40, np.pi)
    # padded to 64: four pieces, of which the last two are padding and are left out
    whole, info = tracker.step(KEY, state, opvi.batch((X, y), pad_to=64))
    first, one = tracker.step(KEY, state, opvi.batch((X[:20], y[:20])))
    second, two = tracker.step(KEY, first, opvi.batch((X[20:], y[20:])))
    assert int(whole.rows) == int(second.rows)
    assert close(whole._replace(round=second.round), second, 1e-4)
    assert float(info.log_predictive) == pytest.approx(float(one.log_predictive + two.log_predictive) / 2, abs=1e-4)


@pytest.mark.slow
def test_single_rows_learn_like_batches(simple):
    X, y = rows_of(6, 600)
    state, history = opvi.run(simple, opvi.stream((X, y), 1), KEY, state=simple.init(KEY))
    assert history.info.finite.all()
    assert history.info.log_predictive[-200:].mean() > -0.8  # chance is -1.10
    assert finite(state)


@pytest.mark.slow
def test_resumed_equals_uninterrupted(simple):
    stream = opvi.stream(rows_of(7, 400), 20)
    whole, _ = opvi.run(simple, stream, KEY, state=simple.init(KEY))
    half, _ = opvi.run(simple, stream, KEY, state=simple.init(KEY), rounds=11)
    resumed, _ = opvi.run(simple, stream.after(half.round), KEY, state=half)
    assert same(whole, resumed)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_refused(tracker, learnt, poison):
    state, _ = learnt
    X, y = rows_of(8, 20)
    X[3, 1] = poison
    kept, info = tracker.step(KEY, state, opvi.batch((X, y)))
    assert not bool(info.finite)
    assert same(kept._replace(round=state.round, rows=state.rows), state)


@pytest.mark.parametrize("label", [-1, CLASSES, 2**31 - 1])
def test_labels_of_no_class_are_refused(tracker, start, label):
    X, y = rows_of(8, 20)
    y[7] = label
    kept, info = tracker.step(KEY, start, opvi.batch((X, y)))
    assert not bool(info.finite)
    assert same(kept._replace(round=start.round, rows=start.rows), start)


def test_labels_that_are_not_whole_become_no_class(tracker, start):
    X, y = rows_of(8, 20)
    said = y.astype(np.float32)
    said[[7, 9]] = 0.5, np.nan
    pieces, _ = cut_rows(tracker, start.log_weights.dtype, opvi.batch((X, said)))
    y[[7, 9]] = -1
    np.testing.assert_array_equal(pieces.data[1].ravel()[:20], y)


def test_huge_numbers_do_not_blind_it(tracker, learnt):
    state, _ = learnt
    X, y = rows_of(8, 20, np.pi)
    X[3] = [1e30, -3e38, 3e38]
    wild, _ = tracker.step(KEY, state, opvi.batch((X, y)))
    assert finite(wild)
    X, y = rows_of(9, 500, np.pi)
    assert float(opvi.metrics.accuracy(tracker.predict(wild, X), y)) > 0.75
    first, _ = tracker.step(KEY, tracker.init(KEY), opvi.batch((np.full((20, 3), 3e38, np.float32), y[:20])))
    assert finite(first)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    shift=st.sampled_from([0.0, 1e4]),
    kind=st.sampled_from(["plain", "constant", "duplicates", "one class", "all the same"]),
)
def test_odd_streams_keep_the_state_finite(tracker, start, seed, scale, shift, kind):
    X, y = rows_of(seed, 100)
    X = (X * scale + shift).astype(np.float32)
    if kind == "constant":
        X[:, 1] = 7.0
    elif kind == "duplicates":
        X, y = np.repeat(X[:5], 20, 0), np.repeat(y[:5], 20)
    elif kind == "one class":
        y[:] = 1
    elif kind == "all the same":
        X, y = np.repeat(X[:1], 100, 0), np.repeat(y[:1], 100)
    state = start
    for i in range(0, 100, 20):
        state, info = tracker.step(KEY, state, opvi.batch((X[i : i + 20], y[i : i + 20])))
        assert bool(info.finite)
    assert finite(state)
    p = np.asarray(tracker.predict(state, X[:20]).probabilities())
    assert np.isfinite(p).all()
    if kind in ("one class", "all the same"):
        assert p[np.arange(20), y[:20]].min() > 0.6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: classifier(0, 3), "`features` and `classes` are 0 and 3"),
        (lambda: classifier(2, 1), "at least 1 and 2"),
        (lambda: classifier(2, 2, half_life=0.0), "`half_life` is 0.0"),
        (lambda: classifier(2, 2, particles=3).init(KEY), "multiple of 4"),
        (lambda: linear_ekf(2, 2, wandering=-1.0), "`wandering`"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_shapes_are_refused(tracker, start):
    X, y = rows_of(0, 20)
    with pytest.raises(ValueError, match=r"takes 3 features and one label per row"):
        tracker.step(KEY, start, opvi.batch((X[:, :2], y)))
    with pytest.raises(ValueError, match=r"X has rows of shape \(2,\)"):
        tracker.predict(start, X[:, :2])


# --- linear filters ---------------------------------------------------------------------------


def test_the_linear_filter_is_the_laplace_posterior_of_a_few_rows():
    """No wandering, one piece: one Newton step from 0, whose curvature and gradient are known."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(5, 2)).astype(np.float32), np.array([0, 1, 1, 0, 1])
    algorithm = linear_ekf(2, 2, wandering=0.0, prior_variance=0.1, largest_change=1e6)
    state, info = algorithm.step(KEY, algorithm.init(KEY, None), opvi.batch((X, y)))
    a = np.column_stack([X, np.ones(5)]).astype(float)
    half = np.array([[0.25, -0.25], [-0.25, 0.25]])
    H = np.kron(half, a.T @ a)
    P = np.linalg.inv(H + np.eye(6) / 0.1)
    gradient = np.concatenate([a.T @ ((y == c) - 0.5) for c in (0, 1)])
    np.testing.assert_allclose(state.covariance[0], P, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(state.particles[0], P @ gradient, rtol=1e-3, atol=1e-5)
    assert float(info.log_predictive) == pytest.approx(math.log(0.5), abs=1e-5)


def test_wandering_weights_stay_bounded_and_doubtful():
    algorithm = linear_ekf(2, 3, wandering=(1e-1, 0.0), largest_variance=1.0)
    state = algorithm.init(KEY, None)
    X, y = np.zeros((20, 2), np.float32), np.zeros(20, int)  # nothing is learnt about the features
    for _ in range(30):
        state, _ = algorithm.step(KEY, state, opvi.batch((X, y)))
    variance = np.diagonal(np.asarray(state.covariance), axis1=1, axis2=2)
    assert variance.max() <= 1 + 1e-4
    far = predict_linear(state, jnp.full((1, 2), 2.0), 3).log_probabilities()
    near = predict_linear(state, jnp.zeros((1, 2)), 3).log_probabilities()
    assert float(far[0, 0, 0]) < float(near[0, 0, 0])  # less sure where it has seen nothing


def test_networks_of_one_target_answer_together_and_learn_in_one_loop():
    """XLA compiles a function anew for each of its calls: four networks of two kinds are two steps, not four."""
    sampler = classifier(3, 2, hidden=(4,), particles=8)
    state = sampler.init(jax.random.key(0))
    z = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    pairs = [(net.target, s.particles) for net, s in zip(sampler.networks, state.networks, strict=True)]
    each = np.stack([log_probabilities(*pair, z) for pair in pairs])
    assert not np.allclose(each[0], each[2])
    np.testing.assert_allclose(of_networks(pairs, z), each, rtol=1e-6)
    batch = opvi.batch((z, np.array([0, 1, 1, 0, 1])))
    program = str(jax.make_jaxpr(sampler.step)(jax.random.key(0), state, batch))
    assert program.count("name=_step") == 2 * 2  # each is a call within a call
