"""The line, and any sampler as an expert, against closed forms and in other units."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.tracking.experts import Context, Rows, Units
from opvi.tracking.experts._linear import FORGETTING, Linear
from opvi.tracking.experts._sampled import Sampled

RNG = np.random.default_rng(0)
Z = RNG.normal(size=(60, 2)).astype(np.float32)
Y = (Z @ [1.0, -0.5] + 0.3 + 0.1 * RNG.normal(size=60)).astype(np.float32)


def rows_of(z, y):
    z, y = jnp.asarray(z, jnp.float32), jnp.asarray(y, jnp.float32)
    return Rows(z, z, y, jnp.ones(len(y)), *[jnp.zeros(len(y))] * 2)


def taught(expert, z=Z, y=Y, state=None):
    @jax.jit
    def one(state, rows):
        belief, weight = expert.predict(state, rows), rows.weight
        context = Context(belief, weight, weight, rows.y, rows.z, jnp.ones(()), jnp.ones(()), jnp.array(False))
        return expert.learn(jax.random.key(0), state, rows, context)

    state = expert.init(jax.random.key(0), 2, jnp.float32) if state is None else state
    for at in range(0, len(y), 20):
        state = one(state, rows_of(z[at : at + 20], y[at : at + 20]))
    return state


def changed(shift=(0.5, -1.0), ratio=(2.0, 0.5), by=0.5, off=3.0):
    """A change of units, and a function that makes it to rows."""
    shift, ratio = np.array(shift), np.array(ratio)
    units = Units(*(jnp.asarray(a, jnp.float32) for a in (shift, ratio, shift > 9, shift, by, off)))
    return units, lambda z, y: ((z - shift) / ratio, by * y + off)


def test_the_line_is_that_of_least_squares_with_forgetting():
    state = taught(Linear())
    weight = FORGETTING ** (20.0 * np.repeat([2, 1, 0], 20))
    A = np.c_[np.ones(60), Z]
    spread = np.average(Z**2, weights=weight, axis=0) - np.average(Z, weights=weight, axis=0) ** 2
    wanted = np.linalg.solve(A.T @ (A * weight[:, None]) + np.diag([1e-6, *spread]), A.T @ (weight * Y))
    np.testing.assert_allclose(state.weights, wanted, atol=2e-3)
    said = Linear().predict(state, rows_of([[30.0, 0.0]], [0.0]))
    np.testing.assert_allclose(said.mean, wanted @ [1, 30, 0], rtol=1e-3)
    assert float(said.variance[0]) > 100 * float(Linear().predict(state, rows_of([[0.0, 0.0]], [0.0])).variance[0])


def test_an_outlier_hardly_moves_the_line():
    state, y = taught(Linear()), Y[:20].copy()
    y[3] = 1e4
    np.testing.assert_allclose(taught(Linear(), Z[:20], y, state).weights, state.weights, atol=0.15)


@pytest.mark.parametrize("make", [Linear, lambda: Sampled(NETWORK)])
def test_in_new_units_experts_say_the_same_and_learn_the_same(make):
    expert, (units, move) = make(), changed()
    state = taught(expert)
    moved = jax.jit(expert.rescale)(state, units)
    asked, y = RNG.normal(size=(7, 2)), np.zeros(7)
    for old, new in ((state, moved), (taught(expert, state=state), taught(expert, *move(Z, Y), state=moved))):
        before, after = expert.predict(old, rows_of(asked, y)), expert.predict(new, rows_of(*move(asked, y)))
        np.testing.assert_allclose(after.mean, 0.5 * before.mean + 3, rtol=2e-2, atol=5e-3)
        np.testing.assert_allclose(after.noise, 0.25 * before.noise, rtol=0.05)


NETWORK = opvi.gauss_newton(opvi.mlp(2, (3,), prior_variance=None), noise=opvi.filters.AdaptiveNoise())


def test_a_sampler_that_forgets_all_is_as_before_any_row():
    expert = Sampled(NETWORK)
    begin, state = expert.init(jax.random.key(0), 2, jnp.float32), taught(expert)
    moved = expert.rescale(state, changed()[0])
    jax.tree.map(np.testing.assert_array_equal, expert.forget(moved, jnp.float32(0)), begin)
    jax.tree.map(np.testing.assert_array_equal, expert.forget(moved, jnp.float32(0.1)), moved)
