"""Targets from NumPyro models: densities, names, draws, heads, refusals, and the models of posteriordb."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import potential_energy

import opvi
from opvi import from_numpyro
from paper.data import ReferencePosterior
from paper.posteriors import posterior

RNG = np.random.default_rng(0)
ROWS = 7
X = RNG.normal(size=(ROWS, 3)).astype(np.float32)
Y = RNG.normal(size=ROWS).astype(np.float32)
GROUP = RNG.integers(0, 4, ROWS)


@pytest.fixture(autouse=True)
def _defaults_of_jax():
    """NumPyro itself does not compute under the suite's strictness."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def weights():
    return numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))


def regression(X, y=None):
    w = weights()
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1.0))
    mean = numpyro.deterministic("mean", X @ w)
    numpyro.deterministic("squares", w**2)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def hierarchical(X, group, y):
    centre = numpyro.sample("centre", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.LogNormal(0, 1))
    with numpyro.plate("groups", 4):
        level = numpyro.sample("level", dist.Normal(centre, spread))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    root = numpyro.sample("root", dist.LKJCholesky(3, 1.0))
    numpyro.factor("penalty", -0.5 * (level**2).sum())  # of the prior
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.StudentT(4.0, level[group] + X @ (root @ share), 1.0), obs=y)
        numpyro.factor("tilt", -0.1 * jnp.abs(level[group]))  # of every row


def scaled_and_masked(X, y):
    with handlers.scale(scale=0.5):
        sigma = numpyro.sample("sigma", dist.Gamma(2.0, 1.0))
    w = weights()
    with numpyro.plate("rows", len(y)), handlers.scale(scale=2.0), handlers.mask(mask=X[:, 0] > 0):
        numpyro.sample("y", dist.Normal(X @ w, sigma), obs=y)


def several_sites(X, y):
    w = weights()
    with numpyro.plate("columns", 2, dim=-1), numpyro.plate("rows", len(y), dim=-2):
        numpyro.sample("pair", dist.Normal((X @ w)[:, None], 1.0), obs=jnp.stack([y, -y], 1))
    with numpyro.plate("again", len(y)):
        numpyro.sample("vector", dist.MultivariateNormal(w, jnp.eye(3)), obs=X)


def improper(y):
    low = numpyro.sample("low", dist.ImproperUniform(constraints.real, (), ()))
    high = numpyro.sample("high", dist.ImproperUniform(constraints.greater_than(low), (), ()))  # moves with the other
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(high - low, 1.0), obs=y)


not_centred = handlers.reparam(hierarchical, config={"level": LocScaleReparam(0)})
CASES = {
    "regression": (regression, (X, Y)),
    "by keyword": (regression, {"X": X, "y": Y}),
    "conditioned": (handlers.condition(regression, {"sigma": jnp.float32(0.5)}), (X, Y)),
    "hierarchical, not centred": (not_centred, ((X, GROUP), Y)),
    "scaled and masked": (scaled_and_masked, (X, Y)),
    "several sites": (several_sites, (X, Y)),
    "improper": (improper, Y),
}


@functools.cache
def case(name):
    model, data = CASES[name]
    return from_numpyro(model, data), jax.tree.map(jnp.asarray, data)


