"""Causal standardisation, and networks that follow it to new units."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opvi.filters._covariance import within
from opvi.targets import MLP
from opvi.tracking._wrappers import _scaling as scaling
from opvi.tracking.experts import _layers as layers
from opvi.tracking.experts._expert import Units

update = jax.jit(scaling.update)


def seen(x, sizes, weight=None):
    moments, start = scaling.start(x.shape[1], jnp.float32), 0
    for size in sizes:
        piece = jnp.asarray(x[start : start + size], jnp.float32)
        moments = update(moments, piece, np.ones(len(piece), np.float32) if weight is None else weight[start:][:size])
        start += size
    return moments


@pytest.mark.parametrize(("offset", "unit"), [(0.0, 1.0), (1e4, 1.0), (-3e-6, 1e-6), (5e6, 1e6)])
def test_moments_are_those_of_all_rows_far_from_the_origin_too(offset, unit):
    x = (np.random.default_rng(0).normal(size=(300, 2)) * unit + offset).astype(np.float32)
    scale = scaling.scale_of(seen(x, [1, 7, 20, 272]))
    np.testing.assert_allclose(scale.mean, x.astype(float).mean(0), rtol=1e-5, atol=1e-3 * unit)
    np.testing.assert_allclose(scale.sd, x.astype(float).std(0), rtol=2e-3)


def test_padding_does_not_count_and_weights_do():
    x = np.random.default_rng(0).normal(size=(12, 1)).astype(np.float32)
    weight = jnp.array([2.0] * 4 + [1.0] * 4 + [0.0] * 4)
    repeated = np.concatenate([x[:4], x[:4], x[4:8]])
    once, twice = seen(x, [6, 6], weight), seen(repeated, [12])
    for a, b in zip(once, twice, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_constant_columns_become_zero_and_wild_values_are_held():
    x = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
    x[:, 1] = 1e5
    scale = scaling.scale_of(seen(x, [50, 50]))
    assert scale.sd[1] == 0
    z = scaling.readable(scale, jnp.array([[1e30, 1e5], [-3.0, 2e5]]))
    np.testing.assert_allclose(z[:, 1], 0)
    assert z[0, 0] == 0 > z[1, 0]  # nothing is that far out: missing
    spoilt = np.concatenate([x, [[1e18, 1e5]], x])
    sd = scaling.scale_of(seen(spoilt, [100, 1, 100])).sd[0]
    assert 1 < sd < 10  # one value a hundred deviations out, not 1e18 of them


def test_old_rows_fade():
    x = np.concatenate([np.zeros((2000, 1)), np.ones((2000, 1))]) + 0.1 * np.random.default_rng(0).normal(
        size=(4000, 1)
    )
    moments = scaling.start(1, jnp.float32)
    for piece in x.astype(np.float32).reshape(-1, 20, 1):
        moments = update(moments, piece, np.ones(20, np.float32), memory=200.0)
    assert float(moments.seen) == pytest.approx(200)
    assert float(moments.mean[0]) == pytest.approx(1, abs=0.01)
    assert float(scaling.scale_of(moments).sd[0]) == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize("hidden", [(), (5,), (4, 3)])
@pytest.mark.parametrize("kind", [layers.TANH, layers.RELU, layers.SINE])
def test_outputs_and_jacobian(hidden, kind):
    network = MLP((3, *hidden, 1), bias_spread=0.5)
    w = network.join(network.init(jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (6, 3))
    act = {layers.TANH: jnp.tanh, layers.RELU: jax.nn.relu, layers.SINE: jnp.sin}[kind]

    def plain(w):
        return MLP(network.sizes, act).apply(network.split(w), x)[:, 0]

    @jax.jit
    def both(w):
        return layers.outputs(network, w, jnp.float32(kind), x), (plain(w), jax.jacobian(plain)(w))

    found, expected = both(w)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-4, atol=1e-6)


def between(old, new, now=None):
    """The change from one scale of X and y to another, as `Units` makes it."""
    known = (old.sd > 0) & (new.sd > 0)
    unit, there = scaling.divisor(old), scaling.divisor(new)
    shift = jnp.where(old.sd > 0, (new.mean - old.mean) / unit, 0)
    at = jnp.zeros(len(shift) - 1) if now is None else scaling.readable(scaling.of_inputs(new), now[None])[0]
    return Units(
        shift[:-1],
        jnp.where(known, new.sd / unit, 1)[:-1],
        jnp.zeros(len(shift) - 1, bool),
        at,
        jnp.where(known[-1], old.sd[-1] / there[-1], 1),
        (old.mean - new.mean)[-1] / there[-1],
    )


def change(old, new, doubt=None, now=None):
    return layers.bounded_change(between(old, new, now), doubt)


OLD = scaling.Scale(jnp.array([1.0, -2.0, 0.0, 5.0]), jnp.array([2.0, 0.5, 1.0, 3.0]))
NEW = scaling.Scale(jnp.array([0.5, -1.0, 0.2, 4.0]), jnp.array([1.0, 0.8, 1.1, 6.0]))


@pytest.mark.parametrize("hidden", [(), (4,), (4, 3)])
def test_in_new_units_the_network_is_the_same_function(hidden):
    network = MLP((3, *hidden, 1), bias_spread=0.5)
    w = network.join(network.init(jax.random.key(0)))
    x = jax.random.normal(jax.random.key(1), (6, 3))
    units = change(OLD, NEW)

    def raw(scale, w):
        z = scaling.readable(scaling.Scale(scale.mean[:-1], scale.sd[:-1]), x)
        return layers.outputs(network, w, jnp.float32(layers.TANH), z)[0] * scale.sd[-1] + scale.mean[-1]

    @jax.jit
    def changed(w):
        moved = raw(NEW, layers.re_express(network, units, w)), raw(OLD, w)
        T = jax.vmap(lambda v: layers.change(network, units, v))(jnp.eye(network.dim)).T
        return moved, (T @ w, layers.change(network, units, w))

    moved, linear = changed(w)
    np.testing.assert_allclose(*moved, rtol=1e-4, atol=1e-4)
    # The change is linear: applied to a basis it is the matrix that covariances go through.
    np.testing.assert_allclose(*linear, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hidden", [(), (4,), (4, 3)])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.25, 0.01])
def test_covariances_go_through_the_change_of_units_block_by_block(hidden, share):
    """T C Tᵀ with T the Jacobian of the change of weights, for covariances that are whole, cut, or a diagonal."""
    network = MLP((3, *hidden, 1))
    d = network.dim
    blocks = within(*network.units, share * d * d)
    units = change(OLD, NEW)
    T = np.asarray(
        jax.jit(jax.jacobian(lambda w: layers.re_express(network, units, w)))(np.zeros(d, np.float32)), float
    )
    root = np.random.default_rng(0).normal(size=(2, d, d))
    whole = root @ root.transpose(0, 2, 1)  # of two particles
    padded = np.zeros((2, d + 1, d + 1))
    padded[:, :d, :d] = whole
    given = np.stack([padded[:, order][:, :, order] for order in blocks.order], 1)
    found = jax.jit(lambda given: layers.covariances_in(network, blocks, units, given))(given.astype(np.float32))
    found = np.asarray(found)
    assert found.shape[1] == len(blocks.order)
    assert (len(blocks.order) == 1) == (share == 1)
    for k, order in enumerate(blocks.order):
        places = order[order < d]
        alone = np.zeros((2, d, d))
        alone[np.ix_([0, 1], places, places)] = whole[np.ix_([0, 1], places, places)]
        expected = (T @ alone @ T.T)[np.ix_([0, 1], places, places)]
        inside = found[np.ix_([0, 1], [k], order < d, order < d)][:, 0]
        np.testing.assert_allclose(inside, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_a_column_that_was_constant_leaves_the_weights_alone():
    network = MLP((2, 3, 1))
    w = network.join(network.init(jax.random.key(0)))
    old = scaling.Scale(jnp.array([1.0, 7.0, 0.0]), jnp.array([1.0, 0.0, 1.0]))
    new = scaling.Scale(jnp.array([1.0, 7.5, 0.0]), jnp.array([1.0, 3.0, 1.0]))
    np.testing.assert_allclose(layers.re_express(network, change(old, new), w), w, rtol=1e-6)


def test_a_column_that_begins_to_move_is_not_wild() -> None:
    """A season that counts late, or a level that comes late: not ten deviations, as all before would say."""
    rng = np.random.default_rng(0)
    x = np.zeros((1040, 2), np.float32)
    x[1000:, 0] = 0.84 + 0.01 * rng.normal(size=40)
    x[1003, 1] = 1.0
    moments = seen(x[:1020], [20] * 51)
    z = scaling.readable(scaling.scale_of(moments), jnp.asarray(x[1000:1020]))
    assert 0.5 < float(z[:, 0].mean()) < 2
    assert 2 < float(z[3, 1]) < 6
    still = seen(x[:1000], [20] * 50)
    np.testing.assert_array_equal(scaling.scale_of(still).sd, 0)


@pytest.mark.parametrize("doubt", [0.0, 0.3, 1.0, 4.0])
def test_weights_of_a_column_that_runs_on_stay_within_their_prior(doubt) -> None:
    """What was learnt keeps its slope; what was not stays as large as it was, and the same where the column is now."""
    network = MLP((1, 4, 1), bias_spread=0.5)
    w = network.join(network.init(jax.random.key(0)))
    old = scaling.Scale(jnp.array([5.0, 0.0]), jnp.array([2.0, 1.0]))
    new = scaling.Scale(jnp.array([50.0, 0.0]), jnp.array([20.0, 1.0]))
    now = jnp.array([90.0])
    units = change(old, new, jnp.array([doubt]), now)
    moved = layers.re_express(network, units, w)
    grown = np.asarray(moved[:4] / w[:4])
    np.testing.assert_allclose(grown, min(10.0, max(1.0, doubt**-0.5 if doubt else 10.0)), rtol=1e-5)

    def said(scale, w, x):
        z = scaling.readable(scale, jnp.array([[x]]))
        return MLP(network.sizes, jnp.tanh).apply(network.split(w), z)[0, 0]

    unclipped = scaling.Scale(old.mean[:-1], old.sd[:-1]), scaling.Scale(new.mean[:-1], new.sd[:-1])
    at = 5.0 + 2.0 * 9  # within reach of both scales
    near = change(old, new, jnp.array([doubt]), jnp.array([at]))
    np.testing.assert_allclose(
        said(unclipped[1], layers.re_express(network, near, w), at), said(unclipped[0], w, at), rtol=1e-4, atol=1e-5
    )


def test_a_value_too_far_off_to_be_one_does_not_move_a_network() -> None:
    """The column's current value is -999, or 1e12: as if it were missing. One that is just wild counts."""
    old = scaling.Scale(jnp.array([5.0, 0.0]), jnp.array([2.0, 1.0]))
    new = scaling.Scale(jnp.array([50.0, 0.0]), jnp.array([20.0, 1.0]))
    units = [change(old, new, jnp.ones(1), jnp.array([now])) for now in (50.0, -1e12, 1e30, 50 + 20 * 50.0)]
    for there in units[1:3]:
        np.testing.assert_allclose(there.shift, units[0].shift, rtol=1e-6)
    assert float(units[3].shift[0]) > 2 * float(units[0].shift[0])


def test_weights_of_a_column_that_begins_become_zero_and_no_others() -> None:
    network = MLP((2, 3, 1), bias_spread=0.5)
    w = network.join(network.init(jax.random.key(0)))
    scale = scaling.Scale(jnp.zeros(3), jnp.ones(3))
    moved = layers.re_express(network, change(scale, scale), w, jnp.array([False, True]))
    np.testing.assert_array_equal(moved[3:6], 0)
    np.testing.assert_array_equal(moved[:3], w[:3])
    np.testing.assert_array_equal(moved[6:], w[6:])
