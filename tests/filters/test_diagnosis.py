"""What a tracker says about its own posterior, and draws that are right where particles are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

import opvi
from opvi.filters import Diagnosis, _moves, _sl_opvi
from opvi.filters._measures import AtDraws, measured, stein_discrepancy
from opvi.filters._modes import large_modes
from opvi.filters._moves import remembered_limit
from opvi.filters._surrogates import frame
from opvi.predictive import Normal
from opvi.running import Chunk

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
    assert said.right  # it is about the draws; how far particles are from them is in the numbers
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
    good = Diagnosis(100, 0.02, 0.98, 1.03, 0.8, 0.1, 0.3, 0.01, 2.0, 0.0, 100, 300, 300)
    assert good.right
    assert good._replace(shift=1.0, wide=2.0).right  # particles far off, draws that have left them
    assert "store 3,000 rows" in good._replace(rows=2400, lost=0.4).concerns()[0]
    assert "use NUTS: the 300 rows are all stored" in good._replace(remembered=0.5).concerns()[0]
    assert "moves from the particles are refused" in good._replace(shift=float("nan")).concerns()[0]
    assert "all stored" not in good._replace(remembered=0.5, rows=900).concerns()[0]
    assert "off by 0.20 sd or more" in good._replace(off=0.2).concerns()[0]
    assert "still changes by 5.0 standard errors" in good._replace(travelled=5.0).concerns()[0]
    assert "9 of 100 particles carry the weight" in good._replace(effective=9.0).concerns()[0]


def test_draws_that_miss_the_density_are_flagged():
    good = Diagnosis(
        100, 0.02, 0.98, 1.03, 0.8, 0.1, 0.3, 0.01, 2.0, 0.0, 100, 300, 300, stein=2.0, pareto=2.0, uneven=9.0
    )
    assert good.right  # rows that the model does not expect, and few that decide, are no fault of the draws
    assert "Stein's discrepancy is 7.0" in good._replace(stein=7.0).concerns()[0]


def test_a_diagnosis_has_other_measures(learnt):
    """Of a conjugate model: Stein's identity holds, no row decides, and what is not defined is nan."""
    said = TRACKER.diagnosis(learnt)
    assert abs(said.stein) < 4
    assert said.pareto < 0.7
    assert np.isnan(said.uneven)  # this target cannot predict
    predicting = opvi.sl_opvi(
        opvi.target(LINE.log_prior, LINE.log_likelihood, LINE.init, lambda v, x: Normal(x @ v, jnp.full(len(x), 0.25))),
        example=(X, Y),
        memory_rows=40,
        pace=PACE,
    )
    score, rows, below, stored = _sl_opvi._at_draws(predicting, learnt, learnt.particles)
    exact = -np.asarray(learnt.particles) - (np.asarray(learnt.particles) @ X.T - Y) @ X / 0.25
    np.testing.assert_allclose(score, exact, rtol=1e-3, atol=1e-2)
    assert rows.shape == (60, 40)
    assert stored.all()
    right = measured(learnt.particles, AtDraws(score, rows, below, stored))
    assert right["uneven"] < 1.5
    wrong = measured(learnt.particles, AtDraws(score, rows, below**4, stored))
    assert wrong["uneven"] > 2
    state = learnt._replace(weight=learnt.weight.at[5:].set(0))
    assert _sl_opvi._at_draws(predicting, state, learnt.particles).stored.sum() == 5


def test_other_measures():
    n, rng = 400, np.random.default_rng(1)
    x = rng.normal(size=(n, 3)) * [1, 5, 0.1]
    score = -x / np.square([1, 5, 0.1])
    assert abs(stein_discrepancy(x, score)) < 4
    assert stein_discrepancy(x, score - [0.5, 0, 0]) > 6  # draws half a standard deviation too far
    assert stein_discrepancy(x, score / 1.5) > 6  # draws too narrow
    assert np.isnan(stein_discrepancy(x * np.nan, score))


