"""Each field against a naive reference that loops over pairs and differentiates the kernel itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opvi.flows import fields, kernels

FIELDS = {"svgd": fields.svgd, "blob": fields.blob, "gfsd": fields.gfsd, "gfsf": fields.gfsf}


def naive(name, kernel, x, s, h):
    """O(n²d), by automatic differentiation of K(x, y), in float64."""
    n, d = x.shape

    def k(a, b):
        return kernel.value(((a - b) ** 2).sum(), h, d)

    gram = jax.vmap(lambda a: jax.vmap(lambda b: k(a, b))(x))(x)
    # first[i, j] = gradient of K(x_i, x_j) in its first argument
    first = jax.vmap(lambda a: jax.vmap(lambda b: jax.grad(k)(a, b))(x))(x)
    if name == "svgd":
        return gram.T @ s / n, first.sum(0) / n
    if name == "gfsd":
        return s, -first.sum(1) / gram.sum(1)[:, None]
    if name == "blob":
        mass = gram.sum(1)
        return s, -first.sum(1) / mass[:, None] - (first / mass[None, :, None]).sum(1)
    ridge = fields.GFSF_RIDGE * kernel.value(jnp.zeros(()), h, d)
    return s, jnp.linalg.solve(gram + ridge * jnp.eye(n), first.sum(0))


def rounding(x, kernel, h):
    """What solving GFSF's linear system makes of a rounding error: the condition number times epsilon."""
    x = np.asarray(x, float)
    r = ((x[:, None] - x[None]) ** 2).sum(-1)
    gram = np.asarray(kernel.value(r, float(h), x.shape[1])) + fields.GFSF_RIDGE * np.eye(len(x))
    return np.linalg.cond(gram) * np.finfo(np.float32 if h.dtype == np.float32 else np.float64).eps


def relative_error(value, reference):
    value, reference = np.asarray(value, float), np.asarray(reference, float)
    return np.abs(value - reference).max() / np.abs(reference).max()


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("kernel", "d"), [(kernels.rbf(), 12), (kernels.imq(), 2)], ids=["rbf", "imq"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_field_equals_the_naive_reference(name, kernel, dtype, tolerance, d):
    with jax.enable_x64(True):
        x = jax.random.normal(jax.random.key(1), (23, d), jnp.float64) + 3.0
        s = jax.random.normal(jax.random.key(2), (23, d), jnp.float64)
        x, s = x.astype(dtype), s.astype(dtype)
        dense = FIELDS[name](kernel)(x, s)
        reference = naive(
            name, kernel, x.astype(jnp.float64), s.astype(jnp.float64), dense.bandwidth.astype(jnp.float64)
        )
        tiled = FIELDS[name](kernel, block=5)(x, s)
    assert dense.drift.dtype == dense.repulsion.dtype == x.dtype
    allowed = max(tolerance, rounding(x, kernel, dense.bandwidth) if name == "gfsf" else 0)
    for value in (dense, tiled):
        assert relative_error(value.drift, reference[0]) < tolerance
        assert relative_error(value.repulsion, reference[1]) < allowed


@pytest.mark.parametrize("name", FIELDS)
def test_large_sets_are_tiled_by_themselves(name, monkeypatch):
    x = jax.random.normal(jax.random.key(0), (50, 6))
    dense = FIELDS[name]()(x, -x)
    monkeypatch.setattr(fields, "LARGEST_DENSE", 10)
    monkeypatch.setattr(fields, "DEFAULT_BLOCK", 16)
    tiled = FIELDS[name]()(x, -x)
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
    x = jax.random.normal(jax.random.key(0), (10, 3))
    zero = fields.svgd()(x, jnp.zeros_like(x))
    assert float(jnp.abs(zero.drift).max()) == 0
    assert float(jnp.abs(zero.repulsion).max()) > 0
    np.testing.assert_allclose(zero.repulsion.sum(0), 0, atol=1e-6)  # what pushes apart moves no centre


def test_repulsion_pushes_two_particles_apart():
    x = jnp.array([[-0.5, 0.0], [0.5, 0.0]])
    for make in FIELDS.values():
        push = make(bandwidth=kernels.fixed(1.0))(x, jnp.zeros_like(x)).repulsion
        assert push[0, 0] < 0 < push[1, 0]


def test_a_block_of_no_rows_is_refused():
    with pytest.raises(ValueError, match="`block` is 0"):
        fields.svgd(block=0)
