"""The scikit-learn estimators: the library's own checks, bits equal to a bare run, and every kind of awkward input."""

import io
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import opvi
from opvi.adapters.sklearn import _base
from opvi.running import _engine as engine
from opvi.tracking._inside import find, replaced
from opvi.tracking._mixing._numbers import NumbersState
from opvi.tracking.experts._networks import NetworksState

FEATURES = 3
WIDEST, MOST = 20, 5  # columns and classes of any table of scikit-learn's checks
REGRESSOR = {"hidden": (5,), "n_particles": 3, "neighbour_rows": 0, "random_state": 0}
CLASSIFIER = {"hidden": (5,), "n_particles": 2, "half_life": 2000.0, "random_state": 0}


def tracker_of(settings):
    names = {"n_particles": "particles", "neighbour_rows": "memory_rows"}
    return {names.get(k, k): v for k, v in settings.items() if k != "random_state"}


def drawn(rows, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, FEATURES)) * [1, 100, 0.01]
    y = np.sin(2 * X[:, 0]) + X[:, 1] / 100 + 0.1 * rng.normal(size=rows)
    return X, 50 * y + 7


def labelled(rows, seed=0):
    X, y = drawn(rows, seed)
    return X, np.array(["low", "middle", "top"])[np.digitize(y, [-30, 40])]


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


@pytest.fixture(scope="module")
def regression():
    X, y = drawn(450)
    return opvi.OPVIRegressor(**REGRESSOR, shuffle=False).fit(X[:400], y[:400]), X[400:], y[400:]


@pytest.fixture(scope="module")
def classification():
    X, y = labelled(450)
    return opvi.OPVIClassifier(**CLASSIFIER, shuffle=False).fit(X[:400], y[:400]), X[400:], y[400:]


# --- scikit-learn's own checks ------------------------------------------------------------------

NOT_BATCHES = (
    "a row of weight 2 takes one place in a batch of 20 rows and two equal rows take two, so the batches after them "
    "are cut elsewhere, and an online learner depends on its batches (rows of weight 0 are left out exactly)"
)
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": NOT_BATCHES,
    "check_sample_weight_equivalence_on_sparse_data": NOT_BATCHES,
}


@pytest.fixture
def _one_width(monkeypatch):
    """Models of one size, compiled once, for tables of a dozen widths: more columns, of zeros, and classes never met.

    What scikit-learn sees (names, counts and checks of columns) keeps the table's own width.
    """
    dense, begin = _base._dense, _base.OnlineEstimator._begin

    def widened(X, rows, origin):
        made = dense(X, rows, origin)
        return np.pad(made, ((0, 0), (0, WIDEST - made.shape[1])))

    monkeypatch.setattr(_base, "_dense", widened)

    def begun(self, _, *classes, quick=0):
        begin(self, WIDEST, *(max(count, MOST) for count in classes), quick=quick)

    monkeypatch.setattr(_base.OnlineEstimator, "_begin", begun)


@parametrize_with_checks(
    [
        # Linear models: networks take twice as long to compile, and pass as well.
        opvi.OPVIRegressor(hidden=(), n_particles=2, random_state=0),
        opvi.OPVIClassifier(hidden=(), random_state=0),
    ],
    expected_failed_checks=lambda estimator: EXPECTED,
)
@pytest.mark.usefixtures("_one_width")
def test_conventions_of_scikit_learn(estimator, check):
    check(estimator)


# --- the same bits as a bare run ------------------------------------------------------------------


@pytest.mark.slow
def test_twenty_calls_equal_one_run_bit_for_bit():
    X, y = drawn(400)
    model = opvi.OPVIRegressor(**REGRESSOR)
    for start in range(0, 400, 20):
        model.partial_fit(X[start : start + 20], y[start : start + 20])
    tracker = opvi.regressor(FEATURES, **tracker_of(REGRESSOR))
    state, _ = opvi.run(tracker, opvi.stream((X, y), 20), 0)
    assert same(model.state_, state)
    assert model.n_rows_seen_ == 400
    # Questions are compiled with other options than `tracker.predict`.
    np.testing.assert_allclose(model.predict(X[:16]), tracker.predict(state, X[:16]).mean(), rtol=1e-6)


