"""The referee's own arithmetic, against scipy, closed forms and sums done by hand."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from arena import scores
from arena.forecasts import Band, Numbers
from arena.scaling import Scaler


def student(mean, variance, dof):
    """One component as scipy has it."""
    return (
        stats.t(dof, mean, math.sqrt(variance * (dof - 2) / dof))
        if math.isfinite(dof)
        else stats.norm(mean, variance**0.5)
    )


PARTS = [(0.3, 1.5, 4.0), (-1.0, 0.4, math.inf), (0.5, 2.0, 6.0)]
AT = np.array([-3.0, 0.2, 1.0, 9.0])


@pytest.fixture
def mixed():
    mean, variance, dof = (np.tile([part[i] for part in PARTS], (len(AT), 1)) for i in range(3))
    return Numbers(mean, variance, dof)


def test_density_and_distribution_of_a_mixture(mixed):
    parts = [student(*part) for part in PARTS]
    np.testing.assert_allclose(mixed.log_density(AT), np.log(np.mean([p.pdf(AT) for p in parts], 0)), rtol=1e-9)
    np.testing.assert_allclose(mixed.cdf(AT), np.mean([p.cdf(AT) for p in parts], 0), rtol=1e-9)
    np.testing.assert_allclose(mixed.point(), np.mean([p.mean() for p in parts]), rtol=1e-12)


def integrated(parts, y):
    """The score's definition, by quadrature."""

    def level(z):
        return np.mean([p.cdf(z) for p in parts])

    below = integrate.quad(lambda z: level(z) ** 2, -200, y, limit=400, points=[-5, 0])[0]
    return below + integrate.quad(lambda z: (1 - level(z)) ** 2, y, 200, limit=400, points=[max(y, 5.0)])[0]


def test_crps_is_the_integral_that_defines_it(mixed):
    parts = [student(*part) for part in PARTS]
    np.testing.assert_allclose(mixed.crps(AT), [integrated(parts, y) for y in AT], rtol=0.01)


def test_crps_of_one_normal_on_the_grid_and_in_closed_form():
    mean, variance = np.full((4, 1), 0.7), np.full((4, 1), 2.25)
    closed = Numbers(mean, variance).crps(AT)
    twice = Numbers(np.repeat(mean, 2, 1), np.repeat(variance, 2, 1)).crps(AT)  # the same, but integrated
    np.testing.assert_allclose(twice, closed, rtol=0.01)
    at_the_mean = Numbers(mean[:1], variance[:1]).crps(np.array([0.7]))[0]
    assert at_the_mean == pytest.approx(1.5 * (math.sqrt(2) - 1) / math.sqrt(math.pi))


def test_a_band_is_as_wide_as_past_errors():
    band = Band()
    band.learn(None, np.array([1.0, 3.0]))  # predicted before anything was known: the labels' own spread
    assert band.around(np.zeros(1)).variance[0, 0] == pytest.approx(1.0)
    band.learn(np.zeros(400), np.tile([2.0, -2.0], 200))
    assert band.around(np.zeros(3)).variance == pytest.approx(np.full((3, 1), 4.0))
    band.learn(np.zeros(2000), np.full(2000, 0.1))  # the old ones are forgotten
    assert band.around(np.zeros(1)).variance[0, 0] == pytest.approx(0.01, rel=0.05)


def test_class_losses_by_hand():
    p = np.array([[0.9, 0.1, 0.0], [0.2, 0.5, 0.3]])
    found = scores.class_losses(p, np.array([0, 2]))
    floored = 0.999 * p + 0.001 / 3
    assert found["wrong"].tolist() == [0, 1]
    np.testing.assert_allclose(found["log"], np.log([floored[0, 0], floored[1, 2]]))
    np.testing.assert_allclose(found["crps"][0], (floored[0] - [1, 0, 0]) @ (floored[0] - [1, 0, 0]))
    assert scores.class_losses(np.array([[0.0, 1.0]]), np.array([0]))["log"][0] == pytest.approx(math.log(0.0005))


def test_calibration_error_by_hand():
    confidence, right = np.array([0.95, 0.95, 0.55, 0.55]), np.array([1.0, 0.0, 1.0, 0.0])
    assert scores.calibration_error(confidence, right) == pytest.approx((2 * 0.45 + 2 * 0.05) / 4)


def test_summary_counts_windows_and_leaves_out_rows():
    rows = 800
    inside = np.ones(rows)
    inside[400:600] = np.tile([1.0, 0.0], 100)  # half of one window is not covered
    losses = {"square": np.full(rows, 4.0), "log": np.zeros(rows), "crps": np.ones(rows), "inside": inside}
    losses["square"][:200] = 1e6  # not counted
    found = scores.summary(losses, np.arange(rows) >= 200)
    assert found["error"] == pytest.approx(2.0)
    assert found["coverage gap"] == pytest.approx(abs(500 / 600 - 0.9))
    assert found["coverage gap, worst window"] == pytest.approx(0.4)
    assert "recovery" not in found


def test_recovery_is_what_a_change_costs():
    log = np.zeros(1000)
    log[500:600] = -2.0  # half of the rows that a change is given
    assert scores.recovery(log, (500,)) == pytest.approx(1.0)
    assert scores.recovery(log, (500, 800)) == pytest.approx(0.5)


def test_distance_to_a_posterior():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(4000, 2)) * [1.0, 10.0]
    assert scores.distance(exact, exact) == 0
    assert scores.distance(exact + exact.std(0) * [1.0, 0.0], exact) == pytest.approx(0.5, rel=1e-6)  # one of two
    wide = scores.distance(2 * exact, exact)  # E|X|(2 - 1) = sqrt(2/pi)
    assert wide == pytest.approx(math.sqrt(2 / math.pi), rel=0.05)


def test_regret_is_against_the_best_in_hindsight():
    assert scores.best_in_hindsight({"a": -1.0, "b": -0.25}) == {"a": 0.75, "b": 0.0}


def test_scaling_by_parts_is_scaling_by_all():
    X = np.random.default_rng(1).normal(3, 5, (50, 2))
    X[:, 1] = 7
    scaler = Scaler(2)
    for part in np.array_split(X, 7):
        scaler.learn(part)
    np.testing.assert_allclose(scaler.mean, X.mean(0))
    np.testing.assert_allclose(scaler.sd, [X[:, 0].std(), 1])