def test_doubts_are_raised_at_doubled_rounds_and_once():
    """The steps themselves are not looked at: a chunk has a state and a round."""
    good = Diagnosis(100, 0.02, 0.98, 1.03, 0.8, 0.1, 0.3, 0.01, 2.0, 0.0, 100, 300, 300)
    asked = []

    class Stub:
        def diagnosis(self, state):
            asked.append(state)
            return good._replace(lost=float(state >= 64))

    callback = opvi.filters.doubts(Stub())
    with pytest.warns(UserWarning, match="after round 64 this may not be the posterior: .* store 1,000 rows") as raised:
        found = [callback(Chunk(i, i, None, None, [])) for i in range(1, 200)]
    assert asked == [32, 64, 128]
    assert len(raised) == 1
    assert found[127]["lost"] == 1
    assert found[126] is None
    with pytest.raises(TypeError, match="Langevin has no `diagnosis`"):
        opvi.filters.doubts(opvi.langevin(LINE, step=0.1))


def test_frozen_chains_are_few_and_far():
    """Chains that roam have spans of several standard deviations, those that are frozen have none."""
    n, rng = 200, np.random.default_rng(2)
    now, spans = rng.normal(size=(n, 2)).clip(-2.5, 2.5).astype(np.float32), np.full((n, 2), 4, np.float32)
    same, frozen = np.full((n, n), 1 / n, np.float32), jax.jit(_moves.frozen_chains)
    now[:4], spans[:4] = 9, 0.1
    spans[4] = 0.1  # in the middle: no harm
    now[5] = 9  # far, but it moves
    np.testing.assert_array_equal(np.flatnonzero(frozen(now, spans, same)), np.arange(4))
    spans[3, 1] = 4  # it moves along one coordinate
    np.testing.assert_array_equal(np.flatnonzero(frozen(now, spans, same)), np.arange(3))
    now[:8], spans[:8] = 9, 0.1
    assert not frozen(now, spans, same).any()  # 4 % of the chains
    now[4:8] = 0
    assert not frozen(now, spans, same).any()  # wherever they are: moves are slow
    now[8:], spans = now[8:] / 100, np.full((n, 2), 0.1, np.float32)
    now[:100], now[100:] = now[:100] - 50, now[100:] + 50  # two modes, each of them narrow
    halves = np.kron(np.eye(2), np.full((100, 100), 1 / 100)).astype(np.float32)
    assert not frozen(now, spans, halves).any()


def test_a_chain_that_cannot_move_is_replaced(monkeypatch):
    """One of 100 chains begins in a place so narrow that every trajectory is refused."""
    monkeypatch.setattr(_moves, "MOST_LOOKS", 0)
    x = jnp.asarray(RNG.normal(size=(100, 1)), jnp.float32).at[7].set(8.0)

    def log_density(v):
        return jnp.logaddexp(-(v**2).sum() / 2, 12 - ((v - 8) ** 2).sum() * 1e12)

    same = jnp.full((100, 100), 0.01)
    places = _moves.moved(KEY, log_density, x, frame(x), 60, 1, same).places
    assert abs(places).max() < 5


def deep_funnel():
    """Nine values of unknown spread, which no row informs about: Neal's funnel."""
    return opvi.target(
        lambda v: norm.logpdf(v[0], 0, 3) + norm.logpdf(v[1:], 0, jnp.exp(v[0] / 2)).sum(),
        lambda v, rows: jnp.zeros(len(rows), v.dtype),
        lambda key: jnp.zeros(10).at[0].set(jax.random.normal(key)),
    )


