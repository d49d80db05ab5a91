"""Every call of the file system fails once, in `opvi learn` and `opvi serve`: no row is lost or learnt twice.

`python -m benchmarks.faults --out bench-output` builds `faults.c`, which stands before the C library, and starts itself
again with it. Opening, writing (also inside Python's file objects), syncing, truncating, renaming and deleting fail one
after the other, each with every error; those that a signal may interrupt (EINTR) are repeated by Python; and writing
stops halfway. After each fault of `opvi learn`, which writes predictions, too, the same command must end like an
undisturbed run, bit for bit. A server gets rows, some of them as labels of tickets, from a client that repeats what was
not acknowledged; it is started again where it has to be. Its log must then hold every row once.
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
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import kills
from benchmarks.machine import machine

HALF = 0  # not an error: half of the bytes are written
CODES = (errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EINTR, HALF)
REPEATED = ("open", "write", "pwrite", "fsync", "ftruncate")  # by Python, when a signal interrupts them
OPTIONS = ["--target", "y", "--hidden", "none", "--particles", "4", "--save-every", "0.000001", "--first-rows", "100"]
PREDICTIONS = "predictions.csv"
ASKED, TOGETHER = 12, 3  # requests to the server, and rows of each
ATTEMPTS = 20  # starts of a server until all requests are acknowledged


def build(folder: Path) -> Path:
    """Build the library that makes calls fail, or writes them down."""
    out = folder / "faults.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-O1", "-o", str(out), str(source), "-ldl"], check=True)
    return out


def preloaded(every: int, start: int = 0, only: str = "") -> dict[str, Any]:
    """Return what `faults` finds in a process with the library preloaded."""
    with tempfile.TemporaryDirectory() as folder:
        library = build(Path(folder))
        command = [sys.executable, "-m", "benchmarks.faults", "--inside", str(library), folder, "--only", only]
        said = subprocess.run(
            [*command, "--every", str(every), "--start", str(start)],
            env={**os.environ, "LD_PRELOAD": str(library)},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    return json.loads(said.stdout.splitlines()[-1])


def learn(table: Path, folder: Path, out: Path | None = None) -> tuple[int, str]:
    """Run `opvi learn` in this process, with predictions in a folder; return its exit status and output."""
    from opvi.app.cli import main

    said = io.StringIO()
    predictions = ["--predictions", str((out or folder) / PREDICTIONS)]
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = main(["learn", str(table), "--run", str(folder), "--resume", *OPTIONS, *predictions])
    return status, said.getvalue()


def loaded(library: Path) -> ctypes.CDLL:
    shim = ctypes.CDLL(str(library))
    shim.fault_failed.restype = ctypes.c_char_p
    return shim


def each_fails(
    shim: ctypes.CDLL,
    folder: Path,
    calls: int,
    every: int,
    start: int,
    before: Callable[[], Any],
    once: Callable[[], Any],
) -> Any:
    """Let each call below a folder fail with each error; yield the name of the call, the error and what came of it."""
    for number in range(start, calls * len(CODES), every):
        place, code = number // len(CODES) + 1, CODES[number % len(CODES)]
        before()
        shim.fault_arm(str(folder).encode(), place, code)
        try:
            came = once()
        except BaseException as error:  # a traceback on the user's screen
            came = -1, repr(error)
        failed = shim.fault_failed().decode()
        shim.fault_arm(b"", 0, 0)
        if failed:  # otherwise half a write, where nothing is written
            yield place, failed, code, came


def of_learning(library: Path, work: Path, every: int, start: int) -> dict[str, Any]:
    """Make every call of `opvi learn` fail, or each `every`-th, with every error in turn; return the outcomes."""
    from opvi.app.learn import _learner
    from opvi.running import _saving

    _learner.ROWS, _saving.LARGEST_SHARE = 80, float("inf")  # save after every few rows
    shim = loaded(library)
    table, folder = work / "table.csv", work / "run"
    kills.write_table(table, 200)
    text = table.read_text().splitlines()
    text[150] = "broken" + text[150][text[150].index(",") :]
    table.write_text("\n".join(text) + "\n")

    def result() -> tuple[dict[str, Any], bytes]:
        return kills.result(table, folder), (folder / PREDICTIONS).read_bytes()

    def same() -> bool:
        found, predictions = result()
        return kills.same(found, expected) and predictions == told

    assert learn(table, folder)[0] == 0
    expected, told = result()
    shutil.rmtree(folder)
    shim.fault_arm(str(folder).encode(), 0, 0)
    assert learn(table, folder)[0] == 0
    calls = shim.fault_count()
    assert same()
    done, bad, by_call, statuses = 0, [], Counter[str](), Counter[str]()

    runs = each_fails(shim, folder, calls, every, start, lambda: shutil.rmtree(folder), lambda: learn(table, folder))
    for place, failed, code, (status, said) in runs:
        name = errno.errorcode.get(code, "half")
        by_call[failed] += 1
        statuses[f"{name}: {status}"] += 1
        done += 1
        right = status == 0 or (status == 1 and os.strerror(code) in said)
        right = right and not (status and code in (errno.EINTR, HALF) and failed in REPEATED)
        again, why = learn(table, folder)
        if not right or again or not same():
            bad.append({"call": place, "name": failed, "error": name, "said": said[-300:], "again": why[-300:]})
    return {
        "calls": calls,
        "faults": done,
        "by_call": dict(sorted(by_call.items())),
        "exit_statuses": dict(sorted(statuses.items())),
        "bad": bad,
    }


# --- the server ---------------------------------------------------------------------------------


class Answered:
    """Takes answers as the event loop does, in the thread that gives them."""

    def is_closed(self) -> bool:
        return False

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        call()


class Reply:
    def __init__(self) -> None:
        self.said: Any = None

    def done(self) -> bool:
        return self.said is not None

    def set_result(self, said: Any) -> None:
        self.said = said


class Client:
    """Sends rows to a server in this process and repeats what was not acknowledged, under the same key."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.requests = [rows[i * TOGETHER : (i + 1) * TOGETHER] for i in range(ASKED)]
        self.acknowledged: list[bool] = [False] * ASKED
        self.starts = 0
        self.told: Callable[[int], object] = lambda number: None  # is told each request that is acknowledged

    def send(self, run: Path) -> str:
        """Send what is left to a server that is started for it; return what it said when it ended."""
        from opvi.app.learn import RunDirectory
        from opvi.app.serve import Options, _service
        from opvi.app.serve._behind import Behind

        self.starts += 1
        options = Options("model", save_every=1e-9)
        try:
            with _service.written(RunDirectory(run), options, lambda line: None) as writer:
                behind = Behind(writer, "model", options.backlog, Answered())
                try:
                    self._send(behind, writer)
                finally:
                    behind.close()
        except Exception as error:  # what the command line would say
            return str(error)
        return ""

    def _send(self, behind: Any, writer: Any) -> None:
        from opvi.app.serve._intake import Sent
        from opvi.app.serve._tickets import Held

        for number, rows in enumerate(self.requests):
            if self.acknowledged[number]:
                continue
            key, ticket, body = f"key {number}", "", json.dumps(rows).encode()
            if number % 2:
                asked = [{name: value for name, value in row.items() if name != "y"} for row in rows]
                behind.keep(f"t{number}", Held(json.dumps(asked).encode(), len(rows), b"[null, null, null]"))
                ticket, body = f"t{number}", json.dumps([{"y": row["y"]} for row in rows]).encode()
            for _ in range(2):  # once more, should the first answer be that the disk is full
                reply = Reply()
                refused = behind.take(Sent(body, key, ticket, reply))
                while refused is None and reply.said is None:
                    time.sleep(0.0005)
                if refused is None and reply.said.status == 200:
                    self.acknowledged[number] = True
                    self.told(number)
                    break
            if not self.acknowledged[number]:
                return  # in order: the bits depend on it
            while writer.behind and not writer.failed:
                time.sleep(0.0005)


