"""The rivals beside opvi: two tables, and one figure of how far each is behind."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rivals.plan import Rival
from paper import classification, regression
from paper.results import Book, Record, summary

Ours = dict[str, dict[str, Any]]
SHORT = {
    "protein-tertiary-structure": "protein",
    "covertype, natural order": "covertype",
    "MNIST, 500 × 20 rows": "MNIST, 500 × 20",
    "linear EKF, tuned": "linear EKF",
}


def _trials(ours: Ours, task: str, data: str) -> list[Record]:
    return list(ours[task].get(data, {}).get("trials", {}).values())


def _cost(records: list[Record]) -> str:
    """Milliseconds per row, median over trials: of CPU time where it was kept (rivals), else of time (opvi)."""
    per_row = float(np.median([r.get("cpu_seconds", r["seconds"]) / r["rows"] for r in records])) * 1e3
    return f"{per_row:.2f}" if per_row >= 0.1 else f"{per_row:.3f}"


def _regression_cells(records: list[Record]) -> list[str]:
    return [
        summary(records, "rmse").text(4),
        summary(records, "lpd").text(3),
        f"{summary(records, 'coverage_90').mean:.3f}",
        f"{summary(records, 'crps').mean:.4g}",
        _cost(records),
    ]


def _class_cells(records: list[Record]) -> list[str]:
    return [
        summary(records, "accuracy").text(4),
        summary(records, "log_loss").text(4),
        f"{summary(records, 'log_loss_own').mean:.4f}" if "log_loss_own" in records[0] else "–",
        f"{summary(records, 'ece').mean:.4f}",
        _cost(records),
    ]


def tables(book: Book, rivals: list[Rival], ours: Ours) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows: opvi beside the best rival; then all of them, data set by data set, opvi first."""
    kinds = {
        "regression": (["RMSE", "LPD", "coverage", "CRPS", "ms"], _regression_cells),
        "classification": (["accuracy", "log loss", "own", "ECE", "ms"], _class_cells),
    }
    out = [_short_table(book, rivals, ours)]
    for task, (columns, cells) in kinds.items():
        lines = []
        for data in dict.fromkeys(r.data for r in _in_order(rivals, task)):
            mine = _trials(ours, task, data)
            here = [["**opvi**", *cells(mine)]] if mine else []
            for rival in _in_order(rivals, task):
                records = book.records(rival.name)
                if rival.data == data and records:
                    here.append([SHORT.get(rival.method, rival.method), *cells(records)])
            lines += [[SHORT.get(data, data) if i == 0 else "", *line] for i, line in enumerate(here)]
        out.append((["data", "method", *columns], lines))
    return out


MEASURES = {  # name, key, digits, and whether more is better
    "regression": (("RMSE", "rmse", 4, False), ("LPD", "lpd", 3, True)),
    "classification": (("accuracy", "accuracy", 4, True), ("log loss", "log_loss", 4, False)),
}


def _short_table(book: Book, rivals: list[Rival], ours: Ours) -> tuple[list[str], list[list[str]]]:
    """A line for each data set; the better number is bold."""
    lines = []
    for task, measures in MEASURES.items():
        for data in dict.fromkeys(r.data for r in _in_order(rivals, task)):
            mine = _trials(ours, task, data)
            others = {r.method: book.records(r.name) for r in rivals if r.data == data and book.records(r.name)}
            if mine and others:
                lines.append([SHORT.get(data, data)])
                for name, key, digits, more in measures:
                    found = {method: _best(records, key, more) for method, records in others.items()}
                    best = (max if more else min)(found, key=found.__getitem__)
                    numbers = summary(mine, key).mean, found[best]
                    winner = (max if more else min)(numbers)
                    texts = [f"**{n:.{digits}f}**" if n == winner else f"{n:.{digits}f}" for n in numbers]
                    lines[-1] += [name, *texts, SHORT.get(best, best)]
    return ["data", "error", "opvi", "best rival", "which", "log score", "opvi", "best rival", "which"], lines


