"""The posterior of all rows, against closed forms and grids, in several orders of the rows and sizes of batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi

NOISE = 0.25
ROW_BYTES = 2 * 4 + 4 + 8  # two inputs and a target, and the two numbers that are stored beside each row
RNG = np.random.default_rng(5)
X = RNG.normal(size=(600, 2)).astype(np.float32)
Y = (X @ [1.0, -0.5] + 0.5 * RNG.normal(size=600)).astype(np.float32)
# Linear regression with known noise and prior N(0, I): the posterior is Gaussian, in closed form.
LINE = opvi.target(
    lambda w: -(w @ w) / 2,
    lambda w, rows: -((rows[1] - rows[0] @ w) ** 2) / (2 * NOISE) - jnp.log(2 * jnp.pi * NOISE) / 2,
    lambda key: jax.random.normal(key, (2,)),
)
DRAWS = 1024
MEAN_OFF = 4.5 / np.sqrt(DRAWS)  # standard deviations: five standard errors, less what chance leaves
SD_OFF = 4.5 / np.sqrt(2 * DRAWS)


def order_of(name, x, y, residual):
    """The rows in one of five orders."""
    return {
        "shuffled": np.random.default_rng(1).permutation(len(y)),
        "by y": np.argsort(y, kind="stable"),
        "by x": np.argsort(x[:, 0], kind="stable"),
        "by residual": np.argsort(residual, kind="stable"),
        "drifting": np.argsort(np.arange(len(y)) / len(y) + 0.3 * (y - y.mean()) / y.std(), kind="stable"),
    }[name]


ORDERS = ("shuffled", "by y", "by x", "by residual", "drifting")


def closed_form(weight):
    precision = np.eye(2) + (X * weight[:, None]).T @ X / NOISE
    return np.linalg.solve(precision, X.T @ (weight * Y) / NOISE), np.linalg.inv(precision)


def check_draws(draws, mean, sd):
    draws = np.asarray(draws, float)
    np.testing.assert_allclose((draws.mean(0) - mean) / sd, 0, atol=MEAN_OFF)
    np.testing.assert_allclose(draws.std(0) / sd, 1, atol=SD_OFF)


def learn(sampler, data, batch=20, key=0):
    return opvi.run(sampler, opvi.stream(data, batch), key)[0]


@pytest.mark.parametrize("order", ORDERS)
def test_a_conjugate_posterior_is_exact_in_every_order(order):
    at = order_of(order, X, Y, Y - X @ [1.0, -0.5])
    sampler = opvi.ibis(LINE)
    state = learn(sampler, (X[at], Y[at]))
    mean, cov = closed_form(np.ones(600))
    check_draws(sampler.draws(state, 1, DRAWS), mean, np.sqrt(np.diag(cov)))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 100, 600])
def test_batches_of_any_size_end_in_the_same_posterior(batch):
    at = order_of("by y", X, Y, Y)
    sampler = opvi.ibis(LINE)
    state = learn(sampler, (X[at], Y[at]), batch)
    mean, cov = closed_form(np.ones(600))
    check_draws(sampler.draws(state, 1, DRAWS), mean, np.sqrt(np.diag(cov)))


def test_rows_that_do_not_fit_into_memory_still_count():
    """A linear model's quadratics are exact, so that 100 stored rows of 600 are as good as all."""
    at = order_of("by y", X, Y, Y)
    sampler = opvi.ibis(LINE, memory=100 * ROW_BYTES)
    state = learn(sampler, (X[at], Y[at]))
    data, weight = sampler.stored_rows(state)
    assert int((np.asarray(weight) > 0).sum()) == 100
    stored = np.asarray(data[1])[np.asarray(weight) > 0]
    assert stored.min() < np.quantile(Y, 0.1), "a sample of all rows, not of the last ones"
    assert stored.max() > np.quantile(Y, 0.9), "a sample of all rows, not of the first ones"
    mean, cov = closed_form(np.ones(600))
    check_draws(sampler.draws(state, 1, DRAWS), mean, np.sqrt(np.diag(cov)))
    assert sampler.concerns(state) == []
    assert abs(sampler.log_evidence(state) - log_evidence_of_line()) < 0.3