def begun_run(work: Path, name: str = "begun") -> tuple[Path, list[dict[str, Any]]]:
    """Return a run that has learnt 500 rows, and more of them as JSON objects, one of them broken."""
    table = work / "served.csv"
    kills.write_table(table, 560)
    lines = table.read_text().splitlines()
    (work / "first.csv").write_text("\n".join(lines[:501]) + "\n")
    from opvi.app.cli import main

    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        assert main(["learn", str(work / "first.csv"), "--run", str(work / name), *OPTIONS[:6]]) == 0
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[501:]]
    for row in rows:
        row["y"] = float(row["y"])
    rows[4]["c"] = "broken"
    return work / name, rows


def logged(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a log, in order."""
    from opvi.app.serve._log import Log

    log = Log(run / "log", 0)
    rows = [row for entry in log.after(0) for row in entry.read()]
    log.close()
    return rows


def of_serving(library: Path, work: Path, every: int, start: int) -> dict[str, Any]:
    """Make every call of a server fail, with every error in turn; return the outcomes."""
    from opvi.app.learn import RunDirectory
    from opvi.app.learn._predict import learnt
    from opvi.app.serve import _writer

    _writer.EVERY = 0.0
    shim = loaded(library)
    begun, rows = begun_run(work)
    folder = work / "served"
    clients: list[Client] = []

    def before() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(begun, folder)

    def once() -> tuple[int, str]:
        client = Client(rows)
        clients.append(client)
        said = client.send(folder)
        for _ in range(ATTEMPTS):
            if all(client.acknowledged):
                break
            said = client.send(folder) or said
        return int(not all(client.acknowledged)), said

    def state() -> list[Any]:
        known = learnt(RunDirectory(folder))
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(known.state())]
        return [*leaves, known.rows, known.tree["rejected"]["count"], (folder / "rejected.jsonl").read_bytes()]

    before()
    once()
    Client(rows).send(folder)  # nothing is new: every key is known
    expected, whole = state(), logged(folder)
    assert [row["y"] for row in whole] == [str(row["y"]) for row in rows[: ASKED * TOGETHER]]
    before()
    shim.fault_arm(str(folder).encode(), 0, 0)
    once()
    calls = shim.fault_count()
    done, bad, by_call = 0, [], Counter[str]()
    lost = twice = starts = 0
    for place, failed, code, (status, said) in each_fails(shim, folder, calls, every, start, before, once):
        by_call[failed] += 1
        done += 1
        starts += clients[-1].starts
        ends = Client(rows)
        ends.acknowledged = [True] * ASKED
        why = ends.send(folder)  # what is durable is learnt
        found = [row["y"] for row in logged(folder)]
        missing = sum(row["y"] not in found for row in whole)
        lost, twice = lost + missing, twice + len(found) - len(set(found))
        if status or why or missing or len(found) != len(whole) or state() != expected:
            name = errno.errorcode.get(code, "half")
            bad.append({"call": place, "name": failed, "error": name, "said": said[-300:], "again": why[-300:]})
    return {
        "calls": calls,
        "faults": done,
        "rows": len(whole),
        "starts": starts,
        "lost": lost,
        "twice": twice,
        "by_call": dict(sorted(by_call.items())),
        "bad": bad,
    }


KINDS = {"learn": of_learning, "serve": of_serving}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="let only each so manieth fault happen")
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", choices=("", *KINDS), help="one of the two")
    parser.add_argument("--out", type=Path, help="folder for faults.json")
    parser.add_argument("--inside", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        kinds = [options.only] if options.only else list(KINDS)
        print(json.dumps({kind: KINDS[kind](*options.inside, options.every, options.start) for kind in kinds}))
        return
    found = preloaded(options.every, options.start, options.only)
    print(json.dumps(found, indent=1))
    if options.out:
        about = {"machine": machine("python -m benchmarks.faults"), "result": found}
        (options.out / "faults.json").write_text(json.dumps(about, indent=1) + "\n")
    sys.exit(any(one["bad"] for one in found.values()))


if __name__ == "__main__":
    main()
