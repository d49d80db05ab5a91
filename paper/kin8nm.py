"""The paper's table: a Bayesian network with one hidden layer on kin8nm, six rows and our best.

Modes: `text` is what the paper's words say, on clean splits; `authors` is what their script did (one split
for all tries, a batch counter that runs on from try to try, 20 hidden units, no prior in OPVI); `best`
is what we recommend on the same budget.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import opvi
from opvi.types import Array, Particles
from paper import best, data
from paper.results import Book, Check, Experiment, Record, Row, at_least, near, no_more_than, paired, summary

PARTICLES, ROUNDS, ROWS, SPLITS = 20, 500, 10_000, 20
STEP, LANGEVIN_STEP = 1e-2, 1e-5
DEV_ROWS = 500  # held out to estimate the noise, as the authors do

PRINTED = {  # RMSE, its sd, LL, its sd, seconds
    "OPVI t^.55": (0.127, 0.008, 0.653, 0.060, 2.4),
    "OPVI B=20": (0.145, 0.003, 0.516, 0.021, 2.4),
    "SVGD B=20": (0.144, 0.003, 0.525, 0.019, 2.4),
    "SVGD full": (0.112, 0.002, 0.783, 0.017, 5.8),
    "LD B=20": (0.159, 0.004, 0.425, 0.024, 1.7),
    "LD full": (0.143, 0.002, 0.527, 0.015, 5.2),
}
ONLINE = [("OPVI t^.55", "OPVI B=20"), ("OPVI t^.55", "SVGD B=20"), ("OPVI B=20", "SVGD B=20")]  # the same splits


class Size(NamedTuple):
    """How large an experiment is; `--smoke` shrinks it."""

    rounds: int = ROUNDS
    rows: int = ROWS
    hidden: int = 50
    particles: int = PARTICLES


class Split(NamedTuple):
    """Standardised rows to learn from, to estimate the noise on, and to test on."""

    train: tuple[np.ndarray, np.ndarray]
    dev: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    mean: np.ndarray  # of the features and y, before
    sd: np.ndarray

    @property
    def scale(self) -> float:
        """The standard deviation of y."""
        return float(self.sd[-1])


def clean_split(source: data.Regression, index: int, dev: int = DEV_ROWS) -> Split:
    """Return 90 % of the rows to learn from and 10 % to test on, standardised by the former alone."""
    # numpy's old generator, whose numbers are frozen for good: split 7 stays split 7
    order = np.random.RandomState(1000 + index).permutation(len(source.y))
    n = round(0.9 * len(order))
    return _split(source, order[: n - dev], order[n - dev : n], order[n:], order[: n - dev])


def authors_split(source: data.Regression, dev: int = DEV_ROWS) -> Split:
    """Return the authors' only split. Their slice `data[:index[n]]` standardises by the first rows of the file."""
    rng = np.random.RandomState(1)
    order = rng.choice(len(source.y), len(source.y), replace=False)
    n = round(0.9 * len(order)) - dev
    return _split(source, order[:n], order[n : n + dev], order[n + dev :], np.arange(max(order[n], 2)))


def _split(source: data.Regression, train: Any, dev: Any, test: Any, scaled_by: Any) -> Split:
    table = np.column_stack([source.X, source.y])
    mean, sd = table[scaled_by].mean(0), table[scaled_by].std(0)
    scaled = ((table - mean) / sd).astype(np.float32)
    parts = [(scaled[rows, :-1], scaled[rows, -1]) for rows in (train, dev, test)]
    return Split(parts[0], parts[1], parts[2], mean, sd)


# --- the six rows -----------------------------------------------------------------------------


class NormalisedState(NamedTuple):
    """A running mean of squares."""

    squares: Array
    done: Array


def normalised(step: float, decay: float = 0.9, fudge: float = 1e-6) -> optax.GradientTransformation:
    r"""The authors' step: $x \gets x + \alpha v / (\epsilon + \sqrt{s})$, $s$ a running mean of $v^2$, first $v^2$."""

    def init(params: Array) -> NormalisedState:
        return NormalisedState(jnp.zeros_like(params), jnp.zeros((), jnp.int32))

    def update(updates: Array, state: NormalisedState, params: Any = None) -> tuple[Array, NormalisedState]:
        squares = jnp.where(state.done == 0, updates**2, decay * state.squares + (1 - decay) * updates**2)
        return -step * updates / (fudge + jnp.sqrt(squares)), NormalisedState(squares, state.done + 1)

    return optax.GradientTransformation(init, update)


class Method(NamedTuple):
    """A sampler and how many rows its rounds take."""

    sampler: opvi.types.Sampler
    sizes: list[int]  # rows of every round
    settings: dict[str, Any]
    leaks: bool = True  # in mode `authors`: the batch counter runs on from try to try


