"""Weighted sums over rows that are stored, beside the plain sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opvi.filters._pool import TOGETHER, weighted_sum

BETA = jnp.float32(0.3)


def of_rows(v, rows):
    x, y = rows
    return -((y - jnp.tanh(x @ v)) ** 2) / 2


def stored(rows: int, of: int, empty: float):
    """Return rows with weights, of which only the first ones have any; the others hold a number of their own."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(of, 3)), rng.normal(size=of)
    w, c = rng.uniform(1, 2, of), rng.normal(size=of)
    x[rows:], y[rows:], w[rows:], c[rows:] = empty, empty, 0, 0
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, y, w, c))


@pytest.mark.parametrize("rows", [0, 5, TOGETHER + 1, 3 * TOGETHER - 10])
def test_value_gradient_and_curvature_are_those_of_the_plain_sum(rows):
    x, y, w, c = stored(rows, 3 * TOGETHER - 10, empty=0.0)
    v = jnp.array([0.2, -0.4, 1.0], jnp.float32)
    ours = weighted_sum(of_rows, (x, y), w, c)

    def plain(v, beta):
        return of_rows(v, (x, y)) @ (w + beta * c)

    for what in (lambda f: f, jax.grad, jax.hessian, lambda f: jax.grad(f, 1)):
        np.testing.assert_allclose(what(ours)(v, BETA), what(plain)(v, BETA), rtol=1e-4, atol=1e-4)
    alone = weighted_sum(of_rows, (x, y), w)
    np.testing.assert_allclose(alone(v), plain(v, 0.0), rtol=1e-5, atol=1e-5)


def test_rows_far_behind_the_last_that_counts_are_never_evaluated():
    x, y, w, c = stored(TOGETHER, 3 * TOGETHER, empty=np.nan)
    v = jnp.array([0.2, -0.4, 1.0], jnp.float32)
    known = weighted_sum(of_rows, (x[:TOGETHER], y[:TOGETHER]), w[:TOGETHER], c[:TOGETHER])
    ours = weighted_sum(of_rows, (x, y), w, c)
    np.testing.assert_allclose(jax.grad(ours)(v, BETA), jax.grad(known)(v, BETA), rtol=1e-5)
