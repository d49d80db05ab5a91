"""The pace of forgetting: that of the settings while nothing drifts, faster while it does, and back again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.tracking.experts import _pace as pacing
from opvi.tracking.experts._networks import usual_settings
from opvi.tracking.experts._pace import Pace
from tests.tracking.parts import nets

SETTINGS = usual_settings(4)._replace(forgetting=(0.99,) * 4)
SAMPLER = opvi.regressor(2, hidden=(), particles=4, settings=SETTINGS)
ROWS, BATCH = 1000, 20


def turning(seed: int, angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of a straight line whose direction has these angles, with noise."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((len(angle), 2)).astype(np.float32)
    y = np.cos(angle) * X[:, 0] + np.sin(angle) * X[:, 1] + 0.1 * rng.standard_normal(len(angle))
    return X, y.astype(np.float32)


@jax.jit
def paces(state, X, y):
    """Return the state after the rows, and the logarithm of the pace after each batch."""

    def one(state, part):
        state, _ = SAMPLER.step(jax.random.key(0), state, opvi.Batch(part, jnp.ones(BATCH)))
        return state, nets(state).pace[0]

    return jax.lax.scan(one, state, (X.reshape(-1, BATCH, 2), y.reshape(-1, BATCH)))


@pytest.mark.slow  # compiles a regressor
def test_the_pace_stays_while_nothing_turns_falls_when_it_does_and_comes_back():
    angle = np.concatenate([np.zeros(ROWS), np.linspace(0, 3, ROWS), np.full(6 * ROWS, 3.0)])
    X, y = turning(7, angle)
    state, found = SAMPLER.init(jax.random.key(0)), []
    for part in range(8):
        rows = slice(part * ROWS, (part + 1) * ROWS)
        state, pace = paces(state, X[rows], y[rows])
        found.append(np.asarray(pace))
    still, moving, *after = found
    assert (still == 0).all()
    assert moving[-1] <= -pacing.LARGEST_STEP
    assert np.concatenate(after)[-1] >= moving[-1] + 2


def test_a_given_half_life_has_no_pace():
    state = opvi.regressor(2, hidden=(), particles=2, half_life=100).init(jax.random.key(0))
    assert nets(state).pace is None
    assert nets(state).trail is None


def fed(error, move, chunks=30, log2=0.0, size=1.0):
    """Return the pace after chunks of 20 rows with these errors and moves."""
    pace = pacing.start(jnp.float32).at[:2].set(jnp.array([log2, 20.0]))
    rng, learn = np.random.default_rng(0), jax.jit(pacing.learn)
    for _ in range(chunks):
        noise = rng.standard_normal(20)
        q = move * rng.standard_normal(20)
        r = error * q + noise
        pace = learn(pace, *(jnp.asarray(a, jnp.float32) for a in (r, q, np.ones(20), np.asarray(size))))
    return Pace(*map(float, pace))


@pytest.mark.parametrize(
    ("error", "log2", "expected"),
    [(2.0, 0.0, "lower"), (0.0, 0.0, "same"), (-1.0, 0.0, "same"), (-1.0, -4.0, "higher"), (0.2, 0.0, "same")],
)
def test_the_pace_follows_the_evidence(error, log2, expected):
    """Errors that repeat the last moves say: late. Errors that undo them: hasty. Small ones: neither."""
    found = fed(error, 1.0, log2=log2).log2
    assert {"lower": found < log2, "same": found == log2, "higher": found > log2}[expected]


def test_rows_without_weight_and_numbers_that_are_not_finite_change_nothing():
    pace = pacing.start(jnp.float32).at[:].set(jnp.array([-2.0, 40.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0]))
    ones = jnp.ones(20)
    assert (pacing.learn(pace, ones, ones, jnp.zeros(20), jnp.ones(())) == pace).all()
    assert (pacing.learn(pace, ones, ones * jnp.nan, ones, jnp.ones(())) == pace).all()


def test_the_count_of_rows_stays_small():
    pace = pacing.start(jnp.float32).at[1].set(2 * pacing.MEMORY)
    assert pacing.learn(pace, jnp.ones(7), jnp.ones(7), jnp.ones(7), jnp.ones(()))[1] == pacing.MEMORY + 7


def test_a_trail_begins_with_the_particles_and_then_follows_them():
    old, new, pace = jnp.zeros((2, 3)), jnp.ones((2, 3)), pacing.start(jnp.float32)
    rows = jnp.asarray(pacing.TRAIL, jnp.float32)
    assert (pacing.follow(old, new, pace, rows) == 1).all()
    np.testing.assert_allclose(pacing.follow(old, new, pace.at[1].set(rows + 20), rows), 0.5)
