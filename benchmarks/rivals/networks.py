r"""Rivals in JAX: an extended Kalman filter of a network, a linear one of classes, and deep ensembles with Adam."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import opvi
from benchmarks.rivals.scoring import Forecast, Scaled, timed
from paper.classification import BATCH, Stream

HIDDEN = 50  # of a regression, as in `opvi.regressor`
CLASS_HIDDEN = 100  # of a classification, as in `opvi.classifier`
LARGEST_VARIANCE = 4.0  # times the prior's: what is never seen does not grow without bound
DECAY_ROUNDS = 50  # a step that decays is whole for so many batches, then falls as 1/√t
CLIP = 10.0

# --- the extended Kalman filter ----------------------------------------------------------------


def prior_variances(features: int, scale: float) -> np.ndarray:
    """Return prior variances of weights into hidden units, their biases, weights out of them, and the last bias."""
    inner = np.full(HIDDEN * (features + 1), scale / (features + 1))
    return np.concatenate([inner, np.full(HIDDEN, scale / (HIDDEN + 1)), np.ones(1)])


def network(w: jax.Array, x: jax.Array) -> jax.Array:
    """A tanh network with one output: all its weights in a vector, and one row."""
    features = len(x)
    W, rest = w[: HIDDEN * features].reshape(HIDDEN, features), w[HIDDEN * features :]
    return jnp.tanh(W @ x + rest[:HIDDEN]) @ rest[HIDDEN:-1] + rest[-1]


def kalman(
    f: Callable[[jax.Array, jax.Array], jax.Array],
    w: jax.Array,
    prior: jax.Array,
    X: jax.Array,
    y: jax.Array,
    noise: Any,
    wandering: Any,
    memory: Any,
) -> Any:
    r"""Weights and covariance after all rows, and each row's mean and variance before it was learnt.

    $$k = P J / (J^\top P J + r), \quad w \gets w + k\,(y - f(w, x)), \quad P \gets (P - k J^\top P)/\lambda + q P_0$$

    Args:
        f: the model, of weights and one row.
        w: where it starts.
        prior: the diagonal of $P_0$.
        X: rows, one after the other.
        y: their values.
        noise: r.
        wandering: q; 0 for weights that stand still.
        memory: λ; 1 never forgets.
    """

    def one(carry: Any, row: Any) -> Any:
        w, P = carry
        mean, J = jax.value_and_grad(f)(w, row[0])
        u = P @ J
        variance = J @ u
        total = variance + noise
        P = (P - jnp.outer(u, u) / total) / memory + jnp.diag(wandering * prior)
        shrink = jnp.sqrt(jnp.minimum(1, LARGEST_VARIANCE * prior / jnp.diagonal(P)))
        return (w + u * ((row[1] - mean) / total), P * jnp.outer(shrink, shrink)), (mean, variance)

    return jax.lax.scan(one, (w, jnp.diag(prior)), (X, y))


_FILTER = partial(kalman, network)


def filtered(split: Scaled, setting: dict[str, float], seed: int) -> tuple[Forecast, Forecast, float]:
    """One pass of the filter, row by row, in double precision."""
    with jax.enable_x64(True):
        prior = prior_variances(split.X.shape[1], setting["prior"])
        w = np.random.default_rng(seed).standard_normal(len(prior)) * np.sqrt(prior)
        w[-1] = 0
        ((w, P), before), seconds = timed(
            _FILTER,
            *(jnp.asarray(a, jnp.float64) for a in (w, prior, split.X, split.y)),
            *(jnp.asarray(setting[name], jnp.float64) for name in ("noise", "wandering", "memory")),
        )

        def at(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            mean, J = jax.value_and_grad(network)(w, x)
            return mean, J @ P @ J

        test = jax.lax.map(at, jnp.asarray(split.X_test, jnp.float64))
        (m, v), (mean, variance) = (tuple(np.asarray(a)[None] for a in pair) for pair in (before, test))
    return Forecast(m, v), Forecast(mean, variance, variance[0] + setting["noise"]), seconds


# --- deep ensembles -----------------------------------------------------------------------------


def _start(key: jax.Array, nets: int, sizes: tuple[int, ...]) -> Any:
    """Weights and biases of every layer, nets first."""
    keys = jax.random.split(key, len(sizes) - 1)
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [
        (jax.random.normal(k, (nets, into, out)) * jnp.sqrt(2 / into), jnp.zeros((nets, 1, out)))
        for k, into, out in pairs
    ]


def _outputs(activation: Callable[[jax.Array], jax.Array], params: Any, x: jax.Array) -> jax.Array:
    """Return the outputs, `[nets, rows, out]`."""
    (W, b), (V, c) = params
    return activation(jnp.einsum("bf,nfh->nbh", x, W) + b) @ V + c


def adam_pass(
    outputs: Callable[[Any, jax.Array], jax.Array],
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    repeats: int,
    params: Any,
    batches: Any,
    rate: Any,
    decays: Any,
) -> Any:
    """The nets after all batches, and their outputs for each batch before it was learnt.

    Args:
        outputs: a function of nets and rows.
        loss: a function of outputs `[nets, B, out]` and y, one number per net and row.
        repeats: steps on each batch.
        params: the nets at the start.
        batches: X, y and weights of rows, batches first.
        rate: the step.
        decays: 1 for a step that falls as 1/√t after the first batches, 0 for a constant one.
    """
    adam = optax.scale_by_adam()

    def one(carry: Any, batch: Any) -> Any:
        params, state, t = carry
        x, y, weight = batch
        before = outputs(params, x)
        step = rate * jnp.where(decays > 0, jnp.sqrt(jnp.minimum(1, DECAY_ROUNDS / t)), 1)

        def cost(params: Any) -> jax.Array:
            return (loss(outputs(params, x), y) * weight[None]).sum() / weight.sum()

        def again(_: Any, carry: Any) -> Any:
            params, state = carry
            move, state = adam.update(jax.grad(cost)(params), state)
            return jax.tree.map(lambda p, m: p - step * m, params, move), state

        params, state = jax.lax.fori_loop(0, repeats, again, (params, state))
        return (params, state, t + 1), before

    (params, _, _), before = jax.lax.scan(one, (params, adam.init(params), jnp.ones(())), batches)
    return params, before


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {"tanh": jnp.tanh, "relu": jax.nn.relu}


@cache
def _regression_pass(activation: str, repeats: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Outputs of the nets, and their pass over the batches; the same objects each time, so that programs are kept."""
    outputs = partial(_outputs, ACTIVATIONS[activation])
    return outputs, partial(adam_pass, outputs, lambda f, y: (f[:, :, 0] - y[None]) ** 2, repeats)


