r"""The paper's figure: particles over the exact posterior of a two-parameter mixture, six panels and our best.

Modes: `text` feeds every mini-batch method each row once; `authors` does what their code did: a kernel
normalised to integrate to one, and "B = 20" panels of SVGD and LD that see the same first 500 rows in
every round; `best` is what we recommend on the same budget.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import opvi
from opvi.targets import score
from paper import best
from paper.mixture import GridPosterior, exact_posterior, to_midpoint_gap, to_theta, tracking_error
from paper.results import Book, Check, Experiment, Record, Row, near, summary

ROUNDS, ROWS, PARTICLES, SEEDS = 500, 10_000, 100, 10
REPEATED_ROWS = 500  # what the authors' "B = 20" panels of SVGD and LD see in every round

PRINTED = {  # mean and sd of the midpoint, from the authors' code and figures
    "OPVI t^.55": (0.490, 0.080),
    "OPVI B=20": (0.589, 0.097),
    "SVGD B=20": (0.346, None),
    "LD B=20": (0.362, None),
    "SVGD full": (0.480, 0.056),
    "LD full": (None, 0.282),
}


class Size(NamedTuple):
    """How large an experiment is; `--smoke` shrinks it."""

    rounds: int = ROUNDS
    rows: int = ROWS
    particles: int = PARTICLES


class Panel(NamedTuple):
    """A sampler, the rows it may see, and how many of them each round takes."""

    sampler: opvi.types.Sampler
    source: Callable[[np.ndarray], np.ndarray]  # all rows -> those this method draws from
    sizes: list[int]
    passes: int | None
    settings: dict[str, Any]
    from_prior: bool = False  # where particles start; otherwise the authors' start, N(0, I)


def panels(mode: str, size: Size, variance: float) -> dict[str, Panel]:
    """The six panels of the paper."""
    target = opvi.gaussian_mixture(variance)
    authors = mode == "authors"
    kernel, bandwidth = opvi.flows.kernels.rbf(normalised=authors), opvi.flows.kernels.median_awgf()
    field = opvi.flows.fields.svgd(kernel, bandwidth)
    shape = "RBF, normalised, median bandwidth" if authors else "RBF, median bandwidth"
    each = size.rows // size.rounds
    rule = (
        opvi.schedules.power(0.55)
        if authors
        else opvi.schedules.within_budget(opvi.schedules.power(0.55), size.rounds, size.rows)
    )
    growing = [rule.size(t) for t in range(1, size.rounds + 1)]
    constant, whole = [each] * size.rounds, [size.rows] * size.rounds

    def first(rows: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda data: data[:rows]

    online = opvi.opvi(target, step=opvi.schedules.decaying(STEPS[mode]["OPVI"], 0.55), field=field)
    steps = STEPS[mode]

    def settings(name: str, step: str, **more: Any) -> dict[str, Any]:
        return {"step": f"{steps[name]:g}{step}", **more}

    flow = {"kernel": shape, "likelihood": "sum over the batch"}
    opvi_settings = settings("OPVI", " t^-.55", repulsion=0.1, prior_weight="6/(π² t²)", **flow)
    out = {
        "OPVI t^.55": Panel(online, first(sum(growing)), growing, 1, opvi_settings),
        "OPVI B=20": Panel(online, first(size.rows), constant, 1, opvi_settings),
    }
    scale: opvi.schedules.LikelihoodScale = opvi.schedules.dataset(size.rows)
    again, word = constant, "N/B times the batch"
    if authors:
        scale = opvi.schedules.batch_sum
        again, word = [min(REPEATED_ROWS, size.rows)] * size.rounds, "the same 500 rows"

    def svgd(name: str, likelihood: Any) -> opvi.types.Sampler:
        return opvi.svgd(target, step=steps[name], kernel=kernel, bandwidth=bandwidth, likelihood_scale=likelihood)

    def langevin(name: str, likelihood: Any) -> opvi.types.Sampler:
        return opvi.langevin(target, step=steps[name], likelihood_scale=likelihood)

    for kind, make, more in (("SVGD", svgd, {"kernel": shape, "repulsion": 1}), ("LD", langevin, {})):
        name, full = f"{kind} B=20", f"{kind} full"
        rows, passes = (again[0], None) if authors else (size.rows, 1)
        out[name] = Panel(make(name, scale), first(rows), again, passes, settings(name, "", likelihood=word, **more))
        everything = settings(full, "", likelihood="all rows", **more)
        out[full] = Panel(make(full, opvi.schedules.batch_sum), first(size.rows), whole, None, everything)
    return {name: out[name] for name in PRINTED}


# The authors did not publish the steps behind their SVGD and LD panels; ours are stable ones near their numbers.
STEPS = {
    "authors": {
        "OPVI": 2.0,
        "SVGD B=20": 1e-2,
        "LD B=20": 1e-3,
        "SVGD full": 1e-4,
        "LD full": 1e-4,
    },
    "text": {
        "OPVI": 2.0,
        "SVGD B=20": 3e-4,
        "LD B=20": 3e-5,
        "SVGD full": 4e-4,
        "LD full": 1e-4,
    },
}


def best_panel(size: Size, variance: float) -> Panel:
    """Our recommended tracker."""
    each = size.rows // size.rounds
    learner = best.mixture(variance, size.particles)
    return Panel(learner.tracker, lambda data: data[: size.rows], [each] * size.rounds, 1, learner.settings, True)


# --- one trial --------------------------------------------------------------------------------

CHECKPOINTS = (5, 10, 20, 50, 100, 200, 350, 500)


@cache
def rows_of(seed: int, rows: int, variance: float) -> np.ndarray:
    """Return the stream of one seed: twice the budget, as the authors have it."""
    return np.asarray(opvi.targets.sample_mixture(jax.random.key(seed + 1), 2 * rows, variance=variance))


@cache
def posterior_of(seed: int, rows: int, seen: int, variance: float) -> GridPosterior:
    """The exact posterior after the first `seen` rows of a seed's stream."""
    return exact_posterior(rows_of(seed, rows, variance)[:seen], variance)


