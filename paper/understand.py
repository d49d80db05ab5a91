r"""The experiments behind the page "Understand", on one unknown number: `python -m paper measure understanding`."""

import math
from functools import cache, partial
from typing import Any

import numpy as np

import opvi
from opvi.flows.schedules import BatchRule
from opvi.types import Sampler
from paper.results import Book, Check, Experiment, Record, Row, at_least, near, no_more_than, summary
from paper.understand_common import (
    BATCH,
    Size,
    checkpoints,
    exact,
    experiment_of,
    follow,
    mean_of_rows,
    own_gaussian,
    root_mean_square,
    size_of,
    start,
    streams,
)

NINETY = 1.6448536  # standard deviations on either side that hold 90 % of a Gaussian


# --- the running posterior --------------------------------------------------------------------

MEMORIES: dict[str, float | None] = {
    "nothing forgotten": None,
    "half-life 1,000 rows": 1000.0,
    "half-life 100 rows": 100.0,
}
SHOWN = (10, 100, 1000, 10_000)  # rows


def posterior_trial(half_life: float | None, size: Size, seed: int) -> Record:
    """Return the exact posterior's width on stationary rows, and how often its interval contains a moving truth."""
    _, sd = exact(streams(seed, 1, max(SHOWN), opvi.schedules.static(1)), half_life)
    moving = streams(seed, size.streams, size.rounds, opvi.schedules.static(BATCH), drift=1.0)
    mean, moving_sd = exact(moving, half_life)
    late = slice(size.rounds // 2, None)
    off = np.abs(mean - moving.truth)[:, late]
    return {
        "rows": list(SHOWN),
        "sd": sd[np.array(SHOWN) - 1],
        "sd_end": sd[-1],
        "remembered": sd[-1] ** -2 - 1,
        "drift_off": root_mean_square(off),
        "drift_sd": root_mean_square(moving_sd[late]),
        "drift_coverage": (off <= NINETY * moving_sd[None, late]).mean(),
    }


def running_posterior(smoke: bool) -> Experiment:
    """How wide the exact posterior is, with and without forgetting."""
    size = size_of(smoke)
    return experiment_of(
        "posterior",
        smoke,
        "the exact running posterior of one number: its width on still rows, then a truth that swings",
        [
            Row(name, {"half_life": half_life}, partial(posterior_trial, half_life, size))
            for name, half_life in MEMORIES.items()
        ],
        4,
        {"rows remembered": ("remembered", 0), "sd, end": ("sd_end", 4), "sd, drift": ("drift_sd", 4)}
        | {"mean off the truth": ("drift_off", 4), "90 % interval holds it": ("drift_coverage", 3)},
        _posterior_checks,
    )


def _posterior_checks(book: Book) -> list[Check]:
    still, kept = (summary(book.records(name), "sd_end").mean for name in ("nothing forgotten", "half-life 1,000 rows"))
    return [
        no_more_than("nothing forgotten: |sd √(1 + N) - 1|", abs(still * math.sqrt(1 + max(SHOWN)) - 1), 1e-6),
        no_more_than("half-life h: |rows remembered / (h/ln 2) - 1|", abs(kept**-2 * math.log(2) / 1000 - 1), 0.01),
    ]


# --- scaling, prior weight, temperature -------------------------------------------------------

GAIN = 0.2  # α κ B: how far a round moves the particles towards the best point of its batch


def flow(batch: int, repulsion: float, prior_weight: Any = opvi.schedules.vanishing, gain: float = GAIN) -> Sampler:
    """OPVI's update with the batch sum, and no kernel."""
    target, step = mean_of_rows(), gain / batch
    return opvi.opvi(target, step=step, field=own_gaussian, repulsion=repulsion, prior_weight=prior_weight)


def scalings(rows: int) -> dict[str, tuple[Sampler, int, float]]:
    """Samplers, their rows per round, and how many rows' posterior each should settle on, the prior's one included."""
    target, schedules = mean_of_rows(), opvi.schedules
    whole = opvi.parvi(target, own_gaussian, step=GAIN / rows, likelihood_scale=schedules.dataset(rows))
    step = opvi.schedules.decaying(GAIN / BATCH, 1.0)
    seen = opvi.parvi(target, own_gaussian, step=step, likelihood_scale=schedules.seen)
    return {
        "batch sum, λ = 1": (flow(BATCH, 1.0, 1.0), BATCH, BATCH + 1),
        "batch sum, λ = 0.1": (flow(BATCH, 0.1), BATCH, BATCH / 0.1),
        "data set, λ = 1": (whole, BATCH, rows + 1),
        "rows seen, λ = 1": (seen, BATCH, rows + 1),
        "gain-1 flow": (opvi.gain_one(target, substeps=1), BATCH, rows + 1),
        "opvi.tracker": (opvi.tracker(target), BATCH, rows + 1),
    }


def laws() -> dict[str, tuple[Sampler, int, float]]:
    """The batch sum under many settings: it should settle on (B + η)/λ rows."""
    out: dict[str, tuple[Sampler, int, float]] = {}
    for batch, repulsion in ((b, r) for b in (5, 20, 80) for r in (0.03, 0.1, 1.0)):
        out[f"law: B = {batch}, λ = {repulsion:g}"] = flow(batch, repulsion), batch, batch / repulsion
    for repulsion in (0.03, 0.1, 1.0):
        out[f"law: B = 5, λ = {repulsion:g}, η = 1"] = flow(5, repulsion, 1.0), 5, 6 / repulsion
    return out


def kernels() -> dict[str, tuple[Sampler, int, float]]:
    """Return the same with SVGD's kernel, which moves particles at the edge less; the noise is still shared."""
    out: dict[str, tuple[Sampler, int, float]] = {}
    for repulsion in (0.1, 1.0):
        kernel = opvi.opvi(mean_of_rows(), step=0.1 / BATCH, repulsion=repulsion)
        out[f"law: B = {BATCH}, λ = {repulsion:g}, SVGD's kernel"] = kernel, BATCH, BATCH / repulsion
    return out


def scaling_trial(sampler: Sampler, batch: int, settles_on: float, size: Size, seed: int) -> Record:
    """Follow streams; return the particles' width, and how far their mean is from the exact posterior's."""
    data = streams(seed, size.streams, size.rounds, opvi.schedules.static(batch))
    mean, sd = follow(sampler, data, start(size.particles), seed)
    exact_mean, exact_sd = exact(data)
    at = checkpoints(size.rounds) - 1
    spread, off = root_mean_square(sd, 0), root_mean_square(mean - exact_mean, 0)
    record: Record = {"rows": (at + 1) * batch, "settles_on": settles_on, "worth": spread[-1] ** -2}
    for name, values in (("spread", spread), ("off", off), ("exact", exact_sd)):
        record[name], record[f"{name}_end"] = values[at], values[-1]
    return record | {"ratio": record["worth"] / settles_on, "off_in_sds": off[-1] / exact_sd[-1]}


def scaling(smoke: bool) -> Experiment:
    """Which posterior the particles settle on."""
    size = size_of(smoke)

    def row(name: str, chosen: Any, count: int, at_most: int | None = None, rounds: int = size.rounds) -> Row:
        sampler, batch, settles_on = chosen
        settings = {"batch": batch, "streams": count, "settles_on": settles_on, "rounds": rounds}
        sized = size._replace(streams=count, rounds=rounds)
        return Row(name, settings, partial(scaling_trial, sampler, batch, settles_on, sized), at_most)

    rows = [
        row(name, sampler, size.streams, 1 if name == "opvi.tracker" else None)  # it takes longer than all others
        for name, sampler in scalings(BATCH * size.rounds).items()
    ]
    # The width is the same in every stream: few are enough.
    rows += [row(name, sampler, 4, 1) for name, sampler in laws().items()]
    rows += [row(name, sampler, 2, 1, 20 * size.rounds) for name, sampler in kernels().items()]
    if smoke:
        rows = [made for made in rows if made.name in ("batch sum, λ = 0.1", "law: B = 5, λ = 0.1")]
    return experiment_of(
        "scaling",
        smoke,
        f"which posterior the particles settle on, after {size.rounds} rounds",
        rows,
        4,
        {"settles on the posterior of": ("settles_on", 0), "measured": ("worth", 1), "sd": ("spread_end", 4)}
        | {"exact sd": ("exact_end", 4), "mean off": ("off_end", 4), "in exact sds": ("off_in_sds", 2)},
        _scaling_checks,
    )


def _scaling_checks(book: Book) -> list[Check]:
    checks = []
    for name in book.content["rows"]:
        tolerance = 0.15 if "kernel" in name else 0.03  # a kernel makes particles narrower
        checks.append(near(f"{name}: measured / predicted rows", summary(book.records(name), "ratio"), 1.0, tolerance))
        if name.startswith(("gain-1", "opvi")):
            off = summary(book.records(name), "off_in_sds").mean
            checks.append(no_more_than(f"{name}: mean off, in sds", off, 0.05))
    return checks


# --- repulsion and coverage -------------------------------------------------------------------

REPULSIONS = (0.03, 0.1, 0.3, 1.0)
EXACT = "exact posterior"
GAINS = {"long step": 0.8, "middle step": 0.2, "short step": 0.02}


def repelled() -> dict[str, Sampler]:
    """OPVI under every weight and step, and what `opvi.tracker` picks."""
    flows: dict[str, Sampler] = {
        f"λ = {repulsion:g}, {name}": flow(BATCH, repulsion, gain=gain)
        for name, gain in GAINS.items()
        for repulsion in REPULSIONS
    }
    return flows | {"opvi.tracker": opvi.tracker(mean_of_rows())}


@cache  # two experiments show them
def coverage_trial(name: str, size: Size, seed: int) -> Record:
    """Return the particles' spread, their mean's error and the 90 % coverage in the second half of the streams.

    `EXACT` stands for the exact posterior.
    """
    data = streams(seed, size.streams, size.rounds, opvi.schedules.static(BATCH))
    exact_mean, exact_sd = exact(data)
    mean, sd = (exact_mean, exact_sd[None] + 0 * exact_mean)
    if name != EXACT:
        mean, sd = follow(repelled()[name], data, start(size.particles), seed)
    late = slice(size.rounds // 2, None)
    off = (mean - data.truth)[:, late]
    before = np.concatenate([np.zeros((size.streams, 1)), mean[:, :-1]], 1)  # what each round begins with
    return {
        "coverage": (np.abs(off) <= NINETY * sd[:, late]).mean(),
        "spread": root_mean_square(sd[:, late]),
        "off": root_mean_square(off),
        "exact": root_mean_square(exact_sd[late]),
        "regret_end": ((before - data.truth) ** 2 / 2).sum(1).mean(),
    }


def repulsion(smoke: bool) -> Experiment:
    """Coverage of the particles' 90 % interval."""
    size = size_of(smoke)
    rows = [Row(name, {}, partial(coverage_trial, name, size)) for name in repelled()]
    rows.append(Row(EXACT, {}, partial(coverage_trial, EXACT, size)))
    if smoke:
        rows = [row for row in rows if row.name in ("λ = 0.1, long step", EXACT)]
    return experiment_of(
        "repulsion",
        smoke,
        f"width of the particles and error of their mean, second half of {size.rounds} rounds of {BATCH} rows",
        rows,
        4,
        {"sd of the particles": ("spread", 4), "error of their mean": ("off", 4), "exact sd": ("exact", 4)}
        | {"90 % interval holds the truth": ("coverage", 3)},
        _repulsion_checks,
    )


def _repulsion_checks(book: Book) -> list[Check]:
    found = {name: summary(book.records(name), "coverage").mean for name in book.content["rows"]}
    checks = [
        near("opvi.tracker: coverage", summary(book.records("opvi.tracker"), "coverage"), 0.9, 0.03),
        near("exact posterior: coverage", summary(book.records("exact posterior"), "coverage"), 0.9, 0.03),
        no_more_than("λ = 0.1, long step: coverage", found["λ = 0.1, long step"], 0.6),
        at_least("λ = 0.1, short step: coverage", found["λ = 0.1, short step"], 0.97),
    ]
    for step in GAINS:
        off = [summary(book.records(f"λ = {value:g}, {step}"), "off").mean for value in REPULSIONS]
        most = max(abs(value / off[-1] - 1) for value in off)
        checks.append(no_more_than(f"{step}: how much λ changes the mean's error, at most", most, 0.01))
    return checks


# --- regret -----------------------------------------------------------------------------------

DESCENT = 0.4  # step of online MAP; the cost's curvature is 1


def descents() -> dict[str, tuple[Sampler, BatchRule]]:
    """Online MAP with the paper's batches, and with steps that shrink."""
    target = mean_of_rows()
    constant = opvi.online_map(target, step=DESCENT, prior_weight=0.0)
    shrinking = opvi.online_map(target, step=opvi.schedules.decaying(DESCENT, 0.55), prior_weight=0.0)
    return {
        "20 rows per round, constant step": (constant, opvi.schedules.static(BATCH)),
        "⌈t^.55⌉ rows, constant step": (constant, opvi.schedules.power(0.55)),
        "20 rows per round, step ∝ t^-.55": (shrinking, opvi.schedules.static(BATCH)),
    }


def regret_trial(sampler: Sampler, rule: BatchRule, size: Size, seed: int) -> Record:
    """Regret of a point: c(w) = E(x - w)²/2 is known, its minimiser is the truth, and the gradient's error x̄ - θ."""
    data = streams(seed, size.streams, size.regret, rule)
    w, _ = follow(sampler, data, np.zeros((1, 1), np.float32), seed)
    before = np.concatenate([np.zeros((size.streams, 1)), w[:, :-1]], 1)
    regret = ((before - data.truth) ** 2 / 2).mean(0).cumsum()
    errors = np.abs((data.rows * data.weight).sum(2) / data.counts - data.truth).mean(0).cumsum()
    at = checkpoints(size.regret)
    record: Record = {"T": at, "regret": regret[at - 1], "errors": errors[at - 1], "rows": int(data.counts.sum())}
    first = max(size.regret // 10, 2)
    record |= {"slope": opvi.regret.slope(regret, first), "error_slope": opvi.regret.slope(errors, first)}
    return record | {"regret_end": regret[-1], "error_end": errors[-1]}


def regret(smoke: bool) -> Experiment:
    """Measure the regret of points, and what it does not say about particles."""
    size = size_of(smoke)
    rows = [
        Row(name, {"step": DESCENT}, partial(regret_trial, sampler, rule, size))
        for name, (sampler, rule) in descents().items()
    ]
    particles = [Row(name, {}, partial(coverage_trial, name, size)) for name in repelled()]
    rows += particles[:1] if smoke else particles
    return experiment_of(
        "regret",
        smoke,
        f"regret of online MAP over {size.regret:,} rounds, and of the mean of particles over {size.rounds}",
        rows,
        4,
        {"rows": ("rows", 0), "R(T)": ("regret_end", 2), "slope": ("slope", 3), "E_T": ("error_end", 1)}
        | {"slope of E_T": ("error_slope", 3), "90 % interval": ("coverage", 3)},
        _regret_checks,
    )


def _regret_checks(book: Book) -> list[Check]:
    slopes = {name: summary(book.records(name), "slope").mean for name in descents()}
    static, growing, shrinking = slopes.values()
    return [
        at_least("20 rows per round, constant step: slope of R(T)", static, 0.5),
        no_more_than("⌈t^.55⌉ rows, constant step: slope of R(T)", growing, 0.5),
        no_more_than("20 rows per round, step ∝ t^-.55: slope of R(T)", shrinking, 0.5),
    ]
