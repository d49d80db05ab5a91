"""The trackers of small models, against closed forms and exact posteriors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.filters.sl_opvi._surrogates import Polynomial, count, fit, frame
from opvi.types import DivergedError
from paper.mixture import exact_posterior, tracking_error

KEY = jax.random.key(0)
D, N = 2, 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(160, D)).astype(np.float32)
Y = (X @ [1.0, -0.5] + 0.5 * RNG.normal(size=160)).astype(np.float32)
NOISE = 0.25
# Linear regression with known noise and prior N(0, 1): the posterior is Gaussian, in closed form.
LINE = opvi.target(
    lambda w: -(w @ w) / 2,
    lambda w, rows: -((rows[1] - rows[0] @ w) ** 2) / (2 * NOISE),
    lambda key: jax.random.normal(key, (D,)),
)
HALF_LIFE = 40.0
FORGETTING = opvi.sl_opvi(LINE, half_life=HALF_LIFE)
ROUNDS = [16, 10, 16, 16, 3, 16, 16, 16, 16, 16, 16, 3]  # all padded to 16 rows: one program


def batches():
    """The rows in rounds of different size."""
    ends = np.cumsum(ROUNDS)
    return [opvi.batch((X[e - b : e], Y[e - b : e]), pad_to=16) for e, b in zip(ends, ROUNDS, strict=True)]


def closed_form(weight):
    precision = np.eye(D) + (X * weight[:, None]).T @ X / NOISE
    return np.linalg.solve(precision, X.T @ (weight * Y) / NOISE), precision


def whitened(particles, weight):
    """Particles in coordinates where the exact posterior is N(0, I)."""
    mean, precision = closed_form(weight)
    return (np.asarray(particles, float) - mean) @ np.linalg.cholesky(precision)


def forgotten():
    """Each row's weight at the end: halved every `HALF_LIFE` rows of the rounds after its own."""
    after = 160 - np.repeat(np.cumsum(ROUNDS), ROUNDS)
    return 2.0 ** (-after / HALF_LIFE)


@pytest.fixture(scope="module")
def settled():
    """Trackers at the end of the stream."""
    both = {HALF_LIFE: FORGETTING, None: opvi.sl_opvi(LINE)}
    return {half_life: opvi.run(algorithm, batches(), KEY, particles=N)[0] for half_life, algorithm in both.items()}


@pytest.mark.parametrize("half_life", [HALF_LIFE, None])
def test_a_gaussian_posterior_is_exact(settled, half_life):
    """Batches of 3 to 16 rows. The flow is deterministic: no sampling error is allowed for,
    only that of a kernel over 60 particles (covariance a little small)."""
    z = whitened(settled[half_life].particles, np.ones(160) if half_life is None else forgotten())
    np.testing.assert_allclose(z.mean(0), 0, atol=0.02)
    np.testing.assert_allclose(np.cov(z.T), np.eye(D), atol=0.06)


def test_forgetting_is_not_remembering(settled):
    """The two posteriors differ by far more than the tolerance above, so that the test can tell them apart."""
    z = whitened(settled[HALF_LIFE].particles, np.ones(160))
    assert np.trace(np.cov(z.T)) > 3


@pytest.mark.parametrize(("half_life", "weight"), [(None, np.ones(160)), (HALF_LIFE, forgotten())])
def test_gain_one_carries_a_gaussian_exactly(half_life, weight):
    """In coordinates where the prior, and then the posterior, is N(0, I), the sample's moments stay what they were."""
    algorithm = opvi.gain_one(LINE, half_life=half_life, substeps=2)
    start = np.asarray(opvi.draw(LINE, KEY, N), float)
    start = start - start.mean(0)
    state, _ = opvi.run(algorithm, batches(), KEY, particles=start.astype(np.float32))
    z = whitened(state.particles, weight)
    # Forgetting inside a round is spread over its substeps, where a closed form applies it at once: a few rows' weight.
    np.testing.assert_allclose(z.mean(0), 0, atol=1e-3 if half_life is None else 0.1)
    found, before = np.linalg.eigvalsh(np.cov(z.T)), np.linalg.eigvalsh(np.cov(start.T))
    np.testing.assert_allclose(found, before, rtol=1e-3 if half_life is None else 0.15)


