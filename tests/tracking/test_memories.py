"""Rows remembered beside the networks, against NumPy and against what they are for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import nnls

import opvi
from opvi.tracking import _class_memory as classes
from opvi.tracking._mixing._least_squares import nonnegative
from opvi.tracking._recommended import without_rows
from opvi.tracking.experts import Context, Rows, Units
from opvi.tracking.experts._neighbours import Neighbours
from tests.tracking.parts import stack

RNG = np.random.default_rng(1)


def batch(count, weight=None):
    """Rows, what stage 0 said of them, and the context in which they are learnt."""
    z = jnp.asarray(RNG.normal(size=(count, 2)), jnp.float32)
    y, base = (jnp.asarray(RNG.normal(size=count) * size, jnp.float32) for size in (1, 0.5))
    weight = jnp.ones(count) if weight is None else jnp.asarray(weight, jnp.float32)
    return Rows(z, z, y, weight, base, jnp.zeros(count))


def told(expert, state, rows, residual=None):
    residual = rows.y - rows.base if residual is None else residual
    belief, one = expert.predict(state, rows), jnp.ones(len(rows.y))
    return Context(belief, one, rows.weight, residual, jnp.zeros_like(rows.z), jnp.float32(0.25), one[0], one[0] > 1)


def remembered(count=40, half_life=None, **more):
    """A memory with one batch in it, and the batch."""
    expert = Neighbours(1000, half_life)
    state, rows = expert.init(None, 2, jnp.float32), batch(count, **more)
    state = jax.jit(expert.learn)(None, state, rows, told(expert, state, rows))
    return expert, state, rows


def test_nothing_is_said_before_the_first_row():
    expert = Neighbours(1000)
    said = expert.predict(expert.init(None, 2, jnp.float32), batch(3))
    assert not np.asarray(said.mean).any()
    assert not np.asarray(said.novelty).any()


@pytest.mark.parametrize("half_life", [None, 50.0])
def test_errors_and_targets_of_the_nearest_are_averaged(half_life):
    expert, state, rows = remembered(half_life=half_life, weight=RNG.uniform(0.5, 2, size=40))
    state = state._replace(clock=state.clock + 50)  # rows that left no trace here
    asked = batch(5)
    said = jax.jit(expert.predict)(state, asked)
    stored, error, y = np.asarray(rows.z), np.asarray(rows.y - rows.base), np.asarray(rows.y)
    fade = 1.0 if half_life is None else 0.5
    for i in range(5):
        far = ((stored - np.asarray(asked.z)[i]) ** 2).sum(1)
        near = np.argsort(far)[:8]
        w = 1 / (far[near] / far[near].mean() + 0.01)
        w = w / w.max() * np.asarray(rows.weight)[near] * fade
        wanted = (w * error[near]).sum(), (w * (y[near] - float(asked.base[i]))).sum()
        np.testing.assert_allclose(said.mean[:, i], np.array(wanted) / (w.sum() + 0.5), rtol=1e-3, atol=1e-5)


def test_errors_of_times_when_the_networks_were_worse_count_less():
    expert, state, _ = remembered()
    half = jnp.where(jnp.arange(len(state.facts)) % 2 == 0, 100.0, 1.0)
    doubtful = state._replace(facts=state.facts.at[:, 2].multiply(half))
    sure = state._replace(facts=state.facts.at[::2, 3].set(0.01).at[:, 2].set(1.0))
    asked = batch(5)
    said = [expert.predict(one, asked).mean[0] for one in (doubtful, sure)]
    np.testing.assert_allclose(*said, rtol=2e-2, atol=1e-4)


def test_padding_is_never_kept_and_teaches_nothing():
    expert, state, _ = remembered()
    empty = batch(3, weight=np.zeros(3))
    same = expert.learn(None, state, empty, told(expert, state, empty))
    jax.tree.map(np.testing.assert_array_equal, same, state)


def test_what_is_kept_of_a_row_is_its_bounded_residual():
    expert, state, _ = remembered()
    wild = batch(3)
    context = told(expert, state, wild, jnp.array([1.5, -1.5, 0.01]))
    kept = np.asarray(expert.learn(None, state, wild, context).facts)[40:43]
    np.testing.assert_allclose(kept[:, 1], [1.5, -1.5, 0.01])
    np.testing.assert_allclose(kept[:, 0] - kept[:, 1], wild.base, rtol=1e-4, atol=1e-6)
    first = context._replace(scored=jnp.zeros(3))  # among the first rows, whose predictions mean nothing
    kept = np.asarray(expert.learn(None, state, wild, first).facts)[40:43]
    np.testing.assert_allclose(kept[:, :2], np.stack([wild.y, 0 * wild.y], 1))


def test_corrections_are_the_same_in_other_units():
    """Where all columns change alike, and distances with them, as long as no gradient has been seen."""
    expert, state, _ = remembered()
    shift, by, off = np.array([0.3, -1.0]), 0.5, 3.0
    units = Units(*(jnp.asarray(a, jnp.float32) for a in (shift, [2.0, 2.0], shift > 9, shift, by, off)))
    asked = batch(5)
    moved = asked._replace(z=(asked.z - shift[None].astype(np.float32)) / 2, base=by * asked.base + off)
    before, after = expert.predict(state, asked), expert.predict(expert.rescale(state, units), moved)
    np.testing.assert_allclose(after.mean, by * before.mean, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(after.variance, by**2 * before.variance, rtol=1e-3)


def test_weights_are_those_of_nonnegative_least_squares():
    for _ in range(5):
        A = RNG.normal(size=(30, 2)) @ [[1.0, 0.6], [0.0, 0.5]]
        b = RNG.normal(size=30) + A @ RNG.normal(size=2)
        found = nonnegative(jnp.asarray(A.T @ A, jnp.float32), jnp.asarray(A.T @ b, jnp.float32))
        np.testing.assert_allclose(found, nnls(A, b)[0], atol=1e-3)


@pytest.fixture(scope="module")
def rough():
    """Cells of two columns with levels of their own: easy for neighbours, hard for small networks."""
    rng = np.random.default_rng(2)
    X = rng.uniform(0, 6, size=(5000, 2)).astype(np.float32)
    level = rng.normal(size=(6, 6))
    y = 100 + 10 * (level[X[:, 0].astype(int), X[:, 1].astype(int)] + 0.1 * rng.normal(size=5000))
    return X, y.astype(np.float32)


@pytest.mark.slow
def test_memory_is_used_where_it_helps_and_the_mixture_stays_calibrated(rough):
    X, y = rough
    tracker = opvi.regressor(2, hidden=(), particles=5, warm_up=0, memory_rows=2000)
    state, _ = opvi.run(tracker, opvi.stream((X[:4000], y[:4000]), 20), 0)
    said = tracker.predict(state, X[4000:])
    known = np.column_stack([X, np.ones(5000)])
    line = known @ np.linalg.lstsq(known[:4000], y[:4000])[0]  # what the same model knows without memory
    left = float(np.sqrt(np.mean((line[4000:] - y[4000:]) ** 2)))
    assert float(opvi.metrics.rmse(said, jnp.asarray(y[4000:]))) < 0.75 * left
    assert float(stack(state).own.beta.sum()) > 0.5
    # 1,000 rows: a standard error of 0.0095.
    assert float(opvi.metrics.coverage(said, jnp.asarray(y[4000:]), 0.9)) == pytest.approx(0.9, abs=0.04)


@pytest.mark.slow
def test_memory_is_let_go_where_it_does_not_help():
    """A line with noise: neighbours know nothing that a linear model does not."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(3000, 2)).astype(np.float32)
    y = (X @ [1.0, -2.0] + rng.normal(size=3000)).astype(np.float32)
    tracker = opvi.regressor(2, hidden=(), particles=5, warm_up=0, memory_rows=2000)
    state, _ = opvi.run(tracker, opvi.stream((X, y), 20), 0)
    assert float(stack(state).own.beta.sum()) < 0.15


