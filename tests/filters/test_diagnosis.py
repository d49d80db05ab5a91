"""What a tracker says about its own posterior, and draws that are right where particles are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

import opvi
from opvi.filters import Diagnosis

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2)).astype(np.float32)
Y = (X @ [1.0, -2.0] + 0.5 * RNG.normal(size=40)).astype(np.float32)
LINE = opvi.target(
    lambda v: norm.logpdf(v).sum(),
    lambda v, rows: norm.logpdf(rows[1], rows[0] @ v, 0.5),
    lambda key: jax.random.normal(key, (2,)),
)
PACE = opvi.filters.Pace(looks=20)
TRACKER = opvi.sl_opvi(LINE, example=(X, Y), memory_rows=40, pace=PACE)
COVARIANCE = np.linalg.inv(np.eye(2) + X.T.astype(float) @ X / 0.25)
MEAN, SD = COVARIANCE @ X.T.astype(float) @ Y / 0.25, np.sqrt(np.diag(COVARIANCE))


@pytest.fixture(scope="module")
def learnt():
    return opvi.run(TRACKER, opvi.stream((X, Y), 20), KEY, particles=60)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "narrower"), [(0.0, 1.0), (3.0, 1.0), (0.0, 0.2)])
def test_draws_are_the_posterior_wherever_particles_are(learnt, shift, narrower):
    x = np.asarray(learnt.particles, float)
    x = MEAN + narrower * (x - x.mean(0)) + shift * SD
    state = learnt._replace(particles=jnp.asarray(x, jnp.float32))
    draws = np.asarray(TRACKER.draws(state, KEY, 4000), float)
    assert draws.shape == (4000, 2)
    assert (np.abs(draws.mean(0) - MEAN) / SD).max() < 0.1
    np.testing.assert_allclose(draws.std(0) / SD, 1, atol=0.08)
    np.testing.assert_allclose(np.corrcoef(draws.T)[0, 1], COVARIANCE[0, 1] / SD.prod(), atol=0.08)
    said = TRACKER.diagnosis(state)
    assert said.right == (shift == 0 and narrower == 1)
    assert abs(said.shift - shift) < 0.15 + 0.1 * shift
    assert abs(said.narrow - narrower) < 0.1


def test_one_particle_that_carries_all_weight_is_named():
    state = TRACKER.init(KEY, 60)
    said = TRACKER.diagnosis(state._replace(log_weights=jnp.where(jnp.arange(60) == 3, 0.0, -60.0)))
    assert round(said.effective) == 1
    assert any("1 of 60 particles carry the weight: take 240" in concern for concern in said.concerns())


@pytest.mark.slow
def test_rows_that_leave_are_reported_where_a_polynomial_does_not_hold_them():
    """Without stored rows, a conjugate model stays exact; a steep logistic one does not, and its run warns."""
    steep = opvi.target(
        lambda v: norm.logpdf(v, 0, 5).sum(),
        lambda v, rows: jax.nn.log_sigmoid(rows[1] * (rows[0] @ v)),
        lambda key: 5 * jax.random.normal(key, (2,)),
    )
    rows = X, np.where(RNG.logistic(size=40) < X @ [3.0, -6.0], 1, -1).astype(np.float32)
    with pytest.warns(UserWarning, match="40 of 40 rows are known by a surrogate.*store 1,000 rows"):
        state, _ = opvi.run(opvi.sl_opvi(steep, memory_rows=0, pace=PACE), opvi.stream(rows, 5), KEY, particles=40)
    assert opvi.watched(opvi.sl_opvi(steep, memory_rows=0)).concerns(opvi.tracking.Wrapped(state, (), 0, 0))
    state, _ = opvi.run(opvi.sl_opvi(LINE, memory_rows=0, pace=PACE), opvi.stream((X, Y), 5), KEY, particles=40)
    assert np.sqrt(np.asarray(state.lost) * np.asarray(state.particles).var(0)).max() < 0.01


def test_concerns_name_a_remedy():
    good = Diagnosis(100, 0.02, 0.98, 1.03, 0.8, 0.0, 100, 300, 300)
    assert good.right
    assert "store 3,000 rows" in good._replace(rows=2400, lost=0.4).concerns()[0]
    assert "use NUTS: the 300 rows are all stored" in good._replace(wide=1.4).concerns()[0]
    assert "moves from the particles are refused" in good._replace(shift=float("nan")).concerns()[0]
    assert "all stored" not in good._replace(shift=1.0, rows=900).concerns()[0]
