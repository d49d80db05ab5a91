"""A fleet: one model for each id, all of them advanced together and kept in one file."""

import threading
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from opvi.predictive import Predictive
from opvi.running._checkpoint import CheckpointError
from opvi.running._programs import keep_programs
from opvi.running._rows import OnBad, row_count, without_bad_rows
from opvi.running._settings import difference, settings
from opvi.scale.fleet._ids import Id, as_arrays, checked_id, checked_ids, coded, is_id, sound, without_keys
from opvi.scale.fleet._keyed import Keyed, Rounds, at_least_one, in_one
from opvi.scale.fleet._pool import Population, pooled, with_population
from opvi.scale.fleet._store import Store
from opvi.scale.fleet._turns import in_turn
from opvi.tracking._recommended import without_rows
from opvi.types import Data, Info, Key, Sampler, Seed, Start, State, Tree, as_key

POOLED = 4096  # models that a population is learnt from
LARGEST_BATCH = 1 << 24  # rows
MEMORY = 1 << 30  # bytes of models in memory, unless the caller says how many
KEPT = ("key", "batch_size", "particles", "pool")  # settings that a file belongs to, besides the sampler
SAME: Any = object()  # stands for a cursor that does not move


class Learnt(NamedTuple):
    """What a call of `learn` did: one entry per round. The rounds of one id are in order."""

    ids: list[Id]
    info: Info | None  # the sampler's, leaves [rounds, ...]; None if there was no round


