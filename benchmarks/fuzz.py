"""Many malformed tables, files and requests: no crash, no hang, no accepted garbage, bounded memory.

`python -m benchmarks.fuzz` reads 5,000 of each kind; with `--minutes 60` it goes on for so long, with other inputs each
time.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

TESTS = Path(__file__).parent.parent / "tests" / "app"
KINDS = {
    "csv": "damaged CSV",
    "jsonl": "damaged JSON lines",
    "parquet": "damaged Parquet",
    "any": "generated text and bytes",
}
FILES = {  # tests/app/hostile_files.py
    "checkpoint": "damaged and forged checkpoints",
    "fleet": "damaged and changed files of fleets",
    "log": "damaged and forged logs of a server",
    "run": "damaged descriptions of runs",
    "requests": "malformed requests to a server",
}
CHUNK, SECONDS = 500, 600  # inputs read by one process, and the time it may take


def command_of(kind: str, first: int, last: int, folder: Path) -> list[str]:
    if kind in FILES:
        return [sys.executable, "-m", "tests.app.hostile_files", kind, str(first), str(last), str(folder)]
    return [sys.executable, str(TESTS / "hostile.py"), kind, str(first), str(last), str(folder)]


def run(kind: str, inputs: int, folder: Path, first: int = 0) -> dict[str, Any]:
    """Run inputs in processes of 500 each; one that dies or hangs is counted, and the next continues."""
    counts: Counter[str] = Counter()
    failures: list[Any] = []
    grown, end = 0.0, first + inputs
    while first < end:
        last = min(end, first + CHUNK)
        command = command_of(kind, first, last, folder)
        try:
            done = subprocess.run(command, cwd=TESTS.parents[1], capture_output=True, text=True, timeout=SECONDS)
            report = json.loads(done.stdout) if done.returncode == 0 else None
            why = f"ended with status {done.returncode}: {done.stderr[-500:]}"
        except subprocess.TimeoutExpired:
            report, why = None, "hung"
        if report is None:
            seed = int((folder / "progress").read_text())
            failures.append([seed, why])
            counts.update(inputs=seed - first, died=1)
            first = seed + 1
        else:
            counts.update(report["counts"])
            failures += report["failures"]
            grown, first = max(grown, report["grown_mb"]), last
        print(f"{kind}: {first:,} of {end:,}, {len(failures)} failures", file=sys.stderr, flush=True)
    return {"counts": dict(counts), "failures": failures, "grown_mb": grown}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=5_000, help="of each kind")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for so long, with other inputs each time")
    parser.add_argument("--only", choices=(*KINDS, *FILES), action="append", help="this kind; may be repeated")
    parser.add_argument("--name", default="fuzz", help="name of the results file")
    parser.add_argument("--out", type=Path, default=Path("bench-output"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    chosen = options.only or [*KINDS, *FILES]
    kinds: dict[str, Any] = {}
    first = 0
    with tempfile.TemporaryDirectory() as folder:
        while not first or time.perf_counter() - start < 60 * options.minutes:
            for kind in chosen:
                found = run(kind, options.inputs, Path(folder), first)
                before = kinds.get(kind, {"counts": {}, "failures": [], "grown_mb": 0.0})
                counts = Counter(before["counts"]) + Counter(found["counts"])
                failures = [*before["failures"], *found["failures"]]
                kinds[kind] = {
                    "counts": dict(counts),
                    "failures": failures,
                    "grown_mb": max(before["grown_mb"], found["grown_mb"]),
                }
            first += options.inputs
    report = {"machine": machine("python -m benchmarks.fuzz"), "seconds": time.perf_counter() - start, "kinds": kinds}
    path = options.out / f"{options.name}.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    for kind, result in kinds.items():
        counts = result["counts"]
        print(
            f"{(KINDS | FILES)[kind]}: {counts['inputs']:,} inputs, {len(result['failures'])} failures; "
            f"{counts.get('encoded', 0):,} rows encoded, {counts.get('rejected', 0):,} rejected, "
            f"{counts.get('refused', 0):,} inputs refused in part or whole; memory grew by {result['grown_mb']:.0f} MB"
        )
    sys.exit(any(result["failures"] for result in kinds.values()))


if __name__ == "__main__":
    main()
