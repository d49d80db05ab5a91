"""Units that have seats together act as one; when few columns help, networks begin again with more units."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.filters._covariance import Blocks
from opvi.targets import MLP
from opvi.tracking import _layers as layers
from opvi.tracking import _scaling as scaling
from opvi.tracking import _seats as seats
from opvi.tracking._regressor import SEATED, default_settings

COLUMNS, SEATS, UNITS = 5, 3, 4
NETWORK = MLP((SEATS, UNITS, 1), bias_spread=0.5)
FACTOR = jnp.array([0.2, 1.0, 0.9, 0.1, 0.3])
OLD = scaling.Scale(jnp.array([1.0, -2.0, 0.0, 3.0, 1.0, 5.0]), jnp.array([2.0, 0.5, 1.0, 1.0, 3.0, 3.0]))
NEW = scaling.Scale(jnp.array([0.5, -1.0, 0.2, 2.0, 0.0, 4.0]), jnp.array([1.0, 0.8, 1.1, 2.0, 2.0, 6.0]))


def having(alone: bool) -> seats.Seats:
    start = seats.start(COLUMNS, SEATS, jnp.float32)
    return start._replace(alone=jnp.asarray(alone), chosen=jnp.array([1, 4, 2]) if alone else start.chosen)


def weights() -> jax.Array:
    return NETWORK.join(NETWORK.init(jax.random.key(0)))


def by_hand(alone: bool, w: np.ndarray, z: np.ndarray) -> np.ndarray:
    """The outputs of tanh units, pairs of which are one unit if they are not alone."""
    (first, bias), (last, end) = (
        (np.asarray(part, float) for part in layer) for layer in NETWORK.split(jnp.asarray(w))
    )
    if alone:
        return np.tanh(z[:, [1, 4, 2]] @ first + bias) @ last[:, 0] + end[0]
    z = z * np.sqrt((SEATS + 1) / (COLUMNS + 1))
    out = np.full(len(z), end[0])
    for unit in (0, 2):
        inside = z[:, :3] @ first[:, unit] + z[:, 3:] @ first[:2, unit + 1] + bias[unit] + bias[unit + 1]
        out += np.tanh(inside) * (last[unit, 0] + last[unit + 1, 0])
    return out


@pytest.mark.parametrize("alone", [False, True])
def test_units_see_every_column_together_or_those_chosen(alone):
    z, kind = np.random.default_rng(0).normal(size=(7, COLUMNS)), jnp.float32(layers.TANH)
    own, w = having(alone), weights()

    @jax.jit
    def said(w, z):
        return layers.outputs(NETWORK, w, kind, seats.seen(own, z, UNITS))

    @jax.jit
    @jax.jacobian
    def slope(w):
        return layers.output(NETWORK, w, kind, seats.seen(own, jnp.asarray(z, jnp.float32), UNITS))

    out, jacobian = said(w, jnp.asarray(z, jnp.float32))
    np.testing.assert_allclose(out, by_hand(alone, w, z), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jacobian, slope(w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alone", [False, True])
def test_in_new_units_the_network_is_the_same_function_and_covariances_follow(alone):
    own, w, x = having(alone), weights(), jax.random.normal(jax.random.key(1), (6, COLUMNS))
    units = layers.between(OLD, NEW)
    units = units._replace(
        ratio=seats.of(own, units.ratio, UNITS, 1), shift=seats.of(own, units.shift * seats.spread(own), UNITS, 0)
    )

    def raw(scale, w):
        z = scaling.standardise(scaling.Scale(scale.mean[:-1], scale.sd[:-1]), x)
        out = layers.output(NETWORK, w, jnp.float32(layers.TANH), seats.seen(own, z, UNITS))
        return out * scale.sd[-1] + scale.mean[-1]

    np.testing.assert_allclose(raw(NEW, layers.re_express(NETWORK, units, w)), raw(OLD, w), rtol=1e-4, atol=1e-4)
    T = np.asarray(jax.jacobian(lambda w: layers.re_express(NETWORK, units, w))(w), float)
    root = np.random.default_rng(0).normal(size=(1, NETWORK.dim, NETWORK.dim))
    C = root @ root.transpose(0, 2, 1)
    blocks = Blocks(np.arange(NETWORK.dim)[None], NETWORK.dim)
    found = layers.covariances_in(NETWORK, blocks, units, jnp.asarray(C[:, None], jnp.float32))
    np.testing.assert_allclose(found[:, 0], T @ C @ T.T, rtol=1e-3, atol=1e-3)


def test_values_go_to_seats_and_back():
    values = jnp.arange(1.0, 6.0)
    for alone, back in ((False, [1, 2, 3, 4, 5]), (True, [1, 2, 3, 1, 5])):  # 1 for a column without a seat
        by_seat = seats.of(having(alone), values, UNITS, 9)
        np.testing.assert_allclose(seats.by_column(having(alone), by_seat), back)
    assert seats.of(having(False), values, UNITS, 9)[2, 1] == 9  # an empty seat


def test_a_faded_column_loses_its_seat_to_one_that_helps():
    chosen, changed = seats.moved(having(True), FACTOR.at[0].set(0.8))
    assert (chosen.tolist(), changed.tolist()) == ([1, 0, 2], [False, True, False])
    for own, factor in (
        (having(True), FACTOR.at[0].set(0.6)),  # not clearly better
        (having(True), FACTOR.at[0].set(0.8).at[4].set(0.6)),  # not clearly faded
        (having(False), FACTOR.at[0].set(0.8)),  # every column has a seat
    ):
        assert not seats.moved(own, factor)[1].any()


def test_networks_begin_again_when_factors_have_changed_and_rows_have_doubled():
    own = seats.start(COLUMNS, SEATS, jnp.float32)
    assert seats.due(own, FACTOR, jnp.float32(240))
    assert not seats.due(own, FACTOR, jnp.float32(239))
    assert not seats.due(own, FACTOR, jnp.float32(4001))
    assert not seats.due(own, jnp.ones(COLUMNS).at[0].set(0.1), jnp.float32(240))
    faint = own._replace(factor=jnp.full(COLUMNS, 0.4))  # of which little is left to fade
    assert not seats.due(faint, jnp.full(COLUMNS, 0.05), jnp.float32(240))
    new = seats.settled(own, FACTOR, jnp.float32(240))
    assert bool(new.alone)
    assert sorted(new.chosen.tolist()) == [1, 2, 4]
    assert not seats.due(new, jnp.ones(COLUMNS), jnp.float32(479))
    assert seats.due(new, jnp.ones(COLUMNS), jnp.float32(480))
    assert not seats.settled(new, jnp.ones(COLUMNS).at[0].set(0.1), jnp.float32(480)).alone  # four help


def test_the_default_has_seats_in_tables_of_middling_width_only():
    assert [opvi.regressor(columns).seats for columns in (10, 11, SEATED, SEATED + 1)] == [0, 10, 10, 0]
    for other in ({"hidden": (50,)}, {"budget": 1e6}, {"memory_rows": 100}, {"fading_above": 20}, {"seats": False}):
        assert opvi.regressor(20, **other).seats == 0
    assert "once at most 10 help, each unit sees those" in opvi.regressor(20).about
    with pytest.raises(ValueError, match="`seats` is 3, but must be True or False"):
        opvi.regressor(20, seats=3)


def learnt(sampler, x, y):
    """The squared errors of predictions before learning, and the last state."""
    state, key, errors = sampler.init(jax.random.key(0)), jax.random.key(0), []
    for at in range(0, len(y), 20):
        batch = opvi.Batch((x[at : at + 20], y[at : at + 20]), np.ones(20, np.float32))
        state, info = sampler.step(key, state, batch)
        errors.append(float(info.squared_error))
    return errors, state


def test_networks_begin_again_without_the_columns_that_do_not_help():
    """Nine columns of noise, and three that count together."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(800, 12)).astype(np.float32)
    y = (2 * x[:, 3] + np.tanh(2 * x[:, 8]) + x[:, 8] * x[:, 5] + 0.1 * rng.normal(size=800)).astype(np.float32)
    small = replace(opvi.regressor(12, process=False), hidden=(24,), particles=5, seats=4, settings=default_settings(5))
    errors, state = learnt(small, x, y)
    assert bool(state.seats.alone)
    assert {3, 5, 8} <= set(state.seats.chosen.tolist())
    assert state.memory.seen == 800  # those learnt again are not remembered twice
    assert state.memory.metric.rounds < 30  # distances follow the networks that began again
    before, _ = learnt(replace(small, seats=0, hidden=(8,)), x, y)
    assert np.mean(errors[20:]) < 0.8 * np.mean(before[20:])
