"""The probability of a jump is the posterior's, and still rows hardly ever raise it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from opvi.tracking import _drift as drift
from opvi.tracking._mixing import _quantiles as quantiles
from opvi.tracking._wrappers import _jumps as jumps


def test_odds_are_those_of_all_times_at_which_a_jump_may_have_come(monkeypatch):
    """Against the sum over all of them, each with its prior probability."""
    monkeypatch.setattr(jumps, "HAZARD", 0.01)
    rng = np.random.default_rng(0)
    ratios, rows = rng.normal(size=12), rng.integers(1, 30, size=12)
    odds = jnp.zeros(())
    for ratio, n in zip(ratios, rows, strict=True):
        odds = jumps.after(odds, jnp.asarray(ratio, jnp.float32), jnp.asarray(n, jnp.float32))
    quiet = 0.99 ** np.concatenate([[0], np.cumsum(rows)])  # the probability of no jump by the end of each batch
    jumped = sum((quiet[k] - quiet[k + 1]) * np.exp(ratios[k:].sum()) for k in range(12))
    assert float(jumps.probability(odds)) == pytest.approx(jumped / (jumped + quiet[-1]), rel=1e-4)


def test_odds_stay_finite_and_ignore_what_is_not():
    odds, nothing = jnp.asarray(1e-4), jnp.zeros(())
    assert jumps.after(odds, nothing, nothing) == odds
    assert jumps.after(odds, jnp.asarray(jnp.nan), nothing) == odds
    assert jumps.after(odds, jnp.asarray(1e9), nothing) == jumps.LARGEST


def test_errors_are_held_against_wider_ones():
    z = np.array([0.3, -1.2, 2.0, 7.0])
    weight = np.array([1.0, 0.5, 1.0, 0.0])
    said = jumps.wider(jnp.asarray(stats.norm.cdf(z), jnp.float32), jnp.asarray(weight, jnp.float32))
    wanted = (stats.norm.logpdf(z, scale=3) - stats.norm.logpdf(z)) @ weight
    assert float(said) == pytest.approx(wanted, rel=1e-4)
    far = jumps.wider(jnp.array([0.0, 1.0, jnp.nan]), jnp.array([1.0, 1.0, 0.0]))
    assert float(far) == pytest.approx(2 * (9 * (1 - 1 / 9) / 2 - np.log(3)), rel=1e-4)


def alarms(level, rows):
    """Return when odds of levels in batches pass the threshold; they begin again at an alarm."""

    def one(odds, level):
        odds = jumps.after(odds, jumps.wider(level, jnp.ones(rows)), jnp.asarray(rows, jnp.float32))
        alarm = jumps.probability(odds) > jumps.ALARM
        return jnp.where(alarm, 0, odds), alarm

    batches = jnp.asarray(level, jnp.float32).reshape(-1, rows)
    return np.flatnonzero(jax.jit(lambda a: jax.lax.scan(one, jnp.zeros(()), a)[1])(batches))


@pytest.mark.parametrize("rows", [1, 20])
def test_rows_that_are_predicted_rightly_raise_no_alarm_and_larger_errors_soon_do(rows):
    """A false one in 19 / HAZARD = 1,900,000 rows is the bound; after a jump, ten rows or two batches are enough."""
    rng = np.random.default_rng(1)
    assert len(alarms(rng.random(100_000), rows)) == 0
    later = stats.norm.cdf(np.where(np.arange(1000) < 500, 1, 4) * rng.normal(size=1000))
    first = alarms(later, rows)[0] * rows
    assert 500 <= first <= 530


@pytest.mark.parametrize("rows", [1, 20])
def test_a_detector_of_losses_says_the_same_however_rows_come(rows):
    """At most one false alarm in 100,000 rows, three times over, and a change is noticed."""
    rng = np.random.default_rng(3)
    z = rng.normal(size=301_000) * np.where(np.arange(301_000) < 300_000, 1, 2)
    losses = jnp.asarray(z.reshape(-1, rows) ** 2 / 2, jnp.float32).mean(1)

    def one(detector, loss):
        return drift.update(detector, loss, jnp.asarray(rows, jnp.float32))

    probability = np.asarray(jax.jit(lambda a: jax.lax.scan(one, drift.start(jnp.float32), a)[1])(losses))
    at = np.flatnonzero(probability > jumps.ALARM) * rows
    assert (at < 300_000).sum() <= 3
    assert 300_000 <= at[at >= 300_000][0] < 300_150
    assert ((probability >= 0) & (probability <= 1)).all()
    together = probability[19::20] if rows == 1 else probability
    expected = jax.jit(lambda a: jax.lax.scan(one_block, drift.start(jnp.float32), a)[1])(
        jnp.asarray(z.reshape(-1, 20) ** 2 / 2, jnp.float32).mean(1)
    )
    np.testing.assert_allclose(together[:1000], expected[:1000], rtol=1e-3)


def one_block(detector, loss):
    return drift.update(detector, loss, jnp.asarray(20.0))


def test_a_loss_that_is_not_finite_and_a_batch_without_rows_change_nothing():
    detector = drift.start(jnp.float32)._replace(loss=jnp.asarray(3.0), rows=jnp.asarray(5.0))
    for loss, rows in ((jnp.nan, 20.0), (1.0, 0.0)):
        new, probability = drift.update(detector, jnp.asarray(loss), jnp.asarray(rows))
        assert jax.tree.all(jax.tree.map(np.array_equal, new, detector))
        assert float(probability) < 1e-4


def test_squared_quantiles_are_those_of_scipy():
    level = np.array([1e-5, 1e-3, 0.1, 0.5, 0.77, 0.9999], np.float32)
    want = stats.norm.ppf(level.astype(float)) ** 2
    np.testing.assert_allclose(quantiles.squared_quantile(level), want, rtol=2e-3, atol=1e-6)