def trial(panel: Panel, size: Size, variance: float, seed: int) -> Record:
    """Run one panel on one seed and measure it against the exact posterior, at the end and on the way."""
    data = rows_of(seed, size.rows, variance)
    start = None if panel.from_prior else jax.random.normal(jax.random.key(seed), (size.particles, 2))
    batches = opvi.stream(
        panel.source(data), opvi.schedules.sizes(panel.sizes), rounds=size.rounds, passes=panel.passes
    )
    try:
        state, history = opvi.run(panel.sampler, batches, seed, particles=start, record=_particles)
    except opvi.DivergedError as error:
        raise AssertionError(f"seed {seed} diverged with {panel.settings}: {error}") from error
    if int(state.rows) != sum(panel.sizes):
        raise AssertionError(f"{int(state.rows)} rows, not {sum(panel.sizes)}.")
    particles = np.asarray(state.particles)
    distinct = np.minimum(np.cumsum(panel.sizes), len(panel.source(data)))  # rows seen, a repeated one once
    full = posterior_of(seed, size.rows, size.rows, variance)
    checkpoints = [t for t in CHECKPOINTS if t <= size.rounds]
    tracking = [
        tracking_error(
            history.record[t - 1],
            posterior_of(seed, size.rows, int(distinct[t - 1]), variance),
            draws=4,
        )
        for t in checkpoints
    ]
    running = posterior_of(seed, size.rows, int(distinct[-1]), variance)
    return {
        **measures(particles, full, data[: size.rows], variance),
        "w2_running": tracking[-1] if checkpoints[-1] == size.rounds else tracking_error(particles, running, draws=4),
        "tracking_rounds": checkpoints,
        "tracking": tracking,
        "tracking_mean": float(np.mean(tracking)),
        "rows": int(state.rows),
        "seconds": history.seconds,
        "particles": particles.round(4).tolist() if seed == 0 else None,
    }


