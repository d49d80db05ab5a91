"""The figures of the page "Understand", each drawn from its experiment's results."""

import math
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from scipy.special import erf

import opvi
from paper import plots
from paper import understand as page
from paper.mixture import to_midpoint_gap
from paper.results import Book, Record, summary
from paper.understand_common import BATCH, checkpoints, exact, streams
from paper.understand_modes import mixture_after

BLUE, RED, GREEN, PINK, ORANGE, SKY = plots.COLOURS
GREY = "0.45"


def mean_of(book: Book, row: str, key: str) -> np.ndarray:
    """Return the mean over a row's trials, entry by entry."""
    return np.mean([record[key] for record in book.records(row)], 0)


def posterior(book: Book) -> Any:
    """Draw how the posterior narrows as 1/√N, or with forgetting stays wide, as it must if the truth moves."""
    colours = dict(zip(page.MEMORIES, (BLUE, GREEN, RED), strict=True))
    with plots.style():
        figure, (shape, width, moving) = plt.subplots(1, 3, figsize=(10.5, 3.3))
        still = streams(0, 1, max(page.SHOWN), opvi.schedules.static(1))
        mean, sd = exact(still)
        x = still.truth[0, 0] + np.linspace(-1.1, 1.1, 1101)
        for shade, seen in zip((0.75, 0.55, 0.3, 0.0), page.SHOWN, strict=True):
            density = np.exp(-(((x - mean[0, seen - 1]) / sd[seen - 1]) ** 2) / 2)
            shape.plot(x - still.truth[0, 0], density, color=plt.get_cmap("Blues")(1 - 0.8 * shade), label=f"{seen:,}")
        shape.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
        shape.set(title="posterior after N rows", xlabel="θ - truth", yticks=[], ylabel="density, scaled to 1")
        shape.legend(title="N", fontsize="small", loc="upper right", handlelength=1)
        rows = checkpoints(max(page.SHOWN))
        for name, half_life in page.MEMORIES.items():
            width.loglog(rows, exact(still, half_life)[1][rows - 1], color=colours[name], label=name)
        width.set(title="its standard deviation", xlabel="rows seen", ylim=(0.007, 1))
        width.legend(fontsize="small", loc="lower left")
        data = streams(4, 1, 500, opvi.schedules.static(BATCH), drift=1.0)
        rows = BATCH * np.arange(1, 501)
        moving.plot(rows, data.truth[0], color=plots.INK, linewidth=1, linestyle="--", label="truth")
        for name, half_life in page.MEMORIES.items():
            mean, sd = exact(data, half_life)
            moving.plot(rows, mean[0], color=colours[name], linewidth=1)
            sides = (mean[0] - page.NINETY * sd, mean[0] + page.NINETY * sd)
            moving.fill_between(rows, *sides, color=colours[name], alpha=0.25, linewidth=0)
        moving.set(title="a truth that moves", xlabel="rows seen", ylabel="θ")
        moving.legend(fontsize="small", loc="lower left")
        figure.tight_layout()
    return figure


