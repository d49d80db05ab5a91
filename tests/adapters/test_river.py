"""The River models: River's own checks, features and classes that come and go, predictions that never look ahead."""

import math
import pickle
from datetime import UTC, date, datetime, timedelta

import jax
import numpy as np
import pandas as pd
import polars as pl
import pytest
from river import checks, compose, datasets, evaluate, feature_extraction, metrics, preprocessing

import opvi
from opvi.adapters.river import Classifier, PredictiveDistribution, Regressor
from opvi.adapters.river._features import VALUES, Columns
from opvi.adapters.river._model import OnlineModel
from opvi.running import Engine
from opvi.tracking._inside import find
from opvi.tracking._recommended import widened_regressor
from opvi.tracking._widening import widened_classifier
from opvi.tracking.experts._levels import LevelsState
from opvi.tracking.experts._usual import BUDGET
from tests.tracking.parts import stack

SMALL = {  # networks take twice as long to compile, and pass as well
    "regressor": Regressor(hidden=(), n_particles=2, seed=0),
    "classifier": Classifier(hidden=(), seed=0),
}
NAMES = ("a", "b", "c")
KEY = jax.random.key(0)
WIDEST = 20  # features in River's checks


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, 3)) * [1, 100, 0.01]
    return [dict(zip(NAMES, row, strict=True)) for row in X.tolist()], (2 * X[:, 0] + X[:, 1] / 100).tolist()


def linear(kind, **named):
    return {"regressor": Regressor, "classifier": Classifier}[kind](hidden=(), n_particles=2, seed=0, **named)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


# --- River's own checks ---------------------------------------------------------------------------


def all_checks():
    for name, model in SMALL.items():
        seen: dict[str, int] = {}
        for check in checks.yield_checks(model.clone({"seed": None})):  # one more check where there is no seed
            seen[check.__name__] = seen.get(check.__name__, 0) + 1
            yield pytest.param(model, check, id=f"{name}:{check.__name__}:{seen[check.__name__]}")


@pytest.fixture
def _one_width(monkeypatch):
    """Models with room for every feature of these tests from the first row on: one width, compiled once.

    Widening has tests of its own.
    """
    needed = OnlineModel._needed
    monkeypatch.setattr(OnlineModel, "_needed", lambda self: (max(WIDEST, *needed(self)),))


@pytest.mark.parametrize(("model", "check"), list(all_checks()))
@pytest.mark.usefixtures("_one_width")
def test_conventions_of_river(model, check):
    """All of them: there is no exception."""
    check(model.clone())


@pytest.mark.usefixtures("_one_width")
@pytest.mark.parametrize("kind", ["regressor", "classifier"])
def test_pipelines_and_progressive_validation(kind):
    if kind == "regressor":
        model = compose.Select("gallup", "ipsos", "you_gov") | preprocessing.StandardScaler() | linear(kind)
        score = evaluate.progressive_val_score(datasets.TrumpApproval().take(300), model, metrics.MAE())
        assert score.get() < 5  # its targets are near 43
    else:
        model = compose.Select("empty_server_form_handler", "popup_window", "https") | linear(kind)
        score = evaluate.progressive_val_score(datasets.Phishing().take(300), model, metrics.Accuracy())
        assert score.get() > 0.75


# --- learning and predicting ----------------------------------------------------------------------


def test_rows_one_at_a_time_equal_batches_bit_for_bit():
    x, y = rows(45)
    x = [{**row, "d": row["a"] * row["b"]} for row in x]  # as wide as the model of another test
    model = linear("regressor")
    for row, target in zip(x, y, strict=True):
        model.learn_one(row, target)
    assert model.n_rows_seen == 40
    X = np.array([list(row.values()) for row in x], np.float32)
    tracker = opvi.regressor(4, hidden=(), particles=2)
    fed = Engine(tracker, model._number, batch=20)
    fed.feed((X[:40], np.array(y[:40])))
    assert same(model._state, fed.state)
    model.flush()  # the other five
    fed.feed((X[40:], np.array(y[40:])), last=True)
    assert same(model._state, fed.state)
    assert model.n_rows_seen == 45