@pytest.mark.slow
def test_twenty_calls_of_the_classifier_equal_one_run_bit_for_bit():
    X, y = labelled(400)
    model = opvi.OPVIClassifier(**CLASSIFIER)
    for start in range(0, 400, 20):
        model.partial_fit(X[start : start + 20], y[start : start + 20], classes=["low", "middle", "top"])
    tracker = opvi.classifier(FEATURES, 3, **tracker_of(CLASSIFIER))
    numbers = np.searchsorted(["low", "middle", "top"], y)
    state, _ = opvi.run(tracker, opvi.stream((X, numbers), 20), 0)
    assert same(model.state_, state)


@pytest.mark.slow
def test_one_large_call_equals_many_small_ones_and_a_ragged_end_is_the_streams(regression, monkeypatch):
    model, *_ = regression
    X, y = drawn(450)
    other = opvi.OPVIRegressor(**REGRESSOR).partial_fit(X[:400], y[:400])
    assert same(model.state_, other.state_)
    for block in (1 << 24, 4 * 3 * 20 * 7):  # however many rows are made dense at once
        monkeypatch.setattr(_base, "BLOCK_BYTES", block)
        anew = opvi.OPVIRegressor(**REGRESSOR, shuffle=False).fit(X[:401], y[:401])
        state, _ = opvi.run(other.tracker_, opvi.stream((X[:401], y[:401]), 20), 0)
        assert same(anew.state_, state)
    other.partial_fit(X[400:433], y[400:433])  # 20 + 13 rows
    state, _ = opvi.run(other.tracker_, opvi.stream((X[:433], y[:433]), 20), 0)
    assert same(other.state_, state)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_a_pickled_estimator_goes_on_bit_for_bit(kind, request):
    model, X, y = request.getfixturevalue(kind)
    there = pickle.loads(pickle.dumps(model))
    here = pickle.loads(pickle.dumps(model))
    assert same(there.partial_fit(X[:20], y[:20]).state_, here.partial_fit(X[:20], y[:20]).state_)
    assert same(there.predict(X), here.predict(X))
    assert not same(there.state_, model.state_)


def programs():
    both = (False, True)
    of = ((engine.advanced, 3), (engine.again, 1), (engine.answer, 3))
    return np.array([sum(engine.program(*one, quick)._cache_size() for quick in both) for one in of])


@pytest.mark.parametrize("kind", ["regressor", "classifier"])
@pytest.mark.usefixtures("retraced", "engines_own_programs")
def test_ragged_calls_compile_few_times(kind, monkeypatch):
    """For batches a quick program and an optimised one, and one for questions: rows given one by one add none."""
    make, settings, data = {
        "regressor": (opvi.OPVIRegressor, REGRESSOR, drawn),
        "classifier": (opvi.OPVIClassifier, CLASSIFIER, labelled),
    }[kind]
    X, y = data(120)
    X, y = np.tile(X, (42, 1)), np.tile(y, 42)
    model, before = make(**{**settings, "hidden": ()}), programs()
    for rows in (20, 3, 4):
        model.partial_fit(X[:rows], y[:rows])
        model.predict(X[:rows])
    assert (programs() - before).tolist() == [1, 0, 1]
    for rows in (20, 21, 39, *[1] * 60, 2400):
        model.partial_fit(X[:rows], y[:rows])
    for rows in (1, 20, 5000):
        model.predict(X[:rows])
    assert (programs() - before).tolist() == [2, 0, 1]
    monkeypatch.setattr(engine, "MANY_ROWS", 5000)
    model.predict(X[:5000])
    assert (programs() - before).tolist() == [2, 0, 2]  # an optimised one for questions
    assert model.n_rows_seen_ == int(model.state_.rows) == 27 + 80 + 60 + 2400


def test_clones_share_their_programs(regression):
    model, X, y = regression
    clone(model).fit(X, y).predict(X)
    before = programs()
    copies = [clone(model).fit(X, y) for _ in range(3)]
    copies.append(pickle.loads(pickle.dumps(copies[0])).partial_fit(X, y))
    for other in copies:
        other.predict(X)
        assert other.tracker_ == model.tracker_
    assert (programs() == before).all()


