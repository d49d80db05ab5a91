"""How rivals are judged: by the experiments' own measures, with and without opvi's calibration on top."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi import metrics
from opvi.tracking import _temperature as temperature
from opvi.tracking._mixing import _members as members
from opvi.tracking._mixing import _numbers as numbers
from paper import classification
from paper.regression import BATCH
from paper.results import Record


class Scaled(NamedTuple):
    """A split, standardised with the mean and sd of all its training rows."""

    X: np.ndarray
    y: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray  # in its own unit
    mean: float
    sd: float  # of y


class Forecast(NamedTuple):
    """Means of one or several models for each row, with the variances of those means, in standardised units."""

    mean: np.ndarray  # [n, rows]
    variance: np.ndarray  # [n, rows]
    own: np.ndarray | None = None  # [rows]: the whole predictive variance, where a rival states one


def scaled(X: np.ndarray, y: np.ndarray, X_test: np.ndarray, y_test: np.ndarray) -> Scaled:
    """Return the split scaled by all its training rows, an advantage for the rivals."""
    centre, spread = X.mean(0), X.std(0)
    spread = np.where(spread > 0, spread, 1)
    mean, sd = float(y.mean()), float(y.std())
    return Scaled((X - centre) / spread, (y - mean) / sd, (X_test - centre) / spread, y_test, mean, sd)


_PROGRAMS: dict[Any, Any] = {}


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """What a function returns, and the seconds of CPU that it took; it is compiled before, once for each shape."""
    leaves, structure = jax.tree.flatten(arguments)
    key = (function, structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
    if key not in _PROGRAMS:
        _PROGRAMS[key] = jax.jit(function).lower(*arguments).compile()
    program = _PROGRAMS[key]
    begun = time.process_time()
    result = jax.block_until_ready(program(*arguments))
    return result, time.process_time() - begun


# --- regression -------------------------------------------------------------------------------


class Head(NamedTuple):
    """opvi's weights of members and its head for numbers, as rivals have them on top."""

    members: members.Members
    numbers: numbers.NumbersState

    def describe(self, mean: Any, variance: Any, x: Any) -> numbers.Combined:
        """Return what members predict together."""
        return numbers.describe(self.numbers, *members.combine(self.members, mean, variance), x)


@jax.jit
def _learn_head(known: Head, batches: Any) -> Head:
    """Let the head learn from every batch's errors, in the order of the stream."""

    def one(known: Head, batch: Any) -> tuple[Head, None]:
        mean, variance, x, y, weight = batch
        combined = known.describe(mean, variance, x)
        scores = numbers.scored(known.numbers, combined, y)
        head = numbers.learn(known.numbers, combined, scores, x, y, weight)
        return Head(members.learn(known.members, y[None] - mean, weight), head), None

    return jax.lax.scan(one, known, batches)[0]


def judged(split: Scaled, before: Forecast, test: Forecast) -> Record:
    """Errors on the test rows; `before` was forecast row by row, or batch by batch, before learning."""
    start = Head(members.start(len(before.mean), jnp.float32), numbers.start(split.X.shape[1], jnp.float32))
    head = _learn_head(start, _batches(split, before))
    one = head.describe(*(jnp.asarray(a, jnp.float32) for a in (test.mean, test.variance, split.X_test)))
    parts = numbers.predictive(head.numbers, one)
    variances = {"variance": parts.variance * split.sd**2, "spread": parts.spread * split.sd**2}
    predictive = opvi.Predictive(parts._replace(mean=parts.mean * split.sd + split.mean, **variances))
    y = jnp.asarray(split.y_test, jnp.float32)
    record = {
        "rmse": float(metrics.rmse(predictive, y)),
        "lpd": float(predictive.log_density(y).mean()),
        "coverage_90": float(metrics.coverage(predictive, y, 0.9)),
        "crps": float(metrics.crps(predictive, y)),
        "rows": len(split.y),
    }
    if test.own is not None:
        residual = (split.y_test - split.mean) / split.sd - test.mean.mean(0)
        own = -0.5 * (residual**2 / test.own + np.log(2 * np.pi * test.own)) - np.log(split.sd)
        record["lpd_own"] = float(own.mean())
    return record


def _batches(split: Scaled, before: Forecast) -> Any:
    """Batches of 20 on a leading axis, the last one filled up with rows of weight 0."""
    rows = len(split.y)
    count = -(-rows // BATCH)

    def cut(a: np.ndarray) -> jax.Array:  # rows on the first axis
        padded = np.concatenate([a, np.zeros((count * BATCH - rows, *a.shape[1:]))])
        return jnp.asarray(padded.reshape(count, BATCH, *a.shape[1:]), jnp.float32)

    mean, variance = (cut(a.T).swapaxes(1, 2) for a in (before.mean, before.variance))
    return mean, variance, cut(split.X), cut(split.y), cut(np.ones(rows))


# --- classes ----------------------------------------------------------------------------------


@jax.jit
def _temper(p: jax.Array, y: jax.Array) -> tuple[temperature.Exponents, jax.Array]:
    """The temperature after the last batch, and each batch's probabilities under the one learnt before it."""

    def one(known: temperature.Exponents, batch: Any) -> tuple[temperature.Exponents, jax.Array]:
        log_p, y = jnp.log(batch[0])[None], batch[1]
        weight = jnp.ones(len(y), log_p.dtype)
        return temperature.update(known, log_p, y, weight), jnp.exp(temperature.pool(known, log_p))

    return jax.lax.scan(one, temperature.start(1, p.dtype), (p, y))


def judged_classes(p: np.ndarray, y: np.ndarray, test: tuple[np.ndarray, np.ndarray] | None = None) -> Record:
    """Return scores of the rival's own probabilities, and with a temperature learnt online."""
    batches = jnp.asarray(p, jnp.float32).reshape(-1, BATCH, p.shape[1])
    known, tempered = _temper(batches, jnp.asarray(y[: len(p)]).reshape(-1, BATCH))
    if test is None:
        plain, better, y = p, np.asarray(tempered).reshape(p.shape), y
    else:
        plain, y = test
        better = np.asarray(jnp.exp(temperature.pool(known, jnp.log(jnp.asarray(plain, jnp.float32))[None])))
    own, with_temperature = classification.scores(plain, y), classification.scores(better, y)
    return {
        **{name: with_temperature[name] for name in ("accuracy", "log_loss", "ece")},
        "log_loss_own": own["log_loss"],
        "ece_own": own["ece"],
        "rows": len(p),
    }
