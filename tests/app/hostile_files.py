"""Malformed files and requests of every kind that opvi reads, and what must hold: an answer or an error of ours, soon.

Each kind has a corpus, cases that once did harm, and any number of others, made from a sound one by damage: bytes that
are flipped, cut out, doubled or replaced, under a checksum that is right again half of the time, so that what lies
behind it is read. `benchmarks/fuzz.py` runs them for as long as one likes.
"""

import hashlib
import json
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tests.app import hostile

KINDS = ("checkpoint", "fleet", "log", "run", "requests")
DEEP = "[" * 100_000
DIGITS = "9" * 4000


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a text or bytes with parts that parsers trip over."""
    return hostile.damaged(data, rng, rng.choice([1, 1, 2, 4, 10]), in_place=rng.random() < 0.5) if data else data


def json_damaged(text: str, rng: random.Random) -> str:
    """Return JSON with some values replaced; it often stays JSON."""
    odd = [
        "null",
        "-1",
        "1e999",
        "NaN",
        "[]",
        "{}",
        '""',
        '"x"',
        "true",
        DIGITS,
        "1e308",
        "0.5",
        "[[[[[]]]]]",
        '"\\ud800"',
    ]
    parts = json.dumps(json.loads(text)).split(" ")
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(parts))
        end = "".join(letter for letter in parts[place][-2:] if letter in ",:]}")
        parts[place] = parts[place] if parts[place].endswith(":") else rng.choice(odd) + end
    return " ".join(parts)


# --- files ----------------------------------------------------------------------------------------


class Checkpoint:
    """Files of `opvi.save`."""

    def __init__(self, folder: Path):
        from opvi.running import _checkpoint as checkpoint

        self.module, self.path = checkpoint, folder / "state.opvi"
        tree = {"state": {"a": np.arange(6.0), "b": np.ones((2, 3), np.float32)}, "n": [3, 0.5], "s": "x"}
        whole = checkpoint.save(self.path, tree).read_bytes()
        size = checkpoint.HEADER.unpack_from(whole)[3]
        self.whole, self.description = whole, whole[checkpoint.HEADER.size :][:size]
        self.arrays = whole[checkpoint.HEADER.size + size :]

    def forged(self, description: bytes, arrays: bytes = b"") -> bytes:
        digest = hashlib.sha256(description + arrays).digest()
        head = self.module.HEADER.pack(self.module.MAGIC, self.module.VERSION, digest, len(description))
        return head + description + arrays

    def corpus(self) -> Iterator[bytes]:
        one = '{"tree": null, "arrays": {"": {"dtype": "float32", "shape": [%s]}}}'
        yield self.forged((one % ",".join([DIGITS] * 600)).encode())
        yield self.forged((one % ("1," * 600 + "1")).encode())
        yield self.forged(b'{"tree": [' + b"[]," * 1_200_000 + b'[]], "arrays": {}}')
        yield self.forged(b'{"tree": ' + DEEP.encode() + b"}")
        yield self.whole[:60]
        yield b""

    def other(self, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return damaged(self.whole, rng)
        try:
            description = json_damaged(self.description.decode(), rng).encode()
        except ValueError:
            description = damaged(self.description, rng)
        return self.forged(description, damaged(self.arrays, rng) if rng.random() < 0.3 else self.arrays)

    def read(self, data: bytes) -> None:
        self.path.write_bytes(data)
        with suppress(self.module.CheckpointError):
            self.module.read(self.path)


class Log:
    """Segments of a server's log."""

    def __init__(self, folder: Path):
        from opvi.app.serve import _log

        self.module, self.folder = _log, folder / "log"
        log = _log.Log(self.folder, 0)
        for first in range(0, 9, 3):
            label = _log.Entry(
                f"key {first}", "digest", first, 2, b'[{"y": 1.50}, {"y": 2}]', b'[{"a": 1e999}, {"a": 2}]'
            )
            log.append([label, _log.Entry("", "", first + 2, 1, b'{"a": 1, "y": 2}')])
        log.close()
        (self.path,) = self.folder.iterdir()
        self.whole = self.path.read_bytes()

    def forged(self, data: bytes, first: int = 0, rows: int = 3) -> bytes:
        tail = self.module.HEADER.pack(self.module.MARK, 0, first, rows, len(data))[8:]
        return self.module.MARK + zlib.crc32(data, zlib.crc32(tail)).to_bytes(4, "little") + tail + data

    def corpus(self) -> Iterator[bytes]:
        for line in (b"{", b"[]", b'{"key": 1}', b'{"key": "", "digest": "", "rows": 3, "bytes": 99999999}'):
            yield self.forged(line + b"\n{}\n")
        yield self.forged(b'{"key": "", "digest": "", "rows": 1, "bytes": 100000}\n' + DEEP.encode() + b"\n", 0, 1)
        yield bytes(1 << 20)
        yield self.whole[:-1]

    def other(self, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return damaged(self.whole, rng)
        size = self.module.HEADER.unpack_from(self.whole)[4]
        return self.forged(
            damaged(self.whole[self.module.HEADER.size :][:size], rng), 0, rng.choice([3, 3, 0, 1 << 31])
        )

    def read(self, data: bytes) -> None:
        from opvi.adapters._tables._jsonlines import BadLineError

        self.path.write_bytes(data)
        try:
            log = self.module.Log(self.folder, 0)
            for entry in log.after(0):
                assert len(entry.read()) == entry.rows
            log.close()
        except (self.module.LogError, BadLineError):
            pass


class Fleet:
    """SQLite files of fleets."""

    CHANGES = (
        "CREATE TRIGGER t AFTER UPDATE ON models BEGIN DELETE FROM models WHERE number != NEW.number; END",
        "CREATE VIEW v AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "UPDATE models SET record = (SELECT record FROM models WHERE number = 1)",
        "UPDATE models SET id = CAST(number AS TEXT)",
        "UPDATE models SET touched = 'x'",
        "UPDATE about SET value = substr(value, 1, 90)",
        "DELETE FROM about",
    )

    def __init__(self, folder: Path):
        import opvi

        self.path = folder / "fleet"
        sampler = opvi.langevin(opvi.linear_regression(2), step=0.01)
        with opvi.Fleet(sampler, 0, path=self.path, batch_size=4, particles=3) as fleet:
            fleet.learn(list(range(30)), (np.ones((30, 2)), np.ones(30)))
            fleet.save(cursor=30)
            self.dtype = fleet._keyed.dtype
        self.whole = self.path.read_bytes()

    def corpus(self) -> Iterator[bytes]:
        for change in self.CHANGES:
            yield self.changed(change)
        yield bytes(1 << 20)
        yield self.whole[:5000]

    def changed(self, query: str) -> bytes:
        self.path.write_bytes(self.whole)
        database = sqlite3.connect(self.path)
        database.execute(query)
        database.commit()
        database.close()
        return self.path.read_bytes()

    def other(self, rng: random.Random) -> bytes:
        data = bytearray(self.whole if rng.random() < 0.8 else self.changed(rng.choice(self.CHANGES)))
        for _ in range(rng.choice([1, 3, 20])):
            at = rng.randrange(len(data)) if rng.random() < 0.7 else rng.randrange(200)
            data[at : at + 1] = rng.choice([b"\0", b"\xff", bytes([rng.randrange(256)])])
        return bytes(data)

    def read(self, data: bytes) -> None:
        from opvi.running import CheckpointError
        from opvi.running._saving import LockedError
        from opvi.scale.fleet._fleet import checked_about
        from opvi.scale.fleet._store import Store

        for path in self.path.parent.glob("fleet-*"):
            path.unlink()
        self.path.write_bytes(data)
        store = None
        try:
            store = Store(self.path, None)
            checked_about(store.about, self.path)
            store.prepare(self.dtype, 100)
            names = store.ids()
            store.put(names, store.get(names)[0])
            store.save(store.about)
        except (CheckpointError, LockedError, OSError, RuntimeError):  # ours, or what SQLite says of a damaged file
            pass
        finally:
            if store is not None:
                store.close()


class Run:
    """Folders of runs: run.json and the last checkpoint."""

    def __init__(self, folder: Path):
        self.begun = begun_run(folder)
        self.folder = folder / "run"
        self.about = (self.begun / "run.json").read_text()
        self.newest = max((self.begun / "checkpoints").glob("*.opvi"))

    def corpus(self) -> Iterator[bytes]:
        about = json.loads(self.about)
        for name, value in (
            ("particles", 10**9),
            ("hidden", [10**9]),
            ("seed", -1),
            ("half_life", "x"),
            ("warm_up", {}),
        ):
            yield json.dumps({**about, "settings": {**about["settings"], name: value}}).encode()
        yield DEEP.encode()
        yield b""
        yield json.dumps({**about, "schema": {**about["schema"], "classes": ["a"] * 70_000}}).encode()

    def other(self, rng: random.Random) -> bytes:
        return json_damaged(self.about, rng).encode(errors="replace")

    def read(self, data: bytes) -> None:
        from opvi.adapters._tables import TableError
        from opvi.app.learn import RunDirectory, RunError
        from opvi.app.learn._predict import learnt
        from opvi.running import CheckpointError

        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "checkpoints").mkdir(parents=True)
        shutil.copy(self.newest, self.folder / "checkpoints")
        (self.folder / "run.json").write_bytes(data)
        with suppress(RunError, TableError, CheckpointError):
            learnt(RunDirectory(self.folder))


