"""The figures of docs/scale.md and docs/spark.md from the results beside them: `python -m benchmarks.draw`."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from paper import plots

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def gpu(ax: Any) -> None:
    """Plot the cost of a direction over dimensions."""
    found = [r for r in read("gpu")["results"] if r["size"].startswith("n=131,072")]
    d = [int(r["size"].split("d=")[1]) for r in found]
    ax.loglog(d, [r["timings"]["tiled"]["median"] for r in found], "s--", label="XLA, tiled")
    ax.loglog(d, [r["timings"]["fused"]["median"] for r in found], "o-", label="fused")
    ax.set(title="One direction of SVGD on an H200", xlabel="dimensions (131,072 particles)", ylabel="ms")
    ax.set_xticks(d, [str(k) for k in d])
    ax.minorticks_off()


def devices(ax: Any) -> None:
    """Plot speed over the number of devices."""
    for (name, entry), mark in zip(read("scaling")["devices"].items(), "os", strict=True):
        counts = [int(k) for k in entry]
        times = [one["ms"] for one in entry.values()]
        ax.plot(counts, [times[0] / t for t in times], f"{mark}-", label=name)
    cores = read("scaling")["machine"]["usable_cores"]
    ax.plot([1, cores, 8], [1, cores, cores], ":", color=plots.INK, label=f"what {cores} cores could give")
    ax.set(title="One model over several devices", xlabel="devices (CPU)", ylabel="speed, one device = 1")


def fleet(ax: Any) -> None:
    """Plot rows per second over fleet sizes."""
    entries = [r for r in read("fleet")["results"] if r["what"] == "SVGD" and "batch 20, lanes 1" in r["size"]][1:]
    models = [int(r["size"].split()[0].replace(",", "")) for r in entries]
    ax.loglog(models, [r["extra"]["rows_a_second"] for r in entries], "o-", label="SVGD, batches of 20")
    ax.axhline(200_000, ls=":", color=plots.INK, label="200,000 rows per second")
    ax.set(title="A fleet on two cores", xlabel="models (10 parameters × 20 particles)", ylabel="rows per second")


def spark(ax: Any) -> None:
    """Plot the rows per second of each trigger."""
    found = read("spark")["rates"]
    rates = [found["rows a trigger"] / seconds for seconds in found["seconds of each trigger"]]
    ax.plot(range(1, len(rates) + 1), rates, "o-", label=f"triggers of {found['rows a trigger']:,} rows")
    ax.axhline(20_000, ls=":", color=plots.INK, label="20,000 rows per second")
    ax.set(title=f"{found['keys']:,} models in Spark, local[2]", xlabel="trigger", ylabel="rows per second")
    ax.set_ylim(bottom=0)


def main() -> None:
    with plots.style():
        figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
        for ax, draw in zip(axes, (gpu, devices, fleet), strict=True):
            draw(ax)
            ax.legend(fontsize=8)
        print(plots.save(figure, RESULTS / "scale.png"))
        figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
        spark(ax)
        ax.legend(fontsize=8, loc="lower right")
        print(plots.save(figure, RESULTS / "spark.png"))


if __name__ == "__main__":
    main()