def test_gain_one_repels_by_one_half():
    """With little new information, deviations shrink by half of what the plain step would."""
    algorithm = opvi.gain_one(LINE, substeps=1)
    state, _ = opvi.run(algorithm, opvi.stream((X[:159], Y[:159]), 159), KEY, particles=N)
    new, _ = algorithm.step(KEY, state, opvi.batch((X[159:], Y[159:])))
    before, after = (np.asarray(s.particles, float) for s in (state, new))
    before, after = before - before.mean(0), after - after.mean(0)
    shrunk = np.linalg.lstsq(before, before - after, rcond=None)[0]
    precision = np.asarray(new.prior + new.information, float)
    plain = np.outer(X[159], X[159]) / NOISE @ np.linalg.inv(precision)
    np.testing.assert_allclose(shrunk, plain / 2, atol=0.1 * np.abs(plain).max())


# --- two modes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def far_apart(mixture_rows):
    """Rows of two well separated components, and the exact posterior with its two modes."""
    rows = mixture_rows[:640] + np.where(np.arange(640) % 2, 1.5, -1.5).astype(np.float32)
    return rows, exact_posterior(rows)


@pytest.mark.slow
def test_both_modes_stay_with_their_weights(mixture, far_apart):
    rows, exact = far_apart
    state, _ = opvi.run(opvi.sl_opvi(mixture), opvi.stream(rows, 16), KEY, particles=N)
    particles = np.asarray(state.particles, float)
    gap = particles[:, 1]
    assert (np.abs(gap) > 1).all()  # nobody is lost in between
    # The share among 60 independent draws has a standard deviation of .064.
    assert abs((gap > 0).mean() - exact.mass[:, exact.gaps > 0].sum()) < 0.064
    assert tracking_error(particles, exact) < 0.26  # 60 independent exact draws are about as far away


def test_poison_leaves_everything_finite(settled):
    """One bad row in a batch, and then sound batches: as many as before, which is the same program."""
    rounds = batches()
    for at, poison in enumerate((np.nan, np.inf, 1e30, 1e15)):
        y = np.array(rounds[at].data[1])
        y[2] = poison
        rounds[at] = rounds[at]._replace(data=(rounds[at].data[0], y))
    before = settled[HALF_LIFE]
    with pytest.raises(DivergedError, match="the update of round 13") as told:
        opvi.run(FORGETTING, rounds, KEY, state=before)
    state, history = told.value.state, told.value.history
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert history.info.finite[4]  # sound rows after the bad ones
    assert not np.array_equal(before.particles, state.particles)


def test_settings_are_checked(mixture):
    with pytest.raises(ValueError, match=r"`half_life` is 0"):
        opvi.sl_opvi(mixture, half_life=0)
    with pytest.raises(ValueError, match=r"`half_life` is -1"):
        opvi.gain_one(mixture, half_life=-1)
    with pytest.raises(ValueError, match=r"`substeps` is 0"):
        opvi.gain_one(mixture, substeps=0)
    with pytest.raises(ValueError, match=r"`bandwidth` is 0"):
        opvi.gain_one(mixture, bandwidth=0.0)


# --- many dimensions --------------------------------------------------------------------------


@pytest.mark.slow
def test_many_dimensions_stay_stable_and_near_the_mean():
    """200 parameters, fewer particles than that: no divergence, the exact posterior mean and marginal spread."""
    d, rows = 200, 1200
    rng = np.random.default_rng(1)
    inputs = rng.normal(size=(rows, d)).astype(np.float32)
    outputs = (inputs @ rng.normal(size=d) * 0.3 + rng.normal(size=rows)).astype(np.float32)
    target = opvi.target(
        lambda w: -(w @ w) / 2,
        lambda w, r: -((r[1] - r[0] @ w) ** 2) / 2,
        lambda key: jax.random.normal(key, (d,)),
    )
    precision = np.eye(d) + inputs.T @ inputs
    mean, sd = np.linalg.solve(precision, inputs.T @ outputs), np.sqrt(np.diag(np.linalg.inv(precision)))
    algorithm = opvi.sl_opvi(target, pace=opvi.filters.Pace(looks=20))
    state, _ = opvi.run(algorithm, opvi.stream((inputs, outputs), 100), KEY, particles=24)
    particles = np.asarray(state.particles, float)
    assert np.sqrt((((particles.mean(0) - mean) / sd) ** 2).mean()) < 0.1
    assert abs((particles.std(0) / sd).mean() - 1) < 0.15


