import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import opvi
from opvi.predictive import NegativeBinomial, Poisson, Predictive, StudentT
from opvi.targets import Gamma, negative_binomial, poisson, student_t

RATE = np.array([[0.3, 4.0, 60.0], [1.5, 4.0, 80.0]])  # two particles, three rows
C = np.array([[2.0, 0.5, 10.0], [2.0, 5.0, 10.0]])
T = np.array([[3.0, 5.0, 8.0], [3.0, 5.0, 8.0]])
CASES = {
    "Poisson": (Poisson(jnp.log(RATE)), stats.poisson(RATE)),
    "negative binomial": (NegativeBinomial(jnp.log(RATE), jnp.asarray(C)), stats.nbinom(C, C / (C + RATE))),
    "Student": (
        StudentT(jnp.asarray(RATE), jnp.asarray(4 * T / (T - 2)), jnp.asarray(T), jnp.zeros(RATE.shape)),
        stats.t(T, RATE, 2.0),
    ),
}
Y = np.array([0.0, 7.0, 66.0])


@jax.jit
def said(mixed, y):
    """All that is asked of a mixture, in one program."""
    quantiles = mixed.quantile([0.1, 0.5, 0.95])
    return mixed.log_density(y), mixed.cdf(y + 0.2), mixed.mean(), mixed.uncertainty(), mixed.sd(), quantiles


@pytest.mark.parametrize("name", CASES)
def test_predictions_of_counts_and_tails_are_scipys(name):
    ours, theirs = CASES[name]
    mixed = Predictive(ours)
    probability = theirs.pdf if name == "Student" else theirs.pmf
    density, below, centre, parts, sd, quantiles = said(mixed, Y.astype(np.float32))
    np.testing.assert_allclose(np.exp(density), probability(Y).mean(0), rtol=2e-4)
    np.testing.assert_allclose(below, theirs.cdf(Y + 0.2).mean(0), rtol=2e-4)
    mean, variance = theirs.mean(), theirs.var()
    np.testing.assert_allclose(centre, mean.mean(0), rtol=1e-5)
    np.testing.assert_allclose(parts.aleatoric, variance.mean(0), rtol=1e-5)
    np.testing.assert_allclose(parts.epistemic, mean.var(0), rtol=1e-4, atol=1e-6)
    draws = np.asarray(jax.jit(lambda mixed: mixed.sample(jax.random.key(0), 20_000))(mixed), float)
    np.testing.assert_allclose(draws.mean(0), mean.mean(0), atol=5 * np.asarray(sd).max() / 141)
    for level, found in zip([0.1, 0.5, 0.95], np.asarray(quantiles), strict=True):
        if name == "Student":
            np.testing.assert_allclose(theirs.cdf(found).mean(0), level, atol=4e-4)
        else:  # the first count at which the distribution function reaches the level
            assert (theirs.cdf(found).mean(0) >= level - 1e-4).all()
            assert (theirs.cdf(found - 1).mean(0) < level + 1e-4).all()


@pytest.mark.parametrize("name", CASES)
def test_gauss_newton_terms_are_the_mean_derivatives(name):
    ours, theirs = CASES[name]
    one = jax.tree.map(lambda leaf: leaf[1], ours)

    @jax.jit
    def derivatives(one, y):
        steep = jax.grad(lambda output: one._replace(**{one._fields[0]: output}).log_density(y).sum())(one[0])
        return one.curvature(y), steep

    (gradient, root), steep = derivatives(one, Y.astype(np.float32))
    np.testing.assert_allclose(gradient[:, 0], steep, rtol=1e-3)
    drawn = theirs.rvs(random_state=0, size=(40_000, *RATE.shape))[:, 1]
    squares = jax.jit(jax.vmap(lambda y: one.curvature(y)[0][:, 0] ** 2))(drawn.astype(np.float32))
    np.testing.assert_allclose(root[:, 0, 0] ** 2, squares.mean(0), rtol=0.06)  # Fisher's information


def test_what_is_not_a_count_has_no_probability():
    for said in (Poisson(jnp.zeros(3)), NegativeBinomial(jnp.zeros(3), jnp.ones(3))):
        assert np.isnan(said.log_density(jnp.array([-1.0, 0.5, np.nan]))).all()


@pytest.mark.parametrize(
    "head", [poisson(), negative_binomial(3.0), negative_binomial(), student_t(Gamma()), student_t(0.5, dof=4.0)]
)
def test_networks_with_other_heads_learn_and_predict(head):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2)).astype(np.float32)
    y = rng.poisson(np.exp(0.5 + 0.8 * X[:, 0])).astype(np.float32)
    target = opvi.mlp(2, (), head)
    state, _ = opvi.run(opvi.svgd(target, step=0.02), opvi.stream((X, y), 40), 0, particles=10)
    mean = opvi.predict(target, state.particles, np.array([[-1.0, 0.0], [1.0, 0.0]], np.float32)).mean()
    assert mean[1] > mean[0] + 0.5
    with pytest.raises(TypeError, match="not defined for a"):
        opvi.predict(target, state.particles, X[:1]).probabilities()


def test_heads_refuse_what_has_no_meaning():
    with pytest.raises(ValueError, match="more than 2 degrees"):
        student_t(dof=2.0)
    with pytest.raises(ValueError, match="greater than 0"):
        negative_binomial(0.0)


@pytest.mark.slow
def test_a_poisson_network_with_many_weights_is_tracked_by_gauss_newton():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(600, 4)).astype(np.float32)
    y = rng.poisson(np.exp(0.7 + np.tanh(X[:, 0]))).astype(np.float32)
    sampler = opvi.tracker(opvi.mlp(4, (12,), poisson(), activation=jnp.tanh), particles=4)
    assert "Gauss–Newton" in sampler.about
    state, _ = opvi.run(sampler, opvi.stream((X, y), 50), 0)
    new = np.array([[-1.5, 0, 0, 0], [1.5, 0, 0, 0]], np.float32)
    np.testing.assert_allclose(sampler.predict(state, new).mean(), np.exp(0.7 + np.tanh([-1.5, 1.5])), rtol=0.3)


def test_constant_degrees_of_freedom_are_worked_out_beforehand():
    dof, y = np.array([4.0, 10, 7, np.inf], np.float32), jnp.array([-3.0, 0.1, 2, 30])
    said, traced = (StudentT(jnp.zeros(4), jnp.full(4, 2.0), one, jnp.zeros(4)) for one in (dof, jnp.asarray(dof)))
    np.testing.assert_allclose(said.log_density(y), traced.log_density(y), rtol=1e-5)
    np.testing.assert_allclose(said.cdf(y), traced.cdf(y), rtol=1e-5)
    even = said._replace(dof=np.where(dof == 7, 6, dof))
    same = dof != 7
    np.testing.assert_allclose(even.cdf(y)[same], traced.cdf(y)[same], rtol=1e-5)