@pytest.mark.usefixtures("_one_width")
@pytest.mark.parametrize("kind", ["regressor", "classifier"])
def test_predictions_do_not_see_what_they_predict(kind):
    """What is said about a row does not depend on its own target, nor on any after it."""
    x, y = rows(60)
    y = y if kind == "regressor" else [value > 0 for value in y]
    said = []
    for flipped in (60, 30):
        model, each = linear(kind), []
        for place, (row, target) in enumerate(zip(x, y, strict=True)):
            each.append(model.predict_one(row) if kind == "regressor" else model.predict_proba_one(row).get(True))
            model.learn_one(row, target if place < flipped else (not target if kind == "classifier" else -target))
        said.append(each)
    assert said[0][:31] == said[1][:31]
    assert said[0][40:] != said[1][40:]


@pytest.mark.usefixtures("_one_width")
def test_a_pickled_model_goes_on_bit_for_bit():
    x, y = rows(50)
    model = linear("classifier")
    for row, target in zip(x[:30], y[:30], strict=True):
        model.learn_one(row, target > 0)
    other = pickle.loads(pickle.dumps(model))  # ten rows wait
    for row, target in zip(x[30:], y[30:], strict=True):
        assert model.predict_proba_one(row) == other.predict_proba_one(row)
        model.learn_one(row, target > 0)
        other.learn_one(row, target > 0)
    assert same(model._state, other._state)


@pytest.mark.usefixtures("_one_width")
@pytest.mark.parametrize("labels", [(True, False), (0, 1), ("a", "b"), (1.5, -2.0)], ids=str)
def test_labels_and_names_of_any_kind_survive_skops(labels):
    """It saves the keys of a dictionary as strings, and `bool("False")` is True."""
    skops = pytest.importorskip("skops.io")
    x, y = rows(50)
    # Strings, dates, gaps and names of all kinds; the last rows wait.
    x = [
        {True: row["a"], False: row["b"] > 0, None: row["c"], 3: f"{i % 3}", 2.5: i % 2 > 0 or None, "day": day(i)}
        for i, row in enumerate(x)
    ]
    model = Classifier(hidden=(), seed=0, neighbour_rows=0)
    for row, target in zip(x, y, strict=True):
        model.learn_one(row, labels[int(target > 0)])
    data = skops.dumps(model)
    again = skops.loads(data, trusted=skops.get_untrusted_types(data=data))
    assert again._labels == model._labels
    assert vars(again._columns).keys() == vars(model._columns).keys()
    for held, kept in ((again._columns, model._columns), (again._dates, model._dates)):
        assert all(same_held(value, vars(kept)[name]) for name, value in vars(held).items())
    for one in (model, again):
        one.flush()
    assert again.predict_proba_one(x[0]) == model.predict_proba_one(x[0])
    again.learn_one({**x[0], "new": 1.0}, labels[0])
    again.flush()


def day(i):
    return datetime(2024, 1, 1 + i % 28, i % 24)


def same_held(a, b):
    return np.array_equal(a, b, equal_nan=True) if isinstance(a, list | np.ndarray) else (type(a), a) == (type(b), b)


@pytest.mark.usefixtures("_one_width")
def test_a_model_pickled_by_an_older_version_loads():
    x, y = rows(30)
    model = linear("classifier")
    for row, target in zip(x, y, strict=True):
        model.learn_one(row, target > 0)
    older, columns = Classifier.__new__(Classifier), Columns.__new__(Columns)
    columns.__setstate__(dict(vars(model._columns)))  # dictionaries as they were
    older.__setstate__({**vars(model), "_columns": columns})
    assert older.predict_proba_one(x[0]) == model.predict_proba_one(x[0])
    assert older._labels == model._labels
    assert older._waiting == model._waiting


@pytest.mark.usefixtures("_one_width")
def test_the_first_predictions():
    assert Regressor().predict_one({"a": 1}) is None
    assert Regressor().predict_one({"a": 1}, with_dist=True) is None
    assert np.isnan(Regressor().predict_many(pd.DataFrame({"a": [1]}))).all()
    assert Classifier().predict_proba_one({"a": 1}) == {}
    assert Classifier().predict_one({"a": 1}) is None
    model = linear("regressor")
    model.learn_one({"a": 1}, 4)
    model.learn_one({"a": 2}, 6)
    assert model.predict_one({"a": 1}) == 5
    assert isinstance(model.predict_one({"a": 1}, with_dist=True), PredictiveDistribution)
    model = linear("classifier")
    model.learn_one({"a": 1}, "yes")
    assert model.predict_proba_one({}) == {"yes": 1.0}


