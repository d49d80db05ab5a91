"""The figures of `benchmarks.orders peers`. Matplotlib is imported late: measuring does not need it."""

from pathlib import Path

import numpy as np


def summary(by_setting: dict[str, dict[str, dict]]) -> list[tuple[float, float]]:
    """Return the time and error of every setting, averaged over seeds and parts."""
    points = []
    for trials in by_setting.values():
        runs = list(trials.values())
        seconds = np.mean([run["parts"][-1]["seconds"] for run in runs])
        error = np.mean([np.nan_to_num([part["worst mean"] for part in run["parts"]], nan=1e3).mean() for run in runs])
        points.append((float(max(seconds, 1e-3)), float(min(error, 1e3))))
    return sorted(points)


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the settings of a method than which none is both faster and nearer."""
    return [point for point in points if not any(o[0] <= point[0] and o[1] < point[1] for o in points)]


def errors_at_time(results: dict[str, dict], streams: list[str], methods: list[str], path: Path) -> None:
    """Draw the error of each method's best settings against processor time; to the left and lower is better."""
    import matplotlib.pyplot as plt

    from paper import plots

    with plots.style():
        made, axes = plt.subplots(1, len(streams), figsize=(10.5, 3.4), sharey=True)
        for stream, ax in zip(streams, axes, strict=True):
            for number, method in enumerate(methods):
                points = front(summary(results.get(stream, {}).get(method, {})))
                if points:
                    colour = plots.INK if number >= len(plots.COLOURS) else plots.COLOURS[number]
                    size = 8 if method == "opvi" else 5
                    ax.loglog(*zip(*points, strict=True), "o-", color=colour, markersize=size, label=method)
            ax.set(xlabel="processor time of the stream, s", title=stream)
            ax.axhline(0.1, color=plots.INK, linewidth=0.7, linestyle=":")
        axes[0].set(ylabel="worst mean, sds off")
        shown = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        lines = [shown[method] for method in methods if method in shown]
        axes[-1].legend(handles=lines, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        made.tight_layout()
        plots.save(made, path)


def cost_per_row(found: dict[str, dict[str, list]], path: Path) -> None:
    """Draw processor time per row against the rows seen."""
    import matplotlib.pyplot as plt

    from paper import plots

    with plots.style():
        made, ax = plt.subplots(figsize=(6.4, 3.4))
        for name, by_batch in found.items():
            for batch, points in by_batch.items():
                at = [point["rows"] for point in points]
                ax.loglog(at, [max(point["ms per row"], 1e-3) for point in points], label=f"{name}, batches of {batch}")
        ax.set(xlabel="rows seen", ylabel="processor time, ms per row")
        ax.legend(fontsize="x-small")
        made.tight_layout()
        plots.save(made, path)
