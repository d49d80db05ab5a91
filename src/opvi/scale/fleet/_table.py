"""Records of one layout by id: those used lately in memory, the others in a file."""

import tempfile
import weakref
from pathlib import Path
from typing import IO, Any

import numpy as np

Id = str | int
FIRST = 64  # records of memory to begin with; doubled as they fill up


class Table:
    """A record for each id.

    At most `hot` records are in memory. Where more are needed those used least recently go to a file without a name,
    record beside record, and come back when they are asked for; no file name is ever made from an id.

    Args:
        dtype: of a record; its field `waiting` is the number of rows that wait in it.
        hot: records in memory.
        folder: where the file lies; None for the system's folder for temporary files.
    """

    def __init__(self, dtype: np.dtype, hot: int, folder: Path | None):
        self.hot, self.folder = hot, folder
        self.records = np.zeros(min(FIRST, hot), dtype)
        self.places: dict[Id, int] = {}  # in memory: the slot; in the file: -1 - the number there
        self.cold_waiting: set[Id] = set()
        self._owner: list[Any] = [None] * len(self.records)
        self._used = np.zeros(len(self.records), np.int64)  # when; 0: free
        self._clock = 0
        self._file: IO[bytes] | None = None
        self._free_numbers: list[int] = []
        self._numbers = 0  # records in the file, free ones included

    def bring(self, ids: list[Id]) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots of these ids, distinct and at most `hot`, and which are new, with records still to fill."""
        self._clock += 1
        places = [self.places.get(name) for name in ids]
        slots = np.array([-1 if place is None else place for place in places], np.int64)
        there = slots >= 0
        self._used[slots[there]] = self._clock
        missing = np.flatnonzero(~there)
        if len(missing):
            cold = np.array([place is not None for place in places]) & ~there
            records = self._read(-1 - slots[cold])
            numbers = (-1 - slots[cold]).tolist()
            slots[missing] = self._make_room(len(missing))
            self.records[slots[cold]] = records
            self._used[slots[missing]] = self._clock
            for index in missing:
                name, slot = ids[index], int(slots[index])
                self.places[name], self._owner[slot] = slot, name
                self.cold_waiting.discard(name)
            self._free_numbers += numbers
        return slots, missing[[places[index] is None for index in missing]]

    def peek(self, ids: list[Id]) -> np.ndarray:
        """Return copies of the records of known ids; nothing moves."""
        slots = np.array([self.places[name] for name in ids], np.int64)
        out = np.empty(len(ids), self.records.dtype)
        out[slots >= 0] = self.records[slots[slots >= 0]]
        out[slots < 0] = self._read(-1 - slots[slots < 0])
        return out

    def forget(self, name: Id) -> None:
        """Drop a record."""
        place = self.places.pop(name)
        self.cold_waiting.discard(name)
        if place < 0:
            self._free_numbers.append(-1 - place)
        else:
            self._owner[place], self._used[place] = None, 0

    def waiting(self) -> list[Id]:
        """Return the ids in whose records rows wait."""
        return [
            name
            for name, place in self.places.items()
            if (name in self.cold_waiting if place < 0 else self.records["waiting"][place])
        ]

    @property
    def in_memory(self) -> int:
        """The number of records in memory."""
        return int((self._used > 0).sum())

    def _make_room(self, count: int) -> np.ndarray:
        """Return so many free slots."""
        free = np.flatnonzero(self._used == 0)
        size = len(self.records)
        if len(free) < count and size < self.hot:
            while size - len(self.records) + len(free) < count and size < self.hot:
                size = min(2 * size, self.hot)
            more = size - len(self.records)
            self.records = np.concatenate([self.records, np.zeros(more, self.records.dtype)])
            self._used = np.concatenate([self._used, np.zeros(more, np.int64)])
            self._owner += [None] * more
            free = np.flatnonzero(self._used == 0)
        if len(free) < count:
            self._cool(count - len(free))
            free = np.flatnonzero(self._used == 0)
        return free[:count]

    def _cool(self, count: int) -> None:
        """Move the records used least recently to the file; never one that is in use now."""
        used = np.where((self._used > 0) & (self._used < self._clock), self._used, np.iinfo(np.int64).max)
        slots = np.sort(np.argpartition(used, count - 1)[:count])
        reused = self._free_numbers[:count]
        new = range(self._numbers, self._numbers + count - len(reused))
        numbers = [*reused, *new]
        self._write(numbers, self.records[slots])  # a full disk raises here, and everything is still in memory
        self._free_numbers = self._free_numbers[count:]
        self._numbers += len(new)
        for slot, number in zip(slots.tolist(), numbers, strict=True):
            name = self._owner[slot]
            self.places[name], self._owner[slot], self._used[slot] = -1 - number, None, 0
            if self.records["waiting"][slot]:
                self.cold_waiting.add(name)

    def _write(self, numbers: list[int], records: np.ndarray) -> None:
        if self._file is None:
            file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - open while the table lives
            self._file = file
            weakref.finalize(self, file.close)
        for number, record in zip(numbers, records, strict=True):
            self._file.seek(number * records.itemsize)
            if self._file.write(record.tobytes()) != records.itemsize:
                raise OSError(f"the disk took only a part of a model; is {self.folder or tempfile.gettempdir()} full?")

    def _read(self, numbers: np.ndarray) -> np.ndarray:
        out = np.empty(len(numbers), self.records.dtype)
        for index, number in enumerate(numbers.tolist()):
            assert self._file is not None
            self._file.seek(number * out.itemsize)
            out[index] = np.frombuffer(self._file.read(out.itemsize), out.dtype)[0]
        return out
