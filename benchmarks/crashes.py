"""Power cuts at random moments: what a disk may then hold, and what becomes of it. `python -m benchmarks.crashes`.

A run with predictions, a fleet and a server are recorded once, call by call (`faults.c`). A crash point is a moment in
such a recording and one of the states in which a disk may be left then: what was synced is there, and of everything
since then, any part: writes are missing, reordered or torn into sectors of 512 bytes, files have their new length and
zeros or rubbish in place of what was written, and names of files are missing, kept, or changed in another order.
Nothing is taken to be on the disk because file systems usually do it: a new file's name is there once its folder is
synced.

Each state is put on a disk and opened. It must be one that was saved, bit for bit, with all that was acknowledged, or
be refused; of some, the rest is learnt and must end with the bits of an undisturbed run.
"""

import argparse
import contextlib
import ctypes
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import faults, fleet_kills, kills
from benchmarks.machine import machine

SECTOR = 512
HEAD = struct.Struct("=cHHqI")  # of a call in a recording
WHOLE = 100  # one of so many states is resumed to its end
ROWS, SAVES = 300, 60  # of the run, and of the fleet
KINDS = ("run", "fleet", "serve")


class Call(NamedTuple):
    """Something that happened to files, or that something was acknowledged."""

    kind: str  # W writes, T truncates, F syncs, C creates, M makes a folder, R renames, U deletes, A acknowledges
    path: str
    to: str
    place: int
    data: bytes


def calls_of(recording: Path) -> list[Call]:
    """Return the calls in a recording."""
    data, at, calls = recording.read_bytes(), 0, []
    while at < len(data):
        kind, first, second, place, size = HEAD.unpack_from(data, at)
        at += HEAD.size
        path = data[at : at + first].decode()
        to = data[at + first : at + first + second].decode()
        at += first + second
        more = size if kind == b"W" else 0
        calls.append(Call(kind.decode(), path, to, place, data[at : at + more]))
        at += more
    return calls


class File(NamedTuple):
    """A file, by whatever name."""

    before: bytes
    calls: list[tuple[int, Call]]
    synced: list[int]  # when


