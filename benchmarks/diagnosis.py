"""Does a tracker know when it is wrong? `python -m benchmarks.diagnosis --out docs/results`.

Models with 2 to 46 parameters, tracked with and without stored rows, with enough particles and too few, beside runs
of NUTS on all rows at once. Of SL-OPVI's, the limits were set on seed 0 (surrogates) and 0, 1, 10, 11 of
`benchmarks.numpyro_models` (draws); other seeds are reported.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm, t
from numpyro.diagnostics import gelman_rubin
from numpyro.infer import MCMC, NUTS

import opvi
from benchmarks.measures import pareto_k, separation, stein_discrepancy, unevenness
from benchmarks.parallel import finished, keep
from benchmarks.stamp import stamp
from opvi.filters._diagnosis import FIRST_DOUBT

COMMAND = "python -m benchmarks.diagnosis --out docs/results --seeds"
SOURCES = "src/opvi/filters", "benchmarks/diagnosis.py", "benchmarks/measures.py"
GOOD, BAD = (0.1, 0.1), (0.2, 0.2)  # a mean off by so many sds, an sd off by this share: at most, at least
CHAINS, WARM_UP, SAMPLES = 4, 500, 4000  # with 1,500, sds of heavy tails differed by 8 % between two runs
DRAWS = 6400  # of 2,000, the sd of a parameter with heavy tails is off by 7 % by chance
SLOW = "network", "three clusters", "groups", "horseshoe"  # begin with these
Model = Callable[[int], tuple[opvi.Target, object]]


def regressors(seed: int, rows: int, columns: int) -> tuple[np.random.Generator, np.ndarray]:
    """Return random inputs and the generator."""
    rng = np.random.default_rng(seed)
    return rng, rng.normal(size=(rows, columns)).astype(np.float32)


def normal_start(d: int, scale: float = 1.0) -> Callable[[jax.Array], jax.Array]:
    """Return a start from a normal prior."""
    return lambda key: scale * jax.random.normal(key, (d,))


def linear(seed: int, d: int = 4) -> tuple[opvi.Target, object]:
    """A conjugate regression."""
    rng, X = regressors(seed, 300, d)
    y = (X @ rng.normal(size=d) + 0.7 * rng.normal(size=300)).astype(np.float32)
    return opvi.target(
        lambda v: norm.logpdf(v).sum(), lambda v, rows: norm.logpdf(rows[1], rows[0] @ v, 0.7), normal_start(d)
    ), (X, y)


def logistic(seed: int, d: int = 4) -> tuple[opvi.Target, object]:
    """Two classes, a wide prior."""
    rng, X = regressors(seed, 300, d)
    y = (rng.uniform(size=300) < 1 / (1 + np.exp(-X @ (1.5 * rng.normal(size=d))))).astype(np.float32)
    return opvi.target(
        lambda v: norm.logpdf(v, 0, 3).sum(),
        lambda v, rows: jax.nn.log_sigmoid((2 * rows[1] - 1) * (rows[0] @ v)),
        normal_start(d, 3.0),
    ), (X, y)


def poisson(seed: int) -> tuple[opvi.Target, object]:
    """Counts."""
    rng, X = regressors(seed, 300, 3)
    y = rng.poisson(np.exp(X @ (0.5 * rng.normal(size=3)))).astype(np.float32)
    return opvi.target(
        lambda v: norm.logpdf(v).sum(), lambda v, rows: rows[1] * (rows[0] @ v) - jnp.exp(rows[0] @ v), normal_start(3)
    ), (X, y)


def student(seed: int) -> tuple[opvi.Target, object]:
    """A regression with outliers, scale unknown."""
    rng, X = regressors(seed, 300, 3)
    y = (X @ rng.normal(size=3) + 0.5 * rng.standard_t(4, size=300)).astype(np.float32)
    return opvi.target(
        lambda v: norm.logpdf(v).sum(),
        lambda v, rows: t.logpdf(rows[1], 4.0, rows[0] @ v[:3], jnp.exp(v[3])),
        normal_start(4),
    ), (X, y)


def mean_and_scale(seed: int) -> tuple[opvi.Target, object]:
    """A normal sample, both parameters unknown."""
    y = (2 + 3 * np.random.default_rng(seed).normal(size=200)).astype(np.float32)
    return opvi.target(
        lambda v: norm.logpdf(v[0], 0, 5) + norm.logpdf(v[1], 0, 2),
        lambda v, y: norm.logpdf(y, v[0], jnp.exp(v[1])),
        lambda key: jnp.array([5.0, 2.0]) * jax.random.normal(key, (2,)),
    ), y


def groups(seed: int, *, centred: bool = False) -> tuple[opvi.Target, object]:
    """Eight groups of five rows around a mean with unknown spread; a funnel if centred."""
    rng = np.random.default_rng(seed)
    group = np.arange(40, dtype=np.int32) % 8
    y = (0.3 * rng.normal(size=8)[group] + 2 * rng.normal(size=40)).astype(np.float32)

    def log_prior(v: jax.Array) -> jax.Array:
        places = norm.logpdf(v[2:], v[0], jnp.exp(v[1])) if centred else norm.logpdf(v[2:])
        return norm.logpdf(v[0], 0, 2) + norm.logpdf(v[1], 0, 1.5) + places.sum()

    def log_likelihood(v: jax.Array, rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        places = v[2:] if centred else v[0] + jnp.exp(v[1]) * v[2:]
        return norm.logpdf(rows[1], places[rows[0]], 2.0)

    return opvi.target(log_prior, log_likelihood, normal_start(10)), (group, y)


def horseshoe(seed: int) -> tuple[opvi.Target, object]:
    """Ten slopes, two of which matter, under half-Cauchy scales."""
    rng, X = regressors(seed, 100, 10)
    y = (2 * X[:, 0] - X[:, 1] + rng.normal(size=100)).astype(np.float32)

    def log_half_cauchy(u: jax.Array) -> jax.Array:
        return math.log(2 / math.pi) - jnp.log1p(jnp.exp(2 * u)) + u

    def start(key: jax.Array) -> jax.Array:
        one, two = jax.random.split(key)
        return jnp.concatenate([jax.random.normal(one, (10,)), jnp.log(jnp.abs(jax.random.cauchy(two, (11,))))])

    return opvi.target(
        lambda v: norm.logpdf(v[:10]).sum() + log_half_cauchy(v[10:]).sum(),
        lambda v, rows: norm.logpdf(rows[1], rows[0] @ (v[:10] * jnp.exp(v[10:20] + v[20])), 1.0),
        start,
    ), (X, y)


def clusters(seed: int) -> tuple[opvi.Target, object]:
    """Three ordered means with weights and scales of their own."""
    rng = np.random.default_rng(seed)
    z = rng.choice(3, size=200, p=[0.2, 0.5, 0.3])
    y = (np.array([-4.0, 0.0, 3.0])[z] + np.array([0.5, 1.0, 0.7])[z] * rng.normal(size=200)).astype(np.float32)
    scale = jnp.array([5.0, 1, 1, 1, 1, 1, 1, 1])

    def log_likelihood(v: jax.Array, y: jax.Array) -> jax.Array:
        means = jnp.concatenate([v[:1], v[:1] + jnp.cumsum(jnp.exp(v[1:3]))])
        weights = jax.nn.log_softmax(jnp.concatenate([v[3:5], jnp.zeros(1, v.dtype)]))
        return jax.nn.logsumexp(weights + norm.logpdf(y[:, None], means, jnp.exp(v[5:8])), 1)

    return opvi.target(
        lambda v: norm.logpdf(v, 0, scale).sum(), log_likelihood, lambda key: scale * jax.random.normal(key, (8,))
    ), y


def network(seed: int) -> tuple[opvi.Target, object]:
    """Two hidden layers of five units, as in NumPyro's `bnn.py`."""
    rng, X = regressors(seed, 100, 3)
    y = (np.tanh(2 * X[:, 0]) - np.sin(X[:, 1]) + 0.3 * rng.normal(size=100)).astype(np.float32)
    shapes = [(3, 5), (5, 5), (5, 1)]

    def outputs(v: jax.Array, x: jax.Array) -> jax.Array:
        for i, shape in enumerate(shapes):
            first = sum(math.prod(s) for s in shapes[:i])
            x = x @ v[first : first + math.prod(shape)].reshape(shape)
            x = jnp.tanh(x) if i < 2 else x[:, 0]
        return x

    return opvi.target(
        lambda v: norm.logpdf(v).sum(),
        lambda v, rows: norm.logpdf(rows[1], outputs(v, rows[0]), jnp.exp(v[-1] - 1)),
        normal_start(46),
    ), (X, y)


