"""Malformed and hostile requests to `opvi serve`; `python -m benchmarks.serve --only attacks` sends them.

`python -m benchmarks.hostile --minutes 60` sends them, and sound ones that cost as much as the server allows, from
several clients at full speed; it measures the server's memory and how long a quiet client waits for its answers.
"""

import argparse
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import machine
from benchmarks.serve import Server, begin, resident, rows_of

HEADER = "inference-header-content-length"
Request = tuple[str, str, dict[str, str], bytes]  # method, path, headers, body
PATHS = (
    "/v1/learn",
    "/v1/predict",
    "/v2/models/model/infer",
    "/v1/predict?quantiles=",
    "/v1/predict?quantiles=nan,1e-400",
    "/v1/learn?ticket=%00",
    "/v1/predict?ticket=" + "x" * 500,
    "/v2/models/%2e%2e/infer",
    "/v2/models/model/versions/-1/infer",
    "/..%2f..%2fetc/passwd",
    "/%ff%fe",
    "/" + "a" * 3000,
    "/metrics",
    "/",
    "/openapi.json",
    "/v2/health/ready",
)
TEXTS = (
    b"",
    b"null",
    b"[]",
    b"{}",
    b"[" * 20_000,
    b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    b'{"a":1e999}',
    b'{"a":NaN,"b":-Infinity}',
    b'{"a":' + b"9" * 5_000 + b"}",
    b'{"a":1,"a":2}',
    b'{"a":"\\ud800"}',
    b'{"a":"\xff\xfe"}',
    b'{"a":"\x00"}',
    b'[{"a":1},2,"x"]',
    b"[" + b"{}," * 12_000 + b"{}]",
    b'{"y":{"y":[1]},"a":[]}',
    b'{"' + b"k" * 100_000 + b'":1}',
    b'{"inputs":[{"name":"a","shape":[1],"datatype":"FP64","data":[1]}]}',
    b'{"inputs":[{"name":"a","shape":[-1],"datatype":"FP64","data":[]}]}',
    b'{"inputs":[{"name":"a","shape":[9999999999],"datatype":"INT8","parameters":{"binary_data_size":-5}}]}',
    b'{"inputs":{"name":"a"},"outputs":7,"parameters":[]}',
    b'{"inputs":[null]}',
)


def hostile(chance: np.random.Generator, count: int, rows: list[dict[str, Any]]) -> Iterator[Request]:
    """Requests of which none is as it should be, or only just."""
    tensors = {
        "inputs": [
            {"name": name, "shape": [1], "datatype": "BYTES", "data": [str(value)]} for name, value in rows[0].items()
        ]
    }
    for _ in range(count):
        method = str(chance.choice(["POST"] * 8 + ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]))
        path = str(chance.choice(PATHS[: 3 if chance.random() < 0.7 else len(PATHS)]))
        kind = chance.random()
        if kind < 0.4:
            body = bytes(TEXTS[chance.integers(len(TEXTS))])
        else:
            sound = tensors if "/v2" in path else rows[chance.integers(len(rows))]
            body = bytearray(json.dumps(sound).encode())
            for _ in range(chance.integers(1, 6)):
                place = int(chance.integers(len(body)))
                if chance.random() < 0.5:
                    body[place] = int(chance.integers(256))
                else:
                    del body[place : place + int(chance.integers(1, 9))]
                body = body or bytearray(b"x")
            body = bytes(body)
        headers = {}
        if chance.random() < 0.3:
            headers["Idempotency-Key"] = str(chance.choice(["", "k", "x" * 300, "\t", "key 1"]))
        if chance.random() < 0.3:
            headers[HEADER] = str(
                chance.choice(["-1", "abc", "1e3", "99999999999999999999", "5", "\u00b2".encode().hex()])
            )
        if chance.random() < 0.1:
            headers["Host"] = str(chance.choice(["evil.example", "127.0.0.1:x", "[::1", "127.0.0.1, evil"]))
        if chance.random() < 0.1:
            headers["Content-Type"] = str(chance.choice(["text/plain", "application/x-www-form-urlencoded", ";;;"]))
        if chance.random() < 0.05:
            headers["Content-Encoding"] = "gzip"
        yield method, path, headers, body


