"""Records by id: recently used ones in memory, all of them in SQLite; saves are atomic.

A file may come from a stranger: its schema must be the one below, to the letter, before anything else is asked of it
(so that no trigger, view or expression of theirs is ever run), no question takes more steps than the file's size
explains, and no value is taken for what its column should hold.
"""

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from opvi.running._checkpoint import CheckpointError, packed, sync_folder, unpacked
from opvi.running._saving import LockedError
from opvi.scale.fleet._alone import Fields
from opvi.scale.fleet._ids import Id, as_bytes, from_bytes
from opvi.types import Tree

APPLICATION, FORMAT = 0x6F707669, 3  # "opvi"
FIRST = 64  # records of memory to begin with; doubled as they fill up
ASKED = 500  # ids in one question to SQLite
MODELS = (
    "CREATE TABLE models (number INTEGER PRIMARY KEY, id BLOB NOT NULL UNIQUE, touched REAL NOT NULL, "
    "waiting INTEGER NOT NULL, record BLOB NOT NULL)"
)
ABOUT = "CREATE TABLE about (one INTEGER PRIMARY KEY, value BLOB NOT NULL)"
AGE = "CREATE INDEX age ON models (touched)"
SCHEMA = {
    ("table", "models", "models", MODELS),
    ("table", "about", "about", ABOUT),
    ("index", "sqlite_autoindex_models_1", "models", None),
}
LARGEST_ABOUT = 1 << 28  # bytes
STARTED = time.time() - time.monotonic()
TICKS = 10_000  # steps of SQLite between two looks at how many there were
STEPS = 10**7, 10  # that a question may take, and more for each byte of the file