def growing(rounds: int, rows: int | None) -> list[int]:
    """Return the rule ⌈t^.55⌉, or the same growth scaled to `rows` rows in total."""
    rule = (
        opvi.schedules.power(0.55)
        if rows is None
        else opvi.schedules.within_budget(opvi.schedules.power(0.55), rounds, rows)
    )
    return [rule.size(t) for t in range(1, rounds + 1)]


def methods(target: opvi.Target, training_rows: int, size: Size, authors: bool) -> dict[str, Method]:
    """The six rows of the table."""
    scale = opvi.schedules.dataset(training_rows)
    bandwidth = opvi.flows.kernels.median_awgf()
    field = opvi.flows.fields.svgd(bandwidth=bandwidth)
    prior = 0.0 if authors else opvi.schedules.vanishing  # their counter froze the weight near 0
    opvi_ = opvi.opvi(target, step=normalised(STEP), field=field, prior_weight=prior, likelihood_scale=scale)
    svgd = opvi.svgd(target, step=normalised(STEP), bandwidth=bandwidth, likelihood_scale=scale)
    langevin = opvi.langevin(target, step=LANGEVIN_STEP, likelihood_scale=scale)
    each, full = size.rows // size.rounds, size.rows if authors else training_rows
    flow = {"step": f"{STEP}, normalised by a running root mean square (decay .9)", "kernel": "RBF, median bandwidth"}
    online = flow | {"repulsion": 0.1, "prior_weight": "0" if authors else "6/(π² t²)"}
    offline = flow | {"repulsion": 1, "prior_weight": 1}
    noise = {"step": LANGEVIN_STEP, "prior_weight": 1}
    grow = growing(size.rounds, None if authors else size.rows)
    constant, whole = [each] * size.rounds, [full] * size.rounds
    out = {
        "OPVI t^.55": Method(opvi_, grow, online),
        "OPVI B=20": Method(opvi_, constant, online),
        "SVGD B=20": Method(svgd, constant, offline),
        "SVGD full": Method(svgd, whole, offline),
        "LD B=20": Method(langevin, constant, noise),
        "LD full": Method(langevin, whole, noise),
    }
    if authors:  # what the leak is worth, and that it is worth as much without OPVI
        out["OPVI t^.55, counter reset"] = Method(opvi_, grow, online, leaks=False)
        out["SVGD t^.55"] = Method(svgd, grow, offline)
    return out