@pytest.mark.usefixtures("_one_width")
def test_a_predictive_distribution():
    x, y = rows(200)
    model = linear("regressor")
    for row, target in zip(x, y, strict=True):
        model.learn_one(row, target)
    row = x[0]
    dist = model.predict_one(row, with_dist=True)
    assert dist.mu == dist.mode == pytest.approx(model.predict_one(row), rel=1e-5)
    assert dist.n_samples == 200
    assert f"μ={dist.mu:.3f}" in repr(dist)
    grid = np.linspace(dist.mu - 60 * dist.sigma, dist.mu + 60 * dist.sigma, 2001)
    density = np.array([dist(value) for value in grid])
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)
    spread = np.sqrt(np.trapezoid(density * (grid - dist.mu) ** 2, grid))
    assert spread == pytest.approx(dist.sigma, rel=0.02)
    assert math.log(dist(dist.mu)) == pytest.approx(dist.log_pdf(dist.mu))
    assert dist.cdf(dist.quantile(0.9)) == pytest.approx(0.9, abs=1e-6)
    draws = [dist.sample() for _ in range(400)]
    assert np.mean(draws) == pytest.approx(dist.mu, abs=5 * dist.sigma / np.sqrt(400))
    with pytest.raises(ValueError, match="`q` is 1"):
        dist.quantile(1)
    for change in (dist.update, dist.revert):
        with pytest.raises(NotImplementedError, match="learn_one"):
            change(1.0)


@pytest.mark.usefixtures("_one_width")
@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_many_rows_at_once(frame):
    x, y = rows(60)
    labels = ["up" if value > 0 else "down" for value in y]
    series = pd.Series if frame is pd.DataFrame else pl.Series
    one, many = linear("classifier"), linear("classifier")
    for row, target in zip(x, labels, strict=True):
        one.learn_one(row, target)
    many.learn_many(frame(x), series(labels))
    assert same(one._state, many._state)
    p = many.predict_proba_many(frame(x))
    assert list(p.columns) == list(many.predict_proba_one(x[0]))
    assert p["up"][0] == pytest.approx(many.predict_proba_one(x[0])["up"], rel=1e-5)
    assert list(many.predict_many(frame(x[:9]))) == [one.predict_one(row) for row in x[:9]]
    regressor = linear("regressor")
    assert np.isnan(list(regressor.predict_many(frame(x[:2])))).all()  # before the first row there is no answer
    regressor.learn_many(frame(x), series(y))
    assert len(regressor.predict_many(frame(x))) == 60


# --- features that come and go --------------------------------------------------------------------


def test_a_table_of_features():
    columns = Columns(6)
    assert columns.meet([{"b": 1, "a": 2.5, "t": "x"}]) == [0, 1]  # by name, whatever the order in the row
    columns.widen(4)
    assert columns.row({"a": 3, "t": "x"}) == pytest.approx([3, math.nan, 1, 0], nan_ok=True)
    assert columns.row({"a": None, "b": True, "t": "new"}) == pytest.approx([math.nan, 1, 0, 0], nan_ok=True)
    assert columns.row({"a": math.inf, "b": np.float32(2), "z": 4}) == pytest.approx([math.nan, 2, 0, 0], nan_ok=True)
    columns.meet([dict.fromkeys("cdefgh", 1.0)])
    assert columns.count == 6  # the rest share
    assert max(columns.numbers.values()) < 6
    columns = Columns(100)
    columns.meet([{"t": f"value {i}"} for i in range(50)])
    assert columns.count == VALUES
    columns.widen(VALUES)
    assert sum(columns.row({"t": "value 49"})) == sum(columns.row({"t": "never seen"})) == 1


@pytest.mark.usefixtures("_one_width")
def test_texts_numbers_and_gaps_are_learnt_from():
    """y is a text's effect plus a slope: both are found, and a missing number counts as its mean."""
    rng = np.random.default_rng(0)
    effect = {"red": 0.0, "green": 5.0, "blue": 10.0}
    model = linear("regressor")
    for _ in range(400):
        colour, number = rng.choice(list(effect)), rng.normal(100)
        x = {"colour": colour, "number": number if rng.random() > 0.1 else None}
        model.learn_one(x, effect[colour] + 2 * (number - 100) + 0.1 * rng.normal())
    for colour, value in effect.items():
        assert model.predict_one({"colour": colour, "number": 100.0}) == pytest.approx(value, abs=0.5)
        assert model.predict_one({"colour": colour}) == pytest.approx(value, abs=0.5)
    slope = model.predict_one({"colour": "red", "number": 101.0}) - model.predict_one(
        {"colour": "red", "number": 100.0}
    )
    assert slope == pytest.approx(2, abs=0.3)  # the gaps pull it down a little


