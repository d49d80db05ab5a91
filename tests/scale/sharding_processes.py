"""Run by test_sharding.py, once for each of two processes: the recipe of docs/scale.md, resumed from a file."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

import opvi

BATCH = 20  # 95 rows: the last batch is not full
X = np.random.default_rng(0).normal(size=(95, 3)).astype(np.float32)
ROWS = list(zip(X, (X[:, 0] > 0).astype(np.int32), strict=True))


def whole(folder, rows=ROWS):
    """Learn the rows that the folder's state has not seen, saving after every round; return state and history."""
    mesh = opvi.scale.mesh()
    sampler = opvi.scale.sharded(opvi.opvi(opvi.logistic_regression(3), step=0.05), mesh)
    state = sampler.init(jax.random.key(0), 8)
    path = folder and folder / "run.opvi"
    if folder and path.exists():
        state = opvi.scale.place(opvi.load(path, like=state), mesh)

    def save(chunk):
        everything = multihost_utils.process_allgather(chunk.state, tiled=True)
        if jax.process_index() == 0:
            opvi.save(path, everything)

    stream = opvi.stream(iter(rows[int(state.round) * BATCH :]), BATCH)
    return opvi.run(sampler, stream, 0, state=state, every=1, callbacks={"save": save} if folder else {})


def main():
    folder, address, process = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, process)
    state, history = whole(folder)
    out = {
        "rows": history.info.rows.tolist(),
        "log_predictive": history.info.log_predictive.tolist(),
        "local": [shard.data.shape for shard in state.particles.addressable_shards],
        "particles": multihost_utils.process_allgather(state.particles, tiled=True).tolist(),
    }
    (folder / f"{process}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main()
