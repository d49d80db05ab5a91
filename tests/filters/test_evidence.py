"""The density of all rows so far, against closed forms."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.stats import norm

import opvi
from opvi.filters._evidence import Ratios, added, bridged, joined, log_mass, ratios, warn_if_uncertain

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
N, NOISE = 100, 0.5
X = RNG.normal(size=(N, 2)).astype(np.float32)
Y = (X @ [1.0, -2.0] + NOISE * RNG.normal(size=N)).astype(np.float32)
PACE = opvi.filters.Pace(looks=20)
# The prior N(1, 1) lacks its constant.
LINE = opvi.target(
    lambda v: -((v - 1) ** 2).sum() / 2,
    lambda v, rows: norm.logpdf(rows[1], rows[0] @ v, NOISE),
    lambda key: 1 + jax.random.normal(key, (2,)),
)
TRACKER = opvi.sl_opvi(LINE, pace=PACE)
STORING = opvi.ibis(LINE, example=(X, Y), particles=128)


def of_line():
    """The rows are Gaussian once the slopes are integrated out."""
    C = NOISE**2 * np.eye(N) + X.astype(float) @ X.T.astype(float)
    off = Y.astype(float) - X.astype(float).sum(1)
    return -(off @ np.linalg.solve(C, off) + np.linalg.slogdet(2 * np.pi * C)[1]) / 2


@pytest.mark.parametrize("rows", [1, 5, 20, 100])
def test_evidence_is_that_of_a_conjugate_model(rows):
    """All rows are known by a surrogate that is exact."""
    parts = [slice(i, i + rows) for i in range(0, N, rows)]
    state, _ = opvi.run(TRACKER, [opvi.batch((X[part], Y[part]), pad_to=N) for part in parts], KEY, particles=60)
    assert abs(TRACKER.log_evidence(state) - of_line()) < 0.01
    wrapped = opvi.tracking.Wrapped(state, (), 0, 0)
    assert abs(opvi.watched(TRACKER).log_evidence(wrapped, 1) - of_line()) < 0.03


@pytest.mark.parametrize("rows", [5, 100])
def test_evidence_from_stored_rows_is_that_of_a_conjugate_model(rows):
    state, _ = opvi.run(STORING, opvi.stream((X, Y), rows), KEY)
    assert abs(STORING.log_evidence(state) - of_line()) < 0.03


def test_evidence_of_a_funnel():
    """Draws of x ~ N(0, 1), y ~ N(3, (2 e^x)²), of which the density is known up to e^5."""
    u = np.random.default_rng(1).normal(size=(2, 2000, 2))
    draws = np.stack([u[..., 0], 3 + 2 * np.exp(u[..., 0]) * u[..., 1]], -1).astype(np.float32)

    def log_density(v):
        return 5 + norm.logpdf(v[0]) + norm.logpdf(v[1], 3, 2 * jnp.exp(v[0]))

    found = joined(jax.jit(lambda draws: ratios(KEY, log_density, jax.vmap(log_density), draws))(draws))
    assert abs(found.value - 5) < 4 * found.error
    assert found.error < 0.02  # a Gaussian in the parameters themselves would be off by tenths


@pytest.mark.parametrize("make", [opvi.sl_opvi, opvi.ibis])
def test_rows_that_fade_have_no_evidence(make):
    tracker = make(LINE, half_life=50.0)
    assert math.isnan(tracker.log_evidence(tracker.init(KEY, 60)))


def test_gauss_newton_gives_its_sum():
    sampler = opvi.gauss_newton(opvi.mlp(2, (), opvi.gaussian(NOISE), prior_variance=1.0))
    state = sampler.init(KEY, 4)._replace(log_evidence=jnp.float32(-12.5))
    assert sampler.log_evidence(state) == -12.5


def test_a_prior_that_is_not_gaussian_is_taken_as_it_is():
    other = opvi.target(lambda v: -jnp.abs(v).sum(), LINE.log_likelihood, LINE.init)
    assert log_mass(other) == 0
    assert log_mass(LINE) == pytest.approx(math.log(2 * math.pi), abs=1e-5)


def test_too_little_in_common_is_said():
    """A density far from the Gaussian that it is compared with: hardly a draw of one is possible for the other."""
    near, far = RNG.normal(size=(2, 1000))
    warn_if_uncertain(joined((Ratios(1 + near / 2, 1 - near / 2),) * 2))
    bad = joined((Ratios(10 + 4 * near, -10 + 4 * far), Ratios(10 + 4 * far, -10 + 4 * near)))
    with pytest.warns(UserWarning, match="standard error of .* nats: ask again"):
        warn_if_uncertain(bad)


def test_bridge_of_two_gaussians():
    """p = 7·N(1, 2²) beside q = N(0, 1): the error reported is that of many repetitions."""
    rng = np.random.default_rng(3)

    def ratio(x):
        return math.log(7) - ((x - 1) / 2) ** 2 / 2 - math.log(2) + x**2 / 2

    found = [bridged(Ratios(ratio(1 + 2 * rng.normal(size=500)), ratio(rng.normal(size=500)))) for _ in range(200)]
    values, errors = np.array(found).T
    assert abs(values.mean() - math.log(7)) < 4 * values.std() / math.sqrt(200)
    assert abs(errors.mean() / values.std() - 1) < 0.2


def test_sums_keep_what_rounding_would_lose():
    total = added(jnp.zeros(2), jnp.float32(-(2**24)))
    for _ in range(101):
        total = added(total, jnp.float32(-0.25))
    assert float(np.asarray(total, float).sum()) == -(2**24) - 101 / 4
