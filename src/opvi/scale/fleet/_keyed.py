"""A model for each key as pure functions of records, without an engine, a store or memory of its own."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._forks import refuse_forked
from opvi.predictive import Predictive
from opvi.running._rows import joined, padded, row_count, size_of, taken, without_bad_rows
from opvi.running._settings import settings
from opvi.scale.fleet import _programs as programs
from opvi.scale.fleet._alone import Alone, Fields
from opvi.scale.fleet._ids import Id, Layout, as_arrays, checked_id, checked_ids, filled_up, hashed
from opvi.scale.fleet._programs import Form
from opvi.scale.fleet._workers import Workers, room_in_turns
from opvi.tracking._recommended import without_rows
from opvi.types import Batch, Data, Info, Key, Sampler, Seed, Start, State, Tree, as_key

FORMAT = 1  # of records; part of their fingerprint
ROWS = 1 << 18  # learnt at once; a longer call is cut


class Rounds(NamedTuple):
    """What was learnt: one entry per round, those of one record in order."""

    code: np.ndarray  # the record
    info: Info | None  # the sampler's, leaves [rounds, ...]; None if there was no round


class Keyed:
    r"""One model for each id, all from one sampler, as functions of records that the caller keeps.

    A record is an entry of a NumPy array of dtype `keyed.dtype`: a model's key and state, the rows that wait for their
    batch to fill, and a fingerprint by which records of another sampler, other settings or another format are
    refused. `records.tobytes()` and `keyed.read` take them through any store. The bits of a model depend on its id and
    its rows alone, as if the others were not there:

    $$x^{(m)}_{t} = \mathrm{step}\big(k_m, x^{(m)}_{t-1}, D^{(m)}_t\big), \qquad
      k_m = \mathrm{fold}(k, \mathrm{hash}(m)), \quad x^{(m)}_0 = \mathrm{init}(k_m)$$

    Args:
        sampler: any sampler, e.g. `opvi.regressor(3, hidden=())`.
        key: a JAX key or an integer seed.
        example: rows in the form `learn` will get them, e.g. `(X[:1], y[:1])`; their values do not matter. Without it
            records can be started and used to predict, but hold no rows and do not learn.
        batch_size: how many rows of a model make a round; 1 learns every row at once.
        particles: what `sampler.init` takes, for every model: how many to draw (the sampler's usual number if
            omitted), or the particles themselves.
        lanes: models computed side by side, by vmap. By default 1 on a CPU, where a loop inside the compiled program,
            shared by all cores, is nearly as fast and keeps the bits of a model run alone, and 1,024 on an accelerator.
            Samplers that factorise matrices take 1 lane and one core at a time on a CPU.
    """

    def __init__(
        self,
        sampler: Sampler,
        key: Seed,
        *,
        example: Data = None,
        batch_size: int = 20,
        particles: Start = None,
        lanes: int | None = None,
    ):
        if not hasattr(sampler, "step"):
            raise TypeError(
                f"`sampler` is a {type(sampler).__name__}, but a sampler is needed, e.g. `opvi.regressor(3)`."
            )
        for name, value in (("batch_size", batch_size), ("lanes", 1 if lanes is None else lanes)):
            at_least_one(name, value)
        key = as_key(key)
        sampler = without_rows(sampler)
        self.sampler, self.batch_size = sampler, int(batch_size)
        self._key = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
        self._start = particles
        drawn = isinstance(particles, int | np.integer)
        self._particles = (int(particles), None) if drawn else (None, particles)
        shapes = self._state_shapes()
        self._float = jax.eval_shape(lambda state: state.particles, shapes).dtype
        self.form = Form.of(self._key, shapes)
        self.layout = None if example is None else Layout.of(as_arrays(example), self._float)
        self._lanes = lanes
        self.alone = self.layout and Alone(sampler, self.form, self.layout, self.batch_size, self._float)
        self._workers = Workers(sampler, self.form, lanes)
        if self.layout is not None:
            self._workers.prepare(self._key, shapes, self._batch_shapes(self.layout))
        self.fingerprint = np.uint64(self._fingerprint())
        self.dtype = self._record()
        self._row_names = [name for name in self.dtype.names or () if name.startswith("row")]

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, besides the sampler and the example."""
        return {"key": self._key, "batch_size": self.batch_size, "particles": self._start, "lanes": self._lanes}

    def __reduce__(self) -> tuple[object, ...]:
        """Return settings, and nothing compiled. Most samplers hold functions, which need cloudpickle."""
        key = np.asarray(jax.random.key_data(self._key)), self.form.impl
        example = None if self.layout is None else self.layout.empty()
        return _again, (self.sampler, key, example, self.batch_size, self._start, self._lanes)

    # --- records ------------------------------------------------------------------------------------

    def start(self, ids: Sequence[Id] | np.ndarray) -> np.ndarray:
        """Return a new record for each id."""
        refuse_forked()
        names = checked_ids(ids)
        records = np.zeros(len(names), self.dtype)
        records["fingerprint"] = self.fingerprint
        words, room = hashed(names), room_in_turns(len(names), self.dtype.itemsize)
        for begin in range(0, len(names), room):
            some = words[begin : begin + room]
            given = *self._particles, self._key, padded(some, room), np.int32(len(some))
            out = programs.start(self.sampler, self.form, *given)
            records["model"][begin : begin + room] = np.asarray(out)[: len(some)]
        return records

    def key(self, name: Id) -> Key:
        """Return the key of a model, which depends on the common key and on the id alone."""
        return programs.folded(self._key, jnp.asarray(hashed([checked_id(name)])[0]))

    def states(self, records: np.ndarray) -> State:
        """Return states with leaves `[records, ...]`. Waiting rows are not in them."""
        return self.form.models(self.checked(records)["model"])[1]

    def with_states(self, records: np.ndarray, states: State) -> np.ndarray:
        """Return the records with other states, leaves `[records, ...]`."""
        keys, _ = self.form.models(self.checked(records)["model"])
        leaves = [keys, *map(np.asarray, jax.tree.leaves(states))]
        words = [np.ascontiguousarray(leaf).reshape(len(records), -1).view(self.form.word) for leaf in leaves]
        records = records.copy()
        records["model"] = np.concatenate(words, 1)
        return records

    def read(self, data: bytes | memoryview) -> np.ndarray:
        """Return the records in these bytes; refuse bytes that are not from this sampler."""
        if len(data) % self.dtype.itemsize:
            raise ValueError(
                f"{len(data):,} bytes are not records of {self.dtype.itemsize:,} bytes each. {_OTHER_RECORDS}"
            )
        return self.checked(np.frombuffer(data, self.dtype))

    def checked(self, records: np.ndarray) -> np.ndarray:
        """Return the records; refuse those of another `Keyed`."""
        if records.dtype != self.dtype or (records["fingerprint"] != self.fingerprint).any():
            raise ValueError(
                f"these are records of another sampler, of other settings or of another opvi. {_OTHER_RECORDS}"
            )
        return records

    def _fingerprint(self) -> int:
        """Return 64 bits that identify everything a record's meaning depends on."""
        about = {
            "format": FORMAT,
            "sampler": settings(self.sampler),
            "key": settings(jax.random.key_data(self._key)),
            "batch_size": self.batch_size,
            "particles": settings(jax.tree.map(np.asarray, self._particles)),
            "model": [f"{kind.name} {shape}" for shape, kind in zip(self.form.shapes, self.form.dtypes, strict=True)],
            "rows": settings(self.layout and self.layout.described()),
        }
        digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _record(self) -> np.dtype:
        fields: list[Any] = [("fingerprint", "<u8"), ("model", self.form.word, (self.form.ends[-1],))]
        for index, (shape, kind) in enumerate(self.layout.kinds if self.layout else []):
            fields.append((f"row{index}", kind, (self.batch_size - 1, *shape)))
        return np.dtype([*fields, ("waiting", np.int32)])

    # --- learning and asking ------------------------------------------------------------------------

    def learn(self, records: np.ndarray, code: np.ndarray, data: Data) -> tuple[np.ndarray, Rounds]:
        """Return the records after learning rows, and what was learnt. Rows that fill no batch wait in their record.

        Args:
            records: the models' records.
            code: the model of each row, as an index into `records`.
            data: rows in order of arrival, a pytree of arrays with one leading axis, e.g. `(X, y)`.
        """
        rows = as_arrays(data)
        code = _checked_code(code, len(self.checked(records)), row_count(rows))
        return self.learn_rows(records, code, self._rows.leaves(without_bad_rows(rows, "raise")[0]))

    def learn_rows(self, records: np.ndarray, code: np.ndarray, leaves: list[np.ndarray]) -> tuple[np.ndarray, Rounds]:
        """Return the same for checked rows, given as leaves of the layout."""
        refuse_forked()
        records, parts = records.copy(), []
        for begin in range(0, len(code), ROWS):
            some = slice(begin, begin + ROWS)
            parts.append(self._learn(records, code[some], [leaf[some] for leaf in leaves]))
        return records, in_one(parts)

    def flush(self, records: np.ndarray) -> tuple[np.ndarray, Rounds]:
        """Return records after learning all waiting rows, in batches that are not full."""
        refuse_forked()
        records = self.checked(records).copy()
        at = np.flatnonzero(records["waiting"])
        if not len(at):
            return records, Rounds(at, None)
        here = np.arange(self.batch_size)[None] < records["waiting"][at][:, None]
        data = [filled_up(records[name][at], here) for name in self._row_names]
        for name in self._row_names:
            records[name][at] = 0
        info = self._advance(records, at, data, here.astype(self._float))
        records["waiting"][at] = 0
        return records, Rounds(at, info)

    def predict(self, records: np.ndarray, code: np.ndarray, x: Tree) -> Predictive:
        """Return the posterior predictive of each row by its own model.

        Args:
            records: the models' records.
            code: the model of each row, as an index into `records`.
            x: inputs with a leading axis of rows.
        """
        refuse_forked()
        x = jax.tree.map(lambda leaf: np.asarray(leaf, self._float), without_bad_rows(as_arrays(x), "raise")[0])
        code = _checked_code(code, len(self.checked(records)), row_count(x))
        if not len(code):
            raise ValueError("there are no rows to predict; at least 1 is needed.")
        room, parts = room_in_turns(len(code), size_of(x) // len(code) + self.dtype.itemsize), []
        for begin in range(0, len(code), room):
            here = code[begin : begin + room]
            distinct, at = np.unique(here, return_inverse=True) if len(here) > 1 else (here, np.zeros(1))
            models = records["model"][distinct]
            some = models, at.astype(np.int32), taken(x, slice(begin, begin + room))
            parts.append(self._workers.answers(*some, room))
        return programs.by_row(joined(parts))

    @property
    def _rows(self) -> Layout:
        if self.layout is None:
            raise ValueError("`Keyed` was made without `example`, so its records cannot learn. Give an `example`.")
        return self.layout

    def _learn(self, records: np.ndarray, code: np.ndarray, leaves: list[np.ndarray]) -> Rounds:
        """Add rows to records in place: full batches are learnt, the rest waits."""
        size = self.batch_size
        if len(code) == 1 and self.alone is not None:
            fields = Fields(records)
            info = self.alone.learn(fields, int(code[0]), [leaf.tobytes() for leaf in leaves])
            fields.settle()
            return Rounds(code[:0] if info is None else code, info)
        before, order = records["waiting"].copy(), np.argsort(code, kind="stable")
        code = code[order]
        counts = np.bincount(code, minlength=len(records))
        full, left = np.divmod(before + counts, size)  # batches that can be learnt, and rows that cannot
        first = np.cumsum(counts) - counts
        wave, place = np.divmod(before[code] + np.arange(len(code)) - first[code], size)
        now = wave < full[code]
        item = np.cumsum(full) - full  # the first batch of each model
        begun = np.flatnonzero((full > 0) & (before > 0))
        data = []
        for index, leaf in enumerate(leaves):
            batches = np.empty((full.sum(), size, *leaf.shape[1:]), leaf.dtype)
            batches[item[begun], : size - 1] = records[f"row{index}"][begun]
            batches[(item[code] + wave)[now], place[now]] = leaf[order[now]]
            data.append(batches)
        whose = np.repeat(np.arange(len(records)), full)
        info = self._advance(records, whose, data, np.ones((len(whose), size), self._float)) if len(whose) else None
        for index, leaf in enumerate(leaves):
            records[f"row{index}"][begun] = 0  # what was learnt leaves no trace: a record's bytes are its model's
            records[f"row{index}"][code[~now], place[~now]] = leaf[order[~now]]
        records["waiting"] = left
        return Rounds(whose, info)

    def _advance(self, records: np.ndarray, whose: np.ndarray, data: list[np.ndarray], weight: np.ndarray) -> Info:
        """Learn batches, sorted by model, and store the new states in the records; return the Info of each batch."""
        batches = Batch(self._rows.tree(data), weight)  # type: ignore[arg-type]
        active, model = np.unique(whose, return_inverse=True)
        records["model"][active], info = self._workers.many(records["model"][active], model, batches)
        return info

    # --- shapes -------------------------------------------------------------------------------------

    def _batch_shapes(self, layout: Layout) -> Batch:
        size: Any = (self.batch_size,)
        leaves = [jax.ShapeDtypeStruct((*size, *shape), kind) for shape, kind in layout.kinds]
        weight: Any = jax.ShapeDtypeStruct(size, self._float)
        return Batch(layout.tree(leaves), weight)

    def _state_shapes(self) -> State:
        """Return the shapes of one model's state; refuse what `init` refuses, and an `init` that cannot be compiled."""
        if self._particles[1] is not None:
            self.sampler.init(self._key, self._particles[1])  # looks at the values, as a traced one cannot
        words, one = np.zeros((1, 2), np.uint32), np.int32(1)
        try:
            states = programs.start.eval_shape(self.sampler, None, *self._particles, self._key, words, one)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise TypeError(
                "this sampler's `init` depends on values, so thousands of models cannot be started by one compiled "
                f"program. Use only shapes inside `init`. ({str(error).splitlines()[0]})"
            ) from error
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states)


