"""One SVGD step of opvi beside blackjax's and NumPyro's, on one Gaussian with one optimizer."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from blackjax.vi.svgd import median_heuristic
from numpyro.contrib.einstein import SVGD, RBFKernel

import opvi
from benchmarks.measure import Result, interleave, ratio

# (n, d) -> the factor over blackjax that is asked for
SIZES: dict[tuple[int, int], float | None] = {
    (20, 500): 15.0,
    (100, 2): 40.0,
    (100, 50): None,
    (1000, 50): 80.0,
    (2000, 10): None,
}
TOLERANCE = 1e-4  # on directions, relative


class Stepper(NamedTuple):
    """A sampler as a state, a jitted step from state to state, and where its particles are."""

    state: Any
    step: Callable[[Any], Any]
    particles: Callable[[Any], jax.Array]


Problem = tuple[jax.Array, jax.Array]  # starting particles [n, d] and the Gaussian's standard deviations [d]


def problem(n: int, d: int) -> Problem:
    return 1.0 + 2.0 * jax.random.normal(jax.random.key(0), (n, d)), jnp.linspace(1.0, 3.0, d)


def log_density(x: jax.Array, sd: jax.Array) -> jax.Array:
    return -0.5 * ((x / sd) ** 2).sum()


def ours(problem: Problem, optimizer: optax.GradientTransformation, **kwargs: Any) -> Stepper:
    """Return opvi's step: the Gaussian is the prior, and a batch of one row carries no information."""
    x, sd = problem
    target = opvi.target(
        log_prior=lambda theta: log_density(theta, sd),
        log_likelihood=lambda theta, rows: jnp.zeros(len(rows)),
        init=lambda key: jax.random.normal(key, sd.shape),
    )
    algorithm = opvi.svgd(target, step=optimizer, **kwargs)
    key, batch = jax.random.key(0), jax.device_put(opvi.batch(np.zeros(1, np.float32)))
    return Stepper(algorithm.init(key, x), lambda state: algorithm.step(key, state, batch)[0], lambda s: s.particles)


def of_blackjax(problem: Problem, optimizer: optax.GradientTransformation) -> Stepper:
    """blackjax, which updates its bandwidth after a step, so that the first one has to be given.

    Its step writes into the dict it is handed. Under `jit` that is the tracer's own copy; the dict here is ours too.
    """
    x, sd = problem
    algorithm = blackjax.svgd(jax.grad(lambda theta: log_density(theta, sd)), optimizer)
    bandwidth = median_heuristic({"length_scale": 1.0}, x)
    return Stepper(algorithm.init(x, bandwidth), jax.jit(algorithm.step), lambda state: state.particles)


def of_numpyro(problem: Problem, optimizer: optax.GradientTransformation) -> Stepper:
    """NumPyro's SVGD on the same Gaussian as a model of one site, started from our particles."""
    x, sd = problem

    def model() -> None:
        numpyro.sample("theta", numpyro.distributions.Normal(0.0, sd).to_event(1))

    optim = numpyro.optim.optax_to_numpyro(optimizer)
    svgd = SVGD(model, optim, RBFKernel(), num_stein_particles=len(x))
    state = svgd.init(jax.random.key(0))
    (site,) = svgd.get_params(state)
    step = jax.jit(lambda state: svgd.update(state)[0])
    return Stepper(state._replace(optim_state=optim.init({site: x})), step, lambda state: svgd.get_params(state)[site])


def disagreement(a: Stepper, b: Stepper) -> float:
    """Relative distance of two samplers' first moves, which are directions when the optimizer is `sgd(1)`."""
    moves = [np.asarray(s.particles(s.step(s.state)) - s.particles(s.state), np.float64) for s in (a, b)]
    return float(np.linalg.norm(moves[0] - moves[1]) / np.linalg.norm(moves[1]))


def single(stepper: Stepper) -> Callable[[], Any]:
    return lambda: stepper.step(stepper.state)


def empty(stepper: Stepper) -> Callable[[], Any]:
    """Return a jitted call from state to state that only adds 1, a lower bound for any step."""
    call = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state))
    return lambda: call(stepper.state)


def scanned(stepper: Stepper, steps: int) -> Callable[[], Any]:
    scan = jax.jit(lambda state: jax.lax.scan(lambda s, _: (stepper.step(s), None), state, None, length=steps)[0])
    return lambda: scan(stepper.state)


def results() -> Iterator[Result]:
    """Ratios at every size. Raises if opvi and a peer would not take the same step."""
    for (n, d), target in SIZES.items():
        size, plain, small = f"n={n}, d={d}", optax.sgd(1.0), optax.sgd(1e-2)
        case = problem(n, d)
        errors = {
            "blackjax": disagreement(ours(case, plain), of_blackjax(case, plain)),
            "numpyro": disagreement(
                ours(case, plain, bandwidth=opvi.flows.kernels.median_numpyro()), of_numpyro(case, plain)
            ),
        }
        for peer, error in errors.items():
            if not error < TOLERANCE:
                raise AssertionError(
                    f"opvi's and {peer}'s directions differ by {error:.1e} at {size}, more than {TOLERANCE:.0e}: "
                    "a ratio of times would compare two different things."
                )
        a, b, c = ours(case, small), of_blackjax(case, small), of_numpyro(case, small)
        steps = 500 if n < 1000 else 50
        # As each is used: opvi's steps run inside the loop that `opvi.run` compiles, the peers' are jitted calls.
        for peer, stepper in {"blackjax": b, "NumPyro": c}.items():
            timings = interleave({"opvi": scanned(a, steps), peer: single(stepper)})
            timings["opvi"] = timings["opvi"].each(steps)
            goal = target if peer == "blackjax" else None
            yield ratio(f"a step of a run, {peer}'s step", size, timings, goal, disagreement=errors[peer.lower()])
        steps = 100 if n < 1000 else 5  # a peer takes half a second a step there
        calls = {"opvi": scanned(a, steps), "blackjax": scanned(b, steps)}
        yield ratio(f"scan of {steps} steps, blackjax's too", size, interleave(calls))
        calls = {"opvi": single(a), "blackjax": single(b), "empty call": empty(a)}
        timings = interleave(calls)
        floor = {"empty_call": timings.pop("empty call").summary()}
        yield ratio("one call of a step, blackjax's too", size, timings, None, **floor)
