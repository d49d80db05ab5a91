"""Mixing trackers by their prequential score, and calibrating what they say."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi._steps import StepInfo
from opvi.tracking import _bank as bank
from opvi.tracking import _temperature as temperature

KEY = jax.random.key(0)
update, sharpened, pool = jax.jit(bank.update), jax.jit(temperature.update), jax.jit(temperature.pool)


def densities(seed, rounds, members, rows=20):
    """Log densities of members in [.1, 1]: no ratio reaches the cap."""
    return jnp.log(jax.random.uniform(jax.random.key(seed), (rounds, members, rows), minval=0.1))


def weights_over(log_density, **settings):
    """Log weights before every round, and after the last."""

    def body(log_w, log_d):
        return bank.update(log_w, log_d, jnp.ones(log_d.shape[1]), **settings), log_w

    last, before = jax.lax.scan(body, bank.start(log_density.shape[1], jnp.float32), log_density)
    return np.asarray(before), np.asarray(last)


def test_regret_against_the_best_member_is_bounded():
    """Exponentiated gradient: the score lags the best member's by at most ln K / η + η/2 Σ max g²."""
    log_d, rate = densities(0, 400, 5), 0.05
    log_d = log_d.at[:, 3].add(0.3)  # the best one
    before, _ = weights_over(log_d, rate=rate, share=0.0)
    d = np.exp(np.asarray(log_d, float))
    w = np.exp(before.astype(float))
    mixture = np.einsum("tk,tkb->tb", w, d)
    gradient = (d / mixture[:, None]).mean(2)
    regret = np.log(d[:, 3]).mean(1).sum() - np.log(mixture).mean(1).sum()
    bound = math.log(5) / rate + rate / 2 * (gradient.max(1) ** 2).sum()
    assert regret <= bound
    assert regret < 0.6 * (np.log(d[:, 3]).mean(1).sum() - np.log(d.mean(1)).mean(1).sum())  # better than an even mix


def test_the_share_lets_weights_follow_a_switch():
    log_d = densities(1, 600, 3)
    log_d = log_d.at[:300, 0].add(1.0).at[300:, 2].add(1.0)
    settings = {"rate": 0.5}
    with_share, last = weights_over(log_d, share=0.002, **settings)
    without, _ = weights_over(log_d, share=0.0, **settings)
    assert np.exp(with_share[299])[0] > 0.9
    assert np.exp(last)[2] > 0.9
    # after the switch the one without has to climb back from e^-(300 rounds of losses)
    assert np.exp(with_share[330])[2] > np.exp(without[330])[2] + 0.3


def test_weights_are_probabilities_and_padding_counts_for_nothing():
    log_d = densities(2, 1, 4)[0]
    log_w = jax.nn.log_softmax(jnp.arange(4.0))
    weight = jnp.where(jnp.arange(20) < 13, 1.0, 0.0)
    padded = update(log_w, log_d, weight)
    np.testing.assert_allclose(padded, update(log_w, log_d[:, :13], jnp.ones(13)), rtol=1e-5)
    assert float(jnp.exp(padded).sum()) == pytest.approx(1, abs=1e-6)
    nothing = update(log_w, log_d, jnp.zeros(20))
    np.testing.assert_allclose(nothing, log_w, rtol=1e-6)
    sure = update(
        log_w, np.where(np.arange(4)[:, None] == 1, 0.0, -np.inf) * np.ones((1, 20), np.float32), jnp.ones(20)
    )
    assert bool(jnp.isfinite(sure).all())


class Counted(NamedTuple):
    particles: jax.Array
    round: jax.Array
    rows: jax.Array


@dataclass(frozen=True)
class Constant:
    """A tracker that says the same whatever it sees."""

    logits: tuple[float, ...]
    about: str = "constant"

    def init(self, key, particles=None):
        zero = jnp.zeros((), jnp.int32)
        return Counted(jnp.asarray(self.logits, jnp.float32)[None], zero, zero)

    def step(self, key, state, batch):
        rows = state.rows + (batch.weight > 0).sum(dtype=jnp.int32)
        info = StepInfo(rows, jnp.zeros(()), jnp.zeros(()), jnp.array(True))
        return Counted(state.particles, state.round + 1, rows), info

    def predict(self, state, x):
        said = jnp.broadcast_to(state.particles[:, None], (1, len(x), len(self.logits)))
        return opvi.predictive.Predictive(opvi.Categorical(said))


def constant(logits):
    return Constant(tuple(float(value) for value in logits))


