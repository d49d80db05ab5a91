"""The posterior of a stream at equal processor time: opvi beside IBIS, NUTS, SVI and Laplace refitted, and SGLD.

`python -m benchmarks.orders peers --out docs/results`. The posterior is wanted at any time: at ten places of a stream,
a method's latest draws are compared with the posterior of the rows up to there. Its error is the worst mean, in sds of
that posterior, averaged over the ten; its time is that of the whole stream, compiled. What is refitted starts where it
ended, so many times in the stream: its settings are how often and how long.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from numpyro import distributions as dist
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO, autoguide
from numpyro.infer.initialization import init_to_value
from numpyro.infer.svi import SVIState

import opvi
from benchmarks import order_figures, order_references
from benchmarks.machine import machine
from benchmarks.order_figures import summary
from benchmarks.order_models import FAMILIES
from benchmarks.orders import Stream, default, errors, timed
from benchmarks.parallel import finished, keep
from benchmarks.stamp import stamp
from opvi.types import Tree

FILE = "orders-peers.json"
SOURCES = "src/opvi/filters", "src/opvi/tracking/_tracker.py", "benchmarks/orders.py", "benchmarks/order_peers.py"
STREAMS = (
    Stream("elec2, 10,000 rows", "natural"),
    Stream("poisson", "by y"),
    Stream("hierarchy", "by x"),
)
PLACES = 10  # of a stream, at which draws are wanted
DRAWS, PARTICLES, BATCH = 1000, 1000, 20
SEGMENT = 250  # rows between two points of the plot of costs
Draws = Iterator[np.ndarray]


Weighted = tuple[Tree, np.ndarray]  # rows, and whether they count


class Run(NamedTuple):
    """One stream as a method sees it."""

    target: opvi.Target
    rows: Tree
    ends: list[int]
    key: jax.Array
    sampler: opvi.Sampler
    prior: Callable[[jax.Array, int], jax.Array]

    @property
    def length(self) -> int:
        """The number of rows."""
        return len(jax.tree.leaves(self.rows)[0])

    def first(self, count: int) -> Weighted:
        """Return the first rows, padded to a power of two, and which of them count: few programs then suffice."""
        room = 1 << max(count - 1, 255).bit_length()
        return jax.tree.map(partial(pad, count=count, room=room), self.rows), np.arange(room) < count

    def between(self, low: int, high: int) -> Tree:
        return jax.tree.map(lambda leaf: leaf[low:high], self.rows)


def prior_of(family: str, key: jax.Array, n: int) -> jax.Array:
    """Return draws from the prior of one of the three families."""
    v = jax.random.normal(key, (n, FAMILIES[family].target.dim))
    return v.at[:, 0].multiply(3.0) if family == "hierarchy" else v


def ours(run: Run, batch: int) -> Draws:
    """Yield draws of the tracker at every place."""
    state, low = run.sampler.init(run.key), 0
    for high in run.ends:
        rows = opvi.stream(run.between(low, high), batch)
        state, low = opvi.run(run.sampler, rows, run.key, state=state)[0], high
        yield np.asarray(run.sampler.draws(state, run.key, DRAWS))  # type: ignore[attr-defined]


# IBIS (Chopin, 2002): weights by each batch; where few particles are effective, resampled and moved on all rows.


def log_likelihood(target: opvi.Target, v: jax.Array, rows: Weighted) -> jax.Array:
    """Return the log likelihood of the rows that count."""
    return jnp.where(rows[1], target.log_likelihood(target.unravel(v), rows[0]), 0.0).sum()


def log_density(target: opvi.Target, v: jax.Array, rows: Weighted) -> jax.Array:
    """Return the log density of the posterior, not normalised."""
    return target.log_prior(target.unravel(v)) + log_likelihood(target, v, rows)


@partial(jax.jit, static_argnums=0)
def row_sums(target: opvi.Target, x: jax.Array, rows: Weighted) -> jax.Array:
    """Return every particle's log likelihood of some rows."""
    return jax.vmap(lambda v: log_likelihood(target, v, rows))(x)


