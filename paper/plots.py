"""One style for every figure: readable in print and on a dark page, safe for colour-blind readers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from opvi.regret import Design

# Okabe and Ito's palette, whose colours stay apart under every common colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, PAPER = "#222222", "#FFFFFF"


@contextmanager
def style() -> Iterator[None]:
    """Use the project's style for figures made within this block."""
    settings: Any = {
        "axes.prop_cycle": cycler(color=COLOURS),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.titlesize": 11,
        "figure.facecolor": PAPER,
        "savefig.facecolor": PAPER,
        "savefig.dpi": 150,
        "font.size": 10,
        "text.color": INK,
        "legend.frameon": False,
        "svg.hashsalt": "opvi",
    }
    with mpl.rc_context(settings):
        yield


def mass_levels(mass: np.ndarray, shares: tuple[float, ...] = (0.99, 0.9, 0.5)) -> list[float]:
    """The heights whose contours enclose these shares of a gridded distribution's mass, lowest first."""
    ordered = np.sort(mass.ravel())[::-1]
    inside = np.cumsum(ordered) / ordered.sum()
    return [float(ordered[np.searchsorted(inside, share)]) for share in shares]


def particles_over_density(
    ax: Axes, particles: Any, across: np.ndarray, up: np.ndarray, mass: np.ndarray, colour: str = COLOURS[1]
) -> None:
    """Particles as dots over contours that hold 50, 90 and 99 % of a gridded density `mass[across, up]`."""
    levels = mass_levels(mass)
    ax.contourf(across, up, mass.T, levels=[*levels, mass.max() * 1.001], colors=["#D6E4EF", "#A9C8E0", "#6FA3CC"])
    x = np.asarray(particles)
    ax.scatter(x[:, 0], x[:, 1], s=9, color=colour, edgecolor="white", linewidth=0.3, zorder=3)


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure (the suffix selects the format), create its folder if needed, and free its memory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path


def draw_designs(designs: Mapping[str, Design]) -> Figure:
    """A figure of batch-size rules (`opvi.regret.design`): error sum against rounds, and against the rows it took."""
    with style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), sharey=True)
        for name, plan in designs.items():
            left.loglog(np.arange(1, len(plan.rows) + 1), plan.error_sum, label=name)
            right.loglog(plan.rows, plan.error_sum, label=name)
        left.set(xlabel="rounds T", ylabel="error sum $E_T$")
        right.set(xlabel="rows used")
        right.legend(fontsize="small")
        figure.tight_layout()
    return figure
