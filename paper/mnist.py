"""The paper's learning curve: a Bayesian network with 100 hidden units on MNIST, six methods and our best.

Modes: `text` is what the paper's words say, 20 particles and one step for all particle flows; `authors` is
what gives their recorded curves: 10 particles, no prior in OPVI, and a step for SVGD that is ten times
smaller than OPVI's; `best` is what we recommend on the same budget.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi.types import Array
from paper import best, data
from paper.results import Book, Check, Experiment, Record, Row, at_least, no_more_than, summary

ROUNDS, ROWS, SEEDS = 500, 10_000, 5
HIDDEN = 100
AUTHORS_ROWS = 50_000  # they keep the last 10,000 training rows apart

PRINTED = {  # accuracy after 500 rounds, from the authors' records: 10 particles, one seed
    "OPVI t^.55": 0.894,
    "OPVI B=20": 0.904,
    "SVGD B=20": 0.791,
    "LD B=20": 0.884,
    "SVGD full": 0.821,
    "LD full": 0.908,
}


class Size(NamedTuple):
    """How large an experiment is; `--smoke` shrinks it."""

    rounds: int = ROUNDS
    rows: int = ROWS
    particles: int = 20
    hidden: int = HIDDEN
    every: int = 25  # rounds between two looks at the test set


# --- the six rows -----------------------------------------------------------------------------

# Of OPVI, of SVGD and of LD. The flows' fields hold a factor 1/n, so that the text's one step for all is
# n · 1e-5, LD's step: each particle then moves about as far. The authors' recorded curves are those of this
# step for OPVI and of one n times smaller, 1e-5, for SVGD.
STEP = 1e-5


def flow_steps(mode: str, particles: int) -> tuple[float, float]:
    """The steps of OPVI and of SVGD."""
    return particles * STEP, STEP if mode == "authors" else particles * STEP


class Method(NamedTuple):
    """A sampler and how many rows each round takes."""

    sampler: opvi.types.Sampler
    sizes: list[int]
    settings: dict[str, Any]
    at_most: int | None = None  # seeds


def methods(target: opvi.Target, mode: str, size: Size, total: int) -> dict[str, Method]:
    """The six rows of the curve."""
    authors = mode == "authors"
    opvi_step, svgd_step = flow_steps(mode, size.particles)
    scale, bandwidth = opvi.schedules.dataset(total), opvi.flows.kernels.median_awgf()
    prior = 0.0 if authors else opvi.schedules.vanishing
    field = opvi.flows.fields.svgd(bandwidth=bandwidth)
    online = opvi.opvi(target, step=opvi_step, field=field, prior_weight=prior, likelihood_scale=scale)
    svgd = opvi.parvi(target, field, step=svgd_step, likelihood_scale=scale)
    langevin = opvi.langevin(target, step=STEP, likelihood_scale=scale)
    rule = (
        opvi.schedules.power(0.55)
        if authors
        else opvi.schedules.within_budget(opvi.schedules.power(0.55), size.rounds, size.rows)
    )
    growing = [rule.size(t) for t in range(1, size.rounds + 1)]
    constant, whole = [size.rows // size.rounds] * size.rounds, [size.rows] * size.rounds
    shape = {"kernel": "RBF, median bandwidth", "likelihood_scale": "N / rows of the batch"}
    online_settings = {"step": opvi_step, "repulsion": 0.1, "prior_weight": "0" if authors else "6/(π² t²)", **shape}
    offline = {"step": svgd_step, "repulsion": 1, "prior_weight": 1, **shape}
    noise = {"step": STEP, "prior_weight": 1, "likelihood_scale": "N / rows of the batch"}
    out = {
        "OPVI t^.55": Method(online, growing, online_settings),
        "OPVI B=20": Method(online, constant, online_settings),
        "SVGD B=20": Method(svgd, constant, offline),
        "LD B=20": Method(langevin, constant, noise),
        "SVGD full": Method(svgd, whole, offline, 1),
        "LD full": Method(langevin, whole, noise, 1),
    }
    if not authors:  # what sets SVGD apart
        same_prior = opvi.parvi(target, field, step=svgd_step, prior_weight=prior, likelihood_scale=scale)
        out["SVGD B=20, OPVI's prior"] = Method(same_prior, constant, offline | {"prior_weight": "6/(π² t²)"})
    return out


class Common(NamedTuple):
    """What the trials of a row share."""

    source: data.Classification
    size: Size
    total: int  # training rows to draw from
    in_order: bool
    look: Callable[[Any], Any]  # at a state


def paper_rows(source: data.Classification, mode: str, size: Size) -> list[Row]:
    """The six methods, each compiled once for all seeds."""
    target = opvi.mlp(
        source.X.shape[1],
        (size.hidden,),
        opvi.categorical(),
        outputs=int(source.y.max()) + 1,
        activation=jax.nn.sigmoid,
        prior_variance=opvi.targets.Gamma(1.0, 0.1),
    )
    authors = mode == "authors"
    total = min(AUTHORS_ROWS, len(source.y)) if authors else len(source.y)
    common = Common(
        source, size, total, authors, looker(source, lambda state, x: opvi.predict(target, state.particles, x))
    )
    return [
        Row(name, method.settings, partial(trial, common, method), method.at_most)
        for name, method in methods(target, mode, size, total).items()
    ]


def best_rows(source: data.Classification, size: Size) -> list[Row]:
    """Our recommended learner, with both activations."""
    total, classes = len(source.y), int(source.y.max()) + 1
    out = []
    for activation in best.ACTIVATIONS:
        tracker, settings = best.classifier(
            source.X.shape[1], classes, activation, hidden=size.hidden, particles=size.particles
        )
        common = Common(source, size, total, False, looker(source, tracker.predict))
        method = Method(tracker, [size.rows // size.rounds] * size.rounds, settings)
        out.append(Row(f"best ({activation})", settings, partial(trial, common, method)))
    return out


# --- one trial --------------------------------------------------------------------------------


def looker(source: data.Classification, predict: Callable[[Any, Array], Any]) -> Callable[[Any], Any]:
    """Return a compiled function for accuracy, NLL and calibration error of a state on the test rows."""
    x, y = jnp.asarray(source.X_test), jnp.asarray(source.y_test)

    @jax.jit
    def look(state: Any) -> dict[str, Array]:
        predictive = predict(state, x)
        return {
            "accuracy": opvi.metrics.accuracy(predictive, y),
            "nll": -opvi.metrics.log_predictive_density(predictive, y),
            "ece": opvi.metrics.expected_calibration_error(predictive, y),
        }

    return look


def trial(common: Common, method: Method, seed: int) -> Record:
    """Run one method on one seed, which draws the particles and, unless `in_order`, the order of the rows."""
    size, sizes, key = common.size, method.sizes, jax.random.key(seed)
    order = np.arange(common.total) if common.in_order else np.random.default_rng(seed).permutation(common.total)
    # Full-batch methods take the same rows in every round.
    rows = order[: sizes[0] if sizes[0] == size.rows else sum(sizes)]
    images, classes = common.source.X[rows], common.source.y[rows]
    batches = opvi.stream((images, classes), opvi.schedules.sizes(sizes), rounds=len(sizes), passes=None)

    def test(chunk: opvi.running.Chunk) -> Any:
        wanted = chunk.round % size.every == 0 or chunk.round == len(sizes)
        return common.look(chunk.state) if wanted else None

    options: dict[str, Any] = {"callbacks": {"test": test}, "every": size.every}
    # Round 1 alone, because it is all the budget of a full batch; the same program goes on from there.
    state, first = opvi.run(method.sampler, batches, key, particles=size.particles, rounds=1, **options)
    once = common.look(state)
    state, rest = opvi.run(method.sampler, batches.after(1), key, state=state, **options)
    if int(state.rows) != sum(sizes) or int(state.round) != len(sizes):
        raise AssertionError(f"{int(state.rows)} rows in {int(state.round)} rounds, not {sum(sizes)} in {len(sizes)}.")
    later = rest.callbacks["test"]
    rounds = np.array([1, *later["round"]])
    curve = {name: np.array([float(value), *later["value"][name]], float) for name, value in once.items()}
    return {
        **{name: float(values[-1]) for name, values in curve.items()},
        "rows": int(state.rows),
        "seconds": first.seconds + rest.seconds,
        "device": jax.default_backend(),
        "curve": {"round": rounds, "rows": np.cumsum(sizes)[rounds - 1], **curve},
    }


# --- the experiment ---------------------------------------------------------------------------


def experiment(mode: str, smoke: bool) -> Experiment:
    """The curve in one mode."""
    source = data.digits() if smoke else data.mnist()
    size = Size(10, 200, 3, 8, 5) if smoke else Size(particles=10 if mode == "authors" else 20)
    rows = [] if mode == "best" else paper_rows(source, mode, size)
    rows += [] if mode == "authors" else best_rows(source, size)
    rows.sort(key=lambda row: row.at_most is not None)  # the dear ones last
    settings = {
        "data": source.name,
        "mode": mode,
        "smoke": smoke,
        **size._asdict(),
        "order": "as in the file" if mode == "authors" else "shuffled by the seed",
    }
    return Experiment(
        f"mnist-{mode}{'-smoke' if smoke else ''}",
        f"{source.name}, {mode}: {size.rounds} rounds, {size.particles} particles, {size.hidden} hidden units",
        settings,
        rows,
        2 if smoke else SEEDS,
        [
            "method",
            "accuracy, printed",
            "accuracy",
            "NLL",
            "ECE",
            "rows visited",
            f"accuracy at {size.rows:,} rows",
            "seconds",
        ],
        partial(_line, {} if smoke else PRINTED, size.rows),
        (lambda book: []) if smoke else partial(_checks, mode),
        _draw,
    )


def _line(printed: dict[str, float], budget: int, name: str, records: list[Record]) -> list[str]:
    # Full-batch methods have used up the budget after one round.
    matched = [_at_rows(record["curve"], budget) for record in records]
    return [
        f"{printed[name]:.3f}" if name in printed else "",
        summary(records, "accuracy").text(4),
        summary(records, "nll").text(3),
        summary(records, "ece").text(3),
        f"{records[0]['rows']:,}",
        summary([{"accuracy": value} for value in matched], "accuracy").text(4),
        f"{float(np.median([record['seconds'] for record in records])):.1f}",
    ]


def _at_rows(curve: dict[str, Any], budget: int) -> float:
    """Return the accuracy at the last evaluation within 2 % of a budget of rows."""
    within = np.asarray(curve["rows"]) <= 1.02 * budget
    return float(np.asarray(curve["accuracy"])[within][-1])


def _checks(mode: str, book: Book) -> list[Check]:
    out = []
    if mode != "best":
        online = summary(book.records("OPVI t^.55"), "accuracy").mean
        gap = online - summary(book.records("SVGD B=20"), "accuracy").mean
        out.append(at_least("OPVI t^.55: accuracy at round 500", online, 0.89))
        out.append(at_least("OPVI t^.55 above SVGD B=20", gap, 0.05))
    if mode != "authors":
        records = book.records("best (ReLU)")
        out.append(at_least("best (ReLU): accuracy", summary(records, "accuracy").mean, 0.955))
        out.append(no_more_than("best (ReLU): NLL", summary(records, "nll").mean, 0.153))
    return out


def _draw(book: Book, _: Path) -> Any:
    """Accuracy over rounds and over rows, with bands of one sd over seeds."""
    import matplotlib.pyplot as plt

    from paper import plots

    names = list(book.content["rows"])
    with plots.style():
        figure, axes = plt.subplots(1, 2, figsize=(10.4, 4.4), sharey=True)
        for index, name in enumerate(names):
            curves = [record["curve"] for record in book.records(name)]
            colour = plots.COLOURS[index % len(plots.COLOURS)]
            style = "-" if index < len(plots.COLOURS) else "--"
            accuracy = np.array([curve["accuracy"] for curve in curves])
            mean, sd = accuracy.mean(0), accuracy.std(0)
            for ax, across in zip(axes, ("round", "rows"), strict=True):
                x = np.asarray(curves[0][across])
                ax.plot(x, mean, style, color=colour, label=f"{name}, {mean[-1]:.3f}", lw=1.6)
                if len(curves) > 1:
                    ax.fill_between(x, mean - sd, mean + sd, color=colour, alpha=0.15, lw=0)
        axes[0].set(xlabel="round", ylabel="test accuracy", ylim=(max(0, axes[0].get_ylim()[0]), 1))
        axes[1].set(xlabel="rows visited", xscale="log")
        for ax in axes:
            ax.grid(color="#DDDDDD")
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), title="accuracy at the end")
        figure.tight_layout()
        return figure