class Strict(pickle.Pickler):
    def reducer_override(self, value):
        assert not isinstance(value, jax.Array | type(engine.advance))
        return NotImplemented


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_an_estimator_is_pickled_as_numpy_arrays(kind, request):
    model, *_ = request.getfixturevalue(kind)
    Strict(io.BytesIO()).dump(model)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_an_estimator_saved_by_skops_predicts_and_learns_the_same(kind, request, tmp_path):
    """Its file holds arrays and settings that can be looked at: no pickle inside."""
    skops = pytest.importorskip("skops.io")
    model, X, y = request.getfixturevalue(kind)
    skops.dump(model, tmp_path / "model.skops")
    types = skops.get_untrusted_types(file=tmp_path / "model.skops")
    assert all(name.startswith("opvi.") for name in types)
    assert isinstance(model._engine.__getstate__()["sampler"], dict)
    again = skops.load(tmp_path / "model.skops", trusted=types)
    assert again.tracker_ == model.tracker_
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    here = pickle.loads(pickle.dumps(model))
    assert same(again.partial_fit(X[:20], y[:20]).state_, here.partial_fit(X[:20], y[:20]).state_)


@pytest.mark.slow  # MLflow alone takes 5 seconds to import
@pytest.mark.filterwarnings("ignore")  # MLflow's own
@pytest.mark.parametrize("form", ["skops", "cloudpickle"])
def test_an_estimator_saved_by_mlflow_predicts_and_learns_the_same(form, regression, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    pytest.importorskip("mlflow")
    import mlflow.sklearn
    import skops.io

    model, X, y = regression
    types = skops.io.get_untrusted_types(data=skops.io.dumps(model))
    flavour = {"serialization_format": form, "pip_requirements": ["opvi"]}  # else MLflow finds them out, by loading it
    mlflow.sklearn.save_model(model, tmp_path / "model", **flavour, skops_trusted_types=types)
    again = mlflow.sklearn.load_model(str(tmp_path / "model"))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    served = mlflow.pyfunc.load_model(str(tmp_path / "model"))
    np.testing.assert_array_equal(served.predict(X), model.predict(X))
    here = pickle.loads(pickle.dumps(model))
    assert same(again.partial_fit(X[:20], y[:20]).state_, here.partial_fit(X[:20], y[:20]).state_)


# --- what predictions say -------------------------------------------------------------------------


def test_a_regression_and_its_uncertainty(regression):
    model, X, y = regression
    mean, sd = model.predict(X, return_std=True)
    assert mean.shape == sd.shape == (50,)
    assert model.score(X, y) > 0.8

    @jax.jit
    def by_the_tracker(state, y):
        predictive = model.tracker_.predict(state, X)
        return predictive.mean(), predictive.sd(), predictive.log_density(y)

    expected = by_the_tracker(model.state_, jnp.asarray(y, jnp.float32))
    np.testing.assert_allclose(mean, expected[0], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(sd, expected[1], rtol=1e-3)
    parts = model.decompose(X)
    np.testing.assert_allclose(np.sqrt(parts.epistemic + parts.aleatoric), sd, rtol=1e-5)
    assert (parts.epistemic > 0).all()
    assert (parts.aleatoric > 0).all()
    density = model.log_predictive_density(X, y)
    np.testing.assert_allclose(density, expected[2], rtol=1e-3, atol=1e-3)
    assert model.log_predictive_density(X[:1], [1e6]) > -300  # heavy tails: of a normal distribution it is -1e8


def test_quantiles_intervals_and_draws_agree(regression):
    model, X, _ = regression
    with pytest.raises(ValueError, match="`n_samples` is -1"):
        model.sample_y(X, -1)
    quantiles = model.predict_quantiles(X, [0.125, 0.875])
    assert quantiles.shape == (50, 2)
    assert (np.diff(quantiles) > 0).all()
    low, high = model.predict_interval(X, 0.75)  # the same levels, the same program
    np.testing.assert_array_equal(np.stack([low, high], 1), quantiles)
    draws = model.sample_y(X, 500, random_state=1)
    assert draws.shape == (50, 500)
    # The share of draws below a 12.5 % quantile: 5 standard errors of 500 draws.
    assert (draws < low[:, None]).mean(1) == pytest.approx(np.full(50, 0.125), abs=5 * np.sqrt(0.125 * 0.875 / 500))
    many = model.sample_y(np.repeat(X[:1], 1026, 0), 500, random_state=1)
    assert len(np.unique(many[::16], axis=0)) == 65  # rows asked about at once have draws of their own
    np.testing.assert_array_equal(draws[0], many[0])  # and the same again for the same seed


def test_a_classification_and_its_uncertainty(classification):
    model, X, y = classification
    p = model.predict_proba(X)
    assert list(model.classes_) == ["low", "middle", "top"]
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), p)
    assert (model.predict(X) == model.classes_[p.argmax(1)]).all()
    assert model.score(X, y) > 0.6  # of three classes, after 400 rows
    density = model.log_predictive_density(X, y)
    np.testing.assert_allclose(density, np.log(p[np.arange(50), np.searchsorted(model.classes_, y)]))
    parts = model.decompose(X)
    entropy = -(p * np.log(p)).sum(1)
    np.testing.assert_allclose(parts.epistemic + parts.aleatoric, entropy, rtol=1e-3, atol=1e-4)
    draws = model.sample_y(X, 2000)
    share = (draws == "middle").mean(1)
    assert share == pytest.approx(p[:, 1], abs=5 * np.sqrt(0.25 / 2000))


