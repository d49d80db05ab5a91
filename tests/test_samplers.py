"""One contract for every algorithm: protocol, purity, compilation, dtype, padding, resuming, bad input."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import opvi
from opvi.flows import fields, kernels
from tests.default_flags import given_to_compiled

TARGET = opvi.gaussian_mixture()
KEY = jax.random.key(0)
N = 6
ROOT = Path(__file__).parents[1]

ALGORITHMS = {
    "opvi": opvi.opvi(TARGET, step=opvi.schedules.decaying(0.1, 0.55)),
    "svgd": opvi.svgd(TARGET, step=0.01),
    "blob": opvi.blob(TARGET, step=0.01),
    "gfsd": opvi.gfsd(TARGET, step=0.01, likelihood_scale=opvi.schedules.seen),
    "gfsf": opvi.gfsf(TARGET, step=0.01),
    "svgd, imq, heat equation": opvi.svgd(
        TARGET, step=0.01, kernel=kernels.imq(), bandwidth=kernels.heat_equation(candidates=5)
    ),
    "opvi with momentum": opvi.opvi(TARGET, step=optax.sgd(0.01, momentum=0.9)),
    "opvi over blob": opvi.opvi(TARGET, step=0.01, field=fields.blob()),
    "wag": opvi.svgd(TARGET, step=0.01, acceleration=opvi.flows.wag()),
    "wnes": opvi.blob(TARGET, step=0.01, acceleration=opvi.flows.wnes()),
    "langevin": opvi.langevin(
        TARGET, step=opvi.schedules.decaying(0.01, 0.3), likelihood_scale=opvi.schedules.dataset(100)
    ),
    "online_map": opvi.online_map(TARGET, step=0.1, projection=opvi.flows.ball(1.0)),
    "online_map in a box": opvi.online_map(TARGET, step=0.1, projection=opvi.flows.box(-0.5, [0.5, 1.0])),
}
REGRESSION = opvi.mlp(2, (3,), opvi.gaussian(0.5), activation=jnp.tanh, prior_variance=None)
CLASSES = opvi.mlp(2, (3,), opvi.categorical(), outputs=3, activation=jax.nn.relu, prior_variance=None)
BINARY = opvi.logistic_regression(2)
FEW_LOOKS = opvi.filters.Pace(steps=2, looks=1)


def numbers(seed, rows):
    return np.random.default_rng(seed).normal(size=rows).astype(np.float32)


def regression(seed, rows):
    return numbers(seed, (rows, 2)), numbers(seed + 1, rows)


def labels(classes):
    return lambda seed, rows: (numbers(seed, (rows, 2)), np.random.default_rng(seed).integers(0, classes, rows))


class Case(NamedTuple):
    algorithm: opvi.types.Sampler
    target: opvi.Target
    rows: Any  # of (seed, count)

    def batch(self, seed=0, rows=5, pad_to=8):
        return opvi.batch(self.rows(seed, rows), pad_to=pad_to)


CASES = {name: Case(algorithm, TARGET, numbers) for name, algorithm in ALGORITHMS.items()} | {
    "gauss_newton": Case(opvi.gauss_newton(REGRESSION, noise=opvi.filters.AdaptiveNoise()), REGRESSION, regression),
    "gauss_newton, classes": Case(opvi.gauss_newton(CLASSES, forgetting=1.0), CLASSES, labels(3)),
    "gauss_newton, binary": Case(opvi.gauss_newton(BINARY), BINARY, labels(2)),
    "kfac": Case(opvi.kfac(CLASSES, half_life=30), CLASSES, labels(3)),
    "kfac, regression": Case(opvi.kfac(REGRESSION), REGRESSION, regression),
    "ibis": Case(opvi.ibis(TARGET, half_life=50.0, example=numbers(0, 1)), TARGET, numbers),
    "sl_opvi": Case(opvi.sl_opvi(TARGET, half_life=50.0, pace=FEW_LOOKS), TARGET, numbers),
    "gain_one": Case(opvi.gain_one(TARGET, half_life=50.0, substeps=2), TARGET, numbers),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# One of each class, where the settings of a class make no difference to what is tested.
KINDS = (
    "wag",  # SVGD, and what accelerates it
    "langevin",
    "online_map",
    "gauss_newton",
    "gauss_newton, classes",
    "kfac",
    "ibis",
    "sl_opvi",
    "gain_one",
)
each_kind = pytest.mark.parametrize("case", [CASES[name] for name in KINDS], ids=KINDS)


def a_batch(seed=0, rows=5, pad_to=8):
    return opvi.batch(numbers(seed, rows), pad_to=pad_to)


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


def close(a, b, tolerance):
    """Equal up to rounding, relative to the largest entry of each leaf."""

    def leaf(u, v):
        u, v = np.asarray(u, float), np.asarray(v, float)
        return np.abs(u - v).max() <= tolerance * max(np.abs(v).max(), 1.0)

    return jax.tree.all(jax.tree.map(leaf, a, b))


def without_free_places(state):
    """A state in which places for rows that hold none are 0: padding may be left there."""
    if not isinstance(state, opvi.filters.IBISState):
        return state
    data = jax.tree.map(lambda a: np.where(state.storage.weight > 0, a, 0), state.storage.data)
    return state._replace(storage=state.storage._replace(data=data))


@each_case
def test_protocol_and_purity(case):
    algorithm = case.algorithm
    state = algorithm.init(KEY, N)
    assert state.particles.shape == (N, case.target.dim)
    before = jax.tree.map(np.array, state)
    batch = case.batch()
    new, info = algorithm.step(KEY, state, batch)
    again, _ = algorithm.step(KEY, state, batch)
    assert same(state, before)  # the caller's state is untouched
    assert same(new, again)  # and the same call gives the same bits
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]
    assert int(new.round) == 1
    assert int(new.rows) == int(info.rows) == 5
    assert bool(info.finite)
    assert bool(jnp.isfinite(info.log_predictive))
    assert not np.array_equal(new.particles, state.particles)


@each_case
def test_init_takes_a_count_a_matrix_or_a_pytree(case):
    algorithm = case.algorithm
    drawn = algorithm.init(KEY, N)
    # That flow starts from the prior where it is Gaussian, others where the target's `init` does.
    matrix = drawn.particles if isinstance(algorithm, opvi.filters.GainOne) else opvi.draw(case.target, KEY, N)
    assert same(drawn, algorithm.init(KEY, np.asarray(matrix)))
    assert same(drawn, algorithm.init(KEY, jax.vmap(case.target.unravel)(matrix)))


# Without jit every operation is compiled by itself, which takes many seconds for other samplers.
def test_compiled_equals_eager_up_to_rounding():
    case = CASES["online_map"]
    algorithm = case.algorithm
    state, batch = algorithm.init(KEY, N), case.batch()
    with jax.disable_jit():
        eager, _ = algorithm.step(KEY, state, batch)
    compiled, _ = jax.jit(algorithm.step)(KEY, state, batch)
    assert close(compiled, eager, 1e-5)


@each_kind
def test_vmap_over_seeds_and_padding_change_nothing(case):
    """One program has many seeds and no padding, the other one seed and padding."""
    algorithm = case.algorithm
    keys = jax.random.split(KEY, 3)
    states = [algorithm.init(k, N) for k in keys]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    many, _ = jax.vmap(algorithm.step, (0, 0, None))(keys, stacked, case.batch(pad_to=None))
    for i, (key, state) in enumerate(zip(keys, states, strict=True)):
        one, _ = algorithm.step(key, state, case.batch(pad_to=8))
        assert close(without_free_places(jax.tree.map(lambda leaf, i=i: leaf[i], many)), without_free_places(one), 1e-5)


@each_case
def test_float64_is_kept(case):
    """By the types alone: nothing is computed."""
    algorithm = case.algorithm
    with jax.enable_x64(True):
        particles = jnp.asarray(opvi.draw(case.target, KEY, N), jnp.float64)
        state = jax.eval_shape(lambda: algorithm.init(KEY, particles))
        new, info = jax.eval_shape(algorithm.step, KEY, state, case.batch())
        assert new.particles.dtype == info.log_predictive.dtype == jnp.float64
        assert [x.dtype for x in jax.tree.leaves(new)] == [x.dtype for x in jax.tree.leaves(state)]


@each_case
def test_weights_count_rows(case):
    """A weight of 2 is the row twice, in all that is learnt and in the rows seen."""
    algorithm = case.algorithm
    state = algorithm.init(KEY, N)
    rows = case.rows(0, 2)
    heavy, _ = algorithm.step(KEY, state, opvi.batch(rows, [2.0, 1.0], pad_to=8))
    twice, _ = algorithm.step(KEY, state, opvi.batch(jax.tree.map(lambda a: np.repeat(a, [2, 1], 0), rows), pad_to=8))
    assert close(heavy.particles, twice.particles, 1e-5)
    assert int(heavy.rows) == int(twice.rows) == 3


@each_kind
def test_resumed_equals_uninterrupted(case):
    algorithm = case.algorithm
    stream = opvi.stream(case.rows(3, 60), 5)  # growing batches are a matter of `run`, and tested there
    whole, history = opvi.run(algorithm, stream, KEY, particles=N)
    half, first = opvi.run(algorithm, stream, KEY, particles=N, rounds=5)
    resumed, second = opvi.run(algorithm, stream.after(half.round), KEY, state=half)
    assert same(whole, resumed)
    np.testing.assert_array_equal(history.round, np.concatenate([first.round, second.round]))
    np.testing.assert_array_equal(
        history.info.log_predictive, np.concatenate([first.info.log_predictive, second.info.log_predictive])
    )


def differing_under_default_flags(*arguments, emitters=""):
    """The samplers named for which not every way to step gives the same bits where XLA optimises, line by line."""
    environment = {**os.environ, "XLA_FLAGS": emitters}
    command = [sys.executable, "-m", "tests.default_flags", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.split("\n")]


@pytest.fixture(scope="module")
def flows_that_differ():
    """Under XLA's defaults, first as they are, then with `jax.jit` in the place of `compiled`; in one process."""
    return differing_under_default_flags("langevin", "gfsd", "plain", "langevin")