def progressive(model, rows, targets, loss):
    """Mean loss of predicting every row before it is learnt, after the first 100."""
    losses = []
    for x, y in zip(rows, targets, strict=True):
        said = model.predict_one(x)
        losses.append(math.nan if said is None else loss(said, y))  # None before the first row
        model.learn_one(x, y)
    return np.mean(losses[100:])


@pytest.mark.slow
def test_words_that_are_left_out_are_not_there():
    """Behind `BagOfWords` a model is as good as with all zeros written out."""
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(12)]
    topics = {"sport": words[:4], "trade": words[4:8]}
    label = rng.choice(list(topics), 500)
    texts = [" ".join([*rng.choice(topics[k], 2), *rng.choice(words[8:], 4), "the"]) for k in label]
    bags = [dict(feature_extraction.BagOfWords().transform_one(text)) for text in texts]
    assert all(len(bag) < 13 for bag in bags)
    whole = [{word: bag.get(word, 0) for word in [*words, "the"]} for bag in bags]
    wrong = lambda said, y: float(said != y)  # noqa: E731
    pipeline = feature_extraction.BagOfWords() | linear("classifier")
    sparse, dense = progressive(pipeline, texts, label, wrong), progressive(linear("classifier"), whole, label, wrong)
    assert sparse <= dense + 0.01
    assert sparse < 0.03


@pytest.mark.usefixtures("_one_width")
def test_zeros_that_an_encoder_drops_are_zeros():
    rng = np.random.default_rng(1)
    effect = dict(zip("abcdef", rng.normal(0, 5, 6), strict=True))
    rows = [{"kind": str(rng.choice(list(effect)))} for _ in range(500)]
    targets = [effect[x["kind"]] + 0.1 * rng.normal() for x in rows]
    far = lambda said, y: abs(said - y)  # noqa: E731
    errors = [
        progressive(preprocessing.OneHotEncoder(drop_zeros=drop) | linear("regressor"), rows, targets, far)
        for drop in (True, False)
    ]
    assert errors[0] < 1.01 * errors[1]


@pytest.mark.usefixtures("_one_width")
def test_dates_are_hours_and_weekdays_and_the_season_after_a_year():
    model, start = linear("regressor"), datetime(2023, 1, 2, tzinfo=UTC)
    rng = np.random.default_rng(0)
    for _ in range(200):
        when = start + timedelta(hours=int(rng.integers(24)), days=int(rng.integers(28)))
        model.learn_one({"when": when}, 10 * math.sin(2 * math.pi * when.hour / 24) + (when.weekday() == 0))
    names = {f"when: {cycle} {wave}" for cycle in ("hour", "weekday") for wave in ("sin", "cos")}
    assert set(model._columns.numbers) == names
    six = model.predict_one({"when": start.replace(hour=6)})
    assert six - model.predict_one({"when": start.replace(hour=18)}) == pytest.approx(20, abs=1)
    model.learn_one({"when": np.datetime64("2024-03-01T12:00")}, 0.0)
    model.learn_one({"when": date(2024, 3, 2)}, 0.0)
    model.learn_one({"when": np.datetime64("NaT")}, 0.0)
    model.flush()
    assert set(model._columns.numbers) == names | {"when: year sin", "when: year cos"}


def test_a_feature_that_appears_late_is_learnt_and_what_was_known_stays():
    x, _ = rows(800)
    model = linear("regressor")
    for row in x[:300]:
        model.learn_one({"a": row["a"]}, 3 * row["a"] + 7)
    before = model.predict_one({"a": 1.0})
    assert before == pytest.approx(10, abs=0.3)
    for row in x[300:340]:
        model.learn_one({"a": row["a"], "b": row["b"], "c": row["c"]}, 3 * row["a"] + 7)
    assert model._sizes == (4,)  # room for one more
    assert model._raw_memory_usage > sum(leaf.nbytes for leaf in jax.tree.leaves(model._state))
    assert model.predict_one({"a": 1.0}) == pytest.approx(10, abs=0.3)
    for row in x[340:]:
        model.learn_one(row, 3 * row["a"] + 7 + row["b"] / 50)
    assert model.predict_one({"a": 1.0, "b": 100.0, "c": 0.0}) == pytest.approx(12, abs=0.5)


