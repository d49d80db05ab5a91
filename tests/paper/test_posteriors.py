"""The models of posteriordb: their priors with Jacobians, their likelihoods, the way back, and the loader."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import opvi
from paper import tracking
from paper.commands import main
from paper.data import POSTERIORDB, DataError, ReferencePosterior, posteriordb
from paper.posteriors import MODELS, posterior

RNG = np.random.default_rng(0)


def counts(n):
    return RNG.integers(1, 9, n)


DATA = {
    "arK-arK": {"y": RNG.normal(size=30), "K": np.array(5), "T": np.array(30)},
    "eight_schools-eight_schools_noncentered": {"y": counts(8), "sigma": counts(8)},
    "kidiq-kidscore_momiq": {"kid_score": counts(12), "mom_iq": RNG.normal(size=12)},
    "low_dim_gauss_mix-low_dim_gauss_mix": {"y": RNG.normal(size=12)},
    "mesquite-logmesquite": {
        "weight": RNG.random(12) + 1,
        "group": counts(12) % 2,
        **{name: RNG.random(12) + 1 for name in ("diam1", "diam2", "canopy_height", "total_height", "density")},
    },
    "sblrc-blr": {"y": RNG.normal(size=12), "X": RNG.normal(size=(12, 5))},
}


def model(name):
    empty = np.zeros(0)
    return posterior(ReferencePosterior(name, [], empty, empty, empty, DATA[name]))


def half_cauchy(scale):
    return stats.halfcauchy(scale=scale).logpdf


# Log prior over the parameters that are constrained or not, as the models are written down.
PRIORS = {
    "arK-arK": lambda p: stats.norm(0, 10).logpdf(p[:-1]).sum() + half_cauchy(2.5)(p[-1]),
    "kidiq-kidscore_momiq": lambda p: half_cauchy(2.5)(p[-1]),
    "low_dim_gauss_mix-low_dim_gauss_mix": lambda p: (
        stats.norm(0, 2).logpdf(p[:2]).sum()
        + stats.halfnorm(scale=2).logpdf(p[2:4]).sum()
        + stats.beta(5, 5).logpdf(p[4])
    ),
    "mesquite-logmesquite": lambda p: 0.0,
    "sblrc-blr": lambda p: stats.norm(0, 10).logpdf(p[:-1]).sum() + stats.halfnorm(scale=10).logpdf(p[-1]),
}


def differences(values):
    return np.asarray(values, float) - float(values[0])


@pytest.mark.parametrize("name", PRIORS)
def test_log_priors_hold_the_jacobian(name):
    m = model(name)
    with jax.enable_x64(True):
        points = jnp.asarray(RNG.normal(size=(4, m.target.dim)))
        ours = [m.target.log_prior(m.target.unravel(v)) for v in points]

        def one(v):
            return m.constrained(v[None])[0]

        volume = [jnp.linalg.slogdet(jax.jacobian(one)(v))[1] for v in points]
        written = [PRIORS[name](np.asarray(one(v))) + float(j) for v, j in zip(points, volume, strict=True)]
    np.testing.assert_allclose(differences(ours), differences(written), atol=1e-8)


def test_schools_are_not_centred():
    m = model("eight_schools-eight_schools_noncentered")
    v = np.concatenate([[1.0, np.log(2.0)], np.arange(8) / 4])
    with jax.enable_x64(True):
        found = m.constrained(jnp.asarray(v)[None])[0]
        prior = [m.target.log_prior(jnp.asarray(u)) for u in (v, v * 0)]
        rows = m.target.log_likelihood(jnp.asarray(v), jax.tree.map(jnp.asarray, m.rows))
    theta = 1 + 2 * np.arange(8) / 4
    np.testing.assert_allclose(found, [1, 2, *theta])
    data = DATA["eight_schools-eight_schools_noncentered"]
    np.testing.assert_allclose(rows, stats.norm(theta, data["sigma"]).logpdf(data["y"]))
    written = [
        stats.norm(0, 5).logpdf(u[0]) + half_cauchy(5)(np.exp(u[1])) + u[1] + stats.norm.logpdf(u[2:]).sum()
        for u in (v, v * 0)
    ]
    np.testing.assert_allclose(prior[0] - prior[1], written[0] - written[1])


@pytest.mark.parametrize("name", MODELS)
def test_likelihoods_give_one_number_a_row(name):
    m = model(name)
    rows = jax.tree.map(lambda a: jnp.asarray(a[:3], jnp.float32 if a.dtype.kind == "f" else jnp.int32), m.rows)
    out = m.target.log_likelihood(m.target.init(jax.random.key(0)), rows)
    assert out.shape == (3,)
    assert np.isfinite(out).all()


def test_mixture_and_regression_likelihoods():
    m = model("low_dim_gauss_mix-low_dim_gauss_mix")
    v = np.array([-1.0, np.log(3.0), 0.1, -0.2, 0.4])
    y = DATA["low_dim_gauss_mix-low_dim_gauss_mix"]["y"]
    share = 1 / (1 + np.exp(-0.4))
    density = share * stats.norm(-1, np.exp(0.1)).pdf(y) + (1 - share) * stats.norm(2, np.exp(-0.2)).pdf(y)
    with jax.enable_x64(True):
        np.testing.assert_allclose(m.target.log_likelihood(jnp.asarray(v), jnp.asarray(y)), np.log(density))
        m = model("arK-arK")
        X, y = m.rows
        v = np.array([0.1, 0.5, 0.4, 0.3, 0.2, 0.1, -0.5])
        series = DATA["arK-arK"]["y"]
        mean = 0.1 + 0.5 * series[4] + 0.4 * series[3] + 0.3 * series[2] + 0.2 * series[1] + 0.1 * series[0]
        first = m.target.log_likelihood(jnp.asarray(v), (jnp.asarray(X), jnp.asarray(y)))[0]
    np.testing.assert_allclose(first, stats.norm(mean, np.exp(-0.5)).logpdf(series[5]))


def test_the_loader_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("OPVI_DATA", raising=False)
    with pytest.raises(DataError, match=r"OPVI_DATA is not set.*posteriordb/sblrc-blr.npz"):
        posteriordb("sblrc-blr")
    assert main(["measure", "posteriordb", "--out", str(tmp_path / "out")]) == 1
    monkeypatch.setenv("OPVI_DATA", str(tmp_path))
    with pytest.raises(DataError, match="is not there"):
        posteriordb("sblrc-blr")
    with pytest.raises(DataError, match="no posterior known here"):
        posteriordb("nine_schools")
    folder = tmp_path / "posteriordb"
    folder.mkdir()
    (folder / "sblrc-blr.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        posteriordb("sblrc-blr")
    draws = RNG.normal(size=(2, 50, 6))
    np.savez(folder / "sblrc-blr.npz", draws=draws, names=np.array(list("abcdef")), data_y=np.zeros(3))
    reference = posteriordb("sblrc-blr")
    assert reference.names == list("abcdef")
    assert list(reference.data) == ["y"]
    np.testing.assert_allclose(reference.mean, draws.mean((0, 1)))


def test_every_posterior_has_a_model():
    assert set(MODELS) == set(POSTERIORDB)


@pytest.mark.slow
def test_a_tracking_trial_measures_against_the_exact_posterior():
    size = tracking.Size(rounds=6, particles=12)
    target = opvi.gaussian_mixture()
    still = tracking.SETTINGS["B = 20"]
    record = tracking.mixture_trial(opvi.gain_one(target, substeps=1), still, size, 0)
    assert len(record["tracking"]) == 1  # the fifth round
    assert np.isfinite([record[key] for key in ("tracking_mean", "covariance_ratio", "weight_error")]).all()
    exact = tracking.exact_trial(True, still, size, 0)
    assert 0 < exact["tracking_mean"] < record["tracking_mean"]
