"""Estimators on data frames as people have them: strings, categories, dates and gaps."""

import contextlib
import pickle
from datetime import UTC, datetime, timedelta

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline

import opvi
from opvi.adapters._tables import infer_schema, open_source
from opvi.adapters.sklearn._frames import encoded, understood

SMALL = {"hidden": (), "n_particles": 2, "random_state": 0}


def frame(rows=240, seed=0):
    """y depends on a text, a category, the hour and a number with gaps."""
    rng = np.random.default_rng(seed)
    shop, size = rng.choice(["north", "south", "west"], rows), rng.choice(["s", "m", "l"], rows)
    when = [datetime(2024, 1, 1, tzinfo=UTC) + timedelta(hours=int(h)) for h in np.sort(rng.integers(0, 2000, rows))]
    number = rng.normal(100, 10, rows)
    y = 3.0 * (shop == "south") + 2.0 * (size == "l") + (number - 100) / 10
    y = y + 2 * np.sin([2 * np.pi * w.hour / 24 for w in when]) + 0.1 * rng.normal(size=rows)
    gaps = rng.random(rows) < 0.1
    table = pd.DataFrame(
        {
            "shop": np.where(rng.random(rows) < 0.05, None, shop),
            "size": pd.Categorical(size),
            "when": pd.to_datetime(when).tz_localize(None),
            "number": np.where(gaps, np.nan, number),
            "flag": rng.random(rows) < 0.5,
        }
    )
    return table, y


@pytest.fixture(scope="module")
def learnt():
    X, y = frame()
    return opvi.OPVIRegressor(**SMALL).fit(X, y), X, y


def test_the_numbers_are_those_of_the_command(learnt, tmp_path):
    """The same table as a Parquet file, read by `opvi learn`'s own encoder."""
    model, X, y = learnt
    X.assign(y=y).to_parquet(tmp_path / "a.parquet")
    with open_source(tmp_path / "a.parquet") as source:
        (block,) = source.blocks()
    schema = infer_schema([block], "y")
    assert understood(X).features == schema.features
    assert understood(X).columns == schema.columns
    np.testing.assert_array_equal(encoded(X, understood(X)), schema.encode(block).x)
    # `fit` learns the rows in random order: a trend is none that forgetting would follow.
    assert [name for name in model.encoded_features_ if name != "when: days"] == schema.features
    kept = [place for place, name in enumerate(model.encoded_features_) if name != "when: days"]
    np.testing.assert_array_equal(model._checked(X)[:, kept], schema.encode(block).x)
    assert model.n_features_in_ == 5
    assert model.feature_names_in_.tolist() == list(X.columns)


def test_cross_validation_on_strings_dates_and_gaps():
    X, y = frame()
    scores = cross_val_score(opvi.OPVIRegressor(**SMALL), X, y, cv=2, error_score="raise")
    assert scores.min() > 0.8


def test_every_kind_of_frame_is_read(learnt):
    model, X, _ = learnt
    expected = model.predict(X[:50])
    polars = pl.from_pandas(X[:50])
    arrow = pa.Table.from_pandas(X[:50], preserve_index=False)
    for other in (polars, polars.lazy(), arrow, duckdb.arrow(arrow)):
        np.testing.assert_array_equal(model.predict(other), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(model)).predict(X[:50]), expected)
    assert np.isfinite(model.log_predictive_density(X[:3], [0.0, 1.0, 2.0])).all()
    unseen = X[:5].assign(shop=["east", None, "north", "north", "north"], number=np.nan, when=pd.NaT)
    assert np.isfinite(model.predict(unseen)).all()


def test_what_does_not_fit_is_named(learnt):
    model, X, _ = learnt
    with pytest.raises(ValueError, match="but the estimator has learnt from a data frame"):
        model.predict(np.zeros((3, 5)))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(X.drop(columns="shop"))
    broken = X[:4].assign(number=["1", "2", "oops", "4"])
    with pytest.raises(ValueError, match="row 2 of X: column 'number': 'oops' is not a number"):
        model.predict(broken)
    with pytest.raises(ValueError, match="could not convert string to float"):
        opvi.OPVIRegressor(**SMALL, encode=False).fit(X, np.zeros(len(X)))


