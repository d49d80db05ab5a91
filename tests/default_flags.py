"""Loop, scan, run and resumed run of some samplers compared bit by bit; run by `test_samplers` as a process.

The suite's own flags keep XLA from optimising, so that it fuses nothing in one way here and in another there. In this
process the flags are XLA's defaults. The arguments are names of samplers; those for which a way gave other bits are
printed on a line. After the argument `plain` those that follow are compared, for a line of their own, with `jax.jit` in
the place of `compiled`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi._steps import compiled
from opvi.tracking._classifier import Classifier

ROUNDS, ROWS, N, KEY = 8, 6, 4, jax.random.key(0)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROUNDS * ROWS, 3)).astype(np.float32)
Y = np.sin(X[:, 0]) + 0.1 * RNG.normal(size=len(X)).astype(np.float32)
NETWORK = opvi.mlp(3, (20,), activation=jnp.tanh, prior_variance=None)


class OneNetwork(Classifier):
    """A classifier that has of each part one: its second network is made of what the first is made of."""

    @property
    def networks(self):
        return super().networks[:1]


NUMBERS, LABELS = (X, Y), (X, (Y > 0).astype(np.int32))

CASES = {
    "langevin": (opvi.langevin(NETWORK, step=0.01), NUMBERS),
    "gfsd": (opvi.gfsd(NETWORK, step=0.01), NUMBERS),
    "opvi": (opvi.opvi(NETWORK, step=opvi.schedules.decaying(0.1, 0.55)), NUMBERS),
    "online_map": (opvi.online_map(NETWORK, step=0.1), NUMBERS),
    "gauss_newton": (opvi.gauss_newton(NETWORK), NUMBERS),
    "kfac": (opvi.kfac(NETWORK), NUMBERS),
    "gain_one": (opvi.gain_one(opvi.logistic_regression(3), half_life=50.0, substeps=2), LABELS),
    "sl_opvi": (
        opvi.sl_opvi(opvi.logistic_regression(3), memory_rows=0, pace=opvi.filters.Pace(steps=2, looks=1)),
        LABELS,
    ),
    "regressor": (opvi.regressor(3, hidden=(), particles=N), NUMBERS),
    "classifier": (
        OneNetwork(3, 2, hidden=(4,), particles=N, half_life=30.0, with_linear=True, memory_rows=None),
        LABELS,
    ),
}

CALLED = compiled(abs).__code__  # shared by all that `compiled` returns


def bits_agree(sampler, rows):
    """Return whether a loop, a scan, a run, and a run that stopped and resumed end in the same state."""
    stream = opvi.stream(rows, ROWS)
    start = looped = sampler.init(KEY, N)
    for batch in stream:
        looped, _ = sampler.step(KEY, looped, batch)

    @jax.jit
    def scan(state, batches):  # which drops the info: a program that XLA may fuse in another way
        return jax.lax.scan(lambda state, batch: (sampler.step(KEY, state, batch)[0], None), state, batches)[0]

    scanned = scan(start, jax.tree.map(lambda *leaves: jnp.stack(leaves), *stream))
    run, _ = opvi.run(sampler, stream, KEY, state=start)
    half, _ = opvi.run(sampler, stream, KEY, state=start, rounds=3)
    resumed, _ = opvi.run(sampler, stream.after(3), KEY, state=half)
    return all(jax.tree.all(jax.tree.map(np.array_equal, looped, other)) for other in (scanned, run, resumed))


def given_to_compiled(function):
    """Return the step that `compiled` made this function of, None if it did not."""
    while function is not None and getattr(function, "__code__", None) is not CALLED:
        function = getattr(function, "__wrapped__", None)
    return function and function.__wrapped__.__wrapped__


def with_plain_jit():
    """Put `jax.jit` in the place of `compiled`, in every module and in its classes, and forget what was compiled."""
    jax.clear_caches()
    for module in [module for name, module in sys.modules.items() if name.startswith("opvi.")]:
        classes = [owner for owner in vars(module).values() if isinstance(owner, type)]
        for owner in (module, *classes):
            for name, function in vars(owner).copy().items():
                step = given_to_compiled(function)
                if getattr(step, "__module__", None) == module.__name__:
                    setattr(owner, name, jax.jit(step, static_argnums=0))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name == "plain":
            with_plain_jit()
            print()
        elif not bits_agree(*CASES[name]):
            print(name, end=" ")