def test_a_bank_is_a_tracker():
    """Of two constant members the one that is right gets the weight, and the mixture its predictions."""
    tracker = bank.bank([constant([2.0, 0.0]), constant([0.0, 2.0])])
    X, y = np.zeros((400, 1), np.float32), np.ones(400, int)
    stream = opvi.stream((X, y), 20)
    whole, history = opvi.run(tracker, stream, KEY)
    half, _ = opvi.run(tracker, stream, KEY, rounds=7)
    resumed, _ = opvi.run(tracker, stream.after(half.round), KEY, state=half)
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, resumed))
    assert int(whole.rows) == 400
    assert history.info.weights[0, 1] == pytest.approx(0.5)
    assert history.info.weights[-1, 1] > 0.95
    assert history.info.log_predictive[-1] > history.info.log_predictive[0]
    predictive = tracker.predict(whole, X[:3])
    assert predictive.probabilities().shape == (3, 2)
    w, right = float(jnp.exp(whole.log_weights[1])), 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(predictive.probabilities()[:, 1], w * right + (1 - w) * (1 - right), rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bank.bank([]), "`members` is empty"),
        (lambda: bank.bank([constant([0.0, 1.0])], share=1.0), "0 ≤ share < 1"),
        (lambda: bank.bank([constant([0.0, 1.0])], rate=-1.0), "rate ≥ 0"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- temperature ------------------------------------------------------------------------------


def learnt_exponents(log_p, y):
    """Exponents after a stream of log probabilities `[T, K, B, C]` and labels `[T, B]`."""

    def body(exponents, batch):
        return temperature.update(exponents, *batch, jnp.ones(y.shape[1])), None

    return jax.lax.scan(body, temperature.start(log_p.shape[1], jnp.float32), (log_p, y))[0]


def test_the_temperature_of_overconfident_probabilities_is_found():
    """Logits twice too large: temperature 2. Its error is the filter's own: data and wandering, 4 sds."""
    logits = jax.random.normal(KEY, (400, 20, 4))
    y = jax.random.categorical(jax.random.key(1), logits)
    exponents = learnt_exponents(jax.nn.log_softmax(2 * logits)[:, None], y)
    sd = float(jnp.sqrt(exponents.covariance[0, 0]))
    assert sd < 0.03
    # the smoothing flattens logits of ±4 a little, which costs no more than another .02
    assert float(exponents.value[0]) == pytest.approx(0.5, abs=4 * sd + 0.02)
    assert float(temperature.temperature(exponents)) == pytest.approx(2, abs=0.4)
    before, after = (
        jnp.take_along_axis(log_p, y[..., None], -1).mean()
        for log_p in (
            jax.nn.log_softmax(2 * logits),
            jax.vmap(lambda p: temperature.pool(exponents, p))(jax.nn.log_softmax(2 * logits)[:, None]),
        )
    )
    assert float(after) > float(before)


def test_exponents_find_the_member_that_knows():
    """The second member tells the truth, the first nothing."""
    logits = 2 * jax.random.normal(KEY, (300, 20, 3))
    y = jax.random.categorical(jax.random.key(1), logits)
    noise = jax.nn.log_softmax(jax.random.normal(jax.random.key(2), logits.shape))
    value = np.asarray(learnt_exponents(jnp.stack([noise, jax.nn.log_softmax(logits)], 1), y).value)
    assert abs(value[0]) < 0.15
    assert value[1] == pytest.approx(1, abs=0.15)


def test_exponents_of_members_that_agree_stay_bounded():
    log_p = jax.nn.log_softmax(jax.random.normal(KEY, (20, 3)))
    many = jnp.broadcast_to(log_p, (300, 2, 20, 3))
    y = jax.random.categorical(jax.random.key(1), jnp.broadcast_to(log_p, (300, 20, 3)))

    def body(exponents, batch):  # each round stands for 10,000 rows' worth of wandering
        wandered = exponents._replace(covariance=exponents.covariance + 5e-3 * jnp.eye(2))
        return temperature.update(wandered, *batch, jnp.ones(20)), None

    exponents, _ = jax.lax.scan(body, temperature.start(2, jnp.float32), (many, y))
    assert float(jnp.diagonal(exponents.covariance).max()) <= 0.1 + 1e-5
    assert float(exponents.value.sum()) == pytest.approx(1, abs=0.25)


def test_exponents_start_as_the_first_member_and_survive_bad_numbers():
    log_p = jax.nn.log_softmax(jax.random.normal(KEY, (3, 5, 4)))
    exponents = temperature.start(3, jnp.float32)
    # but for the smoothing, which is .005 in all
    np.testing.assert_allclose(jnp.exp(pool(exponents, log_p)), jnp.exp(log_p[0]), atol=0.005)
    spoilt = sharpened(exponents, log_p.at[0, 0, 0].set(jnp.nan), jnp.zeros(5, int), jnp.ones(5))
    assert jax.tree.all(jax.tree.map(np.array_equal, spoilt, exponents))
    sure = jnp.log(jnp.eye(4)[None, jnp.arange(5) % 4] * jnp.ones((3, 1, 1)))  # log 0 = -inf
    learnt = sharpened(exponents, sure, jnp.array([1, 2, 3, 0, 1]), jnp.ones(5))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in learnt)
