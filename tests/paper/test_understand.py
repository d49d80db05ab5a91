"""The experiments behind the page "Understand": they run, and the laws that the page states hold in closed form."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

import opvi
from paper import understand
from paper.commands import FIGURES, main
from paper.understand_common import Size, exact, follow, start, streams

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SIZE = Size(rounds=80, streams=6, particles=20)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All parts, in miniature."""
    folder = tmp_path_factory.mktemp("understand")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as a user has them
        assert main(["measure", "understanding", "--smoke", "--out", str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("part", FIGURES)
def test_every_part_writes_its_files(smoke: Path, part: str) -> None:
    content = json.loads((smoke / f"{part}-smoke.json").read_text())
    assert content["command"] == f"python -m paper measure {part} --seeds 1 --smoke"
    assert all(row["trials"] for row in content["rows"].values())
    assert (smoke / f"{part}-smoke.png").stat().st_size > 0


def test_the_exact_posterior_weighs_a_row_by_its_age() -> None:
    data = streams(0, 3, 30, opvi.schedules.power(0.55))
    sizes = data.counts
    age = np.cumsum(sizes[::-1])[::-1] - sizes  # rows that came after each round
    weight = 2 ** (-age / 40)
    means = (data.rows * data.weight).sum(2) / sizes
    mean, sd = exact(data, half_life=40)
    np.testing.assert_allclose(mean[:, -1], (means * sizes * weight).sum(1) / (1 + (sizes * weight).sum()), rtol=1e-5)
    assert sd[-1] == pytest.approx((1 + (sizes * weight).sum()) ** -0.5)
    np.testing.assert_allclose(exact(data)[1], (1 + np.cumsum(sizes)) ** -0.5)


def test_particles_settle_on_batch_and_prior_over_repulsion() -> None:
    """200 rows with the paper's prior weight, which vanishes; 70 where the prior counts once for every 20 rows."""
    paper = understand.scaling_trial(understand.flow(20, 0.1), 20, 200, SIZE, 0)
    plain = understand.scaling_trial(understand.flow(20, 0.3, 1.0), 20, 70, SIZE, 0)
    assert [paper["ratio"], plain["ratio"]] == pytest.approx([1, 1], abs=1e-3)


def test_repulsion_changes_the_spread_and_not_the_mean() -> None:
    data = streams(0, SIZE.streams, SIZE.rounds, opvi.schedules.static(20))
    little, much = (follow(understand.flow(20, value), data, start(20), 0) for value in (0.1, 1.0))
    np.testing.assert_allclose(little[0], much[0], atol=1e-5)
    np.testing.assert_allclose(much[1][:, -1] / little[1][:, -1], math.sqrt(10), rtol=1e-3)


def test_the_flow_of_gain_1_is_exact() -> None:
    record = understand.scaling_trial(opvi.gain_one(understand.mean_of_rows(), substeps=1), 20, 1601, SIZE, 0)
    assert record["ratio"] == pytest.approx(1, abs=1e-3)
    assert record["off_in_sds"] < 1e-3


def test_a_constant_step_has_the_regret_of_its_jitter() -> None:
    """After the start, a round costs a/(2 - a)/(2B) on average; 1,500 rounds of 100 streams tell it to 1 %."""
    size = Size(streams=100, regret=2000)
    algorithm, rule = understand.descents()["20 rows per round, constant step"]
    record = understand.regret_trial(algorithm, rule, size, 0)
    T, sums = record["T"], record["regret"]
    first = np.searchsorted(T, 500)
    found = (sums[-1] - sums[first]) / (T[-1] - T[first])
    a = understand.DESCENT
    assert found == pytest.approx(a / (2 - a) / 40, rel=0.04)


@pytest.mark.parametrize("part", FIGURES)
def test_the_committed_results_hold(part: str) -> None:
    content = json.loads((RESULTS / f"{part}.json").read_text())
    assert content["checks"]
    assert [check["what"] for check in content["checks"] if not check["holds"]] == []
