"""Kronecker factors: the random walk against its closed form, groups of activations, and batches of any size."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.filters._kfac import in_turn

KEY = jax.random.key(0)


def test_the_first_step_of_wandering_weights_is_a_kalman_filters():
    """One layer, unit noise: $P = (I/p_0 + a^T a)^{-1}$ with $p_0$ the prior's variance in units of G."""
    target = opvi.mlp(2, (), opvi.gaussian(1.0), prior_variance=1.0)
    algorithm = opvi.kfac(target, damping=0.1, wander=True, largest_change=1e6)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(8, 2)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    state = algorithm.init(KEY, 2)
    new, _ = algorithm.step(KEY, state, opvi.batch((X, y)))
    design = np.column_stack([X, np.ones(8)]).astype(float)
    G = (0.01 + 1.0) / 2  # what was there before counts as one round
    P = np.linalg.inv(np.eye(3) / (G / 0.1) + design.T @ design)
    np.testing.assert_allclose(new.factors[0].inverse[0], P, rtol=1e-3, atol=1e-5)
    for before, after in zip(np.asarray(state.particles, float), np.asarray(new.particles, float), strict=True):
        error = y - design @ before
        np.testing.assert_allclose(after - before, P @ design.T @ error / (1.1 * G), rtol=2e-3, atol=1e-4)


def test_variance_that_wanders_goes_back_to_the_priors_with_its_half_life():
    target = opvi.mlp(1, (), opvi.gaussian(1.0), prior_variance=1.0)
    algorithm = opvi.kfac(target, damping=1.0, half_life=100, wander=True)
    state = algorithm.init(KEY, 1)
    known = np.resize([[1.0], [-1.0]], (20, 1)).astype(np.float32)  # the weight has nothing in common with the bias
    zeros = np.zeros_like(known)
    for _ in range(60):
        state, _ = algorithm.step(KEY, state, opvi.batch((known, known[:, 0])))
    low = float(state.factors[0].inverse[0, 0, 0])
    for _ in range(5):  # 100 rows that say nothing of the weight: half of the way to p_0 = 1
        state, _ = algorithm.step(KEY, state, opvi.batch((zeros, zeros[:, 0])))
    after = float(state.factors[0].inverse[0, 0, 0])
    assert low < 0.06
    assert after == pytest.approx((low + 1) / 2, abs=0.01)


def test_equal_targets_are_one_group():
    target = opvi.mlp(2, (4,), opvi.categorical(), outputs=3, prior_variance=None)
    w = opvi.draw(target, KEY, 4)
    rng = np.random.default_rng(0)
    batch = opvi.batch((rng.normal(size=(20, 2)).astype(np.float32), rng.integers(0, 3, 20)))
    one, two = opvi.kfac(target), opvi.kfac([target, target])
    alone, _ = one.step(KEY, one.init(KEY, w), batch)
    both, _ = two.step(KEY, two.init(KEY, w), batch)
    np.testing.assert_allclose(alone.particles, both.particles, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wander", [False, True])
def test_samplers_in_turn_learn_what_each_learns_alone(wander):
    """Two differ in their half-life, the third in its target."""
    first = opvi.mlp(2, (4,), opvi.categorical(), outputs=3, prior_variance=None)
    other = opvi.mlp(2, (4,), opvi.categorical(), outputs=3, prior_variance=None, activation=jax.nn.relu)
    samplers = [
        opvi.kfac(target, half_life=half_life, wander=wander)
        for target, half_life in ((first, 10.0), (other, 10.0), (first, 500.0))
    ]
    rng = np.random.default_rng(0)
    states = [sampler.init(jax.random.key(seed), 3) for seed, sampler in enumerate(samplers)]
    for _ in range(3):
        batch = opvi.batch((rng.normal(size=(20, 2)).astype(np.float32), rng.integers(0, 3, 20)))
        alone = [sampler.step(KEY, state, batch) for sampler, state in zip(samplers, states, strict=True)]
        together = in_turn(samplers, KEY, states, batch)
        jax.tree.map(np.testing.assert_array_equal, together, alone)
        states = [state for state, _ in together]
    assert not np.array_equal(states[0].factors[0].inverse, states[2].factors[0].inverse)


def test_particles_are_factorised_one_by_one():
    """Batches of LAPACK calls from trackers side by side made jaxlib 0.10's threads wait for each other for ever: a
    classifier of 24 particles did not return."""
    target = opvi.mlp(2, (4,), opvi.categorical(), outputs=3, prior_variance=None)
    tracker = opvi.kfac(target)
    batch = opvi.batch((np.zeros((20, 2), np.float32), np.zeros(20, np.int32)))
    program = jax.jit(tracker.step).lower(KEY, tracker.init(KEY, 6), batch).as_text()
    shapes = re.findall(r"custom_call @lapack_\w+\(.*? : \(tensor<(\w+)>", program)
    assert shapes
    assert all(shape.count("x") == 2 for shape in shapes), shapes  # one matrix each: rows x columns x type


def test_activations_are_dealt_in_order():
    """The first half of the particles is the first target's: a group sees its own activation and no other."""
    relu, tanh = (
        opvi.mlp(2, (4,), opvi.categorical(), outputs=3, activation=f, prior_variance=None)
        for f in (jax.nn.relu, jnp.tanh)
    )
    both = opvi.kfac([relu, tanh])
    state = both.init(KEY, 6)
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(20, 2)).astype(np.float32), rng.integers(0, 3, 20)
    _, info = both.step(KEY, state, opvi.batch((X, y)))
    densities = [
        opvi.predict(target, w, X).components.log_density(jnp.asarray(y)[None])
        for target, w in ((relu, state.particles[:3]), (tanh, state.particles[3:]))
    ]
    expected = jax.nn.logsumexp(jnp.concatenate(densities), 0).mean() - np.log(6)
    assert float(info.log_predictive) == pytest.approx(float(expected), abs=1e-5)
    with pytest.raises(ValueError, match="multiple of 2"):
        both.init(KEY, 5)
    with pytest.raises(ValueError, match="the same sizes"):
        opvi.kfac([relu, opvi.mlp(2, (5,), opvi.categorical(), outputs=3, prior_variance=None)])
