import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.rivals import networks, plan, scoring
from paper import classification, regression

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_the_filter_of_a_linear_model_is_the_exact_posterior(rng: np.random.Generator) -> None:
    X, prior, noise = rng.normal(size=(60, 3)), np.array([1.0, 0.5, 2.0]), 0.2
    y = X @ [1.0, -2.0, 0.5] + rng.normal(size=60)
    arrays = (jnp.asarray(a, jnp.float32) for a in (np.zeros(3), prior, X, y))
    (w, P), (mean, variance) = networks.kalman(lambda w, x: w @ x, *arrays, noise, 0.0, 1.0)
    exact = np.linalg.inv(np.diag(1 / prior) + X.T @ X / noise)
    np.testing.assert_allclose(P, exact, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(w, exact @ X.T @ y / noise, rtol=1e-3)
    assert float(mean[0]) == 0
    assert float(variance[0]) == pytest.approx((prior * X[0] ** 2).sum(), rel=1e-5)


def test_scaling_gives_the_rows_of_our_experiment_back() -> None:
    X, y, X_test, y_test = regression.rows(regression.STAND_IN, True, 0)
    split = scoring.scaled(X, y, X_test, y_test)
    np.testing.assert_allclose(split.y * split.sd + split.mean, y)
    np.testing.assert_allclose(split.X_test * X.std(0) + X.mean(0), X_test)
    assert split.y_test is y_test


def test_inputs_are_scaled_by_what_came_before(rng: np.random.Generator) -> None:
    stream = classification.Stream(rng.normal(5, 3, (105, 2)).astype(np.float32), np.zeros(105, np.int32), 2)
    X, _ = networks.standardised(stream)
    assert X.shape == (100, 2)  # full batches only, as in our experiment
    np.testing.assert_allclose(X[80:], (stream.X[80:100] - stream.X[:100].mean(0)) / stream.X[:100].std(0), atol=1e-4)
    later = stream._replace(X=np.concatenate([stream.X[:80], 100 + stream.X[80:]]))
    np.testing.assert_array_equal(networks.standardised(later)[0][:80], X[:80])


def test_an_ensemble_forecasts_before_it_learns(rng: np.random.Generator) -> None:
    X, y = rng.normal(size=(3, 20, 2)), rng.normal(size=(3, 20))
    start = networks._start(jax.random.key(0), 2, (2, 4, 1))
    outputs = partial(networks._outputs, jnp.tanh)
    learn = jax.jit(partial(networks.adam_pass, outputs, lambda f, y: (f[:, :, 0] - y[None]) ** 2, 2))

    def forecasts(y: np.ndarray) -> np.ndarray:
        batches = tuple(jnp.asarray(a, jnp.float32) for a in (X, y, np.ones((3, 20))))
        with jax.numpy_dtype_promotion("standard"):  # optax needs it
            return np.asarray(learn(start, batches, 0.1, 1.0)[1])

    before, after = forecasts(y), forecasts(y + np.array([[0.0], [5.0], [5.0]]))
    np.testing.assert_array_equal(before[:2], after[:2])
    assert not np.array_equal(before[2], after[2])


def test_a_temperature_helps_who_is_too_sure(rng: np.random.Generator) -> None:
    right = rng.random(2000) < 0.8
    p = np.where(right[:, None], [[0.0, 1.0]], [[1.0, 0.0]])  # always certain, four times in five rightly
    found = scoring.judged_classes(p, np.ones(2000, np.int32))
    assert found["accuracy"] == pytest.approx(right.mean(), abs=0.01)
    assert found["log_loss"] < 0.6 < 10 < found["log_loss_own"]
    assert found["ece"] < 0.05 < 0.15 < found["ece_own"]


def committed() -> Iterator[tuple[plan.Rival, dict]]:
    content = json.loads((RESULTS / "rivals.json").read_text())
    return ((rival, content["rows"]) for rival in plan.rivals())


def test_committed_results_are_whole() -> None:
    for rival, rows in committed():
        assert len(rows[rival.name]["trials"]) == rival.repeats, rival.name
        if rival.grid:
            scores = {int(i): trial["score"] for i, trial in rows[rival.tuning]["trials"].items()}
            assert sorted(scores) == list(range(len(rival.grid)))
            best = max(scores, key=lambda i: -np.inf if scores[i] is None else scores[i])
            assert rows[rival.name]["settings"] == rival.grid[best]


def test_the_page_shows_the_committed_tables() -> None:
    page = (RESULTS.parent / "rivals.md").read_text()
    for table in (RESULTS / "rivals.md").read_text().strip().split("\n\n"):
        assert table in page
