"""The machine and the versions behind a measurement."""

import os
import platform
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def machine(command: str = "python -m benchmarks") -> dict[str, Any]:
    """Return what the numbers depend on, besides the code."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg(),  # of the minutes before: what else the machine was doing
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("opvi", "jax", "blackjax", "numpyro", "optax", "numpy")},
        "commit": os.environ.get("OPVI_COMMIT") or _commit(),
        "command": " ".join([command, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this checkout; for a copy without history, that in OPVI_COMMIT."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
