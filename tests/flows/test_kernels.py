import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opvi.flows import kernels


def pairwise(x):
    x = np.asarray(x, float)
    return ((x[:, None] - x[None]) ** 2).sum(-1)


@pytest.mark.parametrize("kernel", [kernels.rbf(), kernels.rbf(normalised=True), kernels.imq()])
def test_slope_is_the_derivative(kernel):
    r, h = jnp.linspace(0.0, 4.0, 9), jnp.float32(1.7)
    slope = jax.vmap(jax.grad(lambda r: kernel.value(r, h, 3)))(r)
    np.testing.assert_allclose(kernel.slope(r, h, 3), slope, rtol=2e-6)


def test_normalised_rbf_integrates_to_one():
    x = np.linspace(-12, 12, 4001)
    values = kernels.rbf(normalised=True).value(jnp.asarray(x**2, jnp.float32), jnp.float32(2.5), 1)
    assert abs(np.trapezoid(np.asarray(values, float), x) - 1) < 1e-5


@pytest.mark.parametrize("d", [2, 30])
def test_squared_distances_far_from_the_origin(d):
    x = jax.random.normal(jax.random.key(0), (40, d)) + 1000.0
    centred = kernels.centred(x)
    np.testing.assert_allclose(kernels.squared_distances(centred, centred), pairwise(x), rtol=1e-4, atol=1e-4)


DRAWS = {
    "smooth": lambda rng, n: rng.exponential(size=n),
    "ties": lambda rng, n: rng.integers(0, 3, n).astype(float),
    "equal": lambda rng, n: np.ones(n),
    "zeros": lambda rng, n: np.zeros(n),
    "tiny": lambda rng, n: 1e-30 * rng.random(n),
    "heavy tails": lambda rng, n: np.abs(rng.standard_cauchy(n)) ** 3,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_middle_pair_is_exact(draw, dtype):
    with jax.enable_x64(True):
        find = jax.jit(kernels.middle_pair, static_argnums=1)
        for n in (2, 7, 500):
            values = draw(np.random.default_rng(n), n).astype(dtype)
            ordered = np.sort(values)
            for k in {1, n // 2, n - 1}:
                low, high = find(jnp.asarray(values), k)
                assert (low, high) == (ordered[k - 1], ordered[k])


def test_middle_pair_under_vmap_and_with_nan():
    values = np.random.default_rng(0).exponential(size=(4, 51)).astype(np.float32)
    low, _ = jax.vmap(lambda v: kernels.middle_pair(v, 25))(jnp.asarray(values))
    np.testing.assert_array_equal(low, np.sort(values)[:, 24])
    kernels.middle_pair(jnp.full(9, jnp.nan), 4)  # ends, whatever it finds


@pytest.mark.parametrize("n", [4, 5, 20, 31])
def test_named_medians(n):
    """Each named rule against its definition, written out with numpy's sort."""
    x = np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32)
    r = pairwise(x)
    pairs = np.sqrt(r[np.tril_indices(n, -1)])
    expected = {
        kernels.median: np.median(pairs) ** 2 / math.log(n),
        kernels.median_liu_wang: np.median(r) / math.log(n + 1),
        kernels.median_awgf: np.percentile(r, 50, method="higher") / math.log(n + 1),
        kernels.median_numpyro: np.median(np.sqrt(r)) ** 2 / math.log(n) + np.finfo(np.float32).eps,
    }
    found = jax.jit(lambda x: [rule()(x) for rule in expected])(x)
    for rule, value, said in zip(expected, expected.values(), found, strict=True):
        np.testing.assert_allclose(said, value, rtol=1e-5, err_msg=rule.__name__)


def test_median_of_many_particles_uses_an_even_sample():
    n = 3 * kernels.LARGEST_SAMPLE
    x = np.random.default_rng(0).normal(size=(n, 2)).astype(np.float32)
    exact = np.sqrt(np.median(pairwise(x[:2000])))  # any few thousand give the same to 3 %
    assert abs(math.sqrt(float(jax.jit(kernels.median())(x)) * math.log(n)) / exact - 1) < 0.03


def test_coinciding_particles_have_a_finite_bandwidth():
    rules = kernels.median(), kernels.median_liu_wang(), kernels.median_numpyro()

    @jax.jit
    def bandwidths(x):
        return [(h, kernels.rbf().slope(jnp.zeros(1), h, 2)) for h in (rule(x) for rule in rules)]

    for h, slope in bandwidths(np.ones((5, 2), np.float32)):
        assert 0 < float(h) < 1e-6
        assert np.isfinite(slope).all()


def heat_objective(x, h):
    """The HE objective written out with loops, for the unnormalised kernel of variance b = h/2."""
    x = np.asarray(x, float)
    n, d = x.shape
    b = h / 2
    k = np.exp(-pairwise(x) / (2 * b))
    gradient = np.stack([sum(k[j, i] * (x[i] - x[j]) for i in range(n)) / b / k[j].sum() for j in range(n)])
    total = 0.0
    for i in range(n):
        laplacian = sum(k[i, j] * (((x[i] - x[j]) ** 2).sum() / b**2 - d / b) for j in range(n))
        moved = sum(k[i, j] * (x[i] - x[j]) @ gradient[j] / b for j in range(n))
        total += (laplacian + moved) ** 2
    return b**2 * total


def test_heat_equation_minimises_its_objective():
    x = jax.random.normal(jax.random.key(3), (30, 2))
    best, middle = (float(h) for h in jax.jit(lambda x: (kernels.heat_equation()(x), kernels.median()(x)))(x))
    centre = heat_objective(x, best)
    grid = [heat_objective(x, middle * math.exp(e)) for e in np.linspace(-3.4, 3.4, 35)]
    assert centre <= min(grid) * 1.01


def test_fixed_refuses_zero():
    with pytest.raises(ValueError, match="bandwidth must be greater than 0"):
        kernels.fixed(0.0)


@pytest.mark.parametrize("offset", [0.0, 0.3, 1000.0])
def test_nearly_centred_particles_lose_no_digit(offset):
    x = np.random.default_rng(0).normal(size=(1000, 2)).astype(np.float32) + np.float32(offset)
    near = jax.jit(kernels.nearly_centred)(x)
    shift = np.asarray(x, np.float64) - np.asarray(near, np.float64)
    # Most differences are exact; of small numbers the last bits may go, but in no preferred direction.
    assert np.mean(shift == np.median(shift, 0)) > 0.9
    assert np.abs(np.asarray(near).mean(0)).max() < 1 / 64
    np.testing.assert_array_equal(kernels.nearly_centred(jnp.full((3, 2), 7.5)), 0)
