r"""A low-rank filter, LoFi (Chang et al., 2023): the precision of the weights is $\mathrm{diag}(u) + W W^\top$.

A row joins W as $J^\top A$, $A A^\top = R^{-1}$; the smallest singular directions then go into the diagonal.
"""

from collections import namedtuple
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from arena import kalman
from arena.players import Linearised, Weights

HIDDEN, RANK = 50, 10
Low = namedtuple("Low", "w u W noise prior")


def _solve(u: jax.Array, W: jax.Array, B: jax.Array) -> jax.Array:
    """Return $(\\mathrm{diag}(u) + W W^\\top)^{-1} B$."""
    V = W / u[:, None]
    return B / u[:, None] - V @ jnp.linalg.solve(jnp.eye(W.shape[1]) + W.T @ V, V.T @ B)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _learn(h: Any, labels: bool, memory: float, state: Any, X: jax.Array, y: jax.Array) -> Any:
    def one(state: Any, row: Any) -> Any:
        w, u, W, noise, prior = state
        mean, J, R = kalman.observe(h, labels, w, row[0], noise)
        error, variance = row[1] - mean, (J @ _solve(u, W, J.T))[0, 0]
        u, W = memory * u + (1 - memory) * prior, jnp.sqrt(memory) * W
        wide = jnp.concatenate([W, J.T @ jnp.linalg.cholesky(jnp.linalg.inv(R))], 1)
        w = w + _solve(u, wide, J.T @ jnp.linalg.solve(R, error[:, None]))[:, 0]
        turned = wide @ jnp.linalg.eigh(wide.T @ wide)[1][:, ::-1]  # singular directions, the largest first
        kept, rest = turned[:, : W.shape[1]], turned[:, W.shape[1] :]
        noise = kalman.next_noise(labels or memory == 1, noise, error, variance)
        return Low(w, u + (rest**2).sum(1), kept, noise, prior), None

    return jax.lax.scan(one, state, (X, y))[0]


@partial(jax.jit, static_argnums=0)
def _say(f: Any, state: Any, X: jax.Array) -> Any:
    def one(x: jax.Array) -> Any:
        J = jax.jacrev(f)(state.w, x)
        return f(state.w, x), (J * _solve(state.u, state.W, J.T).T).sum(1)

    return jax.lax.map(one, X)


def _start(w: np.ndarray, prior: np.ndarray) -> Any:
    u, rank = jnp.asarray(1 / prior, jnp.float32), min(RANK, len(w) - 1)
    return Low(jnp.asarray(w, jnp.float32), u, jnp.zeros((len(w), rank)), jnp.float32(kalman.FIRST_NOISE), u)


def _spread(state: Any) -> np.ndarray:
    return np.asarray(_solve(state.u, state.W, jnp.eye(len(state.w))), float)


regression = classes = partial(Linearised, _learn, _say, _start, HIDDEN)
posterior = partial(Weights, _learn, _start, _spread)