def _particles(state: Any, info: Any, batch: Any) -> Any:
    return state.particles


def measures(particles: np.ndarray, posterior: GridPosterior, rows: np.ndarray, variance: float) -> Record:
    """Return the numbers under a panel, measured against the posterior of all rows."""
    midpoint, gap = to_midpoint_gap(particles).T
    exact = posterior.draw(4 * len(particles), 0, stratified=True)
    folded = to_theta(to_midpoint_gap(particles), folded=True)
    covariance = posterior.moments(folded=True)[1]
    ratio = np.trace(np.linalg.solve(covariance, np.cov(folded.T))) / 2
    return {
        "midpoint_mean": float(midpoint.mean()),
        "midpoint_sd": float(midpoint.std()),
        "positive_mode": float((gap > 0).mean()),
        "positive_mode_exact": float(posterior.mass[:, posterior.gaps > 0].sum()),
        "w2_folded": tracking_error(particles, posterior, draws=4),
        "w2_plain": tracking_error(particles, posterior, folded=False, draws=4),
        "mmd": float(opvi.metrics.mmd(jnp.asarray(particles), jnp.asarray(exact, jnp.float32))),
        "ksd": whitened_ksd(particles, covariance, rows, variance),
        "covariance_ratio": float(ratio),
    }


def whitened_ksd(particles: np.ndarray, covariance: np.ndarray, rows: np.ndarray, variance: float) -> float:
    """Kernel Stein discrepancy to the posterior, in coordinates where one of its modes has unit covariance."""
    scored = score(opvi.gaussian_mixture(variance), jnp.asarray(particles, jnp.float32), opvi.batch(rows))
    scores = np.asarray(scored.likelihood + scored.prior, float)
    root = np.linalg.cholesky(covariance)
    z = np.linalg.solve(root, particles.T).T
    return float(opvi.metrics.ksd(jnp.asarray(z, jnp.float32), jnp.asarray(scores @ root, jnp.float32)))


# --- the experiment ---------------------------------------------------------------------------


def experiment(mode: str, smoke: bool, variance: float = 2.0) -> Experiment:
    """The figure in one mode."""
    size = Size(20, 400, 10) if smoke else Size()
    chosen = {} if mode == "best" else panels(mode, size, variance)
    if mode != "authors":
        chosen["best"] = best_panel(size, variance)
    rows = [Row(name, panel.settings, partial(trial, panel, size, variance)) for name, panel in chosen.items()]
    settings = {"mode": mode, "smoke": smoke, "variance": variance, "theta": [0, 1], **size._asdict()}
    suffix = ("" if variance == 2 else f"-variance-{variance:g}") + ("-smoke" if smoke else "")
    authors = mode == "authors" and variance == 2 and not smoke
    return Experiment(
        f"synthetic-{mode}{suffix}",
        f"two-parameter mixture, σ_x² = {variance:g}, {mode}: {size.rounds} rounds, {size.particles} particles",
        settings,
        rows,
        2 if smoke else SEEDS,
        [
            "method",
            "m, printed",
            "mean of m",
            "sd of m",
            "cov. ratio",
            "δ>0",
            "W2",
            "W2 plain",
            "MMD",
            "KSD",
            "W2 on the way",
        ],
        partial(_line, PRINTED if authors else {}),
        _checks if authors else (lambda book: []),
        partial(_draw, size=size, variance=variance),
    )


def _line(printed_rows: dict[str, Any], name: str, records: list[Record]) -> list[str]:
    mean, sd = printed_rows.get(name, (None, None))
    printed = (
        " / ".join("–" if value is None else f"{value:.3f}" for value in (mean, sd)) if name in printed_rows else ""
    )
    digits = {"midpoint_mean": 3, "midpoint_sd": 3, "covariance_ratio": 1, "positive_mode": 2}
    digits |= {"w2_folded": 2, "w2_plain": 2, "mmd": 3, "ksd": 1, "tracking_mean": 2}
    return [printed, *(summary(records, key).text(count) for key, count in digits.items())]


