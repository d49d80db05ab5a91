"""Numbers far from 0: an offset in the data, which float32 cannot hold, costs nothing."""

import pickle

import numpy as np
import pytest

from opvi.adapters._tables import infer_schema, open_source
from opvi.adapters.river import Regressor
from opvi.adapters.sklearn import OPVIClassifier, OPVIRegressor
from opvi.app.learn import RunDirectory
from opvi.app.learn import _report as reports
from opvi.app.learn._predict import learnt, predict
from opvi.running._origin import origin_of
from tests.app.test_learning import learn

FAR_X, FAR_Y = np.array([1e6, 0.0, -1e12]), 1e9
SMALL = {"hidden": (), "n_particles": 4, "random_state": 0, "warm_up": 0}


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(260, 3)) * [1, 2, 1000]
    return x, x @ [1, -1, 0.001] + rng.normal(size=260) * 0.3


def test_only_what_lies_far_from_0_is_shifted():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(50, 1))
    columns = [z, z + 500, z + 1e6, 1e-9 * z - 1e-3, np.full((50, 1), 7.0), np.full((50, 1), 1e5), 0 * z]
    origin = origin_of(np.concatenate(columns, 1))
    np.testing.assert_array_equal(origin != 0, [False, False, True, True, False, True, False])
    assert abs(origin[2] - 1e6) < 1
    wild = z + 1e6
    wild[0] = 1e17  # one value decides nothing
    assert abs(origin_of(wild)[0] - 1e6) < 1
    np.testing.assert_array_equal(origin_of(np.array([[np.nan, 2e4], [np.nan, np.nan]])), [0, 2e4])
    np.testing.assert_array_equal(origin_of(np.full((1, 1), 900.0)), [0])


@pytest.mark.slow
def test_a_regressor_far_from_0(rows):
    (x, y), (near, far) = rows, (OPVIRegressor(**SMALL), OPVIRegressor(**SMALL))
    near.fit(x[:200], y[:200])
    far.fit(x[:200] + FAR_X, y[:200] + FAR_Y)
    far = pickle.loads(pickle.dumps(far))
    near.partial_fit(x[200:220], y[200:220])
    far.partial_fit(x[200:220] + FAR_X, y[200:220] + FAR_Y)
    ask, there = x[220:], x[220:] + FAR_X
    close = {"rtol": 0, "atol": 0.005}  # of 2.5
    np.testing.assert_allclose(far.predict(there) - FAR_Y, near.predict(ask), **close)
    np.testing.assert_allclose(far.predict(there, return_std=True)[1], near.predict(ask, return_std=True)[1], **close)
    np.testing.assert_allclose(far.predict_quantiles(there) - FAR_Y, near.predict_quantiles(ask), **close)
    np.testing.assert_allclose(far.sample_y(there, 3) - FAR_Y, near.sample_y(ask, 3), **close)
    densities = far.log_predictive_density(there, y[220:] + FAR_Y), near.log_predictive_density(ask, y[220:])
    np.testing.assert_allclose(*densities, rtol=0, atol=0.02)
    low, high = far.predict_interval(there)
    assert 0.8 < ((low <= y[220:] + FAR_Y) & (y[220:] + FAR_Y <= high)).mean() <= 1
    columns, target = far.origin_
    assert abs(target - FAR_Y) < 5
    np.testing.assert_allclose(columns, FAR_X, atol=2000, rtol=1e-3)
    assert near.origin_[1] == 0
    assert not near.origin_[0].any()
    assert near.predict(ask).dtype == np.float32


def test_a_classifier_far_from_0(rows):
    x, y = rows
    settings = {"hidden": (), "n_particles": 4, "random_state": 0}
    near = OPVIClassifier(**settings).fit(x[:200], y[:200] > 0)
    far = OPVIClassifier(**settings).fit(x[:200] + FAR_X, y[:200] > 0)
    np.testing.assert_allclose(far.predict_proba(x[200:] + FAR_X), near.predict_proba(x[200:]), atol=0.005)


@pytest.mark.slow
def test_a_river_model_far_from_0(rows):
    x, y = rows
    near, far = (Regressor(hidden=(), n_particles=4, warm_up=0, seed=0) for _ in range(2))

    def row(values, late):
        return {"a": values[0], "b": values[1]} if late < 60 else {"a": values[0], "b": values[1], "c": values[2]}

    for i in range(160):  # a column comes later
        near.learn_one(row(x[i], i), y[i])
        far.learn_one(row(x[i] + FAR_X, i), y[i] + FAR_Y)
    for i in range(160, 170):
        ask, there = row(x[i], i), row(x[i] + FAR_X, i)
        assert far.predict_one(there) - FAR_Y == pytest.approx(near.predict_one(ask), abs=0.01)
        said, other = far.predict_one(there, with_dist=True), near.predict_one(ask, with_dist=True)
        assert said.quantile(0.9) - FAR_Y == pytest.approx(other.quantile(0.9), abs=0.01)


@pytest.mark.slow
def test_a_run_far_from_0(rows, tmp_path):
    x, y = rows
    runs = []
    for name, shift, up in (("near", 0 * FAR_X, 0.0), ("far", FAR_X, FAR_Y)):
        table = np.column_stack([x + shift, y + up])
        lines = [",".join(repr(float(v)) for v in row) + "\n" for row in table]
        path, folder = tmp_path / f"{name}.csv", tmp_path / f"{name}.run"
        path.write_text("a,b,c,y\n" + "".join(lines[:150]))
        learn(path, folder)
        path.write_text("a,b,c,y\n" + "".join(lines))
        learn(path, folder)
        known = learnt(RunDirectory(folder))
        with open_source(path) as source:
            ((said, _),) = predict(known, source)
        runs.append((said, known, reports.contents(known, "", "")))
    (near, _, one), (far, known, other) = runs
    for name in ("mean", "q0.05", "q0.95"):
        np.testing.assert_allclose(far[name] - FAR_Y, near[name], rtol=0, atol=0.01)
    np.testing.assert_allclose(far["sd"], near["sd"], rtol=0, atol=0.01)
    assert other.total.error == pytest.approx(one.total.error, rel=0.01)
    assert other.total.covered == pytest.approx(one.total.covered, abs=0.01)
    assert abs(known.schema.shift - FAR_Y) < 5
    effects = ({effect.feature: effect for effect in page.effects} for page in (one, other))
    for before, after in zip(*(map(found.get, "ac") for found in effects), strict=True):
        shift = dict(zip("ac", FAR_X[[0, 2]], strict=True))[before.feature]
        np.testing.assert_allclose(
            np.array(after.values) - shift, before.values, rtol=0, atol=0.01 * np.ptp(before.values)
        )
        np.testing.assert_allclose(np.array(after.mean) - FAR_Y, before.mean, rtol=0, atol=0.01)


def test_two_years_keep_their_names(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("year,y\n" + "".join(f"{2023 + i % 2},{i % 7}.5\n" for i in range(60)))
    with open_source(path) as source:
        schema = infer_schema(source.blocks(), "y")
    assert schema.columns[0].shift == 2023.5
    effect = reports.Effect("year", "text", ["-0.5", "0.5"], [[1.0, 2.0]], [[0.0, 1.0]], [[2.0, 3.0]], 0.5)
    assert reports._located(effect, 2023.5, 10.0).values == ["2023", "2024"]
    assert reports._located(effect, 2023.5, 10.0).mean == [[11.0, 12.0]]
