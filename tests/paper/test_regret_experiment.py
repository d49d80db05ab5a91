"""The experiments behind the page on regret: they run, and what is quick to check of their claims holds."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import opvi
from paper import regret as points
from paper import regret_errors, regret_posterior
from paper.commands import main

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PARTS = ("linear", "logistic", "errors", "posterior")
MISSED = {  # numbers that were hoped for and not found; the page says so
    "paper's OPVI: B = 20: slope of ΣW2",
    "gain-1 flow, λ = ½, whole batches: B = 20: slope of ΣW2",
    "gain-1 flow, λ = ½, whole batches: ⌈t^.55⌉: ΣW2",
}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All parts, in miniature."""
    folder = tmp_path_factory.mktemp("regret")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as a user has them
        assert main(["regret", "--smoke", "--out", str(folder)]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_part_writes_its_files(smoke: Path, part: str) -> None:
    content = json.loads((smoke / f"regret-{part}-smoke.json").read_text())
    assert content["command"].startswith(f"python -m paper regret {part} --seeds")
    assert all(row["trials"] for row in content["rows"].values())
    assert [row[0] for row in content["table"]["rows"]] == list(content["rows"])
    for ending in (".png", ".svg", ".md"):
        assert (smoke / f"regret-{part}-smoke{ending}").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["linear", "logistic"])
def test_regret_stays_below_every_valid_bound_at_every_round(smoke: Path, model: str) -> None:
    rows = json.loads((smoke / f"regret-{model}-smoke.json").read_text())["rows"]
    assert any(row.startswith("drifting") for row in rows)
    for row in rows.values():
        record = row["trials"]["0"]
        shares = [record[f"{kind}_share"] for kind in points.VALID if f"{kind}_share" in record]
        assert shares
        assert max(shares) < 1
        assert record["inside"] < points.RADIUS
        assert record["tolerance"] < 1e-6


def test_a_static_batch_with_a_shrinking_step_has_hardly_any_regret_after_a_while() -> None:
    """One run of 3,200 rounds; over eight the slope is .04 ± .01."""
    record = points.trial("linear", False, opvi.schedules.static(20), True, points.Size(), 0)
    assert record["regret_slope"] < 0.1


def test_the_gain_1_flow_follows_the_gaussian_posterior() -> None:
    size = regret_posterior.Size()
    record = regret_posterior.trial("gain-1 flow, λ = ½", "B = 20", False, size, 0)
    assert record["w2_slope"] < 0.05
    assert record["w2_sum_end"] < 1.5


def test_lemma_1_on_a_huber_cost() -> None:
    excess = regret_errors.lemma(np.array([0.5, 10.0]))
    assert excess["printed"][0] < 0 < excess["printed"][1]
    assert (excess["corrected"] < 0).all()


def test_design_prints_and_draws(tmp_path: Path, capsys: Any) -> None:
    words = ["regret", "design", "--spread", "2", "--rounds", "100", "--rho", ".5", "--total", "400"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| ⌈t^0.5⌉ |" in printed
    assert "| saturating, ρ = 0.5 |" in printed
    assert (tmp_path / "regret-design.png").stat().st_size > 0
    assert main([*words, "--total", "5", "--out", str(tmp_path)]) == 1
    assert "slower rule" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([*words, "--out", str(tmp_path / "file" / "below")]) == 1
    assert "nothing can be written" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--spread", "-1"], ["--rho", "x"], ["--rounds", "0"], ["nothing"]])
def test_design_refuses_bad_numbers(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["regret", *words])
    assert stop.value.code == 2


@pytest.mark.parametrize("part", PARTS)
def test_the_committed_results_hold(part: str) -> None:
    content = json.loads((RESULTS / f"regret-{part}.json").read_text())
    assert content["checks"]
    assert {check["what"] for check in content["checks"] if not check["holds"]} <= MISSED
