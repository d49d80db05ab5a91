import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import opvi
from opvi.predictive import Predictive

MEAN = jnp.array([[0.0, 1.0, -2.0], [0.5, 3.0, -2.0]])  # two particles, three rows
VARIANCE = jnp.array([[1.0, 0.5, 2.0], [0.25, 0.5, 2.0]])
GAUSSIAN = Predictive(opvi.Normal(MEAN, VARIANCE))
LOGITS = jnp.array([[[2.0, 0.0, -1.0], [0.0, 0.0, 0.0]], [[0.0, 2.0, -1.0], [0.0, 0.0, 0.0]]])
CLASSES = Predictive(opvi.Categorical(LOGITS))
BINARY = Predictive(opvi.Bernoulli(jnp.array([[0.0, 3.0], [1.0, -3.0]])))
KEY = jax.random.key(0)


def test_mean_and_sd_are_those_of_the_mixture():
    draws = np.asarray(GAUSSIAN.sample(KEY, 40_000))
    assert draws.shape == (40_000, 3)
    standard_error = draws.std(0) / 200
    assert (np.abs(GAUSSIAN.mean() - draws.mean(0)) < 4 * standard_error).all()
    np.testing.assert_allclose(GAUSSIAN.sd(), draws.std(0), rtol=4 * np.sqrt(1 / 40_000))


def test_regression_uncertainty_adds_up():
    parts = GAUSSIAN.uncertainty()
    np.testing.assert_allclose(parts.epistemic, [0.0625, 1.0, 0.0])
    np.testing.assert_allclose(parts.aleatoric, [0.625, 0.5, 2.0])
    np.testing.assert_allclose(GAUSSIAN.sd() ** 2, parts.epistemic + parts.aleatoric, rtol=1e-6)


def test_class_uncertainty_adds_up_to_the_entropy():
    parts = CLASSES.uncertainty()
    p = np.asarray(CLASSES.probabilities())
    np.testing.assert_allclose(parts.epistemic + parts.aleatoric, -(p * np.log(p)).sum(1), rtol=1e-5)
    assert parts.epistemic[0] > 0.1  # the two particles disagree on the first row
    assert abs(parts.epistemic[1]) < 1e-6  # and agree to know nothing on the second
    np.testing.assert_allclose(parts.aleatoric[1], np.log(3), rtol=1e-5)


def test_quantiles_are_the_mixtures_own():
    levels = [0.05, 0.5, 0.9]
    q = np.asarray(GAUSSIAN.quantile(levels))
    assert q.shape == (3, 3)
    for level, row in zip(levels, q, strict=True):
        np.testing.assert_allclose(GAUSSIAN.cdf(jnp.asarray(row)), level, atol=1e-5)
    assert GAUSSIAN.quantile(0.5).shape == (3,)
    assert GAUSSIAN.quantile([]).shape == (0, 3)
    np.testing.assert_allclose(q[1, 2], -2.0, atol=1e-5)  # identical components: their own median
    low, high = GAUSSIAN.interval(0.9)
    np.testing.assert_allclose(GAUSSIAN.cdf(high) - GAUSSIAN.cdf(low), 0.9, atol=1e-5)


def test_questions_asked_again_compile_nothing():
    compiled = []
    hear = lambda name, _, **of: compiled.append(of) if name.endswith("backend_compile_duration") else None  # noqa: E731
    y, other = jnp.zeros(3), GAUSSIAN._replace(components=opvi.Normal(MEAN + 1, VARIANCE))
    asked = lambda said: (said.quantile([0.1, 0.5]), said.interval(0.5), opvi.metrics.crps(said, y))  # noqa: E731
    asked(GAUSSIAN)
    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        asked(other)
        assert compiled == []
        jax.jit(lambda: jnp.zeros(3) + len(compiled))()
        assert len(compiled) == 1  # it hears
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


def test_log_density_is_that_of_the_mixture():
    y = jnp.array([0.2, 2.0, -1.0])
    densities = [stats.norm.pdf(y, m, np.sqrt(v)) for m, v in zip(MEAN, VARIANCE, strict=True)]
    np.testing.assert_allclose(GAUSSIAN.log_density(y), np.log(np.mean(densities, 0)), rtol=1e-5)
    labels = jnp.array([1, 2])
    np.testing.assert_allclose(
        CLASSES.log_density(labels), np.log(np.asarray(CLASSES.probabilities())[np.arange(2), labels]), rtol=1e-5
    )
    np.testing.assert_allclose(
        BINARY.log_density(jnp.array([1, 0])), np.log([BINARY.mean()[0], 1 - BINARY.mean()[1]]), rtol=1e-5
    )


def test_class_probabilities():
    p = np.asarray(CLASSES.probabilities())
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(p, np.asarray(jax.nn.softmax(LOGITS)).mean(0), rtol=1e-6)
    assert CLASSES.classes().tolist() == [0, 0]
    np.testing.assert_allclose(BINARY.probabilities()[:, 1], BINARY.mean(), rtol=1e-6)
    draws = np.asarray(CLASSES.sample(KEY, 20_000))
    shares = (draws[..., None] == np.arange(3)).mean(0)
    np.testing.assert_allclose(shares, p, atol=4 * np.sqrt(0.25 / 20_000))