class Case(NamedTuple):
    """A model, and how it is tracked."""

    model: Model
    batch: int = 20
    stored: bool = True  # by `opvi.ibis`; else a polynomial, by `opvi.sl_opvi`
    particles: int | None = None  # the sampler's own number


CASES = {
    "conjugate regression": Case(linear),
    "conjugate regression, no rows": Case(linear, stored=False),
    "logistic regression": Case(logistic),
    "counts": Case(poisson),
    "counts, batches of 5": Case(poisson, 5),
    "outliers": Case(student),
    "mean and scale": Case(mean_and_scale),
    "mean and scale, no rows": Case(mean_and_scale, 5, False),
    "logistic regression, no rows": Case(logistic, 5, False),
    "logistic regression, batches of 20, no rows": Case(logistic, 20, False),
    "ten slopes, 5 particles": Case(lambda seed: linear(seed, 10), particles=5),
    "ten logits, 8 particles": Case(lambda seed: logistic(seed, 10), particles=8),
    "groups": Case(groups),
    "groups, no rows": Case(groups, 5, False),
    "groups, a funnel": Case(lambda seed: groups(seed, centred=True)),
    "horseshoe": Case(horseshoe),
    "three clusters": Case(clusters),
    "three clusters, no rows": Case(clusters, 20, False),
    "network": Case(network),
}


