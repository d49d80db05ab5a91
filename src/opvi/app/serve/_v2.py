"""The KServe v2 protocol (Open Inference): tensors as rows, predictions as tensors, in JSON or in binary.

A model has one input tensor of shape [n] for every column of the table, under its name. A regression has the outputs
`mean`, `sd` and quantiles; a classification `prediction` and `probabilities` [n, classes].
"""

import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from opvi.adapters._tables import Json, Schema
from opvi.adapters._tables._jsonlines import BadLineError
from opvi.adapters._tables._messages import Number, Row, refuse_many_values
from opvi.app.serve._asking import LEVELS, MOST_ROWS, Said
from opvi.app.serve._worker import Answer, answer, refused

VERSION = "1"  # of every model
HEADER = "inference-header-content-length"  # bytes of JSON, where tensors follow in binary
KINDS = {"number": "FP64", "boolean": "BOOL"}  # of columns; all others are strings
MOST_SIDES = 4  # of a column's shape: [n], [n, 1], …
DTYPES = {
    "BOOL": "?",
    **{f"UINT{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": f"<f{size}" for size in (2, 4, 8)},
}


def metadata(name: str, schema: Schema) -> Json:
    """Return the inputs and outputs of a model."""
    inputs = [
        {"name": column.name, "datatype": KINDS.get(column.kind, "BYTES"), "shape": [-1]} for column in schema.columns
    ]
    if schema.task == "regression":
        names = ["mean", "sd", *(f"q{q:g}" for q in LEVELS)]
        outputs = [{"name": output, "datatype": "FP64", "shape": [-1]} for output in names]
        more: Json = {}
    else:
        outputs = [
            {"name": "prediction", "datatype": "BYTES", "shape": [-1]},
            {"name": "probabilities", "datatype": "FP64", "shape": [-1, len(schema.classes)]},
        ]
        more = {"parameters": {"classes": json.dumps(schema.classes)}}
    return {"name": name, "versions": [VERSION], "platform": "opvi", "inputs": inputs, "outputs": outputs, **more}