@partial(jax.jit, static_argnums=(0, 1))
def random_walk(
    target: opvi.Target, moves: int, key: jax.Array, x: jax.Array, root: jax.Array, rows: Weighted
) -> jax.Array:
    """Return particles after Metropolis steps on all rows."""
    density = jax.vmap(lambda v: log_density(target, v, rows))

    def step(i: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, at = now
        one, two = jax.random.split(jax.random.fold_in(key, i))
        new = x + jax.random.normal(one, x.shape) @ root.T
        there = density(new)
        taken = jnp.log(jax.random.uniform(two, at.shape)) < there - at
        return jnp.where(taken[:, None], new, x), jnp.where(taken, there, at)

    return jax.lax.fori_loop(0, moves, step, (x, density(x)))[0]


def ibis(run: Run, moves: int) -> Draws:
    """Yield draws of 1,000 particles."""
    rng = np.random.default_rng(int(jax.random.randint(run.key, (), 0, 2**30)))
    x, log_weight, low = run.prior(run.key, PARTICLES), np.zeros(PARTICLES), 0
    for end in run.ends:
        while low < end:
            high = min(low + BATCH, end)
            new = run.between(low, high), np.ones(high - low, bool)
            log_weight, low = log_weight + np.asarray(row_sums(run.target, x, new), float), high
            w = np.exp(log_weight - log_weight.max())
            w /= w.sum()
            if 1 / (w**2).sum() < PARTICLES / 2:
                at = np.asarray(x, float)
                spread = (w[:, None] * (at - w @ at)).T @ (at - w @ at) + 1e-10 * np.eye(at.shape[1])
                root = jnp.asarray(np.linalg.cholesky(spread) * 2.38 / math.sqrt(at.shape[1]), jnp.float32)
                x, log_weight = x[systematic(rng, w)], np.zeros(PARTICLES)
                x = random_walk(run.target, moves, jax.random.fold_in(run.key, high), x, root, run.first(high))
        w = np.exp(log_weight - log_weight.max())
        yield np.asarray(x)[systematic(rng, w / w.sum())]


def systematic(rng: np.random.Generator, w: np.ndarray) -> np.ndarray:
    """Return systematic resamples of weights that sum to 1."""
    at = (np.arange(len(w)) + rng.uniform()) / len(w)
    return np.searchsorted(np.cumsum(w), at).clip(0, len(w) - 1)


def pad(leaf: np.ndarray, count: int, room: int) -> np.ndarray:
    """Return the first rows, and the first of them again up to a size."""
    return np.concatenate([leaf[:count], np.repeat(leaf[:1], room - count, 0)])


# Refitted on all rows so far, once in so many, from where the last fit ended.


def refitted(run: Run, times: int, fit: Callable[[int], np.ndarray]) -> Draws:
    """Yield the draws of the latest of so many fits; those of the prior before the first."""
    draws, done, step = np.asarray(run.prior(run.key, DRAWS)), 0, run.length // times
    for end in run.ends:
        while done + step <= end:
            done += step
            draws = fit(done)
        yield draws


def model_of(target: opvi.Target) -> Callable[[Weighted], None]:
    """Return a target as a NumPyro model of its rows."""

    def model(rows: Weighted) -> None:
        v = numpyro.sample("v", dist.ImproperUniform(dist.constraints.real_vector, (), (target.dim,)))
        numpyro.factor("density", log_density(target, v, rows))

    return model


@cache
def chain_of(target: opvi.Target, samples: int, room: int) -> MCMC:
    """Return a chain that keeps its compiled program, for a number of rows."""
    kernel = NUTS(model_of(target), dense_mass=True, init_strategy=init_to_value(values={"v": jnp.zeros(target.dim)}))
    return MCMC(kernel, num_warmup=samples, num_samples=samples, progress_bar=False, jit_model_args=True)


def nuts(run: Run, times: int, samples: int) -> Draws:
    """Yield draws of one chain, warmed up as long as it samples."""
    at = jnp.asarray(run.prior(run.key, 100).mean(0))

    def fit(end: int) -> np.ndarray:
        nonlocal at
        rows = run.first(end)
        chain = chain_of(run.target, samples, len(rows[1]))
        chain.run(jax.random.fold_in(run.key, end), rows, init_params={"v": at})
        draws = np.asarray(chain.get_samples()["v"])
        at = jnp.asarray(draws[-1])
        return draws

    return refitted(run, times, fit)


class Fit(NamedTuple):
    """A guide with a compiled loop."""

    svi: SVI
    start: Tree  # its parameters, unconstrained
    loop: Callable[[SVIState, Weighted], SVIState]


@cache
def fit_of(target: opvi.Target, guide_of: str, steps: int) -> Fit:
    """Return a guide and its loop."""
    guide = getattr(autoguide, guide_of)(model_of(target), init_scale=0.1)
    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, steps))
    svi = SVI(model_of(target), guide, optimizer, Trace_ELBO(num_particles=4))
    family = next(s.family for s in STREAMS if FAMILIES[s.family].target is target)
    one = jax.tree.map(lambda leaf: leaf[:1], FAMILIES[family].rows.data), np.ones(1, bool)
    start = svi.optim.get_params(svi.init(jax.random.key(0), one).optim_state)

    @jax.jit
    def loop(state: SVIState, rows: Weighted) -> SVIState:
        return jax.lax.fori_loop(0, steps, lambda _, state: svi.update(state, rows)[0], state)

    return Fit(svi, start, loop)


