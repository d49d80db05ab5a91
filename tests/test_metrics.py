import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import opvi
from opvi import metrics
from opvi.predictive import Predictive

Y = jnp.array([0.2, 2.0, -1.0])
WIDE = jnp.ones((3, 20))
GAUSSIAN = Predictive(opvi.Normal(jnp.array([[0.0, 1.0, -2.0], [0.5, 3.0, -1.0]]), jnp.full((2, 3), 0.5)))


crps, ksd, mmd = jax.jit(metrics.crps), jax.jit(metrics.ksd), jax.jit(metrics.mmd)
coverage = jax.jit(metrics.coverage, static_argnums=2)
calibration_error = jax.jit(metrics.expected_calibration_error)


def perfect(labels, classes=3):
    return Predictive(opvi.Categorical(100.0 * jax.nn.one_hot(labels, classes)[None]))


def test_rmse_and_density():
    np.testing.assert_allclose(metrics.rmse(GAUSSIAN, Y), np.sqrt(np.mean([0.05**2, 0, 0.5**2])), rtol=1e-5)
    density = stats.norm.pdf(Y, GAUSSIAN.components.mean, np.sqrt(0.5)).mean(0)
    np.testing.assert_allclose(metrics.log_predictive_density(GAUSSIAN, Y), np.log(density).mean(), rtol=1e-5)


def test_a_column_of_y_is_refused_instead_of_broadcast():
    for score in (metrics.rmse, metrics.log_predictive_density, metrics.crps, metrics.coverage):
        with pytest.raises(ValueError, match=r"`y` has shape \(3, 1\), but there are predictions for 3 rows"):
            score(GAUSSIAN, Y[:, None])
    labels = jnp.array([0, 1, 2])
    for score in (metrics.accuracy, metrics.brier, metrics.expected_calibration_error):
        with pytest.raises(ValueError, match=r"`y` has shape \(2,\)"):
            score(perfect(labels), labels[:2])


def test_crps_closed_form_equals_its_integral():
    """CRPS = ∫ (F(z) - [z ≥ y])² dz."""
    z = np.linspace(-12, 12, 48_001)
    means, sd = np.asarray(GAUSSIAN.components.mean), np.sqrt(0.5)
    total = 0.0
    for row in range(3):
        cdf = np.mean([stats.norm.cdf(z, m, sd) for m in means[:, row]], 0)
        total += np.trapezoid((cdf - (z >= float(Y[row]))) ** 2, z) / 3
    np.testing.assert_allclose(crps(GAUSSIAN, Y), total, rtol=1e-3)
    with pytest.raises(TypeError, match="continuous y"):
        metrics.crps(perfect(jnp.array([0])), jnp.array([0]))


def test_coverage_of_a_calibrated_model_is_its_level():
    n = 4000
    y = jax.random.normal(jax.random.key(0), (n,)) * 1.5
    model = Predictive(opvi.Normal(jnp.zeros((3, n)), jnp.full((3, n), 2.25)))
    for level in (0.5, 0.9):
        assert abs(float(coverage(model, y, level)) - level) < 4 * np.sqrt(level * (1 - level) / n)
    too_sure = Predictive(opvi.Normal(jnp.zeros((3, n)), jnp.full((3, n), 0.25)))
    assert float(coverage(too_sure, y, 0.9)) < 0.6


def test_classification_scores():
    labels = jnp.array([0, 1, 2, 2])
    assert float(metrics.accuracy(perfect(labels), labels)) == 1
    assert float(metrics.brier(perfect(labels), labels)) < 1e-9
    assert float(calibration_error(perfect(labels), labels)) < 1e-6
    wrong = jnp.array([1, 2, 0, 0])
    assert float(metrics.brier(perfect(labels), wrong)) == pytest.approx(2)
    assert float(calibration_error(perfect(labels), wrong)) == pytest.approx(1)


def test_calibration_error_of_a_calibrated_classifier_is_small():
    """Labels drawn from the probabilities themselves; each of 15 bins errs by its own standard error."""
    n = 30_000
    logits = 2 * jax.random.normal(jax.random.key(1), (n, 3))
    labels = jax.random.categorical(jax.random.key(2), logits)
    model = Predictive(opvi.Categorical(logits[None]))
    assert float(calibration_error(model, labels)) < np.sqrt(15 / n)
    sharp = Predictive(opvi.Categorical(3 * logits[None]))
    assert float(calibration_error(sharp, labels)) > 0.1