class Disk:
    """What a disk may hold after some of the calls of a recording.

    Args:
        calls: the recording.
        before: the files that were there, and are safe.
    """

    def __init__(self, calls: list[Call], before: dict[str, bytes]):
        self.calls = calls
        self.files = [File(data, [], []) for data in before.values()]
        names = {path: number for number, path in enumerate(before)}
        self.before = dict(names)
        self.entries: dict[str, list[tuple[int, str, str, int]]] = defaultdict(list)  # by folder: changes of names
        self.synced: dict[str, list[int]] = defaultdict(list)  # by folder: when
        for index, call in enumerate(calls):
            folder = str(Path(call.path).parent)
            if call.kind == "C" and call.path not in names:
                names[call.path] = len(self.files)
                self.files.append(File(b"", [], []))
                self.entries[folder].append((index, "link", call.path, names[call.path]))
            elif call.kind == "R":
                number = names.pop(call.path, None)
                if number is not None:
                    names[call.to] = number
                    self.entries[folder].append((index, f"from {call.path}", call.to, number))
            elif call.kind == "U" and names.pop(call.path, None) is not None:
                self.entries[folder].append((index, "unlink", call.path, -1))
            elif call.kind == "M":
                self.entries[folder].append((index, "folder", call.path, -1))
            elif call.kind in "WT" and call.path in names:
                self.files[names[call.path]].calls.append((index, call))
            elif call.kind == "F" and call.path in names:
                self.files[names[call.path]].synced.append(index)
            elif call.kind == "F":
                self.synced[call.path].append(index)

    def after(self, moment: int, chance: random.Random) -> dict[str, bytes | None]:
        """Return names and contents (None for a folder) that may be found if the power fails before a call."""
        found: dict[str, int] = dict(self.before)
        folders = {str(Path(path).parent) for path in self.before}
        for folder, changes in self.entries.items():
            safe = max((at for at in self.synced[folder] if at < moment), default=-1)
            sure = [change for change in changes if change[0] < safe]
            for _, what, path, number in [*sure, *_some(changes, safe, moment, chance)]:
                if what == "folder":
                    folders.add(path)
                elif what == "unlink":
                    found.pop(path, None)
                else:
                    found.pop(what.removeprefix("from "), None)
                    found[path] = number
        out: dict[str, bytes | None] = dict.fromkeys(folders)
        for path, number in found.items():
            out[path] = self._content(self.files[number], moment, chance)
        return {path: data for path, data in out.items() if self._is_there(path, folders)}

    def _is_there(self, path: str, folders: set[str]) -> bool:
        made = {path for changes in self.entries.values() for _, what, path, _ in changes if what == "folder"}
        return all(str(above) in folders for above in Path(path).parents if str(above) in made)

    def written(self, number: int, moment: int) -> bytes:
        """Return what a file held at a moment, for those who did not lose power."""
        data = bytearray(self.files[number].before)
        for at, call in self.files[number].calls:
            if at < moment:
                _apply(data, call, None, random.Random(0))
        return bytes(data)

    @staticmethod
    def _content(file: File, moment: int, chance: random.Random) -> bytes:
        safe = max((at for at in file.synced if at < moment), default=-1)
        data = bytearray(file.before)
        for at, call in file.calls:
            if at < safe:
                _apply(data, call, None, chance)
        whole = len(data)
        for at, call in file.calls:  # the length may be known to the disk before the content is
            if safe <= at < moment:
                whole = call.place if call.kind == "T" else max(whole, call.place + len(call.data))
        torn = chance.choice([None, 0.5, 0.9])
        for _, call in _some(file.calls, safe, moment, chance):
            _apply(data, call, torn, chance)
        if whole > len(data) and chance.random() < 0.3:
            more = whole - len(data)
            data += bytes(more) if chance.random() < 0.7 else chance.randbytes(more)
        return bytes(data)


def _some(changes: list[Any], safe: int, moment: int, chance: random.Random) -> list[Any]:
    """Return some of the changes that are not safe: none, all, the first ones, or any."""
    loose = [change for change in changes if safe <= change[0] < moment]
    how = chance.random()
    if how < 0.2:
        return []
    if how < 0.4:
        return loose
    if how < 0.6:
        return loose[: chance.randrange(len(loose) + 1)]
    return [change for change in loose if chance.random() < 0.5]


def _apply(data: bytearray, call: Call, torn: float | None, chance: random.Random) -> None:
    """Do a write or a truncation; with `torn`, each sector is written with that probability."""
    if call.kind == "T":
        del data[call.place :]
        data.extend(bytes(call.place - len(data)))
        return
    end = call.place + len(call.data)
    for begin in range(call.place - call.place % SECTOR, end, SECTOR):
        low, high = max(begin, call.place), min(begin + SECTOR, end)
        if torn is None or chance.random() < torn:
            data.extend(bytes(max(0, high - len(data))))
            data[low:high] = call.data[low - call.place : high - call.place]


def put(state: dict[str, bytes | None]) -> None:
    """Write a state to a disk."""
    for path, data in sorted(state.items()):
        if data is None:
            Path(path).mkdir(parents=True, exist_ok=True)
        else:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_bytes(data)


# --- what is recorded ---------------------------------------------------------------------------


def learn(table: Path, folder: Path) -> int:
    return faults.learn(table, folder, folder.parent)[0]


def record(kind: str, library: Path, work: Path) -> None:
    """Do what is recorded, in a process with the library preloaded."""
    shim = ctypes.CDLL(str(library))
    folder, into = str(work / kind), str(work / f"{kind}.calls")
    begin = lambda: shim.fault_record(folder.encode(), into.encode())  # noqa: E731
    {"run": _record_run, "fleet": _record_fleet, "serve": _record_serve}[kind](shim, begin, work)
    shim.fault_record(folder.encode(), None)


