"""`opvi serve` under load, killed, and attacked; beside an empty route of the same libraries.

`taskset -c 1 python -m benchmarks.serve --core 0 --out docs/results`
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import opvi
from benchmarks import kills
from benchmarks.machine import machine

EMPTY = """
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

async def nothing(request):
    await request.body()
    return Response(b"{}", media_type="application/json")

app = Starlette(routes=[Route("/", nothing, methods=["POST"])])
"""


# --- a server -------------------------------------------------------------------------------------


def rows_of(table: Path) -> list[dict[str, Any]]:
    names, *lines = (line.split(",") for line in table.read_text().splitlines())
    return [dict(zip(names, line, strict=True)) for line in lines]


def begin(work: Path, rows: int = 2000, more: tuple[str, ...] = ("--hidden", "none")) -> Path:
    """Return a run that has learnt some rows."""
    kills.write_table(work / "table.csv", rows)
    command = ["learn", str(work / "table.csv"), "--target", "y", "--run", str(work / "begun.run"), *more]
    subprocess.run([sys.executable, "-m", "opvi.app.cli", *command], check=True, stdout=subprocess.DEVNULL)
    return work / "begun.run"


class Server:
    """`opvi serve` in a process of its own."""

    def __init__(self, run: Path, *more: str, core: int | None = None, port: int = 0, cache: Path | None = None):
        self.run = run
        pin = ["taskset", "-c", str(core)] if core is not None else []
        environment = dict(os.environ)
        if cache is not None:
            environment |= {"OPVI_PROGRAMS": str(cache)}
        command = [*pin, sys.executable, "-m", "opvi.app.cli", "serve", str(run), "--port", str(port), *more]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert self.process.stderr is not None
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if line.startswith("Serving"):
                self.port = int(line.rstrip("/\n").rpartition(":")[2])
                break
        else:
            raise RuntimeError("".join(self.said))

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.said += self.process.communicate(timeout=60)[1].splitlines()
        return self.process.returncode

    def seconds(self) -> float:
        """Return processor seconds, including those of the learning process."""
        return sum(map(processor_seconds, family(self.process.pid)))

    def learnt(self) -> float:
        """Return the number of rows that are learnt, not only durable."""
        return self.figure("opvi_rows_learnt_total")

    def figure(self, name: str) -> float:
        """What `/metrics` says."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as said:
            lines = said.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def rest(self) -> None:
        """Wait until all durable rows are learnt."""
        while self.figure("opvi_queue_rows"):
            time.sleep(0.1)


def family(process: int) -> list[int]:
    """A process and those that it started."""
    threads = Path(f"/proc/{process}/task").iterdir()
    return [process, *(int(child) for thread in threads for child in (thread / "children").read_text().split())]


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> float:
    """Return the memory of a process and its children in MiB."""
    pages = (int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in family(process))
    return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


# --- load -----------------------------------------------------------------------------------------


def http(path: str, body: bytes, key: str = "") -> bytes:
    named = f"Idempotency-Key: {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{named}"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


async def clients(port: int, count: int, request: bytes, seconds: float) -> tuple[list[float], int]:
    """Run clients that each send a request when the last one is answered; return response times and refusals."""
    times: list[float] = []
    refusals = 0

    async def one() -> None:
        nonlocal refusals
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            began = time.perf_counter()
            status, body = await ask(reader, writer, request)
            if status == 200:
                times.append(time.perf_counter() - began)
            elif status == 429:
                refusals += 1
                await asyncio.sleep(0.05)
            else:
                raise RuntimeError(f"{status}: {body.decode()[:300]}")
        writer.close()

    end = time.perf_counter() + seconds
    await asyncio.gather(*(one() for _ in range(count)))
    return times, refusals