def raw(request: Request) -> bytes:
    method, path, headers, body = request
    given = {"Host": "127.0.0.1", **headers, "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def attack(server: Server, rows: list[dict[str, Any]], count: int, seed: int = 0) -> dict[str, Any]:
    """Send hostile requests over sockets, one in ten of them bytes that are hardly HTTP; what came of it."""
    chance = np.random.default_rng(seed)
    statuses: dict[str, int] = {}
    memory = [resident(server.process.pid)]
    for number, request in enumerate(hostile(chance, count, rows)):
        sent = raw(request)
        if number % 10 == 9:
            sent = [chance.bytes(300), sent[: len(sent) // 2], sent.replace(b"\r\n", b"\n"), b"GET / HTTP/9.9\r\n\r\n"][
                number // 10 % 4
            ]
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.sendall(sent)
            if number % 10 == 9:  # what is no whole request would be waited for
                sock.shutdown(socket.SHUT_WR)
            said = b""
            try:
                while part := sock.recv(1 << 16):
                    said += part
            except ConnectionResetError:
                pass
        status = said[9:12].decode(errors="replace") or "closed"
        statuses[status] = statuses.get(status, 0) + 1
        if b"Traceback" in said:
            raise RuntimeError(f"a traceback in the answer to {sent[:500]!r}")
        if number % max(1, count // 10) == 0:
            memory.append(resident(server.process.pid))
    return {
        "requests": count,
        "statuses": dict(sorted(statuses.items())),
        "alive": server.process.poll() is None,
        "resident_mib": [round(value, 1) for value in memory],
    }


# --- for a long time, at full speed ---------------------------------------------------------------

WARM = 20.0  # seconds, after which the memory is taken as what it should stay
CALM = 20.0  # seconds before the attack, in which the same is measured
PAUSE = 0.02  # seconds between two requests of the client whose answers are timed
ATTACKERS = 4


def heavy(chance: np.random.Generator, rows: list[dict[str, Any]]) -> Iterator[Request]:
    """Requests that cost as much as the server allows: tickets, quantiles, many rows, large bodies."""
    one, some = rows[0], [rows[int(at)] for at in chance.integers(len(rows), size=2_000)]
    large = b"[" + b",".join([b'{"a":1,"b":2}'] * 20_000) + b"]"
    while True:
        kind = chance.integers(7)
        if kind == 0:
            body = {**one, "colour": "x" * int(chance.integers(1, 200_000))}
            yield "POST", f"/v1/predict?ticket=t{chance.integers(10**9)}", {}, json.dumps(body).encode()
        elif kind == 1:
            levels = ",".join(f"{level:.6f}" for level in np.sort(chance.uniform(0.01, 0.99, chance.integers(1, 21))))
            yield "POST", f"/v1/predict?quantiles={levels}", {}, json.dumps(one).encode()
        elif kind == 2:
            yield "POST", "/v1/predict", {}, json.dumps(some[: chance.integers(1, 2_000)]).encode()
        elif kind == 3:
            yield "POST", "/v1/predict", {}, large
        elif kind == 4:
            shape = "1," + ",".join(["1e308"] * 20_000)
            tensor = f'{{"inputs":[{{"name":"a","datatype":"FP64","data":[1],"shape":[{shape}]}}]}}'
            yield "POST", "/v2/models/model/infer", {}, tensor.encode()
        elif kind == 5:
            yield "POST", "/v1/learn", {"Idempotency-Key": f"k{chance.integers(10**9)}"}, json.dumps(some[:50]).encode()
        else:
            yield from hostile(chance, 20, rows)


def asked_for(
    server: Server, rows: list[dict[str, Any]], seconds: float, memory: list[tuple[float, float]]
) -> list[tuple[float, int]]:
    """Ask for a prediction again and again; return how long each took, and its status. `memory` notes the server's."""
    end, out = time.monotonic() + seconds, []
    quiet = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps(rows[1]).encode()
    while time.monotonic() < end:
        start = time.perf_counter()
        quiet.request("POST", "/v1/predict", body)
        answer = quiet.getresponse()
        answer.read()
        out.append((time.perf_counter() - start, answer.status))
        if not memory or time.monotonic() - memory[-1][0] > max(1.0, seconds / 100):
            memory.append((time.monotonic(), resident(server.process.pid)))
        time.sleep(PAUSE)
    return out


def attack_for(port: int, seed: int, seconds: float) -> None:
    """Send heavy requests for so long; print the statuses of the answers."""
    rows, end = json.loads(sys.stdin.read()), time.monotonic() + seconds
    statuses: Counter[int] = Counter()
    for request in heavy(np.random.default_rng(seed), rows):
        if time.monotonic() > end:
            break
        statuses[sent(port, request)] += 1
    print(json.dumps(statuses))


def sent(port: int, request: Request) -> int:
    """Send a request; return the status."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        said = b""
        with suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(raw(request))
            while part := sock.recv(1 << 16):
                said += part
    return int(said[9:12]) if said[9:12].isdigit() else 0


def endure(server: Server, rows: list[dict[str, Any]], minutes: float) -> dict[str, Any]:
    """Attack for so long; return memory over time, and how long a quiet client waited for its answers."""
    calm = [wait for wait, _ in asked_for(server, rows, CALM, [])]
    attackers = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.hostile", "--attack", str(server.port), str(seed), str(60 * minutes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(ATTACKERS)
    ]
    for one in attackers:  # processes of their own: they must not delay the client whose answers are timed
        assert one.stdin is not None
        one.stdin.write(json.dumps(rows))
        one.stdin.close()
    began, memory = time.monotonic(), list[tuple[float, float]]()
    answers = asked_for(server, rows, 60 * minutes, memory)
    waits = [wait for wait, _ in answers]
    statuses: Counter[str] = Counter()
    for one in attackers:
        assert one.stdout is not None
        statuses.update(json.loads(one.stdout.read()))
        one.wait()
    steady = [(at - began, size) for at, size in memory if at - began > WARM] or [(0.0, memory[-1][1])]
    half = len(steady) // 2
    return {
        "minutes": minutes,
        "attackers": ATTACKERS,
        "requests": sum(statuses.values()),
        "statuses": dict(sorted(statuses.items())),
        "resident_mib": [round(size) for _, size in memory],
        "first_half_mib": round(float(np.mean([size for _, size in steady[: half or 1]]))),
        "second_half_mib": round(float(np.mean([size for _, size in steady[half:]]))),
        "quiet_requests": len(waits),
        "quiet_not_answered": sum(status != 200 for _, status in answers),
        "calm_wait_ms": {name: round(1000 * float(np.quantile(calm, q)), 1) for name, q in QUANTILES.items()},
        "wait_ms": {name: round(1000 * float(np.quantile(waits, q)), 1) for name, q in QUANTILES.items()},
        "over_200_ms": sum(wait > 0.2 for wait in waits),
    }


QUANTILES = {"median": 0.5, "99 %": 0.99, "99.9 %": 0.999, "longest": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="folder for endurance.json")
    parser.add_argument("--attack", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        port, seed, seconds = options.attack
        return attack_for(int(port), int(seed), float(seconds))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        run = begin(work)
        with Server(run, "--name", "model", "--max-body", "2") as server:
            found = endure(server, rows_of(work / "table.csv"), options.minutes)
            found["alive"] = server.process.poll() is None
    print(json.dumps(found, indent=1))
    if options.out:
        about = {"machine": machine("python -m benchmarks.hostile"), "result": found}
        (options.out / "endurance.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
