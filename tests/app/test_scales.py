"""A target that is always positive: learnt as a logarithm, told on its own scale."""

import json

import jax.numpy as jnp
import numpy as np
import pyarrow.csv as pc
import pytest
from scipy import integrate, stats

from opvi.adapters._tables import open_source
from opvi.adapters._tables._schema import count_scale
from opvi.app.cli import main
from opvi.app.learn import RunDirectory
from opvi.app.learn._predict import learnt
from opvi.app.learn._scales import count_moments, count_quantiles, log_probability, positive_moments
from opvi.predictive import Normal, Predictive
from opvi.running._engine import Engine

SMALL = ["--hidden", "none", "--particles", "2", "--first-rows", "400"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Prices whose logarithm is linear, with noise."""
    path = tmp_path_factory.mktemp("prices") / "prices.csv"
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    y = np.exp(3 + x @ [1.0, -0.5] + 0.3 * rng.normal(size=400))
    lines = [f"{a:.4f},{b:.4f},{c:.6g}\n" for (a, b), c in zip(x, y, strict=True)]
    path.write_text("a,b,price\n" + "".join(lines) + "1,1,0\n1,1,-5\n")
    return path


@pytest.fixture(scope="module")
def run(table):
    folder = table.parent / "run"
    assert main(["learn", str(table), "--target", "price", "--positive", "--run", str(folder), *SMALL]) == 0
    return folder


def test_moments_are_those_of_log_normals():
    mean, variance = np.array([[0.3], [-1.0]]), np.array([[0.2], [0.5]])
    weights = np.array([0.25, 0.75])
    head = Predictive(Normal(jnp.asarray(mean), jnp.asarray(variance)), jnp.log(jnp.asarray(weights)))
    parts = [stats.lognorm(np.sqrt(v), scale=np.exp(m)) for m, v in zip(mean[:, 0], variance[:, 0], strict=True)]
    first = sum(w * part.moment(1) for w, part in zip(weights, parts, strict=True))
    second = sum(w * part.moment(2) for w, part in zip(weights, parts, strict=True))
    told = positive_moments(head)
    np.testing.assert_allclose(told[0], first, rtol=1e-5)
    np.testing.assert_allclose(told[1], np.sqrt(second - first**2), rtol=1e-5)


@pytest.mark.slow
def test_figures_are_of_the_target_itself(table, run):
    """Loss and error by hand: the density of y has the Jacobian 1/y, and integrates to 1."""
    known = learnt(RunDirectory(run))
    with open_source(table) as source:
        encoded = known.schema.encode(next(source.blocks()))
    assert [one.reason.split(": ")[1] for one in encoded.rejected] == ["'0' is not positive", "'-5' is not positive"]
    y = np.exp(np.asarray(encoded.y, float))
    engine, loss, error = Engine(known.sampler, 0), [], []  # which learns by the program of `run`
    for at in range(0, len(y), 20):
        rows = slice(at, at + 20)
        if at:
            said = known.sampler.predict(engine.state, encoded.x[rows])
            loss.append(-np.asarray(said.log_density(jnp.asarray(encoded.y[rows])), float) + np.log(y[rows]))
            error.append((np.asarray(positive_moments(said)[0], float) - y[rows]) ** 2)
        engine.feed((encoded.x[rows], encoded.y[rows]))
    figures = json.loads((run / "metrics.json").read_text())
    np.testing.assert_allclose(figures["log_loss"], np.concatenate(loss).mean(), rtol=1e-3)
    np.testing.assert_allclose(figures["rmse"], np.sqrt(np.concatenate(error).mean()), rtol=1e-3)
    assert figures["rmse"] < 0.7 * figures["baseline_rmse"]
    one = known.sampler.predict(engine.state, np.repeat(encoded.x[:1], 20, 0))  # as many rows as above
    low, high = np.exp(np.asarray(one.quantile([1e-4, 1 - 1e-4]))[:, 0])
    values = np.geomspace(low, high, 2000)
    parts = [one.log_density(jnp.log(jnp.asarray(part, jnp.float32))) for part in values.reshape(-1, 20)]
    density = np.exp(np.concatenate(parts)) / values
    assert integrate.trapezoid(density, values) == pytest.approx(1, abs=2e-3)


@pytest.mark.slow
def test_predictions_are_positive(table, run):
    known = learnt(RunDirectory(run))
    assert main(["predict", str(run), str(table), "-o", str(run / "out.csv")]) == 0
    out = pc.read_csv(run / "out.csv").to_pydict()
    with open_source(table) as source:
        x = known.schema.encode(next(source.blocks()), with_target=False).x
    said = known.sampler.predict(known.tree["state"], x)
    np.testing.assert_allclose(out["q0.95"], np.exp(np.asarray(said.quantile(0.95))), rtol=1e-4)
    np.testing.assert_allclose(out["mean"], positive_moments(said)[0], rtol=1e-4)
    np.testing.assert_allclose(out["sd"], positive_moments(said)[1], rtol=1e-3)
    assert min(*out["mean"], *out["q0.05"]) > 0


def test_targets_that_are_not_positive_are_refused(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i % 7},{i % 20 - 5}\n" for i in range(40)))
    words = ["learn", str(tmp_path / "a.csv"), "--target", "y", "--positive", "--run", str(tmp_path / "run")]
    assert main(words) == 1
    assert "holds -5 among the first rows" in capsys.readouterr().err
    assert main([*words, "--task", "classification"]) == 1
    assert "only a number can be positive" in capsys.readouterr().err


# --- counts ---------------------------------------------------------------------------------------


def test_probabilities_of_counts_add_up_to_1_and_quantiles_and_means_are_theirs():
    """Of a mixture of normals on their scale, by SciPy; also far out, where differences are lost in rounding."""
    mean, sd, weights = np.array([0.5, 0.9]), np.array([0.2, 0.1]), np.array([0.4, 0.6])
    head = Predictive(Normal(jnp.asarray(mean)[:, None], jnp.asarray(sd**2)[:, None]), jnp.log(jnp.asarray(weights)))
    k = np.arange(60.0)
    edges = np.concatenate([[-np.inf], count_scale(k + 0.5)])
    parts = [(w, stats.norm(m, s)) for m, s, w in zip(mean, sd, weights, strict=True)]
    below = sum(w * part.cdf(edges) for w, part in parts)
    said = np.asarray([log_probability(head, jnp.asarray([value], jnp.float32))[0] for value in k], float)
    np.testing.assert_allclose(np.exp(said), np.diff(below), rtol=2e-2, atol=2e-6)
    assert np.exp(said).sum() == pytest.approx(1, abs=1e-4)
    far = float(log_probability(head, jnp.asarray([2000.0], jnp.float32))[0])
    width = np.diff(count_scale(np.array([1999.5, 2000.5])))[0]
    exact = np.log(sum(w * part.pdf(count_scale(2000.0)) for w, part in parts) * width)
    assert far == pytest.approx(exact, rel=1e-2)
    levels = (0.05, 0.5, 0.95)
    told = np.asarray(count_quantiles(head, levels))[:, 0]
    np.testing.assert_array_equal(told, [np.searchsorted(below[1:], level) for level in levels])
    draws = 10 * np.sinh(np.concatenate([part.ppf(np.linspace(1e-6, 1 - 1e-6, 40_000)) for _, part in parts])) ** 2
    weight = np.repeat(weights, 40_000)
    expected = np.average(draws, weights=weight)
    deviation = np.sqrt(np.average((draws - expected) ** 2, weights=weight))
    np.testing.assert_allclose(np.ravel(count_moments(head)), [expected - 0.375, deviation], rtol=2e-3)


@pytest.mark.slow
def test_counts_are_learnt_and_predicted_as_counts(tmp_path):
    """Against the negative binomial that the rows were drawn from: close in loss, honest in coverage."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 2))
    mean = np.exp(1.5 + x @ [0.8, -0.4])
    y = rng.negative_binomial(5, 5 / (5 + mean))
    path = tmp_path / "visits.csv"
    lines = [f"{a:.4f},{b:.4f},{c}\n" for (a, b), c in zip(x, y, strict=True)]
    path.write_text("a,b,visits\n" + "".join(lines) + "1,1,-1\n1,1,2.5\n")
    words = ["learn", str(path), "--target", "visits", "--run", str(tmp_path / "run"), *SMALL]
    assert main([*words, "--counts"]) == 0
    figures = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert figures["rejected"] == 2
    exact = -stats.nbinom(5, 5 / (5 + mean)).logpmf(y)[1000:].mean()
    assert figures["log_loss"] < exact + 0.15
    assert 0.85 < figures["covered_by_90_percent_interval"] < 0.97
    assert main(["predict", str(tmp_path / "run"), str(path), "-o", str(tmp_path / "out.csv")]) == 0
    out = pc.read_csv(tmp_path / "out.csv").to_pydict()
    low, high = (np.array(out[name][:3000], float) for name in ("q0.05", "q0.95"))
    assert np.array_equal(low, np.round(low))
    assert low.min() == 0
    assert ((low <= y) & (y <= high))[1000:].mean() == pytest.approx(
        0.93, abs=0.04
    )  # whole numbers hold more than 90 %
    assert np.sum(out["mean"][:3000]) == pytest.approx(mean.sum(), rel=0.07)  # a line on this scale is not quite it


def test_targets_that_do_not_count_are_refused(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("x,y\n" + "".join(f"{i % 7},{i % 20 - 0.5}\n" for i in range(40)))
    words = ["learn", str(tmp_path / "a.csv"), "--target", "y", "--counts", "--run", str(tmp_path / "run")]
    assert main(words) == 1
    assert "holds -0.5 among the first rows, so it is not a count" in capsys.readouterr().err