_OTHER_RECORDS = "Make `Keyed` with the settings that the records were made with."


def _again(sampler: Sampler, key: Any, example: Data, size: int, particles: Start, lanes: int | None) -> Keyed:
    """Return the object that was pickled."""
    key = jax.random.wrap_key_data(jnp.asarray(key[0]), impl=key[1])
    return Keyed(sampler, key, example=example, batch_size=size, particles=particles, lanes=lanes)


def at_least_one(name: str, value: object) -> None:
    """Refuse what is not a whole number of at least 1."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`{name}` is {value!r}, but must be a whole number of at least 1.")


def in_one(parts: list[Rounds]) -> Rounds:
    """Return the rounds of several calls as those of one."""
    if len(parts) == 1:
        return parts[0]
    infos = [part.info for part in parts if part.info is not None]
    code = np.concatenate([part.code for part in parts]) if parts else np.zeros(0, np.int64)
    return Rounds(code, joined(infos) if infos else None)


def _checked_code(code: np.ndarray, records: int, rows: int) -> np.ndarray:
    code = np.asarray(code)
    if code.shape != (rows,) or (rows and (code.dtype.kind not in "iu" or code.min() < 0 or code.max() >= records)):
        raise ValueError(
            f"`code` has shape {code.shape} and dtype {code.dtype}, but must hold one place among the {records:,} "
            f"records for each of the {rows:,} rows."
        )
    return code