def test_frames_of_numbers_stay_arrays(learnt):
    X, y = frame(60)
    names = [f"c{i}" for i in range(len(learnt[0].encoded_features_) - 1)]  # as wide as a model that is compiled
    plain = X[["flag"]].assign(**{name: np.arange(60.0) + i for i, name in enumerate(names)})
    model = opvi.OPVIRegressor(**SMALL).fit(plain, y)
    assert model._schema is None
    assert model.encoded_features_ == ["flag", *names]


def test_columns_left_out_are_named_in_one_warning():
    rng = np.random.default_rng(0)
    y = rng.normal(size=60)
    X = pd.DataFrame({"a": y, "empty": [None] * 60, "month": pd.period_range("2000-01", periods=60, freq="M")})
    X = X.assign(list=[[1.0]] * 60, name=[f"order {i}" for i in range(60)], count=np.arange(60))
    with pytest.warns(UserWarning, match="not learnt from") as said:
        model = opvi.OPVIRegressor(**SMALL).fit(X, y)
    assert len(said) == 1
    assert said[0].filename == __file__
    for part in (
        "'empty' (no value among the first rows)",
        "'month' (it holds lists, objects or a type that is not read)",
        "'list' (it holds lists",
        "'name' (every value differs)",
        "'count' (it counts the rows). Drop them",
    ):
        assert part in str(said[0].message)
    assert "'a'" not in str(said[0].message)
    model.partial_fit(X, y)
    assert np.isfinite(model.predict(X)).all()
    for other in (pl.DataFrame({"a": y, "count": range(60), "b": ["x", "y"] * 30}), pa.table({"a": y, "count": y * 0})):
        with pytest.warns(UserWarning, match="'count' ") if "b" in other.columns else contextlib.nullcontext():
            opvi.OPVIRegressor(**SMALL).fit(other, y)


def test_gaps_may_come_later_in_frames_of_numbers():
    """They count as the column's mean in the first frame; arrays with NaN are refused, as scikit-learn asks."""
    rng = np.random.default_rng(0)
    X = pd.DataFrame(rng.normal(100, 3, size=(90, 3)), columns=["a", "b", "c"])
    y = X["a"].to_numpy()
    late = X.copy()
    late.iloc[-1, 1] = np.nan
    scores = cross_val_score(opvi.OPVIRegressor(**SMALL), late, y, cv=3, error_score="raise")
    assert np.isfinite(scores).all()
    model, array = opvi.OPVIRegressor(**SMALL).fit(X, y), opvi.OPVIRegressor(**SMALL).fit(X.to_numpy(), y)
    np.testing.assert_array_equal(model.predict(X), array.predict(X.to_numpy()))
    filled = late.fillna(X.mean())
    expected = model.predict(filled)
    with_none = late.astype({"b": "Float64"}).assign(c=late["c"].astype(object))
    for other in (late, with_none, pl.from_pandas(late)):
        np.testing.assert_allclose(model.predict(other), expected, rtol=1e-6)
    np.testing.assert_allclose(pickle.loads(pickle.dumps(model)).predict(late), expected, rtol=1e-6)
    both = [opvi.OPVIRegressor(**SMALL).partial_fit(X, y).partial_fit(more, y) for more in (late, filled)]
    np.testing.assert_array_equal(*(one.predict(X) for one in both))
    unknown = opvi.OPVIRegressor(**SMALL, encode=False).fit(X, y)
    endless = late.replace(late.iloc[0, 0], np.inf)
    for one, rows in ((array, late.to_numpy()), (unknown, late), (model, endless)):
        with pytest.raises(ValueError, match="contains (NaN|infinity)"):
            one.predict(rows)


@pytest.mark.slow
def test_a_classifier_in_a_pipeline_learns_frames_bit_by_bit():
    X, y = frame()
    label = np.where(y > 2, "much", "little")
    model = make_pipeline(opvi.OPVIClassifier(hidden=(), n_particles=4, random_state=0)).fit(X, label)
    assert model.score(X, label) > 0.85
    step = opvi.OPVIClassifier(hidden=(), n_particles=4, random_state=0)
    for at in range(0, 240, 80):
        step.partial_fit(X[at : at + 80], np.where(at == 160, "late", label[at : at + 80]))
    assert step.classes_.tolist() == ["late", "little", "much"]
    assert step.predict_proba(X[:10]).shape == (10, 3)
    assert step.log_predictive_density(X[:2], label[:2]).shape == (2,)
