"""Garbage among the targets is not learnt, and a jump of all of them is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.tracking._mixing._layer import Outcome
from opvi.tracking._wrappers import _change as change
from opvi.tracking._wrappers import _medians as medians
from opvi.tracking._wrappers import _robust as robust

SMALL = opvi.regressor(3, hidden=(6,), particles=5)
ROWS, HALF = 2000, 1000


def drawn(seed=0, noise=None):
    """A smooth function of three columns, in awkward units."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(ROWS, 3))
    noise = 0.1 * rng.normal(size=ROWS) if noise is None else 0.1 * noise(rng)
    return X, 30 * (np.sin(X[:, 0]) + X[:, 1] / 2 + noise) + 200


def said(state, info, batch):
    return info.predicted.mean, info.predicted.level, info.probability


def told(X, y):
    """Errors of predictions made before learning, by rounds of 20 rows, levels of y, and the probability of a jump."""
    _, history = opvi.run(SMALL, opvi.stream((X, y), 20), jax.random.key(1), record=said)
    mean, level, probability = (np.asarray(leaf).ravel() for leaf in history.record)
    return y - mean, level, probability


def errors(X, y):
    return told(X, y)[:2]


@pytest.fixture(scope="module")
def clean():
    X, y = drawn()
    return X, y, errors(X, y)[0]


def rms(e):
    return float(np.sqrt(np.mean(e**2)))