@cache
def _class_pass(repeats: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    outputs = partial(_outputs, jax.nn.relu)

    def run(params: Any, batches: Any, rate: Any, decays: Any) -> Any:
        params, before = adam_pass(outputs, _cross_entropy, repeats, params, batches, rate, decays)
        return params, jax.nn.softmax(before).mean(1)

    return outputs, run


def ensemble(split: Scaled, setting: dict[str, Any], seed: int, nets: int) -> tuple[Forecast, Forecast, float]:
    """Networks with squared loss, each from its own start, a few steps of Adam on every batch of 20."""
    rows, features = split.X.shape
    missing = -rows % BATCH

    def cut(a: np.ndarray) -> jax.Array:
        padded = np.concatenate([a, np.zeros((missing, *a.shape[1:]))])
        return jnp.asarray(padded.reshape(-1, BATCH, *a.shape[1:]), jnp.float32)

    outputs, learn = _regression_pass(setting["activation"], setting["repeats"])
    start = _start(jax.random.key(seed), nets, (features, HIDDEN, 1))
    batches = cut(split.X), cut(split.y), cut(np.ones(rows))
    rate, decays = jnp.float32(setting["rate"]), jnp.float32(setting["decays"])
    (params, before), seconds = timed(learn, start, batches, rate, decays)
    mean = np.asarray(before)[:, :, :, 0].transpose(1, 0, 2).reshape(nets, -1)[:, :rows]
    test = np.asarray(outputs(params, jnp.asarray(split.X_test, jnp.float32)))[:, :, 0]
    return Forecast(mean, np.zeros_like(mean)), Forecast(test, np.zeros_like(test)), seconds


def class_ensemble(stream: Stream, setting: dict[str, Any], seed: int, nets: int) -> tuple[Any, Any, float]:
    """Networks with cross entropy: the mean probabilities of each batch before learning, and of the test rows."""
    X, X_test = standardised(stream)
    outputs, learn = _class_pass(setting["repeats"])
    start = _start(jax.random.key(seed), nets, (X.shape[1], CLASS_HIDDEN, stream.classes))
    y = stream.y[: len(X)].astype(np.int32).reshape(-1, BATCH)
    batches = X.reshape(-1, BATCH, X.shape[1]), y, np.ones(y.shape, np.float32)
    rate, decays = jnp.float32(setting["rate"]), jnp.float32(setting["decays"])
    (params, p), seconds = timed(learn, start, jax.tree.map(jnp.asarray, batches), rate, decays)
    test = None if X_test is None else np.asarray(jax.nn.softmax(outputs(params, jnp.asarray(X_test))).mean(0))
    return np.asarray(p).reshape(len(X), -1), test, seconds


def _cross_entropy(logits: jax.Array, y: jax.Array) -> jax.Array:
    chosen = jnp.broadcast_to(y[None, :, None], (*logits.shape[:2], 1))
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, 2)[:, :, 0]


