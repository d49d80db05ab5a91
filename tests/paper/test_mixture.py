"""The exact grid posterior, the distance to it, and the demo."""

import json

import jax
import numpy as np
import pytest
from PIL import Image

import opvi
from paper import demo, moving
from paper.mixture import exact_posterior, to_midpoint_gap, to_theta, tracking_error


@pytest.fixture(scope="module")
def posterior(mixture_rows):
    return exact_posterior(mixture_rows[:1000])


def test_grid_posterior_is_the_targets(mixture, mixture_rows, posterior):
    """Mass ratios between grid points equal the target's own density ratios."""
    rows = mixture_rows[:1000]
    cells = [(60, 200), (58, 190), (62, 120), (60, 119)]
    with jax.enable_x64(True):
        data = np.asarray(rows, np.float64)

        def log_posterior(a, b):
            theta = to_theta(np.array([posterior.midpoints[a], posterior.gaps[b]]))
            return float(mixture.log_prior(theta) + mixture.log_likelihood(theta, data).sum())

        values = np.array([log_posterior(a, b) for a, b in cells])
    masses = np.log([posterior.mass[a, b] for a, b in cells])
    np.testing.assert_allclose(masses - masses[0], values - values[0], atol=1e-6)


def test_the_grid_holds_all_the_mass(posterior):
    edges = posterior.mass[[0, -1]].sum() + posterior.mass[:, [0, -1]].sum()
    assert edges < 1e-8
    assert posterior.mass.sum() == pytest.approx(1)


def test_ten_thousand_rows_match_the_known_posterior():
    """Known for σ_x² = 2, θ = (0, 1): sd of the midpoint 0.0149, modes of about equal weight."""
    rows = opvi.targets.sample_mixture(jax.random.key(1), 10_000)
    posterior = exact_posterior(rows)
    covariance = posterior.moments(folded=True)[1]
    to_m = np.array([1.0, 0.5])
    assert np.sqrt(to_m @ covariance @ to_m) == pytest.approx(0.0149, abs=2e-4)
    assert posterior.mass[:, posterior.gaps > 0].sum() == pytest.approx(0.51, abs=0.02)


def test_moments_equal_those_of_draws(posterior):
    draws = posterior.draw(20_000, seed=0)
    mean, covariance = posterior.moments()
    np.testing.assert_allclose(draws.mean(0), mean, atol=4 * np.sqrt(covariance.max() / 20_000))
    np.testing.assert_allclose(np.cov(draws.T), covariance, atol=4 * covariance.max() * np.sqrt(2 / 20_000))


def test_weights_are_repeated_rows(mixture_rows):
    rows = mixture_rows[:30]
    a = exact_posterior(rows, weight=np.repeat([1.0, 2.0], 15))
    b = exact_posterior(np.repeat(rows, np.repeat([1, 2], 15)))
    np.testing.assert_allclose(a.mass, b.mass, atol=1e-9)


def test_tracking_error_of_exact_draws_and_of_wrong_ones(posterior):
    errors = [tracking_error(posterior.draw(100, seed), posterior) for seed in range(5)]
    assert np.mean(errors) == pytest.approx(0.20, abs=0.06)  # the floor that independent draws have
    mirrored = to_midpoint_gap(posterior.draw(100, 0)) * [1, -1]
    assert tracking_error(to_theta(mirrored), posterior) == pytest.approx(errors[0], abs=0.05)  # folding
    sd = np.sqrt(np.trace(posterior.moments(folded=True)[1]))
    far = posterior.draw(100, 0) + [3 * sd, 0.0]
    assert tracking_error(far, posterior) == pytest.approx(3, abs=0.3)


def test_the_moving_posterior_is_the_weighted_one():
    """The recursion on a fixed grid equals the posterior of rows that count less the older they are."""
    rows = moving.drifting_rows(0)[:30]
    (recursive,) = moving.exact_posteriors(rows, [30])
    weight = np.repeat(0.5 ** (moving.BATCH * np.arange(29, -1, -1) / moving.HALF_LIFE), moving.BATCH)
    weighted = exact_posterior(rows.ravel(), moving.VARIANCE, weight=weight)
    for a, b in zip(recursive.moments(), weighted.moments(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


def test_the_truth_goes_around_and_the_grid_holds_it():
    t = np.arange(1, moving.LAP + 1)
    np.testing.assert_allclose(moving.truth(t), moving.truth(t + moving.LAP), atol=1e-12)
    midpoint, gap = moving.truth(t).T
    assert (abs(midpoint) < moving.MIDPOINTS[-1] - 0.5).all()
    assert ((gap > 0) & (gap < moving.GAPS[-1] - 1)).all()


@pytest.mark.slow
def test_the_demo_runs_and_ends_with_its_pictures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, "ROUNDS", 20)
    monkeypatch.setattr(demo, "ROWS", 200)
    monkeypatch.setattr(demo, "SHOWN", (2, 20))
    monkeypatch.setattr(moving, "LAP", 8)
    monkeypatch.setattr(moving, "FRAMES", 4)
    assert "half-life 300 rows" in moving.samplers()["opvi.tracker"].about
    quick = {name: sampler for name, (sampler, _) in demo.methods().items() if "tracker" not in name}
    monkeypatch.setattr(moving, "samplers", lambda: quick)  # a second tracker would take ten seconds to compile
    demo.main(["--out", str(tmp_path)])
    out = capsys.readouterr().out
    names = ("demo.png", "demo-moving.png", "demo.gif")
    assert out.strip().splitlines()[-3:] == [f"Picture: {(tmp_path / name).resolve()}" for name in names]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    with Image.open(tmp_path / "demo.gif") as animation:
        assert animation.n_frames == 4
        assert animation.info["loop"] == 0  # for ever
    report = json.loads((tmp_path / "demo.json").read_text())
    assert len(report["distance"]) == 4
    assert {name: len(row) for name, row in report["moving"]["distance"].items()} == dict.fromkeys(quick, 4)
    for name in ("OPVI", "SVGD", "Langevin", "exact draws"):
        assert name in out
