"""Run by test_sharding.py: samplers on eight devices beside one. Prints JSON."""

import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

import opvi
from opvi.flows import fields
from opvi.scale import _sharding as sharding
from opvi.tracking._inside import replaced
from opvi.tracking.experts._process import ProcessState

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(45, 3)).astype(np.float32)
Y, LABELS = np.sin(X[:, 0]).astype(np.float32), (X[:, 0] > 0).astype(np.int32)


def difference(value, reference):
    """The largest over all leaves, relative to the leaf."""

    def one(a, b):
        a, b = np.asarray(a, float), np.asarray(b, float)
        return np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30)

    return float(max(jax.tree.leaves(jax.tree.map(one, value, reference))))


def cut(state):
    """Names of the leaves that are spread over devices, each of which holds its part alone."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    spread = [(path, leaf) for path, leaf in leaves if not leaf.is_fully_replicated]
    assert all(shard.data.shape[0] < len(leaf) for _, leaf in spread for shard in leaf.addressable_shards)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in spread]


def every_mesh():
    """One program on 1, 2 and 8 devices, particles and rows cut in different ways; 20 rows do not divide by 8."""
    algorithm = opvi.opvi(opvi.logistic_regression(3), step=0.05)
    batch, start = opvi.batch((X[:20], LABELS[:20])), algorithm.init(KEY, 16)
    reference = algorithm.step(KEY, start, batch)
    out = {}
    for particles, data in [(2, 1), (8, 1), (1, 8)]:
        spread = opvi.scale.sharded(algorithm, opvi.scale.mesh(particles, data))
        state, info = spread.step(KEY, start, batch)
        assert state.particles.sharding.shard_shape((16, 4)) == (16 // particles, 4)
        out[f"{particles} × {data}"] = difference((state, info), reference)
    return out


def whole_run():
    """A run of several chunks, from particles drawn by the sampler."""
    algorithm = opvi.opvi(opvi.logistic_regression(3), step=0.05)
    spread = opvi.scale.sharded(algorithm, opvi.scale.mesh(4, 2))
    stream = opvi.stream((X, LABELS), 20)
    runs = [opvi.run(sampler, stream, KEY, particles=16, every=2) for sampler in (algorithm, spread)]
    (state, history), (spread_state, spread_history) = runs
    with tempfile.TemporaryDirectory() as folder:
        loaded = opvi.load(opvi.save(Path(folder) / "state", spread_state), like=algorithm)
    assert cut(loaded) == []  # whole, on one device
    once, again = (opvi.run(spread, stream, KEY, state=s, rounds=1)[0] for s in (spread_state, loaded))
    return {
        "error": difference((spread_state, spread_history.info), (state, history.info)),
        "cut": cut(spread_state),
        "error after loading": difference(again, once),
        "cut after loading": cut(again),
    }


def every_field():
    """The ring against the whole matrix, on particles over 4 devices and rows over 2."""
    x = jax.random.normal(jax.random.key(1), (16, 6))
    s = jax.random.normal(jax.random.key(2), (16, 6))
    mesh = opvi.scale.mesh(4, 2)
    spread = NamedSharding(mesh, PartitionSpec("particles"))
    out = {}
    for name in ("svgd", "blob", "gfsd", "gfsf"):
        field = getattr(fields, name)()
        on_mesh = jax.jit(around(field, mesh))
        out[name] = difference(on_mesh(*jax.device_put((x, s), spread)), jax.jit(field)(x, s))
    return out


def around(field, mesh):
    """The field as a sharded step calls it."""

    def on_mesh(x, s):
        with use_abstract_mesh(mesh.abstract_mesh):
            return field(x, s)

    return on_mesh


def every_tracker():
    """Those that keep more than positions: what is cut, and how far the result is off."""
    classes = opvi.mlp(3, (4,), opvi.categorical(), outputs=2, activation=jnp.tanh)
    factored = opvi.kfac(classes)
    regressor = opvi.regressor(3, hidden=(4,), particles=8)
    trackers = {
        "kfac": (factored, LABELS, factored.init(KEY, 8)),
        "regressor": (regressor, Y, regressor.init(KEY)),
    }
    out, mesh = {}, opvi.scale.mesh(4)
    for name, (tracker, y, begin) in trackers.items():
        spread, plain, state = opvi.scale.sharded(tracker, mesh), begin, opvi.scale.place(begin, mesh)
        for start in (0, 20):
            batch = opvi.batch((X[start : start + 20], y[start : start + 20]))
            plain, _ = tracker.step(KEY, plain, batch)
            state, _ = spread.step(KEY, state, batch)
        assert difference(plain.particles, begin.particles) > 0.01
        # A root's inverse has large entries: of a process, what it predicts is compared, below.
        ours, theirs = (replaced(s, ProcessState, lambda _: ()) for s in (state, plain))
        out[name] = {"error": difference(ours, theirs), "cut": cut(state)}
    told, plainly = (tracker.predict(s, X[:4]).mean() for s in (state, plain))
    out["prediction"] = {"error": difference(told, plainly)}
    sets = jax.eval_shape(opvi.classifier(3, 2, hidden=(4,), particles=16).init, KEY)
    whole = sharding.layout(sets, mesh)
    places, _ = jax.tree_util.tree_flatten_with_path(whole)
    spread = [path for path, place in places if not place.is_fully_replicated]
    out["classifier"] = {"cut": [jax.tree_util.keystr(path, simple=True, separator=".") for path in spread]}
    return out


def exchanged():
    """Shapes of what devices send each other in one direction of many particles, and the largest array on any."""
    n, d, mesh = 8192, 3, opvi.scale.mesh(8)
    spread = NamedSharding(mesh, PartitionSpec("particles"))
    x = jax.ShapeDtypeStruct((n, d), jnp.float32, sharding=spread)
    text = jax.jit(around(fields.svgd(), mesh)).lower(x, x).compile().as_text()
    shapes = {"gathered": r"\[([\d,]+)\]\S* all-gather\(", "passed on": r"\[([\d,]+)\]\S* collective-permute\("}
    found = {name: sorted(set(re.findall(pattern, text))) for name, pattern in shapes.items()}
    sizes = [np.prod([int(k) for k in shape.split(",")]) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    return {**found, "largest": int(max(sizes))}


checks = {
    "meshes": every_mesh,
    "run": whole_run,
    "fields": every_field,
    "trackers": every_tracker,
    "exchanged": exchanged,
}
json.dump({name: check() for name, check in checks.items()}, sys.stdout)