@each_kind
def test_the_step_is_made_by_compiled(case):
    """Which gives the same bits wherever it is called from, as the next test finds for those that are quick to compile.

    `python -m tests.default_flags gauss_newton kfac gain_one ibis sl_opvi regressor` compares the others, in a minute.
    """
    made = type(case.algorithm)
    inner = getattr(sys.modules[made.__module__], "_step", made.step)  # of IBIS, which makes room before
    assert given_to_compiled(getattr(made, "_step", inner))


@pytest.mark.slow
def test_every_way_to_step_gives_the_same_bits_under_default_flags(flows_that_differ):
    """Loop = scan = run = resumed."""
    assert flows_that_differ[0] == []


@pytest.mark.slow
def test_every_way_to_step_gives_the_same_bits_of_a_tracker():
    """Loop = scan = run = resumed, with XLA's defaults but for the emitters, which opvi itself asks for (`_cpu`).

    Of a classifier, in which `jax.jit` in the place of `compiled` would give other bits; in a regressor it would not.
    """
    older = "--xla_cpu_use_fusion_emitters=false" if jax.__version__.startswith("0.10.") else ""
    assert differing_under_default_flags("classifier", emitters=older) == [[]]


@pytest.mark.slow
def test_plain_jit_does_not_give_the_same_bits(flows_that_differ):
    """So the tests before this one can fail: they would with `jax.jit` in the place of `compiled`.

    What rounds in another way is a scan that drops the info of steps on a network. With info kept, as `run` keeps it,
    plain `jax.jit` agrees too (JAX 0.10): such a comparison alone guards nothing.
    """
    assert flows_that_differ[1] == ["langevin"]


