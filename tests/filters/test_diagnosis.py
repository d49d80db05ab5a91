"""What a tracker says about its own posterior, and draws that are right where particles are not."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

import opvi
from opvi.filters._measures import stein_discrepancy
from opvi.filters.sl_opvi import Diagnosis, _sl_opvi, _trajectories
from opvi.filters.sl_opvi._mode_weights import large_modes
from opvi.filters.sl_opvi._surrogates import frame
from opvi.filters.sl_opvi._trajectories import remembered_limit
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
TRACKER = opvi.sl_opvi(LINE, pace=PACE)
COVARIANCE = np.linalg.inv(np.eye(2) + X.T.astype(float) @ X / 0.25)
MEAN, SD = COVARIANCE @ X.T.astype(float) @ Y / 0.25, np.sqrt(np.diag(COVARIANCE))
GOOD = Diagnosis(
    effective=100,
    shift=0.02,
    narrow=0.98,
    wide=1.03,
    accepted=0.8,
    remembered=0.1,
    most=0.3,
    off=0.01,
    travelled=2.0,
    lost=0.0,
    particles=100,
    rows=300,
)


@pytest.fixture(scope="module")
def learnt():
    return opvi.run(TRACKER, opvi.stream((X, Y), 20), KEY, particles=60)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "narrower"), [(0.0, 1.0), (0.5, 1.0), (0.0, 0.85)])
def test_draws_are_the_posterior_though_particles_are_not(learnt, shift, narrower):
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
def test_rows_that_a_polynomial_does_not_hold_are_reported():
    """A conjugate model stays exact; a steep logistic one does not, and its run warns."""
    steep = opvi.target(
        lambda v: norm.logpdf(v, 0, 5).sum(),
        lambda v, rows: jax.nn.log_sigmoid(rows[1] * (rows[0] @ v)),
        lambda key: 5 * jax.random.normal(key, (2,)),
    )
    rows = X, np.where(RNG.logistic(size=40) < X @ [3.0, -6.0], 1, -1).astype(np.float32)
    with pytest.warns(UserWarning, match="40 rows are known by a polynomial alone.*store rows: `opvi.ibis"):
        state, _ = opvi.run(opvi.sl_opvi(steep, pace=PACE), opvi.stream(rows, 5), KEY, particles=40)
    assert opvi.watched(opvi.sl_opvi(steep)).concerns(opvi.tracking.Wrapped(state, (), 0, 0))
    state, _ = opvi.run(opvi.sl_opvi(LINE, pace=PACE), opvi.stream((X, Y), 5), KEY, particles=40)
    assert np.sqrt(np.asarray(state.lost) * np.asarray(state.particles).var(0)).max() < 0.01


def test_concerns_name_a_remedy():
    assert GOOD.right
    assert GOOD._replace(shift=1.0, wide=2.0).right  # particles far off, draws that have left them
    assert "moved a mean by 0.40 sd: store rows: `opvi.ibis(target)`" in GOOD._replace(lost=0.4).concerns()[0]
    assert "store rows: `opvi.ibis(target)`" in GOOD._replace(remembered=0.5).concerns()[0]
    assert "moves from the particles are refused" in GOOD._replace(shift=float("nan")).concerns()[0]
    assert "off by 0.20 sd or more" in GOOD._replace(off=0.2).concerns()[0]
    assert "still changes by 5.0 standard errors" in GOOD._replace(travelled=5.0).concerns()[0]
    assert "9 of 100 particles carry the weight" in GOOD._replace(effective=9.0).concerns()[0]


def test_draws_that_miss_the_density_are_flagged():
    assert GOOD._replace(stein=2.0).right
    assert "Stein's discrepancy is 7.0" in GOOD._replace(stein=7.0).concerns()[0]


def test_stein_discrepancy_is_that_of_the_density_that_is_tracked(learnt):
    """Of a conjugate model, whose polynomial is exact."""
    assert abs(TRACKER.diagnosis(learnt).stein) < 4
    score = _sl_opvi._scores(LINE, learnt, learnt.particles)
    exact = -np.asarray(learnt.particles) - (np.asarray(learnt.particles) @ X.T - Y) @ X / 0.25
    np.testing.assert_allclose(score, exact, rtol=2e-3, atol=0.05)


@pytest.mark.slow
def test_stored_rows_say_whether_the_model_fits_them():
    """Of noise whose standard deviation is right, and of noise that is taken for a fifth of what it is."""

    def model(sd):
        return opvi.target(
            LINE.log_prior,
            lambda v, rows: norm.logpdf(rows[1], rows[0] @ v, sd),
            LINE.init,
            lambda v, x: Normal(x @ v, jnp.full(len(x), sd**2)),
        )

    for sd in (0.5, 0.1):
        sampler = opvi.ibis(model(sd), particles=128)
        state, _ = opvi.run(sampler, opvi.stream((X, Y), 20), KEY)
        said = sampler.diagnosis(state)
        assert said.right  # the draws are that model's posterior, whichever it is
        assert bool(said.concerns()) == (sd == 0.1)
        callback = opvi.filters.doubts(sampler)
        with nullcontext() if sd == 0.5 else pytest.warns(UserWarning, match="after round 32 the model may be wrong"):
            numbers = callback(Chunk(state, 32, None, None, []))
        assert numbers["predictions.uneven"] == said.predictions.uneven


def test_gauss_newton_says_where_it_is_not_the_posterior():
    """It is where the model is linear; otherwise it says so, whatever its numbers."""
    linear = opvi.gauss_newton(opvi.linear_regression(2, noise=0.25))
    state, _ = opvi.run(linear, opvi.stream((X, Y), 20), KEY, particles=3)
    said = linear.diagnosis(state)
    assert said.right
    assert said.apart == 0
    curved = opvi.gauss_newton(opvi.mlp(2, (3,), activation=jnp.tanh), noise=opvi.filters.AdaptiveNoise())
    state, _ = opvi.run(curved, opvi.stream((X, Y), 20), KEY, particles=3)
    said = curved.diagnosis(state)
    assert said.error / said.noise == pytest.approx(0.3**-0.5, rel=1e-3)  # the noise's share
    assert said.concerns()[0].startswith("this is not the posterior")
    assert any("1.83 times the noise" in concern for concern in said.concerns())
    own = np.sqrt(np.diagonal(np.asarray(state.past.matrices, float)[:, 0], axis1=1, axis2=2))
    apart = state.particles.at[0, 1].add(100.0)
    expected = np.std(np.asarray(apart, float)[:, 1], ddof=1) / np.sqrt((own[:, 1] ** 2).mean())
    said = curved.diagnosis(state._replace(particles=apart))
    assert said.apart == pytest.approx(expected, rel=1e-4)
    assert any(f"particles are {expected:.1f} of their own standard deviations apart" in c for c in said.concerns())


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
    asked = []

    class Stub:
        def diagnosis(self, state):
            asked.append(state)
            return GOOD._replace(lost=float(state >= 64))

    callback = opvi.filters.doubts(Stub())
    with pytest.warns(UserWarning, match="after round 64 this may not be the posterior: .* store rows") as raised:
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
    same, frozen = np.full((n, n), 1 / n, np.float32), jax.jit(_trajectories.frozen_chains)
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
    monkeypatch.setattr(_trajectories, "MOST_LOOKS", 0)
    x = jnp.asarray(RNG.normal(size=(100, 1)), jnp.float32).at[7].set(8.0)

    def log_density(v):
        return jnp.logaddexp(-(v**2).sum() / 2, 12 - ((v - 8) ** 2).sum() * 1e12)

    same = jnp.full((100, 100), 0.01)
    places = _trajectories.moved(KEY, log_density, x, frame(x), 60, 1, same).places
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
    monkeypatch.setattr(_trajectories, "MOST_LOOKS", int(wide))
    monkeypatch.setattr(_trajectories, "STUCK", 1.0)  # coordinates are not fitted again: this funnel would be round
    tracker = opvi.sl_opvi(deep_funnel(), pace=PACE)
    x = np.random.default_rng(3).normal(size=(60, 10)) * (1 if wide else 0.03)
    if wide:
        x[:, 0] = 3 * x[:, 0]
        x[:, 1:] *= np.exp(x[:, :1] / 2)
    state = tracker.init(KEY, jnp.asarray(x, jnp.float32))
    said = tracker.diagnosis(state)
    assert not said.right
    assert _sl_opvi.run_chains(tracker.target, 200, 40, 15, KEY, state).looks == int(
        wide
    )  # long trajectories, if allowed
    assert (said.remembered > said.most) == wide
    assert any(("have not forgotten" if wide else "have not arrived") in concern for concern in said.concerns())


def test_chains_that_have_clearly_arrived_are_looked_at_early(monkeypatch):
    monkeypatch.setattr(_trajectories, "MOST_LOOKS", 0)
    monkeypatch.setattr(_trajectories, "STUCK", 1.0)  # steps that are too short stay so
    x, same = jnp.asarray(RNG.normal(size=(200, 1)), jnp.float32), jnp.full((200, 200), 1 / 200)

    def places(slower, first, early):
        own = frame(slower * x)
        return np.asarray(_trajectories.moved(KEY, lambda v: -(v**2).sum() / 2, x, own, first, 1, same, early).places)

    np.testing.assert_array_equal(places(1.0, 30, 8), places(1.0, 8, 0))
    np.testing.assert_array_equal(places(0.01, 30, 8), places(0.01, 30, 0))  # short steps: they remember


def correlation(then, now, same):
    return float(_trajectories.correlations(then, now, same).max())


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
    found = _trajectories.arrived(start + 2 * half, start, now + half, same)
    assert abs(found.remembered - 0.5) < 0.1
    assert abs(found.off - 0.5) < 0.2
    assert found.travelled > 4
    forgotten = _trajectories.arrived(start + 2 * half, now, noise, same)
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
