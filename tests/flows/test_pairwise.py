"""The GPU's sums over pairs, run on a CPU by Pallas's interpreter, against float64."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import opvi
from opvi.flows import _pairwise as pairwise
from opvi.flows._pairwise import pair_sums, pieces


def problem(n, d, m, far=0.0):
    rng = np.random.default_rng(n + m)
    x = rng.normal(size=(n, d)).astype(np.float32)
    x[::2, 0] += np.float32(far)
    return x - x.mean(0), rng.normal(size=(n, m)).astype(np.float32)


def middle(x):
    """About the bandwidth that the median would choose."""
    return float(np.median(((x[:100, None] - x[None, 100:200]) ** 2).sum(-1))) / math.log(len(x))


def reference(x, columns, h):
    x, columns = (np.asarray(a, np.float64) for a in (x, columns))
    K = np.exp(-((x[:, None] - x[None]) ** 2).sum(-1) / h)
    return K @ columns, 2 / h * (K.sum(1)[:, None] * x - K @ x)


def error(value, truth):
    return np.linalg.norm(np.asarray(value, np.float64) - truth) / np.linalg.norm(truth)


# Odd sizes, so that every form pads rows and dimensions. The tensor cores' forms keep 16 bits of each kernel value:
# about 2^-17 a term.
@pytest.mark.parametrize(
    ("n", "d", "m", "largest"),
    [
        (700, 1, 1, 5e-7),
        (600, 4, 3, 5e-7),
        (300, 3, 7, 1e-5),
        (300, 17, 16, 1e-5),
        (150, 70, 70, 1e-5),
        (300, 130, 2, 1e-5),
    ],
)
def test_every_form_equals_float64(n, d, m, largest):
    x, columns = problem(n, d, m)
    h = middle(x)
    weighted, push = pair_sums(x, columns, np.float32(h), interpret=True)
    expected = reference(x, columns, h)
    assert weighted.shape == (n, m)
    assert push.shape == (n, d)
    assert error(weighted, expected[0]) < largest
    assert error(push, expected[1]) < largest


def test_differences_do_not_lose_digits_far_from_the_mean():
    x, columns = problem(600, 2, 1, far=100.0)
    h = 0.5
    _, push = pair_sums(x, columns, jnp.float32(h), interpret=True)
    assert error(push, reference(x, columns, h)[1]) < 1e-5  # 100 / 2^24 is the particles' own resolution


@pytest.mark.usefixtures("retraced")
def test_blocks_of_products_join(monkeypatch):
    """More rows than one tile of the last form takes, with a last block that starts early."""
    monkeypatch.setattr(pairwise, "CHUNK", 64)
    monkeypatch.setattr(pairwise, "CHUNK_ENTRIES", 64 * 128)
    x, columns = problem(300, 130, 2)
    h = middle(x)
    weighted, push = pair_sums(x, columns, jnp.float32(h), 0.5)
    expected = reference(x, columns, h)
    assert error(2 * weighted, expected[0]) < 1e-5
    assert error(2 * push, expected[1]) < 1e-5


def test_pieces_add_up():
    a = (np.random.default_rng(0).normal(size=1000) * 1e3).astype(np.float32)
    parts = jax.jit(lambda a: pieces(a, 3))(a)
    assert all(part.dtype == jnp.bfloat16 for part in parts)
    whole = sum(np.asarray(part, np.float64) for part in parts)
    np.testing.assert_allclose(whole, np.asarray(a, np.float64), rtol=2.0**-24)
    assert np.abs(np.asarray(parts[1], np.float64)).max() > 0  # XLA has not simplified the remainder away


def test_fields_choose_by_size_and_by_what_was_asked_for(monkeypatch):
    """On this machine the tiled form runs either way; which one a GPU would run is decided before."""
    asked = []
    monkeypatch.setattr(opvi.flows.fields, "has_gpu_kernels", lambda: True)
    monkeypatch.setattr(opvi.flows.fields, "LARGEST_DENSE", 100)
    monkeypatch.setattr(
        opvi.flows.fields.lax,
        "platform_dependent",
        lambda *args, cuda, default: (asked.append(len(args[0])), default(*args))[1],
    )
    for n, field, fused in (
        (90, opvi.flows.fields.svgd(), False),
        (110, opvi.flows.fields.svgd(), True),
        (110, opvi.flows.fields.gfsd(), True),
        (110, opvi.flows.fields.svgd(opvi.flows.kernels.imq()), False),
        (110, opvi.flows.fields.svgd(block=64), False),
    ):
        asked.clear()
        rows = jax.ShapeDtypeStruct((n, 2), jnp.float32)
        jax.eval_shape(field, rows, rows)
        assert asked == ([n] if fused else [])


WITHOUT_PALLAS = """
import sys
sys.modules["jax.experimental.pallas"] = sys.modules["jax.experimental.pallas.triton"] = None
import jax, numpy as np, opvi
from opvi.flows._pairwise import has_gpu_kernels, pair_sums
assert not has_gpu_kernels()
usual, jax.default_backend = jax.default_backend, lambda: "gpu"  # there is one, but the module is missing
assert not has_gpu_kernels()
jax.default_backend = usual
sampler = opvi.svgd(opvi.gaussian_mixture(), step=0.01)
for n in (5, 5000):  # all pairs at once, and where a GPU would take the fused sums
    _, info = sampler.step(jax.random.key(0), sampler.init(jax.random.key(0), n), opvi.batch(np.zeros(3)))
    assert bool(info.finite)
x = jax.random.normal(jax.random.key(0), (50, 130))  # whole products need no Pallas
assert np.isfinite(pair_sums(x, x, np.float32(1.0)).push).all()
"""


@pytest.mark.slow
def test_nothing_but_a_gpu_needs_pallas():
    subprocess.run([sys.executable, "-c", WITHOUT_PALLAS], check=True)


def test_the_factor_of_the_push_is_known_to_more_than_its_digits():
    scale = np.exp(4 * np.random.default_rng(0).normal(size=1000)).astype(np.float32)
    high, low = jax.jit(pairwise._twice_log_two)(scale)
    both = np.asarray(high, np.float64) + np.asarray(low, np.float64)
    np.testing.assert_allclose(both, 2 * np.log(2) * np.asarray(scale, np.float64), rtol=1e-12)
