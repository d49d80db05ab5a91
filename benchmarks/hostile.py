"""Malformed and hostile requests to `opvi serve`; `python -m benchmarks.serve --only attacks` sends them."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.serve import Server, resident

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