def test_ksd_against_its_definition():
    rng = np.random.default_rng(0)
    x, s = rng.normal(size=(9, 3)), rng.normal(size=(9, 3))

    def k(a, b):
        return (1 + ((a - b) ** 2).sum()) ** -0.5

    def pair(a, b, sa, sb):
        mixed = jnp.trace(jax.jacfwd(jax.grad(k, 1), 0)(a, b))
        return k(a, b) * sa @ sb + sa @ jax.grad(k, 1)(a, b) + sb @ jax.grad(k)(a, b) + mixed

    with jax.enable_x64(True):
        i, j = np.divmod(np.arange(81), 9)
        expected = float(jnp.sqrt(jax.jit(jax.vmap(pair))(x[i], x[j], s[i], s[j]).mean()))
    value = ksd(jnp.asarray(x, jnp.float32), jnp.asarray(s, jnp.float32))
    assert float(value) == pytest.approx(expected, rel=1e-5)


def test_ksd_and_mmd_tell_right_from_wrong_samples():
    x = jax.random.normal(jax.random.key(0), (400, 2))
    assert float(ksd(x, -x)) < 0.5 * float(ksd(x + 0.5, -(x + 0.5)))
    assert float(ksd(x, -x)) < 0.5 * float(ksd(0.3 * x, -0.3 * x))
    y = jax.random.normal(jax.random.key(1), (400, 2))
    # Under equality E[MMD²] ≤ 2/n (kernel at most 1): MMD about 0.07 here.
    assert float(mmd(x, y)) < 2 * np.sqrt(2 / 400)
    assert float(mmd(x + 1.0, y)) > 0.3
    assert float(metrics.mmd(y, y)) == 0


def test_wasserstein_distance():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3))
    assert metrics.wasserstein2(x, x[::-1]) == 0
    shift = np.array([1.0, -2.0, 0.5])
    assert metrics.wasserstein2(x, x[::-1] + shift) == pytest.approx(np.linalg.norm(shift))
    line = rng.normal(size=(30, 1))
    assert metrics.wasserstein2(line, 2 * line) == pytest.approx(np.sqrt((line**2).mean()))
    # Unequal sizes: every point of the smaller sample repeated is the same distribution.
    assert metrics.wasserstein2(x[:20], np.repeat(x[:20], 3, 0)) == pytest.approx(0, abs=1e-9)
    brute = min(np.mean([((x[i] - x[3 + p]) ** 2).sum() for i, p in enumerate(order)])
                for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]))  # fmt: skip
    assert metrics.wasserstein2(x[:3], x[3:6]) == pytest.approx(np.sqrt(brute))
    assert np.isnan(metrics.wasserstein2(np.full((2, 2), np.nan), x[:2, :2]))
    with pytest.raises(ValueError, match="equal d"):
        metrics.wasserstein2(x, x[:, :2])
    with pytest.raises(ValueError, match="divide each other"):
        metrics.wasserstein2(np.zeros((101, 1)), np.zeros((103, 1)))


def test_crps_counts_the_weights_and_knows_heavy_tails():
    one, other = (
        opvi.Normal(jnp.array([[0.0], [3.0]]), jnp.ones((2, 1))),
        opvi.Normal(jnp.zeros((1, 1)), jnp.ones((1, 1))),
    )
    y = jnp.array([0.4])
    alone = Predictive(one, jnp.log(jnp.array([1.0, 1e-12])))
    np.testing.assert_allclose(crps(alone, y), crps(Predictive(other), y), rtol=1e-5)
    normal = opvi.predictive.StudentT(jnp.zeros((1, 1)), jnp.ones((1, 1)), jnp.full((1, 1), jnp.inf), jnp.zeros((1, 1)))
    np.testing.assert_allclose(crps(Predictive(normal), y), crps(Predictive(other), y), rtol=5e-3)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(metrics.crps, (GAUSSIAN, Y)), (metrics.ksd, (WIDE, WIDE)), (metrics.mmd, (WIDE, WIDE))],
)
def test_products_ask_accelerators_for_full_precision(function, arguments):
    program = str(jax.make_jaxpr(function)(*arguments))
    products = program.count("dot_general[")
    assert products > 0
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products
