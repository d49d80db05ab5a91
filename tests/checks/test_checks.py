"""Scores of rows left out beside closed forms and ArviZ, models compared beside closed forms, calibration of rows."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

import opvi
from opvi.checks import calibration
from opvi.posterior import concerns_of_predictions

RNG = np.random.default_rng(0)
Y = RNG.normal(size=30).astype(np.float32)
MEAN = opvi.target(  # of a normal distribution with variance 1, N(0, 1) a priori
    lambda v: norm_logpdf(v).sum(), lambda v, y: norm_logpdf(y - v[0]), lambda key: jax.random.normal(key, (1,))
)


def norm_logpdf(x):
    return -(x**2) / 2 - math.log(2 * math.pi) / 2


@dataclass(frozen=True)
class Exact:
    """A sampler that has seen all rows, stores some, and draws from the exact posterior."""

    target: opvi.Target = MEAN

    def init(self, key, particles=None): ...
    def step(self, key, state, batch): ...

    def draws(self, state, key, n):
        precision = 1 + len(Y)
        return float(Y.sum()) / precision + jax.random.normal(key, (n, 1)) / precision**0.5

    def stored_rows(self, state):
        room = np.concatenate([Y, np.full(10, 1e6, np.float32)])
        return room, jnp.asarray(np.r_[np.ones(len(Y)), np.zeros(10)])


class State:
    rows = round = 30
    particles = jnp.zeros((1, 1))


def closed_form():
    """Leave-one-out predictive densities."""
    each = []
    for i, y in enumerate(Y):
        others = np.delete(Y, i)
        each.append(norm.logpdf(y, others.sum() / (1 + len(others)), np.sqrt(1 + 1 / (1 + len(others)))))
    return np.array(each)


@pytest.mark.parametrize("score", [opvi.loo, opvi.waic])
def test_scores_of_rows_left_out(score):
    found = score(Exact(), State, 0, 4000)
    # p(y | draw) varies by about (y - mean) / √31: five standard errors of a mean over 4,000 draws, for each row.
    np.testing.assert_allclose(found.pointwise, closed_form(), atol=0.03)
    assert found.elpd == pytest.approx(closed_form().sum(), abs=0.1)
    assert found.p == pytest.approx((norm.logpdf(Y, Y.sum() / 31, np.sqrt(1 + 1 / 31)) - closed_form()).sum(), abs=0.1)
    assert found.se == pytest.approx(np.sqrt(30) * closed_form().std(), rel=0.05)
    assert (found.rows, found.seen, found.unreliable) == (30, 30, 0)
    assert "over 30 rows" in str(found)


@pytest.mark.filterwarnings("ignore")
def test_scores_are_arvizs():
    pytest.importorskip("arviz")
    from opvi.adapters.arviz import arviz

    tree = opvi.to_arviz(Exact(), State, Y, key=3, n=500)
    for ours, theirs in ((opvi.loo, arviz.loo), (opvi.waic, getattr(arviz, "waic", None))):
        if theirs is None:  # ArviZ 1 has no WAIC
            continue
        mine, other = ours(Exact(), State, 3, 500), theirs(tree, pointwise=True)
        assert mine.elpd == pytest.approx(float(other.iloc[0] if hasattr(other, "iloc") else other.elpd), abs=1e-3)
        assert mine.se == pytest.approx(float(other["se"]), rel=1e-3)
    if hasattr(arviz.loo(tree, pointwise=True), "pareto_k"):
        np.testing.assert_allclose(
            opvi.loo(Exact(), State, 3, 500).doubt, arviz.loo(tree, pointwise=True).pareto_k, atol=1e-3
        )


def test_what_cannot_be_scored_is_refused():
    first_order = opvi.svgd(MEAN, step=0.1)
    with pytest.raises(TypeError, match="a ParVI stores no rows.*compare_models"):
        opvi.loo(first_order, first_order.init(0))
    regressor = opvi.regressor(1, hidden=())
    with pytest.raises(TypeError, match="no single target"):
        opvi.loo(regressor, None)
    polynomial = opvi.sl_opvi(MEAN)
    with pytest.raises(TypeError, match="a SLOPVI stores no rows"):
        opvi.loo(polynomial, polynomial.init(0))
    none = opvi.ibis(MEAN)
    with pytest.raises(ValueError, match="no row is stored"):
        opvi.loo(none, none.init(0))


def test_rows_that_decide_are_named():
    def far(self, state):
        return np.r_[Y, np.float32(40)], np.ones(31)

    sampler = type("Far", (Exact,), {"stored_rows": far})()
    found = opvi.loo(sampler, State)
    assert found.unreliable == 1
    assert "Pareto k is above 0.7 for 1 rows" in str(found)
    assert "the 31 rows stored of 30" in str(found)


X = RNG.normal(size=(25, 2)).astype(np.float32)
Z = (X @ [1.0, -0.5] + 0.5 * RNG.normal(size=25)).astype(np.float32)


@pytest.fixture(scope="module")
def compared():
    models = {
        "loud": opvi.gauss_newton(opvi.linear_regression(2, noise=4.0), half_life=math.inf),
        "right": opvi.gauss_newton(opvi.linear_regression(2, noise=0.25), half_life=math.inf),
    }
    return opvi.compare_models(models, opvi.stream((X, Z), 1), key=0, particles=1)


def test_two_conjugate_models(compared):
    """In batches of one row, prequential scores add up to the evidence, which has a closed form."""
    design = np.column_stack([X, np.ones(25)]).astype(float)
    exact, each = {}, {}
    for name, noise in (("loud", 4.0), ("right", 0.25)):
        cov = design @ design.T + noise * np.eye(25)
        exact[name] = multivariate_normal.logpdf(Z, np.zeros(25), cov)
        upto = [multivariate_normal.logpdf(Z[:i], np.zeros(i), cov[:i, :i]) for i in range(1, 26)]
        each[name] = np.diff(upto, prepend=0)
    assert compared.names == ["right", "loud"]
    for name in exact:
        assert compared.score[name] == pytest.approx(exact[name], abs=1e-2)
        assert compared.log_evidence[name] == pytest.approx(exact[name], abs=1e-2)
    apart = each["loud"] - each["right"]
    assert compared.difference == {"right": 0, "loud": pytest.approx(apart.sum(), abs=1e-2)}
    assert compared.se["loud"] == pytest.approx(5 * apart.std(), rel=1e-3)
    assert compared.rows == 25


def test_it_says_so_in_a_sentence(compared):
    by, se = -compared.difference["loud"], compared.se["loud"]
    assert compared.sentence.startswith(f"right predicts better than loud, by {by:.1f} ± {se:.1f} nats over 25 rows.")
    assert f"({by:.1f} nats)" in compared.sentence
    lines = str(compared).splitlines()
    assert len({len(line) for line in lines[:-1]}) == 1
    even = opvi.checks.ModelComparison(
        ["a", "b"], {"a": 1, "b": 0}, {"a": 0, "b": -1}, {"a": 0, "b": 2}, {"a": math.nan, "b": 0}, 9, {}
    )
    assert even.sentence == "By their predictions, a and b cannot be told apart: 1.0 ± 2.0 nats over 9 rows."


def test_comparisons_of_nothing_are_refused():
    with pytest.raises(ValueError, match="1 models, but at least 2"):
        opvi.compare_models({"a": opvi.svgd(MEAN, step=0.1)}, [])
    with pytest.raises(ValueError, match="the stream is empty"):
        opvi.compare_models({name: opvi.svgd(MEAN, step=0.1) for name in "ab"}, [])


@pytest.mark.parametrize("flagged", [False, True])
def test_counts_are_checked_against_their_model(flagged):
    rng = np.random.default_rng(1)
    rate = 20 * (rng.gamma(2.0, 0.5, 600) if flagged else 1)
    y = rng.poisson(rate, 600).astype(np.float32)
    target = opvi.network(
        lambda p, x: p[None] + 0 * x, lambda key: jax.random.normal(key, (1,)), opvi.targets.poisson()
    )

    class Counts(Exact):
        def draws(self, state, key, n):
            return np.log(y.mean()) + jax.random.normal(key, (n, 1)) / float(np.sqrt(y.sum()))

        def stored_rows(self, state):
            return (np.zeros((600, 1), np.float32), y), np.ones(600)

    found = calibration(Counts(target), State, 0, 100)
    said = concerns_of_predictions(found)
    assert bool(said) == flagged, found
    assert (found.inside < 0.65) == flagged