# --- classes ------------------------------------------------------------------------------------


def test_labels_of_the_nearest_vote_and_those_of_the_last_fade():
    x = RNG.normal(size=(30, 2)).astype(np.float32)
    y, weight = RNG.integers(3, size=30), RNG.uniform(0.5, 2, size=30).astype(np.float32)
    weight[7] = 0
    memory = classes.start(100, 2, 3, jnp.float32)
    memory = jax.jit(classes.learn, static_argnums=5)(memory, x, y, weight, np.zeros((30, 2), np.float32), 100)
    z = RNG.normal(size=(4, 2)).astype(np.float32)
    voted = jax.jit(lambda memory, z: classes.recall(memory, lambda rows: rows, z, 100, None))(memory, z)
    p = np.exp(np.asarray(voted))
    assert p.shape == (classes.MEMBERS, 4, 3)
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-4)
    x, y, weight = (np.delete(a, 7, 0) for a in (x, y, weight))
    named = np.eye(3)[y]
    count = weight.sum()
    shares = 1 / 3 + count / (count + 2) * (weight @ named / count - 1 / 3)
    for i in range(4):
        far = ((x - z[i]) ** 2).sum(1)
        near = np.argsort(far)[:8]
        w = 1 / (far[near] / far[near].mean() + 0.01)
        votes = (w / w.max() * weight[near]) @ named[near] + 0.3 * shares
        np.testing.assert_allclose(p[:2, i], np.tile(votes / votes.sum(), (2, 1)), rtol=2e-3)  # all of them are recent
    for member, half_life in ((2, 5.0), (3, 20.0)):
        w = weight * 0.5 ** ((count - np.cumsum(weight)) / half_life)
        keep = 0.5 ** (count / half_life)
        last = keep / 3 + (1 - keep) * (w @ named) / w.sum()
        np.testing.assert_allclose(p[member, 0], 0.95 * last + 0.05 * shares, rtol=1e-3)


@pytest.mark.slow
def test_a_classifier_recalls_and_refuses_bad_rows():
    rng = np.random.default_rng(4)
    X = rng.uniform(0, 4, size=(1600, 2)).astype(np.float32)
    y = (X.astype(int).sum(1) % 2).astype(np.int32)  # a chequerboard: chance is all that a linear model has
    tracker = opvi.classifier(2, 2, hidden=(), particles=4, memory_rows=1000)
    state, history = opvi.run(tracker, opvi.stream((X, y), 20), 0)
    assert history.info.log_predictive[-30:].mean() > -0.3  # chance is -0.69
    bad, info = tracker.step(jax.random.key(0), state, opvi.batch((np.full((20, 2), np.nan, np.float32), y[:20])))
    assert not info.finite
    jax.tree.map(np.testing.assert_array_equal, bad.memory, state.memory)


# --- where it is not ------------------------------------------------------------------------------


def test_fleets_have_none_unless_asked():
    def kept(made):
        return [expert for expert in made.experts if isinstance(expert, Neighbours)]

    made = opvi.regressor(3)
    assert kept(made)
    assert not kept(without_rows(made))
    assert not kept(without_rows(opvi.watched(made)).sampler)
    asked = opvi.regressor(3, memory_rows=50)
    assert without_rows(asked) == opvi.regressor(3, memory_rows=50, process=False)
    assert not kept(opvi.regressor(3, hidden=()))
