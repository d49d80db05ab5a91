r"""How closely the trackers of small models follow the running posterior.

The two-parameter mixture against its exact posterior on a grid, over 500 rounds, still or drifting; and six posteriors
of posteriordb, streamed, against reference draws.
"""

import math
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import opvi
from opvi._steps import dealt_by_weight
from opvi.filters import IBIS, IBISState
from paper import data
from paper.mixture import GridPosterior, exact_posterior, to_midpoint_gap, to_theta, tracking_error
from paper.posteriors import Posterior, posterior
from paper.results import Book, Check, Experiment, Record, Row, no_more_than, summary

CHECKPOINTS = (5, 8, 12, 20, 35, 50, 75, 100, 150, 200, 250, 300, 350, 400, 450, 500)
FORGETTING = 0.98  # a round of 20 rows, where the data drift
HALF_LIFE = 20 * math.log(0.5) / math.log(FORGETTING)
FIRST_SEED = 20_000  # of the streams reported; settings were chosen on others
FIRST_START = 40_000  # likewise, of the starting particles for posteriordb
DRAWS = 25_600  # 50 of each chain: their own error is about 1 %, also in sds of heavy tails


class Size(NamedTuple):
    """How large the experiment is; `--smoke` shrinks it."""

    rounds: int = 500
    particles: int = 100


class Setting(NamedTuple):
    """A stream's batches, and whether the truth moves."""

    growing: bool
    drifts: bool

    def sizes(self, rounds: int) -> list[int]:
        """Rows of every round."""
        return [math.ceil(t**0.55) if self.growing else 20 for t in range(1, rounds + 1)]

    def rows(self, seed: int, rounds: int) -> np.ndarray:
        """The stream of one seed; where it drifts, the mixture moves by 1 over all rounds."""
        sizes = self.sizes(rounds)
        rows = np.asarray(opvi.targets.sample_mixture(jax.random.key(FIRST_SEED + seed), sum(sizes)))
        shift = np.repeat(np.arange(rounds) / rounds, sizes).astype(rows.dtype)
        return rows + shift if self.drifts else rows


@cache
def exact_after(setting: Setting, seed: int, t: int, rounds: int) -> GridPosterior:
    """The exact posterior of a seed's stream after round t."""
    sizes = setting.sizes(rounds)
    seen = sum(sizes[:t])
    age = t - np.repeat(np.arange(1, t + 1), sizes[:t])
    weight = FORGETTING**age if setting.drifts else np.ones(seen)
    counts = weight > 1e-7
    return exact_posterior(setting.rows(seed, rounds)[:seen][counts], weight=weight[counts])


SETTINGS = {"B = 20": Setting(False, False), "⌈t^.55⌉": Setting(True, False), "drift, γ = .98": Setting(False, True)}


def trackers(drifts: bool) -> dict[str, tuple[opvi.types.Sampler, dict[str, Any]]]:
    """Return the methods compared, with their descriptions in the results file."""
    target = opvi.gaussian_mixture()
    half_life = HALF_LIFE if drifts else None
    ibis = opvi.ibis(target, half_life=half_life)
    return {
        "IBIS": (ibis, {"sampler": "ibis", "particles": ibis.particles, "half_life": half_life}),
        "SL-OPVI, no rows": (opvi.sl_opvi(target, half_life=half_life), {"sampler": "sl_opvi", "half_life": half_life}),
        "gain-1 flow, no rows": (
            opvi.gain_one(target, half_life=half_life, bandwidth=0.3),
            {"sampler": "gain_one", "bandwidth": 0.3, "half_life": half_life},
        ),
    }


def mixture_trial(sampler: opvi.types.Sampler, setting: Setting, size: Size, seed: int) -> Record:
    """Follow one stream, and measure the particles against the exact posterior along it."""
    rows = setting.rows(seed, size.rounds)
    batches = opvi.stream(rows, opvi.schedules.sizes(setting.sizes(size.rounds)))
    particles = sampler.particles if isinstance(sampler, IBIS) else size.particles
    _, history = opvi.run(sampler, batches, seed, particles=particles, record=_sample)
    measured = []
    for t in (t for t in CHECKPOINTS if t <= size.rounds):
        measured.append(measures(np.asarray(history.record[t - 1], float), exact_after(setting, seed, t, size.rounds)))
    error, covariance, weight = np.array(measured).T
    return {
        "tracking": error,
        "tracking_mean": error.mean(),
        "covariance_ratio": covariance.mean(),
        "covariance_ratio_end": covariance[-1],
        "weight_error": weight.mean(),
        "weight_error_end": weight[-1],
        "seconds": history.seconds,
    }