def test_targets_of_one_model_and_row_are_equal_and_share_programs():
    one, two = (from_numpyro(regression, (X, Y)) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert opvi.langevin(one, step=0.1) == opvi.langevin(two, step=0.1)
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def prior(target, particle):
        traced.append(target)
        return target.log_prior(target.unravel(particle))

    assert prior(one, jnp.zeros(one.dim)) == prior(two, jnp.zeros(one.dim))
    assert len(traced) == 1
    assert one != from_numpyro(regression, (X[1:], Y[1:]))
    assert one != from_numpyro(functools.partial(regression), (X, Y))


@pytest.mark.parametrize("name", CASES)
def test_prior_and_rows_add_up_to_the_potential(name):
    target, data = case(name)
    model = CASES[name][0]
    arguments, keywords = ((), data) if isinstance(data, dict) else (jax.tree.leaves(data), {})

    @jax.jit
    def densities(params):
        rows, fewer = (target.log_likelihood(params, jax.tree.map(lambda a, n=n: a[:n], data)) for n in (ROWS, 3))
        together = target.log_prior(params), potential_energy(model, arguments, keywords, params)
        return rows, fewer, together, target.log_likelihoods(target.ravel(params)[None], data)

    for seed in range(2):
        rows, fewer, (prior, potential), sites = densities(target.init(jax.random.key(seed)))
        assert rows.shape == (ROWS,)
        np.testing.assert_allclose(prior + rows.sum(), -potential, rtol=2e-5)
        np.testing.assert_allclose(fewer, rows[:3], rtol=2e-5, atol=1e-5)  # the plate follows the rows
        np.testing.assert_allclose(sum(sites.values())[0], rows, rtol=2e-5, atol=1e-5)


def test_names_are_kept_and_draws_return_to_their_supports():
    target, _ = case("hierarchical, not centred")
    assert set(target.init(jax.random.key(0))) == {"centre", "spread", "level_decentered", "share", "root"}
    found = target.constrain(RNG.normal(size=(5, target.dim)))
    assert list(found) == ["centre", "spread", "level_decentered", "level", "share", "root"]
    assert (found["spread"] > 0).all()
    np.testing.assert_allclose(found["share"].sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose((found["root"] ** 2).sum(-1), 1, rtol=1e-5)  # rows of a correlation's root
    level = found["centre"][:, None] + found["spread"][:, None] * found["level_decentered"]
    np.testing.assert_allclose(found["level"], level, rtol=1e-5)
    target, _ = case("regression")
    found = target.constrain(RNG.normal(size=(5, target.dim)))
    assert list(found) == ["w", "sigma", "squares"]  # not `mean`, which follows the rows
    np.testing.assert_allclose(found["squares"], found["w"] ** 2)
    other = dataclasses.replace(target, init=lambda key: jax.tree.map(jnp.zeros_like, target.init(key)))
    assert (other.constrain(opvi.draw(other, 0, 2))["sigma"] == 1).all()


def test_particles_start_from_the_prior():
    def model(y):
        numpyro.sample("gamma", dist.Gamma(3.0, 2.0))
        numpyro.sample("vague", dist.Gamma(1e-3, 1.0))  # nearly every draw is too small for a float
        centre = numpyro.sample("centre", dist.Normal(2, 0.5))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(centre, 1.0), obs=y)

    target, n = from_numpyro(model, Y), 4000
    particles = opvi.draw(target, 0, n)
    assert bool(jnp.isfinite(particles).all())
    found = target.constrain(particles)
    for name, mean, sd in (("gamma", 1.5, 0.75**0.5), ("centre", 2.0, 0.5)):
        assert abs(float(found[name].mean()) - mean) < 4 * sd / n**0.5  # four standard errors of a mean of n draws


def logistic(X, y=None):
    w = weights()
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def classes(X, group, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([4, 3]).to_event(2))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Categorical(probs=jax.nn.softmax(X + w[group])), obs=y)


def one_mean(group, y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))  # the same for all rows: the plate spreads it
    with numpyro.plate("rows", 1000, subsample_size=len(y)):
        numpyro.sample("y", dist.Normal(mean, 2.0), obs=y)


def rates(X, y):
    w = weights()
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w)), obs=y)


def counts(X, y):
    w = weights()
    c = numpyro.sample("c", dist.Exponential(1.0))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ w), c), obs=y)


def tails(X, y):
    w = weights()
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.StudentT(4.0, X @ w, scale), obs=y)


def grades(X, y):
    w = weights()
    cuts = numpyro.sample("cuts", dist.TransformedDistribution(dist.Normal(0, 1).expand([3]), ORDERED))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.OrderedLogistic(X @ w, cuts), obs=y)


