"""Any sampler as an expert."""

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi.tracking.experts import Context, Rows, Units
from opvi.tracking.experts._sampled import Sampled

NETWORK = opvi.gauss_newton(opvi.mlp(2, (3,), prior_variance=None), noise=opvi.filters.AdaptiveNoise())
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


def test_in_new_units_it_says_the_same_and_learns_the_same():
    expert, (units, move) = Sampled(NETWORK), changed()
    state = taught(expert)
    moved = jax.jit(expert.rescale)(state, units)
    asked, y = RNG.normal(size=(7, 2)), np.zeros(7)
    for old, new in ((state, moved), (taught(expert, state=state), taught(expert, *move(Z, Y), state=moved))):
        before, after = expert.predict(old, rows_of(asked, y)), expert.predict(new, rows_of(*move(asked, y)))
        np.testing.assert_allclose(after.mean, 0.5 * before.mean + 3, rtol=2e-2, atol=5e-3)
        np.testing.assert_allclose(after.noise, 0.25 * before.noise, rtol=0.05)


def test_a_sampler_that_forgets_all_is_as_before_any_row():
    expert = Sampled(NETWORK)
    begin, state = expert.init(jax.random.key(0), 2, jnp.float32), taught(expert)
    moved = expert.rescale(state, changed()[0])
    jax.tree.map(np.testing.assert_array_equal, expert.forget(moved, jnp.float32(0)), begin)
    jax.tree.map(np.testing.assert_array_equal, expert.forget(moved, jnp.float32(0.1)), moved)
