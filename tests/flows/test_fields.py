"""Each field against a naive reference that loops over pairs and differentiates the kernel itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opvi.flows import fields, kernels

FIELDS = {"svgd": fields.svgd, "blob": fields.blob, "gfsd": fields.gfsd, "gfsf": fields.gfsf}


@functools.partial(jax.jit, static_argnums=0)
def pairs(kernel, x, h):
    """K(x_i, x_j) of all pairs, and its gradient in the first argument, by automatic differentiation."""

    def k(a, b):
        return kernel.value(((a - b) ** 2).sum(), h, len(a))

    return [jax.vmap(lambda a, f=f: jax.vmap(lambda b: f(a, b))(x))(x) for f in (k, jax.grad(k))]


def naive(name, kernel, x, s, h):
    """O(n²d), in float64."""
    n, d = x.shape
    gram, first = (np.asarray(a) for a in pairs(kernel, x, h))
    if name == "svgd":
        return gram.T @ s / n, first.sum(0) / n
    if name == "gfsd":
        return s, -first.sum(1) / gram.sum(1)[:, None]
    if name == "blob":
        mass = gram.sum(1)
        return s, -first.sum(1) / mass[:, None] - (first / mass[None, :, None]).sum(1)
    ridge = fields.GFSF_RIDGE * float(kernel.value(jnp.zeros(()), h, d))
    return s, np.linalg.solve(gram + ridge * np.eye(n), first.sum(0))


def rounding(x, kernel, h):
    """What solving GFSF's linear system makes of a rounding error: the condition number times epsilon."""
    x = np.asarray(x, float)
    r = ((x[:, None] - x[None]) ** 2).sum(-1)
    gram = np.asarray(kernel.value(r, float(h), x.shape[1])) + fields.GFSF_RIDGE * np.eye(len(x))
    return np.linalg.cond(gram) * np.finfo(np.float32 if h.dtype == np.float32 else np.float64).eps


def relative_error(value, reference):
    value, reference = np.asarray(value, float), np.asarray(reference, float)
    return np.abs(value - reference).max() / np.abs(reference).max()


@functools.partial(jax.jit, static_argnums=(0, 1))
def both(one, other, x, s):
    """Two fields in one program."""
    return one(x, s), other(x, s)


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("kernel", "d"), [(kernels.rbf(), 12), (kernels.imq(), 2)], ids=["rbf", "imq"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_field_equals_the_naive_reference(name, kernel, dtype, tolerance, d):
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        x, s = (rng.normal(size=(23, d)) + 3.0).astype(dtype), rng.normal(size=(23, d)).astype(dtype)
        dense, tiled = both(FIELDS[name](kernel), FIELDS[name](kernel, block=5), x, s)
        reference = naive(name, kernel, x.astype(float), s.astype(float), np.asarray(dense.bandwidth, float))
    assert dense.drift.dtype == dense.repulsion.dtype == x.dtype
    allowed = max(tolerance, rounding(x, kernel, dense.bandwidth) if name == "gfsf" else 0)
    for value in (dense, tiled):
        assert relative_error(value.drift, reference[0]) < tolerance
        assert relative_error(value.repulsion, reference[1]) < allowed


@pytest.mark.parametrize("name", FIELDS)
def test_large_sets_are_tiled_by_themselves(name, monkeypatch):
    x = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    dense = jax.jit(FIELDS[name]())(x, -x)
    monkeypatch.setattr(fields, "LARGEST_DENSE", 10)
    monkeypatch.setattr(fields, "DEFAULT_BLOCK", 16)
    tiled = jax.jit(lambda x, s: FIELDS[name]()(x, s))(x, -x)  # traced anew
    assert largest_array(FIELDS[name](bandwidth=kernels.fixed(1.0)), x, x) < 50 * 50
    allowed = max(1e-5, rounding(x, kernels.rbf(), dense.bandwidth)) if name == "gfsf" else 1e-5
    assert relative_error(tiled.repulsion, dense.repulsion) < allowed
    assert relative_error(tiled.drift, dense.drift) < 1e-5


def largest_array(function, *args):
    """Elements of the largest intermediate array in a traced function, loops and calls included."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            for variable in equation.outvars:
                yield int(np.prod(variable.aval.shape))
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "jaxpr")):
                if hasattr(value, "jaxpr"):  # the body of a loop or of a call
                    yield from walk(value.jaxpr)

    return max(walk(jax.make_jaxpr(function)(*args).jaxpr))


@pytest.mark.parametrize("name", FIELDS)
def test_memory_is_quadratic_dense_and_linear_tiled(name):
    """No intermediate of n²·d ever, and none of n² in the tiled form (with a fixed bandwidth)."""
    n, d, block = 64, 20, 8
    x = jax.ShapeDtypeStruct((n, d), jnp.float32)
    h = kernels.fixed(1.0)
    assert largest_array(FIELDS[name](bandwidth=h), x, x) <= n * n
    assert largest_array(FIELDS[name](bandwidth=h, block=block), x, x) <= n * max(block, d)


def test_drift_and_repulsion_stand_apart():
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)
    zero = jax.tree.map(np.asarray, jax.jit(fields.svgd())(x, np.zeros_like(x)))
    assert np.abs(zero.drift).max() == 0
    assert np.abs(zero.repulsion).max() > 0
    np.testing.assert_allclose(zero.repulsion.sum(0), 0, atol=1e-6)  # what pushes apart moves no centre


def test_repulsion_pushes_two_particles_apart():
    x = np.array([[-0.5, 0.0], [0.5, 0.0]], np.float32)
    made = [make(bandwidth=kernels.fixed(1.0)) for make in FIELDS.values()]
    for push in jax.jit(lambda x, s: [field(x, s).repulsion for field in made])(x, np.zeros_like(x)):
        assert push[0, 0] < 0 < push[1, 0]


def test_a_block_of_no_rows_is_refused():
    with pytest.raises(ValueError, match="`block` is 0"):
        fields.svgd(block=0)