def svi(run: Run, times: int, steps: int, *, guide_of: str) -> Draws:
    """Yield draws of a Gaussian fitted by gradients of the evidence's lower bound."""
    made = fit_of(run.target, guide_of, steps)
    at = made.start

    def fit(end: int) -> np.ndarray:
        nonlocal at
        state = SVIState(made.svi.optim.init(at), None, jax.random.fold_in(run.key, end))
        state = made.loop(state, run.first(end))
        at, params = made.svi.optim.get_params(state.optim_state), made.svi.get_params(state)
        draws = made.svi.guide.sample_posterior(jax.random.key(end), params, sample_shape=(DRAWS,))
        return np.asarray(draws["v"])

    return refitted(run, times, fit)


@partial(jax.jit, static_argnums=0)
def slope_and_bend(target: opvi.Target, v: jax.Array, rows: Weighted) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the log density with its gradient and Hessian."""

    def density(v: jax.Array) -> jax.Array:
        return log_density(target, v, rows)

    return density(v), jax.grad(density)(v), jax.hessian(density)(v)


def laplace(run: Run, times: int) -> Draws:
    """Yield draws of the Gaussian at the mode, which damped Newton steps find."""
    v, rng = np.asarray(run.prior(run.key, 100).mean(0)), np.random.default_rng(0)

    def fit(end: int) -> np.ndarray:
        nonlocal v
        rows = run.first(end)
        value, g, H = (np.asarray(part, float) for part in slope_and_bend(run.target, v, rows))
        for _ in range(30):
            values, vectors = np.linalg.eigh(-H)
            move = vectors @ ((vectors.T @ g) / np.maximum(np.abs(values), 1e-3))
            if np.abs(g @ move) < 1e-3:
                break
            for half in 0.5 ** np.arange(12):
                tried = np.asarray(v + half * move, np.float32)
                found = [np.asarray(part, float) for part in slope_and_bend(run.target, tried, rows)]
                if found[0] > value - 1e-4:
                    v, (value, g, H) = tried, found
                    break
            else:
                break
        values, vectors = np.linalg.eigh(-H)
        return v + (rng.normal(size=(DRAWS, len(v))) / np.sqrt(np.maximum(values, 1e-3))) @ vectors.T

    return refitted(run, times, fit)


def sgld(run: Run, step: float) -> Draws:
    """Yield 1,000 chains of Langevin dynamics, one batch per round; the step falls with the rows seen."""
    flow = flow_of(run.target, step)
    state, low = flow.init(run.key, PARTICLES), 0
    for high in run.ends:
        rows = opvi.stream(run.between(low, high), BATCH)
        try:
            state, low = opvi.run(flow, rows, run.key, state=state)[0], high
        except opvi.DivergedError:
            low = high
            state = state._replace(particles=jnp.full_like(state.particles, jnp.nan))
        yield np.asarray(state.particles)


@cache
def flow_of(target: opvi.Target, step: float) -> opvi.Sampler:
    return opvi.langevin(target, step=partial(falling, step), likelihood_scale=of_all_rows)


def falling(step: float, t: jax.Array) -> jax.Array:
    """Return a step over the rows seen."""
    return step / (BATCH * t)


def of_all_rows(rows: jax.Array, seen: jax.Array) -> jax.Array:
    """Return the factor that makes a batch stand for all rows seen."""
    return seen / rows


METHODS: dict[str, tuple[Callable[..., Draws], list[tuple]]] = {
    "opvi": (ours, [(20,), (100,)]),
    "IBIS": (ibis, [(1,), (5,), (20,)]),
    "NUTS": (nuts, [(5, 100), (5, 500), (20, 100), (100, 100)]),
    "SVI, normal": (partial(svi, guide_of="AutoNormal"), [(5, 1000), (20, 1000), (100, 300), (100, 1000)]),
    "SVI, full": (partial(svi, guide_of="AutoMultivariateNormal"), [(5, 1000), (20, 1000), (100, 300), (100, 1000)]),
    "Laplace": (laplace, [(5,), (20,), (100,), (500,)]),
    "SGLD": (sgld, [(0.001,), (0.003,), (0.01,), (0.03,), (0.1,), (0.3,)]),
}


def ends_of(stream: Stream) -> list[int]:
    """Return the rows after which draws are wanted: in the middle between refits."""
    count = len(FAMILIES[stream.family].rows.y)
    return [count * (2 * place + 1) // (2 * PLACES) for place in range(PLACES)]


def references(folder: Path) -> dict[str, Any]:
    """Return the posterior at each place of the streams, made where it is missing."""
    file = folder / "orders-peers-references.json"
    kept = json.loads(file.read_text())["references"] if file.exists() else {}
    for stream in STREAMS:
        family = FAMILIES[stream.family]
        rows = family.in_order(stream.order)
        for end in ends_of(stream):
            part = jax.tree.map(lambda leaf, end=end: leaf[:end], rows)
            name, mark = f"{stream.name}, {end}", order_references.mark(family, part)
            if kept.get(name, {}).get("mark") == mark:
                continue
            jax.config.update("jax_enable_x64", True)
            kept[name] = order_references.reference(family, part)
            print(name, kept[name]["seconds"], flush=True)
            keep(
                file,
                {
                    "command": "python -m benchmarks.orders peers",
                    "sources": order_references.sources(),
                    "references": kept,
                },
            )
    return kept


def play(family: str, order: str, method: str, setting: int, seed: int, folder: str) -> dict[str, Any]:
    """Return a method's errors at each place of a stream, and its processor time up to there."""
    stream = Stream(family, order)
    made, kept = FAMILIES[family], references(Path(folder))
    run = Run(
        made.target,
        made.in_order(order),
        ends_of(stream),
        jax.random.key(seed),
        default(family),
        partial(prior_of, family),
    )
    function, settings = METHODS[method]
    for _ in function(run, *settings[setting]):  # what is compiled is kept for the second time
        pass
    draws, seconds, found = function(run, *settings[setting]), 0.0, []
    for end in run.ends:
        with timed() as clock:
            got = next(draws)
        seconds += clock.processor
        found.append({"rows": end, "seconds": seconds, **errors(got, kept[f"{stream.name}, {end}"])})
    return {"setting": settings[setting], "parts": found}


