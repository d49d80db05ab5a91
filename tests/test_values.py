"""What is made of equal settings is equal, so that jit's own cache serves; and equal samplers compile once."""

import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import opvi
from opvi import filters, flows, schedules, targets, tracking
from opvi.flows import fields, kernels
from opvi.types import SEED_OFFSET, as_key

NETWORK = opvi.mlp(2, (3,), activation=jnp.tanh, prior_variance=None)
FEW = opvi.linear_regression(2)
X, Y = np.ones((4, 2), np.float32), np.ones(4, np.float32)
ROW = (X[:1], Y[:1])
PACKAGE = str(Path(opvi.__file__).parent)


def log_prior(p):
    return -p @ p


def log_likelihood(p, x):
    return x * p[0] - jnp.exp(p[0])


def start(key):
    return jax.random.normal(key, (2,))


SAMPLERS = {
    "opvi": lambda: opvi.opvi(opvi.mlp(2, (3,)), step=schedules.decaying(0.1)),
    "parvi": lambda: opvi.parvi(FEW, fields.blob(), step=0.1, repulsion=0.5),
    "svgd": lambda: opvi.svgd(FEW, step=flows.optimizer(optax.sgd, 0.1, momentum=0.9)),
    "blob": lambda: opvi.blob(FEW, step=0.1, acceleration=flows.wnes()),
    "gfsd": lambda: opvi.gfsd(FEW, step=0.1, kernel=kernels.imq()),
    "gfsf": lambda: opvi.gfsf(FEW, step=0.1, bandwidth=kernels.fixed(1.0)),
    "first_order": lambda: flows.first_order(FEW),
    "langevin": lambda: opvi.langevin(FEW, step=0.1, likelihood_scale=schedules.dataset(100)),
    "online_map": lambda: opvi.online_map(FEW, step=0.1, projection=flows.ball(2.0)),
    "gauss_newton": lambda: opvi.gauss_newton(FEW, noise=filters.AdaptiveNoise()),
    "kfac": lambda: opvi.kfac([NETWORK, NETWORK]),
    "ibis": lambda: opvi.ibis(FEW, example=ROW, memory=1e5),
    "sl_opvi": lambda: opvi.sl_opvi(FEW, half_life=50.0, pace=filters.Pace(steps=1, looks=1)),
    "gain_one": lambda: opvi.gain_one(FEW, half_life=50.0, substeps=1),
    "linear_ekf": lambda: opvi.linear_ekf(2, 2, wandering=[1e-3, 1e-4]),
    "regressor": lambda: opvi.regressor(2, hidden=[], particles=3),
    "classifier": lambda: opvi.classifier(2, 2, hidden=[], particles=4),
    "tracker": lambda: opvi.tracker(opvi.mlp(2, (20,))),
    "bank": lambda: opvi.bank([opvi.regressor(2, hidden=(), particles=p) for p in (1, 2)]),
    "calibrated": lambda: opvi.calibrated(opvi.svgd(FEW, step=0.1), FEW, particles=3),
    "watched": lambda: opvi.watched(opvi.regressor(2, hidden=(), particles=2)),
    "remembering": lambda: opvi.remembering(opvi.regressor(2, hidden=(), particles=2), 10),
    "replay": lambda: opvi.replay(opvi.svgd(FEW, step=0.1), ROW, memory_rows=10),
}
VALUES = {
    "target": lambda: opvi.target(log_prior, log_likelihood, start),
    "network": lambda: opvi.network(jnp.matmul, start, opvi.bernoulli(), prior_variance={"a": 1, "b": [2.0]}),
    "mlp": lambda: opvi.mlp(3, [4, 5], activation=jnp.tanh),
    "mlp with inferred variances": lambda: opvi.mlp(3, (4,), prior_variance=targets.Gamma()),
    "linear_regression": lambda: opvi.linear_regression(3, noise=0.5),
    "logistic_regression": lambda: opvi.logistic_regression(3),
    "softmax_regression": lambda: opvi.softmax_regression(3, 4),
    "gaussian_mixture": opvi.gaussian_mixture,
    "gaussian": lambda: opvi.gaussian(0.5),
    "bernoulli": opvi.bernoulli,
    "categorical": opvi.categorical,
    "poisson": targets.poisson,
    "negative_binomial": targets.negative_binomial,
    "student_t": targets.student_t,
    "Gamma": lambda: targets.Gamma(2.0),
    "rbf": lambda: kernels.rbf(normalised=True),
    "imq": kernels.imq,
    "fixed": lambda: kernels.fixed(2.0),
    "median": kernels.median,
    "median_liu_wang": kernels.median_liu_wang,
    "median_awgf": kernels.median_awgf,
    "median_numpyro": kernels.median_numpyro,
    "heat_equation": kernels.heat_equation,
    "fields.svgd": fields.svgd,
    "fields.blob": fields.blob,
    "fields.gfsd": fields.gfsd,
    "fields.gfsf": lambda: fields.gfsf(block=7),
    "static": lambda: schedules.static(20),
    "full": lambda: schedules.full(30),
    "power": schedules.power,
    "saturating": lambda: schedules.saturating(0.5, 100),
    "sizes": lambda: schedules.sizes([1, 2, 3]),
    "within_budget": lambda: schedules.within_budget(schedules.power(0.5), 5, 20),
    "dataset": lambda: schedules.dataset(100),
    "decaying": lambda: schedules.decaying(0.1),
    "ball": lambda: flows.ball(1.0),
    "box": lambda: flows.box(-1.0, np.array([1.0, 2.0])),
    "wag": flows.wag,
    "wnes": flows.wnes,
    "optimizer": lambda: flows.optimizer(optax.nadam, 0.1, b2=0.95),
}
# What runs at every call of a sampler that looks after its room before its program.
ROOM = (
    *("cast", ".convert", "check_batch", "check_example", ".row"),
    *(".unravel", ".__repr__", ".<lambda>", ".<listcomp>", ".<genexpr>"),
)
# Functions that make nothing a sampler is made of.
OTHERS = {
    "activation_and_slope", "forward", "backward", "jacobian", "sample_mixture", "as_particles", "cast", "check_batch",
    "draw", "score", "kept_rows", "merge", "withdraw", "absorb", "gain", "move_by_residuals", "move_by_score", "times",
    "centred", "evenly_spaced", "middle_pair", "nearly_centred", "squared_distances",
    "as_batch_rule", "batch_mean", "batch_sum", "doubts", "power_of_two", "seen", "vanishing",
}  # fmt: skip


