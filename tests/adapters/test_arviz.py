"""Particles as ArviZ data: groups, names, predictions and attributes, under whichever ArviZ is installed."""

import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist

import opvi
from opvi import to_arviz
from opvi.adapters.arviz import arviz as az  # imported there without ArviZ's note of the day
from opvi.tracking._bank import BankState
from opvi.tracking._classifier import ClassifierState

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2)).astype(np.float32)
Y = (X @ [1, -1] + 0.5 * RNG.normal(size=40)).astype(np.float32)
LABEL = (Y > 0).astype(int)


@pytest.fixture(autouse=True)
def _defaults_of_jax():
    """NumPyro itself does not compute under the suite's strictness."""
    mpl.use("Agg")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def regression(X, y=None):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    numpyro.deterministic("sum", slopes.sum())
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ slopes, noise), obs=y)


@pytest.fixture(scope="module")
def named():
    """A NumPyro model, 400 particles around its truth, and the rows."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        target = opvi.from_numpyro(regression, (X, Y))
        where = jnp.array([np.log(0.5), 1.0, -1.0])  # noise, slopes: parameters are in the order of their names
        particles = where + 0.05 * jax.random.normal(jax.random.key(0), (400, 3))
        algorithm = opvi.svgd(target, step=1e-6)
        state, _ = opvi.run(algorithm, opvi.stream((X, Y), 20), 0, particles=particles)
    return target, state


def test_axes_have_the_names_of_their_plates():
    def model(group, y):
        with numpyro.plate("groups", 3):
            level = numpyro.sample("level", dist.Normal(0, 1))
            numpyro.sample("pair", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.deterministic("twice", 2 * level)
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(level[group], 1.0), obs=y)

    rows = np.arange(40) % 3, Y
    sampler = opvi.svgd(opvi.from_numpyro(model, rows), step=0.01)
    state = sampler.init(jax.random.key(0), 5)
    made = to_arviz(state, sampler, coords={"groups": ["a", "b", "c"]}, dims={"twice": ["groups"]})["posterior"]
    assert made["level"].dims == ("chain", "draw", "groups")
    assert made["pair"].dims == ("chain", "draw", "groups", "pair_dim_1")
    assert made["twice"].dims == ("chain", "draw", "groups")
    assert list(made["groups"].values) == ["a", "b", "c"]


def variables(tree, group):
    return {name: tuple(value.shape) for name, value in tree[group].data_vars.items()}


def test_a_numpyro_model_by_its_names(named):
    target, state = named
    tree = to_arviz(state, target, (X, Y), constant_data={"unit": np.array([1.0])})
    assert variables(tree, "posterior") == {"slopes": (1, 400, 2), "noise": (1, 400), "sum": (1, 400)}
    assert variables(tree, "posterior_predictive") == variables(tree, "log_likelihood") == {"y": (1, 400, 40)}
    assert variables(tree, "observed_data") == {"y": (40,)}
    assert variables(tree, "constant_data") == {"X": (40, 2), "unit": (1,)}
    draws = tree["posterior"]
    np.testing.assert_allclose(draws["sum"], draws["slopes"].sum("slopes_dim_0"), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(draws["noise"][0], np.exp(state.particles[:, 0]), rtol=1e-5)
    np.testing.assert_array_equal(tree["observed_data"]["y"], Y)
    rows = jax.vmap(lambda theta: target.log_likelihood(target.unravel(theta), (X, Y)))(state.particles)
    np.testing.assert_allclose(tree["log_likelihood"]["y"][0], rows, rtol=1e-4, atol=1e-5)
    # Draws of y have standard deviation 0.5; five standard errors of a mean over 400 of them, for 40 rows.
    error = tree["posterior_predictive"]["y"].mean(("chain", "draw")) - X @ [1, -1]
    assert float(np.abs(error).max()) < 5 * 0.55 / 20
    for holder in (tree, draws):
        assert (holder.attrs["rounds"], holder.attrs["rows"]) == (2, 40)
        assert (holder.attrs["inference_library"], holder.attrs["inference_library_version"]) == (
            "opvi",
            opvi.__version__,
        )


@pytest.mark.filterwarnings("ignore")  # of ArviZ's own making
def test_arviz_works_on_it(named):
    target, state = named
    tree = to_arviz(state, target, (X, Y))
    summary = az.summary(tree, kind="stats")
    assert list(summary.index) == ["slopes[0]", "slopes[1]", "noise", "sum"]
    assert float(summary.loc["slopes[0]", "mean"]) == pytest.approx(1, abs=0.1)
    loo = az.loo(tree)
    assert np.isfinite(loo.elpd if hasattr(loo, "elpd") else loo.elpd_loo)
    if hasattr(az, "plot_posterior"):
        az.plot_posterior(tree, var_names=["slopes"])
        az.plot_ppc(tree, num_pp_samples=5)
    else:
        az.plot_dist(tree, var_names=["slopes"])
        az.plot_ppc_dist(tree, num_samples=5)
    plt.close("all")
    assert all(isinstance(value, str | int) for value in tree.attrs.values())  # which suits a file of any format


def test_other_targets_by_their_paths():
    target = opvi.mlp(2, (3,))
    state = opvi.svgd(target, step=0.1).init(jax.random.key(0), 4)
    tree = to_arviz(state, target, (X, Y), key=1)
    assert variables(tree, "posterior")["weights.0.weights"] == (1, 4, 2, 3)
    assert variables(tree, "posterior_predictive") == variables(tree, "log_likelihood") == {"y": (1, 4, 40)}
    assert variables(tree, "constant_data") == {"x": (40, 2)}
    expected = opvi.predict(target, state.particles, X).components.log_density(Y[None])
    np.testing.assert_allclose(tree["log_likelihood"]["y"][0], expected, rtol=1e-5)
    target = opvi.gaussian_mixture()
    state = opvi.svgd(target, step=0.1).init(jax.random.key(0), 4)
    tree = to_arviz(state, target, Y)  # nothing to predict with
    assert variables(tree, "posterior") == {"theta": (1, 4, 2)}
    assert variables(tree, "observed_data") == {"y": (40,)}
    assert "posterior_predictive" not in (tree.children if hasattr(tree, "children") else tree.groups())
    assert variables(to_arviz(state, target), "posterior") == {"theta": (1, 4, 2)}


def test_trackers_predict_as_they_do():
    target = opvi.logistic_regression(2)
    tracker = opvi.calibrated(opvi.opvi(target, step=0.1), target, particles=500, about="five hundred")
    state = tracker.init(jax.random.key(0))
    tree = to_arviz(state, tracker, (X, LABEL))
    assert tree.attrs["sampler"] == "five hundred"
    assert variables(tree, "posterior")["weights.0.weights"] == (1, 500, 2, 1)  # the names of its target
    share = np.asarray(tree["posterior_predictive"]["y"]).mean((0, 1))
    p = np.asarray(tracker.predict(state, X).probabilities()[:, 1])
    assert np.abs(share - p).max() < 5 * 0.5 / 500**0.5  # five standard errors of a share of 500 draws
    plain = to_arviz(state, target, (X, LABEL))  # by the particles alone
    assert "sampler" not in plain.attrs
    np.testing.assert_array_equal(plain["posterior"]["weights.0.bias"], tree["posterior"]["weights.0.bias"])
    np.testing.assert_array_equal(plain["log_likelihood"]["y"], tree["log_likelihood"]["y"])


def test_a_sampler_without_a_target_has_weights():
    regressor = opvi.regressor(2, hidden=(), particles=4)
    tree = to_arviz(regressor.init(jax.random.key(0)), regressor, (X, Y))
    assert variables(tree, "posterior") == {"weights": (1, 4, 3)}
    assert variables(tree, "posterior_predictive") == {"y": (1, 4, 40)}
    assert "standardise" in tree.attrs["note"]
    assert tree.attrs["sampler"] == regressor.about


def test_weights_of_trackers_and_of_a_banks_members():
    target = opvi.gaussian_mixture()
    members = [SimpleNamespace(particles=jnp.full((8, 2), value)) for value in (0.0, 1.0)]
    zero, log_weights = jnp.int32(0), jnp.log(jnp.array([0.25, 0.75]))
    state = BankState(tuple(members), log_weights, zero, zero)
    tree = to_arviz(state, target)
    assert variables(tree, "posterior") == {"theta": (1, 16, 2)}
    assert float(tree["posterior"]["theta"].mean()) == 0.75
    one = opvi.langevin(target, step=0.1)
    assert variables(to_arviz(state, opvi.bank([one, one])), "posterior") == {"theta": (1, 16, 2)}
    other = opvi.langevin(opvi.logistic_regression(1), step=0.1)  # of as many parameters
    assert variables(to_arviz(state, opvi.bank([one, other])), "posterior") == {"weights": (1, 16, 2)}
    assert "resampled" in tree.attrs["note"]
    members[1] = SimpleNamespace(particles=jnp.zeros((8, 3)))
    with pytest.raises(ValueError, match=r"\[2, 3\] parameters.*state.members"):
        to_arviz(state._replace(members=tuple(members)), target)
    # The classifier's state has weights too, but its trackers' particles are told apart by their place only.
    state = ClassifierState(None, tuple(members[:1]), None, log_weights, None, zero, zero, None, None, None)
    tree = to_arviz(state, opvi.regressor(2))
    assert "weights of the samplers" in tree.attrs["note"]


def test_bad_arguments_are_refused():
    target = opvi.gaussian_mixture()
    state = opvi.svgd(target, step=0.1).init(jax.random.key(0), 4)
    with pytest.raises(TypeError, match="`state` is a int"):
        to_arviz(3, target)
    with pytest.raises(TypeError, match="`model` is a str"):
        to_arviz(state, "svgd")
    with pytest.raises(ValueError, match="particles of 2 numbers, but the target has 3"):
        to_arviz(state, opvi.logistic_regression(2))
    with pytest.raises(ValueError, match="0 rows"):
        to_arviz(state, target, Y[:0])
    with pytest.raises(ValueError, match=r"pairs \(X, y\)"):
        to_arviz(state, opvi.regressor(2), X)


WITHOUT = """
import sys
sys.modules["numpyro"] = sys.modules["arviz"] = None
import opvi
for name in ("from_numpyro", "to_arviz"):
    try:
        getattr(opvi, name)
    except ImportError as error:
        print(error)
