"""A fleet: one model for each id, all of them advanced together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Predictive
from opvi.running._rows import OnBad, as_rows, joined, row_count, taken, without_bad_rows
from opvi.scale.fleet import _files as files
from opvi.scale.fleet import _programs as programs
from opvi.scale.fleet._rows import as_arrays, by_row, checked_id, checked_ids, filled_up, hashed, is_id
from opvi.scale.fleet._table import Id, Table
from opvi.scale.fleet._workers import Workers
from opvi.types import Batch, Data, Info, Key, Sampler, Seed, Start, State, Tree, as_key

MEMORY = 1 << 30  # bytes of models in memory, unless the caller says how many
ROWS = 1 << 18  # learnt at once; a longer call is cut


class Learnt(NamedTuple):
    """What a call of `learn` did: one entry per round. The rounds of one id are in order."""

    ids: list[Id]
    info: Info | None  # the sampler's, leaves [rounds, ...]; None if there was no round


class Fleet:
    r"""Thousands of independent streams: one model for each id, made when its first row arrives.

    Rows of many ids come in any order. Those of one id wait until there are `batch_size` of them, and are then learnt
    as one round. Every model is what it would be alone, as if the other streams were not there:

    $$x^{(m)}_{t} = \mathrm{step}\big(k_m, x^{(m)}_{t-1}, D^{(m)}_t\big), \qquad
      k_m = \mathrm{fold}(k, \mathrm{hash}(m)), \quad x^{(m)}_0 = \mathrm{init}(k_m)$$

    `opvi.run(sampler, opvi.stream(rows, batch_size), fleet.key(id), state=fleet.start(id))` gives the same bits on a
    CPU with `lanes=1`, and the same numbers up to rounding with more lanes. One thread at a time may use a fleet.

    Args:
        sampler: any, e.g. `opvi.regressor(3, hidden=())`.
        key: a JAX key or an integer seed.
        batch_size: rows of a model that make a round; 1 learns every row at once.
        particles: what `sampler.init` takes, for every model: how many to draw (the sampler's usual number if
            omitted), or the particles themselves.
        on_bad: "raise" refuses rows with NaN, infinity, a number beyond 1e18 or another shape, before anything is
            learnt; "skip" leaves them out and counts them in `skipped`.
        hot: how many models stay in memory; by default as many as fit 1 GiB. The others lie in a file until a row of
            theirs arrives.
        folder: where that file lies, by default among the system's temporary files. It is gone when the fleet is:
            `save` keeps a fleet.
        lanes: models that go side by side, by vmap. By default 1 on a CPU, where a loop inside the compiled program,
            shared by all cores, is nearly as fast and keeps the bits of a model run alone, and 1,024 on an accelerator.
            Samplers that factorise matrices take 1 lane and one core at a time on a CPU.
    """

    def __init__(
        self,
        sampler: Sampler,
        key: Seed,
        *,
        batch_size: int = 20,
        particles: Start = None,
        on_bad: OnBad = "raise",
        hot: int | None = None,
        folder: str | Path | None = None,
        lanes: int | None = None,
    ):
        for name, value in (("batch_size", batch_size), ("hot", hot), ("lanes", lanes)):
            least = isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1
            if not least and (value is not None or name == "batch_size"):
                raise ValueError(f"`{name}` is {value!r}, but must be a whole number of at least 1.")
        if on_bad not in ("raise", "skip"):
            raise ValueError(f'`on_bad` is {on_bad!r}, but must be "raise" or "skip".')
        if not hasattr(sampler, "step"):
            raise TypeError(
                f"`sampler` is a {type(sampler).__name__}, but a fleet needs a sampler, e.g. `opvi.regressor(3)`."
            )
        if folder is not None and not Path(folder).is_dir():
            raise FileNotFoundError(f"`folder` is {str(folder)!r}, which is not a folder. Make it first: `mkdir`.")
        self.sampler, self.batch_size, self.on_bad = sampler, int(batch_size), on_bad
        self.skipped = 0  # bad rows left out
        self.diverged = 0  # rounds whose update was not finite: those models stayed as they were
        key = as_key(key)
        self._key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
        self._particles, self._hot = particles, hot
        self._folder = None if folder is None else Path(folder)
        self._workers = Workers(sampler, self._key, particles, lanes)
        self._state, self._dtype = self._workers.state, self._workers.dtype  # shapes of one state; of particles, rows
        self._table: Any = None  # a `Table`, made with the first rows, whose shapes it needs
        self._rows: Data = None  # the first rows' layout: no rows, but leaves with their shapes and dtypes

    # --- asking -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, name: object) -> bool:
        return self._table is not None and is_id(name) and name in self._table.places

    def __repr__(self) -> str:
        held = self._table.in_memory if self._table else 0
        return (
            f"<opvi.Fleet of {len(self):,} models, {held:,} in memory and {len(self) - held:,} on disk; "
            f"batches of {self.batch_size} rows>"
        )

    @property
    def ids(self) -> list[Id]:
        """The ids of all models, in order of first sight."""
        return [] if self._table is None else list(self._table.places)

    def key(self, name: Id) -> Key:
        """Return the key of a model, which depends on the fleet's key and on the id alone."""
        return programs.folded(self._key, jnp.asarray(hashed([checked_id(name)])[0]))

    def start(self, name: Id) -> State:
        """Return the state in which a model begins, whenever its first row arrives."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), self._workers.starts([checked_id(name)])[1])

    def state(self, name: Id) -> State:
        """Return a model's state, as the sampler's `step` takes it. Waiting rows are not in it."""
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), self._states_of(self._record(name)))

    def waiting(self, name: Id) -> int:
        """Return how many rows of a model wait for their batch to be full."""
        return int(self._record(name)["waiting"][0])

    def predict(self, ids: Sequence[Id] | np.ndarray, x: Tree) -> Predictive:
        """Return the posterior predictive of each row's own model; a model not seen yet is where it would start.

        Args:
            ids: the model of each row.
            x: inputs with a leading axis of rows.
        """
        names = checked_ids(ids)
        x = jax.tree.map(lambda leaf: np.asarray(leaf, self._dtype), without_bad_rows(as_arrays(x), "raise")[0])
        if row_count(x) != len(names) or not names:
            raise ValueError(f"`ids` has {len(names)} entries and `x` {row_count(x)} rows; one id per row is needed.")
        room, parts = self._workers.room(len(names)), []
        for begin in range(0, len(names), room):
            codes: dict[Id, int] = {}
            at = np.array([codes.setdefault(name, len(codes)) for name in names[begin : begin + room]], np.int32)
            rows = jax.tree.map(lambda leaf, b=begin: leaf[b : b + room], x)
            parts.append(self._workers.answers(self._now(list(codes)), at, rows, room))
        return by_row(joined(parts))

    # --- learning -----------------------------------------------------------------------------------

    def learn(self, ids: Sequence[Id] | np.ndarray, data: Data) -> Learnt:
        """Take rows of any models in order of arrival; learn every batch that is full.

        Args:
            ids: the model of each row: strings or whole numbers.
            data: a pytree of arrays with one leading axis of rows, e.g. `(X, y)`.
        """
        names = checked_ids(ids)
        rows = as_arrays(data)
        if row_count(rows) != len(names):
            raise ValueError(
                f"`ids` has {len(names)} entries and the data {row_count(rows)} rows; one id per row is needed."
            )
        if not names or not self._fits_layout(rows):
            return Learnt([], None)
        (kept, rows), skipped = without_bad_rows((np.arange(len(names)), rows), self.on_bad)
        if skipped:
            names = [names[index] for index in kept]
        if self._table is None:
            self._prepare(rows)
            self._table = self._new_table(rows)
        self.skipped += skipped
        leaves = [
            np.asarray(leaf, like.dtype)
            for leaf, like in zip(jax.tree.leaves(rows), jax.tree.leaves(self._rows), strict=True)
        ]
        parts = []
        for begin in range(0, len(names), ROWS):
            codes: dict[Id, int] = {}
            code = np.array([codes.setdefault(name, len(codes)) for name in names[begin : begin + ROWS]])
            some, distinct = [leaf[begin : begin + ROWS] for leaf in leaves], list(codes)
            for first in range(0, len(distinct), self._table.hot):  # models are independent: any order will do
                group = distinct[first : first + self._table.hot]
                mine = (
                    slice(None) if len(group) == len(distinct) else code // self._table.hot == first // self._table.hot
                )
                parts.append(self._learn(group, code[mine] - first, [leaf[mine] for leaf in some]))
        return _in_one(parts)

    def flush(self) -> Learnt:
        """Learn all waiting rows, in batches that are not full. What comes later begins new batches."""
        parts = []
        names = self._table.waiting() if self._table else []
        for begin in range(0, len(names), self._table.hot if names else 1):
            group = names[begin : begin + self._table.hot]
            slots, _ = self._table.bring(group)
            record = self._table.records[slots]
            here = np.arange(self.batch_size)[None] < record["waiting"][:, None]
            count = len(jax.tree.leaves(self._rows))
            data = [filled_up(record[f"row{index}"], here) for index in range(count)]
            info = self._advance(slots, np.arange(len(slots)), data, here.astype(self._dtype))
            self._table.records["waiting"][slots] = 0
            parts.append(Learnt(group, info))
        return _in_one(parts)

    def forget(self, name: Id) -> None:
        """Drop a model and its waiting rows; a row of this id would begin a new one."""
        self._record(name)
        self._table.forget(name)

    # --- files --------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write all models and waiting rows into a folder; what was saved there before stays until all is there."""
        about = {
            "key": self._key,
            "batch_size": self.batch_size,
            "particles": self._particles,
            "rows": self._rows,
            "skipped": self.skipped,
            "diverged": self.diverged,
        }
        return files.save(Path(path), about, self._table)

    @classmethod
    def load(cls, path: str | Path, sampler: Sampler, **settings: Any) -> Self:
        """Return the fleet that was saved, bit for bit.

        Args:
            path: the folder given to `save`.
            sampler: made with the settings that the saved fleet's was made with.
            settings: `on_bad`, `hot`, `folder` and `lanes`, as for a new fleet.
        """
        about = files.about(Path(path))
        saved = {name: about[name] for name in ("key", "batch_size", "particles")}
        fleet = cls(sampler, **saved, **settings)
        fleet.skipped, fleet.diverged = about["skipped"], about["diverged"]
        if about["rows"] is not None:
            rows = as_arrays(about["rows"])
            fleet._table = fleet._new_table(rows)
            files.fill(Path(path), about, fleet._table)
            fleet._prepare(rows)
        return fleet

    # --- how models begin ---------------------------------------------------------------------------

    def _prepare(self, rows: Data) -> None:
        """Refuse, from shapes alone, rows that the sampler cannot learn from."""
        size, rows = self.batch_size, self._layout(rows)
        data = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), rows)
        weight: Any = jax.ShapeDtypeStruct((size,), self._dtype)
        self._workers.prepare(Batch(data, weight))

    def _layout(self, rows: Data) -> Data:
        """Return no rows, in the dtypes that such rows are kept in."""
        return as_rows(taken(rows, slice(0)), self._dtype)

    def _new_table(self, rows: Data) -> Table:
        """An empty table for models that learn from such rows."""
        rows, size = self._layout(rows), self.batch_size
        fields: list[Any] = [("key", np.uint32, jax.random.key_data(self._key).shape)]
        fields += [(f"state{i}", leaf.dtype, leaf.shape) for i, leaf in enumerate(jax.tree.leaves(self._state))]
        fields += [(f"row{i}", leaf.dtype, (size - 1, *leaf.shape[1:])) for i, leaf in enumerate(jax.tree.leaves(rows))]
        record = np.dtype([*fields, ("waiting", np.int32)])
        self._rows = rows
        return Table(record, self._hot or max(1, MEMORY // record.itemsize), self._folder)

    def _record(self, name: Id) -> np.ndarray:
        if name not in self:
            raise KeyError(f"there is no model for {name!r} in this fleet; one is made when its first row is learnt.")
        return self._table.peek([name])

    def _states_of(self, records: np.ndarray) -> Tree:
        leaves, tree = jax.tree.flatten(self._state)
        return jax.tree.unflatten(tree, [np.ascontiguousarray(records[f"state{i}"]) for i in range(len(leaves))])

    def _now(self, names: list[Id]) -> Tree:
        """States `[models, ...]`, also of models not seen yet."""
        seen = np.array([name in self for name in names])
        parts = []
        if seen.any():
            known = [name for name in names if name in self]
            parts.append(self._states_of(self._table.peek(known)))
        if not seen.all():
            parts.append(self._workers.starts([name for name in names if name not in self])[1])
        back = np.argsort(np.argsort(~seen, kind="stable"), kind="stable")
        return taken(joined(parts), back)

    # --- how models advance -------------------------------------------------------------------------

    def _fits_layout(self, rows: Data) -> bool:
        """Return whether rows are like the first ones; if not, raise or count them."""
        if self._rows is None:
            return True
        structures: list[Any] = [
            jax.tree.structure(tree) for tree in (rows, self._rows)
        ]  # jax does not export the type
        same = structures[0] == structures[1]
        if same:
            pairs = list(zip(jax.tree.leaves(rows), jax.tree.leaves(self._rows), strict=True))
            same = all(new.shape[1:] == old.shape[1:] for new, old in pairs)
            same = same and all(np.can_cast(new.dtype, old.dtype, "same_kind") for new, old in pairs)
        if not same and self.on_bad == "raise":
            kinds = [jax.tree.map(lambda leaf: f"{leaf.dtype} {leaf.shape[1:]}", tree) for tree in (self._rows, rows)]
            raise ValueError(
                f"the rows changed: one was {kinds[0]}, and now is {kinds[1]}. Every row must have the same leaves; "
                '`on_bad="skip"` leaves others out and counts them.'
            )
        self.skipped += 0 if same else row_count(rows)
        return same

    def _learn(self, group: list[Id], code: np.ndarray, leaves: list[np.ndarray]) -> Learnt:
        """Learn rows of a group of models that fits into memory; `code` says whose each row is."""
        table, size = self._table, self.batch_size
        slots, new = table.bring(group)
        if len(new):
            keys, states = self._workers.starts([group[index] for index in new])
            table.records["key"][slots[new]] = keys
            table.records["waiting"][slots[new]] = 0
            self._store(slots[new], states)
        before, order = table.records["waiting"][slots], np.argsort(code, kind="stable")
        code = code[order]
        counts = np.bincount(code, minlength=len(group))
        full, left = np.divmod(before + counts, size)  # batches that can be learnt, and rows that cannot
        first = np.cumsum(counts) - counts
        wave, place = np.divmod(before[code] + np.arange(len(code)) - first[code], size)
        now = wave < full[code]
        item = np.cumsum(full) - full  # the first batch of each model
        begun = np.flatnonzero((full > 0) & (before > 0))
        data = []
        for index, leaf in enumerate(leaves):
            batches = np.empty((full.sum(), size, *leaf.shape[1:]), leaf.dtype)
            batches[item[begun], : size - 1] = table.records[f"row{index}"][slots[begun]]
            batches[(item[code] + wave)[now], place[now]] = leaf[order[now]]
            data.append(batches)
        info = None
        if full.any():
            whose = np.repeat(np.arange(len(group)), full)
            info = self._advance(slots, whose, data, np.ones((len(whose), size), self._dtype))
        for index, leaf in enumerate(leaves):
            table.records[f"row{index}"][slots[code[~now]], place[~now]] = leaf[order[~now]]
        table.records["waiting"][slots] = left
        return Learnt([group[index] for index in np.repeat(np.arange(len(group)), full)], info)

    def _advance(self, slots: np.ndarray, whose: np.ndarray, data: list[np.ndarray], weight: np.ndarray) -> Info:
        """Learn batches, sorted by model, and store the new states; return the Info of each batch."""
        active, model = np.unique(whose, return_inverse=True)
        records = self._table.records[slots[active]]
        batches = Batch(jax.tree.unflatten(jax.tree.structure(self._rows), data), weight)  # type: ignore[arg-type]
        keys = np.ascontiguousarray(records["key"])
        states, info = self._workers.advance(keys, self._states_of(records), model, batches)
        self._store(slots[active], states)
        self.diverged += int((~info.finite).sum())
        return info

    def _store(self, slots: np.ndarray, states: Tree) -> None:
        for index, leaf in enumerate(jax.tree.leaves(states)):
            self._table.records[f"state{index}"][slots] = leaf


def _in_one(parts: list[Learnt]) -> Learnt:
    infos = [part.info for part in parts if part.info is not None]
    info = joined(infos) if infos else None
    return Learnt([name for part in parts for name in part.ids], info)