def _checks(book: Book) -> list[Check]:
    records = book.records("OPVI t^.55")
    sd = summary(records, "midpoint_sd")
    points = math.ceil(ROUNDS**0.55) / 0.1  # B/λ in the last round
    expected = []
    for seed in range(len(records)):
        rows = rows_of(seed, ROWS, 2.0)[:ROWS]
        posterior = exact_posterior(rows, weight=np.full(ROWS, points / ROWS))
        middle = posterior.mass.sum(1)
        centre = (middle * posterior.midpoints).sum()
        expected.append(math.sqrt((middle * (posterior.midpoints - centre) ** 2).sum()))
    law = float(np.mean(expected))
    return [
        near("OPVI t^.55: mean of m", summary(records, "midpoint_mean"), 0.490, 0.03),
        near("OPVI t^.55: sd of m", sd, 0.084, 0.01),
        near(f"OPVI t^.55: sd of m, against the posterior of B/λ = {points:.0f} points", sd, law, 0.1 * law),
    ]


def _draw(book: Book, _: Path, *, size: Size, variance: float) -> Any:
    """Particles of seed 0 over the posterior of all rows; under each panel its numbers, over all seeds."""
    import matplotlib.pyplot as plt

    from paper import plots

    names = list(book.content["rows"])
    columns = 3 if len(names) == 6 else min(4, len(names))
    lines = -(-len(names) // columns)
    posterior = posterior_of(0, size.rows, size.rows, variance)
    running = posterior_of(0, size.rows, max(size.rows // 20, 20), variance)
    with plots.style():
        figure, axes = plt.subplots(
            lines, columns, figsize=(3.1 * columns + 0.3, 4.6 * lines), squeeze=False, sharex=True, sharey=True
        )
        for ax, name in zip(axes.flat, names, strict=False):
            records = book.records(name)
            outside = plots.mass_levels(running.mass)
            ax.contour(
                running.midpoints, running.gaps, running.mass.T, levels=outside, colors="#999999", linewidths=0.6
            )
            points = to_midpoint_gap(np.array(records[0]["particles"]))
            plots.particles_over_density(ax, points, posterior.midpoints, posterior.gaps, posterior.mass)
            off = int((np.abs(points - [0.5, 0]) > [0.5, 2.6]).any(1).sum())
            ax.set(title=name + (f" ({off} outside)" if off else ""), xlim=(0, 1), ylim=(-2.6, 2.6))
            ax.set_xlabel(_caption(records), fontsize=8, loc="left")
        for ax in axes.flat[len(names) :]:
            ax.remove()
        for row in axes:
            row[0].set_ylabel("gap δ = θ₂")
        figure.suptitle(
            "Dots: particles of seed 0 at the end. Filled: the exact posterior of all rows (50, 90, 99 % of its mass); "
            f"lines: of the first {max(size.rows // 20, 20):,}.\n"
            "Across: the midpoint m = θ₁ + θ₂/2. Numbers: mean over seeds.",
            fontsize=9,
        )
        figure.tight_layout()
        return figure


def _caption(records: list[Record]) -> str:
    value = {key: summary(records, key).mean for key in records[0] if isinstance(records[0][key], int | float)}
    return (
        f"W2 {value['w2_folded']:.2f} folded, {value['w2_plain']:.2f} plain; on the way {value['tracking_mean']:.2f}\n"
        f"MMD {value['mmd']:.3f}   KSD {value['ksd']:.1f}   covariance × {value['covariance_ratio']:.1f}\n"
        f"modes {value['positive_mode']:.2f} / {1 - value['positive_mode']:.2f}, "
        f"exact {value['positive_mode_exact']:.2f} / {1 - value['positive_mode_exact']:.2f}"
    )
