"""Targets: scores against finite differences, ready-made models against their formulas, users' own functions."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.targets import as_particles, score

X = np.random.default_rng(0).normal(size=(6, 3))
COUNTS = np.array([0, 1, 2, 2, 1, 0])

TARGETS = {
    "mixture": (opvi.gaussian_mixture, X[:, 0]),
    "linear": (lambda: opvi.linear_regression(3, noise=0.5, prior_variance=2.0), (X, X[:, 1])),
    "linear with inferred variances": (
        lambda: opvi.linear_regression(3, noise=opvi.targets.Gamma(), prior_variance=opvi.targets.Gamma()),
        (X, X[:, 1]),
    ),
    "logistic": (lambda: opvi.logistic_regression(3), (X, COUNTS % 2)),
    "softmax": (lambda: opvi.softmax_regression(3, 3), (X, COUNTS)),
    "mlp": (lambda: opvi.mlp(3, (4, 5), activation=jnp.tanh), (X, X[:, 1])),
    "mlp as in the paper": (
        lambda: opvi.mlp(
            3, (4,), opvi.gaussian(opvi.targets.Gamma()), activation=jax.nn.sigmoid, prior_variance=opvi.targets.Gamma()
        ),
        (X, X[:, 1]),
    ),
    "mlp classifier": (lambda: opvi.mlp(3, (4,), opvi.categorical(), outputs=3, activation=jnp.tanh), (X, COUNTS)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_scores_equal_finite_differences(name):
    make, data = TARGETS[name]
    weight = np.array([1.0, 1.0, 2.0, 0.0, 1.0, 0.5])
    with jax.enable_x64(True):
        target = make()
        x = opvi.draw(target, 0, 2).astype(jnp.float64) + 0.01
        batch = opvi.Batch(jax.tree.map(jnp.asarray, data), jnp.asarray(weight))
        scored = jax.jit(score, static_argnums=0)(target, x, batch)

        @jax.jit
        @jax.vmap
        def both(v):
            here = target.unravel(v)
            rows = target.log_likelihood(here, jax.tree.map(jnp.asarray, data))
            return jnp.stack([(rows * weight).sum(), target.log_prior(here)])

        steps = 1e-5 * np.eye(target.dim)
        for i in range(2):
            up, down = np.asarray(both(np.concatenate([x[i, None] + steps, x[i, None] - steps]))).reshape(2, -1, 2)
            numeric = (up - down) / 2e-5
            np.testing.assert_allclose(scored.likelihood[i], numeric[:, 0], rtol=2e-6, atol=2e-7)
            np.testing.assert_allclose(scored.prior[i], numeric[:, 1], rtol=2e-6, atol=2e-7)
    assert scored.log_likelihood.shape == (2, 6)


def test_mixture_is_the_mixture():
    theta, x = jnp.array([0.3, -1.2]), jnp.array([-2.0, 0.1, 3.0])
    target = opvi.gaussian_mixture(variance=2.0)

    def normal(mean):
        return jnp.exp(-((x - mean) ** 2) / 4) / jnp.sqrt(4 * jnp.pi)

    expected = jnp.log(0.5 * normal(theta[0]) + 0.5 * normal(theta[0] + theta[1]))
    np.testing.assert_allclose(target.log_likelihood(theta, x), expected, rtol=1e-6)
    np.testing.assert_allclose(target.log_prior(theta), -0.5 * (0.3**2 / 10 + 1.2**2), rtol=1e-6)


@pytest.mark.parametrize("variances", [(10.0, 1.0), (0.5, 3.0)])
def test_the_mixture_starts_from_its_prior(variances):
    draws = np.asarray(opvi.draw(opvi.gaussian_mixture(prior_variance=variances), 0, 4000), float)
    assert (np.abs(draws.mean(0)) < 4 * np.sqrt(np.array(variances) / 4000)).all()
    assert (np.abs(draws.var(0) / variances - 1) < 4 * np.sqrt(2 / 4000)).all()


def test_gamma_prior_is_the_density_of_the_logarithm():
    """∫ exp(log density of log γ) d log γ must be the Gamma normaliser Γ(a) / b^a, and the mean a / b."""
    gamma = opvi.targets.Gamma(2.0, 0.5)
    grid = np.linspace(-12, 6, 20_001)
    density = np.exp(np.asarray(gamma.log_density_of_log(jnp.asarray(grid, jnp.float32)), float))
    assert abs(np.trapezoid(density, grid) / (1.0 / 0.5**2) - 1) < 1e-4
    assert abs(np.trapezoid(density * np.exp(grid), grid) / np.trapezoid(density, grid) - 4.0) < 1e-3
    draws = jnp.exp(jax.vmap(gamma.sample_log)(jax.random.split(jax.random.key(0), 20_000)))
    assert abs(float(draws.mean()) - 4) < 4 * np.sqrt(8 / 20_000)  # variance a / b² = 8


def test_inferred_prior_precision_normalises_the_weights():
    """With λ inferred, log N(w; 0, 1/λ) must keep its ½ d log λ, or λ would run off to 0."""
    target = opvi.linear_regression(2, prior_variance=opvi.targets.Gamma(1.0, 0.1))
    params = target.unravel(jnp.array([jnp.log(3.0), 1.0, 2.0, 0.5]))
    assert set(params) == {"weights", "log_prior_precision"}
    lam, squares = 3.0, 1.0 + 4.0 + 0.25
    expected = 1.5 * np.log(lam) - 0.5 * lam * squares + np.log(lam) - 0.1 * lam
    np.testing.assert_allclose(target.log_prior(params), expected, rtol=1e-6)


def test_ravel_round_trip_keeps_structure_and_dtype():
    target = opvi.mlp(3, (4,), opvi.gaussian(opvi.targets.Gamma()))
    params = target.init(jax.random.key(0))
    again = target.unravel(target.ravel(params))
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
    with jax.enable_x64(True):
        assert jax.tree.leaves(target.unravel(jnp.zeros(target.dim, jnp.float64)))[0].dtype == jnp.float64


def test_a_users_own_functions():
    """A Poisson regression over a dict of parameters, in a dozen lines."""

    def log_prior(p):
        return -0.5 * (p["slope"] ** 2).sum() - 0.5 * p["base"] ** 2

    def log_likelihood(p, batch):
        rate = batch["x"] @ p["slope"] + p["base"]
        return batch["count"].astype(rate.dtype) * rate - jnp.exp(rate)

    def init(key):
        return {"slope": 0.1 * jax.random.normal(key, (2,)), "base": jnp.zeros(())}

    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 2))
    data = {"x": x, "count": rng.poisson(np.exp(x @ [0.5, -0.3] + 0.2))}
    target = opvi.target(log_prior, log_likelihood, init)
    algorithm = opvi.svgd(target, step=opvi.schedules.decaying(0.01, 0.3))
    state, _ = opvi.run(algorithm, opvi.stream(data, 100), 0, particles=10)
    mean = target.unravel(state.particles.mean(0))
    np.testing.assert_allclose(mean["slope"], [0.5, -0.3], atol=0.1)  # posterior sd 0.016, batch jitter above it
    np.testing.assert_allclose(mean["base"], 0.2, atol=0.1)


def learns(target):
    """A network target moves, stays finite and predicts better than before."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(600, 3))
    y = np.sin(x[:, 0]) + 0.1 * rng.normal(size=600)
    algorithm = opvi.svgd(target, step=opvi.schedules.decaying(0.01, 0.3))
    state, history = opvi.run(algorithm, opvi.stream((x, y), 20), 0, particles=5)
    assert jax.eval_shape(lambda: opvi.predict(target, state.particles, x).mean()).shape == (600,)
    before, after = history.info.log_predictive[:5].mean(), history.info.log_predictive[-5:].mean()
    assert after > before