ORDERED = dist.transforms.OrderedTransform()
COUNT = np.arange(len(Y)) % 4
HEADS = {
    "Normal": (regression, (X, Y), X),
    "Normal in a subsample": (one_mean, (GROUP, Y), GROUP),
    "Bernoulli": (logistic, (X, (Y > 0).astype(int)), X),
    "Categorical": (classes, ((X, GROUP), GROUP % 3), (X, GROUP)),  # an index among the inputs
    "Categorical in order": (grades, (X, COUNT), X),
    "Poisson": (rates, (X, COUNT), X),
    "NegativeBinomial": (counts, (X, COUNT), X),
    "StudentT": (tails, (X, Y), X),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_predict_what_the_model_says(name):
    model, data, inputs = HEADS[name]
    target = from_numpyro(model, data)
    particles = opvi.draw(target, 1, 3)

    @jax.jit
    def both(particles):
        said = opvi.predict(target, particles, inputs).components
        return said, said.log_density(jnp.asarray(data[1])[None]), target.log_likelihoods(particles, data)["y"]

    said, found, expected = both(particles)
    assert type(said).__name__ == name.split()[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def autoregression(before, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(slope * (y - before), 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (scaled_and_masked, (X, Y)),  # rows that count otherwise than a prediction's would
        (hierarchical, (X, GROUP, Y)),  # no head of opvi's
        (several_sites, (X, Y)),
        (improper, Y),  # no inputs
        (autoregression, (X[:, 0], Y)),  # what is observed is also put in
        (regression, {"X": X, "y": Y}),  # no pairs: no sampler would know inputs from observations
    ],
)
def test_no_head_where_none_would_be_right(model, data):
    assert from_numpyro(model, data).predict is None


def test_the_tracker_linearises_a_gaussian_prior_with_a_head_where_rows_would_be_dear():
    def wide(X, y=None):
        w = numpyro.sample("w", dist.Normal(0.5, 2).expand([1100]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(X @ w[:3], 1.0), obs=y)

    assert "Gauss–Newton" in opvi.tracker(from_numpyro(wide, (X, Y))).about
    assert opvi.tracker(case("regression")[0]).about.startswith("IBIS")


def test_predictive_draws_follow_the_particle():
    target, data = case("several sites")
    n = 2000
    particles = jnp.ones((n, 3))
    drawn = target.sample(0, particles, data)
    assert {name: value.shape for name, value in drawn.items()} == {"pair": (n, ROWS, 2), "vector": (n, ROWS, 3)}
    # Both have standard deviation 1: five standard errors of a mean of n draws, over 14 and 21 means.
    assert np.abs(drawn["pair"].mean(0) - X.sum(1)[:, None]).max() < 5 / n**0.5
    assert np.abs(drawn["vector"].mean(0) - 1).max() < 5 / n**0.5


def test_a_subsampling_plate_takes_the_batch_and_counts_rows_once():
    def whole(X, y):
        w = weights()
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    def of_many(X, y):
        w = weights()
        with numpyro.plate("rows", 1000, subsample_size=len(y)) as index:
            numpyro.sample("y", dist.Normal(X[index] @ w, 1.0), obs=y[index])

    def of_the_batch(X, y):
        w = weights()
        with numpyro.plate("rows", len(y), subsample_size=2) as index:
            numpyro.sample("y", dist.Normal(X[index] @ w, 1.0), obs=y[index])

    params = {"w": jnp.ones(3)}
    data = jnp.asarray(X), jnp.asarray(Y)
    plain = from_numpyro(whole, data).log_likelihood(params, data)
    for model in (of_many, of_the_batch):
        np.testing.assert_allclose(from_numpyro(model, data).log_likelihood(params, data), plain, rtol=1e-6)


# --- refusals ---------------------------------------------------------------------------------


def normal_rows(y, mean=0.0, scale=1.0):
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def a_mean(**keywords):
    return numpyro.sample("mean", dist.Normal(0, 1), **keywords)


def local_without_a_plate(y):
    normal_rows(y, numpyro.sample("effect", dist.Normal(jnp.zeros(len(y)), 1)))


def one_site_a_row(y):
    means = [numpyro.sample(f"effect_{i}", dist.Normal(0, 1)) for i in range(len(y))]
    normal_rows(y, jnp.stack(means))


def discrete(y):
    normal_rows(y, numpyro.sample("side", dist.Bernoulli(0.5)))


def delta(y):
    normal_rows(y, numpyro.sample("fixed", dist.Delta(1.0)))


def no_plate(y):
    numpyro.sample("y", dist.Normal(a_mean() + jnp.zeros(len(y)), 1).to_event(1), obs=y)


def nothing_observed(y):
    a_mean()


def no_latent(y):
    normal_rows(y)


def learnt_without_prior(y):
    normal_rows(y, numpyro.param("shift", 0.0) + a_mean())


def partly_observed(y):
    mean = a_mean()
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y, obs_mask=y > 0)


def factor_of_rows_outside(y):
    mean = a_mean()
    numpyro.factor("fit", dist.Normal(mean, 1).log_prob(y).sum())
    normal_rows(y, mean)


def prior_from_data(y):
    normal_rows(y, numpyro.sample("mean", dist.Normal(y.mean(), 1)))


def prior_from_count(y):
    with handlers.scale(scale=1 / len(y)):
        mean = a_mean()
    normal_rows(y, mean)


def some_subsample(y):
    mean = a_mean()
    with numpyro.plate("rows", 50, subsample_size=20):
        numpyro.sample("y", dist.Normal(mean, 1), obs=jnp.zeros(20))


def looks_at_values(y):
    normal_rows(y, a_mean() if y[0] > 0 else 0.0)


def broadcasts(y):
    normal_rows(y[:, None], a_mean())


def rows_by_rows(y):
    mean = a_mean()
    with numpyro.plate("rows", len(y), dim=-1), numpyro.plate("others", len(y), dim=-2):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y[:, None] + y)


REFUSED = {
    local_without_a_plate: "site 'effect' is latent and follows the rows.*Put it into the data plate",
    one_site_a_row: "site 'effect_5' is latent and follows the rows",
    discrete: "site 'side' is latent and discrete .BernoulliProbs.*MixtureSameFamily",
    delta: "site 'fixed' has a delta.*numpyro.deterministic",
    no_plate: "site 'y' follows the rows, but lies in no plate.*with numpyro.plate",
    nothing_observed: "no observed site inside a plate.*its sites: mean",
    no_latent: "no latent site",
    learnt_without_prior: "site 'shift' is a `numpyro.param`",
    partly_observed: "site 'y_unobserved' is latent.*handlers.mask.*'y'",
    factor_of_rows_outside: "site 'fit' lies outside the data plate but depends on the rows",
    prior_from_data: "site 'mean' lies outside the data plate but depends on the rows",
    prior_from_count: "site 'mean' lies outside the data plate but depends on the rows",
    some_subsample: "plate 'rows' draws 20 of 50",
    looks_at_values: "branches on the values of its data",
    broadcasts: r"site 'y' has values of shape \(3, 1\)",
    rows_by_rows: "site 'y' lies in 2 plates that follow the rows",
}


@pytest.mark.parametrize("model", REFUSED, ids=lambda model: model.__name__)
def test_models_that_do_not_fit_are_refused(model):
    with pytest.raises((TypeError, ValueError), match=REFUSED[model]):
        from_numpyro(model, Y)


def test_bad_arguments_are_refused():
    with pytest.raises(TypeError, match="`model` is a int"):
        from_numpyro(3, Y)
    with pytest.raises(ValueError, match="`example` has 0 rows"):
        from_numpyro(no_plate, Y[:0])
    with pytest.raises(TypeError, match="dtype <U1"):
        from_numpyro(no_plate, np.array(["a"]))
    with pytest.raises(ValueError, match="same number of rows"):
        from_numpyro(regression, (X, Y[:2]))
    target, data = case("regression")
    with pytest.raises(ValueError, match=r"4 parameters, so a matrix of shape .n, 4. is needed"):
        target.constrain(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match="`data` has leaves of shape .7, 3., but the target was made with"):
        target.log_likelihoods(jnp.zeros((2, 4)), data[:1])


# --- posteriordb ------------------------------------------------------------------------------


def flat(name, support=constraints.real, shape=()):
    return numpyro.sample(name, dist.ImproperUniform(support, (), shape))


def linear(X, y, coefficients, sigma):
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(X @ coefficients, sigma), obs=y)