def test_the_posterior_has_names(regression, classification):
    model, *_ = regression
    shapes = {name: a.shape for name, a in model.posterior_.items()}
    assert shapes == {"weights_1": (3, 3, 5), "bias_1": (3, 5), "weights_2": (3, 5, 1), "bias_2": (3, 1)}
    total = sum(a[0].size for a in model.posterior_.values())
    assert total == model.state_.particles.shape[1]
    model, X, _ = classification
    assert model.posterior_["relu.weights_1"].shape == (1, 3, 5)
    assert model.posterior_["linear.bias_1"].shape == (1, 3)
    # They are the parameters: the network's logits, by hand.
    named, state = model.posterior_, model.state_
    scale = np.sqrt(state.moments.square / state.moments.seen)
    z = np.clip((X - np.asarray(state.moments.mean)) / np.asarray(scale), -2.5, 2.5)
    by_hand = np.tanh(z @ named["tanh.weights_1"][0] + named["tanh.bias_1"][0]) @ named["tanh.weights_2"][0]
    by_hand = by_hand + named["tanh.bias_2"][0]
    target = opvi.mlp(3, (5,), opvi.categorical(), outputs=3, activation=jnp.tanh, prior_variance=None)
    tanh = target.predict(target.unravel(state.networks[1].particles[0]), jnp.asarray(z, jnp.float32))
    np.testing.assert_allclose(by_hand, tanh.logits, rtol=1e-4, atol=1e-4)


# --- learning -------------------------------------------------------------------------------------


def test_rows_of_weight_0_are_not_there(regression):
    model, *_ = regression
    X, y = drawn(450)
    weight = np.ones(450)
    weight[::9] = 0
    some = clone(model).fit(X, y, sample_weight=weight)
    assert same(some.state_, clone(model).fit(X[weight > 0], y[weight > 0]).state_)
    assert some.n_rows_seen_ == 400
    heavy = clone(model).fit(X[:400], y[:400], sample_weight=np.full(400, 5.0))
    assert not same(heavy.state_, model.state_)
    with pytest.raises(ValueError, match="negative"):
        clone(model).fit(X, y, sample_weight=-weight)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_learning_again_teaches_the_parameters_only(kind, request):
    """Errors on rows learnt before are too small: neither calibration nor scale nor counts may hear of them."""
    model, *_ = request.getfixturevalue(kind)
    X, y = drawn(20, seed=5)
    y = y if kind == "regression" else (y > 0).astype(np.int32)
    engine = pickle.loads(pickle.dumps(model))._engine
    engine.relearn((X * np.nan, y))
    assert same(engine.state, model.state_)
    engine.relearn((X, y))
    again = engine.state
    assert not same(again.particles, model.state_.particles)
    if kind == "regression":
        taught = find(again, NetworksState)._replace(particles=None, past=None)
        known = find(model.state_, NetworksState)._replace(particles=None, past=None)
        assert same(taught, known)
        again, before = (replaced(state, NetworksState, lambda _: ()) for state in (again, model.state_))
        assert same(again, before)
        return
    moved = {"particles", "networks", "linear"}
    for name, old, new in zip(again._fields, model.state_, again, strict=True):
        assert name in moved or same(old, new), name