# --- classes, linear -----------------------------------------------------------------------------


def linear_filter(stream: Stream, setting: dict[str, float], seed: int) -> tuple[Any, Any, float]:
    """Softmax regression by `opvi.linear_ekf`, alone: the classical method, without the networks and the mixture."""
    X, _ = standardised(stream)
    sampler = opvi.linear_ekf(X.shape[1], stream.classes, **setting)
    key = jax.random.key(seed)

    def run(state: Any, X: jax.Array, y: jax.Array) -> jax.Array:
        def one(state: Any, rows: Any) -> Any:
            p = sampler.predict(state, rows[0]).probabilities()
            return sampler.step(key, state, opvi.Batch(rows, jnp.ones(BATCH, p.dtype)))[0], p

        return jax.lax.scan(one, state, (X, y))[1]

    y = stream.y[: len(X)].astype(np.int32).reshape(-1, BATCH)
    batches = jnp.asarray(X.reshape(-1, BATCH, X.shape[1])), jnp.asarray(y)
    p, seconds = timed(run, sampler.init(key), *batches)
    return np.asarray(p).reshape(len(X), -1), None, seconds


def standardised(stream: Stream) -> tuple[np.ndarray, np.ndarray | None]:
    """Full batches, each in the mean and sd of the inputs up to and with it (labels are not looked at); test rows."""
    count = len(stream.y) // BATCH
    raw = stream.X[: count * BATCH].reshape(count, BATCH, -1).astype(np.float64)
    origin = raw[0, 0]
    shifted = raw - origin
    rows = BATCH * np.arange(1, count + 1)[:, None]
    mean = np.cumsum(shifted.sum(1), 0) / rows
    variance = np.maximum(np.cumsum((shifted**2).sum(1), 0) / rows - mean**2, 0)
    sd = np.where(variance > 1e-12, np.sqrt(variance), np.inf)  # what has never changed is fed as 0
    X = np.clip((shifted - mean[:, None]) / sd[:, None], -CLIP, CLIP).astype(np.float32)
    test = None
    if stream.test is not None:
        test = np.clip((stream.test[0] - origin - mean[-1]) / sd[-1], -CLIP, CLIP).astype(np.float32)
    return X.reshape(count * BATCH, -1), test
