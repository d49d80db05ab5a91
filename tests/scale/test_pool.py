import jax
import numpy as np
import pytest

import opvi
from opvi.scale import pooled

EARLY = pytest.mark.filterwarnings("ignore:.*as on their first day")
NOISE = 0.5


def sampler_of(features: int):
    return opvi.gauss_newton(opvi.linear_regression(features, noise=NOISE, prior_variance=4.0), forgetting=1.0)


SAMPLER = sampler_of(1)


def streams(models: int, rows: int, seed: int = 0):
    """Lines whose slope and intercept come from one population."""
    rng = np.random.default_rng(seed)
    truth = rng.multivariate_normal([2.0, -1.0], [[0.3, 0.1], [0.1, 0.2]], models)
    ids = np.arange(models).repeat(rows)
    x = rng.standard_normal((models * rows, 1)).astype(np.float32)
    y = truth[ids, 0] * x[:, 0] + truth[ids, 1] + np.sqrt(NOISE) * rng.standard_normal(len(x))
    return ids, x, y.astype(np.float32)


@pytest.fixture(scope="module")
def fleet():
    made = opvi.Fleet(SAMPLER, 0, batch_size=5, particles=1, pool=True)
    ids, x, y = streams(60, 5)
    made.learn(ids, (x, y))
    return made


def evidence(mean, covariance, ids, x, y) -> float:
    """Of all rows, each model's parameters integrated out, by dense matrices."""
    total = 0.0
    for name in np.unique(ids):
        A = np.c_[x[ids == name], np.ones((ids == name).sum())].astype(float)
        S = A @ covariance @ A.T + NOISE * np.eye(len(A))
        residual = y[ids == name] - A @ mean
        total -= 0.5 * (residual @ np.linalg.solve(S, residual) + np.linalg.slogdet(2 * np.pi * S)[1])
    return total


def test_the_population_is_the_most_likely_one(fleet):
    data = streams(60, 5)
    found = fleet.population()
    best = evidence(found.mean, found.covariance, *data)
    assert found.models == 60
    rng = np.random.default_rng(1)
    for _ in range(20):  # no neighbour is more likely
        nudge = 0.02 * rng.standard_normal((2, 2))
        other = found.covariance + nudge @ nudge.T - 0.5 * np.trace(nudge @ nudge.T) * np.eye(2)
        assert evidence(found.mean + 0.02 * rng.standard_normal(2), other, *data) < best
    assert best > evidence(np.zeros(2), 4.0 * np.eye(2), *data) + 60


def test_a_saved_fleet_keeps_its_population(tmp_path):
    ids, x, y = streams(60, 5)
    with opvi.Fleet(SAMPLER, 0, path=tmp_path / "fleet", batch_size=5, particles=1, pool=True) as fleet:
        fleet.learn(ids, (x, y))
        fleet.save()
        expected = fleet.predict(["new"], x[:1])
    with opvi.Fleet.load(tmp_path / "fleet", SAMPLER) as again:
        assert again.pool
        found = again.predict(["new"], x[:1])
        np.testing.assert_array_equal(found.mean(), expected.mean())
        np.testing.assert_array_equal(found.sd(), expected.sd())
    with pytest.raises(ValueError, match="`pool` was True, and is False"):
        opvi.Fleet.load(tmp_path / "fleet", SAMPLER, pool=False)
    with pytest.raises(ValueError, match="`pool` was True, and is False"):
        opvi.Fleet(SAMPLER, 0, path=tmp_path / "fleet", batch_size=5, particles=1)


def test_predictions_take_the_population_for_a_prior(fleet):
    ids, x, y = streams(60, 5)
    found, at = fleet.population(), np.float32([[0.5]])
    said = fleet.predict([7, "new"], np.repeat(at, 2, 0))
    A = np.c_[x[ids == 7], np.ones(5)].astype(float)
    precision = A.T @ A / NOISE + np.linalg.inv(found.covariance)
    mean = np.linalg.solve(precision, A.T @ y[ids == 7] / NOISE + np.linalg.solve(found.covariance, found.mean))
    row = np.array([0.5, 1.0])
    np.testing.assert_allclose(said.mean(), [row @ mean, row @ found.mean], rtol=1e-4)
    variances = [row @ np.linalg.inv(precision) @ row + NOISE, row @ found.covariance @ row + NOISE]
    np.testing.assert_allclose(said.sd() ** 2, variances, rtol=1e-4)


def test_models_stay_what_they_are_alone(fleet):
    alone = opvi.Fleet(SAMPLER, 0, batch_size=5, particles=1)
    alone.learn(*(lambda ids, x, y: (ids, (x, y)))(*streams(60, 5)))
    fleet.predict([0], np.zeros((1, 1), np.float32))
    for name in (0, 59):
        np.testing.assert_array_equal(fleet.state(name).particles, alone.state(name).particles)
    assert not np.allclose(
        alone.predict(["new"], np.ones((1, 1))).mean(), fleet.predict(["new"], np.ones((1, 1))).mean(), atol=0.1
    )


def test_the_population_follows_what_is_learnt():
    fleet = opvi.Fleet(SAMPLER, 0, batch_size=5, particles=1, pool=True)
    np.testing.assert_allclose(fleet.population().covariance, 4 * np.eye(2), rtol=1e-5)  # the sampler's own prior
    ids, x, y = streams(40, 5)
    fleet.learn(ids[:100], (x[:100], y[:100]))
    first = fleet.population()
    fleet.learn(ids[100:105], (x[100:105], y[100:105]))
    assert fleet.population() is first  # one round more than twenty: not yet
    fleet.learn(ids[105:], (x[105:], y[105:]))
    assert fleet.population().models == 40


@EARLY
def test_other_models_are_refused():
    fleet = opvi.Fleet(opvi.svgd(opvi.linear_regression(1), step=0.1), 0, particles=3, pool=True)
    with pytest.raises(TypeError, match="not one Gaussian"):
        fleet.predict(["a"], np.zeros((1, 1)))
    state = jax.tree.map(lambda leaf: leaf[None], SAMPLER.init(jax.random.key(0), 1))
    assert pooled(SAMPLER, state).models == 0