@pytest.mark.usefixtures("_one_width")
def test_classes_that_appear_late():
    x, y = rows(500)
    model = linear("classifier")
    for row, value in zip(x[:200], y[:200], strict=True):
        model.learn_one(row, "up" if value > 0 else "down")
    model.learn_one(x[200], "far up")  # waits: there is no room for it yet
    p = model.predict_proba_one(x[0])
    assert p["far up"] == pytest.approx(1 / 202, rel=0.02)
    assert sum(p.values()) == pytest.approx(1)
    for row, value in zip(x[201:], y[201:], strict=True):
        model.learn_one(row, "far up" if value > 2 else "up" if value > 0 else "down")
    right = [
        model.predict_one(row) == ("far up" if value > 2 else "up" if value > 0 else "down")
        for row, value in zip(x[:200], y[:200], strict=True)
    ]
    assert np.mean(right) > 0.8


def test_the_first_labels_say_how_many_classes_to_make_room_for(monkeypatch):
    """Row by row, a model for each number of classes would be compiled; and what waited is learnt row by row too."""
    begun, fed = [], set()
    begin, learn = OnlineModel._begun, Engine.learn
    monkeypatch.setattr(Engine, "learn", lambda self, batches: fed.add(batches.weight.shape) or learn(self, batches))
    monkeypatch.setattr(OnlineModel, "_begun", lambda self, state: begun.append(self._sizes) or begin(self, state))
    x, y = rows(9)
    labels = [int(value > -0.5) + int(value > 0.5) for value in y]
    assert len(set(labels[:8])) == 3
    model = linear("classifier", buffer=1)
    for row, label in zip(x[:7], labels, strict=False):
        model.learn_one(row, label)
    assert begun == []
    shares = {label: labels[:7].count(label) + 1 for label in labels[:7]}
    p = model.predict_proba_one(x[7])
    assert p == pytest.approx({label: count / sum(shares.values()) for label, count in shares.items()})
    for row, label in zip(x[7:], labels[7:], strict=True):
        model.learn_one(row, label)
    assert begun == [(3, 4)]
    assert fed == {(1, 1)}  # one program
    assert model.n_rows_seen == int(model._state.rows) == int(model._state.round) == 9
    early = linear("classifier", buffer=1)
    early.learn_one(x[0], labels[0])
    early.flush()
    assert early.n_rows_seen == 1


@pytest.mark.slow
def test_single_rows_are_learnt_at_once_and_there_is_room_for_features():
    x, y = rows(70)
    model = Regressor(hidden=(3,), n_particles=2, buffer=1, neighbour_rows=0, seed=0)
    for row, target in zip(x[:28], y, strict=False):
        model.learn_one({"a": row["a"], "b": row["b"]}, target)
    assert model.n_rows_seen == 28
    assert int(model._state.rows) == 28  # predictions know of all rows
    assert model._raw_memory_usage > sum(leaf.nbytes for leaf in jax.tree.leaves(model._state))
    model.learn_one(x[28], y[28])  # a third feature
    assert model._sizes == (4,)
    model = pickle.loads(pickle.dumps(model))
    for row, target in zip(x[29:], y[29:], strict=True):
        model.learn_one(row, target)
    assert int(model._state.rows) == 70
    assert model.predict_one({"a": 0.5, "b": 0.0, "c": 0.0}) == pytest.approx(1, abs=0.7)


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "particles"), [((4,), 2), ((60,), 25)])
def test_a_widened_regressor_says_the_same(hidden, particles):
    """With whole covariances, and with a wide network's in blocks."""
    narrow, wide = (opvi.regressor(f, hidden=hidden, particles=particles, budget=BUDGET) for f in (3, 14))
    if hidden == (60,):
        assert (1 + 60 * 16) ** 2 * 4 * particles > BUDGET > (1 + 60 * 5) ** 2 * 4 * particles
    x, y = rows(40)
    X = np.array([list(row.values()) for row in x], np.float32)
    state = narrow.init(KEY)
    for start in (0, 20):
        batch = opvi.Batch(
            (X[start : start + 20], np.array(y[start : start + 20], np.float32)), np.ones(20, np.float32)
        )
        state, _ = narrow.step(KEY, state, batch)
    wider = widened_regressor(wide, state, wide.init(KEY))
    assert jax.tree.map(np.shape, wider) == jax.tree.map(np.shape, wide.init(KEY))
    np.testing.assert_array_equal(find(wider, LevelsState).table[:3], find(state, LevelsState).table)
    np.testing.assert_array_equal(stack(wider).own.squares[:8, :8], stack(state).own.squares)
    padded = np.pad(X, ((0, 0), (0, 11)))
    before, after = narrow.predict(state, X), wide.predict(wider, padded)
    blocks = hidden == (60,)  # they drop some correlations, and with them some variance, by which experts are weighed
    np.testing.assert_allclose(before.mean(), after.mean(), rtol=1e-4, atol=0.03 if blocks else 1e-5)
    if not blocks:
        np.testing.assert_allclose(before.sd(), after.sd(), rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [(), (4,)])
