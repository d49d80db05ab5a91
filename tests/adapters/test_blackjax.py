"""SVGD by blackjax's calls: the same particles as blackjax itself, from the same lines of code."""

import functools

import blackjax as peer
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import opvi
from opvi.adapters import blackjax
from opvi.flows import kernels

RNG = np.random.default_rng(0)
PARTICLES = {
    "slopes": RNG.normal(size=(9, 2, 3)).astype(np.float32),
    "level": RNG.normal(size=9).astype(np.float32),
}


@pytest.fixture(autouse=True)
def _defaults_of_jax():
    """Blackjax itself, and optax's Adam, do not compute under the suite's strictness."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def log_density(params, pull=1.0):
    return -0.25 * ((params["slopes"] - 1) ** 2).sum() - 0.5 * pull * params["level"] ** 2


def run(library, optimizer, steps, **keywords):
    """What a user of blackjax writes."""
    svgd = library.svgd(jax.grad(log_density), optimizer)
    state = svgd.init(PARTICLES, {"length_scale": 0.5})
    step = jax.jit(svgd.step)
    for _ in range(steps):
        state = step(state, **keywords)
    return state


OPTIMIZERS = {
    "sgd": optax.sgd(0.3),
    "clipped by the global norm": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.05)),
    "scaled leaf by leaf": optax.lamb(0.05),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_particles_are_blackjaxs(optimizer):
    ours, theirs = (run(library, optimizer, 20, pull=2.0) for library in (blackjax, peer))
    assert ours._fields == theirs._fields
    # 20 steps of float32 rounding, on numbers of about 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours.particles, theirs.particles)
    expected = theirs.kernel_parameters["length_scale"]
    np.testing.assert_allclose(ours.kernel_parameters["length_scale"], expected, rtol=1e-5)
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), ours.particles, PARTICLES)
    assert min(jax.tree.leaves(moved)) > 0.1


def test_nothing_is_changed_in_place_and_steps_scan():
    svgd = blackjax.svgd(jax.grad(log_density), optax.adam(0.05))
    given = {"length_scale": 0.5}
    state = svgd.init(PARTICLES, given)
    before = jax.tree.map(np.array, state)
    step = jax.jit(svgd.step)
    once = step(state)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    assert given == {"length_scale": 0.5}
    last, _ = jax.lax.scan(lambda s, _: (svgd.step(s), None), state, None, 3)
    by_hand = functools.reduce(lambda s, _: step(s), range(2), once)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), last, by_hand)


def test_it_is_opvis_own_svgd():
    """One batch after the other through `opvi.svgd`, with a bandwidth that both keep."""
    target = opvi.target(
        lambda params: jnp.zeros(()),
        lambda params, rows: jnp.broadcast_to(log_density(params), rows.shape),
        lambda key: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), PARTICLES),
    )
    algorithm = opvi.svgd(target, step=0.1, kernel=kernels.imq(), bandwidth=kernels.fixed(2.0))
    stream = opvi.stream(np.zeros(4, np.float32), 1)
    state, _ = opvi.run(algorithm, stream, 0, particles=PARTICLES)
    svgd = blackjax.svgd(jax.grad(log_density), optax.sgd(0.1), kernels.imq(), kernels.fixed(2.0))
    other = svgd.init(PARTICLES, {"length_scale": 2.0})
    for _ in range(4):
        other = svgd.step(other)
    expected = jax.vmap(target.ravel)(other.particles)
    np.testing.assert_allclose(state.particles, expected, atol=1e-5)


def test_bad_arguments_are_refused():
    gradient = jax.grad(log_density)
    with pytest.raises(TypeError, match="`kernel` is a function.*opvi.flows.kernels.rbf"):
        blackjax.svgd(gradient, optax.sgd(0.1), peer.vi.svgd.rbf_kernel)
    svgd = blackjax.svgd(gradient, optax.sgd(0.1))
    for particles in (jnp.zeros(()), jnp.zeros((1, 2)), {"a": jnp.zeros((3, 1)), "b": jnp.zeros(2)}, {}):
        with pytest.raises(ValueError, match="one leading axis of at least 2 particles"):
            svgd.init(particles)
    with pytest.raises(ValueError, match="`kernel_parameters` is"):
        svgd.init(PARTICLES, {"bandwidth": 1.0})