@each_case
def test_a_poisoned_batch_leaves_the_particles_as_they_were(case):
    algorithm = case.algorithm
    state = algorithm.init(KEY, N)
    for poison in (np.nan, np.inf, 3e38):
        spoilt = jax.tree.map(lambda a, p=poison: np.full_like(a, p) if a.dtype.kind == "f" else a, case.rows(0, 8))
        bad = opvi.Batch(spoilt, np.ones(8, np.float32))
        kept, info = algorithm.step(KEY, state, bad)
        if np.isnan(poison):  # no particle can learn from it
            assert not bool(info.finite)
            assert same(kept._replace(round=state.round, rows=state.rows), state)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(kept))
    _, info = algorithm.step(KEY, kept, case.batch())
    assert bool(info.finite)


@each_case
def test_a_batch_without_rows_is_refused(case):
    nothing = opvi.Batch(case.rows(0, 0), np.ones(0, np.float32))
    with pytest.raises(ValueError, match="a batch has 0 rows, but needs at least 1"):
        case.algorithm.step(KEY, case.algorithm.init(KEY, N), nothing)


@pytest.mark.parametrize("name", ["opvi", "svgd", "blob", "gfsd", "gfsf", "wag"])
def test_repulsive_flows_need_two_particles(name):
    with pytest.raises(ValueError, match=r"at least 2 rows.*online_map"):
        ALGORITHMS[name].init(KEY, 1)
    with pytest.raises(ValueError, match=r"shape \(1, 2\)"):
        ALGORITHMS[name].init(KEY, np.zeros((1, 2), np.float32))


