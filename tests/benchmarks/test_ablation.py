"""Families of streams, scores, and what is left out."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from benchmarks import ablation
from benchmarks.ablation_streams import FAMILIES, Stream

MADE = ("noise, dates, IDs: IDs", "drift and jumps: scale times 30", "wrong columns: -999", "far outside: line")


@pytest.mark.parametrize("name", MADE)
def test_streams_are_the_same_every_time_and_differ_by_seed(name):
    family, stream = name.split(": ")
    one, two, other = (FAMILIES[family][stream](seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one.X, two.X)
    np.testing.assert_array_equal(one.y, two.y)
    assert not np.array_equal(one.X, other.X)
    assert len(one.X) == len(one.y) == len(one.truth) == len(one.scored)


def test_rows_far_outside_are_far_and_their_targets_a_line():
    made = FAMILIES["far outside"]["line"](0)
    X, y = made.tests["beyond 10 sds"]
    assert X[:, 0].min() >= 10
    assert np.std(y - X[:, 0]) == pytest.approx(made.unit, rel=0.1)
    assert 0.001 < np.mean(made.X[:, 0] > 5) < 0.01


def numbers(mean, level, scored, unit=1.0):
    predicted = {"mean": mean, "level": level, "log_density": np.full(len(mean), -1.0)}
    truth = np.zeros(len(mean))
    return ablation.of_numbers(predicted, Stream(np.zeros((len(mean), 1)), truth, truth, scored, unit=unit))


def test_errors_of_numbers_leave_out_rows_and_count_in_units():
    found = numbers(np.array([3.0, 4.0, 99.0]), np.array([0.5, 0.99, 0.5]), np.array([True, True, False]), unit=5.0)
    assert found["rmse"] == pytest.approx(np.sqrt(12.5) / 5)
    assert found["coverage"] == pytest.approx(0.5)
    assert found["log density"] == pytest.approx(-1 + np.log(5))


def test_errors_of_classes_are_beside_the_right_labels():
    truth = np.array([0, 1, 1])
    made = Stream(np.zeros((3, 1)), 1 - truth, truth, np.array([True, True, False]), classes=2)
    found = ablation.of_classes({"probabilities": np.array([[0.8, 0.2], [0.6, 0.4], [0, 1]])}, made)
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["log loss"] == pytest.approx(-np.log([0.8, 0.4]).mean())


class Layers(NamedTuple):
    names: list[str]


@dataclass(frozen=True)
class Outer:
    inner: Any
    setting: int = 3


@dataclass(frozen=True)
class Middle:
    inner: Any


def test_a_wrapper_is_left_out_and_the_others_stay():
    whole = Outer(Middle(Layers([])), 7)
    assert ablation.wrappers(whole) == ["outer", "middle"]
    assert ablation.strip(whole, "middle") == Outer(Layers([]), 7)
    assert ablation.strip(whole, "outer") == Middle(Layers([]))
    assert ablation.strip(whole, "nothing") == whole


def test_a_part_that_helps_has_a_ratio_above_one_and_where_it_is_absent_counts_as_the_default():
    base = {"rmse": 1.0, "log density": -1.0, "ms per row": 1.0}
    worse = {"rmse": 4.0, "log density": -2.0, "ms per row": 0.25}
    results = {
        "default": {"f": {"a": {"0": base}, "b": {"0": base}}},
        "without": {"f": {"a": {"0": worse}, "b": {"0": None}}},
    }
    ratio, nats, time = ablation.relative(results, "without", "f")
    assert ratio == pytest.approx(2.0)
    assert nats == pytest.approx(0.5)
    assert time == pytest.approx(0.5)
