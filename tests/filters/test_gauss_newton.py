"""Second-order particles against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.filters import _covariance as covariance
from opvi.filters._prior import gaussian_prior

KEY = jax.random.key(0)


def test_on_a_linear_model_it_is_exact():
    """Every particle ends at the posterior's mean, wherever it started, with the posterior's own covariance."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 2)).astype(np.float32)
    y = (X @ [0.7, -0.4] + 0.2 + 0.5 * rng.normal(size=60)).astype(np.float32)
    target = opvi.linear_regression(2, noise=0.25, prior_variance=4.0)
    algorithm = opvi.gauss_newton(target, forgetting=1.0)
    state, _ = opvi.run(algorithm, opvi.stream((X, y), opvi.schedules.power(0.5)), KEY, particles=3)
    design = np.column_stack([X, np.ones(60)]).astype(float)
    precision = design.T @ design / 0.25 + np.eye(3) / 4
    expected = np.linalg.solve(precision, design.T @ y / 0.25)
    np.testing.assert_allclose(state.particles, np.tile(expected, (3, 1)), rtol=1e-3, atol=1e-4)
    for matrix in state.past.matrices[:, 0]:
        np.testing.assert_allclose(matrix, np.linalg.inv(precision), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_step_of_a_classifier_is_a_gauss_newton_step(classes):
    """(P⁻¹ + Jᵀ H J)⁻¹ Jᵀ g, with the exact curvature of the softmax (or sigmoid)."""
    target = opvi.logistic_regression(2) if classes == 2 else opvi.softmax_regression(2, 3)
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(7, 2)).astype(np.float32), rng.integers(0, classes, 7)
    algorithm = opvi.gauss_newton(target, forgetting=1.0)
    state = algorithm.init(KEY, 2)
    new, _ = algorithm.step(KEY, state, opvi.batch((X, y), pad_to=8))

    def loss(v):
        return -target.log_likelihood(target.unravel(v), (jnp.asarray(X, v.dtype), jnp.asarray(y))).sum()

    # The model is linear: steps are from the prior's mean, and the Hessian is the Gauss–Newton matrix.
    with jax.enable_x64(True):
        H, g = jax.jit(lambda v: (jax.hessian(loss)(v), jax.grad(loss)(v)))(np.zeros(target.dim))
    move = np.linalg.solve(np.asarray(H) + np.eye(target.dim), -np.asarray(g))
    for after in np.asarray(new.particles):
        np.testing.assert_allclose(after, move, rtol=2e-3, atol=2e-4)


def test_a_network_for_classes_is_linearised_again_where_its_first_step_led():
    """The second step of Gauss–Newton from the particle's own Gaussian, and the covariance there."""
    target = opvi.mlp(2, (3,), opvi.categorical(), outputs=3, activation=jnp.tanh, prior_variance=0.1)
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(7, 2)).astype(np.float32), rng.integers(0, 3, 7)
    algorithm = opvi.gauss_newton(target, forgetting=1.0)
    state = algorithm.init(KEY, 2)
    new, _ = algorithm.step(KEY, state, opvi.batch((X, y), pad_to=8))

    def logits(v):
        return target.predict(target.unravel(v), jnp.asarray(X)).logits

    at = jax.jit(lambda v: (logits(v), jax.jacrev(logits)(v)))
    for i, start in enumerate(np.asarray(state.particles)):
        w = start
        for _ in range(2):
            f, J = (np.asarray(a, float) for a in at(w))
            p = np.exp(f) / np.exp(f).sum(1, keepdims=True)
            H = np.eye(3) * p[:, None] - p[:, :, None] * p[:, None]
            G = np.einsum("bci,bcd,bdj->ij", J, H, J)
            g = np.einsum("bci,bc->i", J, np.eye(3)[y] - p)
            C = np.linalg.inv(np.eye(target.dim) / 0.1 + G)
            w = start + C @ (g + G @ (w - start))
        np.testing.assert_allclose(new.particles[i], w, rtol=2e-3, atol=2e-4)
        np.testing.assert_allclose(new.past.matrices[i, 0], C, rtol=2e-3, atol=2e-4)


def test_covariances_stay_symmetric_bounded_and_positive():
    target = opvi.mlp(3, (6,), activation=jnp.tanh, prior_variance=None)
    algorithm = opvi.gauss_newton(target, forgetting=0.9, noise=opvi.filters.AdaptiveNoise(), largest_growth=4.0)
    rng = np.random.default_rng(0)
    X = np.zeros((2000, 3), np.float32)
    X[:, 0] = rng.normal(size=2000)  # two features say nothing: their directions are only ever forgotten
    state, history = opvi.run(algorithm, opvi.stream((X, np.sin(X[:, 0])), 10), KEY, particles=4)
    C = np.asarray(state.past.matrices)[:, 0]
    prior = np.asarray(covariance.variances(algorithm.init(KEY, 4).past))[0, 0]
    assert history.info.finite.all()
    assert (C.diagonal(axis1=1, axis2=2) <= 4.001 * prior).all()
    assert np.abs(C - C.transpose(0, 2, 1)).max() < 1e-4 * np.abs(C).max()
    assert min(np.linalg.eigvalsh(c)[0] for c in C) > -1e-4