def test_a_widened_classifier_says_the_same(hidden):
    narrow, wide = (opvi.classifier(f, c, hidden=hidden, particles=2, half_life=1e3) for f, c in ((3, 2), (5, 4)))
    x, y = rows(40)
    X = np.array([list(row.values()) for row in x], np.float32)
    labels = (np.array(y) > 0).astype(np.int32)
    state = narrow.init(KEY)
    for start in (0, 20):
        state, _ = narrow.step(
            KEY, state, opvi.Batch((X[start : start + 20], labels[start : start + 20]), np.ones(20, np.float32))
        )
    wider = widened_classifier(state, wide.init(KEY))
    assert jax.tree.map(np.shape, wider) == jax.tree.map(np.shape, wide.init(KEY))
    # The networks' logits of the old classes are the same.
    padded = np.pad(X, ((0, 0), (0, 2)))
    for old, new in zip(state.networks, wider.networks, strict=True):
        z = jax.random.normal(KEY, (6, 3))
        targets = [opvi.mlp(f, hidden, opvi.categorical(), outputs=c, prior_variance=None) for f, c in ((3, 2), (5, 4))]
        a = targets[0].predict(targets[0].unravel(old.particles[0]), z).logits
        b = targets[1].predict(targets[1].unravel(new.particles[0]), np.pad(z, ((0, 0), (0, 2)))).logits
        np.testing.assert_allclose(a, b[:, :2], rtol=1e-4, atol=1e-5)
    if not hidden:  # linear filters begin with even odds for a new class, and leave the others' odds as they were
        p = np.asarray(wide.predict(wider, padded).probabilities())
        np.testing.assert_allclose((p[:, 1] > p[:, 0]), np.asarray(narrow.predict(state, X).classes()) == 1)
    # It learns on, and is not led astray.
    both = (labels + 2 * (X[:, 2] > 0.01)).astype(np.int32)
    for start in (0, 20):
        wider, info = wide.step(
            KEY, wider, opvi.Batch((padded[start : start + 20], both[start : start + 20]), np.ones(20, np.float32))
        )
        assert info.finite


# --- awkward rows ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_awkward_rows():
    model = linear("regressor")
    for y in (math.nan, math.inf, 1e19):
        with pytest.raises(ValueError, match="`y` is"):
            model.learn_one({"a": 1}, y)
    with pytest.raises(ValueError, match="`w` is -1"):
        model.learn_one({"a": 1}, 1, w=-1)
    model.learn_one({"a": 1}, 1, w=0)
    model.flush()
    assert model.n_rows_seen == 0
    x, y = rows(20)
    for row, target in zip(x, y, strict=True):
        model.learn_one(row, target)
    nothing = [{}, {"a": None}, {"a": math.nan}, {"a": 1e300}, {"b": -math.inf}]
    said = {model.predict_one(row) for row in nothing}
    assert len(said) == 1  # all are rows of means
    for row in [*nothing, {"a": "text", "d": 2, 7: np.float32(2), "e": True}]:
        model.learn_one(row, 1.0)
        model.flush()
        assert math.isfinite(model.predict_one(row))
    assert model.n_rows_seen == 26
    for label in (None, math.nan):
        with pytest.raises(ValueError, match="must be a label"):
            linear("classifier").learn_one({"a": 1}, label)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"buffer": 0}, "`buffer` is 0"),
        ({"buffer": 33}, "`buffer` is 33"),
        ({"max_features": 0}, "`max_features` is 0"),
    ],
)
def test_settings_out_of_range(named, message):
    with pytest.raises(ValueError, match=message):
        Regressor(**named)
    for wrong in ({"hidden": (0,)}, {"half_life": -1}, {"n_particles": 3}):
        with pytest.raises(ValueError, match="must be"):
            Classifier(**wrong)