def scaling(book: Book) -> Any:
    """Draw the particles' spread, their mean, and the law."""
    looks: dict[str, tuple[str, Any, float]] = {  # those on one another are told apart by their widths
        "batch sum, λ = 1": (RED, "-", 1.5),
        "data set, λ = 1": (PINK, "-", 4.0),
        "batch sum, λ = 0.1": (ORANGE, "-", 2.5),
        "rows seen, λ = 1": (BLUE, "-", 1.2),
        "gain-1 flow": (GREEN, "-", 1.5),
        "opvi.tracker": (plots.INK, ":", 2.0),
    }
    with plots.style():
        figure, (width, centre, law) = plt.subplots(1, 3, figsize=(10.5, 3.6))
        for name, (colour, line, thick) in looks.items():
            if book.records(name):
                rows = mean_of(book, name, "rows")
                look: Any = {"color": colour, "linestyle": line, "linewidth": thick, "label": name}
                width.loglog(rows, mean_of(book, name, "spread"), **look)
                centre.loglog(rows, mean_of(book, name, "off"), **look)
                for ax in (width, centre):
                    ax.loglog(rows, mean_of(book, name, "exact"), color="0.75", linewidth=6, zorder=0)
        width.set(title="sd of the particles", xlabel="rows seen", ylim=(0.007, 1.2))
        centre.set(title="their mean, off the exact one", xlabel="rows seen", ylim=(1e-8, 2))
        found = [(book.records(row)[0], row) for row in book.content["rows"] if row.startswith("law")]
        markers: dict[str, tuple[str, Callable[[str], bool]]] = {
            "paper's η": ("o", lambda row: "η" not in row and "kernel" not in row),
            "η = 1": ("s", lambda row: "η" in row),
            "SVGD's kernel": ("x", lambda row: "kernel" in row),
        }
        for (label, (marker, belongs)), colour in zip(markers.items(), (ORANGE, RED, plots.INK), strict=True):
            points = [(record["settles_on"], record["worth"]) for record, row in found if belongs(row)]
            if points:
                law.loglog(*zip(*points, strict=True), marker, color=colour, label=label, markersize=5)
        law.plot([3, 4000], [3, 4000], color="0.75", linewidth=6, zorder=0)
        law.set(title="the law", xlabel="rows predicted: (B + η)/λ", ylabel="rows whose posterior is as wide")
        law.legend(fontsize="small", loc="upper left")
        width.plot([], [], color="0.75", linewidth=6, label="sd of the exact posterior")
        handles, labels = width.get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0.0), fontsize="small")
        figure.tight_layout()
    return figure


def expected_coverage(repulsion: np.ndarray, gain: float) -> np.ndarray:
    """Return the coverage of the 90 % interval if spread² = λ/B and the mean squared error is a/(2 - a)/B."""
    ratio = np.sqrt(repulsion * (2 - gain) / gain)
    return erf(page.NINETY * ratio / math.sqrt(2))


def present(book: Book, step: str) -> tuple[list[float], list[list[Record]]]:
    """The weights of repulsion measured with a step, and their trials."""
    rows = {value: book.records(f"λ = {value:g}, {step}") for value in page.REPULSIONS}
    return [value for value in rows if rows[value]], [records for records in rows.values() if records]


def repulsion(book: Book) -> Any:
    """Draw spread, which depends on λ, the mean's error, which depends on the step, and the resulting coverage."""
    looks = dict(zip(page.GAINS, ((RED, "o"), (ORANGE, "s"), (BLUE, "^")), strict=True))
    fine = np.geomspace(0.02, 1.4, 200)
    with plots.style():
        figure, (size, cover) = plt.subplots(1, 2, figsize=(9.6, 3.9))
        for step, (colour, marker) in looks.items():
            weights, records = present(book, step)
            if not weights:
                continue
            gain = page.GAINS[step]
            error, spread, held = ([summary(found, key).mean for found in records] for key in KEYS)
            size.loglog(fine, np.sqrt(gain / (2 - gain) / BATCH) + 0 * fine, color=colour, linewidth=1)
            size.loglog(weights, error, marker, color=colour, label=f"error of the mean, {step}")
            size.loglog(weights, spread, "o", markerfacecolor="none", color=plots.INK, markersize=9)
            cover.semilogx(fine, expected_coverage(fine, gain), color=colour, linewidth=1)
            cover.semilogx(weights, held, marker, color=colour, label=step)
        size.loglog(fine, np.sqrt(fine / BATCH), color=plots.INK, linewidth=1, label="sd of the particles, any step")
        size.axhline(mean_of(book, "exact posterior", "exact"), color="0.75", linewidth=5, zorder=0)
        size.text(0.021, mean_of(book, "exact posterior", "exact") * 0.8, "sd of the exact posterior", fontsize="small")
        size.set(title="two things that have nothing to do with each other", xlabel="repulsion λ", ylim=(0.008, 1))
        size.legend(fontsize="small", loc="upper left")
        cover.axhline(0.9, color="0.75", linewidth=5, zorder=0)
        if book.records("opvi.tracker"):
            right = summary(book.records("opvi.tracker"), "coverage").mean
            cover.axhline(right, color=GREEN, linestyle="--", label="opvi.tracker, which has no λ")
        cover.set(
            title="the 90 % interval holds the truth", xlabel="repulsion λ", ylim=(0, 1.03), ylabel="share of rounds"
        )
        cover.legend(fontsize="small", loc="lower right")
        for ax in (size, cover):
            ax.set_xticks(page.REPULSIONS, [f"{value:g}" for value in page.REPULSIONS])
            ax.minorticks_off()
        figure.tight_layout()
    return figure