def begun_run(folder: Path) -> Path:
    """Return a run that has learnt some rows."""
    import contextlib
    import io

    from benchmarks import kills
    from opvi.app.cli import main

    kills.write_table(folder / "table.csv", 200)
    words = ["learn", str(folder / "table.csv"), "--target", "y", "--hidden", "none", "--particles", "4"]
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        assert main([*words, "--run", str(folder / "begun")]) == 0
    return folder / "begun"


# --- requests -------------------------------------------------------------------------------------


class Requests:
    """Requests to a server in this process."""

    def __init__(self, folder: Path):
        from opvi.app.learn import RunDirectory
        from tests.app.test_serve import Served

        self.run = begun_run(folder)
        self.served = Served(RunDirectory(self.run))
        self.served.__enter__()
        self.rows = [{"a": 1.5, "b": 2, "c": -1, "colour": "red", "y": 3.25}, {"a": "1", "b": None, "colour": "blue"}]
        self.tensors = {
            "inputs": [
                {"name": name, "shape": [1], "datatype": "BYTES", "data": ["1"]} for name in ("a", "b", "c", "colour")
            ]
        }

    def close(self) -> None:
        self.served.__exit__(None, None, None)

    def corpus(self) -> Iterator[tuple[str, str, dict[str, str], bytes]]:
        from benchmarks.hostile import PATHS, TEXTS

        infer, column = (
            "/v2/models/model/infer",
            '{"inputs": [{"name": "a", "datatype": "FP64", "data": [1], "shape": [%s]}]}',
        )
        for shape in (
            "1," + ",".join(["1e308"] * 20_000),
            "1," + ",".join([DIGITS] * 300),
            "1," * 20_000 + "1",
            '"1"',
            "true",
        ):
            yield "POST", infer, {}, (column % shape).encode()
        for level in ("1e-300", "1e-7", "nan", "-1", "0.5," * 30 + "0.5", ",", "1e999", "0.1,0.1"):
            yield "POST", f"/v1/predict?quantiles={level}", {}, json.dumps(self.rows[0]).encode()
        for body in (
            b'{"a": 1.50, "b": 1e999}',
            b'{"a": ' + DIGITS.encode() + b"}",
            b'{"A": 1}',
            b"[" + b"[]," * 300_000 + b"[]]",
        ):
            yield "POST", "/v1/predict?ticket=x", {}, body
            yield "POST", "/v1/learn?ticket=x", {}, b'{"y": 1.50}'
            yield "POST", "/v1/learn", {"Idempotency-Key": "k"}, body
        for path in PATHS:
            yield "POST", path, {}, b"{}"
            yield "GET", path, {}, b""
        for text in TEXTS:
            yield "POST", "/v1/learn", {}, text
            yield "POST", infer, {}, text

    def other(self, rng: random.Random) -> tuple[str, str, dict[str, str], bytes]:
        from benchmarks.hostile import HEADER

        path = rng.choice(
            ["/v1/learn", "/v1/predict", "/v2/models/model/infer", "/v1/learn?ticket=x", "/v1/predict?ticket=x"]
        )
        sound = json.dumps(self.tensors if "infer" in path else rng.choice([*self.rows, self.rows]))
        text = json_damaged(sound, rng) if rng.random() < 0.6 else sound
        body = text.encode(errors="replace")
        body = damaged(body, rng) if rng.random() < 0.4 else body
        headers = {}
        if rng.random() < 0.2:
            headers["Idempotency-Key"] = rng.choice(["", "k", "x" * 300, "ticket x", "é"])
        if rng.random() < 0.3 and "infer" in path:
            headers[HEADER] = rng.choice(["-1", "abc", str(len(body)), str(len(body) - 3), DIGITS])
        return rng.choice(["POST"] * 9 + ["GET", "PUT"]), path, headers, body

    def read(self, request: tuple[str, str, dict[str, str], bytes]) -> None:
        method, path, headers, body = request
        try:
            said = self.served.client.request(method, path, body, headers)
        except UnicodeEncodeError:  # of the test's own client
            return
        assert said.status_code < 500 or said.status_code == 503, (said.status_code, said.text[:200])
        assert b"Traceback" not in said.content
        assert not self.served.made.failed