def test_what_a_head_cannot_say_is_refused():
    with pytest.raises(TypeError, match="probabilities"):
        CLASSES.sd()
    with pytest.raises(TypeError, match="Categorical head"):
        CLASSES.quantile(0.5)
    with pytest.raises(TypeError, match="Normal head"):
        GAUSSIAN.probabilities()
    with pytest.raises(TypeError, match="class indices"):
        CLASSES.mean()
    for wrong in (0.0, 1.0, [0.5, 2.0]):
        with pytest.raises(ValueError, match="strictly between 0 and 1"):
            GAUSSIAN.quantile(wrong)
    with pytest.raises(ValueError, match="`coverage` is 1.5"):
        GAUSSIAN.interval(1.5)


def test_predict_goes_through_every_particle():
    target = opvi.linear_regression(2, noise=0.3)
    particles = opvi.draw(target, 0, 4)
    x = np.random.default_rng(0).normal(size=(5, 2))
    predictive = opvi.predict(target, particles, x)
    for i in range(4):
        layer = target.unravel(particles[i])["weights"][0]
        expected = x @ np.asarray(layer.weights)[:, 0] + np.asarray(layer.bias)
        np.testing.assert_allclose(predictive.components.mean[i], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(predictive.components.variance, 0.3, rtol=1e-6)
    with pytest.raises(TypeError, match="no `predict`"):
        opvi.predict(opvi.gaussian_mixture(), jnp.zeros((3, 2)), x)


@jax.jit
def of_student_t(one, y):
    few, many = (jax.tree.map(lambda leaf, n=n: jnp.broadcast_to(leaf, (n,)), one) for n in (len(y), 40_000))
    return few.log_density(y), few.cdf(y), many.sample(KEY)


@pytest.mark.parametrize("dof", [2.5, 3.0, 4.0, 5.0, 6.0, 10.0, 30.0, np.inf])
def test_student_t_is_the_one_of_scipy(dof):
    mean, variance = 1.0, 2.0
    ours = opvi.predictive.StudentT(*(jnp.full((1,), v, jnp.float32) for v in (mean, variance, dof, 0.5)))
    theirs = stats.norm(mean, variance**0.5)
    if np.isfinite(dof):
        theirs = stats.t(dof, mean, np.sqrt(variance * (dof - 2) / dof))
    y = np.array([-40.0, -2.0, 1.0, 3.5], np.float32)
    density, below, draws = of_student_t(ours, y)
    np.testing.assert_allclose(density, theirs.logpdf(y), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(below, theirs.cdf(y), atol=2e-6)
    assert stats.kstest(draws, theirs.cdf).pvalue > 1e-3


def test_weights_count_in_every_summary():
    """A mixture with weights (¾, ¼) is the even mixture of four components, three of them alike."""
    mean, variance = jnp.array([[0.0, 1.0], [3.0, -1.0]]), jnp.array([[1.0, 2.0], [0.5, 0.3]])
    weighted = Predictive(opvi.Normal(mean, variance), jnp.log(jnp.array([0.75, 0.25])))
    pick = jnp.array([0, 0, 0, 1])
    even = Predictive(opvi.Normal(mean[pick], variance[pick]))
    y = jnp.array([0.3, -0.2])

    @jax.jit
    def summaries(p):
        return p.mean(), p.sd(), p.log_density(y), p.cdf(y), p.quantile([0.03, 0.5, 0.999]), p.uncertainty().epistemic

    expected = summaries(even)
    for found, value in zip(summaries(weighted), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=2e-5, atol=1e-6)
    draws = np.asarray(weighted.sample(KEY, 20_000))
    np.testing.assert_allclose(draws.mean(0), expected[0], atol=4 * float(expected[1].max()) / np.sqrt(20_000))


def test_temperature_flattens_the_mixture_and_keeps_its_order():
    logits = jnp.array([[[2.0, 0.0, -1.0]], [[0.5, 1.0, 0.0]]])
    plain = Predictive(opvi.Categorical(logits))
    hot = plain._replace(temperature=jnp.float32(2.0))
    p = np.asarray(plain.probabilities())
    np.testing.assert_allclose(hot.probabilities(), np.sqrt(p) / np.sqrt(p).sum(1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(hot.log_density(jnp.array([2])), np.log(hot.probabilities())[:, 2], rtol=1e-5)
    assert (hot.classes() == plain.classes()).all()
    parts = hot.uncertainty()
    total = -(np.asarray(hot.probabilities()) * np.log(hot.probabilities())).sum(1)
    assert parts.epistemic[0] > 0
    assert float(parts.epistemic[0] + parts.aleatoric[0]) == pytest.approx(float(total[0]), rel=1e-5)