def log_evidence_of_line():
    S = X.astype(float) @ X.T.astype(float) + NOISE * np.eye(len(Y))
    return -0.5 * (np.linalg.slogdet(S)[1] + Y @ np.linalg.solve(S, Y) + len(Y) * np.log(2 * np.pi))


def test_evidence_is_that_of_a_conjugate_model_in_an_awkward_order():
    at = order_of("by y", X, Y, Y)
    sampler = opvi.ibis(LINE)
    state = learn(sampler, (X[at], Y[at]))
    assert abs(sampler.log_evidence(state) - log_evidence_of_line()) < 0.1


@pytest.mark.parametrize("memory", [64e6, 60 * ROW_BYTES])
def test_forgetting_is_exact(memory):
    """Rows have weights of γ^age, whether they are stored or not; with little memory some fade as quadratics."""
    half_life = 40.0
    sampler = opvi.ibis(LINE, half_life=half_life, memory=memory)
    state = learn(sampler, (X, Y))
    age = 20 * (29 - np.arange(600) // 20)  # rows since the round of each
    weight = 2.0 ** (-age / half_life)
    weight[weight < 1e-3] = 0
    mean, cov = closed_form(weight)
    check_draws(sampler.draws(state, 1, DRAWS), mean, np.sqrt(np.diag(cov)))
    stored = np.asarray(sampler.stored_rows(state)[1])
    assert (stored > 0).sum() <= (420 if memory > 1e6 else 60)
    assert np.isnan(sampler.log_evidence(state)), "rows that fade have no evidence"


def test_a_row_of_weight_k_counts_as_k_rows():
    sampler = opvi.ibis(LINE)
    rows = opvi.batch((X[:3], Y[:3]), weight=np.float32([5, 0, 500]))
    state, _ = sampler.step(jax.random.key(0), sampler.init(jax.random.key(0)), rows)
    weight = np.zeros(600)
    weight[[0, 2]] = 5, 500
    mean, cov = closed_form(weight)
    z = (np.asarray(sampler.draws(state, 1, DRAWS), float) - mean) @ np.linalg.cholesky(np.linalg.inv(cov))
    np.testing.assert_allclose(z.mean(0), 0, atol=MEAN_OFF)
    np.testing.assert_allclose(np.cov(z.T), np.eye(2), atol=2 * SD_OFF)
    assert int(state.storage.arrived) == 2


def test_a_poisoned_batch_changes_nothing():
    sampler = opvi.ibis(LINE)
    state = learn(sampler, (X[:40], Y[:40]))
    new, info = sampler.step(jax.random.key(0), state, opvi.batch((X[:20] * np.nan, Y[:20])))
    assert not bool(info.finite)
    assert int(new.round) == int(state.round) + 1
    kept = new._replace(round=state.round, rows=state.rows)
    for one, other in zip(jax.tree.leaves(kept), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_compiled_loop_of_ones_own_asks_for_room():
    sampler = opvi.ibis(LINE)
    state = sampler.init(jax.random.key(0))
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), *opvi.stream((X[:100], Y[:100]), 20))
    state = sampler.make_room(state, jax.tree.map(lambda leaf: leaf[0], batches), rounds=5)
    scanned, _ = jax.lax.scan(lambda s, b: sampler.step(jax.random.key(0), s, b), state, batches)
    run = learn(sampler, (X[:100], Y[:100]), key=jax.random.key(0))
    assert int(scanned.storage.arrived) == int(run.storage.arrived) == 100
    np.testing.assert_allclose(scanned.particles.mean(0), run.particles.mean(0), atol=0.05)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="`memory` is 0, but must be a number of bytes above 0"):
        opvi.ibis(LINE, memory=0)
    with pytest.raises(ValueError, match="`half_life` is -1"):
        opvi.ibis(LINE, half_life=-1)
    sampler = opvi.ibis(LINE)
    with pytest.raises(ValueError, match="no row was learnt"):
        sampler.diagnosis(sampler.init(jax.random.key(0)))
    state = learn(sampler, (X[:20], Y[:20]))
    with pytest.raises(ValueError, match="has rows of shape"):
        sampler.step(jax.random.key(0), state, opvi.batch((X[:20, :1], Y[:20])))


