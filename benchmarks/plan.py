"""What 100 nodes and a billion rows a day need, estimated from one machine: `python -m benchmarks.plan`."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

NODES = 100
NETWORKS = {
    "25 Gbit/s": (25e9 / 8, 50e-6),
    "400 Gbit/s": (400e9 / 8, 10e-6),
}  # bytes per second, seconds per hop: assumed
ROWS_A_SECOND = 1e9 / (24 * 60 * 60)
BATCH = 20


def cluster(gpu: dict[str, Any]) -> dict[str, Any]:
    """A direction on 100 GPUs, from the milliseconds of one and the bytes that go around the ring.

    The ring works through XLA's tiles, so that is what a hundredth of the work is taken from.
    """
    header = ["particles × dimensions", "one GPU, fused, ms", "one GPU, tiled, ms"]
    rows = []
    for result in gpu["results"]:
        size = re.fullmatch(r"n=([\d,]+), d=(\d+)", result["size"])
        if size is None:
            continue
        n, d = int(size[1].replace(",", "")), int(size[2])
        fused, tiled = (result["timings"][form]["median"] for form in ("fused", "tiled"))
        row = [f"{n:,} × {d}", _three(fused), _three(tiled)]
        for speed, latency in NETWORKS.values():
            ms = max(tiled / NODES, 1e3 * (latency * NODES + 8 * n * d / speed))
            row.append(f"{_three(ms)} ({fused / ms:.1f} × one fused)")
        rows.append(row)
    return {"header": [*header, *(f"{NODES} GPUs, {name}, ms" for name in NETWORKS)], "rows": rows}


def billion(folder: Path) -> dict[str, float]:
    """Machines for a billion rows a day, if each did what it was measured to do and spreading were free."""
    trackers, fleet, gpu, tables = (_read(folder, name) for name in ("trackers", "fleet", "gpu", "tables"))
    regressor = _result(trackers, "default regressor, one row")["value"]
    updates = _result(fleet, "OPVI", "10,000 models, batch 20, lanes 1")["extra"]["rows_a_second"]
    rows = BATCH * _result(gpu, "a round, first order")["extra"]["rounds_per_second"]
    reading = {kind: tables["results"][f"numbers.{kind}"]["together_us"] for kind in ("csv", "parquet")}
    return {
        "rows per second": ROWS_A_SECOND,
        "ms between batches": 1e3 * BATCH / ROWS_A_SECOND,
        "regressor, pairs of cores": regressor / 1e3 * ROWS_A_SECOND,
        "fleet, pairs of cores": ROWS_A_SECOND / updates,
        "fleet, times over on one pair": updates / ROWS_A_SECOND,
        "network, rows per second on one GPU": rows,
        "network, GPUs": ROWS_A_SECOND / rows,
        **{f"reading {kind}, cores": us / 1e6 * ROWS_A_SECOND for kind, us in reading.items()},
    }


def _three(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


def _result(report: dict[str, Any], what: str, size: str | None = None) -> dict[str, Any]:
    return next(one for one in report["results"] if one["what"] == what and size in (None, one["size"]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("docs/results"), help="with gpu.json and others")
    folder = parser.parse_args().folder
    plan = {
        "command": "python -m benchmarks.plan",
        "settings": {"nodes": NODES, "seconds per hop": {name: latency for name, (_, latency) in NETWORKS.items()}},
        "table": cluster(_read(folder, "gpu")),
        "billion": billion(folder),
    }
    (folder / "plan.json").write_text(json.dumps(plan, indent=1, ensure_ascii=False) + "\n")
    print("\n".join("| " + " | ".join(row) + " |" for row in [plan["table"]["header"], *plan["table"]["rows"]]))
    print("\n".join(f"{what}: {value:.4g}" for what, value in plan["billion"].items()))


if __name__ == "__main__":
    main()
