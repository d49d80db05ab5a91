"""One row of one model, learnt where its record lies: the shortest way through Python and JAX.

A program takes one array of words and returns another: for a small model each further array costs a tenth of a call.
"""

import math
import sys
from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._cpu import inline_device
from opvi._forks import refuse_forked
from opvi.scale.fleet._ids import Layout, sound
from opvi.scale.fleet._programs import Form, after, ready
from opvi.types import LARGEST_VALUE, Array, Batch, Data, Info, Sampler, Tree

WORD: np.dtype = np.dtype(np.uint32)
BYTE: np.dtype = np.dtype(np.uint8)
ARRAY = np.ndarray
FRESH_BYTES = 1 << 25  # of waiting rows outside their records
OBJECT_BYTES = 64  # what Python adds to each leaf of a row


class Parcel(NamedTuple):
    """How several arrays travel as one, as words of 32 bits; each begins a new word. Hashable."""

    structure: Tree
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, tree: Tree) -> "Parcel":
        """Return the parcel for arrays with these shapes and dtypes."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(leaf.shape for leaf in leaves), tuple(np.dtype(leaf.dtype) for leaf in leaves))

    @property
    def ends(self) -> list[int]:
        """Where each leaf ends, in words."""
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in zip(self.shapes, self.dtypes, strict=True)]
        return np.cumsum([-(-size // WORD.itemsize) for size in sizes]).tolist()

    @property
    def fields(self) -> np.dtype:
        """The words as a structured dtype on the host; its fields are the leaves: "0", "1", …."""
        return np.dtype(
            {
                "names": [str(index) for index in range(len(self.shapes))],
                "formats": list(zip(self.dtypes, self.shapes, strict=True)),
                "offsets": [WORD.itemsize * begin for begin in [0, *self.ends[:-1]]],
                "itemsize": WORD.itemsize * self.ends[-1],
            }
        )

    def opened(self, words: Array) -> Tree:
        """Return the arrays in these words, in a program."""
        leaves = []
        for begin, end, kind, shape in zip([0, *self.ends], self.ends, self.dtypes, self.shapes, strict=False):
            part, unit = words[begin:end], WORD
            if kind.itemsize < WORD.itemsize:
                part, unit = jax.lax.bitcast_convert_type(part, BYTE).reshape(-1), BYTE
                part = part[: math.prod(shape) * kind.itemsize]
            ratio = kind.itemsize // unit.itemsize
            part = part.reshape(-1, ratio) if ratio > 1 else part
            part = part != 0 if kind.kind == "b" else jax.lax.bitcast_convert_type(part, kind)
            leaves.append(part.reshape(shape))
        return jax.tree.unflatten(self.structure, leaves)


def closed(tree: Tree) -> Array:
    """Return the words of arrays, in a program, as a `Parcel` of their shapes lays them out."""
    parts = []
    for leaf in map(jnp.asarray, jax.tree.leaves(tree)):
        part = (leaf.astype(BYTE) if leaf.dtype == bool else leaf).reshape(-1)
        if part.dtype.itemsize < WORD.itemsize:
            part = jax.lax.bitcast_convert_type(part, BYTE).reshape(-1)
            part = jnp.pad(part, (0, -len(part) % WORD.itemsize)).reshape(-1, WORD.itemsize)
        parts.append(jax.lax.bitcast_convert_type(part, WORD).reshape(-1))
    groups = ((single, list(group)) for single, group in groupby(parts, lambda part: len(part) == 1))
    return jnp.concatenate([part for single, group in groups for part in ([in_a_row(group)] if single else group)])


def in_a_row(words: list[Array]) -> Array:
    """Return single words as one array, in one operation: XLA's concatenation has one for each of its parts."""
    out = jnp.zeros(len(words), WORD)
    for place, word in enumerate(words):
        out = jnp.where(jnp.arange(len(words)) == place, word, out)
    return out


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def advance_one(sampler: Sampler, form: Form, given: Parcel, weight: np.dtype, words: Array) -> Tree:
    """Return one model after one batch, and the step's Info.

    Args:
        sampler: the sampler.
        form: the layout of the model.
        given: how the model and its rows travel.
        weight: the dtype of the rows' weights.
        words: the model and its rows.
    """
    model, data = given.opened(words)
    return after(sampler, form, model, Batch(data, jnp.ones((len(jax.tree.leaves(data)[0]),), weight)))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def advance_one_closed(sampler: Sampler, form: Form, given: Parcel, weight: np.dtype, words: Array) -> Array:
    """Return the same as words."""
    return closed(advance_one(sampler, form, given, weight, words))