def measures(particles: np.ndarray, exact: GridPosterior) -> tuple[float, float, float]:
    """Folded W2 in posterior sds, the ratio of folded covariances, and how far the positive mode's weight is off."""
    folded = to_theta(to_midpoint_gap(particles), folded=True)
    ratio = np.trace(np.linalg.solve(exact.moments(folded=True)[1], np.cov(folded.T))) / 2
    weight = (particles[:, 1] > 0).mean() - exact.mass[:, exact.gaps > 0].sum()
    return tracking_error(particles, exact), float(ratio), float(abs(weight))


def _sample(state: Any, info: Any, batch: Any) -> Any:
    """Return the particles, or, where they have weights, as many that are picked by weight."""
    if not isinstance(state, IBISState):
        return state.particles
    key = jax.random.fold_in(jax.random.key(0), state.round)
    return dealt_by_weight(state.particles, state.log_weights, key, len(state.particles))


def exact_trial(stratified: bool, setting: Setting, size: Size, seed: int) -> Record:
    """Measure as many exact draws as particles: no sampler of independent draws can do better."""
    error = []
    for t in (t for t in CHECKPOINTS if t <= size.rounds):
        exact = exact_after(setting, seed, t, size.rounds)
        error.append(tracking_error(exact.draw(size.particles, 1 + seed, stratified), exact))
    return {"tracking": error, "tracking_mean": float(np.mean(error))}


def mixture(smoke: bool) -> Experiment:
    """The mixture, every method in every setting."""
    size = Size(12, 20) if smoke else Size()
    rows = []
    for where, setting in SETTINGS.items():
        for name, (sampler, settings) in trackers(setting.drifts).items():
            rows.append(Row(f"{name}: {where}", settings, partial(mixture_trial, sampler, setting, size)))
    for stratified, word in ((False, "independent"), (True, "stratified")):
        trial = partial(exact_trial, stratified, SETTINGS["B = 20"], size)
        rows.append(Row(f"exact draws, {word}: B = 20", {"stratified": stratified}, trial))
    return Experiment(
        "tracking-mixture" + ("-smoke" if smoke else ""),
        f"two-parameter mixture, {size.rounds} rounds, {size.particles} particles: distance to the running posterior",
        {"first_seed": FIRST_SEED, "checkpoints": list(CHECKPOINTS), **size._asdict()},
        rows,
        2 if smoke else 5,
        ["method: stream", "W2 / sd, mean over t ≥ 5", "cov. ratio", "cov. ratio, end", "mode weight off", "off, end"],
        _mixture_line,
        (lambda book: []) if smoke else _mixture_checks,
        _draw_mixture,
    )


def _mixture_line(name: str, records: list[Record]) -> list[str]:
    digits = {"tracking_mean": 3, "covariance_ratio": 2, "covariance_ratio_end": 2}
    digits |= {"weight_error": 3, "weight_error_end": 3}
    return [summary(records, key).text(count) if key in records[0] else "" for key, count in digits.items()]


def _mixture_checks(book: Book) -> list[Check]:
    checks = []
    for method, bound in (("IBIS", 0.25), ("SL-OPVI, no rows", 0.30)):
        for where in SETTINGS:
            records = book.records(f"{method}: {where}")
            if not records:
                continue
            name, most = f"{method}: {where}", 0.20 if where.startswith("drift") else bound
            ratio = summary(records, "covariance_ratio").mean
            checks += [
                no_more_than(f"{name}: W2 / sd", summary(records, "tracking_mean").mean, most),
                no_more_than(f"{name}: mode weight off", summary(records, "weight_error").mean, 0.02),
                Check(f"{name}: covariance ratio", ratio, ".9 to 1.1", 0.9 <= ratio <= 1.1),
            ]
    return checks