MAKERS: dict[str, Any] = {"checkpoint": Checkpoint, "fleet": Fleet, "log": Log, "run": Run, "requests": Requests}


class Fuzzer:
    """`with Fuzzer(kind) as fuzzer: fuzzer.corpus(); fuzzer.one(seed)`; an input that does harm raises."""

    def __init__(self, kind: str, folder: Path | None = None):
        self.kind, self._folder = kind, folder

    def __enter__(self) -> "Fuzzer":
        self._own = tempfile.TemporaryDirectory(dir=self._folder)
        self.made = MAKERS[self.kind](Path(self._own.name))
        return self

    def __exit__(self, *error: object) -> None:
        getattr(self.made, "close", lambda: None)()
        self._own.cleanup()

    def corpus(self) -> int:
        """Read the cases that once did harm; return how many there are."""
        count = 0
        for case in self.made.corpus():
            self.made.read(case)
            count += 1
        return count

    def one(self, seed: int) -> None:
        """Read one other input, the same for the same seed."""
        self.made.read(self.made.other(random.Random(f"{self.kind} {seed}")))


def worker() -> None:
    """Read inputs one after the other in a process of its own; the corpus comes first. Prints one line of JSON."""
    kind, first, last, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    counts: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    before = 0.0
    signal.signal(signal.SIGALRM, hostile._hang)
    with Fuzzer(kind, folder) as fuzzer:
        for seed in range(first - (first == 0), last):
            (folder / "progress").write_text(str(seed))
            signal.alarm(hostile.SECONDS if seed >= 0 else 10 * hostile.SECONDS)
            try:
                counts["inputs"] += fuzzer.corpus() if seed < 0 else 1
                if seed >= 0:
                    fuzzer.one(seed)
            except BaseException as error:
                failures.append((seed, "".join(traceback.format_exception(error))[-2_000:]))
            signal.alarm(0)
            before = before or hostile.resident_mb()
    print(json.dumps({"counts": counts, "failures": failures, "grown_mb": hostile.resident_mb("VmHWM") - before}))


if __name__ == "__main__":
    worker()