def _best(records: list[Record], key: str, more: bool) -> float:
    """Return the mean over trials; for a log score the better of the rival's own and the calibrated one."""
    keys = [name for name in (key, f"{key}_own") if name in records[0]]
    return (max if more else min)(summary(records, name).mean for name in keys)


def _in_order(rivals: list[Rival], task: str) -> list[Rival]:
    """Return data sets in the order of our own tables."""
    names = [*regression.SPLITS, *classification.STREAMS]
    place = {name: i for i, name in enumerate(names)}
    return sorted((r for r in rivals if r.task == task), key=lambda r: (place.get(r.data, 0), r.method))


# --- the figure -----------------------------------------------------------------------------------


def _behind(book: Book, rivals: list[Rival], ours: Ours) -> Iterator[tuple[Rival, float, float]]:
    """Each rival's error as a multiple of opvi's, and the log score it loses per row (the better of its two)."""
    for rival in rivals:
        records, mine = book.records(rival.name), _trials(ours, rival.task, rival.data)
        if not records or not mine:
            continue
        if rival.task == "regression":
            ratio = summary(records, "rmse").mean / summary(mine, "rmse").mean
            yield rival, ratio, summary(mine, "lpd").mean - _best(records, "lpd", True)
        else:
            ratio = (1 - summary(records, "accuracy").mean) / (1 - summary(mine, "accuracy").mean)
            yield rival, ratio, _best(records, "log_loss", False) - summary(mine, "log_loss").mean


def draw(book: Book, rivals: list[Rival], ours: Ours, path: Path) -> Path:
    """Two panels, a line for each data set: opvi is the upright line in both."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from paper import plots

    found = list(_behind(book, rivals, ours))
    names = [name for name in (*regression.SPLITS, *classification.STREAMS) if any(r.data == name for r, _, _ in found)]
    looks = {
        "EKF, tuned": ("o", 0),
        "linear EKF, tuned": ("o", 5),
        "Adam ensemble": ("s", 1),
        "River's forest": ("^", 2),
        "River's tree": ("D", 3),
        "River's linear": ("v", 4),
    }
    with plots.style():
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(10, 1.6 + 0.36 * len(names)), sharey=True, layout="constrained"
        )
        for method, (mark, colour) in looks.items():
            mine = [(names.index(r.data), ratio, lost) for r, ratio, lost in found if r.method == method]
            if mine:
                place, ratio, lost = (np.array(a) for a in zip(*mine, strict=True))
                for ax, values in ((left, ratio), (right, lost)):
                    ax.plot(values, place, mark, color=plots.COLOURS[colour], label=method, ms=7, alpha=0.9)
        for ax, line in ((left, 1), (right, 0)):
            ax.axvline(line, color=plots.INK, lw=1.2)
            ax.axvspan(-10 if line == 0 else 0.5, line, color="#EEEEEE", zorder=0)
            ax.annotate(
                "opvi", (line, 1), (0, 3), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center"
            )
        left.set(xscale="log", xlim=(0.85, 40), xlabel="error, opvi = 1 (RMSE, or share of rows wrong)")
        left.set_xticks([1, 1.5, 2, 3, 5, 10, 30], ["1", "1.5", "2", "3", "5", "10", "30"])
        left.minorticks_off()
        right.set(xlabel="log score lost to opvi, nats per row")
        right.set_xscale("symlog", linthresh=0.1)
        right.set_xlim(-0.12, 6)
        right.set_xticks([-0.1, -0.05, 0, 0.05, 0.1, 0.3, 1, 3], ["-0.1", "-0.05", "0", "0.05", "0.1", "0.3", "1", "3"])
        right.minorticks_off()
        left.set_yticks(range(len(names)), [SHORT.get(name, name) for name in names])
        left.invert_yaxis()
        for ax in (left, right):
            ax.grid(axis="both", color="#DDDDDD", lw=0.6)
            ax.set_axisbelow(True)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=6, fontsize=9)
        return plots.save(figure, path)
