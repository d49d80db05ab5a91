"""What judges posteriors must be right itself: exact answers, orders, clocks and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from benchmarks import order_models, order_references, orders
from benchmarks.order_models import FAMILIES, ORDERS

EXACT = [name for name, family in FAMILIES.items() if family.exact]


def proposals(name, exact, rng, count=400_000):
    """Return points and their log density: around the exact answer, around both modes, or from the prior."""
    z = rng.standard_t(8, size=(count, len(exact.mean)))
    if name == "hierarchy":  # whose posterior of few rows is bent
        x = rng.normal(size=z.shape) * [3.0, *[1.0] * 10]
        return x, stats.norm.logpdf(x, 0, [3.0, *[1.0] * 10]).sum(1)
    at, scale = exact.mean, 1.5 * exact.sd
    if name == "two modes":  # means that change places
        at, scale = rng.choice([-2.0, 2.0], (count, 1)) * [1.0, -1.0], np.full(2, 0.3)
    x = at + z * scale
    centres = [[2.0, -2.0], [-2.0, 2.0]] if name == "two modes" else [exact.mean]
    each = [(stats.t.logpdf((x - centre) / scale, 8) - np.log(scale)).sum(1) for centre in centres]
    return x, np.logaddexp.reduce(each, axis=0) - np.log(len(centres))


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_posterior_is_that_of_the_target(name):
    """Weighted draws of another distribution have its moments and its evidence."""
    family, count = FAMILIES[name], 120 if name == "two modes" else 15  # its modes must be apart
    rows = family.rows._replace(data=jax.tree.map(lambda leaf: leaf[:count], family.rows.data))
    exact, target = family.exact(rows), family.target
    x, proposed = proposals(name, exact, np.random.default_rng(0))

    def density(v):
        return target.log_prior(target.unravel(v)) + target.log_likelihood(target.unravel(v), rows.data).sum()

    ratio = np.asarray(jax.jit(jax.vmap(density))(jnp.asarray(x, jnp.float32)), float) - proposed
    w = np.exp(ratio - ratio.max())
    evidence = np.log(w.mean()) + ratio.max()
    w /= w.sum()
    effective = 1 / (w**2).sum()
    assert effective > 500
    error = 4.5 / np.sqrt(effective)
    mean = w @ x
    np.testing.assert_allclose((mean - exact.mean) / exact.sd, 0, atol=error)
    np.testing.assert_allclose(np.sqrt(w @ (x - mean) ** 2) / exact.sd, 1, atol=2 * error)
    assert evidence == pytest.approx(exact.log_evidence, abs=error + 0.01)


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_a_permutation_that_never_changes(order):
    rows = FAMILIES["poisson"].rows
    one, two = (ORDERS[order](rows, np.random.default_rng(1)) for _ in range(2))
    assert sorted(one.tolist()) == list(range(len(rows.y)))
    np.testing.assert_array_equal(one, two)


def test_sorted_orders_are_sorted_and_a_drift_is_in_between():
    family = FAMILIES["poisson"]

    def trend(order):
        return stats.spearmanr(family.in_order(order)[1], np.arange(len(family.rows.y)))[0]

    assert (np.diff(family.in_order("by y")[1]) <= 0).all()
    assert abs(trend("shuffled")) < 0.1
    assert trend("nearly by y") < -0.9
    assert -0.9 < trend("drifting") < -0.5


def test_draws_of_the_posterior_itself_are_no_further_than_chance():
    reference = {"mean": [1.0, -2.0, 0.0], "sd": [0.1, 2.0, 1.0]}
    rng = np.random.default_rng(0)
    worst = [
        orders.errors(rng.normal(reference["mean"], reference["sd"], (1000, 3)), reference)["worst mean"]
        for _ in range(300)
    ]
    beyond = np.mean(np.array(worst) > orders.chance(3))
    assert 0 < beyond < 0.04


def test_errors_are_in_units_of_the_reference():
    draws = np.random.default_rng(0).normal([3.0, 0.0], [2.0, 0.5], (100_000, 2))
    found = orders.errors(draws, {"mean": [1.0, 0.0], "sd": [4.0, 0.5]})
    assert found["worst mean"] == pytest.approx(0.5, abs=0.01)
    assert found["smallest sd"] == pytest.approx(0.5, abs=0.01)
    assert found["largest sd"] == pytest.approx(1.0, abs=0.01)


def test_compiling_within_compiling_counts_once():
    clock = orders.Clock(processor=10.0, compiled=[(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (7.0, 8.0)])
    assert clock.compiling == pytest.approx(6.0)
    assert clock.running == pytest.approx(4.0)


def test_clocks_hear_of_a_program_that_is_compiled():
    with orders.timed() as cold:
        program = jax.jit(lambda x: jnp.sin(x) * 3.25)
        program(jnp.ones(7)).block_until_ready()
    with orders.timed() as warm:
        program(jnp.ones(7)).block_until_ready()
    assert cold.compiling > 0
    assert warm.compiling == 0


def test_a_bridge_finds_the_integral_of_a_gaussian():
    root = np.array([[2.0, 0.0], [0.5, 0.1]])
    draws = np.random.default_rng(0).normal(size=(4, 4000, 2)) @ root.T + [1.0, 2.0]

    def log_density(v):
        z = jnp.linalg.solve(jnp.asarray(root, v.dtype), v - jnp.array([1.0, 2.0], v.dtype))
        return 7.0 - (z**2).sum() / 2

    value, error = order_references.log_evidence(log_density, draws.astype(np.float32))
    exact = 7.0 + np.log(2 * np.pi) + np.log(np.linalg.det(root))
    assert value == pytest.approx(exact, abs=0.02)
    assert error < 0.02


def test_a_ready_made_prior_is_completed():
    family = FAMILIES["logistic 200, 500 rows"]
    at = family.target.ravel(family.target.init(jax.random.key(0)))
    total = float(family.target.log_prior(family.target.unravel(at))) + family.prior_gap()
    assert total == pytest.approx(float(order_models.standard(at)), rel=1e-4)
