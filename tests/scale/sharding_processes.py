"""Run by test_sharding.py, once for each of two processes: a run that is cut off, and one that resumes there."""

import json
import os
import signal
import sys
from itertools import islice
from pathlib import Path

import jax
import numpy as np

import opvi
from opvi.scale import distributed

rng = np.random.default_rng(0)
X = rng.normal(size=(95, 3)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(np.int32)
BATCH = 20  # 95 rows: the last batch is not full, and of two processes the second lacks rows
KEY = 0
CUT = 2  # rounds


def sampler(particles=8):
    """On all devices of all processes, and a new state."""
    spread = opvi.scale.sharded(opvi.opvi(opvi.logistic_regression(3), step=0.05), opvi.scale.mesh())
    return spread, spread.init(jax.random.key(KEY), particles)


def whole(folder=None, die=False):
    """The stream from where the folder's state stopped, saved after every round. Gives the state and the history."""
    algorithm, state = sampler()
    if folder:
        state = distributed.resume(folder, state)

    def save(chunk):
        if folder:
            distributed.save(folder, chunk.state)
        if die and chunk.round == CUT and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    rows = distributed.share(zip(X, LABELS, strict=True), BATCH, after=int(state.round) * BATCH)
    stream = distributed.stream(rows, BATCH, ahead=2)
    return opvi.run(algorithm, stream, KEY, state=state, every=1, callbacks={"save": save})


def uneven():
    """Sources of their own: process 0 has three batches, process 1 one and a row."""
    algorithm, state = sampler()
    mine = (X[:30], LABELS[:30]) if jax.process_index() == 0 else (X[30:41], LABELS[30:41])
    state, history = opvi.run(algorithm, distributed.stream(mine, BATCH), KEY, state=state)
    return history.info.rows.tolist()


def refused(folder):
    """What cannot work, and is said on both processes alike."""
    algorithm, state = sampler()
    nothing = islice(zip(X, LABELS, strict=True), 0)
    rows = nothing if jax.process_index() else zip(X, LABELS, strict=True)
    attempts = {
        "batch": lambda: distributed.share((X, LABELS), 21),
        "particles": lambda: distributed.resume(folder, sampler(16)[1]),
        "rows": lambda: opvi.run(algorithm, distributed.stream(rows, BATCH), KEY, state=state),
    }
    out = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            out[name] = str(error)
    return out


def main():
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "killed":
        whole(folder, die=True)
        return
    first = int(distributed.resume(folder, sampler()[1]).round)
    state, history = whole(folder)
    everything = distributed.gather(state)
    out = {
        "first": first,
        "rows": history.info.rows.tolist(),
        "log_predictive": history.info.log_predictive.tolist(),
        "local": [shard.data.shape for shard in state.particles.addressable_shards],
        "saved": sorted(path.name for path in folder.iterdir()),
        "uneven": uneven(),
        "refused": refused(folder),
        "particles": np.asarray(everything.particles).tolist(),
    }
    Path(f"{folder}-{jax.process_index()}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    with distributed.connected(timeout=10):
        main()