def _draw_mixture(book: Book, _: Path) -> Any:
    """Draw the distance along each stream, one panel per stream, beside that of exact draws."""
    import matplotlib.pyplot as plt

    from paper import plots

    with plots.style():
        figure, axes = plt.subplots(1, len(SETTINGS), figsize=(3.2 * len(SETTINGS), 3.2), sharey=True)
        for ax, where in zip(axes, SETTINGS, strict=True):
            for row in book.content["rows"]:
                name, _, stream = row.rpartition(": ")
                exact = name.startswith("exact")
                if stream == where:
                    error = np.array([record["tracking"] for record in book.records(row)]).mean(0)
                    style = {"color": "0.6", "linestyle": ":" if "strat" in name else "--"} if exact else {}
                    ax.plot(CHECKPOINTS[: len(error)], error, label=name, **style)
            ax.set(xscale="log", yscale="log", xlabel="round t", title=where)
        axes[0].set_ylabel("W2 to the running posterior, in its sds")
        axes[-1].legend(fontsize="x-small", frameon=False)
        figure.tight_layout()
    return figure


# --- posteriordb ------------------------------------------------------------------------------


@cache
def tracked_posterior(name: str) -> tuple[Posterior, IBIS]:
    """Return a posterior and its tracker, made once, so that all starts share their programs."""
    model = posterior(data.posteriordb(name))
    return model, opvi.ibis(model.target)


def posterior_trial(name: str, particles: int, seed: int) -> Record:
    """Stream one posterior, and compare its moments with the reference's."""
    model, sampler = tracked_posterior(name)
    rows = jax.tree.map(lambda a: a.astype(np.float32) if a.dtype.kind == "f" else a, model.rows)
    state, history = opvi.run(sampler, opvi.stream(rows, model.batch_size), FIRST_START + seed, particles=particles)
    draws = sampler.draws(state, jax.random.key(FIRST_START + seed), DRAWS)
    found = np.asarray(model.constrained(draws), float)
    mean, sd = model.reference.mean, model.reference.sd
    error, ratio = (found.mean(0) - mean) / sd, found.std(0) / sd
    return {
        "batches": len(history.round),
        "parameters": len(mean),
        "mean_error": error,
        "sd_ratio": ratio,
        "worst_mean": np.abs(error).max(),
        "smallest_sd": ratio.min(),
        "largest_sd": ratio.max(),
        "seconds": history.seconds,
    }


def posteriors(smoke: bool) -> Experiment:
    """The posteriors of posteriordb, each parameter on its own scale."""
    names = data.POSTERIORDB[2:3] if smoke else data.POSTERIORDB
    particles = 50 if smoke else 512
    rows = [Row(name, {"sampler": "ibis"}, partial(posterior_trial, name, particles)) for name in names]
    return Experiment(
        "tracking-posteriordb" + ("-smoke" if smoke else ""),
        f"posteriors of posteriordb, streamed, {particles} particles: worst parameter against reference draws",
        {"first_seed": FIRST_START, "particles": particles},
        rows,
        1 if smoke else 5,
        ["posterior", "batches", "parameters", "worst mean, in sds", "smallest sd ratio", "largest sd ratio"],
        _posterior_line,
        (lambda book: []) if smoke else _posterior_checks,
        _no_figure,
    )


def _posterior_line(name: str, records: list[Record]) -> list[str]:
    digits = {"batches": 0, "parameters": 0, "worst_mean": 3, "smallest_sd": 3, "largest_sd": 3}
    return [str(records[0][key]) if count == 0 else summary(records, key).text(count) for key, count in digits.items()]


def _posterior_checks(book: Book) -> list[Check]:
    checks = []
    for name in book.content["rows"]:
        records = book.records(name)
        checks.append(no_more_than(f"{name}: mean, worst seed", max(r["worst_mean"] for r in records), 0.05))
        furthest = max((r[key] for r in records for key in ("smallest_sd", "largest_sd")), key=lambda v: abs(v - 1))
        checks.append(Check(f"{name}: sd ratio, worst seed", furthest, ".95 to 1.05", abs(furthest - 1) <= 0.05))
    return checks


def _no_figure(book: Book, folder: Path) -> None:
    return None
