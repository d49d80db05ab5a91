"""The one Kalman update against dense matrices in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opvi.filters import Covariance, absorb, gain, move_by_residuals, move_by_score, times
from opvi.filters import _kalman as kalman

N, R, D = 3, 4, 5
LARGEST = 50.0


def dense(matrices):
    """Every particle's covariance as one matrix, its blocks along the diagonal."""
    n, blocks, d, _ = matrices.shape
    out = np.zeros((n, blocks * d, blocks * d))
    for k in range(blocks):
        out[:, k * d : (k + 1) * d, k * d : (k + 1) * d] = matrices[:, k]
    return out


def flat(rows):
    """Rows [n, K, R, D] as [n, R, K·D]."""
    return np.moveaxis(rows, 1, 2).reshape(len(rows), rows.shape[2], -1)


def problem(blocks):
    rng = np.random.default_rng(blocks)
    roots = rng.normal(size=(N, blocks, D, 2 * D))
    return (
        roots @ np.swapaxes(roots, 2, 3) / D,
        rng.normal(size=(N, blocks, R, D)),
        rng.normal(size=(N, blocks, D)),
        rng,
    )


def small(array):
    return jnp.asarray(array, jnp.float32)


def updated(C, A, gamma=1.0, **how):
    past, A = Covariance(small(C), jnp.zeros((), jnp.int32)), small(A)
    new = gain(A, times(A, past))
    if "score" in how:
        g = small(how["score"])
        move = move_by_score(new, g, times(g[:, :, None], past)[:, :, 0])
    else:
        move = move_by_residuals(new, small(how["residual"]), how["limit"])
    return absorb(past, new, move, small(gamma), jnp.full(C.shape[:3], LARGEST), how.get("trusted"))


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_score_moves_particles_by_the_new_covariance(blocks):
    """$C' = (C^{-1} + A^T A)^{-1}$ within each block, and a move of $C' g$ where there is one block."""
    C, A, g, _ = problem(blocks)
    done = jax.jit(lambda: updated(C, A, score=g))()
    full, rows = dense(C), flat(A)
    S = rows @ full @ np.swapaxes(rows, 1, 2) + np.eye(R)
    after = full - full @ np.swapaxes(rows, 1, 2) @ np.linalg.solve(S, rows @ full)
    move = np.einsum("nde,ne->nd", after, g.reshape(N, -1))
    np.testing.assert_allclose(np.asarray(done.move).reshape(N, -1), move, rtol=1e-3, atol=1e-4)
    found = dense(np.asarray(done.past.matrices))
    np.testing.assert_allclose(found, np.where(full != 0, after, 0), rtol=1e-3, atol=1e-4)
    if blocks == 1:
        np.testing.assert_allclose(after, np.linalg.inv(np.linalg.inv(full) + np.swapaxes(rows, 1, 2) @ rows))
    assert done.good.all()


def test_residuals_move_particles_as_a_kalman_filter_and_an_outlier_by_its_limit_alone():
    C, A, _, rng = problem(2)
    residual, limit = rng.normal(size=(N, R)), 3.0
    residual[:, 1] = [1e4, -1e4, 0.1]
    done = updated(C, A, residual=residual, limit=limit)
    full, rows = dense(C), flat(A)
    S = rows @ full @ np.swapaxes(rows, 1, 2) + np.eye(R)
    largest = limit * np.sqrt(np.einsum("nrr->nr", S))
    assert (np.abs(np.delete(residual, 1, 1)) < np.delete(largest, 1, 1)).all()
    gained = full @ np.swapaxes(rows, 1, 2) @ np.linalg.inv(S)
    expected = np.einsum("ndr,nr->nd", gained, residual.clip(-largest, largest))
    np.testing.assert_allclose(np.asarray(done.move).reshape(N, -1), expected, rtol=1e-3, atol=1e-4)


def test_forgetting_divides_each_particles_covariance_once():
    C, A, g, _ = problem(1)
    gamma = np.array([1.0, 0.9, 0.5])
    kept, forgot = (np.asarray(updated(C, A, gamma, score=g).past.matrices) for gamma in (np.ones(N), gamma))
    off = ~np.eye(D, dtype=bool)  # the diagonal is loosened a little on top
    np.testing.assert_allclose(forgot[:, 0, off], kept[:, 0, off] / gamma[:, None], rtol=1e-5)


