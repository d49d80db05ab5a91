r"""An extended Kalman filter with the full covariance, row by row: a network of 20 units, or a posterior's weights.

$$S = J P J^\top + R, \quad K = P J^\top S^{-1}, \quad w \gets w + K (y - h(w, x)), \quad P \gets (P - K J P)/\lambda$$
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from arena import kalman
from arena.players import Linearised, Weights

HIDDEN = 20


class Full(NamedTuple):
    """Weights, their covariance, and the observation noise."""

    w: jax.Array
    P: jax.Array
    noise: jax.Array


@partial(jax.jit, static_argnums=(0, 1, 2))
def _learn(h: Any, labels: bool, memory: float, state: Any, X: jax.Array, y: jax.Array) -> Any:
    def one(state: Any, row: Any) -> Any:
        w, P, noise = state
        mean, J, R = kalman.observe(h, labels, w, row[0], noise)
        U = P @ J.T
        S, error = J @ U + R, row[1] - mean
        K = jnp.linalg.solve(S, U.T).T
        P = (P - K @ U.T) / memory
        noise = kalman.next_noise(labels or memory == 1, noise, error, (J @ U)[0, 0])
        return Full(w + K @ error, (P + P.T) / 2, noise), None

    return jax.lax.scan(one, state, (X, y))[0]


@partial(jax.jit, static_argnums=0)
def _say(f: Any, state: Any, X: jax.Array) -> Any:
    """Return outputs and their variances."""

    def one(x: jax.Array) -> Any:
        J = jax.jacrev(f)(state.w, x)
        return f(state.w, x), ((J @ state.P) * J).sum(1)

    return jax.lax.map(one, X)


def _start(w: np.ndarray, prior: np.ndarray) -> Any:
    return Full(jnp.asarray(w, jnp.float32), jnp.diag(jnp.asarray(prior, jnp.float32)), jnp.float32(kalman.FIRST_NOISE))


def _spread(state: Any) -> np.ndarray:
    return np.asarray(state.P, float)


regression = classes = partial(Linearised, _learn, _say, _start, HIDDEN)
posterior = partial(Weights, _learn, _start, _spread)
