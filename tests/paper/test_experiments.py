import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from paper import data, kin8nm, mnist, results, synthetic
from paper.mixture import exact_posterior

RESULTS = Path(__file__).parents[2] / "docs" / "results"
NAMES = ("synthetic-", "kin8nm-", "mnist-")


# --- kin8nm -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arm() -> data.Regression:
    return data.robot_arm(300)


def test_clean_splits_share_nothing(arm: data.Regression) -> None:
    split = kin8nm.clean_split(arm, 3, dev=20)
    assert [len(part[1]) for part in (split.train, split.dev, split.test)] == [250, 20, 30]
    back = [part[1] * split.sd[-1] + split.mean[-1] for part in (split.train, split.dev, split.test)]
    np.testing.assert_allclose(np.sort(np.concatenate(back)), np.sort(arm.y), atol=1e-5)
    np.testing.assert_allclose(split.train[0].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(split.train[0].std(0), 1, atol=1e-5)
    again, other = kin8nm.clean_split(arm, 3, dev=20), kin8nm.clean_split(arm, 4, dev=20)
    np.testing.assert_array_equal(again.test[1], split.test[1])
    assert not np.array_equal(other.test[1], split.test[1])


def test_the_authors_scale_by_the_first_rows_of_the_file(arm: data.Regression) -> None:
    split = kin8nm.authors_split(arm, dev=20)
    order = np.random.RandomState(1).choice(300, 300, replace=False)
    np.testing.assert_allclose(split.mean[:-1], arm.X[: order[250]].mean(0))


def test_the_normalised_step_by_hand() -> None:
    optimizer = kin8nm.normalised(0.1, decay=0.9, fudge=1e-6)
    first, second = jnp.array([[2.0, -1.0]]), jnp.array([[1.0, 3.0]])
    state = optimizer.init(first)
    move, state = optimizer.update(first, state)
    np.testing.assert_allclose(move, [[-0.1, 0.1]], rtol=1e-5)
    move, state = optimizer.update(second, state)
    squares = 0.9 * np.array([4.0, 1.0]) + 0.1 * np.array([1.0, 9.0])
    np.testing.assert_allclose(move[0], -0.1 * np.array([1.0, 3.0]) / np.sqrt(squares), rtol=1e-5)


def test_the_leaked_counter_grows_from_try_to_try() -> None:
    sizes = kin8nm.growing(500, None)
    assert sum(sizes) == 10_108
    assert kin8nm.taken(sizes, 0) == (sizes, 0)
    last, before = kin8nm.taken(sizes, 19)
    assert (last[0], last[-1]) == (155, 159)
    assert sum(last) == 78_409
    assert before == sum(math.ceil(t**0.55) for t in range(1, 9501))
    assert kin8nm.taken([20] * 500, 2) == ([20] * 500, 20 * 1001)


def test_the_text_keeps_the_budget() -> None:
    sizes = kin8nm.growing(500, 10_000)
    assert (len(sizes), sum(sizes)) == (500, 10_000)
    assert sizes[0] < 3 < 28 < sizes[-1]


@dataclass(frozen=True)
class Lossy:
    """A sampler that forgets a row in every round."""

    inner: Any

    def init(self, key: Any, particles: Any = None) -> Any:
        return self.inner.init(key, particles)

    def step(self, key: Any, state: Any, batch: Any) -> Any:
        state, info = self.inner.step(key, state, batch)
        return state._replace(rows=state.rows - 1), info


def test_rows_visited_are_checked(arm: data.Regression) -> None:
    target = opvi.linear_regression(8)
    sampler, start = opvi.svgd(target, step=1e-3), opvi.draw(target, 0, 3)
    rows = arm.X.astype(np.float32), arm.y.astype(np.float32)
    state, _ = kin8nm.run_rows(sampler, rows, [7, 7], 0, start)
    assert int(state.rows) == 14
    with pytest.raises(AssertionError, match="12 rows in 2 rounds, not 14 in 2"):
        kin8nm.run_rows(Lossy(sampler), rows, [7, 7], 0, start)


def test_a_mixture_of_equal_gaussians_is_the_gaussian() -> None:
    error, variance = np.array([[0.3, -1.0]]), np.array([[0.5, 2.0]])
    expected = (-0.5 * (error**2 / variance + np.log(2 * np.pi * variance))).mean()
    twice = kin8nm._mixture(np.repeat(error, 2, 0), np.repeat(variance, 2, 0))
    assert twice == pytest.approx(expected)


# --- the mixture ------------------------------------------------------------------------------


@pytest.mark.slow
def test_measures_of_exact_draws_are_small() -> None:
    rows = synthetic.rows_of(0, 500, 2.0)[:500]
    posterior = exact_posterior(rows)
    good = synthetic.measures(posterior.draw(100, 1), posterior, rows, 2.0)
    bad = synthetic.measures(posterior.draw(100, 1) + [0.5, 0], posterior, rows, 2.0)
    assert good["covariance_ratio"] == pytest.approx(1, abs=0.5)
    assert good["positive_mode"] == pytest.approx(good["positive_mode_exact"], abs=0.2)
    for key in ("w2_folded", "w2_plain", "mmd", "ksd"):
        assert good[key] < 0.5 * bad[key]


def test_fitds_holds_for_the_text_panels() -> None:
    size = synthetic.Size()
    panels = synthetic.panels("text", size, 2.0)
    for name in ("OPVI t^.55", "OPVI B=20", "SVGD B=20", "LD B=20"):
        assert (len(panels[name].sizes), sum(panels[name].sizes)) == (500, 10_000)
        assert panels[name].passes == 1


def test_the_authors_repeat_the_same_rows() -> None:
    panels = synthetic.panels("authors", synthetic.Size(), 2.0)
    rows = np.arange(20_000.0)
    for name in ("SVGD B=20", "LD B=20"):
        np.testing.assert_array_equal(panels[name].source(rows), rows[:500])
        assert panels[name].sizes == [500] * 500


# --- MNIST ------------------------------------------------------------------------------------


def test_one_step_for_all_flows_in_the_text_only() -> None:
    assert mnist.flow_steps("text", 20) == (2e-4, 2e-4)
    assert mnist.flow_steps("authors", 10) == pytest.approx((1e-4, 1e-5))


def test_accuracy_at_the_same_rows() -> None:
    curve = {"rows": [10, 100, 101, 200], "accuracy": [0.1, 0.2, 0.3, 0.4]}
    assert mnist._at_rows(curve, 100) == 0.3


# --- results ----------------------------------------------------------------------------------


def test_numbers_survive_the_file() -> None:
    value = {"a": np.float32(0.1), "b": jnp.arange(2), "c": math.nan, "d": (1, "x", None, True)}
    assert json.loads(json.dumps(results.as_json(value))) == {
        "a": 0.1,
        "b": [0, 1],
        "c": None,
        "d": [1, "x", None, True],
    }


def test_summary_is_the_samples() -> None:
    found = results.summary([{"x": 1.0}, {"x": 3.0}], "x")
    assert found == (2.0, math.sqrt(2), 2)
    assert found.text(2) == "2.00 ± 1.41"
    assert results.summary([{"x": 1.0}], "x").text(1) == "1.0"


@pytest.mark.parametrize(
    ("check", "holds"),
    [
        (results.near("x", results.Summary(1.0, 0, 1), 1.2, 0.3), True),
        (results.near("x", results.Summary(1.0, 0, 1), 1.2, 0.1), False),
        (results.at_least("x", 0.9, 0.89), True),
        (results.no_more_than("x", 0.9, 0.89), False),
    ],
)
def test_checks(check: results.Check, holds: bool) -> None:
    assert check.holds is holds


# --- what is committed ------------------------------------------------------------------------


def committed(ending: str) -> list[Path]:
    return sorted(path for path in RESULTS.glob(f"*{ending}") if path.name.startswith(NAMES))


@pytest.mark.parametrize("path", committed(".json"), ids=lambda path: path.stem)
def test_committed_results_are_whole(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content["experiment"] == path.stem
    assert content["command"].startswith("python -m paper reproduce ")
    assert {"version", "made_with", "settings", "rows", "checks"} <= content.keys()
    for row in content["rows"].values():
        assert row["settings"]
        assert sorted(int(seed) for seed in row["trials"]) == list(range(len(row["trials"])))
    for ending in (".png", ".svg", ".md"):
        assert path.with_suffix(ending).exists()


@pytest.mark.parametrize("path", committed(".md"), ids=lambda path: path.stem)
def test_the_documentation_shows_the_committed_tables(path: Path) -> None:
    pages = (page.read_text() for page in RESULTS.parent.glob("*.md"))
    table = path.read_text().strip()
    assert any(table in page for page in pages)
