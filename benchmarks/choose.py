"""The choices, measured: samplers, batch sizes, particles and half-lives on the same streams.

The standard splits of kin8nm are read from the folder of OPVI_DATA; `--smoke` needs no data.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from threadpoolctl import threadpool_limits

import opvi
from benchmarks import choices
from benchmarks.choices import SEEDS, TUNING, Choice, Rows
from benchmarks.machine import machine
from opvi import metrics
from opvi._steps import dealt_by_weight
from opvi.types import StoresRows
from paper.classification import scores as class_scores
from paper.results import as_json

BATCH = 20
UNSCORED = 1000  # rows at the start of a stream whose batches are scored before they are learnt
AT_LEAST = 0.5  # seconds that a timing takes in all
BATCHES = (1, 5, 20, 100)
PARTICLES, SL_PARTICLES = (4, 8, 20, 40), (25, 50, 100, 200)
TURNS = {"still": 0, "slow drift": 90, "fast drift": 360}  # degrees by which a curve turns in the whole stream
HALF_LIVES = (30, 60, 125, 250, 500, 1000, 2000, 4000, 8000, math.inf)


# --- one pass, compiled once for all seeds ----------------------------------------------------


class Passed(NamedTuple):
    """What is scored after a pass."""

    particles: Any
    covariance: Any  # of each particle, where it has one
    said: Any  # a `Predictive` of the test rows; or what was said of each batch before it was learnt
    plain: Any  # a `Predictive` without calibration
    finite: Any  # share of the rounds


@partial(jax.jit, static_argnums=(0, 1, 2))
def pass_over(tracker: Any, target: opvi.Target | None, batch: int, key: Any, rows: Rows) -> Passed:
    """Learn all full batches in one loop."""
    count = len(rows.y) // batch
    batches = tuple(a[: count * batch].reshape(count, batch, *a.shape[1:]) for a in (rows.X, rows.y))

    def one(state: Any, part: Any) -> Any:
        said = () if rows.X_test is not None else _summary(tracker.predict(state, part[0]))
        state, info = tracker.step(key, state, opvi.Batch(part, jnp.ones(batch)))
        return state, (said, info.finite)

    state = tracker.init(key)
    if isinstance(tracker, StoresRows):
        first = jax.tree.map(lambda a: a[0], batches)
        state = tracker.make_room(state, opvi.Batch(first, jnp.ones(batch)), count)
    state, (said, finite) = jax.lax.scan(one, state, batches)
    plain: Any = ()
    if rows.X_test is not None:
        said = tracker.predict(state, rows.X_test)
        if target is not None and not isinstance(tracker, choices.Plain | opvi.filters.IBIS):
            plain = opvi.predict(target, state.particles, rows.X_test)
    past = getattr(state, "past", None)
    covariance = past.matrices[:, 0] if isinstance(state, opvi.filters.GaussNewtonState) else ()
    particles = state.particles
    if isinstance(state, opvi.filters.IBISState):  # whose particles have weights
        particles = dealt_by_weight(particles, state.log_weights, key, len(particles))
    return Passed(particles, covariance, said, plain, finite.mean(dtype=jnp.float32))


def _summary(predictive: opvi.Predictive) -> Any:
    """Class probabilities, or the mean."""
    continuous = isinstance(predictive.components, opvi.Normal | opvi.predictive.StudentT)
    return predictive.mean() if continuous else predictive.probabilities()


def scored(out: Passed, rows: Rows, target: opvi.Target | None) -> dict[str, float]:
    """Return the scores of one pass."""
    found = {"finite": float(out.finite)}
    if rows.X_test is None:
        said = np.asarray(out.said)
        said = said.reshape(-1, *said.shape[2:])
        truth = rows.y[: len(said)]
        if said.ndim == 2:
            return found | class_scores(said[UNSCORED:], truth[UNSCORED:])
        return found | {"rmse": float(np.sqrt(((said - truth)[UNSCORED:] ** 2).mean()))}
    found |= _of_test_rows(out.said, rows, "")
    if out.plain:
        found |= _of_test_rows(out.plain, rows, "plain_")
    elif target is not None and rows.known:
        found["distance"] = distance(out, rows)
    return found


def _of_test_rows(said: opvi.Predictive, rows: Rows, prefix: str) -> dict[str, float]:
    rmse, density, covers = map(float, _compiled_scores(said, rows.y_test))
    found = {"rmse": rmse * rows.unit, "lpd": density - math.log(rows.unit), "coverage": covers}
    return {f"{prefix}{name}": value for name, value in found.items()}


@jax.jit
def _compiled_scores(said: opvi.Predictive, y: Any) -> Any:
    return metrics.rmse(said, y), said.log_density(y).mean(), metrics.coverage(said, y)


def distance(out: Passed, rows: Rows) -> float:
    """W2 to the exact posterior of the linear model in its standard deviations, by means and covariances.

    Particles with covariances represent the mixture of their Gaussians.
    """
    x = np.asarray(out.particles, float)
    spread = np.cov(x.T, bias=True) if len(x) > 1 else np.zeros((x.shape[1],) * 2)
    if len(out.covariance):
        spread = spread + np.asarray(out.covariance, float).mean(0)
    centre, exact = exact_posterior(rows)
    return float(opvi.regret.gaussian_w2(x.mean(0), spread, centre, exact) / math.sqrt(np.trace(exact)))


def exact_posterior(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance for noise and prior of variance 1."""
    A = np.column_stack([rows.X, np.ones(len(rows.y))]).astype(float)
    covariance = np.linalg.inv(A.T @ A + np.eye(A.shape[1]))
    return covariance @ A.T @ rows.y.astype(float), covariance


