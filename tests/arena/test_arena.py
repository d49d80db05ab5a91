"""The arena: what players may know, filters against closed forms, resuming, what counts as a loss, and the page."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from arena import __main__ as command
from arena import cells, posteriors, report, streams
from arena.methods import METHODS, full_filter, low_rank, missing, plays
from arena.page import render

ROOT = Path(__file__).parents[2]


def test_adapters_are_small():
    for file in (ROOT / "arena" / "methods").glob("*.py"):
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        assert file.stem == "__init__" or len(lines) <= 60, f"{file.name} has {len(lines)} lines"


def test_there_is_enough_to_compare():
    known = cells.sources()
    assert len(known) >= 15
    assert len(METHODS) >= 10
    assert all(sum(plays(method, name, source) for method in METHODS) >= 2 for name, source in known.items())
    assert len({cells.slug(name) for name in known}) == len(known)  # files do not overwrite one another


class Witness:
    """A player that notes what it had been shown when it was asked."""

    def __init__(self):
        self.shown, self.known = 0, []

    def predict(self, X):
        self.known += [self.shown] * len(X)
        return np.zeros(len(X))

    def learn(self, X, y):
        self.shown += len(y)

    def state(self):
        return None


@pytest.mark.parametrize(("batch", "delay"), [(1, 0), (20, 0), (20, 60)])
def test_no_player_sees_a_label_too_early(monkeypatch, batch, delay):
    player = Witness()
    monkeypatch.setattr(cells, "make", lambda *_: player)
    made = streams.friedman(0, 200)._replace(batch=batch, delay=delay)
    record = cells.play_table(made, "any", 0)
    start = np.arange(200) // batch * batch
    np.testing.assert_array_equal(player.known, np.maximum(start - delay, 0))
    assert record["rows"] == 200
    assert record["measures"]["error"] == pytest.approx(np.sqrt((made.y[20 + delay :] ** 2).mean()))


def test_garbage_is_not_scored(monkeypatch):
    monkeypatch.setattr(cells, "make", lambda *_: Witness())
    made = streams.friedman(0, 200)
    bad = np.arange(200) % 10 == 3
    dirty = made._replace(y=np.where(bad, 1e3, made.y), garbage=bad)
    error = cells.play_table(dirty, "any", 0)["measures"]["error"]
    kept = ~bad & (np.arange(200) >= cells.FIRST)
    assert error == pytest.approx(np.sqrt((made.y[kept] ** 2).mean()))


def exact(X, y):
    covariance = np.linalg.inv(np.eye(X.shape[1]) / posteriors.PRIOR + X.T @ X / posteriors.NOISE)
    return covariance @ X.T @ y / posteriors.NOISE, covariance


def test_filters_are_exact_where_theory_says_so():
    problem = posteriors.linear(0, 60)
    X, y = (np.asarray(a, float) for a in problem.rows)
    full = full_filter.posterior(problem, 0)
    full.learn(problem.rows)
    mean, covariance = exact(X, y)
    np.testing.assert_allclose(full.values.w, mean, atol=2e-3)
    np.testing.assert_allclose(full.values.P, covariance, atol=2e-4)
    X[:, 3:] = 0  # rows in three dimensions: four directions lose nothing
    few = low_rank.posterior(problem, 0)
    few.learn((X.astype(np.float32), y.astype(np.float32)))
    mean, covariance = exact(X, y)
    np.testing.assert_allclose(few.values.w, mean, atol=5e-3)
    np.testing.assert_allclose(few.spread(few.values), covariance, atol=2e-3)


def test_the_grid_is_the_posterior():
    problem = posteriors.logistic(0, 40)
    X, y = (np.asarray(a, float) for a in problem.rows)
    rng = np.random.default_rng(0)
    prior = rng.normal(size=(60_000, 2)) * np.sqrt(posteriors.PRIOR)  # importance sampling from the prior
    eta = prior @ X.T
    log = -np.logaddexp(0, np.where(y > 0, -eta, eta)).sum(1)
    weight = np.exp(log - log.max())
    np.testing.assert_allclose(problem.exact(40).mean(0), np.average(prior, 0, weight), atol=0.02)


def options(folder, **changes):
    settings = {"out": folder, "streams": [], "methods": [], "seeds": 2, "smoke": False, "fresh": False}
    return argparse.Namespace(**settings | changes)


def test_only_missing_cells_are_played(tmp_path):
    chosen = options(tmp_path, streams=["yacht"], methods=["linear, sgd", "mondrian"])
    assert [(s, m, n) for s, m, n in command.missing_cells(chosen)] == [
        ("yacht", "Mondrian forest", [0, 1]),
        ("yacht", "linear, SGD", [0, 1]),
    ]
    there = cells.path(tmp_path, "yacht", "linear, SGD", 0)
    there.parent.mkdir()
    there.write_text("{}")
    assert command.missing_cells(chosen)[1] == ("yacht", "linear, SGD", [1])
    assert command.missing_cells(chosen, fresh=True)[1] == ("yacht", "linear, SGD", [0, 1])


def cell(stream, method, seed, error, log, kind="log score"):
    measures = {
        "error": error,
        "log score": log,
        "ms per row": 1.0,
        "first answer": None if seed else 0.5,
        "bytes": 10.0,
    }
    curve = {"rows": [10, 20], kind: [log, log]}
    record = {"stream": stream, "method": method, "seed": seed, "rows": 20, "seconds": 1.0, "cpu": "some"}
    return {**record, "measures": measures, "curve": curve}


@pytest.fixture
def reported(tmp_path):
    played = [
        *(cell("yacht", "opvi", seed, 2.0 + 0.01 * seed, -1.0) for seed in (0, 1)),
        *(cell("yacht", "linear, SGD", seed, 1.0, -1.5) for seed in (0, 1)),  # smaller errors, worse densities
        *(cell("SEA", "opvi", seed, 0.1, -0.3 - 4 * seed) for seed in (0, 1)),
        *(cell("SEA", "linear, SGD", seed, 0.1, -0.39) for seed in (0, 1)),  # better by less than the spread
    ]
    for one in played:
        file = cells.path(tmp_path, one["stream"], one["method"], one["seed"])
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(one))
    about = {"command": "a command", "seeds": 2, "most_rows": 20, "unfinished": 0}
    return report.report(tmp_path, about)


def test_losses_come_first_and_clear_ones_before_others(reported):
    said = [(r["stream"], r["measure"], r["lost"], r["clear"]) for r in reported["duels"]]
    assert said[0] == ("yacht", "error", True, True)
    assert said[1] == ("SEA", "log score", True, False)
    assert ("yacht", "log score", False, True) in said[2:]
    assert reported["duels"][0]["behind"] == pytest.approx(1.005)
    assert [row[:2] for row in reported["tables"][0]["rows"]] == [["yacht", "error"]]
    assert reported["streams"]["yacht"]["methods"]["linear, SGD"]["regret"]["mean"] == pytest.approx(0.5)
    assert reported["streams"]["yacht"]["methods"]["opvi"]["first answer"]["seeds"] == 1
    assert reported["overall"]["opvi"]["mean rank"] == pytest.approx(1.5)


def test_the_page_shows_losses_before_anything_else(reported):
    page = render(reported)
    assert page.index("Where opvi loses") < page.index("Methods and what they cost") < page.index('id="s-yacht"')
    assert page.index('id="s-SEA"') < page.index('id="s-yacht"')  # the log score is lost on SEA
    assert page.count("<svg") == 2
    losses = page[page.index("Where opvi loses") : page.index("Where opvi is ahead")]
    assert [losses.count(f'<td class="words">{word}</td></tr>') for word in ("yes", "no")] == [1, 1]
    assert "http" not in page  # nothing to load


def test_a_failure_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "make", lambda *_: 1 / 0)
    wrong = cells.run(str(tmp_path), "SEA", "linear, SGD", [0], 40)
    assert wrong == ["SEA, linear, SGD, seed 0: ZeroDivisionError: division by zero"]
    assert report.report(tmp_path, {})["failed"] == wrong


@pytest.mark.slow
def test_smoke(tmp_path, monkeypatch):
    """The whole command: it plays, writes the page, and plays nothing the second time."""
    programs = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".stamps" / "programs")}  # as the suite's own
    environment = {**os.environ, **programs, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    run = [sys.executable, "-m", "arena", "--smoke", "--out", str(tmp_path)]
    subprocess.run(run, check=True, cwd=tmp_path, env=environment, timeout=300)
    found = json.loads((tmp_path / "arena.json").read_text(encoding="utf-8"))
    assert not found["failed"]
    assert found["unfinished"] == 0
    assert set(found["streams"]) == set(command.SMOKE)
    assert ("LightGBM, refit" in found["missing"]) == bool(missing("LightGBM, refit"))
    assert found["streams"]["posterior: linear"]["methods"]["Kalman, full"]["distance"]["mean"] < 0.1
    times = {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}
    monkeypatch.setattr(sys, "argv", run[2:])
    monkeypatch.chdir(tmp_path)
    command.main()
    assert times == {file: file.stat().st_mtime_ns for file in (tmp_path / "cells").iterdir()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--streams", "nope"], "no stream has 'nope' in its name. There are: .*yacht"),
        (["--methods", "nope"], "no method has 'nope' in its name. There are: opvi"),
    ],
)
def test_unknown_names_are_refused(words, said, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["arena", *words])
    with pytest.raises(SystemExit, match=said):
        command.wanted(command.arguments())


@pytest.mark.parametrize("words", [["--seeds", "0"], ["--jobs", "0"], ["--seeds", "x"]])
def test_numbers_are_at_least_1(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["arena", *words])
    with pytest.raises(SystemExit):
        command.arguments()
    assert "is not a whole number of at least 1" in capsys.readouterr().err


def test_a_damaged_cell_is_named(tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "yacht--opvi--0.json").write_text('{"bro')
    with pytest.raises(SystemExit, match=r"yacht--opvi--0\.json is damaged .* Delete it"):
        report.report(tmp_path, {})