def test_several_passes_fit_better_and_count_rows_once(regression):
    model, *_ = regression
    X, y = (rows[:400] for rows in drawn(450))
    passes = clone(model).set_params(n_epochs=3).fit(X, y)
    assert passes.n_rows_seen_ == int(passes.state_.rows) == 400
    assert passes.score(X, y) > model.score(X, y)
    assert same(find(passes.state_, NumbersState), find(model.state_, NumbersState))


@pytest.mark.slow
def test_remembered_rows_are_a_uniform_sample_and_teach_again():
    X, y = drawn(1200)
    model = opvi.OPVIRegressor(**REGRESSOR, memory_rows=40, shuffle=False).fit(X, y)
    state = model.state_
    rows, _ = opvi.tracking.kept_rows(state)
    kept = np.flatnonzero(np.isin(X[:, 0].astype(np.float32), np.asarray(rows[:, 0])))
    assert len(kept) == 40
    # The mean place of 40 rows drawn from 1,200: 5 standard errors.
    assert kept.mean() == pytest.approx(600, abs=5 * 1200 / np.sqrt(12 * 40))
    assert int(state.rows) == model.n_rows_seen_ == 1200
    assert model.score(X, y) > 0.8


@pytest.mark.usefixtures("_one_width")
def test_linear_models():
    """Without hidden layers: a line's slope, within 5 standard errors of least squares; a line between two classes."""
    X, _ = drawn(600)
    y = 3 * X[:, 0] - X[:, 1] / 50 + 0.1 * np.random.default_rng(1).normal(size=600)
    model = opvi.OPVIRegressor(hidden=(), n_particles=2, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.99
    origin, step = np.zeros((1, 3)), np.array([[1.0, 0, 0]])
    slope = model.predict(step)[0] - model.predict(origin)[0]
    assert slope == pytest.approx(3, abs=5 * 0.1 / np.sqrt(600) + 0.02)  # and the forgetting of old rows
    assert model.posterior_["weights_1"].shape == (2, WIDEST, 1)
    labels = (y > 0).astype(int)
    model = opvi.OPVIClassifier(hidden=(), random_state=0).fit(X, labels)
    assert model.score(X, labels) > 0.95
    assert set(model.posterior_) == {"linear.weights_1", "linear.bias_1"}
    assert "linear" in str(model.tracker_)


# --- in the company of others ---------------------------------------------------------------------


def test_pipelines_and_searches():
    X, y = drawn(120)
    model = make_pipeline(MinMaxScaler(), opvi.OPVIRegressor(**REGRESSOR))
    assert len(cross_val_score(model, X, y, cv=2)) == 2
    search = GridSearchCV(opvi.OPVIRegressor(**REGRESSOR), {"n_particles": [3, np.int64(3)]}, cv=2).fit(X, y)
    assert search.best_estimator_.n_rows_seen_ == 120


def test_frames_and_sparse_matrices_give_the_same_as_arrays(regression):
    model, X, _ = regression
    rows, y = drawn(60)
    frame = pd.DataFrame(rows, columns=["a", "b", "c"])
    plain = clone(model).fit(rows, y)
    named = clone(model).fit(frame, pd.Series(y))
    assert list(named.feature_names_in_) == ["a", "b", "c"]
    polar = clone(model).fit(pl.DataFrame(frame.to_dict("list")), pl.Series(y))
    assert list(polar.feature_names_in_) == ["a", "b", "c"]
    thin = clone(model).fit(sparse.csr_matrix(rows), y)
    assert same(plain.state_, named.state_)
    assert same(plain.state_, polar.state_)
    assert same(plain.state_, thin.state_)
    np.testing.assert_array_equal(plain.predict(X), thin.predict(sparse.csr_array(X)))
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        named.predict(frame[["b", "a", "c"]])
    with pytest.raises(ValueError, match="feature names should match"):
        named.partial_fit(frame.rename(columns={"a": "z"}), y)
    with pytest.warns(UserWarning, match="valid feature names"):
        named.predict(rows)


def test_a_large_sparse_matrix_warns(regression, monkeypatch):
    model, X, _ = regression
    monkeypatch.setattr(_base, "DENSE_WARNING", 100)
    with pytest.warns(UserWarning, match="made dense some rows at a time"):
        model.predict(sparse.csr_matrix(X))


# --- awkward data ---------------------------------------------------------------------------------


def test_before_learning():
    X, y = drawn(5)
    for model in (opvi.OPVIRegressor(), opvi.OPVIClassifier()):
        for call in (model.predict, model.decompose, lambda X, m=model: m.log_predictive_density(X, y)):
            with pytest.raises(NotFittedError):
                call(X)
        with pytest.raises(NotFittedError):
            _ = model.posterior_


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (np.nan, "contains NaN"),
        (np.inf, "contains infinity"),
        (1e300, "beyond 1e\\+18"),
        (1e19, "beyond 1e\\+18"),
    ],
)
def test_numbers_that_are_none(regression, spoil, message):
    model, X, y = regression
    bad = X.copy()
    bad[3, 1] = spoil
    for call in (lambda: model.partial_fit(bad, y), lambda: model.predict(bad), lambda: clone(model).fit(bad, y)):
        with pytest.raises(ValueError, match=message):
            call()
    wrong = y.copy()
    wrong[0] = spoil
    with pytest.raises(ValueError, match=message):
        model.partial_fit(X, wrong)