# --- what is left of rows ----------------------------------------------------------------------


def test_a_polynomial_moves_between_frames_unchanged():
    rng = np.random.default_rng(2)
    one = frame(jnp.asarray(rng.normal(size=(50, 2)), jnp.float32))
    other = frame(jnp.asarray(rng.normal(size=(50, 2)) * [0.2, 1.0] + 0.5, jnp.float32))
    polynomial = Polynomial(one, jnp.asarray(rng.normal(size=count(2, 4)), jnp.float32))
    moved = polynomial.within(other)
    points = jnp.asarray(rng.normal(size=(20, 2)) * [0.2, 1.0] + 0.5, jnp.float32)
    values, again = (jax.vmap(p.value)(points) for p in (polynomial, moved))
    np.testing.assert_allclose(values - values[0], again - again[0], atol=1e-3)


def test_a_fit_finds_a_polynomial_and_what_is_none():
    u = jnp.asarray(np.random.default_rng(3).normal(size=(40, 2)), jnp.float32)
    square = (u[:, 0] - 2 * u[:, 1]) ** 2
    least_squares = fit(u, 2)
    np.testing.assert_allclose(least_squares.residual(square), 0, atol=1e-3)
    assert float(jnp.abs(least_squares.residual(jnp.sin(3 * u[:, 0]))).max()) > 0.1


@pytest.mark.slow
def test_counts_with_steep_likelihoods_are_followed_by_a_polynomial():
    """100 particles are too few to fit 28 coefficients to: such a polynomial bends upwards, and they run away."""
    d, days = 6, 40
    rates = np.linspace(5.0, 50.0, d)
    counts = np.random.default_rng(0).poisson(rates, (days, d)).astype(np.float32)
    target = opvi.target(
        log_prior=lambda v: -((v - 3) ** 2).sum() / 2,
        log_likelihood=lambda v, k: (k * v[None] - jnp.exp(v)[None]).sum(1),
        init=lambda key: 3 + jax.random.normal(key, (d,)),
    )
    algorithm = opvi.sl_opvi(target)
    with pytest.warns(UserWarning, match="40 rows are known by a polynomial alone"):
        state, history = opvi.run(algorithm, opvi.stream(counts, batch_size=2), 0, particles=100)
    assert history.info.finite.all()
    total = counts.sum(0)
    # Laplace's approximation is good to a few percent here: counts of 200 and more.
    mode = np.log(total / days)
    sd = 1 / np.sqrt(1 + total)
    x = np.asarray(state.particles)
    assert np.abs((x.mean(0) - mode) / sd).max() < 0.5
    np.testing.assert_allclose(x.std(0) / sd, 1, atol=0.15)


@pytest.mark.slow
def test_a_posterior_that_travels_far_is_followed_by_a_polynomial():
    """Terms of high order, fitted to nothing but rounding errors, would collapse the particles by round 33."""
    target = opvi.target(
        log_prior=lambda v: -(v**2).sum() / 2,
        log_likelihood=lambda v, x: -((x - v[None]) ** 2).sum(1) / 4,
        init=lambda key: jax.random.normal(key, (2,)),
    )
    rounds = 50
    drift = np.repeat(0.1 * np.arange(rounds), 20)[:, None]
    rows = (np.random.default_rng(0).normal(size=(20 * rounds, 2)) * 2**0.5 + drift).astype(np.float32)
    state, _ = opvi.run(opvi.sl_opvi(target), opvi.stream(rows, 20), 0, particles=100)
    precision = 1 + len(rows) / 2
    x = np.asarray(state.particles)
    np.testing.assert_allclose(x.std(0) * precision**0.5, 1, atol=0.03)
    np.testing.assert_allclose((x.mean(0) - rows.sum(0) / 2 / precision) * precision**0.5, 0, atol=0.1)
