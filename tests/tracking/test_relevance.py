"""Columns that do not help fade, those that do stay, and one that begins to help returns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.tracking._inside import find
from opvi.tracking._wrappers import _relevance as gates
from opvi.tracking.experts import Rows
from opvi.tracking.experts._networks import Networks, usual_settings

UPDATE = jax.jit(gates._learn)


def after(state, rounds, noisy, rng):
    """The gates after batches whose first column adds what is true, and whose second adds noise, or what is missing."""
    for _ in range(rounds):
        part = rng.normal(size=(20, len(state.factor))) * np.resize([1.0, 0.5] + [0.0] * 9, len(state.factor))
        error = 0.3 * rng.normal(size=20) + (-noisy if noisy else 1) * part[:, 1]
        alone = jnp.asarray(rng.normal(size=part.shape), jnp.float32)  # inputs that errors do not go with
        part, error = jnp.asarray(part, jnp.float32), jnp.asarray(error, jnp.float32)
        state = UPDATE(state, alone, part, error, jnp.ones(20))
    return state


@pytest.mark.parametrize(("columns", "smallest"), [(2, gates.FEW_SMALLEST), (gates.FEW + 1, gates.SMALLEST)])
def test_a_column_of_noise_fades_and_comes_back_when_it_helps(columns, smallest):
    rng = np.random.default_rng(0)
    faded = after(gates._start(columns, jnp.float32), 150, 1.0, rng)
    assert faded.factor[0] > 0.95
    assert float(faded.factor[1]) == pytest.approx(smallest)
    back = after(faded, 250, 0.0, rng)
    assert back.factor[1] > 0.9


@pytest.mark.parametrize(("columns", "fades"), [(2, False), (gates.FEW + 1, True)])
def test_of_few_columns_one_stays_of_whose_part_less_than_half_is_noise(columns, fades):
    """Squared errors are smaller with it than without it; in a wide table such columns, which are many, fade."""
    state = after(gates._start(columns, jnp.float32), 60, 0.4, np.random.default_rng(0))
    assert (float(state.factor[1]) < 0.5) == fades
    assert fades or float(state.factor[1]) == 1


def test_of_few_columns_one_stays_that_chance_may_have_made_look_bad():
    """All of its part was too much, 0.3 in each of 20 rows, but errors are of size 1."""
    part, error = jnp.full((20, 2), 0.3), jnp.asarray(np.resize([0.7, -1.3], 20), jnp.float32)
    state = UPDATE(gates._start(2, jnp.float32), jnp.zeros((20, 2)), part, error, jnp.ones(20))
    np.testing.assert_array_equal(state.factor, 1)


@pytest.mark.parametrize("bent", [False, True])
def test_a_column_that_errors_go_with_does_not_fade(bent):
    """A network has not learnt yet what the column says, and adds nothing but noise because of it."""
    rng = np.random.default_rng(3)
    state = gates._start(2, jnp.float32)
    for _ in range(150):
        z, noise = rng.normal(size=(2, 20, 2)).astype(np.float32)
        said = 0.5 * noise * np.asarray(state.factor)
        wanted = z[:, 0] ** 2 - 1 if bent else z[:, 0]
        error = 0.6 * wanted + rng.normal(size=20) - said.sum(1)
        state = UPDATE(state, z, jnp.asarray(said), jnp.asarray(error, jnp.float32), jnp.ones(20))
    assert state.factor[0] > 0.9
    assert state.factor[1] < 0.3  # `FEW_SMALLEST` is 0.2


def test_rows_count_by_their_weights_and_bad_ones_change_nothing():
    rng = np.random.default_rng(1)
    state = after(gates._start(2, jnp.float32), 5, 1.0, rng)
    part, error = jnp.asarray(rng.normal(size=(4, 2)), jnp.float32), jnp.asarray(rng.normal(size=4), jnp.float32)
    doubled = jnp.concatenate([part, part])
    twice = UPDATE(state, doubled, doubled, jnp.concatenate([error, error]), jnp.ones(8))
    heavy = UPDATE(state, part, part, error, jnp.full(4, 2.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), twice, heavy)
    same = UPDATE(state, part, part.at[0, 0].set(jnp.nan), error, jnp.ones(4))
    jax.tree.map(np.testing.assert_array_equal, same, state)


@pytest.mark.slow
def test_noise_columns_cost_the_regressor_little():
    """Two columns matter, 14 are noise: the noise fades, and the error is near 0.1, the noise of the rows."""
    rng = np.random.default_rng(2)
    X = rng.uniform(-1, 1, size=(4000, 16)).astype(np.float32)
    y = (np.sin(3 * X[:, 0]) + X[:, 1] ** 2 + 0.1 * rng.normal(size=4000)).astype(np.float32)
    state, history = opvi.run(opvi.regressor(16, hidden=(10,), particles=5), opvi.stream((X, y), 20), 0)
    factor = np.asarray(find(state, gates.Gates).factor)
    assert (factor[:2] > 0.5).all()
    assert factor[2:].mean() < 0.3
    assert np.sqrt(history.info.squared_error[-50:].mean()) < 0.115


def test_after_forgetting_columns_are_there_again_and_the_function_is_the_same():
    """Weights take on the factors; their variances grow, so that they can be learnt again."""
    expert = gates.Relevance(Networks((4,), usual_settings(3), False, 0, 1e6))
    state = expert.init(jax.random.key(0), 2, jnp.float32)
    state = state._replace(own=state.own._replace(factor=jnp.array([0.2, 1.0])))
    z = jax.random.normal(jax.random.key(1), (6, 2))
    rows = Rows(z, z, *[jnp.zeros(6)] * 4)
    again = expert.forget(state, jnp.float32(1.0))
    np.testing.assert_array_equal(again.own.factor, 1)
    before, after = (jax.jit(expert.predict)(s, rows) for s in (state, again))
    np.testing.assert_allclose(after.mean, before.mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.slope, before.slope, rtol=1e-4, atol=1e-5)