class Store:
    """A record for each id, in order of first appearance.

    Reads and writes go to an array in memory that holds at most `hot` records. The others are in a SQLite file, inside
    a transaction that `save` ends: whatever happens in between, the file is as the last `save` left it. The file is
    locked against others while the store is open.

    Args:
        path: the file; None for a temporary one, created when needed and gone with the process.
        forget_after: seconds without a `put` after which a record is dropped; None keeps all.
    """

    def __init__(self, path: Path | None, forget_after: float | None):
        self.path, self.forget_after = path, forget_after
        self.about: Tree = None  # what was saved beside the records
        self.count = 0  # of records, also of those whose time is over but which nobody has missed yet
        self._stored = False  # whether any are in the file
        self._next = 0  # the number of the next id
        self._connection: Any = None
        self._left = float("inf")  # ticks until a question is taken to be endless
        self._lost = ""  # why what was not saved is gone
        self._clock = 0
        self._ahead = 0.0  # seconds by which the clock was later when the file was written
        if path is not None:
            self._open()

    def _now(self) -> float:
        """Return the time. While the process runs, nobody who sets the clock makes models expire, or live forever."""
        return steady_time() + self._ahead

    def prepare(self, dtype: np.dtype, hot: int) -> None:
        """Make room for records of this dtype."""
        self.hot = hot
        self.records = np.zeros(min(FIRST, hot), dtype)
        self.fields = Fields(self.records)
        self._places: dict[Id, int] = {}  # of those in memory
        self._owner: list[Any] = [None] * len(self.records)
        self._numbers = np.zeros(len(self.records), np.int64)
        self._used = np.zeros(len(self.records), np.int64)  # when, by the clock; 0: free
        self._touched = np.zeros(len(self.records))
        self._dirty = np.zeros(len(self.records), bool)  # not as in the file

    # --- reading and writing records ----------------------------------------------------------------

    def get(self, ids: list[Id]) -> tuple[np.ndarray, np.ndarray]:
        """Return copies of the records of distinct ids, and which of them are new (all zeros)."""
        self._settle()
        slots = np.array([self._places.get(name, -1) for name in ids], np.int64)
        out = self.records[slots]
        new = slots < 0
        if new.any():
            cold = np.flatnonzero(new)
            out[cold] = 0
            found = self._read([ids[index] for index in cold])
            known = [index for index in cold if ids[index] in found and not self._over(found[ids[index]][1])]
            if known:
                out[known] = np.frombuffer(b"".join(found[ids[index]][2] for index in known), out.dtype)
                new[known] = False
        if self.forget_after is not None:
            over = (slots >= 0) & self._over(self._touched[slots])
            out[over], new[over] = 0, True
        return out, new

    def put(self, ids: list[Id], records: np.ndarray) -> None:
        """Keep the records of distinct ids, at most `hot` of them, in memory; if this raises, none is kept."""
        self._settle()
        self._clock += 1
        now = self._now() if self.forget_after is not None else 0.0
        slots = np.array([self._places.get(name, -1) for name in ids], np.int64)
        self._used[slots[slots >= 0]] = self._clock
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            names = [ids[index] for index in missing]
            known = self._read(names, records=False)
            free = self._make_room(len(missing))
            slots[missing] = free
            for name, slot in zip(names, free.tolist(), strict=True):
                self._places[name], self._owner[slot] = slot, name
                if name in known:
                    self._numbers[slot] = known[name][0]
                else:
                    self._numbers[slot], self._next, self.count = self._next, self._next + 1, self.count + 1
        self.records[slots], self._used[slots] = records, self._clock
        self._touched[slots], self._dirty[slots] = now, True

    def place(self, name: object) -> int | None:
        """Return where in `records` the record of an id is; None if it is not in memory, or its time is over."""
        if type(name) is not int and type(name) is not str:
            return None
        slot = self._places.get(name)
        return None if slot is None or (self.forget_after is not None and self._over(self._touched[slot])) else slot

    def touch(self, slot: int) -> None:
        """Note that a record in memory was changed there. Of waiting rows only the time has to be noted."""
        self._clock += 1
        self._used[slot] = self._clock
        self._dirty[slot] = True
        if self.forget_after is not None:
            self._touched[slot] = self._now()

    @contextmanager
    def through(self) -> Iterator[Callable[[list[Id], np.ndarray], None]]:
        """Yield a `put` for more records than memory holds: straight to the file, and none of them if it raises."""
        self._settle()
        before, written = (self.count, self._next), list[Id]()
        self._run("SAVEPOINT learn")

        def put(ids: list[Id], records: np.ndarray) -> None:
            known = self._read(ids, records=False)
            numbers = []
            for name in ids:
                slot = self._places.get(name)
                if slot is not None:
                    numbers.append(int(self._numbers[slot]))
                elif name in known:
                    numbers.append(known[name][0])
                else:
                    numbers.append(self._next)
                    self._next, self.count = self._next + 1, self.count + 1
            self._write(ids, np.array(numbers), np.full(len(ids), self._now()), records)
            written.extend(ids)

        try:
            yield put
        except BaseException:
            self._run("ROLLBACK TO learn")
            self.count, self._next = before
            raise
        finally:
            self._run("RELEASE learn")
        for name in written:  # what memory holds of them is older
            slot = self._places.pop(name, None)
            if slot is not None:
                self._owner[slot], self._used[slot], self._dirty[slot] = None, 0, False

    def forget(self, name: Id) -> None:
        """Drop a record."""
        self._settle()
        if self._stored:
            self._run("DELETE FROM models WHERE id = ?", (as_bytes(name),))
        slot = self._places.pop(name, None)
        if slot is not None:
            self._owner[slot], self._used[slot], self._dirty[slot] = None, 0, False
        self.count -= 1

    def ids(self, waiting: bool = False) -> list[Id]:
        """Return all ids in order of first appearance, or those with waiting rows."""
        self._settle()
        found: dict[Id, int] = {}
        if self._stored:
            over = -1.0 if self.forget_after is None else self._now() - self.forget_after
            query = "SELECT id, number FROM models WHERE touched >= ?" + (" AND waiting > 0" if waiting else "")
            try:
                found = {from_bytes(name): number for name, number in self._run(query, (over,))}
            except (ValueError, AttributeError) as error:
                raise CheckpointError(f"{self.path} is damaged: a model has no id ({error}). Use a copy.") from None
        for name, slot in self._places.items():
            if (waiting and not self.records["waiting"][slot]) or self._over(self._touched[slot]):
                found.pop(name, None)
            else:
                found[name] = int(self._numbers[slot])
        return sorted(found, key=found.__getitem__)

    @property
    def in_memory(self) -> int:
        """The number of records in memory."""
        return len(self._places)

    # --- the file -----------------------------------------------------------------------------------

    def save(self, about: Tree) -> None:
        """Write all changes since the last save together with `about`, in one transaction."""
        self._settle()
        slots = np.flatnonzero(self._dirty)
        self._write_slots(slots)
        if self.forget_after is not None:
            over = self._now() - self.forget_after
            self.count -= self._run("DELETE FROM models WHERE touched < ?", (over,))
            for name in [name for name, slot in self._places.items() if self._touched[slot] < over]:
                slot = self._places.pop(name)
                self._owner[slot], self._used[slot] = None, 0
        self._run("INSERT OR REPLACE INTO about VALUES (1, ?)", (b"".join(packed(about)),))
        self._run("COMMIT")
        self._run("BEGIN IMMEDIATE")
        self._dirty[slots] = False
        self.about = about

    def copy(self, path: Path) -> None:
        """Copy everything saved to another file, which appears once it is complete."""
        import sqlite3

        self._run("COMMIT")  # of nothing: `save` came before, but an open transaction cannot be copied
        part = path.with_name(f".{path.name}.part")
        part.unlink(missing_ok=True)
        other = sqlite3.connect(part)
        try:
            self._connection.backup(other)
        finally:
            other.close()
            self._run("BEGIN IMMEDIATE")
        part.replace(path)
        sync_folder(path.parent)

    def close(self) -> None:
        """Release the file; anything not saved is lost."""
        if self._connection is not None:
            self._connection.close()  # rolls back
        self._connection, self._lost = None, "this fleet is closed. Open it again: `opvi.Fleet.load(path, sampler)`."

    def _open(self) -> None:
        import sqlite3

        path = self.path
        if path is not None and path.is_dir():
            old = " of a format that this opvi does not read. Learn again" if (path / "fleet.opvi").exists() else ""
            raise CheckpointError(f"{path} is a folder{old}, but a fleet is one file. Choose another path.")
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent} is not a folder. Make it first: `mkdir`.")
        connection = sqlite3.connect(path or "", isolation_level=None, check_same_thread=False, timeout=0)
        connection.text_factory = lambda text: text.decode(errors="replace")  # of a stranger's schema
        try:
            connection.set_progress_handler(self._tick, TICKS)
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute(f"PRAGMA journal_mode = {'WAL' if path else 'DELETE'}")
            connection.execute(f"PRAGMA synchronous = {'NORMAL' if path else 'OFF'}")
            connection.execute("PRAGMA wal_autocheckpoint = 10000")  # pages: small saves do not wait for the disk
            connection.execute("PRAGMA journal_size_limit = 67108864")
            connection.execute("BEGIN IMMEDIATE")
            found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            schema = set(connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100"))
            if not schema:
                for line in (
                    MODELS,
                    ABOUT,
                    f"PRAGMA application_id = {APPLICATION}",
                    f"PRAGMA user_version = {FORMAT}",
                ):
                    connection.execute(line)
            elif found != [APPLICATION, FORMAT]:
                newer = " It was written by a newer opvi." if found[0] == APPLICATION and found[1] > FORMAT else ""
                raise CheckpointError(f"{path} is not a fleet that this opvi can read.{newer} Choose another path.")
            elif odd := (schema - {("index", "age", "models", AGE)}) ^ SCHEMA:
                names = ", ".join(sorted({str(name)[:60] for _, name, *_ in odd}))
                raise CheckpointError(
                    f"{path} is not a fleet as opvi makes them: its tables differ ({names}), so nothing in it was read."
                )
            if self.forget_after is not None:
                connection.execute(AGE.replace("INDEX", "INDEX IF NOT EXISTS"))
            self._limit(connection)
            about = connection.execute(
                f"SELECT value FROM about WHERE one = 1 AND typeof(value) = 'blob' AND length(value) < {LARGEST_ABOUT}"
            ).fetchone()
            self.about = about and unpacked(about[0], Path(path or ""))
            whole, count, last = connection.execute("SELECT count(*), count(id), max(number) FROM models").fetchone()
            if count != whole or (whole and about is None):
                raise CheckpointError(f"{path} is damaged: it does not say what its models are. Use a copy.")
            if self.forget_after is not None:
                latest = connection.execute("SELECT max(touched) FROM models").fetchone()[0]
                self._ahead = max(0.0, latest - steady_time()) if type(latest) is float else 0.0
            self._left = float("inf")
        except (sqlite3.Error, UnicodeDecodeError) as error:  # SQLite's own words quote a schema that is no text
            connection.close()
            if "locked" in str(error):
                raise LockedError(
                    f"{path} is in use by another fleet, here or in another process. Close that one, or choose another "
                    "path."
                ) from None
            raise CheckpointError(f"{path} is not a saved fleet, or is damaged: {error}.") from None
        except BaseException:
            connection.close()
            raise
        self._connection, self._stored = connection, count > 0
        self.count += count
        self._next = max(self._next, 0 if last is None else last + 1)

    def _limit(self, connection: Any) -> None:
        """Let the next question take as many steps as the file's size explains."""
        pages, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
        least, each = STEPS
        self._left = (least + each * pages * size) // TICKS

    def _tick(self) -> bool:
        """Return whether a question has taken too many steps; SQLite then ends it with an error."""
        self._left -= 1
        return self._left < 0

    def _run(self, query: str, given: Any = (), many: bool = False) -> Any:
        """Return the rows of a query, or how many rows a statement changed.

        If it fails and SQLite has undone more than the statement, the store becomes unusable.
        """
        import sqlite3

        if self._lost:
            raise RuntimeError(self._lost)
        if self._connection is None:
            self._open()
        reads = query.startswith("SELECT")
        try:
            if reads:
                self._limit(self._connection)
            done = (self._connection.executemany if many else self._connection.execute)(query, given)
            return done.fetchall() if reads else done.rowcount
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not self._connection.in_transaction and query != "BEGIN IMMEDIATE":
                self._lost = (
                    f"what was learnt after the last save is gone, because the disk failed ({error}). Open the fleet "
                    "again, and continue from its cursor."
                )
            raise OSError(f"{self.path or 'the temporary file of a fleet'}: {error}") from error
        finally:
            self._left = float("inf")

    def _read(self, ids: list[Id], records: bool = True) -> dict[Id, tuple[int, float, bytes]]:
        """Return number, time and record of the ids that are in the file."""
        found: dict[Id, tuple[int, float, bytes]] = {}
        if not self._stored:
            return found
        what = "record" if records else "NULL"
        for begin in range(0, len(ids), ASKED):
            some = {as_bytes(name): name for name in ids[begin : begin + ASKED]}
            marks = ",".join("?" * len(some))
            for name, number, touched, data in self._run(
                f"SELECT id, number, touched, {what} FROM models WHERE id IN ({marks})", list(some)
            ):
                if type(touched) is not float:
                    raise CheckpointError(self._damaged(some[name]))
                found[some[name]] = number, touched, self._checked(data, some[name]) if records else b""
        return found

    def _checked(self, data: bytes, name: Id) -> bytes:
        """Return a record without its checksum, which covers its id: a record of another model is damage, too."""
        if type(data) is not bytes or len(data) != self.records.itemsize + 4:
            raise CheckpointError(self._damaged(name))
        if checksum(name, data[:-4]) != data[-4:]:
            raise CheckpointError(self._damaged(name))
        return data[:-4]

    def _damaged(self, name: Id) -> str:
        return f"{self.path}: the model of {name!r} is damaged. Forget it, or use a copy of the file."

    def _write(self, ids: list[Id], numbers: np.ndarray, touched: np.ndarray, records: np.ndarray) -> None:
        """Write records to the file."""
        waiting, data, size = records["waiting"].tolist(), records.tobytes(), records.itemsize
        blobs = [data[i * size : (i + 1) * size] for i in range(len(ids))]
        rows = (
            (number, as_bytes(name), when, rest, blob + checksum(name, blob))
            for number, name, when, rest, blob in zip(
                numbers.tolist(), ids, touched.tolist(), waiting, blobs, strict=True
            )
        )
        self._run(
            "INSERT INTO models VALUES (?, ?, ?, ?, ?) ON CONFLICT (number) DO UPDATE SET touched = excluded.touched, "
            "waiting = excluded.waiting, record = excluded.record",
            rows,
            many=True,
        )
        self._stored = self._stored or bool(ids)

    def _write_slots(self, slots: np.ndarray) -> None:
        slots = slots[np.argsort(self._numbers[slots])]  # neighbours share pages
        for begin in range(0, len(slots), 1 << 14):
            some = slots[begin : begin + (1 << 14)]
            ids = [self._owner[slot] for slot in some.tolist()]
            self._write(ids, self._numbers[some], self._touched[some], self.records[some])

    def _settle(self) -> None:
        """Bring records up to date with rows that were learnt where they lie."""
        self.fields.settle()
        if self.fields.settled:
            self._clock += 1
            self._used[self.fields.settled], self._dirty[self.fields.settled] = self._clock, True
            self.fields.settled = []

    # --- memory -------------------------------------------------------------------------------------

    def _over(self, touched: Any) -> Any:
        """Return whether a record last used at that time has expired."""
        return self.forget_after is not None and touched < self._now() - self.forget_after

    def _make_room(self, count: int) -> np.ndarray:
        """Return this many free slots, never evicting one that was used in the current call."""
        free = np.flatnonzero(self._used == 0)
        size = len(self.records)
        while len(free) + size - len(self.records) < count and size < self.hot:
            size = min(2 * size, self.hot)
        more = size - len(self.records)
        if more:
            self.records, self._numbers, self._used, self._touched, self._dirty = (
                np.concatenate([old, np.zeros(more, old.dtype)])
                for old in (self.records, self._numbers, self._used, self._touched, self._dirty)
            )
            self._owner += [None] * more
            self.fields = Fields(self.records)
            free = np.flatnonzero(self._used == 0)
        if len(free) < count:
            used = np.where((self._used > 0) & (self._used < self._clock), self._used, np.iinfo(np.int64).max)
            oldest = np.argpartition(used, count - len(free) - 1)[: count - len(free)]
            self._write_slots(oldest[self._dirty[oldest]])  # a full disk raises here: everything is still in memory
            for slot in oldest.tolist():
                del self._places[self._owner[slot]]
                self._owner[slot] = None
            self._used[oldest], self._dirty[oldest] = 0, False
            free = np.flatnonzero(self._used == 0)
        return free[:count]


def steady_time() -> float:
    """Return the seconds since 1970 by the clock as it was when this module was loaded."""
    return STARTED + time.monotonic()


def checksum(name: Id, record: bytes) -> bytes:
    """Return the checksum of a record and of the id that it belongs to."""
    return zlib.crc32(record, zlib.crc32(as_bytes(name))).to_bytes(4, "little")
