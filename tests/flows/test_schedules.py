import math

import jax.numpy as jnp
import numpy as np
import pytest

from opvi.flows import schedules


def taken(rule, rounds):
    return [rule.size(t) for t in range(1, rounds + 1)]


def test_power_is_the_papers_budget():
    assert sum(taken(schedules.power(0.55), 500)) == 10_108  # PAPER's FITDS: against 20 · 500
    assert taken(schedules.power(0.55), 3) == [1, 2, 2]


def test_saturating_stays_below_the_total_and_starts_like_the_power():
    rule = schedules.saturating(1.0, 50)
    assert taken(rule, 1) == [1]
    assert rule.size(10**9) == 50


@pytest.mark.parametrize("rho", [0.25, 0.55, 0.75, 1.0])
def test_gradient_error_of_the_saturating_rule_grows_like_its_slope(rho):
    """ε_t = Λ √(1/B_t - 1/N) is at most Λ t^(-ρ/2), so E_T = Σ ε_t has slope 1 - ρ/2 and the stated bound."""
    total, horizon = 10**6, np.array([400, 800, 1600, 3200, 6400])
    sizes = np.array(taken(schedules.saturating(rho, total), horizon[-1]))
    t = np.arange(1, horizon[-1] + 1.0)
    epsilon = np.sqrt(1 / sizes - 1 / total)
    assert (epsilon <= t ** (-rho / 2) * (1 + 1e-6)).all()
    smaller = np.sqrt(1 / np.maximum(sizes - 1, 1e-9) - 1 / total)  # with one row less it would be too large
    assert (smaller >= t ** (-rho / 2) * (1 - 1e-6)).all()
    cumulative = np.cumsum(epsilon)[horizon - 1]
    assert (cumulative <= 2 / (2 - rho) * horizon ** (1 - rho / 2)).all()
    slope = np.polyfit(np.log(horizon), np.log(cumulative), 1)[0]
    assert abs(slope - (1 - rho / 2)) < 0.015  # of which rounding sizes up is 0.013


def test_within_budget_is_exact_and_keeps_the_shape():
    rule = schedules.within_budget(schedules.power(0.55), 500, 10_000)
    sizes = taken(rule, 500)
    assert sum(sizes) == 10_000
    assert min(sizes) >= 1
    wanted = np.arange(1, 501) ** 0.55
    assert np.abs(np.array(sizes) - wanted * 10_000 / wanted.sum()).max() < 2
    assert taken(schedules.within_budget(20, 500, 10_000), 500) == [20] * 500
    with pytest.raises(ValueError, match="3 rows cannot fill 5 rounds"):
        schedules.within_budget(20, 5, 3)


def test_buckets():
    assert [schedules.power_of_two(n) for n in (1, 8, 9, 16, 17, 33)] == [8, 8, 16, 16, 32, 64]
    assert schedules.static(20).bucket(7) == 20
    assert schedules.sizes([5, 5]).bucket(5) == 5
    assert schedules.sizes([5, 9]).bucket(9) == 16


def test_prior_weights_sum_to_one():
    t = jnp.arange(1.0, 10_001.0)
    tail = 6 / math.pi**2 / 10_000  # Σ_{t>T} 6/(π²t²) ≈ 6/(π²T)
    assert abs(float(schedules.vanishing(t).sum()) - (1 - tail)) < 1e-5


def test_likelihood_scales():
    b, n = jnp.float32(20.0), jnp.float32(400.0)
    assert schedules.batch_sum(b, n) == 1
    assert schedules.batch_mean(b, n) == jnp.float32(1 / 20)
    assert schedules.dataset(1000)(b, n) == 50
    assert schedules.seen(b, n) == 20


@pytest.mark.parametrize(
    "wrong", [lambda: schedules.static(0), lambda: schedules.power(0), lambda: schedules.saturating(0.5, 0),
              lambda: schedules.dataset(-1), lambda: schedules.decaying(0.0)]
)  # fmt: skip
def test_wrong_settings_name_the_value_and_the_rule(wrong):
    with pytest.raises(ValueError, match="must be greater than 0"):
        wrong()


def test_as_batch_rule_refuses_what_is_no_rule():
    with pytest.raises(TypeError, match="batch_size"):
        schedules.as_batch_rule("many")
    with pytest.raises(ValueError, match="only 1 were listed"):
        schedules.sizes([3]).size(2)
