"""A target that is always positive: learnt as a logarithm, told on its own scale."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.csv as pc
import pytest
from scipy import integrate, stats

from opvi.adapters._tables import open_source
from opvi.app.cli import main
from opvi.app.learn import RunDirectory
from opvi.app.learn._positive import positive_moments
from opvi.app.learn._predict import learnt
from opvi.predictive import Normal, Predictive
from opvi.running._stream import batch

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


def test_figures_are_of_the_target_itself(table, run):
    """Loss and error by hand: the density of y has the Jacobian 1/y, and integrates to 1."""
    known = learnt(RunDirectory(run))
    with open_source(table) as source:
        encoded = known.schema.encode(next(source.blocks()))
    assert [one.reason.split(": ")[1] for one in encoded.rejected] == ["'0' is not positive", "'-5' is not positive"]
    y = np.exp(np.asarray(encoded.y, float))
    state, loss, error = known.sampler.init(jax.random.key(0)), [], []
    for at in range(0, len(y), 20):
        rows = slice(at, at + 20)
        if at:
            said = known.sampler.predict(state, encoded.x[rows])
            loss.append(-np.asarray(said.log_density(jnp.asarray(encoded.y[rows])), float) + np.log(y[rows]))
            error.append((np.asarray(positive_moments(said)[0], float) - y[rows]) ** 2)
        state, _ = known.sampler.step(jax.random.key(0), state, batch((encoded.x[rows], encoded.y[rows]), pad_to=20))
    figures = json.loads((run / "metrics.json").read_text())
    np.testing.assert_allclose(figures["log_loss"], np.concatenate(loss).mean(), rtol=1e-3)
    np.testing.assert_allclose(figures["rmse"], np.sqrt(np.concatenate(error).mean()), rtol=1e-3)
    assert figures["rmse"] < 0.7 * figures["baseline_rmse"]
    one = known.sampler.predict(state, encoded.x[:1])
    low, high = np.exp(np.asarray(one.quantile([1e-4, 1 - 1e-4]))[:, 0])
    values = np.geomspace(low, high, 2001)
    many = known.sampler.predict(state, np.repeat(encoded.x[:1], len(values), 0))
    density = np.exp(many.log_density(jnp.log(jnp.asarray(values, jnp.float32)))) / values
    assert integrate.trapezoid(density, values) == pytest.approx(1, abs=2e-3)


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