def test_medians_and_trust():
    y = jnp.array([3.0, -1.0, 2.0, 100.0, 7.0, 0.0])
    for count in (6, 5, 1):
        weight = jnp.where(jnp.arange(6) < count, 2.0, 0.0)
        assert float(medians.median(y, weight)) == np.median(np.asarray(y[:count]))
    assert float(medians.median(y, jnp.zeros(6))) == 0
    np.testing.assert_allclose(robust.trust(jnp.array([0.0, 99.0, 400.0, 1e4]), robust.LARGEST), [1, 1, 0.25, 0.01])
    w, moved = robust.among_themselves(y, jnp.ones(6))
    unit = 1.4826 * np.median(np.abs(y - 2.5))  # by hand
    np.testing.assert_allclose(w, [1, 1, 1, (10 * unit / 97.5) ** 2, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(moved[3], 2.5 + w[3] * 97.5, rtol=1e-5)
    assert float(robust.among_themselves(jnp.array([0.0, 0, 0, 9]), jnp.ones(4))[0].min()) == 1  # mostly one value


@pytest.mark.parametrize(("share", "size"), [(0.01, 50), (0.1, 50), (0.2, 1000)])
def test_garbage_costs_little(clean, share, size):
    """The rows that are not garbage are predicted as well as if there were none."""
    X, y, without = clean
    rng = np.random.default_rng(2)
    bad = rng.random(ROWS) < share
    dirty = np.where(bad, y + size * y.std() * rng.choice([-1, 1], ROWS), y)
    e, level = errors(X, dirty)
    later = ~bad & (np.arange(ROWS) >= HALF)
    assert rms(e[later]) < (1.06 + 0.8 * share) * rms(without[later])  # there are fewer rows to learn from, too
    covered = ((level > 0.05) & (level < 0.95))[later]
    assert covered.mean() == pytest.approx(0.9, abs=5 * 0.3 / np.sqrt(later.sum()))


@pytest.mark.parametrize("by", [3, 100, 1e4])
def test_a_jump_of_the_level_is_followed(clean, by):
    X, y, without = clean
    e, _ = errors(X, y + by * y.std() * (np.arange(ROWS) >= HALF))
    assert rms(e[HALF : HALF + 20]) > 0.9 * by * y.std()
    assert rms(e[HALF + 40 :]) < 1.1 * rms(without[HALF + 40 :])


@pytest.mark.parametrize(("by", "centre"), [(50, 0), (0.1, 0), (30, 200)])
def test_a_jump_of_the_scale_is_followed(clean, by, centre):
    """About 0, and so of the level, too; or about the mean. The networks stay as they are, in new units."""
    X, y, without = clean
    e, level = errors(X, np.where(np.arange(ROWS) >= HALF, centre + by * (y - centre), y))
    assert rms(e[HALF + 40 :]) < 1.1 * by * rms(without[HALF + 40 :])
    covered = (level > 0.05) & (level < 0.95)
    assert covered[HALF + 100 :].mean() == pytest.approx(0.9, abs=5 * 0.3 / np.sqrt(900))


def test_most_of_the_past_is_forgotten_when_the_probability_of_a_jump_is_large(clean):
    """A part of the function changes, by less than what is a surprise in most rows."""
    X, y, without = clean
    e, _, probability = told(X, np.where(np.arange(ROWS) >= HALF, y - 21 * X[:, 1], y))
    at = 20 * np.flatnonzero(probability > 0.95)
    assert HALF <= at[0] <= HALF + 20
    assert probability[: HALF // 20].max() < 0.01
    assert rms(e[HALF + 100 : HALF + 200]) < 1.4 * rms(without[HALF + 100 : HALF + 200])


def test_units_are_those_of_a_line_through_surprising_rows():
    rng = np.random.default_rng(5)
    m = rng.normal(size=20)
    t = 3 + 0.2 * m + 0.02 * rng.normal(size=20)
    recent = change._moments(jnp.zeros(6), jnp.asarray(m), jnp.asarray(t - m), jnp.ones(20), jnp.asarray(20.0))
    found = change._units(recent, jnp.asarray(0.1**2))
    slope, shift = np.polyfit(m, t, 1)
    np.testing.assert_allclose([found.ratio, found.shift], [slope, shift], rtol=1e-4)
    np.testing.assert_allclose(found.spread, np.var(t - m), rtol=1e-4)
    assert bool(found.same)
    assert not change._units(recent, jnp.asarray(0.04**2)).same  # the rest is more than the usual error, in these units
    few = change._moments(
        jnp.zeros(6), jnp.asarray(m), jnp.asarray(t - m), jnp.ones(20).at[4:].set(0), jnp.asarray(20.0)
    )
    assert not change._units(few, jnp.asarray(0.1**2)).same
    turned = change._moments(jnp.zeros(6), jnp.asarray(m), jnp.asarray(-2 * m), jnp.ones(20), jnp.asarray(20.0))
    assert not change._units(turned, jnp.asarray(0.1**2)).same
    halved = change._moments(recent, jnp.zeros(1), jnp.zeros(1), jnp.zeros(1), jnp.asarray(medians.HALF_LIFE))
    np.testing.assert_allclose(halved, recent / 2, rtol=1e-6)


def test_a_relation_that_turns_round_is_learnt_anew(clean):
    """Faster than by forgetting alone, which has a third of y's deviation left after 200 rows."""
    X, y, _ = clean
    e, _ = errors(X, np.where(np.arange(ROWS) >= HALF, 400 - y, y))
    assert rms(e[HALF + 200 : HALF + 400]) < 0.3 * y.std()


def test_only_a_level_or_a_unit_leaves_the_past_as_it_is():
    rng = np.random.default_rng(6)
    m, noise = rng.normal(size=20), 0.1 * rng.normal(size=20)
    before, m32 = change.ChangeState(jnp.zeros(2), jnp.zeros(6), jnp.zeros(())), jnp.asarray(m, jnp.float32)

    @jax.jit
    def believed(y):
        squared, usual = (y - m32) ** 2 / 0.01, jnp.asarray(0.01)
        outcome = Outcome(None, None, None, m32, squared, usual, jnp.asarray(50.0))
        return change._found(before, y, outcome, jnp.ones(20), jnp.array(True))[1]

    other = rng.normal(size=20)
    cases = {"no jump": m, "level": m + 5, "unit": 20 * m - 40, "part": m + 3 + 0.4 * other, "all": 30 * other}
    found = {name: believed(jnp.asarray(y + noise, jnp.float32)) for name, y in cases.items()}
    said = {name: (bool(one.jump), bool(one.known), bool(one.renew)) for name, one in found.items()}
    assert said == {
        "no jump": (False, False, False),
        "level": (True, True, False),
        "unit": (True, True, False),
        "part": (True, False, False),
        "all": (True, False, True),
    }
    assert float(found["level"].ratio) == 1
    assert float(found["level"].shift) == pytest.approx(5, abs=0.1)
    assert float(found["unit"].ratio) == pytest.approx(20, abs=0.2)


def test_heavy_tails_are_noise_and_not_garbage():
    """Student-t noise of 3 degrees of freedom: intervals hold what they say, far ones too."""
    X, y = drawn(noise=lambda rng: rng.standard_t(3, ROWS))
    _, level = errors(X, y)
    later = level[400:]
    for size in (0.5, 0.9, 0.98):
        inside = np.abs(later - 0.5) < size / 2
        assert inside.mean() == pytest.approx(size, abs=5 * np.sqrt(size * (1 - size) / len(later)))


@pytest.mark.parametrize("there", [[], [3], [0, 5], [1, 2, 4], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
def test_the_median_is_numpys_also_of_equal_values(there):
    values, weight = np.array([2.0, -1, 2, 7, 2, -1], np.float32), np.zeros(6, np.float32)
    weight[there] = 0.5
    assert float(medians.median(values, weight)) == (np.median(values[there]) if there else 0)
