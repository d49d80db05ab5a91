"""Any optax optimizer drives any particle flow: it evolves in the compiled loop, and resumes with the same bits."""

import jax
import numpy as np
import optax
import pytest

import opvi

TARGET = opvi.gaussian_mixture()
ROWS = np.random.default_rng(0).normal(size=12).astype(np.float32)

FLOWS = {
    "opvi": opvi.opvi,  # all flows are one class, and move by the same lines
    "wag": lambda target, step: opvi.svgd(target, step=step, acceleration=opvi.flows.wag()),
}
OPTIMIZERS = {
    "momentum": optax.sgd(0.01, momentum=0.9),
    "root mean squares": optax.rmsprop(0.01),
    "nadam": optax.nadam(0.01),
    "lion": optax.lion(0.01),
    "clipped": optax.chain(optax.clip(0.5), optax.adam(0.01)),
    "scheduled": optax.adam(optax.cosine_decay_schedule(0.05, 10)),
    "weights decay": optax.adamw(0.01, weight_decay=0.1),  # reads the parameters as well
}
PAIRS = [("opvi", name) for name in OPTIMIZERS] + [(flow, "clipped") for flow in FLOWS if flow != "opvi"]


@pytest.mark.parametrize(("flow", "name"), PAIRS)
def test_optimizers_drive_the_flow(flow, name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax mixes dtypes and ranks
        algorithm = FLOWS[flow](TARGET, step=OPTIMIZERS[name])
        stream = opvi.stream(ROWS, 3)
        start = algorithm.init(jax.random.key(0), 5)
        whole, history = opvi.run(algorithm, stream, 0, state=start)
        part, _ = opvi.run(algorithm, stream, 0, state=start, rounds=2)
        resumed, _ = opvi.run(algorithm, stream.after(2), 0, state=part)
    assert history.info.finite.all()
    assert len(jax.tree.leaves(start.optimizer)) > 0
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), start.optimizer, whole.optimizer)
    assert all(jax.tree.leaves(changed))
    assert np.abs(whole.particles - start.particles).max() > 1e-3
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, resumed))
