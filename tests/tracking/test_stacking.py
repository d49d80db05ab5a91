"""The stacker: weights on the simplex, weights that are not negative, and what experts for far rows may say."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

import opvi
from opvi.tracking._mixing import _stacking as stacking
from opvi.tracking._mixing._layer import Lesson
from opvi.tracking._mixing._least_squares import simplex
from opvi.tracking._mixing._stacking import Stack
from opvi.tracking.experts import BaseExpert, Belief, Rows

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_weights_on_the_simplex_are_those_of_quadratic_programming(count):
    for _ in range(5):
        root = RNG.normal(size=(count, count + 2))
        E, b = root @ root.T / 5 + 0.1 * np.eye(count), RNG.normal(size=count) / 2
        found = minimize(
            lambda w, E=E, b=b: w @ E @ w - 2 * b @ w,
            np.full(count, 1 / count),
            bounds=[(0, 1)] * count,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        ).x
        w = jax.jit(simplex)(jnp.asarray(E[None], jnp.float32), jnp.asarray(b[None], jnp.float32))[0]
        np.testing.assert_allclose(w.sum(), 1, atol=1e-5)
        np.testing.assert_allclose(w, found, atol=0.02)


class Known(NamedTuple):
    rows: jax.Array


@dataclass(frozen=True)
class Fixed(BaseExpert):
    """Says y's column times a factor, plus noise that is in another column; with one or more corrections."""

    factor: float = 1.0
    variance: float = 0.0
    noisy: float = 0.0
    stage: ClassVar[int] = 0

    def init(self, key, columns, dtype):
        return Known(jnp.zeros((), dtype))

    def predict(self, state, rows):
        mean = self.factor * rows.z[:, 0] + self.noisy * rows.z[:, 1]
        return Belief(mean, jnp.full_like(mean, self.variance))

    def learn(self, key, state, rows, context):
        return Known(state.rows + rows.weight.sum())


@dataclass(frozen=True)
class FixedFar(Fixed):
    far: ClassVar[bool] = True


@dataclass(frozen=True)
class Corrects(Fixed):
    stage: ClassVar[int] = 1

    def predict(self, state, rows):
        found = super().predict(state, rows)
        return found._replace(mean=jnp.stack([found.mean * k for k in (1.0, 0.5, -1.0, 0.0, 2.0)]))


def rows_of(z, y, far=None):
    z, y = jnp.asarray(z, jnp.float32), jnp.asarray(y, jnp.float32)
    zero = jnp.zeros(len(y))
    return Rows(z, z, y, jnp.ones(len(y)), zero, zero if far is None else jnp.asarray(far, jnp.float32))


def taught(stack, batches):
    """The stack's state after batches, and its forecast of the last."""

    @jax.jit
    def one(state, rows):
        forecast = stack.predict(state, rows)
        outcome = stack.score(state, forecast, rows.y)
        lesson = Lesson(jnp.ones(len(rows.y)), rows.weight, jnp.array(False))
        return stack.learn(jax.random.key(0), state, rows, forecast, outcome, lesson)[0], forecast

    state = stack.init(jax.random.key(0), 2, jnp.float32)
    for batch in batches:
        state, forecast = one(state, batch)
    return state, forecast


def drawn(rounds, seed=0, noise=0.1):
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        z = rng.normal(size=(20, 2))
        yield rows_of(z, z[:, 0] + noise * rng.normal(size=20))


def test_the_better_expert_gets_the_weight_and_errors_may_cancel():
    _, forecast = taught(Stack((Fixed(), Fixed(0.0))), drawn(40))
    assert float(forecast.weights[0].min()) > 0.9
    _, forecast = taught(Stack((Fixed(noisy=1.0), Fixed(noisy=-1.0))), drawn(40))
    np.testing.assert_allclose(forecast.weights[0], 0.5, atol=0.1)


def test_an_expert_that_says_that_it_does_not_know_counts_less():
    _, forecast = taught(Stack((Fixed(noisy=0.1), Fixed(noisy=-0.1, variance=5.0))), drawn(40))
    assert float(forecast.weights[0].min()) > 0.8


def test_of_many_corrections_few_have_weights_and_only_those_that_helped():
    state, _ = taught(Stack((Fixed(0.0), Corrects(1.0))), drawn(60))
    beta = np.asarray(state.own.beta)
    assert (beta >= 0).all()
    assert beta[2] == beta[3] == 0
    np.testing.assert_allclose(beta @ [1, 0.5, -1, 0, 2], 1, atol=0.1)
    none, _ = taught(Stack((Fixed(), Corrects(noisy=1.0, factor=0.0))), drawn(60))
    assert not np.asarray(none.own.beta).any()


def far_rows(rounds, right, seed=1):
    rng = np.random.default_rng(seed)
    for batch in drawn(rounds, seed):
        far = np.zeros(20)
        far[0] = 1
        z = np.asarray(batch.z).copy()
        z[0] = [rng.uniform(8, 12), 0.0]
        y = np.asarray(batch.y).copy()
        y[0] = z[0, 0] if right else 0.1
        yield rows_of(z, y, far)


def test_experts_for_far_rows_are_heard_there_alone_and_only_if_they_were_right():
    """Networks stop at 2; the line goes on. Whether that is right, far rows must show."""
    stack = Stack((Clipped(), FixedFar()))
    _, forecast = taught(stack, far_rows(60, True))
    assert float(forecast.weights[1, 1:].max()) == 0
    np.testing.assert_allclose(forecast.base[0], forecast.mean[1, 0], rtol=0.15)
    state, forecast = taught(stack, far_rows(60, False))
    assert float(forecast.weights[1, 0]) < 0.3
    bound = stacking.LEAP * float(state.own.reach) + stacking.FIRST_LEAP * float(state.head.error) ** 0.5
    assert abs(float(forecast.mean[1, 0] - forecast.mean[0, 0])) < 1.2 * bound


@dataclass(frozen=True)
class Clipped(Fixed):
    def predict(self, state, rows):
        return Belief(jnp.clip(rows.z[:, 0], -2, 2), jnp.zeros_like(rows.z[:, 0]))


def test_experts_of_ones_own_join_the_usual_ones():
    made = opvi.regressor(2, experts=(*opvi.experts.usual(2, hidden=(4,), particles=2, memory_rows=0), Fixed()))
    assert "fixed" in made.about
    rng = np.random.default_rng(3)
    X = rng.normal(size=(100, 2))
    state, _ = opvi.run(made, opvi.stream((X, X[:, 0]), 20), 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