async def measured(
    server: Server, path: str, row: Any, count: int, seconds: float, rows: int = 1, beside: bytes = b""
) -> dict[str, float]:
    """Return rates by wall-clock and by the server's processor time, and response times."""
    body = json.dumps(row if rows == 1 else [row] * rows).encode()
    await clients(server.port, count, http(path, body), min(1.0, seconds / 4))
    if path != "/":
        server.rest()  # what came before is not this measurement's to learn
    learns = path == "/v1/learn" or bool(beside)
    learnt = server.learnt() if learns else 0.0
    before, began = server.seconds(), time.perf_counter()
    work = [clients(server.port, count, http(path, body), seconds)]
    if beside:
        work.append(clients(server.port, 8, http("/v1/learn", beside), seconds))
    (times, refusals), *others = await asyncio.gather(*work)
    took, spent = time.perf_counter() - began, server.seconds() - before
    found = {
        "clients": count,
        "rows_in_a_request": rows,
        "rows_per_second": len(times) * rows / took,
        "rows_per_processor_second": len(times) * rows / spent,
        "share_of_a_core": spent / took,
        "p50_ms": float(np.quantile(times, 0.5)) * 1e3,
        "p99_ms": float(np.quantile(times, 0.99)) * 1e3,
        "refused_with_429": refusals,
    }
    if learns:
        found["rows_learnt_per_second_meanwhile"] = (server.learnt() - learnt) / took
    if beside:
        found["rows_taken_per_second_meanwhile"] = len(others[0][0]) * 100 / took
    return {name: round(value, 2) for name, value in found.items()}


def load(work: Path, core: int | None, seconds: float) -> dict[str, Any]:
    linear = begin(work, 2000)
    row = {"a": 0.1234, "b": 1.5, "c": -0.3, "colour": "red"}
    labelled = {**row, "y": 1.0}
    hundred = json.dumps([labelled] * 100).encode()
    found: dict[str, Any] = {}
    with Server(linear, core=core) as server:
        found["learn, one row"] = asyncio.run(measured(server, "/v1/learn", labelled, 64, seconds))
        found["learn, 100 rows"] = asyncio.run(measured(server, "/v1/learn", labelled, 8, seconds, 100))
        found["predict"] = asyncio.run(measured(server, "/v1/predict", row, 64, seconds))
        found["predict, 16 clients"] = asyncio.run(measured(server, "/v1/predict", row, 16, seconds))
        found["predict while learning"] = asyncio.run(measured(server, "/v1/predict", row, 32, seconds, beside=hundred))
        found["server"] = {"resident_mib": round(resident(server.process.pid), 1)}
    with Server(linear, "--one-process", core=core) as server:
        rate = asyncio.run(measured(server, "/v1/predict", row, 32, seconds, beside=hundred))
        found["predict while learning, in one process"] = rate
        found["server in one process"] = {"resident_mib": round(resident(server.process.pid), 1)}
    (work / "network").mkdir()
    with Server(begin(work / "network", 2000, ()), core=core) as server:
        found["predict, default network"] = asyncio.run(measured(server, "/v1/predict", row, 64, seconds))
    found["an empty route"] = asyncio.run(_empty(work, core, row, seconds))
    return found


