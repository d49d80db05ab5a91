"""Figures beside the scores, against scikit-learn's."""

import numpy as np
import pytest
from sklearn import metrics

from opvi.app.learn import _scores as scores
from opvi.app.learn._figures import Figures
from opvi.running import Fed
from opvi.types import Predicted
from tests.app.test_learning import Told, fed


def rows_of(given: Fed) -> tuple[np.ndarray, np.ndarray]:
    there = scores.counted(given)
    assert not there[0].any()  # the first batch is predicted from nothing
    return there, np.asarray(given.data[1])[there]


def in_two(given: Fed, cut: int) -> list[Fed]:
    told = given.info
    said = [
        Predicted(*(None if a is None else a[part] for a in told.predicted)) for part in (slice(cut), slice(cut, None))
    ]
    return [
        Fed(
            Told(told.rows[part], told.finite[part], told.changed[part], predicted, told.probability[part]),
            (given.data[0][part], given.data[1][part]),
            given.weight[part],
        )
        for part, predicted in zip((slice(cut), slice(cut, None)), said, strict=True)
    ]


def test_a_regression() -> None:
    given = fed("regression", 40)
    given = given._replace(data=(given.data[0], given.data[1] + 1e6))
    said = given.info.predicted._replace(mean=given.info.predicted.mean + 1e6)
    given = given._replace(info=given.info._replace(predicted=said))
    there, y = rows_of(given)
    told = Figures.start(0).add("regression", given).told("regression", [])
    assert told["mae"] == pytest.approx(metrics.mean_absolute_error(y, said.mean[there]), rel=1e-9)
    assert told["r2"] == pytest.approx(metrics.r2_score(y, said.mean[there]), rel=1e-9)
    parts = Figures.start(0)
    for part in in_two(given, 17):
        parts = parts.add("regression", part)
    assert parts.told("regression", []) == told
    assert Figures.start(0).told("regression", []) == {"mae": None, "r2": None}


def test_classes() -> None:
    given = fed("classification", 40)
    there, y = rows_of(given)
    named = given.info.predicted.probabilities.argmax(2)[there]
    told = Figures.start(2).widened(3).add("classification", given).told("classification", ["a", "b", "c"])
    matrix = [list(row.values()) for row in told["confusion"].values()]
    np.testing.assert_array_equal(matrix, metrics.confusion_matrix(y, named, labels=[0, 1, 2]))
    assert "auc" not in told


def test_two_classes() -> None:
    given = fed("classification", 40)
    p = given.info.predicted.probabilities[..., :2]
    p = p / p.sum(2, keepdims=True)
    y = (np.random.default_rng(1).random(p.shape[:2]) < p[..., 1]).astype(int)
    given = given._replace(
        data=(given.data[0], y), info=given.info._replace(predicted=given.info.predicted._replace(probabilities=p))
    )
    there, truth = rows_of(given)
    told = Figures.start(2).add("classification", given).told("classification", ["a", "b"])
    assert told["auc"] == pytest.approx(metrics.roc_auc_score(truth, p[..., 1][there]), abs=1e-3)


def test_a_few_rows_at_the_end_are_no_stretch_of_their_own() -> None:
    made = scores.start("regression", 0)
    made = scores.add(made, "regression", fed("regression", 30))
    whole = scores.summary(made, "regression")
    curve = made.curve.copy()
    curve[30], ends = [2, 2.0, 50.0, 1], made.ends.copy()
    ends[30] = ends[29] + 2
    told = scores.summary(made._replace(curve=curve, ends=ends, batches=made.batches + 1), "regression")
    assert len(told.curve) == len(whole.curve)
    assert told.curve[-1].rows == whole.curve[-1].rows + 2
    assert told.curve[-1].count == whole.curve[-1].count + 2