@pytest.mark.slow
def test_it_learns_far_faster_than_first_order_flows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2200, 3)).astype(np.float32)
    y = (np.sin(2 * X[:, 0]) * X[:, 1] + 0.05 * rng.normal(size=2200)).astype(np.float32)
    target = opvi.mlp(3, (20,), opvi.gaussian(0.05), activation=jnp.tanh, prior_variance=None, bias_spread=0.5)
    errors = []
    for algorithm in (opvi.gauss_newton(target, noise=opvi.filters.AdaptiveNoise()), opvi.svgd(target, step=1e-3)):
        state, _ = opvi.run(algorithm, opvi.stream((X[:2000], y[:2000]), 20), KEY, particles=5)
        errors.append(float(opvi.metrics.rmse(opvi.predict(target, state.particles, X[2000:]), y[2000:])))
    assert errors[0] < 0.3 * errors[1]


def test_kronecker_factors_of_a_linear_model_are_its_curvature():
    """One layer, unit noise: A is the design's Gram matrix and G is 1, so the step is a damped least-squares step."""
    target = opvi.mlp(2, (), opvi.gaussian(1.0), prior_variance=1.0)
    algorithm = opvi.kfac(target, damping=0.1, largest_change=1e6)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(8, 2)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    state = algorithm.init(KEY, 2)
    new, _ = algorithm.step(KEY, state, opvi.batch((X, y)))
    design = np.column_stack([X, np.ones(8)]).astype(float)
    A = design.T @ design
    gain = max(2 / 21, 1 / 2)
    G = (1 - gain) * 0.01 + gain * 1.0
    ratio = np.sqrt(np.trace(A) / 3 / G)
    left = np.linalg.inv(A + ratio * np.sqrt(0.1) * np.eye(3))
    for before, after in zip(np.asarray(state.particles, float), np.asarray(new.particles, float), strict=True):
        layer = target.unravel(jnp.asarray(before, jnp.float32))["weights"][0]
        w = np.concatenate([np.asarray(layer.weights)[:, 0], np.asarray(layer.bias)])
        move = left @ design.T @ (y - design @ w) / (G + np.sqrt(0.1) / ratio)
        moved = target.unravel(jnp.asarray(after - before, jnp.float32))["weights"][0]
        np.testing.assert_allclose(np.concatenate([moved.weights[:, 0], moved.bias]), move, rtol=2e-3, atol=1e-4)


@pytest.mark.slow
def test_kfac_learns_classes_without_a_step_size():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(3000, 4)).astype(np.float32)
    y = (X[:, 0] * X[:, 1] > 0).astype(int) + (X[:, 2] > 1)
    target = opvi.mlp(4, (20,), opvi.categorical(), outputs=3, prior_variance=None, weight_spread=1.4)
    state, history = opvi.run(opvi.kfac(target), opvi.stream((X[:2500], y[:2500]), 20), KEY, particles=4)
    predictive = opvi.predict(target, state.particles, X[2500:])
    assert float(opvi.metrics.accuracy(predictive, y[2500:])) > 0.8  # the largest class has 0.42
    assert history.info.log_predictive[-20:].mean() > -0.5


def test_wrong_targets_and_settings_are_refused():
    with pytest.raises(TypeError, match="a target with `predict`"):
        opvi.gauss_newton(opvi.gaussian_mixture())
    with pytest.raises(TypeError, match="layers of an MLP"):
        opvi.kfac(opvi.gaussian_mixture())
    with pytest.raises(ValueError, match="each must be greater than 0"):
        opvi.kfac(opvi.softmax_regression(2, 3), damping=0.0)
    for forgetting in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
            opvi.gauss_newton(opvi.linear_regression(2), forgetting=forgetting)
    inferred = (
        opvi.linear_regression(2, noise=opvi.targets.Gamma()),
        opvi.linear_regression(2, prior_variance=opvi.targets.Gamma()),
    )
    for target in inferred:
        with pytest.raises(ValueError, match="not a Gaussian with known variances"):
            opvi.gauss_newton(target).init(KEY, 2)


def test_a_correlated_prior_is_not_taken_for_independent_parts():
    precision = jnp.eye(3) + 0.3 * (1 - jnp.eye(3))  # its rows' sums, all that the direction (1, 1, 1) shows, are alike
    for matrix, independent in ((precision, False), (jnp.diag(jnp.array([1.0, 2.0, 5.0])), True)):
        target = opvi.target(
            log_prior=lambda v, matrix=matrix: -(v - 0.5) @ matrix @ (v - 0.5) / 2,
            log_likelihood=lambda v, data: -((data - v[0]) ** 2),
            init=lambda key: jax.random.normal(key, (3,)),
        )
        prior = gaussian_prior(target)
        assert (prior.covariance is None) == independent
        np.testing.assert_allclose(prior.mean, 0.5, rtol=1e-4)
        np.testing.assert_allclose(prior.variance, np.diag(np.linalg.inv(matrix)), rtol=1e-4)
        if not independent:
            np.testing.assert_allclose(prior.covariance, np.linalg.inv(matrix), rtol=1e-4)