KEYS = ("off", "spread", "coverage")


def regret(book: Book) -> Any:
    """Draw regret over the rounds, and coverage against regret, which does not depend on λ."""

    def where(records: list[Record]) -> tuple[float, float]:
        return summary(records, "regret_end").mean, summary(records, "coverage").mean

    with plots.style():
        figure, (sums, beside) = plt.subplots(1, 2, figsize=(9.6, 3.7))
        for name, colour in zip(page.descents(), (RED, BLUE, GREEN), strict=True):
            sums.loglog(mean_of(book, name, "T"), mean_of(book, name, "regret"), color=colour, label=name)
        sums.set(title="regret of a point", xlabel="rounds T", ylabel="R(T)")
        sums.legend(fontsize="small", loc="upper left")
        looks = dict(zip(page.GAINS, ((RED, "o"), (ORANGE, "s"), (BLUE, "^")), strict=True))
        for step, (colour, marker) in looks.items():
            weights, records = present(book, step)
            points = [where(found) for found in records]
            if points:
                beside.plot(*zip(*points, strict=True), marker, color=colour, label=step)
            for value, at in zip(weights, points, strict=True):
                if step == "long step":  # the others' marks are too near to one another
                    beside.annotate(f"λ = {value:g}", at, (-8, -3), textcoords="offset points", fontsize=8, ha="right")
        tracker = book.records("opvi.tracker")
        if tracker:
            beside.plot(*where(tracker), "*", color=GREEN, markersize=12, label="opvi.tracker")
        beside.axhline(0.9, color="0.75", linewidth=5, zorder=0)
        beside.set(title="particles: one regret, any coverage", xlabel="regret of their mean, R(500)", xscale="log")
        beside.set(ylabel="rounds in which the 90 % interval is right", ylim=(0, 1.05), xlim=(0.4, 30))
        beside.legend(fontsize="small", loc="lower left")
        figure.tight_layout()
    return figure


HALF = 0.6, 2.2  # of the picture's width and height


def modes(book: Book) -> Any:
    """Draw particles over the exact posterior, one panel per sampler."""
    rounds = book.content["settings"]["modes"]
    exactly = mixture_after(0, rounds)
    with plots.style():
        count = len(book.content["rows"])
        figure, (axes,) = plt.subplots(1, count, figsize=(9.6, 3.5), sharex=True, sharey=True, squeeze=False)
        for ax, row in zip(axes, book.content["rows"], strict=True):
            record = book.records(row)[0]
            x = to_midpoint_gap(record["particles"])
            plots.particles_over_density(ax, x, exactly.midpoints, exactly.gaps, exactly.mass)
            outside = (np.abs(x - [0.5, 0.0]) > HALF).any(1).sum()
            said = f"{record['upper']:.0%} above 0, {record['upper_exact']:.0%} exactly"
            ax.set_title(f"{row}\n{said}" + (f"; {outside} outside" if outside else ""), fontsize=9)
            ax.set(xlabel="midpoint θ₁ + θ₂/2", xlim=(0.5 - HALF[0], 0.5 + HALF[0]), ylim=(-HALF[1], HALF[1]))
        axes[0].set_ylabel("gap θ₂")
        figure.tight_layout()
    return figure


DRAWINGS: dict[str, Callable[[Book], Any]] = {
    "posterior": posterior,
    "scaling": scaling,
    "repulsion": repulsion,
    "regret": regret,
    "modes": modes,
}
