"""On a GPU a matrix product rounds its factors to ten bits unless told not to: those of filters and trackers are."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import opvi

ROWS = 4
X, Y, LABELS = jnp.ones((ROWS, 3)), jnp.ones(ROWS), jnp.zeros(ROWS, jnp.int32)
LINE, NETWORK = opvi.linear_regression(3), opvi.mlp(3, (6,))
SAMPLERS = {
    "regressor": (opvi.regressor(3, hidden=(6,), particles=5), Y),
    "linear regressor": (opvi.regressor(3, hidden=(), particles=5), Y),
    "classifier": (opvi.classifier(3, 3, hidden=(6,), particles=4), LABELS),
    "ibis": (opvi.ibis(LINE), Y),
    "sl_opvi": (opvi.sl_opvi(LINE), Y),
    "gain_one": (opvi.gain_one(LINE), Y),
    "gauss_newton": (opvi.gauss_newton(NETWORK), Y),
    "kfac": (opvi.kfac(NETWORK), Y),
    "linear_ekf": (opvi.linear_ekf(3, 3), LABELS),
    "tracker": (opvi.tracker(NETWORK), Y),
    "tracker of a line": (opvi.tracker(LINE), Y),
}


def parts(value):
    """The programs inside a parameter of an equation."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield getattr(value, "jaxpr", value)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from parts(part)


def products(jaxpr):
    """The matrix products of a program, those of programs inside it included, and the precision that each states."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation, equation.params["precision"]
        for value in equation.params.values():
            for inner in parts(value):
                yield from products(inner)


def test_the_walk_finds_products_in_loops():
    def looped(x):
        return jax.lax.fori_loop(0, 3, lambda _, y: y @ x, x)

    found = list(products(jax.make_jaxpr(jax.jit(looped))(jnp.eye(2)).jaxpr))
    assert [stated for _, stated in found] == [None]


@pytest.mark.parametrize("name", SAMPLERS)
def test_products_are_exact_on_any_device(name):
    sampler, y = SAMPLERS[name]
    state = jax.eval_shape(lambda: sampler.init(jax.random.key(0)))

    def step(state):
        return sampler.step(jax.random.key(0), state, opvi.Batch((X, y), jnp.ones(ROWS)))

    def predict(state):
        return sampler.predict(state, X).components

    for program in (step, predict):
        found = list(products(jax.make_jaxpr(program)(state).jaxpr))
        highest = jax.lax.Precision.HIGHEST
        lax = [str(equation) for equation, stated in found if stated not in (highest, (highest, highest))]
        assert not lax, f"{program.__name__}: {len(lax)} of {len(found)}, e.g. {lax[0]}"
