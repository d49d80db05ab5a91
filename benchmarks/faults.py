"""Every call of the file system fails once, in `opvi learn`: nothing is lost, and it says why.

`python -m benchmarks.faults --out bench-output` builds `faults.c`, which stands before the C library, and starts itself
again with it. Opening, writing (also inside Python's file objects), syncing, truncating, renaming and deleting fail one
after the other, each with every error; those that a signal may interrupt (EINTR) are repeated by Python; and writing
stops halfway. After each fault, the same command must end like an undisturbed run, bit for bit.
"""

import argparse
import contextlib
import ctypes
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import kills
from benchmarks.machine import machine

HALF = 0  # not an error: half of the bytes are written
CODES = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EINTR, HALF)
REPEATED = ("open", "write", "pwrite", "fsync", "ftruncate")  # by Python, when a signal interrupts them
OPTIONS = ["--target", "y", "--hidden", "none", "--particles", "4", "--save-every", "0.000001", "--first-rows", "100"]


def build(folder: Path) -> Path:
    """Build the library that makes calls fail."""
    out = folder / "faults.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-O1", "-o", str(out), str(source), "-ldl"], check=True)
    return out


def preloaded(every: int, start: int = 0) -> dict[str, Any]:
    """Return what `faults` finds in a process with the library preloaded."""
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        command = [sys.executable, "-m", "benchmarks.faults", "--inside", str(library), folder]
        said = subprocess.run(
            [*command, "--every", str(every), "--start", str(start)],
            env={**os.environ, "LD_PRELOAD": str(library)},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    return json.loads(said.stdout.splitlines()[-1])


def learn(table: Path, folder: Path) -> tuple[int, str]:
    """Run `opvi learn` in this process; return its exit status and output."""
    from opvi.app.cli import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = main(["learn", str(table), "--run", str(folder), "--resume", *OPTIONS])
    return status, said.getvalue()


def faults(library: Path, work: Path, every: int, start: int) -> dict[str, Any]:
    """Make every call fail, or each `every`-th, with every error in turn; return the outcomes."""
    from opvi.app.learn import _learner
    from opvi.running import _saving

    _learner.ROWS, _saving.LARGEST_SHARE = 80, float("inf")  # save after every few rows
    shim = ctypes.CDLL(str(library))
    shim.fault_failed.restype = ctypes.c_char_p
    table, whole = work / "table.csv", work / "whole"
    kills.write_table(table, 200)
    text = table.read_text().splitlines()
    text[150] = "broken" + text[150][text[150].index(",") :]
    table.write_text("\n".join(text) + "\n")
    assert learn(table, whole)[0] == 0
    expected = kills.result(table, whole)
    folder = work / "run"
    shim.fault_arm(str(folder).encode(), 0, 0)
    assert learn(table, folder)[0] == 0
    calls = shim.fault_count()
    assert kills.same(kills.result(table, folder), expected)
    done, bad, by_call, statuses = 0, [], Counter[str](), Counter[str]()
    for number in range(start, calls * len(CODES), every):
        place, code = number // len(CODES) + 1, CODES[number % len(CODES)]
        shutil.rmtree(folder)
        shim.fault_arm(str(folder).encode(), place, code)
        try:
            status, said = learn(table, folder)
        except BaseException as error:  # a traceback on the user's screen
            status, said = -1, repr(error)
        failed = shim.fault_failed().decode()
        shim.fault_arm(b"", 0, 0)
        if not failed:  # half a write, where nothing is written
            continue
        name = errno.errorcode.get(code, "half")
        by_call[failed] += 1
        statuses[f"{name}: {status}"] += 1
        done += 1
        told = status == 0 or (status == 1 and os.strerror(code) in said)
        told = told and not (status and code in (errno.EINTR, HALF) and failed in REPEATED)
        again, why = learn(table, folder)
        if not told or again or not kills.same(kills.result(table, folder), expected):
            bad.append({"call": place, "name": failed, "error": name, "said": said[-300:], "again": why[-300:]})
    return {
        "calls": calls,
        "faults": done,
        "by_call": dict(sorted(by_call.items())),
        "exit_statuses": dict(sorted(statuses.items())),
        "bad": bad,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="let only each so manieth fault happen")
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for faults.json")
    parser.add_argument("--inside", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(faults(*options.inside, options.every, options.start)))
        return
    found = preloaded(options.every, options.start)
    print(json.dumps(found, indent=1))
    if options.out:
        about = {"machine": machine("python -m benchmarks.faults"), "result": found}
        (options.out / "faults.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