@pytest.mark.parametrize("make", [*SAMPLERS.values(), *VALUES.values()], ids=[*SAMPLERS, *VALUES])
def test_equal_settings_are_equal(make):
    one, other = make(), make()
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)


def test_other_settings_are_not_equal():
    made = [make() for make in [*SAMPLERS.values(), *VALUES.values()]]
    made += [
        opvi.gaussian_mixture(3.0),
        opvi.mlp(3, (4, 5)),
        opvi.mlp(3, (4, 5), weight_spread=2.0),
        opvi.gaussian(0.6),
        opvi.linear_regression(3, noise=0.5, prior_variance=3.0),
        opvi.target(log_prior, log_likelihood, start, log_likelihood),
        opvi.langevin(FEW, step=0.2, likelihood_scale=schedules.dataset(100)),
        opvi.parvi(FEW, fields.blob(), step=0.1, repulsion=0.6),
        opvi.regressor(2, hidden=[3], particles=3),
        opvi.classifier(2, 2, hidden=[3], particles=8),
        opvi.classifier(2, 2, hidden=[3], particles=4),
        opvi.gauss_newton(NETWORK, noise=filters.AdaptiveNoise()),
        opvi.gauss_newton(NETWORK, noise=filters.AdaptiveNoise(), half_life=10.0),
        opvi.kfac([NETWORK, NETWORK], damping=0.5),
        flows.optimizer(optax.nadam, 0.1, b2=0.96),
        schedules.power(0.6),
        flows.box(-1.0, np.array([1.0, 2.5])),
    ]
    equal = [(i, k) for i, one in enumerate(made) for k in range(i) if one == made[k]]
    assert not equal


def test_spellings_of_the_same_setting_are_equal():
    assert opvi.mlp(3, [4]) == opvi.mlp(3, (4,))
    assert opvi.linear_regression(3, noise=1) == opvi.linear_regression(3)
    assert opvi.svgd(FEW, step=jnp.float32(0.5)) == opvi.svgd(FEW, step=0.5)
    assert schedules.full(20) == schedules.static(20)


def test_every_factory_is_here():
    found = set()
    for room in (flows, filters, targets, tracking, fields, kernels, schedules):
        functions = [name for name, value in vars(room).items() if inspect.isfunction(value)
                     and value.__module__.startswith(room.__name__) and name[0].islower()]  # fmt: skip
        found |= {f"fields.{name}" if room is fields else name for name in functions}
    assert found - OTHERS <= {*SAMPLERS, *VALUES}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_equal_samplers_are_traced_once(make):
    """And hence compiled once, because jit keeps what it has traced: opvi's code does not run a second time."""
    ran = []

    def watch(frame, event, _):
        if event == "call" and PACKAGE in frame.f_code.co_filename:
            ran.append(frame.f_code.co_qualname)

    def step(sampler):
        ran.clear()
        sys.setprofile(watch)
        try:
            jax.eval_shape(sampler.step, key, state, batch)
        finally:
            sys.setprofile(None)
        return set(ran)

    key, batch = jax.random.key(0), opvi.batch((X, Y.astype(int)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax mixes dtypes and ranks
        one, other = make(), make()
        state = jax.eval_shape(one.init, key)
        assert len(step(one)) > 5
        # `_made` hears of programs that JAX has made, if an earlier test turned the folder of programs on.
        allowed = (
            ".step",
            ".call",
            ".called",
            "refuse_forked",
            "__eq__",
            "__hash__",
            "__instancecheck__",
            "_made",
            "Wrapper.make_room",
        )
        allowed += ("called.<locals>.<genexpr>",)
        if isinstance(one, opvi.types.StoresRows):  # whose room is looked after outside of the program
            allowed += (".make_room", *ROOM)
        assert [name for name in step(other) if not name.endswith(allowed)] == []


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**40 + 3, -1])
def test_a_seed_is_the_key_that_jax_makes_of_it(seed):
    key = as_key(seed)
    assert key.dtype == jax.random.key(seed).dtype
    assert (jax.random.key_data(key) == jax.random.key_data(jax.random.key(seed))).all()


def test_an_offset_of_all_seeds_is_heeded():
    plain, before = jax.random.key_data(as_key(3)), jax.config.values[SEED_OFFSET]
    jax.config.update(SEED_OFFSET, 5)
    try:
        key = jax.random.key_data(as_key(3))
        assert (key == jax.random.key_data(jax.random.key(3))).all()
        assert (key != plain).any()
    finally:
        jax.config.update(SEED_OFFSET, before)


def test_a_seed_is_a_key_of_the_usual_kind():
    with jax.default_prng_impl("rbg"):
        assert as_key(1).dtype == jax.random.key(1).dtype