def ark(X, y):
    b = numpyro.sample("b", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
    linear(X, y, b, numpyro.sample("sigma", dist.HalfCauchy(2.5)))


def kidscore(X, y):
    linear(X, y, flat("b", shape=(2,)), numpyro.sample("sigma", dist.HalfCauchy(2.5)))


def mesquite(X, y):
    linear(X, y, flat("b", shape=(X.shape[1],)), flat("sigma", constraints.positive))


def sblrc(X, y):
    b = numpyro.sample("b", dist.Normal(0, 10).expand([X.shape[1]]).to_event(1))
    linear(X, y, b, numpyro.sample("sigma", dist.HalfNormal(10)))


@handlers.reparam(config={"theta": LocScaleReparam(0)})
def schools(y, sigma, school):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):  # eight effects that all batches share: global
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(theta[school], sigma), obs=y)


def two_normals(y):
    mu = flat("mu", constraints.ordered_vector, (2,))
    numpyro.factor("prior of mu", dist.Normal(0, 2).log_prob(mu).sum())
    sigma = numpyro.sample("sigma", dist.HalfNormal(2).expand([2]).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5, 5))
    mixing = dist.Categorical(probs=jnp.stack([theta, 1 - theta]))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.MixtureSameFamily(mixing, dist.Normal(mu, sigma)), obs=y)


# name -> model, and the order of its sites in the hand-written target's vector
POSTERIORDB = {
    "arK-arK": (ark, ["b", "sigma"]),
    "eight_schools-eight_schools_noncentered": (schools, ["mu", "tau", "theta_decentered"]),
    "kidiq-kidscore_momiq": (kidscore, ["b", "sigma"]),
    "low_dim_gauss_mix-low_dim_gauss_mix": (two_normals, ["mu", "sigma", "theta"]),
    "mesquite-logmesquite": (mesquite, ["b", "sigma"]),
    "sblrc-blr": (sblrc, ["b", "sigma"]),
}


def counts(n):
    return RNG.integers(1, 9, n)


