"""Covariances that shed rows, against dense matrices in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opvi.filters import _covariance as covariance
from opvi.filters._covariance import Blocks, within

N, D = 2, 5


@pytest.mark.parametrize("apiece", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
def test_shedding_rows_is_the_dense_update(blocks, apiece, monkeypatch):
    """(C - ZᵀZ)/γ with a cap on variances and correlations loosened a little, mended on the way; large ones apiece."""
    monkeypatch.setattr(covariance, "CACHED", 0 if apiece else 1 << 30)
    monkeypatch.setattr(covariance, "FEW", 0)
    rng = np.random.default_rng(0)
    variance = rng.uniform(0.5, 2, size=(N, blocks, D))
    C = covariance.start(jnp.asarray(variance, jnp.float32))
    dense = np.einsum("nkd,de->nkde", variance, np.eye(D))
    largest = np.full((N, blocks, D), 2.2)
    shed = jax.jit(lambda *given: covariance.shed(*given))  # a new function: not what was compiled for the other case
    for gamma in (1.0, 0.9, 0.7, 1.0, 0.8, 0.9) * 3:
        A = rng.normal(size=(N, blocks, 3, D))
        root = np.linalg.cholesky(np.einsum("nkrd,nkde,nkse->nkrs", A, dense, A) + np.eye(3))
        Z = np.linalg.solve(root, A @ dense)
        C = shed(C, jnp.asarray(Z, jnp.float32), jnp.full(N, gamma, jnp.float32), jnp.asarray(largest, jnp.float32))
        dense = (dense - np.einsum("nkrd,nkre->nkde", Z, Z)) / gamma
        diagonal = np.einsum("nkdd->nkd", dense)
        scale = np.sqrt(np.minimum(1, largest / diagonal))
        dense = dense * scale[..., :, None] * scale[..., None, :]
        diagonal = np.einsum("nkdd->nkd", dense)
        dense = dense + (covariance.LOOSENING * (1 / gamma - 1) * diagonal)[..., None] * np.eye(D)
        np.testing.assert_allclose(C.matrices, dense, rtol=2e-3, atol=2e-5)
        np.testing.assert_allclose(covariance.variances(C), np.einsum("nkdd->nkd", dense), rtol=2e-3)


def test_small_matrices_are_bounded_as_if_parameters_had_been_looked_at():
    """Measurements of single parameters with the noise that leaves the largest variance, the worst first; float64."""
    rng = np.random.default_rng(0)
    root = rng.normal(size=(N, 2, D, D))
    C, largest = root @ np.swapaxes(root, 2, 3), rng.uniform(0.5, 3, size=(N, 2, D))
    found = jax.jit(covariance.bounded)(jnp.asarray(C, jnp.float32), jnp.asarray(largest, jnp.float32))
    for P, most in zip(C.reshape(-1, D, D), largest.reshape(-1, D), strict=True):
        while (np.diag(P) > 1.001 * most).any():
            j = np.argmax(np.diag(P) / most)
            noise = most[j] * P[j, j] / (P[j, j] - most[j])
            P -= np.outer(P[j], P[j]) / (P[j, j] + noise)
    np.testing.assert_allclose(found, C, rtol=1e-3, atol=1e-4)
    within = jnp.asarray(np.eye(D)[None, None] * np.ones((N, 2, 1, 1)), jnp.float32)
    np.testing.assert_array_equal(covariance.bounded(within, jnp.ones((N, 2, D))), within)
    others = (
        jnp.full((D, D), jnp.nan),
        jnp.zeros((D, D)),
        9 * jnp.eye(D),
    )  # a particle gone bad, and one that is certain
    found = covariance.bounded(jnp.stack(others)[:, None], jnp.ones((3, 1, D)))
    np.testing.assert_allclose(found[1:, 0], jnp.stack([jnp.zeros((D, D)), jnp.eye(D)]), rtol=1e-3)


def test_what_is_known_of_a_sum_stays_known_while_the_difference_is_forgotten():
    """Two equal columns: forgetting must not wind up the difference and, bounded, take the sum with it."""
    rows, largest = jnp.ones((1, 1, 1, 2)), jnp.full((1, 1, 2), 4.0)
    C = covariance.start(jnp.ones((1, 1, 2)))

    @jax.jit
    def learnt(C):
        Z = rows @ C.matrices
        return covariance.shed(C, Z / jnp.sqrt(Z @ rows.mT + 1), jnp.full(1, 0.9), largest)

    for _ in range(200):
        C = learnt(C)
    P = C.matrices[0, 0]
    sure = 1 / 0.9 - 1  # of 1 / variance: what a row adds is what forgetting takes
    assert P.sum() == pytest.approx(sure, rel=0.1)
    assert P[0, 0] + P[1, 1] - 2 * P[0, 1] == pytest.approx(16, rel=0.02)  # both at their largest


def test_large_matrices_are_changed_without_a_second_copy():
    """What XLA needs beside arguments and result is less than half of the matrices; on a CPU."""
    C, n = covariance.start(jnp.ones((8, 1, 300))), jnp.ones(8)
    Z, largest, bad = jnp.ones((8, 1, 4, 300)), jnp.ones((8, 1, 300)), jnp.zeros(8, bool)

    def learnt(C, Z):
        return covariance.without_correlations(covariance.shed(C, Z, n, largest), bad)

    needed = jax.jit(learnt, donate_argnums=0).lower(C, Z).compile().memory_analysis().temp_size_in_bytes
    assert needed < C.matrices.nbytes / 2


@pytest.mark.parametrize("apiece", [False, True])
def test_a_matrix_gone_bad_keeps_its_variances(apiece, monkeypatch):
    monkeypatch.setattr(covariance, "CACHED", 0 if apiece else 1 << 30)
    C = covariance.start(jnp.ones((N, 1, 3)))
    Z = 0.3 * jnp.ones((N, 1, 2, 3))
    C = covariance.shed(C, Z, jnp.ones(N), jnp.full((N, 1, 3), 4.0))
    cut = covariance.without_correlations(C, jnp.array([True, False]))
    np.testing.assert_allclose(cut.matrices[0, 0], np.diag(covariance.variances(C)[0, 0]), atol=1e-6)
    np.testing.assert_allclose(cut.matrices[1], C.matrices[1])


def test_mended_matrices_are_symmetric_and_keep_a_floor():
    C = covariance.start(jnp.ones((1, 1, 2)))
    shed = jax.jit(lambda *given: covariance.shed(*given))  # a new function: not what was compiled for the other case
    for _ in range(covariance.MEND_EVERY):
        taken = jnp.sqrt(jnp.maximum(covariance.variances(C), 0.01))[:, :, None]  # all there is, and more
        C = shed(C, taken, jnp.ones(1), jnp.full((1, 1, 2), 4.0))
    assert (np.asarray(covariance.variances(C)) > 0).all()
    np.testing.assert_array_equal(C.matrices, np.swapaxes(C.matrices, 2, 3))


@pytest.mark.parametrize("largest", [400, 200, 100, 41, 20, 5])
def test_blocks_cover_every_place_once_and_fit(largest):
    places, unit = np.random.default_rng(0).permutation(21), 5
    blocks = within(places, unit, largest)
    kept = blocks.order[blocks.order < 21]
    assert sorted(kept) == list(range(21))
    assert blocks.numbers <= max(largest, 21) * 1.3  # padding of the last block included
    x = jnp.arange(42.0).reshape(2, 21)
    np.testing.assert_array_equal(blocks.scatter(blocks.gather(x)), x)


def test_blocks_hold_whole_units():
    blocks = within(np.arange(21), 5, 21 * 11)
    assert isinstance(blocks, Blocks)
    assert blocks.order.shape == (2, 11)  # two units and room for one place more
