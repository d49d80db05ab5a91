"""Peak memory and time of the tiled field, in a process of its own: `python -m benchmarks.memory`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

import opvi
from benchmarks.measure import Result, Timing, milliseconds

N, D, LIMIT_MB = 20_000, 10, 1000.0


def resident_mb(which: str) -> float:
    """`VmRSS` is the memory in use, `VmHWM` its peak. Not `getrusage`, whose peak is inherited from the parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) * 1024 / 1e6


def child() -> None:
    """Print, as JSON, megabytes over what was there before the call (compiling included) and milliseconds."""
    field = jax.jit(opvi.flows.fields.svgd())
    x = jax.random.normal(jax.random.key(0), (N, D))
    scores = jax.block_until_ready(-x)
    before = resident_mb("VmRSS")
    times = [milliseconds(lambda: field(x, scores)) for _ in range(4)]
    print(json.dumps({"before_mb": before, "peak_mb": resident_mb("VmHWM"), "times_ms": times}))


def results() -> Iterator[Result]:
    """Return the child's numbers; nothing if the kernel does not report them (only Linux does)."""
    if not Path("/proc/self/status").exists():
        return
    command = [sys.executable, "-m", "benchmarks.memory"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=root)
    numbers = json.loads(done.stdout)
    size, used = f"n={N}, d={D}", numbers["peak_mb"] - numbers["before_mb"]
    timing = Timing(numbers["times_ms"][0], numbers["times_ms"][1:])
    yield Result("tiled SVGD field, peak memory", size, used, "MB", LIMIT_MB, extra=numbers)
    yield Result("tiled SVGD field, time", size, timing.median, "ms", timings={"opvi": timing})


if __name__ == "__main__":
    child()