@pytest.mark.parametrize("wide", [False, True])
def test_chains_that_have_not_arrived_are_flagged(monkeypatch, wide):
    """In a funnel, chains that begin in the middle are still on their way; those that begin at its ends stay there."""
    monkeypatch.setattr(_moves, "MOST_LOOKS", int(wide))
    monkeypatch.setattr(_moves, "STUCK", 1.0)  # coordinates are not fitted again: this funnel would be round
    tracker = opvi.sl_opvi(deep_funnel(), memory_rows=0, pace=PACE)
    x = np.random.default_rng(3).normal(size=(60, 10)) * (1 if wide else 0.03)
    if wide:
        x[:, 0] = 3 * x[:, 0]
        x[:, 1:] *= np.exp(x[:, :1] / 2)
    state = tracker.init(KEY, jnp.asarray(x, jnp.float32))
    said = tracker.diagnosis(state)
    assert not said.right
    assert _sl_opvi._moves(tracker, 200, 40, 15, KEY, state).looks == int(wide)  # long trajectories, if allowed
    assert (said.remembered > said.most) == wide
    assert any(("have not forgotten" if wide else "have not arrived") in concern for concern in said.concerns())


def test_chains_that_have_clearly_arrived_are_looked_at_early(monkeypatch):
    monkeypatch.setattr(_moves, "MOST_LOOKS", 0)
    monkeypatch.setattr(_moves, "STUCK", 1.0)  # steps that are too short stay so
    x, same = jnp.asarray(RNG.normal(size=(200, 1)), jnp.float32), jnp.full((200, 200), 1 / 200)

    def places(slower, first, early):
        own = frame(slower * x)
        return np.asarray(_moves.moved(KEY, lambda v: -(v**2).sum() / 2, x, own, first, 1, same, early).places)

    np.testing.assert_array_equal(places(1.0, 30, 8), places(1.0, 8, 0))
    np.testing.assert_array_equal(places(0.01, 30, 8), places(0.01, 30, 0))  # short steps: they remember


def correlation(then, now, same):
    return float(_moves.correlations(then, now, same).max())


def test_what_chains_remember_counts_within_modes_and_in_squares():
    n = 200
    one, two = RNG.normal(size=(2, n, 2)).astype(np.float32)
    same = np.full((n, n), 1 / n, np.float32)
    assert correlation(one, two, same) < remembered_limit(n)
    assert correlation(one, 0.9 * one + 0.4 * two, same) > 0.8
    assert correlation(one, np.abs(one) * np.sign(two), same) > 0.8  # the mean is forgotten, the spread is not
    side = np.repeat([-5, 5], n // 2)[:, None].astype(np.float32)
    assert correlation(one + side, two + side, same) > 0.8
    halves = 2 / n * (side == side.T)
    assert correlation(one + side, two + side, halves.astype(np.float32)) < remembered_limit(n)


def test_what_is_left_of_errors():
    """With half of the start's deviations left, what is still to come is as much as what has come."""
    n = 1000
    start, noise = RNG.normal(size=(2, n, 1)).astype(np.float32)
    now, same = start / 2 + np.sqrt(0.75, dtype=np.float32) * noise, np.full((n, n), 1 / n, np.float32)
    half = np.float32(0.5)
    found = _moves.arrived(start + 2 * half, start, now + half, same)
    assert abs(found.remembered - 0.5) < 0.1
    assert abs(found.off - 0.5) < 0.2
    assert found.travelled > 4
    forgotten = _moves.arrived(start + 2 * half, now, noise, same)
    assert forgotten.off < 0.05
    assert forgotten.travelled < 4


def test_modes_of_few_particles_count_to_the_nearest_large_one():
    found = jax.jit(large_modes)
    z = np.concatenate([np.linspace(0, 1, 40), np.linspace(50, 51, 40), [-40, 100]])
    same = np.asarray(found(jnp.asarray(z[:, None], jnp.float32)))
    assert same[0, 39] == same[0, 80] == same[41, 81] == 1
    assert same[80, 81] == same[0, 41] == same[0, 81] == 0
    narrow = np.concatenate([np.linspace(0, 1e-3, 40), 1 + np.linspace(0, 1e-3, 40)])
    assert np.asarray(found(jnp.asarray(narrow[:, None], jnp.float32))).sum() == 2 * 40**2
    uneven = np.repeat(np.linspace(0, 1, 20), 2) + np.tile([0, 1e-6], 20)  # nearest neighbours are copies
    assert np.asarray(found(jnp.asarray(uneven[:, None], jnp.float32))).all()
