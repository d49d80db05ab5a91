"""One row of one model, learnt where its record lies: the shortest way through Python and JAX.

A program takes one array of words and returns another: for a small model each further array costs a tenth of a call.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opvi._forks import refuse_forked
from opvi.scale.fleet._ids import Layout
from opvi.scale.fleet._programs import Form, after
from opvi.types import LARGEST_VALUE, Array, Batch, Data, Info, Sampler, Tree

WORD: np.dtype = np.dtype(np.uint32)
BYTE: np.dtype = np.dtype(np.uint8)
SOUND = 0.9 * LARGEST_VALUE**2  # squares up to this sum are of numbers that are small enough


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
    return jnp.concatenate(parts)


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


class Fields:
    """The fields of an array of records, looked up once, and room for what a program takes. For one thread."""

    def __init__(self, records: np.ndarray):
        self.model, self.waiting = records["model"], records["waiting"]
        self.rows = [records[name] for name in records.dtype.names or () if name.startswith("row")]
        self.parcel: tuple[np.ndarray, np.ndarray, list[np.ndarray]] | None = None  # words; its model and its rows


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
        self._structure = layout.structure
        self._kinds = [(index, (1, *shape), kind) for index, (shape, kind) in enumerate(layout.kinds)]
        self._program: Any = None

    def leaves(self, row: Data) -> list[np.ndarray] | None:
        """Return the leaves of one row that is as it should be; None for any other, which takes a longer look."""
        try:
            leaves = self._structure.flatten_up_to(row)
        except (TypeError, ValueError):
            return None
        for index, shape, kind in self._kinds:
            leaf = leaves[index]
            if type(leaf) is not np.ndarray or leaf.shape != shape:
                return None
            if leaf.dtype is not kind and leaf.dtype != kind:
                if not np.can_cast(leaf.dtype, kind, "same_kind"):
                    return None
                leaf = leaves[index] = np.asarray(leaf, kind)
            if kind.kind == "f":
                flat = leaf.ravel()
                with np.errstate(over="ignore"):  # the longer look says what is wrong
                    square = flat.dot(flat)
                if not square <= SOUND:  # nor for NaN
                    return None
        return leaves

    def learn(self, fields: Fields, place: int, leaves: list[np.ndarray]) -> Info | None:
        """Add a row to a record; return the Info, with a first axis of 1, if the row filled a batch.

        If this raises, the record is as before.
        """
        refuse_forked()
        last, waiting = self._last, fields.waiting
        before = waiting.item(place) if last else 0
        if before < last:
            for row, leaf in zip(fields.rows, leaves, strict=True):
                row[place, before] = leaf[0]
            waiting[place] = before + 1
            return None
        program = self._program or self._compiled()
        words, model, data = fields.parcel or self._parcel(fields)
        model[:] = fields.model[place]
        for part, row, leaf in zip(data, fields.rows, leaves, strict=True):
            part[last] = leaf[0]
            if last:
                part[:last] = row[place]
        out = np.frombuffer(np.asarray(program(words)), self._found)  # an array on a GPU is not a buffer
        fields.model[place] = out["0"][0]
        if last:
            waiting[place] = 0
            for row in fields.rows:
                row[place] = 0
        return jax.tree.unflatten(self._info, [out[name] for name in self._info_names])

    def _parcel(self, fields: Fields) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        parcel = np.zeros(1, self._given.fields)[0]
        model, *data = [parcel[name] for name in self._given.fields.names or ()]
        fields.parcel = np.frombuffer(parcel, WORD), model, data
        return fields.parcel

    def _compiled(self) -> Any:
        words = np.zeros(self._given.ends[-1], WORD)
        found = advance_one.eval_shape(*self._static, words)
        self._found, self._info = Parcel.of(found).fields, jax.tree.structure(found[1])
        self._info_names = (self._found.names or ())[1:]
        self._program = advance_one_closed.lower(*self._static, words).compile()
        return self._program