"""


def test_a_missing_library_is_named():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    for name, library in (("from_numpyro", "numpyro"), ("to_arviz", "arviz")):
        assert f"`opvi.{name}` needs" in done.stdout
        assert f'pip install "opvi[{library}]"' in done.stdout


def test_two_first_processes_of_a_day(tmp_path, monkeypatch):
    """ArviZ 0.x notes the day in a file, and fails in the process whose note another one has just moved away."""
    once = "import pathlib\nnote = pathlib.Path(__file__).with_name('note')\nlost = not note.exists()\nnote.touch()\n"
    (tmp_path / "arviz").mkdir()
    (tmp_path / "arviz" / "__init__.py").write_text(once + "if lost:\n    raise FileNotFoundError(note)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "arviz"] + ["opvi.adapters.arviz"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(opvi.adapters, "arviz")
    assert import_module("opvi.adapters.arviz").arviz.lost is False


@pytest.mark.slow
def test_particles_with_covariances_are_exported_as_draws():
    """More than 50 parameters, linear: the sds are the posterior's, where the particles are one point."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 55)).astype(np.float32)
    y = (X[:, 0] + 0.5 * rng.normal(size=300)).astype(np.float32)
    tracker = opvi.tracker(opvi.linear_regression(55, noise=0.25))
    state, _ = opvi.run(tracker, opvi.stream((X, y), 50), 0)
    design = np.column_stack([X, np.ones(300)]).astype(float)
    sd = np.sqrt(np.diag(np.linalg.inv(np.eye(56) + design.T @ design / 0.25)))[:-1]
    labels = [f"x{i}" for i in range(55)]
    made = opvi.to_arviz(
        state,
        tracker,
        (X[:5], y[:5]),
        draws=4000,
        coords={"column": labels},
        dims={"weights.0.weights": ["column", "output"]},
    )
    weights = made["posterior"]["weights.0.weights"]
    assert weights.dims == ("chain", "draw", "column", "output")
    assert list(weights["column"].values) == labels
    np.testing.assert_allclose(np.asarray(weights)[0, :, :, 0].std(0), sd, rtol=5 / np.sqrt(8000))
    assert made["log_likelihood"]["y"].shape == (1, 4000, 5)
    assert opvi.to_arviz(state, tracker)["posterior"]["weights.0.bias"].shape[1] == 1000
    with pytest.raises(ValueError, match="`dims` names z, but the variables are"):
        opvi.to_arviz(state, tracker, dims={"z": ["a"]})
