r"""Parts of the filters: a small network, the likelihood of an observation, and probabilities from logits."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MEMORY = 0.999  # of the past, per row
FIRST_NOISE, NOISE_RATE = 0.25, 0.01  # of numbers in standard units, and how fast it is learnt
SOFT = 1e-3  # added to the variance of labels, which is singular


def layout(columns: int, hidden: int, outputs: int) -> np.ndarray:
    """Return the prior variances of a network's weights: 1/(inputs + 1), and 1 for the last biases."""
    inner = np.full(hidden * (columns + 1), 1 / (columns + 1))
    return np.concatenate([inner, np.full(hidden * outputs, 1 / (hidden + 1)), np.ones(outputs)])


def outputs_of(shape: tuple[int, int, int], w: jax.Array, x: jax.Array) -> jax.Array:
    """Return the outputs of a tanh network for one row; `shape` is columns, hidden units, outputs."""
    columns, hidden, outputs = shape
    W, rest = w[: hidden * columns].reshape(hidden, columns), w[hidden * columns :]
    V, c = rest[hidden:-outputs].reshape(outputs, hidden), rest[-outputs:]
    return V @ jnp.tanh(W @ x + rest[:hidden]) + c


def _linear(w: jax.Array, x: jax.Array) -> jax.Array:
    return (x @ w)[None]


def _sigmoid(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(x @ w)[None]


def _softmax(f: Callable[..., jax.Array], w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.nn.softmax(f(w, x))


LINKS: dict[str, Callable[..., jax.Array]] = {"normal": _linear, "logistic": _sigmoid}


@cache
def network(columns: int, hidden: int, classes: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the outputs of a network, and the expectation of y: the output itself, or probabilities."""
    f = partial(outputs_of, (columns, hidden, max(classes, 1)))
    return f, (partial(_softmax, f) if classes else f)


def observe(h: Callable[..., jax.Array], labels: bool, w: jax.Array, x: jax.Array, noise: jax.Array) -> Any:
    """Return the mean of y, its Jacobian by the weights, and its variance given the weights."""
    mean, J = h(w, x), jax.jacrev(h)(w, x)
    if not labels:
        return mean, J, noise[None, None]
    spread = jnp.diag(mean) - jnp.outer(mean, mean) if len(mean) > 1 else (mean * (1 - mean))[:, None]
    return mean, J, spread + SOFT * jnp.eye(len(mean))


def next_noise(known: bool, noise: jax.Array, error: jax.Array, variance: jax.Array) -> jax.Array:
    """Return the noise after an error: the part that the weights' variance does not explain, at least a twentieth."""
    if known:
        return noise
    square = jnp.minimum(error[0] ** 2, 25.0)
    return (1 - NOISE_RATE) * noise + NOISE_RATE * jnp.maximum(square - variance, square / 20)


def probabilities(logits: jax.Array, variance: jax.Array) -> jax.Array:
    """Return class probabilities, flatter where the logits are uncertain."""
    return jax.nn.softmax(logits / jnp.sqrt(1 + jnp.pi / 8 * variance))