def test_wrong_shapes(regression):
    model, X, y = regression
    with pytest.raises(ValueError, match="X has 2 features, but OPVIRegressor is expecting 3"):
        model.predict(X[:, :2])
    with pytest.raises(ValueError, match="X has 2 features"):
        model.partial_fit(X[:, :2], y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.partial_fit(X, y[:-1])
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.log_predictive_density(X, y[:-1])
    with pytest.raises(ValueError, match="y contains NaN"):
        model.log_predictive_density(X[:1], [np.nan])
    with pytest.raises(ValueError, match="0 sample"):
        model.partial_fit(X[:0], y[:0])
    with pytest.raises(ValueError, match="levels must lie"):
        model.predict_quantiles(X, [0, 0.5])
    with pytest.raises(ValueError, match="`coverage` is 1"):
        model.predict_interval(X, 1)


def test_a_constant_target_and_a_constant_column():
    X, _ = drawn(60)
    model = opvi.OPVIRegressor(**REGRESSOR).fit(X, np.full(60, 4.0))
    mean, sd = model.predict(X, return_std=True)
    assert mean == pytest.approx(4, abs=0.1)
    assert (sd < 0.2).all()
    X[:, 1] = 1e6
    assert np.isfinite(opvi.OPVIRegressor(**REGRESSOR).fit(X, X[:, 0]).predict(X)).all()


@pytest.mark.usefixtures("_one_width")
def test_one_class_only():
    X, _ = drawn(40)
    model = opvi.OPVIClassifier(hidden=(), random_state=0).fit(X, ["only"] * 40)
    assert (model.predict(X) == "only").all()
    np.testing.assert_array_equal(model.predict_proba(X), np.ones((40, 1)))


def test_classes_never_named(classification):
    model, X, y = classification
    with pytest.raises(ValueError, match="y holds \\[0 1\\], but the classes so far"):
        model.partial_fit(X[:2], np.array([0, 1]))
    with pytest.raises(ValueError, match="y holds \\['other'\\], but the classes so far"):
        model.log_predictive_density(X[:2], np.array(["low", "other"]))
    with pytest.raises(ValueError, match="Unknown label type"):
        opvi.OPVIClassifier().fit(X, X[:, 0])
    fresh = opvi.OPVIClassifier(**CLASSIFIER)
    with pytest.raises(ValueError, match="but `classes` is \\[0 1\\]"):
        fresh.partial_fit(X, y, classes=[0, 1])
    assert not hasattr(fresh, "state_")  # nothing has begun
    with pytest.raises(ValueError, match="could not convert string to float"):
        opvi.OPVIRegressor(**REGRESSOR).fit(X, y)


@pytest.mark.slow
def test_classes_that_first_appear_in_a_later_call():
    rng = np.random.default_rng(0)
    centre = {"b": -3.0, "d": 3.0, "a": 9.0, "c": -9.0, "e": 15.0}
    y = np.concatenate([rng.choice(["b", "d"], 200), rng.choice(list(centre), 600)])
    X = np.array([[centre[label], 0.0] for label in y]) + rng.normal(size=(800, 2))
    model = opvi.OPVIClassifier(hidden=(), n_particles=4, memory_rows=50, random_state=0)
    model.partial_fit(X[:200], y[:200])
    before = model.predict_proba(X[:200])
    model._meet(np.array(["a", "c", "e"]))  # which changes nothing of what is known
    p = model.predict_proba(X[:200])
    assert model.classes_.tolist() == ["a", "b", "c", "d", "e"]
    shares = p[:, [1, 3]] / p[:, [1, 3]].sum(1, keepdims=True)
    np.testing.assert_allclose(shares, before, atol=0.02)
    for at in range(200, 800, 100):
        model.partial_fit(X[at : at + 100], y[at : at + 100])
    assert (model.predict(X[500:]) == y[500:]).mean() > 0.95
    assert model.predict_proba(X).sum(1) == pytest.approx(1)
    assert model.n_rows_seen_ == 800
    big = np.array([2**53, 2**53 + 1] * 50)
    assert opvi.OPVIClassifier(hidden=(), n_particles=4).fit(X[:100], big).classes_.tolist() == [2**53, 2**53 + 1]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"hidden": (0,)}, "`hidden` is \\(0,\\)"),
        ({"hidden": 5}, "`hidden` is 5"),
        ({"n_particles": 0}, "`n_particles` is 0"),
        ({"half_life": -1}, "`half_life` is -1"),
        ({"memory_rows": -1}, "`memory_rows` is -1"),
        ({"n_epochs": 0}, "`n_epochs` is 0"),
        ({"warm_up": -1}, "`warm_up` is -1"),
    ],
)
def test_settings_out_of_range(named, message):
    X, y = drawn(5)
    with pytest.raises(ValueError, match=message):
        opvi.OPVIRegressor(**{**REGRESSOR, **named}).fit(X, y)