class Small(NamedTuple):
    """Recognises small floats of one dtype by the byte with their exponent, sooner than NumPy's functions do."""

    first: slice  # those bytes
    table: bytes  # 0 where all numbers that begin with a byte are finite and at most `LARGEST_VALUE`, 255 elsewhere

    def all(self, numbers: bytes) -> bool:
        """Return whether all numbers are small; some near the limit are not recognised."""
        return numbers[self.first].translate(self.table).isascii()


EVERY = Small(slice(0, 0), b"")  # for numbers that need not be looked at


@cache
def small(kind: np.dtype) -> Small | None:
    """Return how small numbers of a dtype are recognised; None if they are not floats of the usual sizes."""
    if kind.kind != "f" or kind.itemsize > 8 or not kind.isnative:
        return None
    first = slice(kind.itemsize - 1 if sys.byteorder == "little" else 0, None, kind.itemsize)
    most = np.full((256, kind.itemsize), 255, BYTE)  # the largest number that begins with each byte, or NaN
    most[:, first] = np.arange(256)[:, None]
    with np.errstate(invalid="ignore"):  # NaN
        good = np.abs(most.view(kind)[:, 0].astype(float)) <= LARGEST_VALUE
    return Small(first, bytes(np.where(good, 0, 255).astype(BYTE)))


def stored(leaf: np.ndarray, kind: np.dtype) -> np.ndarray | None:
    """Return numbers in the dtype in which they are stored; None if they do not fit."""
    if not np.can_cast(leaf.dtype, kind, "same_kind"):
        return None
    numbers = small(leaf.dtype)
    if kind.kind == "f" and not (sound([leaf.astype(float)]) if numbers is None else numbers.all(leaf.tobytes())):
        return None
    return leaf.astype(kind)