def nuts(target: opvi.Target, rows: object, seed: int) -> tuple[np.ndarray, float]:
    """Return a long run of NUTS from the best of many starts, and its largest R-hat."""
    rows = jax.tree.map(jnp.asarray, rows)

    def potential(v: jax.Array) -> jax.Array:
        return -target.log_prior(v) - target.log_likelihood(v, rows).sum()

    start = opvi.draw(target, seed, 400)
    value = jax.jit(jax.vmap(potential))(start)
    start = start[jnp.argsort(jnp.where(jnp.isfinite(value), value, jnp.inf))[:CHAINS]]
    kernel = NUTS(potential_fn=potential, target_accept_prob=0.9, max_tree_depth=7)
    how = {"num_warmup": WARM_UP, "num_samples": SAMPLES, "num_chains": CHAINS, "chain_method": "vectorized"}
    chain = MCMC(kernel, progress_bar=False, **how)
    chain.run(jax.random.key(seed), init_params=start)
    found = np.asarray(chain.get_samples(group_by_chain=True), float)
    return found.reshape(-1, found.shape[-1]), float(np.max(gelman_rubin(found)))


def errors(mean: np.ndarray, sd: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Return how far moments are from those of NUTS."""
    exact = truth.std(0)
    return {
        "worst mean, sd": float((np.abs(mean - truth.mean(0)) / exact).max()),
        "smallest sd ratio": float((sd / exact).min()),
        "largest sd ratio": float((sd / exact).max()),
    }


def verdict(found: dict[str, float]) -> str:
    """Return whether the moments are accurate."""
    mean = found["worst mean, sd"]
    share = max(found["largest sd ratio"], 1 / found["smallest sd ratio"]) - 1
    if not (math.isfinite(mean) and math.isfinite(share)) or mean > BAD[0] or share > BAD[1]:
        return "bad"
    return "good" if mean <= GOOD[0] and share <= GOOD[1] else "between"


PREDICTED = {  # distribution functions of rows, where one is easily written down
    "conjugate regression": lambda v, rows: norm.cdf(rows[1], rows[0] @ v, 0.7),
    "mean and scale": lambda v, y: norm.cdf(y, v[0], jnp.exp(v[1])),
    "ten slopes": lambda v, rows: norm.cdf(rows[1], rows[0] @ v, 0.7),
    "groups, a funnel": lambda v, rows: norm.cdf(rows[1], v[2:][rows[0]], 2.0),
    "groups": lambda v, rows: norm.cdf(rows[1], (v[0] + jnp.exp(v[1]) * v[2:])[rows[0]], 2.0),
    "horseshoe": lambda v, rows: norm.cdf(rows[1], rows[0] @ (v[:10] * jnp.exp(v[10:20] + v[20])), 1.0),
}


def others(name: str, case: Case, target: opvi.Target, rows: object, draws: np.ndarray) -> dict[str, float]:
    """Return what other measures say: weights without the last batch, Stein's discrepancy, predictions of rows."""
    rows, some = jax.tree.map(jnp.asarray, rows), jnp.asarray(draws, jnp.float32)
    last = jax.tree.map(lambda a: a[-case.batch :], rows)
    found = {
        "Pareto k": pareto_k(-np.asarray(jax.vmap(lambda v: target.log_likelihood(v, last).sum())(some), float)),
        "Stein": stein_discrepancy(lambda v: target.log_prior(v) + target.log_likelihood(v, rows).sum(), draws),
    }
    for start, cdf in PREDICTED.items():
        if name.startswith(start):
            pit = np.asarray(jax.vmap(lambda v, cdf=cdf: cdf(v, rows))(some[::4]), float)
            return {**found, "PIT": unevenness(pit.mean(0))}
    return found


def cost(sampler: opvi.Sampler, rows: object, case: Case, seed: int) -> dict[str, float]:
    """Return the processor seconds of a step, of a diagnosis, and of all those of a stream as a share of its steps.

    They are due after 32, 64, … rounds, as `opvi.filters.doubts` has them; of a shorter stream, when it ends.
    """
    key, stream = jax.random.key(seed + 100), list(opvi.stream(rows, case.batch))
    state = sampler.init(key, case.particles)
    sampler.step(key, state, stream[0])  # compiled; the diagnosis was before
    steps, diagnoses = [], []
    for count, batch in enumerate(stream, 1):
        begun = time.process_time()
        state, _ = jax.block_until_ready(sampler.step(key, state, batch))
        steps.append(time.process_time() - begun)
        if count == len(stream) < FIRST_DOUBT or (count >= FIRST_DOUBT and count & (count - 1) == 0):
            begun = time.process_time()
            sampler.diagnosis(state)  # type: ignore[attr-defined]
            diagnoses.append(time.process_time() - begun)
    return {
        "a step": float(np.mean(steps)),
        "a diagnosis": float(np.mean(diagnoses)),
        "share": sum(diagnoses) / sum(steps),
    }


def trial(name: str, seed: int, truths: dict) -> dict:
    """Track, measure against NUTS, and ask the tracker."""
    case = CASES[name]
    target, rows = case.model(seed)
    exact, of = (groups(seed)[0], "groups") if name == "groups, a funnel" else (target, case.model)
    if (of, seed) not in truths:
        truths[of, seed] = nuts(exact, rows, seed)
    truth, r_hat = truths[of, seed]
    if exact is not target:  # NUTS, too, is slow to explore a funnel
        truth = np.concatenate([truth[:, :2], truth[:, :1] + np.exp(truth[:, 1:2]) * truth[:, 2:]], 1)
    sampler = opvi.ibis(target) if case.stored else opvi.sl_opvi(target)
    try:
        state, _ = opvi.run(sampler, opvi.stream(rows, case.batch), seed, particles=case.particles)
    except opvi.DivergedError:
        return {"stopped": True, "verdict": "bad", "flagged": True, "R-hat of NUTS": r_hat}
    w, x = np.exp(np.asarray(state.log_weights, float)), np.asarray(state.particles, float)
    mean = w @ x
    draws = np.asarray(sampler.draws(state, jax.random.key(seed), DRAWS), float)
    said = sampler.diagnosis(state)
    of_draws = errors(draws.mean(0), draws.std(0), truth)
    return {
        "draws": of_draws,
        "particles": errors(mean, np.sqrt(w @ (x - mean) ** 2), truth),
        "verdict": verdict(of_draws),
        "flagged": not said.right,
        "diagnosis": said._asdict(),
        "other measures": others(name, case, target, rows, draws),
        "seconds": cost(sampler, rows, case, seed),
        "R-hat of NUTS": r_hat,
    }


def summary(done: dict[str, dict]) -> dict[str, dict]:
    """Return how many good and bad cases were flagged, what other measures say of them, and what a diagnosis costs."""
    trials = [one for case in done.values() for one in case.values()]
    kinds = {kind: [one for one in trials if one["verdict"] == kind] for kind in ("good", "bad")}
    times = [one["seconds"] for one in trials if "seconds" in one]
    share = [one["a diagnosis"] / one["a step"] for one in times]
    of_stream = [one["share"] for one in times if "share" in one]

    def values(kind: str, measure: str) -> list[float]:
        found = [one["other measures"].get(measure, math.nan) for one in kinds[kind] if "other measures" in one]
        return [value for value in found if not math.isnan(value)]

    return {
        "flags": {
            kind: {"count": len(found), "flagged": sum(one["flagged"] for one in found)}
            for kind, found in kinds.items()
        },
        "share of pairs in which the bad case has the larger value": {
            measure: separation(values("good", measure), values("bad", measure))
            for measure in ("Pareto k", "Stein", "PIT")
        },
        "steps that a diagnosis takes": {"median": float(np.median(share)), "most": float(max(share))} if share else {},
        "diagnoses of a stream, as a share of its steps": (
            {"median": float(np.median(of_stream)), "most": float(max(of_stream))} if of_stream else {}
        ),
    }


def family(name: str) -> str:
    """Return what cases of the same model have in common, for which NUTS runs once per seed."""
    return name.split(",")[0]


def trials(names: tuple[str, ...], seed: int) -> dict[str, dict]:
    """Return the trials of a model's cases."""
    truths: dict = {}
    return {name: trial(name, seed, truths) for name in names}


def tasks(cases: list[str], seeds: list[int], done: dict[str, dict]) -> list[tuple[tuple[str, ...], int]]:
    """Return what is missing, by model and seed, slow models first."""
    found = []
    families = sorted({family(name) for name in cases}, key=lambda one: (one not in SLOW, one))
    for one in families:
        for seed in seeds:
            names = tuple(name for name in cases if family(name) == one and str(seed) not in done.get(name, {}))
            found += [(names, seed)] if names else []
    return found


def main() -> None:
    """Measure, and write `diagnosis.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for diagnosis.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, each on one core")
    options = parser.parse_args()
    file = options.out / "diagnosis.json"
    options.out.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict] = json.loads(file.read_text())["results"]["cases"] if file.exists() else {}
    for (_, seed), found in finished(trials, tasks(options.cases, options.seeds, done), options.jobs):
        for name, one in found.items():
            done.setdefault(name, {})[str(seed)] = one
            print(seed, name, one, flush=True)
        command = f"{COMMAND} {' '.join(map(str, options.seeds))}"
        results = {"good at most": GOOD, "bad at least": BAD, **summary(done), "cases": dict(sorted(done.items()))}
        made = {"command": command, "sources": stamp(*SOURCES), "results": results}
        keep(file, made)


if __name__ == "__main__":
    main()