def test_an_equinox_network_needs_no_adapter():
    template = eqx.nn.MLP(3, "scalar", 8, 1, key=jax.random.key(0))
    static = eqx.partition(template, eqx.is_array)[1]

    def init(key):
        return eqx.partition(eqx.nn.MLP(3, "scalar", 8, 1, key=key), eqx.is_array)[0]

    def apply(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    learns(opvi.network(apply, init, opvi.gaussian(0.1)))


def test_a_flax_network_needs_no_adapter():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))

    net = Net()
    with jax.numpy_rank_promotion("allow"):
        learns(opvi.network(net.apply, lambda key: net.init(key, jnp.zeros((1, 3))), opvi.gaussian(0.1)))


def test_predict_gives_the_heads_distribution():
    x = jnp.asarray(X, jnp.float32)
    for make, kind in ((TARGETS["linear"][0], opvi.Normal), (TARGETS["logistic"][0], opvi.Bernoulli)):
        target = make()
        assert isinstance(target.predict(target.init(jax.random.key(0)), x), kind)


def test_wrong_targets_and_particles_are_refused():
    init = opvi.gaussian_mixture().init
    with pytest.raises(TypeError, match="must be floating point"):
        opvi.target(lambda p: 0.0, lambda p, b: b, lambda key: jnp.zeros(3, int))
    with pytest.raises(ValueError, match="no parameters"):
        opvi.target(lambda p: 0.0, lambda p, b: b, lambda key: ())
    target = opvi.target(lambda p: 0.0, lambda p, b: b, init)
    with pytest.raises(ValueError, match=r"shape \(1, 2\), but repulsion needs at least 2 rows.*online_map"):
        as_particles(target, 0, jnp.zeros((1, 2)), at_least=2)
    with pytest.raises(ValueError, match="`particles` is 0"):
        as_particles(target, 0, 0)
    with pytest.raises(ValueError, match=r"has 2 parameters.*\(n, 2\)"):
        as_particles(target, 0, jnp.zeros((5, 3)))
    with pytest.raises(ValueError, match="NaN or infinity"):
        as_particles(target, 0, jnp.full((5, 2), jnp.nan))
    with pytest.raises(TypeError, match=r"`particles` is a str, but must be a count to draw"):
        as_particles(target, 0, "ten")
    with pytest.raises(TypeError, match="dtype int32"):
        as_particles(target, 0, jnp.zeros((5, 2), jnp.int32))


def test_heads_refuse_wrong_outputs():
    for head, name in ((opvi.gaussian(), "gaussian"), (opvi.bernoulli(), "bernoulli")):
        with pytest.raises(ValueError, match=f"the {name} head takes one output per row"):
            head.distribution(jnp.zeros((4, 2)), None)
    with pytest.raises(ValueError, match="categorical head"):
        opvi.categorical().distribution(jnp.zeros(4), None)
    with pytest.raises(ValueError, match="greater than 0"):
        opvi.gaussian(0.0)
    with pytest.raises(ValueError, match="layer sizes"):
        opvi.mlp(3, (0,))