class Fields:
    """The fields of an array of records, looked up once, and rows on their way into them. For one thread."""

    def __init__(self, records: np.ndarray):
        names = [name for name in records.dtype.names or () if name.startswith("row")]
        self.model, self.waiting = records["model"], records["waiting"]
        self.rows = [records[name] for name in names]
        begin = records.dtype.fields[names[0] if names else "waiting"][1]  # type: ignore[index]
        self.rest = records.view(BYTE).reshape(len(records), records.itemsize)[:, begin:]  # waiting rows, their number
        self.fresh: dict[int, list[Any]] = {}  # by place: how long this list can be, then the leaves of waiting rows
        self.settled: list[int] = []  # places that were written to, for the owner of the records to clear
        self.parcel: tuple[np.ndarray, np.ndarray, list[memoryview]] | None = None  # words; its model and its rows

    def begun(self, place: int, most: int) -> list[Any]:
        """Return an empty list for rows of a record, one of at most `most` lists."""
        if len(self.fresh) >= most:
            self.settle()
        rows = self.fresh[place] = [1 + len(self.rows) * (self.rows[0].shape[1] - self.waiting.item(place))]
        return rows

    def settle(self) -> None:
        """Write fresh rows to the records. Needed before anything but `Alone` looks at them."""
        if not self.fresh:
            return
        each, lists = len(self.rows), self.fresh.values()
        counts = np.array([(len(rows) - 1) // each for rows in lists])
        places = np.fromiter(self.fresh, int, len(counts))
        before = self.rows[0].shape[1] - np.array([(rows[0] - 1) // each for rows in lists])
        at = np.arange(counts.sum()) + (before + counts - np.cumsum(counts)).repeat(counts)
        for index, target in enumerate(self.rows):
            data = b"".join([leaf for rows in lists for leaf in rows[1 + index :: each]])
            target[places.repeat(counts), at] = np.frombuffer(data, target.dtype).reshape(len(at), *target.shape[2:])
        self.waiting[places] = before + counts
        self.settled += self.fresh
        self.fresh = {}


class Alone:
    """Learns single rows in place.

    Args:
        sampler: the sampler of every model.
        form: the layout of their words.
        layout: that of rows.
        batch_size: how many rows make a round.
        weight: the dtype of their weights.
    """

    def __init__(self, sampler: Sampler, form: Form, layout: Layout, batch_size: int, weight: Any):
        leaves = [jax.ShapeDtypeStruct((batch_size, *shape), kind) for shape, kind in layout.kinds]
        given = Parcel.of((jax.ShapeDtypeStruct((form.ends[-1],), form.word), layout.tree(leaves)))
        self._last, self._given = batch_size - 1, given
        self._static = sampler, form, given, np.dtype(weight)
        self._structure, self._count = layout.structure, len(layout.shapes)
        self._plain = layout.structure == jax.tree.structure((0,) * self._count)
        self._kinds = [((1, *shape), kind, *(small(kind) or EVERY)) for shape, kind in layout.kinds]
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in layout.kinds]
        self._most = FRESH_BYTES // (batch_size * (sum(sizes) + OBJECT_BYTES * self._count))
        self._program: Any = None

    def row(self, data: Data) -> list[bytes] | None:
        """Return the leaves of one row that is as it should be; None for any other, which takes a longer look."""
        if self._plain and type(data) is tuple:
            leaves: Sequence[Any] = data
        else:
            try:
                leaves = self._structure.flatten_up_to(data)
            except (TypeError, ValueError):
                return None
        if len(leaves) != self._count:
            return None
        row: list[bytes] = []
        for shape, kind, first, table in self._kinds:
            leaf = leaves[len(row)]
            if type(leaf) is not ARRAY or leaf.shape != shape:
                return None
            if leaf.dtype is not kind:
                leaf = stored(leaf, kind)
                if leaf is None:
                    return None
            part = leaf.tobytes()
            if table and not part[first].translate(table).isascii():  # `Small.all`, without a call
                return None
            row.append(part)
        return row

    def learn(self, fields: Fields, place: int, row: list[bytes]) -> Info | None:
        """Add a row to a record; return the Info, with a first axis of 1, if the row filled a batch.

        If this raises, nothing was added. Rows that wait are in `fields.fresh` until it is settled.
        """
        refuse_forked()
        if not self._last:
            return self._round(fields, place, [1], row)
        rows = fields.fresh.get(place) or fields.begun(place, self._most)
        if len(rows) == rows[0]:
            return self._round(fields, place, rows, row)
        rows += row
        return None

    def _round(self, fields: Fields, place: int, rows: list[Any], row: list[bytes]) -> Info:
        """Learn the rows that wait, and one more."""
        program = self._program or self._compiled()
        words, model, data = fields.parcel or self._parcel(fields)
        model[:] = fields.model[place]
        count = self._count
        before = self._last - (rows[0] - 1) // count  # those in the record
        fresh = rows + row
        for index, part in enumerate(data):
            leaves = fresh[1 + index :: count]
            part[:] = b"".join([fields.rows[index][place, :before].tobytes(), *leaves] if before else leaves)
        new = program(words)
        out = np.frombuffer(new if self._inline else np.asarray(new), self._found)  # an array on a GPU is not a buffer
        fields.model[place] = out["0"]
        fields.fresh.pop(place, None)
        if before:
            fields.rest[place] = 0
        return self._info.unflatten([out[name] for name in self._info_names])  # type: ignore[attr-defined]

    def _parcel(self, fields: Fields) -> tuple[np.ndarray, np.ndarray, list[memoryview]]:
        kind = self._given.fields
        words = np.zeros(self._given.ends[-1], WORD)
        places = [kind.fields[name] for name in kind.names or ()]  # type: ignore[index]
        parts = [words.view(BYTE)[begin : begin + part.itemsize] for part, begin, *_ in places]
        fields.parcel = words, parts[0].view(self._static[1].word), [part.data for part in parts[1:]]
        return fields.parcel

    def _compiled(self) -> Any:
        words = np.zeros(self._given.ends[-1], WORD)
        found = advance_one.eval_shape(*self._static, words)
        self._found, self._info = Parcel.of(found).fields, jax.tree.structure(found[1])
        self._info_names = (self._found.names or ())[1:]
        device = inline_device()
        self._inline = device is not None
        given = jax.device_put(words, device) if self._inline else words
        self._program = ready(advance_one_closed, self._static, (given,))
        return self._program