def _record_run(shim: Any, begin: Callable[[], None], work: Path) -> None:
    from opvi.app.learn import _learner
    from opvi.running import _saving

    _learner.ROWS, _saving.LARGEST_SHARE = 40, float("inf")  # save after every few rows
    kills.write_table(work / "table.csv", ROWS)
    lines = (work / "table.csv").read_text().splitlines()
    for place in range(30, ROWS, 50):
        lines[place] = "broken" + lines[place][lines[place].index(",") :]
    (work / "table.csv").write_text("\n".join(lines) + "\n")
    (work / "run").mkdir()
    begin()
    assert learn(work / "table.csv", work / "run" / "model") == 0


def _record_fleet(shim: Any, begin: Callable[[], None], work: Path) -> None:
    (work / "fleet").mkdir()
    begin()
    saved = {}
    ids, X, y = fleet_kills.stream(7 * SAVES)
    for life in range(3):
        with fleet_kills.fleet(work / "fleet" / "f", 20) as made:
            made._store._run("PRAGMA wal_autocheckpoint = 8")  # pages: so that the file itself is written, too
            for save in range(SAVES // 3):
                end = 7 * (save + 1 + life * SAVES // 3)
                made.learn(ids[end - 7 : end], (X[end - 7 : end], y[end - 7 : end]))
                made.save(cursor=end)
                saved[end] = bits_of(made._store)
                shim.fault_mark(ctypes.c_int64(end))
    (work / "fleet.json").write_text(json.dumps(saved))


def _record_serve(shim: Any, begin: Callable[[], None], work: Path) -> None:
    from opvi.app.serve import _writer

    _writer.EVERY = 0.0
    begun, rows = faults.begun_run(work)
    shutil.copytree(begun, work / "serve")
    begin()
    client = faults.Client(rows)
    client.told = lambda number: shim.fault_mark(ctypes.c_int64((number + 1) * faults.TOGETHER))
    assert not client.send(work / "serve")


def bits_of(store: Any) -> str:
    """Return a hash of all records of a fleet."""
    import hashlib

    names = sorted(store.ids(), key=repr)
    return hashlib.sha256(repr(names).encode() + store.get(names)[0].tobytes()).hexdigest()


# --- what must hold -----------------------------------------------------------------------------


class WrongError(AssertionError):
    """A state that was never saved, or lacks what was acknowledged."""


def expect(sound: object, words: str) -> None:
    if not sound:
        raise WrongError(words)


class Checks:
    """Opens states of one kind and says what they were."""

    def __init__(self, work: Path, kind: str):
        self.work, self.kind, self.top = work, kind, work / kind
        self.folder = self.top / "model" if kind == "run" else self.top
        self.calls = calls_of(work / f"{kind}.calls")
        before = {}
        if kind == "serve":
            paths = (path for path in (work / "begun").rglob("*") if path.is_file())
            before = {str(self.folder / path.relative_to(work / "begun")): path.read_bytes() for path in paths}
        self.disk = Disk(self.calls, before)
        shutil.rmtree(self.top)
        self.saved = {  # what every file with a checkpoint holds, by its name
            Path(path).name: data for path, data in before.items() if path.endswith(".opvi")
        }
        for entries in self.disk.entries.values():
            for at, what, path, number in entries:
                if path.endswith(".opvi") and what != "unlink":
                    self.saved[Path(path).name] = self.disk.written(number, at)
        self.expected: Any = None
        getattr(self, f"begin_{kind}")()

    # --- a run

    def begin_run(self) -> None:
        self.table = self.work / "table.csv"
        assert learn(self.table, self.folder) == 0
        self.expected = kills.result(self.table, self.folder), (self.top / faults.PREDICTIONS).read_bytes()
        self.rejected = (self.folder / "rejected.jsonl").read_bytes()
        shutil.rmtree(self.top)

    def durable(self, moment: int) -> str:
        """Return the name of the last checkpoint that was synced with its folder."""
        kept = str(self.folder / "checkpoints")
        safe = max((at for at in self.disk.synced[kept] if at < moment), default=-1)
        names = [
            Path(path).name
            for at, what, path, _ in self.disk.entries[kept]
            if at < safe and path.endswith(".opvi") and what != "unlink"
        ]
        return max([*names, *(Path(path).name for path in self.disk.before if path.endswith(".opvi"))], default="")

    def checkpoint(self, moment: int) -> tuple[Any, str]:
        """Return the newest checkpoint, which must be one that was saved, and at least the last durable one."""
        from opvi.running import Checkpoints

        kept = Checkpoints(self.folder / "checkpoints")
        tree = kept.newest()
        durable = self.durable(moment)
        expect(tree is not None or not durable, f"{durable} was durable, and none is found")
        if tree is None:
            return None, "nothing saved yet"
        name = f"{tree['saves']:015d}.opvi"
        expect((self.folder / "checkpoints" / name).read_bytes() == self.saved[name], f"{name} has other bits")
        expect(name >= durable, f"{durable} was durable, and {name} is found")
        return tree, "damage passed over" if kept.damaged else "as saved"

    def check_run(self, moment: int, whole: bool) -> str:
        from opvi.app.learn import RunDirectory, RunError

        run = RunDirectory(self.folder)
        tree, how = self.checkpoint(moment)
        if tree is None:
            how = how if run.exists else "nothing there yet"
        else:
            try:
                expect(run.about()["schema"]["target"] == "y", "run.json says something else")
            except RunError as error:
                raise WrongError(f"a checkpoint without its run.json: {error}") from None
            size = tree["rejected"]["size"]
            expect((self.folder / "rejected.jsonl").read_bytes()[:size] == self.rejected[:size], "rejected rows")
            expect(size <= (self.folder / "rejected.jsonl").stat().st_size, "rejected rows are missing")
            position = tree["told"]["position"]
            told = (self.top / faults.PREDICTIONS).read_bytes()
            expect(told[:position] == self.expected[1][:position] and len(told) >= position, "predictions")
        if whole:
            expect(learn(self.table, self.folder) == 0, "the run does not resume")
            found = kills.result(self.table, self.folder)
            expect(kills.same(found, self.expected[0]), "the run ends with other bits")
            expect((self.top / faults.PREDICTIONS).read_bytes() == self.expected[1], "it ends with other predictions")
        return how

    # --- a fleet

    def begin_fleet(self) -> None:
        self.bits = {int(cursor): bits for cursor, bits in json.loads((self.work / "fleet.json").read_text()).items()}
        made = fleet_kills.fleet(None, 20)
        ids, X, y = fleet_kills.stream(7 * SAVES)
        made.learn(ids, (X, y))
        self.dtype = made._keyed.dtype
        self.expected = bits_of(made._store)

    def check_fleet(self, moment: int, whole: bool) -> str:
        from opvi.running import CheckpointError
        from opvi.scale.fleet._store import Store

        path = self.folder / "f"
        if not path.exists():
            return "nothing there yet"
        try:
            store = Store(path, None)
        except CheckpointError:
            return "refused"
        store.prepare(self.dtype, 1000)
        cursor = store.about and store.about["cursor"]
        try:
            expect(bits_of(store) == self.bits[cursor] if cursor else store.count == 0, f"other bits at row {cursor}")
        except CheckpointError:
            return "refused"
        finally:
            store.close()
        last = max((call.place for call in self.calls[:moment] if call.kind == "A"), default=0)
        if whole:
            with fleet_kills.fleet(path, 20) as made:
                ids, X, y = fleet_kills.stream(7 * SAVES)
                at = made.cursor or 0
                made.learn(ids[at:], (X[at:], y[at:]))
                expect(bits_of(made._store) == self.expected, "the fleet ends with other bits")
        return "as last saved" if (cursor or 0) >= last else "as saved before"

    # --- a server

    def begin_serve(self) -> None:
        _, self.rows = faults.begun_run(self.work, "again")
        self.texts = [str(row["y"]) for row in self.rows[: faults.ASKED * faults.TOGETHER]]
        shutil.copytree(self.work / "begun", self.folder)
        self.expected = self.ended()
        shutil.rmtree(self.top)

    def ended(self) -> Any:
        """Send all requests, as a client does that repeats what was not answered; return the bits at the end."""
        import jax

        from opvi.app.learn import RunDirectory
        from opvi.app.learn._predict import learnt

        client = faults.Client(self.rows)
        expect(client.send(self.folder) == "" and all(client.acknowledged), "the server does not go on")
        known = learnt(RunDirectory(self.folder))
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(known.state())]
        return [*leaves, known.rows, (self.folder / "rejected.jsonl").read_bytes()]

    def check_serve(self, moment: int, whole: bool) -> str:
        from opvi.app.serve._log import Log, LogError

        tree, how = self.checkpoint(moment)
        row = next((place["row"] for place in tree["places"] if place["name"] == "opvi serve"), 0)
        known = max((call.place for call in self.calls[:moment] if call.kind == "A"), default=0)
        size = tree["rejected"]["size"]
        expect((self.folder / "rejected.jsonl").stat().st_size >= size, "rejected rows are missing")
        try:
            log = Log(self.folder / "log", row)
        except LogError:
            return "refused"
        found = [one["y"] for entry in log.after(0) for one in entry.read()]
        rows = log.rows
        log.close()
        expect(rows >= known, f"{known} rows were acknowledged, and {rows} are there")
        expect(found == self.texts[rows - len(found) : rows], "the log holds other rows")
        expect(rows - len(found) <= row, "the log begins too late")
        if whole:
            expect(self.ended() == self.expected, "the server ends with other bits")
        return how


def simulate(work: Path, kind: str, points: int, seed: int) -> dict[str, Any]:
    """Open so many states of a kind; return what they were."""
    checks, chance = Checks(work, kind), random.Random(seed)
    outcomes, wrong, whole = Counter[str](), [], 0
    began = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        for number in range(points):
            moment = chance.randrange(1, len(checks.calls) + 1)
            put(checks.disk.after(moment, chance))
            resumed = number % WHOLE == 0
            whole += resumed
            try:
                outcomes[getattr(checks, f"check_{kind}")(moment, resumed)] += 1
            except (WrongError, OSError) as error:  # or a file that is not there
                wrong.append({"number": number, "moment": moment, "why": str(error)[:300]})
            shutil.rmtree(checks.top, ignore_errors=True)
    return {
        "calls": len(checks.calls),
        "points": points,
        "outcomes": dict(sorted(outcomes.items())),
        "resumed_to_the_end": whole,
        "wrong": len(wrong),
        "seconds": round(time.perf_counter() - began, 1),
        "examples": wrong[:10],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crashes", description=__doc__)
    parser.add_argument("--points", type=int, default=10_000, help="crash points of each kind")
    parser.add_argument("--only", choices=KINDS, help="one kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for crash-points.json")
    parser.add_argument("--record", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        kind, library, work = options.record
        return record(kind, Path(library), Path(work))
    found = crash([options.only] if options.only else list(KINDS), options.points, options.seed)
    print(json.dumps(found, indent=1))
    if options.out:
        about = {"machine": machine("python -m benchmarks.crashes"), "result": found}
        (options.out / "crash-points.json").write_text(json.dumps(about, indent=1) + "\n")
    sys.exit(any(one["wrong"] for one in found.values()))


def crash(kinds: list[str], points: int, seed: int = 0) -> dict[str, Any]:
    """Record each kind, and open so many states of it."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    found = {}
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        work = Path(folder)
        library = faults.build(work)
        for kind in kinds:
            command = [sys.executable, "-m", "benchmarks.crashes", "--record", kind, str(library), str(work)]
            subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(library)}, check=True, capture_output=True)
            found[kind] = simulate(work, kind, points, seed)
    return found


if __name__ == "__main__":
    main()