def paper_rows(source: data.Regression, size: Size, authors: bool) -> list[Row]:
    """The table's six rows, each compiled once for all splits."""
    gamma = opvi.targets.Gamma(1.0, 0.1)
    target = opvi.mlp(source.X.shape[1], (size.hidden,), opvi.gaussian(gamma), prior_variance=gamma)
    dev = min(DEV_ROWS, len(source.y) // 10)
    split_of = (
        (lambda index: authors_split(source, dev)) if authors else (lambda index: clean_split(source, index, dev))
    )
    training_rows = len(split_of(0).train[1])
    score = _scorer(target)

    def trial(method: Method, index: int) -> Record:
        split = split_of(index)
        key = jax.random.key(index)
        start = _guess_noise(target, opvi.draw(target, key, size.particles), split)
        sizes, skipped = taken(method.sizes, index if authors and method.leaks else 0)
        train = jax.tree.map(lambda a: np.roll(a, -skipped, 0), split.train)
        state, seconds = run_rows(method.sampler, train, sizes, key, start)
        return {**score(state.particles, split), "seconds": seconds, "rows": int(state.rows)}

    found = methods(target, training_rows, size, authors)
    return [Row(name, method.settings, partial(trial, method)) for name, method in found.items()]


def taken(sizes: list[int], tries: int) -> tuple[list[int], int]:
    """Return the batch sizes of a try whose counter was not reset in the `tries` before, and the rows before it.

    The authors' counter of constant batches starts at 1, so that even their first try skips a batch. That is
    kept in every mode: with a step that never shrinks, the last batches decide the third digit.
    """
    rounds = len(sizes)
    first = tries * rounds  # rounds done in the tries before
    if len(set(sizes)) == 1:
        return sizes, sizes[0] * (1 + first)
    if not tries:
        return sizes, 0
    grown = growing(first + rounds, None)
    return grown[first:], sum(grown[:first])


def run_rows(
    sampler: opvi.types.Sampler, train: Any, sizes: list[int], key: Any, start: Particles
) -> tuple[Any, float]:
    """Run once over the training rows, starting over at their end; the rows visited are counted and checked."""
    batches = opvi.stream(train, opvi.schedules.sizes(sizes), rounds=len(sizes), passes=None)
    state, history = opvi.run(sampler, batches, key, particles=start)
    if int(state.rows) != sum(sizes) or int(state.round) != len(sizes):
        raise AssertionError(f"{int(state.rows)} rows in {int(state.round)} rounds, not {sum(sizes)} in {len(sizes)}.")
    return state, history.seconds


def normals(target: opvi.Target, particles: Particles, x: Array) -> opvi.Normal:
    """Return each particle's prediction: leaves `[n, B]`."""
    components = opvi.predict(target, particles, x).components
    assert isinstance(components, opvi.Normal)
    return components


def _guess_noise(target: opvi.Target, start: Particles, split: Split) -> Particles:
    """Return the initial noise precision of SVGD's and the authors' code: each network's error on unscaled rows."""
    x, y = (part[:1000] for part in split.train)
    x, y = x * split.sd[:-1] + split.mean[:-1], y * split.sd[-1] + split.mean[-1]
    guess = normals(target, start, x).mean
    log_precision = -jnp.log(((guess - y[None].astype(np.float32)) ** 2).mean(1))

    def with_noise(x: Array, value: Array) -> Array:
        return target.ravel({**target.unravel(x), "log_noise_precision": value})

    return jax.vmap(with_noise)(start, log_precision)


def _scorer(target: opvi.Target) -> Callable[[Particles, Split], Record]:
    @jax.jit
    def errors(particles: Particles, x: Array, y: Array) -> tuple[Array, Array]:
        normal = normals(target, particles, x)
        return y[None] - normal.mean, normal.variance

    def score(particles: Particles, split: Split) -> Record:
        """RMSE; LL with each particle's noise re-estimated on the dev rows, as the authors do, and with its own."""
        error, own = (np.asarray(a, float) for a in errors(particles, *split.test))
        dev = np.asarray(errors(particles, *split.dev)[0], float)
        estimated = (dev**2).mean(1, keepdims=True)
        rmse = split.scale * math.sqrt((error.mean(0) ** 2).mean())
        return {
            "rmse": rmse,
            "ll": _mixture(error, estimated) - math.log(split.scale),
            "ll_own_noise": _mixture(error, own) - math.log(split.scale),
        }

    return score


def _mixture(error: np.ndarray, variance: np.ndarray) -> float:
    """Return the mean log density of an equal-weight mixture of Gaussians, `[particles, rows]`."""
    log_density = -0.5 * (error**2 / variance + np.log(2 * np.pi * variance))
    return float((np.logaddexp.reduce(log_density, 0) - math.log(len(error))).mean())


# --- our best ---------------------------------------------------------------------------------


def best_rows(source: data.Regression, size: Size) -> list[Row]:
    """Our recommended learner, with both activations; no row is held out."""
    sizes = [size.rows // size.rounds] * size.rounds

    def make(activation: str) -> Row:
        learner = best.regressor(source.X.shape[1], activation, hidden=size.hidden, particles=size.particles)

        def trial(index: int) -> Record:
            split = clean_split(source, index, 0)
            batches = opvi.stream(split.train, sizes[0], rounds=size.rounds, passes=None)
            state, history = opvi.run(learner.tracker, batches, 7 + index)
            if int(state.rows) != sum(sizes):
                raise AssertionError(f"{int(state.rows)} rows, not {sum(sizes)}.")
            predictive = cast(opvi.Predictive, learner.tracker.predict(state, split.test[0]))
            y = jnp.asarray(split.test[1], state.particles.dtype)
            return {
                "rmse": split.scale * float(opvi.metrics.rmse(predictive, y)),
                "ll": float(opvi.metrics.log_predictive_density(predictive, y)) - math.log(split.scale),
                "coverage_90": float(opvi.metrics.coverage(predictive, y)),
                "seconds": history.seconds,
                "rows": int(state.rows),
            }

        return Row(f"best ({activation})", learner.settings, trial)

    return [make(activation) for activation in best.ACTIVATIONS]


# --- the experiment ---------------------------------------------------------------------------


def experiment(mode: str, smoke: bool) -> Experiment:
    """The table in one mode."""
    source = data.robot_arm(600) if smoke else data.kin8nm()
    size = Size(12, 240, 5, 4) if smoke else Size(hidden=20 if mode == "authors" else 50)
    rows = [] if mode == "best" else paper_rows(source, size, mode == "authors")
    rows += [] if mode == "authors" else best_rows(source, size)
    settings = {
        "data": source.name,
        "mode": mode,
        "smoke": smoke,
        **size._asdict(),
        "splits": "one, for all tries" if mode == "authors" else "90 % / 10 %, clean",
        "batch_counter": "runs on from try to try" if mode == "authors" else "starts anew",
    }
    checks = (lambda book: []) if smoke else (lambda book: _checks(mode, book))
    return Experiment(
        f"kin8nm-{mode}{'-smoke' if smoke else ''}",
        f"{source.name}, {mode}: {size.rounds} rounds, {size.particles} particles, {size.hidden} hidden units",
        settings,
        rows,
        2 if smoke else SPLITS,
        ["method", "RMSE, printed", "RMSE", "LL, printed", "LL", "rows visited", "seconds"],
        partial(_line, {} if smoke else PRINTED),
        checks,
        _draw,
        partial(paired, ONLINE, "rmse") if mode == "text" else None,
    )


def _line(printed_rows: dict[str, Any], name: str, records: list[Record]) -> list[str]:
    printed = printed_rows.get(name)
    rmse, ll = ("", "") if printed is None else (f"{printed[0]} ± {printed[1]}", f"{printed[2]} ± {printed[3]}")
    visited = sorted({record["rows"] for record in records})
    rows = f"{visited[0]:,}" if len(visited) == 1 else f"{visited[0]:,}–{visited[-1]:,}"
    # The first run compiles; the median does not see it.
    seconds = float(np.median([record["seconds"] for record in records]))
    return [rmse, summary(records, "rmse").text(4), ll, summary(records, "ll").text(3), rows, f"{seconds:.2f}"]


# Measured before with other code, 20 splits: mean and sd of the RMSE, and the mean LL.
MEASURED = {
    "text": {
        "OPVI t^.55": (0.1281, 0.0067),
        "OPVI B=20": (0.1293, 0.0051),
        "SVGD B=20": (0.1303, 0.0050),
        "SVGD full": (0.1022, 0.0024),
    },
    "authors": {"OPVI t^.55": (0.1275, 0.0082), "OPVI B=20": (0.1461, 0.0027)},
}
LANGEVIN_BOUNDS = {"LD B=20": 0.165, "LD full": 0.140}
BEST_BOUNDS = {"best (ReLU)": (0.079, 1.13), "best (tanh)": (0.0735, 1.21)}


def _checks(mode: str, book: Book) -> list[Check]:
    out = []
    for name, (mean, sd) in MEASURED.get(mode, {}).items():
        found = summary(book.records(name), "rmse")
        out.append(near(f"{name}: RMSE", found, mean, 2 * sd / math.sqrt(SPLITS)))
    if mode == "text":
        for name, bound in LANGEVIN_BOUNDS.items():
            out.append(no_more_than(f"{name}: RMSE", summary(book.records(name), "rmse").mean, bound))
    if mode != "authors":
        for name, (rmse, ll) in BEST_BOUNDS.items():
            out.append(no_more_than(f"{name}: RMSE", summary(book.records(name), "rmse").mean, rmse))
            out.append(at_least(f"{name}: LL", summary(book.records(name), "ll").mean, ll))
    return out


def _draw(book: Book, _: Path) -> Any:
    """Draw the RMSE of every split as a dot, over the printed mean."""
    import matplotlib.pyplot as plt

    from paper import plots

    names = list(book.content["rows"])
    with plots.style():
        figure, axes = plt.subplots(1, 2, figsize=(9.6, 0.5 * len(names) + 1.6), sharey=True)
        for ax, key, column, label in zip(
            axes, ("rmse", "ll"), (0, 2), ("test RMSE", "test log likelihood"), strict=True
        ):
            for place, name in enumerate(names):
                values = np.array([record[key] for record in book.records(name)])
                jitter = place + 0.3 * (np.arange(len(values)) / max(len(values) - 1, 1) - 0.5)
                ax.scatter(values, jitter, s=12, color=plots.COLOURS[0], alpha=0.5, label="ours, each split")
                ax.scatter(values.mean(), place, marker="|", s=300, color=plots.INK, zorder=3, label="ours, mean")
                if name in PRINTED:
                    mean, sd = PRINTED[name][column : column + 2]
                    look: Any = {"fmt": "D", "ms": 5, "color": plots.COLOURS[1], "mfc": "none", "zorder": 4}
                    ax.errorbar(mean, place, xerr=sd, label="printed", **look)
            ax.set(xlabel=label, yticks=range(len(names)), yticklabels=names)
            ax.grid(axis="x", color="#DDDDDD")
        axes[0].invert_yaxis()
        handles, labels = axes[0].get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        figure.legend(unique.values(), unique.keys(), loc="upper center", ncols=3, bbox_to_anchor=(0.5, 1.04))
        figure.tight_layout()
        return figure