async def _empty(work: Path, core: int | None, row: Any, seconds: float) -> dict[str, float]:
    (work / "empty.py").write_text(EMPTY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pin = ["taskset", "-c", str(core)] if core is not None else []
    command = [*pin, sys.executable, "-m", "uvicorn", "empty:app", "--port", str(port), "--log-level", "warning"]
    server = Server.__new__(Server)
    server.process = subprocess.Popen([*command, "--no-access-log"], cwd=work)
    server.port = port
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        return await measured(server, "/", row, 64, seconds)
    finally:
        server.process.terminate()
        server.process.wait()


# --- kills ----------------------------------------------------------------------------------------


class Sender:
    """A client that sends its rows one after the other, each under a key, again until it is acknowledged."""

    def __init__(self, number: int, rows: list[dict[str, Any]]):
        self.number, self.rows, self.acknowledged = number, rows, 0
        self.port = 0

    async def send(self, end: asyncio.Event) -> None:
        connection = None
        while not end.is_set() and self.acknowledged < len(self.rows):
            at = self.acknowledged
            body = json.dumps({**self.rows[at], "sender": f"{self.number} {at}"}).encode()
            try:
                if connection is None:
                    connection = await asyncio.open_connection("127.0.0.1", self.port)
                status, _ = await ask(*connection, http("/v1/learn", body, f"{self.number} {at}"))
                self.acknowledged += status == 200
            except (OSError, asyncio.IncompleteReadError):
                if connection is not None:
                    connection[1].close()
                connection = None
                await asyncio.sleep(0.02)
        if connection is not None:
            connection[1].close()


def killed(
    run: Path, rows: list[dict[str, Any]], times: int, cache: Path | None = None, seed: int = 0
) -> dict[str, Any]:
    """Serve a run under load and kill it repeatedly; return whether each acknowledged row is learnt once."""
    from opvi.app.learn import RunDirectory
    from opvi.app.serve import Options, _service

    clean = Path(shutil.copytree(run, run.with_suffix(".clean")))
    senders = [Sender(number, rows[number::8]) for number in range(8)]
    chance = random.Random(seed)
    save = ("--save-every", "0.05")

    async def one(server: Server, seconds: float) -> None:
        end = asyncio.Event()
        for sender in senders:
            sender.port = server.port
        sending = [asyncio.create_task(sender.send(end)) for sender in senders]
        await asyncio.sleep(seconds)
        server.process.send_signal(signal.SIGKILL)
        end.set()
        await asyncio.gather(*sending)

    for _ in range(times):
        server = Server(run, *save, cache=cache)
        asyncio.run(one(server, 0.1 + chance.random()))
        server.stop()
    acknowledged = {f"{sender.number} {at}" for sender in senders for at in range(sender.acknowledged)}
    with Server(run, *save, cache=cache) as server:
        ended = server.stop()
    logged = [json.loads(entry.body)["sender"] for entry in _entries(run)]
    shutil.copytree(run / "log", clean / "log")
    with _service.written(RunDirectory(clean), Options("clean"), lambda line: None):
        pass  # learns the whole log at once, undisturbed
    table = run.parent / "table.csv"
    return {
        "kills": times,
        "acknowledged": len(acknowledged),
        "logged": len(logged),
        "lost": len(acknowledged - set(logged)),
        "twice": len(logged) - len(set(logged)),
        "clean_end": ended == 0,
        "same_bits": kills.same(kills.result(table, run), kills.result(table, clean)),
    }


def _entries(run: Path) -> list[Any]:
    from opvi.app.serve._log import Log

    log = Log(run / "log", 0)
    try:
        return list(log.after(0))
    finally:
        log.close()


def main() -> None:
    from benchmarks.hostile import attack

    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--core", type=int, help="for the server alone")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--attacks", type=int, default=10_000)
    parser.add_argument("--only", choices=("load", "kills", "attacks"))
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for serve.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "serve.json"
    found = json.loads(path.read_text())["result"] if options.only and path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if options.only in (None, "load"):
            found["rates"] = load(work, options.core, options.seconds)
        if options.only in (None, "kills"):
            (work / "kills").mkdir()
            run = begin(work / "kills")
            kills.write_table(work / "kills" / "more.csv", 400_000, seed=1)
            rows = rows_of(work / "kills" / "more.csv")
            found["kills"] = killed(run, rows, options.kills, work / "programs")
        if options.only in (None, "attacks"):
            (work / "attacks").mkdir()
            run = begin(work / "attacks")
            with Server(run, "--name", "model", core=options.core) as server:
                found["attacks"] = attack(server, rows_of(work / "attacks" / "table.csv"), options.attacks)
    print(json.dumps(found, indent=1))
    about = {"machine": machine(), "load_average": os.getloadavg()[0], "command": " ".join(sys.argv[1:])}
    path.write_text(json.dumps({**about, "opvi": opvi.__version__, "result": found}, indent=1) + "\n")
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