def costs(family: str, order: str, batch: int, seed: int = 0) -> list[dict[str, float]]:
    """Return the tracker's processor time per row, segment by segment, without compiling."""
    sampler, rows = default(family), FAMILIES[family].in_order(order)
    count, key = len(jax.tree.leaves(rows)[0]), jax.random.key(seed)
    size = max(SEGMENT // batch, 1) * batch
    for _ in range(2):  # what is compiled is kept for the second time
        state, made = sampler.init(key), []
        for low in range(0, count - size + 1, size):
            part = jax.tree.map(lambda leaf, low=low: leaf[low : low + size], rows)
            with timed() as clock:
                state = jax.block_until_ready(opvi.run(sampler, opvi.stream(part, batch), key, state=state)[0])
            made.append({"rows": low + size, "ms per row": 1e3 * clock.processor / size})
    return made


def printed(results: dict[str, dict]) -> str:
    """Return the time and error of every method and setting as Markdown."""
    lines = ["| stream | method | setting | seconds | mean off, sd |", "| --- | --- | --- | --- | --- |"]
    for stream, by_method in results.items():
        for method, by_setting in by_method.items():
            for setting, trials in by_setting.items():
                ((seconds, error),) = summary({setting: trials})
                lines.append(f"| {stream} | {method} | {setting} | {seconds:.2f} | {error:.2f} |")
    return "\n".join(lines)


def compare(options: argparse.Namespace) -> None:
    """Measure all methods, and write `orders-peers.json` and two figures."""
    references(options.references)
    jax.config.update("jax_enable_x64", False)
    file = options.out / FILE
    held = json.loads(file.read_text()) if file.exists() and not options.fresh else {}
    results, cost = held.get("results", {}), held.get("cost", {})
    chosen = [s for s in STREAMS if not options.only or any(part in s.name for part in options.only)]
    tasks = [
        (stream.family, stream.order, method, setting, seed, str(options.references))
        for stream in chosen
        for method, (_, settings) in METHODS.items()
        for setting in range(len(settings))
        for seed in range(options.first, options.first + options.seeds)
        if str(seed) not in results.get(stream.name, {}).get(method, {}).get(str(settings[setting]), {})
    ]
    about = machine("python -m benchmarks.orders")

    def kept() -> None:
        report = {"command": about["command"], "machine": about, "sources": stamp(*SOURCES)}
        keep(file, {**report, "results": results, "cost": cost})

    made = ((task, play(*task)) for task in tasks) if options.jobs == 1 else finished(play, tasks, options.jobs)
    for (family, order, method, setting, seed, _), one in made:
        name, label = Stream(family, order).name, str(METHODS[method][1][setting])
        results.setdefault(name, {}).setdefault(method, {}).setdefault(label, {})[str(seed)] = one
        last = one["parts"][-1]
        print(name, method, label, seed, f"{last['seconds']:.2f} s, {last['worst mean']:.2f} sd", flush=True)
        kept()
    slow = [(*s, batch) for s in chosen for batch in (1, 20, 100) if str(batch) not in cost.get(s.name, {})]
    timings = ((task, costs(*task)) for task in slow) if options.jobs == 1 else finished(costs, slow, options.jobs)
    for (family, order, batch), found in timings:
        cost.setdefault(Stream(family, order).name, {})[str(batch)] = found
        kept()
    print(printed(results))
    order_figures.errors_at_time(results, [s.name for s in STREAMS], list(METHODS), options.out / "orders-peers.png")
    order_figures.cost_per_row(cost, options.out / "orders-cost.png")