# --- a line of a table ------------------------------------------------------------------------


def measure(choice: Choice, rows_of: Callable[[int], Rows], batch: int = BATCH) -> dict[str, Any]:
    """Find the best step on the tuning stream, then return the scores of every seed and the median cost per row."""
    streams = {seed: rows_of(seed) for seed in SEEDS}
    made = {step: choice.make(step) for step in choice.steps or (1.0,)}
    step, tried = 1.0, {}
    if choice.steps:
        other = rows_of(TUNING)
        for step, sampler in made.items():
            found = scored(pass_over(sampler, choice.target, batch, jax.random.key(TUNING), other), other, None)
            tried[step] = found["lpd"] if "lpd" in found else -found["log_loss"]
        step = max(tried, key=lambda s: tried[s] if math.isfinite(tried[s]) else -math.inf)
    one_pass = partial(pass_over, made[step], choice.target, batch)
    jax.block_until_ready(one_pass(jax.random.key(0), streams[SEEDS[0]]))  # compiles
    seconds: list[float] = []
    trials: list[dict[str, float]] = []
    while len(seconds) < len(SEEDS) or sum(seconds) < AT_LEAST:
        seed = SEEDS[len(seconds) % len(SEEDS)]
        begun = time.perf_counter()
        out = jax.block_until_ready(one_pass(jax.random.key(seed), streams[seed]))
        seconds.append(time.perf_counter() - begun)
        if len(trials) < len(SEEDS):
            trials.append(scored(out, streams[seed], choice.target))
    count = len(streams[SEEDS[0]].y) // batch * batch
    state = jax.eval_shape(made[step].init, jax.random.key(0))
    n, d = jax.eval_shape(lambda key: made[step].init(key).particles, jax.random.key(0)).shape
    return {
        **({"step": step, "score of each step": {str(s): value for s, value in tried.items()}} if tried else {}),
        "particles": n,
        "parameters": d,
        "bytes": sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "rows": count,
        "microseconds per row": 1e6 * float(np.median(seconds)) / count,
        **{name: _spread([trial[name] for trial in trials]) for name in trials[0]},
    }


def _spread(values: list[float]) -> dict[str, Any]:
    return {"mean": float(np.mean(values)), "sd": float(np.std(values, ddof=1)), "values": values}


# --- the parts --------------------------------------------------------------------------------

Lines = Iterator[tuple[str, dict[str, Any]]]


class Size(NamedTuple):
    """Where the rows come from; `--smoke` shrinks it."""

    linear: Callable[..., Rows] = choices.linear_rows
    network: Callable[..., Rows] = choices.kin8nm_rows
    market: Callable[..., Rows] = choices.elec2_rows
    moving: Callable[..., Rows] = choices.moving_rows
    rows: int = 3000  # where a batch size or a number of particles is dear
    market_rows: int = 4000


SMOKE = Size(
    partial(choices.linear_rows, size=100),
    choices.arm_rows,
    choices.switching_rows,
    partial(choices.moving_rows, size=1200),
    300,
    1200,
)


def samplers(lines: Callable[[], dict[str, Choice]], rows_of: Callable[[int], Rows]) -> Lines:
    for name, choice in lines().items():
        yield name, measure(choice, rows_of)


def linear(size: Size) -> Lines:
    """The samplers, and what as many exact draws would give."""
    yield from samplers(choices.linear_samplers, size.linear)
    far = []
    for seed in SEEDS:
        rows, rng = size.linear(seed), np.random.default_rng(seed)
        draws = rng.multivariate_normal(*exact_posterior(rows), size=choices.FEW)
        far.append(distance(Passed(draws, (), (), (), 1), rows))
    yield "exact draws", {"particles": choices.FEW, "distance": _spread(far)}