def test_settings_changed_after_fitting_wait_for_the_next_fit(regression, request):
    model, X, y = regression
    model = pickle.loads(pickle.dumps(model)).set_params(hidden=(), n_particles=2)
    model.partial_fit(X[:20], y[:20])
    assert model.state_.particles.shape == (3, 26)
    request.getfixturevalue("_one_width")  # a program that is there already
    assert model.fit(X, y).state_.particles.shape == (2, WIDEST + 1)


def test_seeds(regression):
    model, X, y = regression
    for seed in (None, np.random.RandomState(1), np.int64(4)):
        assert np.isfinite(clone(model).set_params(random_state=seed).fit(X, y).predict(X)).all()
    shuffled = [clone(model).set_params(shuffle=True, random_state=s).fit(X, y).predict(X) for s in (1, 1, 2)]
    np.testing.assert_array_equal(shuffled[0], shuffled[1])
    assert not np.array_equal(shuffled[0], shuffled[2])


def test_an_update_that_was_refused_warns(regression):
    model, X, y = regression
    refused = pickle.loads(pickle.dumps(model))
    feed = refused._engine.feed

    def fails(*arguments, **named):
        fed = feed(*arguments, **named)
        return fed._replace(info=fed.info._replace(finite=~fed.info.finite))

    refused._engine.feed = fails
    with pytest.warns(RuntimeWarning, match="an update was not finite"):
        refused.partial_fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.loads(pickle.dumps(model)).partial_fit(X[:20] * 1e12, y[:20])


def test_estimators_are_found_at_the_root():
    assert "opvi.adapters.sklearn" in str(opvi.OPVIClassifier)
    assert "OPVIClassifier" in dir(opvi)
    with pytest.raises(AttributeError, match="has no attribute 'OPVICluster'"):
        _ = opvi.OPVICluster