def test_point_estimates_may_be_alone():
    assert ALGORITHMS["online_map"].init(KEY, 1).particles.shape == (1, 2)


def test_wrong_batches_are_refused_before_anything_moves():
    target = opvi.linear_regression(3)
    algorithm = opvi.svgd(target, step=0.1)
    state = algorithm.init(KEY, 4)
    with pytest.raises(TypeError, match=r"takes an `opvi.Batch`.*opvi.batch\(\(X, y\)\)"):
        algorithm.step(KEY, state, (np.zeros((5, 3), np.float32), np.zeros(5, np.float32)))
    with pytest.raises(ValueError, match=r"X has shape \(5, 2\), but this model takes 3 features"):
        algorithm.step(KEY, state, opvi.batch((np.zeros((5, 2), np.float32), np.zeros(5, np.float32))))
    summed = opvi.target(lambda p: -p @ p, lambda p, x: (x - p[0]).sum(), lambda key: jnp.zeros(2))
    algorithm = opvi.svgd(summed, step=0.1)
    state = algorithm.init(KEY, np.eye(2, dtype=np.float32))
    with pytest.raises(ValueError, match=r"returned shape \(\) for a batch of 5 rows.*one number per row"):
        algorithm.step(KEY, state, opvi.batch(np.zeros(5, np.float32)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: opvi.opvi(TARGET, step=0.0), "`step` is 0.0"),
        (lambda: opvi.svgd(TARGET, step="fast"), "`step` is 'fast'"),
        (lambda: opvi.langevin(TARGET, step=-1.0), "`step` is -1.0"),
        (lambda: opvi.flows.ball(0.0), "`radius` is 0.0"),
        (lambda: opvi.flows.box(1.0, [0.0, 2.0]), "lower must be below upper"),
        (lambda: opvi.flows.wag(2.0), "greater than 3"),
        (lambda: opvi.flows.wnes(2.0), "0 < curvature ≤ 1"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_projections_hold():
    batches = list(opvi.stream(np.full(200, 50.0, np.float32), 20))
    for name, inside in (("online_map", lambda w: np.linalg.norm(w, axis=1) <= 1 + 1e-6),
                         ("online_map in a box", lambda w: (w >= -0.5).all(1) & (w <= [0.5, 1.0]).all(1))):  # fmt: skip
        state, _ = opvi.run(ALGORITHMS[name], batches, KEY, particles=N)
        assert inside(np.asarray(state.particles)).all()
        assert np.abs(np.asarray(state.particles)).max() > 0.4  # the bound was reached


def test_opvi_is_a_field_and_schedules():
    """λ = 1 and η = 1 make OPVI plain SVGD: the same settings, hence the same program."""
    plain = opvi.svgd(TARGET, step=0.01)
    assert opvi.opvi(TARGET, step=0.01) != plain
    assert opvi.opvi(TARGET, step=0.01, prior_weight=1.0, repulsion=1.0) == plain


def test_opvi_step_is_the_papers_equation():
    """One step against equation by hand, with η_t, λ and t^-0.55."""
    algorithm = ALGORITHMS["opvi"]
    state = algorithm.init(KEY, N)
    state, _ = algorithm.step(KEY, state, a_batch(1))
    x, rows = np.asarray(state.particles, float), np.asarray(a_batch(2).data[:5], float)
    new, info = algorithm.step(KEY, state, a_batch(2))
    with jax.enable_x64(True):
        lik = jax.vmap(jax.grad(lambda p: TARGET.log_likelihood(p, jnp.asarray(rows)).sum()))(jnp.asarray(x))
        prior = -x / np.array([10.0, 1.0])
    s = np.asarray(lik) + 6 / (np.pi**2 * 4) * prior
    h = float(info.bandwidth)
    v = np.zeros_like(x)
    for i in range(N):
        for j in range(N):
            k = np.exp(-((x[j] - x[i]) ** 2).sum() / h)
            v[i] += (k * s[j] + 0.1 * (-2 / h) * (x[j] - x[i]) * k) / N
    np.testing.assert_allclose(new.particles, x + 0.1 * 2**-0.55 * v, rtol=2e-5, atol=2e-6)


def test_acceleration_follows_its_equations():
    """WAG and WNes over three rounds, by hand from the field."""
    for make in (opvi.flows.wag(), opvi.flows.wnes()):
        algorithm = opvi.svgd(TARGET, step=0.01, acceleration=make)
        plain = opvi.svgd(TARGET, step=0.01)
        state = algorithm.init(KEY, N)
        x = y = state.particles
        for t in range(1, 4):
            batch = a_batch(t)
            state, _ = algorithm.step(KEY, state, batch)
            moved, _ = plain.step(KEY, plain.init(KEY, y), batch)
            move = moved.particles - y
            x_old, y_old, x = x, y, moved.particles
            y = make.look_ahead(jnp.float32(t), x, x_old, y_old, move)
            np.testing.assert_allclose(state.particles, x, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(state.ahead, y, rtol=1e-5, atol=1e-6)
    t = jnp.float32(2.0)
    one = opvi.flows.wag(4.0).look_ahead(t, jnp.float32(1.0), jnp.float32(0.5), jnp.float32(0.8), jnp.float32(0.2))
    assert float(one) == pytest.approx(1.0 + 0.5 * 0.3 + 2.0 * 0.2)
    assert float(opvi.flows.wnes(1.0).look_ahead(t, *map(jnp.float32, (1.0, 0.5, 0.8, 0.2)))) == pytest.approx(
        1.0, abs=1e-6
    )
    momentum = float(opvi.flows.wnes().look_ahead(t, *map(jnp.float32, (1.0, 0.0, 0.0, 0.0)))) - 1
    assert momentum == pytest.approx(0.82, abs=0.01)


def test_counters_stop_at_the_largest_integer():
    algorithm = ALGORITHMS["svgd"]
    full = algorithm.init(KEY, N)._replace(round=jnp.int32(2**31 - 1), rows=jnp.int32(2**31 - 2))
    state, _ = algorithm.step(KEY, full, a_batch())
    assert int(state.round) == int(state.rows) == 2**31 - 1