def batches(size: Size) -> Lines:
    """The recommended trackers with batches of several sizes."""
    for batch in BATCHES:
        network = Choice(lambda _: opvi.regressor(8))
        yield f"regressor, {batch}", measure(network, partial(size.network, size=size.rows), batch)
        classes = Choice(lambda _: opvi.classifier(8, 2))
        yield f"classifier, {batch}", measure(classes, partial(size.market, size=size.market_rows), batch)
        few = choices.linear_samplers()["sl_opvi, no rows"]
        yield f"sl_opvi, no rows, {batch}", measure(few, partial(size.linear, size=size.rows // 3), batch)


def particles(size: Size) -> Lines:
    """The recommended trackers with more and fewer particles."""
    for n in PARTICLES:
        network = Choice(lambda _, n=n: opvi.regressor(8, particles=n))
        yield f"regressor, {n}", measure(network, partial(size.network, size=size.rows))
    for n in PARTICLES:
        classes = Choice(lambda _, n=n: opvi.classifier(8, 2, particles=n))
        yield f"classifier, {n}", measure(classes, partial(size.market, size=size.market_rows))
    target = opvi.linear_regression(8)
    for n in SL_PARTICLES:
        few = choices.Wrap(target).settled(opvi.sl_opvi(target), n)
        yield f"sl_opvi, no rows, {n}", measure(few, partial(size.linear, size=size.rows // 3))


def forgetting(size: Size) -> Lines:
    """Measure half-lives on stationary and moving data; None is determined online."""
    for half_life in (None, *HALF_LIVES):
        yield from moving(size, half_life)
        lines = Choice(lambda _, h=half_life: opvi.classifier(8, 2, hidden=(), half_life=h))
        for where, shuffled in (("shuffled", True), ("in order", False)):
            yield f"classifier, {where}, {half_life}", measure(lines, partial(size.market, shuffled=shuffled))


def moving(size: Size, half_life: float | None) -> Lines:
    """Measure one half-life of the regressor."""
    small = Choice(lambda _: opvi.regressor(4, hidden=(20,), half_life=half_life))
    for where, turn in TURNS.items():
        yield f"regressor, {where}, {half_life}", measure(small, partial(size.moving, turn=turn))


PARTS: dict[str, Callable[[Size], Lines]] = {
    "linear": linear,
    "kin8nm": lambda size: samplers(choices.network_samplers, size.network),
    "elec2": lambda size: samplers(choices.market_samplers, size.market),
    "batches": batches,
    "particles": particles,
    "forgetting": forgetting,
}


SETTINGS = {
    "batch": BATCH,
    "steps": choices.STEPS,
    "plain steps": choices.PLAIN_STEPS,
    "repulsion of opvi": 0.1,
    "half-life on elec2": choices.HALF_LIFE,
    "rows not scored": UNSCORED,
    "degrees turned": TURNS,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choose", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for choose.json and figures")
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="measure this again; all that are missing if not given"
    )
    parser.add_argument("--online", action="store_true", help="measure only the regressor with half_life=None again")
    parser.add_argument("--smoke", action="store_true", help="tiny stand-in streams: does it run?")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    threadpool_limits(limits=1)  # several threads are slower for matrices this small
    path = given.out / ("choose-smoke.json" if given.smoke else "choose.json")
    kept = json.loads(path.read_text()) if path.exists() else {"command": "python -m benchmarks.choose", "parts": {}}
    kept["settings"] = as_json(SETTINGS)
    size = SMOKE if given.smoke else Size()
    if given.online:
        kept["parts"]["forgetting"]["lines"] |= _shown("forgetting", moving(size, None))
    missing = () if given.online else [part for part in PARTS if part not in kept["parts"]]
    for name in given.part or missing:
        begun = time.perf_counter()
        about = machine("python -m benchmarks.choose")
        lines = _shown(name, PARTS[name](size))
        kept["parts"][name] = as_json({"machine": about, "seconds": time.perf_counter() - begun, "lines": lines})
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def _shown(part: str, lines: Lines) -> dict[str, Any]:
    """Return the lines of a part, each printed when it is measured."""
    kept = {}
    for line, found in lines:
        kept[line] = as_json(found)
        shown = {key: value["mean"] for key, value in found.items() if isinstance(value, dict) and "mean" in value}
        cost = found.get("microseconds per row", math.nan)
        print(f"{part:10s} {line:32s} {cost:9.1f} µs", as_json(shown), found.get("step", ""), flush=True)
    return kept


if __name__ == "__main__":
    main()