class Inference:
    """A request for predictions.

    Args:
        name: the model's name.
        body: JSON, possibly followed by tensors.
        length: the length of the JSON in bytes; None if there is nothing else.
    """

    def __init__(self, name: str, body: bytes, length: str | None):
        self.name, self._body, self._length = name, body, length
        self._request: Json = {}

    def read(self, schema: Schema) -> list[Row]:
        """Return the rows; raise a `BadLineError` for an invalid request."""
        try:
            return self._rows(schema)
        except BadLineError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
            why = str(error)[:200] or type(error).__name__
            raise BadLineError(f"this is not an inference request of the v2 protocol ({why})") from None

    def _rows(self, schema: Schema) -> list[Row]:
        end = len(self._body) if self._length is None else int(self._length)
        if not 0 <= end <= len(self._body):
            raise BadLineError(f"{HEADER} is {self._length}, but the body has {len(self._body):,} bytes")
        refuse_many_values(self._body[:end])
        self._request = json.loads(self._body[:end])
        known = [column.name for column in schema.columns]
        columns: dict[str, list[Any]] = {}
        for tensor in self._request["inputs"]:
            name = tensor["name"]
            if name not in known or name in columns:
                raise BadLineError(f"there is no input {str(name)[:60]!r}, or it is there twice")
            columns[name], end = self._values(tensor, end)
        if absent := [name for name in known if name not in columns]:
            raise BadLineError(f"the input {absent[0]!r} is missing")
        if len({len(values) for values in columns.values()}) != 1:
            raise BadLineError("the inputs have different numbers of rows")
        self.outputs(schema)
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def _values(self, tensor: Json, at: int) -> tuple[list[Any], int]:
        """Return the values of a tensor as in rows, and where the next binary tensor begins."""
        shape, kind = tensor["shape"], tensor["datatype"]
        count = shape[0] if _is_column(shape) else 0
        if not 0 < count <= MOST_ROWS:
            shown = json.dumps(shape)[:60]
            raise BadLineError(f"an input has the shape {shown}, but [n] or [n, 1] is needed, n from 1 to {MOST_ROWS}")
        size = (tensor.get("parameters") or {}).get("binary_data_size")
        if size is None:
            if type(tensor["data"]) is not list or len(tensor["data"]) != count:
                raise BadLineError(f"an input of shape {shape} does not have {count} values")
            values = np.array(tensor["data"], object).ravel().tolist()
            values = [_plain(value) for value in values]
        else:
            if type(size) is not int or not 0 <= size <= len(self._body) - at:
                raise BadLineError("an input's `binary_data_size` is not the number of its bytes in the body")
            data = self._body[at : at + size]
            at += size
            found = _texts(data) if kind == "BYTES" else np.frombuffer(data, DTYPES[kind]).tolist()
            values = [_plain(value) for value in found]
        if len(values) != count:
            raise BadLineError(f"an input of shape {shape} has {len(values)} values")
        return values, at

    def outputs(self, schema: Schema) -> list[tuple[str, bool]]:
        """Return the names of the requested outputs, and whether they are binary."""
        known = [output["name"] for output in metadata(self.name, schema)["outputs"]]
        binary = bool((self._request.get("parameters") or {}).get("binary_data_output"))
        asked = self._request.get("outputs") or [{"name": name} for name in known]
        named = [(one["name"], bool((one.get("parameters") or {}).get("binary_data", binary))) for one in asked]
        if odd := [name for name, _ in named if name not in known]:
            raise BadLineError(f"there is no output {str(odd[0])[:60]!r}: there are {', '.join(known)}")
        return named

    def write(self, said: Said) -> Answer:
        """Return the predictions as tensors."""
        if said.rejected:
            return refused(400, f"row {said.rejected[0].row}: {said.rejected[0].reason}.")
        outputs, parts = [], []
        for name, binary in self.outputs(said.schema):
            if name == "probabilities":
                values = np.stack([said.column(f"p={label}") for label in said.schema.classes], 1)
            else:
                values = said.column(name)
            kind = "BYTES" if values.dtype == object else "FP64"
            tensor: Json = {"name": name, "shape": list(values.shape), "datatype": kind}
            if binary:
                parts.append(_packed(values) if kind == "BYTES" else np.ascontiguousarray(values, "<f8").tobytes())
                tensor["parameters"] = {"binary_data_size": len(parts[-1])}
            else:
                tensor["data"] = values.ravel().astype(object if kind == "BYTES" else float).tolist()
            outputs.append(tensor)
        content: Json = {"model_name": self.name, "model_version": VERSION, "outputs": outputs}
        if isinstance(self._request.get("id"), str):
            content["id"] = self._request["id"]
        made = answer(content)
        if not parts:
            return made
        headers = (("content-type", "application/octet-stream"), (HEADER, str(len(made.body))))
        return Answer(200, b"".join([made.body, *parts]), headers)


def _is_column(shape: object) -> bool:
    """Return whether this is the shape of one column; nothing is multiplied, because the numbers may be anything."""
    if type(shape) is not list or not 1 <= len(shape) <= MOST_SIDES or not all(type(side) is int for side in shape):
        return False
    return shape[1:] == [1] * (len(shape) - 1)


def _plain(value: object) -> object:
    """Return a tensor's value as in a JSON row: numbers as text, None for a missing value."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float):
        return None if math.isnan(value) else Number(repr(value))
    if isinstance(value, int):
        return Number(value)
    raise BadLineError("an input holds something other than numbers, booleans or strings")


def _texts(data: bytes) -> Iterator[bytes]:
    """Decode strings, each preceded by its length in four bytes."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        at += 4 + size
        if at > len(data):
            raise BadLineError("a binary string is shorter than its length says")
        yield data[at - size : at]


def _packed(values: np.ndarray) -> bytes:
    texts = [str(value).encode() for value in values.ravel().tolist()]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)
