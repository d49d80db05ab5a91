"""Run every benchmark, print one table, write one JSON: `python -m benchmarks --out bench-output`."""

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import first, memory, peers, runs, width
from benchmarks.machine import machine
from benchmarks.measure import Result

# A table of seven columns wraps badly in the 80 that a pipe is given.
console = Console() if sys.stdout.isatty() else Console(width=130)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(results: list[Result]) -> Table:
    out = Table(title="opvi beside its peers (medians; × is peer / opvi)")
    for name in ("what", "size"):
        out.add_column(name)
    for name in ("opvi, ms", "peer, ms", "result", "target"):
        out.add_column(name, justify="right")
    out.add_column("")
    for result in results:
        ours, peer, *_ = [number(timing.median) for timing in result.timings.values()] + ["", ""]
        sign = "≥" if result.unit == "×" else "≤"
        target = "" if result.target is None else f"{sign} {number(result.target)} {result.unit}"
        mark = {None: "", True: "[green]met[/]", False: "[red]missed[/]"}[result.met]
        out.add_row(result.what, result.size, ours, peer, f"{number(result.value)} {result.unit}", target, mark)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for bench.json")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)  # before the minutes of work, not after
    about, start, results = machine(), time.perf_counter(), []
    with console.status("measuring") as status:
        for source in (runs.compile_results, runs.results, peers.results, memory.results, width.results, first.results):
            for result in source():
                results.append(result)
                status.update(f"measured: {result.what}, {result.size} ({time.perf_counter() - start:.0f} s)")
    console.print(table(results))
    path = folder / "bench.json"
    report = {"machine": about, "seconds": time.perf_counter() - start, "results": [r.summary() for r in results]}
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    console.print(f"{report['seconds']:.0f} s. Raw timings: {path}")


if __name__ == "__main__":
    main()
