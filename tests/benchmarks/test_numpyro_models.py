"""Models in the manner of NumPyro's examples are taken as they are; runs are dealt to processes and compared."""

import json

import jax
import numpy as np
import pytest

import opvi
from benchmarks.numpyro_models import LONG, MODELS, Task, errors, expected, tasks, write


@pytest.mark.slow  # twenty models, each compiled
@pytest.mark.parametrize("name", MODELS)
def test_models_are_taken_and_score_their_rows(name):
    model, rows = MODELS[name]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        target = opvi.from_numpyro(model, rows)
        particle = opvi.draw(target, 0, 1)[0]
        few = jax.tree.map(lambda a: a[:4], rows)
        said = jax.jit(target.log_likelihood)(target.unravel(particle), few)
    assert said.shape == (4,)
    assert not np.isnan(said).any()


def test_missing_runs_come_longest_first_and_long_seeds_run_apart():
    took = {"logistic": {"20": 10.0, "1": 12.0}, "levels": {"20": 10.0, "1": LONG}}
    done = {"logistic": {"20": {"2": {}}}}
    assert tasks(["logistic", "levels"], [20, 1], [2, 3], done, took) == [
        Task("levels", 1, (2,)),
        Task("levels", 1, (3,)),
        Task("logistic", 1, (2, 3)),
        Task("logistic", 20, (3,)),
        Task("levels", 20, (2, 3)),
    ]


def test_what_was_never_timed_counts_as_long():
    assert expected({}, 5) == (LONG, 0)
    assert expected({"20": 10.0, "5": 30.0}, 1) == (10, 100)  # five times as many rounds as batches of 5
    assert expected({"20": 10.0}, 1) == (10, 10)


def test_errors_are_in_standard_deviations_of_the_reference():
    exact = {"a": {"mean": [1.0, 5.0], "sd": [2.0, 1e-9]}, "b": {"mean": [0.0], "sd": [1.0]}}
    ours = {"a": {"mean": [1.5, 6.0], "sd": [1.8, 0.1]}, "b": {"mean": [-0.1], "sd": [1.3]}, "c": {}}
    assert errors(ours, exact) == pytest.approx({"worst mean, sd": 0.25, "smallest sd": 0.9, "largest sd": 1.3})


def test_times_of_earlier_runs_are_kept(tmp_path):
    run = {"worst mean, sd": 0.5, "smallest sd": 0.8, "largest sd": 1.4, "flagged": True, "seconds": 3.0}
    write(tmp_path / "a.json", {"levels": {"20": {"2": run, "3": {**run, "seconds": 1.0}}}}, {}, {"levels": {"1": 9.0}})
    assert json.loads((tmp_path / "a.json").read_text())["seconds"] == {"levels": {"1": 9.0, "20": 3.0}}