def test_before_any_row_draws_are_the_priors():
    sampler = opvi.ibis(LINE)
    check_draws(sampler.draws(sampler.init(0), 1, DRAWS), np.zeros(2), np.ones(2))


# --- models without a closed form, two parameters each, against a grid --------------------------


def _poisson(rng):
    x = rng.normal(size=(2000, 1))
    y = rng.poisson(np.exp(0.5 + 0.6 * x[:, 0]))
    return x, y, lambda w, r: r[1] * (w[0] + w[1] * r[0][:, 0]) - jnp.exp(w[0] + w[1] * r[0][:, 0]), y - np.exp(x[:, 0])


def _logistic(rng):
    x = rng.normal(size=(2000, 1))
    y = (rng.random(2000) < 1 / (1 + np.exp(-0.5 - x[:, 0]))) * 1.0
    return x, y, lambda w, r: _bernoulli(w[0] + w[1] * r[0][:, 0], r[1]), y - x[:, 0]


def _bernoulli(eta, y):
    return y * eta - jax.nn.softplus(eta)


def _student(rng):
    x = rng.normal(size=(2000, 1))
    y = 1 + rng.standard_t(3, size=2000)
    y[:20] += 30

    def rows(w, r):
        return -2.0 * jnp.log1p(((r[1] - w[0]) / jnp.exp(w[1])) ** 2 / 3) - w[1]

    return x, y, rows, -np.abs(y)


def _weibull(rng):
    x = rng.normal(size=(2000, 1))
    y = 2 * rng.weibull(1.5, size=2000)

    def rows(w, r):
        k = jnp.exp(w[1])
        return w[1] - w[0] + (k - 1) * (jnp.log(r[1]) - w[0]) - (r[1] / jnp.exp(w[0])) ** k

    return x, y, rows, np.abs(y - y.mean())


MODELS = (_poisson, _logistic, _student, _weibull)


def grid_moments(target, data):
    """Means and standard deviations by a grid of ±7 standard deviations around the mode, in float64."""
    with jax.enable_x64(True):
        data = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), data)

        def log_density(v):
            return target.log_prior(v) + target.log_likelihood(v, data).sum()

        v = jnp.zeros(2, jnp.float64)
        for _ in range(60):
            H = -jax.hessian(log_density)(v)
            step = jnp.linalg.solve(H + 1e-9 * jnp.eye(2), jax.grad(log_density)(v))
            v = v + step * jnp.minimum(1, 0.5 / jnp.abs(step).max())
        root = np.linalg.cholesky(np.linalg.inv(np.asarray(H)))
        u = np.stack(np.meshgrid(*[np.linspace(-7, 7, 57)] * 2), -1).reshape(-1, 2)
        points = np.asarray(v) + u @ root.T
        value = np.asarray(jax.lax.map(log_density, jnp.asarray(points)))
    weight = np.exp(value - value.max())
    weight /= weight.sum()
    mean = weight @ points
    return mean, np.sqrt(weight @ (points - mean) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__[1:])
def test_a_grid_agrees_in_awkward_orders(model):
    """In two orders; `benchmarks.orders` has all five, which take minutes without optimised programs."""
    x, y, rows, residual = model(np.random.default_rng(11))
    target = opvi.target(lambda w: -(w @ w) / 8, rows, lambda key: 2 * jax.random.normal(key, (2,)))
    data = (x.astype(np.float32), y.astype(np.float32))
    mean, sd = grid_moments(target, data)
    sampler = opvi.tracker(target)
    for order in ("by y", "by residual"):
        at = order_of(order, x, y, residual)
        state = learn(sampler, jax.tree.map(lambda a, at=at: a[at], data))
        check_draws(sampler.draws(state, 1, DRAWS), mean, sd)
        assert sampler.diagnosis(state).right, sampler.diagnosis(state).concerns()
