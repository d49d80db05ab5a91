"""Files of the released format load for ever, bit for bit: see `golden/README.md`."""

import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import opvi

FILE = Path(__file__).parent / "golden" / "format-2.opvi"
SAMPLERS = {
    "langevin": opvi.langevin(opvi.linear_regression(3), step=0.1, temperature=0.5),
    "svgd with adam": opvi.svgd(opvi.linear_regression(3), step=optax.adam(0.1)),
    "regressor": opvi.remembering(opvi.regressor(2, hidden=(3,), particles=2, memory_rows=0, process=False), 5),
    "classifier": opvi.classifier(2, 3, hidden=(3,), particles=4, memory_rows=0),
}
PARTICLES = {"langevin": 4, "svgd with adam": 5}
NUMBERS = [0, -1, 2**70, 0.1, -0.0, 5e-324, 1e308, float("inf"), float("-inf")]
STRINGS = ["", "é\n\u2028\0", "a/b~c", "\ud800"]
KEYS = {"usual": "threefry2x32", "quick": "rbg", "quicker": "unsafe_rbg"}
DTYPES = (
    "bool",
    "int8",
    "uint16",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e5m2",
)


def value(path: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array that depends on nothing but arithmetic: multiples of 1/8, other ones for every path."""
    numbers = (np.arange(np.prod(shape, dtype=int)) * 7919 + zlib.crc32(path.encode())) % 1000
    wide = numbers / 8 if dtype.startswith(("float", "bfloat")) else numbers % 100
    return wide.reshape(shape).astype(getattr(jnp, dtype) if "b" in dtype or "8_" in dtype else dtype)


def states() -> dict[str, object]:
    """A state of every sampler, filled with numbers by path."""
    found = {}
    for name, sampler in SAMPLERS.items():
        count = PARTICLES.get(name)
        form = jax.eval_shape(lambda s=sampler, n=count: s.init(jax.random.key(0), *([n] if n else [])))
        found[name] = jax.tree_util.tree_map_with_path(
            lambda path, leaf, name=name: jnp.asarray(value(place(name, path), leaf.dtype.name, leaf.shape)), form
        )
    return found


def place(name: str, path: tuple[object, ...]) -> str:
    return "/".join([name, *(str(getattr(part, "name", getattr(part, "idx", None))) for part in path)])


def tree() -> dict[str, object]:
    """What was written into the file."""
    return {
        **states(),
        "numbers": NUMBERS,
        "nan": float("nan"),
        "strings": STRINGS,
        "plain": {"none": None, "yes": True, "no": False, "empty": [{}, [], ()]},
        "keys": {name: jax.random.key(7, impl=kind) for name, kind in KEYS.items()},
        "many keys": jax.random.wrap_key_data(jnp.arange(6, dtype=jnp.uint32).reshape(3, 2), impl="threefry2x32"),
        "arrays": {dtype: value(dtype, dtype, (2, 3)) for dtype in DTYPES},
        "shapes": [np.zeros((0, 4), np.float32), np.array(0.5), np.ones((1, 1, 1), np.int32)],
    }


@pytest.fixture(scope="module")
def loaded():
    return opvi.load(FILE)


def same(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def test_plain_values(loaded):
    assert [repr(number) for number in loaded["numbers"]] == [repr(number) for number in NUMBERS]
    assert loaded["nan"] != loaded["nan"]
    assert loaded["strings"] == STRINGS
    assert loaded["plain"] == {"none": None, "yes": True, "no": False, "empty": [{}, [], []]}
    assert set(loaded) == {*SAMPLERS, "numbers", "nan", "strings", "plain", "keys", "many keys", "arrays", "shapes"}


def test_arrays_and_keys(loaded):
    for dtype in DTYPES:
        assert same(loaded["arrays"][dtype], value(dtype, dtype, (2, 3)))
    assert [(a.shape, a.dtype.name) for a in loaded["shapes"]] == [
        ((0, 4), "float32"),
        ((), "float64"),
        ((1, 1, 1), "int32"),
    ]
    for name, kind in KEYS.items():
        assert loaded["keys"][name] == jax.random.key(7, impl=kind)
    assert same(jax.random.key_data(loaded["many keys"]), np.arange(6, dtype=np.uint32).reshape(3, 2))


def arrays(tree, path):
    if isinstance(tree, dict | list):
        for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from arrays(part, f"{path}/{name}")
    elif tree is not None:
        yield path, tree


def test_states_are_dictionaries_of_their_fields(loaded):
    """Whatever happens to the classes."""
    layout = {path: (a.dtype.name, a.shape) for path, a in arrays(loaded["svgd with adam"], "svgd with adam")}
    assert layout == {
        "svgd with adam/particles": ("float32", (5, 4)),
        "svgd with adam/optimizer/0/count": ("int32", ()),
        "svgd with adam/optimizer/0/mu": ("float32", (5, 4)),
        "svgd with adam/optimizer/0/nu": ("float32", (5, 4)),
        "svgd with adam/round": ("int32", ()),
        "svgd with adam/rows": ("int32", ()),
    }
    counts = {}
    for name in SAMPLERS:
        found = list(arrays(loaded[name], name))
        counts[name] = len(found)
        for path, array in found:
            assert same(array, value(path, array.dtype.name, array.shape)), path
    assert counts == {"langevin": 3, "svgd with adam": 6, "regressor": 51, "classifier": 50}


@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_still_know_their_states(name):
    """If this fails, fields of a state were renamed or dropped, and saved runs no longer load: let them.

    A field that is newer than the file has the number that is its default.
    """
    state = opvi.load(FILE, like={name: SAMPLERS[name]})[name]
    expected = states()[name]
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    written = {path for path, _ in arrays(opvi.load(FILE)[name], name)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        where = place(name, path)
        assert same(leaf, value(where, leaf.dtype.name, leaf.shape) if where in written else np.zeros_like(leaf)), where


if __name__ == "__main__":
    assert not FILE.exists(), f"{FILE} is there already: delete it first, and never after a release."
    opvi.save(FILE, tree())
