"""Run by test_learning_distributed.py, once for each of two processes: `opvi learn --distributed`, with an accident."""

import json
import os
import signal
import sys
from contextlib import nullcontext

import jax

from opvi.app import cli
from opvi.app.learn import _distributed as together
from opvi.scale import distributed

CHUNK, CUT = 4, 8  # rounds

accident = None  # a signal that process 1 sends itself
whole = together.SharedLearner.learn_batches


def learn_batches(self, batches):
    whole(self, batches)
    if accident and jax.process_index() == 1 and int(self.engine.state.round) >= CUT:
        os.kill(os.getpid(), accident)


if __name__ == "__main__":
    together.ROUNDS = CHUNK
    together.SharedLearner.learn_batches = learn_batches
    mode, *rest = sys.argv[1:]
    if mode == "killed":
        accident = signal.SIGKILL
        sys.exit(cli.main(rest))
    with distributed.connected(timeout=10):
        distributed.connected = nullcontext  # several commands one after the other
        for name, command in json.loads(rest[0]):
            accident = signal.SIGTERM if name == "stopped" else None
            print(name, cli.main(command), file=sys.stderr)