def test_bad_particles_sit_out_alone_and_forget_their_correlations_unless_the_rows_are_bad():
    C, A, g, _ = problem(1)
    g[0, 0, 2] = np.nan
    C[1, 0] = -C[1, 0] + 2 * np.diag(np.diag(C[1, 0]))  # variances as before, and some direction's negative
    values, vectors = np.linalg.eigh(C[1, 0])
    assert values[0] < 0
    A[1, 0] = 0
    A[1, 0, 0] = np.sqrt(-0.7 / values[0]) * vectors[:, 0]  # which a row looks at: S = 0.3, and all is finite
    before = np.asarray(small(C))
    done = updated(C, A, 0.9, score=g)
    assert done.good.tolist() == [False, False, True]
    assert not np.asarray(done.move[:2]).any()
    for i in range(2):
        np.testing.assert_allclose(done.past.matrices[i, 0], np.diag(np.diag(before[i, 0])), rtol=1e-6)
    assert np.abs(done.move[2]).min() > 0
    refused = updated(C, A, 0.9, score=g, trusted=jnp.array([False, True, False]))
    assert refused.good.tolist() == [False, False, False]
    np.testing.assert_allclose(np.asarray(refused.past.matrices)[[0, 2]], before[[0, 2]], rtol=1e-6)
    np.testing.assert_allclose(refused.past.matrices[1, 0], np.diag(np.diag(before[1, 0])), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 5])
def test_rows_in_turn_are_all_rows_at_once(size):
    """$C' = (C^{-1} + A^T A)^{-1}$ and a move of $C' A^T e$, by hand, however few rows are taken at a time."""
    rng = np.random.default_rng(0)
    root, A, e = rng.normal(size=(2, 6, 6)), rng.normal(size=(2, 10, 6)), rng.normal(size=(2, 10))
    C = root @ root.transpose(0, 2, 1) / 6 + 0.1 * np.eye(6)
    rows = [jnp.asarray(part, jnp.float32)[:, None] for part in (A, A @ C)]
    look = kalman.Look(*rows, jnp.asarray(e, jnp.float32))

    def again(p, move):  # asked for its shapes, and never taken
        return jax.tree.map(lambda a, axis: jax.lax.slice_in_dim(a, 0, size, axis=axis) + 7, look, kalman.Look(2, 2, 1))

    taken, move = kalman.in_turn(look, again, *jnp.array([False, True]), 100.0, size)
    after = np.linalg.inv(np.linalg.inv(C) + A.transpose(0, 2, 1) @ A)
    Z = np.asarray(taken.rows[:, 0], float)
    np.testing.assert_allclose(C - Z.transpose(0, 2, 1) @ Z, after, atol=2e-4)
    np.testing.assert_allclose(move[:, 0], (after @ A.transpose(0, 2, 1) @ e[..., None])[..., 0], atol=2e-3)


@pytest.mark.parametrize("size", [1, 2])
def test_padding_takes_no_turn(size):
    rng = np.random.default_rng(0)
    A, e = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 1, 6, 6), (2, 6)))
    A[:, :, 3:], e[:, 3:] = 0, 0  # three rows, and padding

    def again(p, move):  # asked for its shapes, and never taken
        return jax.tree.map(lambda a, axis: jax.lax.slice_in_dim(a, 0, size, axis=axis), look, kalman.Look(2, 2, 1))

    look = kalman.Look(*map(jnp.asarray, (A, A, e)))
    taken, move = kalman.in_turn(look, again, *jnp.array([False, True]), 100.0, size)
    A[:, :, 4:], e[:, 4:] = np.nan, np.nan  # whoever looks there is told
    look = kalman.Look(*map(jnp.asarray, (A, A, e)))
    same, equal = kalman.in_turn(look, again, *jnp.array([False, True]), 100.0, size, jnp.asarray(3))
    for one, other in ((taken.rows, same.rows), (taken.surprise, same.surprise), (move, equal)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("moved", [True, False])
def test_rows_looked_at_again_are_taken_where_the_others_led(moved):
    """A curve, f(w) = sin w: taken one by one and linearised again, each row starts from where the last one ended."""
    seen, C, targets = 0.2, 1.0, np.array([0.9, 0.8, 0.95])
    w = seen + 0.3 if moved else seen

    def look(p, move, w=w):
        here = w + move[:, 0, 0]
        A = jnp.cos(here)[:, None, None, None]
        return kalman.Look(A, A * C, (jnp.asarray(targets, jnp.float32)[p] - jnp.sin(here))[:, None])

    first = [look(p, jnp.zeros((1, 1, 1)), seen) for p in range(3)]
    first = kalman.Look(
        *(jnp.concatenate(part, axis) for part, axis in zip(zip(*first, strict=True), (2, 2, 1), strict=True))
    )

    def again(p, move):  # the first row is not looked at twice where nothing has moved: NaN would show it
        return jax.tree.map(lambda a: jnp.where(jnp.array(moved) | (p > 0), a, jnp.nan), look(p, move))

    taken, move = kalman.in_turn(first, again, *jnp.array([True, moved]), 100.0, 1)
    by_hand, variance = w, C
    for target in targets:
        slope = np.cos(by_hand)
        S = slope**2 * variance + 1
        by_hand += variance * slope / S * (target - np.sin(by_hand))
        variance -= (variance * slope) ** 2 / S
    assert float(move[0, 0, 0]) == pytest.approx(by_hand - w, abs=1e-5)
    assert C - float((taken.rows**2).sum()) == pytest.approx(variance, abs=1e-5)