DATA = {
    "arK-arK": {"y": RNG.normal(size=30), "K": np.array(5)},
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


def by_hand(name):
    empty = np.zeros(0)
    return posterior(ReferencePosterior(name, [], empty, empty, empty, DATA[name]))


def as_sites(target, order, v):
    """The hand-written vector as the model's parameters."""
    shapes = jax.eval_shape(target.unravel, v)
    ends = np.cumsum([shapes[site].size for site in order])[:-1]
    parts = zip(order, jnp.split(v, ends), strict=True)
    return {site: part.reshape(shapes[site].shape) for site, part in parts}


@pytest.mark.parametrize("name", POSTERIORDB)
def test_posteriordb_models_have_the_hand_written_densities(name):
    hand = by_hand(name)
    model, order = POSTERIORDB[name]
    target = from_numpyro(model, hand.rows)
    assert target.dim == hand.target.dim
    with jax.enable_x64(True):
        rows = jax.tree.map(jnp.asarray, hand.rows)
        points = [jnp.asarray(v) for v in np.random.default_rng(1).normal(size=(3, target.dim))]

        @jax.jit
        def both(v):
            params = as_sites(target, order, v)
            priors = target.log_prior(params), hand.target.log_prior(v)
            return priors, (target.log_likelihood(params, rows), hand.target.log_likelihood(v, rows))

        pairs = [both(v) for v in points]
        constants = [ours - theirs for (ours, theirs), _ in pairs]  # hand-written priors leave constants out
        np.testing.assert_allclose(constants, constants[0], atol=1e-9)
        for _, (found, expected) in pairs:
            np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.slow
def test_a_posteriordb_model_is_tracked_to_the_hand_written_posterior():
    hand = by_hand("sblrc-blr")
    target = from_numpyro(sblrc, hand.rows)
    rows = jax.tree.map(np.float32, hand.rows)
    sampler = opvi.ibis(target)
    state, _ = opvi.run(sampler, opvi.stream(rows, 6), 0)
    sites = target.constrain(sampler.draws(state, 0, 2048))
    found = jnp.concatenate([sites["b"], sites["sigma"][:, None]], 1)

    @jax.jit
    def weigh(around):
        """Draws from a wide Gaussian around the particles, weighted to the hand-written posterior."""
        noise = jax.random.normal(jax.random.key(0), (20_000, target.dim))
        v = around.mean(0) + noise @ jnp.linalg.cholesky(1.5 * jnp.cov(around.T)).T
        log_p = jax.vmap(lambda v: hand.target.log_prior(v) + hand.target.log_likelihood(v, rows).sum())(v)
        return hand.constrained(v), jax.nn.softmax(log_p + 0.5 * (noise**2).sum(1))

    theta, weights = weigh(found.at[:, -1].set(jnp.log(found[:, -1])))
    assert 1 / (weights**2).sum() > 1000  # so many independent draws are they worth
    mean = weights @ theta
    sd = jnp.sqrt(weights @ (theta - mean) ** 2)
    # Were the draws independent, their means would be off by 0.02 sd and their sds by 1.6 %; five times that.
    np.testing.assert_array_less(np.abs(found.mean(0) - mean) / sd, 0.11)
    np.testing.assert_array_less(np.abs(np.log(found.std(0) / sd)), 0.08)


def test_observations_that_come_in_rows_need_no_plate():
    """As most of NumPyro's examples are written: the same densities, predictions and draws as inside a plate."""

    def bare(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    def plated(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    rng = np.random.default_rng(0)
    data = rng.normal(size=(7, 2)).astype(np.float32), rng.normal(size=7).astype(np.float32)
    ours, theirs = (opvi.from_numpyro(model, data) for model in (bare, plated))
    particles = opvi.draw(theirs, 0, 3)
    for particle in particles:
        rows = ours.log_likelihood(ours.unravel(particle), data)
        assert rows.shape == (7,)
        np.testing.assert_allclose(rows, theirs.log_likelihood(theirs.unravel(particle), data), rtol=1e-6)
        np.testing.assert_allclose(ours.log_prior(ours.unravel(particle)), theirs.log_prior(theirs.unravel(particle)))
    a, b = (opvi.predict(t, particles, data[0]).mean() for t in (ours, theirs))
    np.testing.assert_allclose(a, b, rtol=1e-6)
    assert ours.sample(0, particles, data)["y"].shape == (3, 7)

    def joint(y):  # one density for all rows together
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        numpyro.sample("y", dist.MultivariateNormal(mean * jnp.ones(len(y)), jnp.eye(len(y))), obs=y)

    with pytest.raises(ValueError, match="lies in no plate"):
        opvi.from_numpyro(joint, data[1])