class Fleet:
    r"""Thousands to millions of independent streams: one model for each id, made when its first row arrives.

    Rows of many ids come in any order. Those of one id wait until there are `batch_size` of them, and are then learnt
    as one round. Every model is what it would be without the other streams (see `Keyed`):
    `opvi.run(sampler, opvi.stream(rows, batch_size), fleet.key(id), state=fleet.start(id))` gives the same bits on a
    CPU with `lanes=1`, and the same numbers up to rounding with more lanes.

    With a `path` the fleet lives in a SQLite file. `save(cursor=...)` writes the models that were touched and the
    caller's position in the stream in one transaction, so that after a crash both are as at the last save, and every
    row counts once. `learn` takes all its rows or, if it raises, none. Threads take turns; a second fleet on the same
    file is refused.

    Args:
        sampler: any sampler, e.g. `opvi.regressor(3, hidden=())`.
        key: a JAX key or an integer seed.
        path: the file, created if it does not exist; None for a fleet that ends with the process.
        batch_size: how many rows of a model make a round; 1 learns every row at once.
        particles: what `sampler.init` takes, for every model: how many to draw (the sampler's usual number if
            omitted), or the particles themselves.
        on_bad: "raise" refuses rows with NaN, infinity, a number beyond 1e18 or another shape, before anything is
            learnt; "skip" leaves them out and counts them in `skipped`.
        hot: how many models stay in memory; by default as many as fit in 1 GiB. Others are in the file until a row of
            theirs arrives.
        forget_after: seconds without a row after which a model is dropped; None keeps all.
        lanes: models computed side by side, see `Keyed`.
        pool: whether predictions use the population of all models as the prior of each, so that a new id starts from
            what others have learnt. For `opvi.gauss_newton` of linear models with Gaussian noise (`opvi.scale.pooled`).
    """

    def __init__(
        self,
        sampler: Sampler,
        key: Seed,
        *,
        path: str | Path | None = None,
        batch_size: int = 20,
        particles: Start = None,
        on_bad: OnBad = "raise",
        hot: int | None = None,
        forget_after: float | None = None,
        lanes: int | None = None,
        pool: bool = False,
    ):
        for name, value in (("batch_size", batch_size), ("hot", 1 if hot is None else hot)):
            at_least_one(name, value)
        if on_bad not in ("raise", "skip"):
            raise ValueError(f'`on_bad` is {on_bad!r}, but must be "raise" or "skip".')
        if forget_after is not None and not forget_after > 0:
            raise ValueError(f"`forget_after` is {forget_after!r}, but must be a number of seconds greater than 0.")
        keep_programs()
        self.sampler, self.batch_size, self.on_bad = without_rows(sampler), int(batch_size), on_bad
        self.skipped = self.diverged = 0  # bad rows left out; rounds not finite, whose models stayed as they were
        self.cursor: Tree = None  # as it was last saved
        self._given = {"key": as_key(key), "batch_size": self.batch_size, "particles": particles, "lanes": lanes}
        self._hot, self._lock, self.pool = hot, threading.RLock(), pool
        self._population: Population | None = None
        self._rounds = self._pooled_at = 0  # learnt by this object, and at the last look at the population
        keyed = Keyed(self.sampler, **self._given)  # enough to start models; another comes with the first rows
        self._store = Store(None if path is None else Path(path), forget_after)
        self._use(keyed)
        try:
            self._resume(self._store.about)
        except BaseException:
            self._store.close()
            raise

    @classmethod
    def load(cls, path: str | Path, sampler: Sampler, **settings: Any) -> Self:
        """Open a fleet that was saved.

        Args:
            path: its file.
            sampler: a sampler with the same settings as the saved fleet's.
            settings: `on_bad`, `hot`, `forget_after` and `lanes`, as for a new fleet.
        """
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} is not a saved fleet: there is no such file.")
        store = Store(Path(path), None)
        about = checked_about(store.about, Path(path))
        store.close()
        if about is None:
            raise FileNotFoundError(f"{path} is not a saved fleet: nothing was saved there.")
        return cls(sampler, path=path, **{**{name: about[name] for name in KEPT}, **settings})

    @classmethod
    def of(cls, keyed: Keyed, path: str | Path | None = None, **settings: Any) -> Self:
        """Return a fleet of the models of a `Keyed`.

        Args:
            keyed: a `Keyed` made with an `example`.
            path: the fleet's file.
            settings: `on_bad`, `hot` and `forget_after`, as for a new fleet.
        """
        made = cls(keyed.sampler, path=path, **keyed.settings, **settings)
        if made._keyed.layout is None:
            made._use(keyed)
        return made

    # --- asking -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._store.count

    @in_turn
    def __contains__(self, name: object) -> bool:
        return is_id(name) and not self._store.get([checked_id(name)])[1][0]

    def __repr__(self) -> str:
        held = self._store.in_memory
        return (
            f"<opvi.Fleet of {len(self):,} models, {held:,} in memory and {len(self) - held:,} on disk; "
            f"batches of {self.batch_size} rows>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ids(self) -> list[Id]:
        """The ids of all models, in order of first appearance."""
        with self._lock:
            return self._store.ids()

    def key(self, name: Id) -> Key:
        """Return the key of a model, which depends on the fleet's key and on the id alone."""
        return self._keyed.key(name)

    def start(self, name: Id) -> State:
        """Return the state in which a model begins, whenever its first row arrives."""
        return _single(self._keyed.states(self._keyed.start([name])))

    def state(self, name: Id) -> State:
        """Return a model's state, as the sampler's `step` takes it. Waiting rows are not in it."""
        return _single(self._keyed.states(self._record(name)))

    def waiting(self, name: Id) -> int:
        """Return how many rows of a model wait for their batch to be full."""
        return int(self._record(name)["waiting"][0])

    def predict(self, ids: Sequence[Id] | np.ndarray, x: Tree) -> Predictive:
        """Return the posterior predictive of each row's own model; an unseen model is in its starting state.

        Args:
            ids: the model of each row.
            x: inputs with a leading axis of rows.
        """
        names, x = checked_ids(ids), as_arrays(x)
        if row_count(x) != len(names) or not names:
            raise ValueError(f"`ids` has {len(names)} entries and `x` {row_count(x)} rows; one id per row is needed.")
        distinct, code = coded(names)
        with self._lock:
            keyed, records = self._keyed, self._records(distinct)
            self._say_what_waits(records)
            if self.pool:
                states = with_population(self.sampler, keyed.states(records), self.population(), x)
                records = keyed.with_states(records, states)
        return keyed.predict(records, code, x)

    def _say_what_waits(self, records: np.ndarray) -> None:
        """Warn if models are asked that have rows, but have learnt none, because they wait for a full batch."""
        idle = int(((records["waiting"] > 0) & (self._keyed.form.rounds(records["model"]) == 0)).sum())
        if idle or not self._store.count:
            why = (
                f"{idle:,} of these models have rows, but too few for a batch of {self.batch_size}, and have learnt "
                "none: they predict as on their first day. Learn what waits: `fleet.flush()`."
                if idle
                else "this fleet has learnt nothing yet: its models predict as on their first day."
            )
            warnings.warn(why, UserWarning, stacklevel=3)

    @in_turn
    def population(self) -> Population:
        """Return what the models have in common, updated whenever a tenth more rounds have been learnt.

        It is learnt from at most 4,096 of the models; see `opvi.scale.pooled`.
        """
        if self._population is None or self._rounds > 1.1 * self._pooled_at:
            names = self._store.ids()
            some = names[:: -(-len(names) // POOLED)] if names else []
            inputs = None if self._keyed.layout is None else self._keyed.layout.empty()[0]
            states = self._keyed.states(self._records(some) if some else self._keyed.start([0]))
            self._population, self._pooled_at = pooled(self.sampler, states, inputs), self._rounds
        return self._population

    # --- learning -----------------------------------------------------------------------------------

    def learn(self, ids: Sequence[Id] | np.ndarray, data: Data) -> Learnt:
        """Take rows of any models in order of arrival; learn every full batch. If this raises, no row was taken.

        Args:
            ids: the model of each row: strings or whole numbers.
            data: a pytree of arrays (or lists) with one leading axis of rows, e.g. `(X, y)`.
        """
        with self._lock:
            ids = ids.tolist() if type(ids) is np.ndarray and ids.shape == (1,) else ids
            done = self._learn_one(ids[0], data) if type(ids) is list and len(ids) == 1 else None
            return self._learn_many(ids, data) if done is None else done

    def _learn_many(self, ids: Sequence[Id] | np.ndarray, data: Data) -> Learnt:
        names, rows = checked_ids(ids), as_arrays(data)
        if (count := row_count(rows)) != len(names):
            raise ValueError(f"`ids` has {len(names)} entries and the data {count} rows; one id per row is needed.")
        if not names:
            return Learnt([], None)
        skipped, layout = 0, self._keyed.layout
        try:
            leaves = layout.leaves(rows) if layout else []
        except ValueError:
            if self.on_bad == "raise":
                raise
            self.skipped += len(names)
            return Learnt([], None)
        if layout is None or not sound(leaves):
            (kept, rows), skipped = without_bad_rows((np.arange(len(names)), rows), self.on_bad)
            names = [names[index] for index in kept] if skipped else names
            if layout is None:
                self._use(Keyed(self.sampler, **self._given, example=rows))
                layout = self._keyed.layout
            assert layout is not None
            leaves = layout.leaves(rows)
        distinct, code = coded(names)
        learnt = self._through(distinct, partial(self._learn, code, leaves))
        self.skipped += skipped
        return learnt

    @in_turn
    def flush(self) -> Learnt:
        """Learn all waiting rows, in batches that are not full. Later rows begin new batches."""
        return self._through(self._store.ids(waiting=True), lambda records, *_: self._keyed.flush(records))

    @in_turn
    def forget(self, name: Id) -> None:
        """Drop a model and its waiting rows; a later row of this id starts a new one."""
        self._record(name)
        self._store.forget(checked_id(name))

    @in_turn
    def take(self, ids: Sequence[Id] | np.ndarray, records: np.ndarray) -> None:
        """Import models as records of `Keyed`, replacing those with the same ids; all of them or none.

        Args:
            ids: distinct ids.
            records: records of a `Keyed` with the fleet's settings.
        """
        names, records = checked_ids(ids), self._keyed.checked(records)
        if len(set(names)) != len(records):
            raise ValueError(f"`ids` has {len(set(names))} distinct ids for {len(records)} records.")
        self._through(names, lambda _, begin, __: (records[begin : begin + self._store.hot], in_one([])))

    # --- the file -----------------------------------------------------------------------------------

    @in_turn
    def save(self, path: str | Path | None = None, *, cursor: Tree = SAME) -> Path:
        """Write the models changed since the last save, with their waiting rows, and the cursor.

        All of it is in the file when this returns, or nothing: one transaction, which survives the end of the process
        (and of the machine, except that the last few saves may be missing entirely).

        Args:
            path: a copy of the whole fleet is also written there; needed if the fleet has no file of its own.
            cursor: the position in the stream, e.g. `{"file": "a.csv", "row": 1200}`: anything `opvi.save` takes,
                available later as `fleet.cursor`. Unchanged if omitted.
        """
        target = self._store.path if path is None else Path(path)
        if target is None:
            raise ValueError("this fleet has no file: give a path, here or when it is made.")
        if not target.parent.is_dir():
            raise FileNotFoundError(f"{target.parent} is not a folder, so nothing was saved. Make it first: `mkdir`.")
        layout = self._keyed.layout
        place = self.cursor if cursor is SAME else cursor
        about = {
            "settings": settings(self.sampler),
            **{name: self._chosen[name] for name in KEPT},
            "rows": None if layout is None else layout.empty(),
            "skipped": self.skipped,
            "diverged": self.diverged,
            "cursor": place,
        }
        self._store.save(about)
        self.cursor = place
        if target != self._store.path:
            self._store.copy(target)
        return target

    @in_turn
    def close(self) -> None:
        """Release the file. Anything not saved is lost."""
        self._store.close()

    def _resume(self, about: dict[str, Any] | None) -> None:
        """Load what was saved, if anything; refuse what belongs to another sampler."""
        about = checked_about(about, self._store.path)
        if about is None:
            return
        now = {
            "sampler": settings(self.sampler),
            **{name: settings(without_keys(self._chosen[name])) for name in KEPT},
        }
        then = {"sampler": about["settings"], **{name: settings(without_keys(about[name])) for name in KEPT}}
        odd = difference(then, now)
        if odd:
            raise ValueError(
                f"{self._store.path} is a fleet of another sampler: {odd}. Give the settings that it was saved with, "
                "or choose another path."
            )
        self.skipped, self.diverged, self.cursor = about["skipped"], about["diverged"], about["cursor"]
        if about["rows"] is not None:
            self._use(Keyed(self.sampler, **self._given, example=as_arrays(about["rows"])))

    @property
    def _chosen(self) -> dict[str, Any]:
        return {**self._given, "pool": self.pool}

    # --- inside -------------------------------------------------------------------------------------

    def _use(self, keyed: Keyed) -> None:
        """Use this `Keyed` from now on, with room for its records."""
        self._keyed = keyed
        self._store.prepare(keyed.dtype, self._hot or max(1, MEMORY // keyed.dtype.itemsize))

    @in_turn
    def _record(self, name: Id) -> np.ndarray:
        if name not in self:
            raise KeyError(f"there is no model for {name!r} in this fleet; one is made when its first row is learnt.")
        return self._keyed.checked(self._store.get([checked_id(name)])[0])

    def _records(self, names: list[Id]) -> np.ndarray:
        """Return records, also of models not seen yet."""
        records, new = self._store.get(names)
        if new.any():
            records[new] = self._keyed.start([name for name, first in zip(names, new, strict=True) if first])
        return self._keyed.checked(records)

    def _learn(
        self, code: np.ndarray, leaves: list[np.ndarray], records: np.ndarray, begin: int, whole: bool
    ) -> tuple[np.ndarray, Rounds]:
        """Learn the rows of some of the models, the first of which has the code `begin`."""
        if not whole:
            mine = (code >= begin) & (code < begin + len(records))
            code, leaves = code[mine] - begin, [leaf[mine] for leaf in leaves]
        return self._keyed.learn_rows(records, code, leaves)

    def _through(self, names: list[Id], change: Callable[[np.ndarray, int, bool], tuple[np.ndarray, Rounds]]) -> Learnt:
        """Change the records of these models, all or none, as many at a time as memory holds."""
        hot, parts = self._store.hot, []
        if len(names) <= hot:
            records, rounds = change(self._records(names), 0, True)
            self._store.put(names, records)
            parts.append(rounds)
        else:
            with self._store.through() as put:
                for begin in range(0, len(names), hot):
                    some = names[begin : begin + hot]
                    records, rounds = change(self._records(some), begin, False)
                    put(some, records)
                    parts.append(rounds._replace(code=rounds.code + begin))
        code, info = in_one(parts)
        return self._learnt([names[index] for index in code.tolist()], info)

    def _learn_one(self, name: object, data: Data) -> Learnt | None:
        """Learn a row of a model in memory, where it lies; None: nothing was done, and it takes a longer look."""
        alone, store = self._keyed.alone, self._store
        if alone is None or (slot := store.place(name)) is None or (row := alone.row(data)) is None:
            return None
        if (info := alone.learn(store.fields, slot, row)) is not None or store.forget_after is not None:
            store.touch(slot)
        return tuple.__new__(Learnt, ([], None)) if info is None else self._learnt([name], info)  # type: ignore[list-item]

    def _learnt(self, names: list[Id], info: Info | None) -> Learnt:
        self._rounds += len(names)
        if info is not None:
            self.diverged += not info.finite.item() if info.finite.size == 1 else int((~info.finite).sum())
        return Learnt(names, info)


def checked_about(about: Tree, path: Path | None) -> dict[str, Any] | None:
    """Return what was saved beside the models; refuse what no fleet saves."""
    if about is None:
        return None
    whole = {"settings": dict, "batch_size": int, "pool": bool, "skipped": int, "diverged": int}
    sound = isinstance(about, dict) and {*whole, *KEPT, "rows", "cursor"} == set(about)
    if not sound or not all(type(about[name]) is kind for name, kind in whole.items()):
        raise CheckpointError(f"{path} is damaged: it does not say what the fleet is. Use a copy.")
    particles, key = about["particles"], about["key"]
    sound = particles is None or type(particles) is int or isinstance(particles, np.ndarray)
    if not sound or not isinstance(key, jax.Array | np.ndarray) or not 0 < about["batch_size"] <= LARGEST_BATCH:
        raise CheckpointError(f"{path} is damaged: it does not say how the fleet was made. Use a copy.")
    return about


def _single(states: Tree) -> State:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), states)
