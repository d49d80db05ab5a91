"""A fleet as a folder: files of models, and one that names them, written last."""

import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np

from opvi.running._checkpoint import CheckpointError
from opvi.running._checkpoint import load as load_file
from opvi.running._checkpoint import save as save_file
from opvi.scale.fleet._table import Table

VERSION = 1
NAMES, PART = "fleet.opvi", re.compile(r"models-[0-9a-f]{8}-\d{6}\.opvi")
PART_BYTES = 1 << 26


def save(folder: Path, about: dict[str, Any], table: Table | None) -> Path:
    """Write the files of models, then the one that names them; then delete those of an earlier save."""
    folder.mkdir(parents=True, exist_ok=True)
    token, parts = secrets.token_hex(4), []
    ids = [] if table is None else list(table.places)
    size = 1 if table is None else max(1, PART_BYTES // table.records.itemsize)
    for index, begin in enumerate(range(0, len(ids), size)):
        some = ids[begin : begin + size]
        records = table.peek(some)  # type: ignore[union-attr]
        arrays = {name: np.ascontiguousarray(records[name]) for name in records.dtype.names or ()}
        parts.append(f"models-{token}-{index:06d}.opvi")
        save_file(folder / parts[-1], {"ids": some, "records": arrays})
    layout = None if table is None else _layout(table)
    manifest = {"fleet": VERSION, **about, "parts": parts, "models": len(ids), "layout": layout}
    save_file(folder / NAMES, manifest)
    for path in folder.iterdir():
        if PART.fullmatch(path.name) and path.name not in parts:
            path.unlink()
    return folder


def about(folder: Path) -> dict[str, Any]:
    """Return what was saved besides the models."""
    path = folder / NAMES
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a saved fleet: there is no {NAMES} in it.")
    found = load_file(path)
    if not isinstance(found, dict) or "fleet" not in found:
        raise CheckpointError(f"{path} is a checkpoint of something else, not of a fleet.")
    if found["fleet"] > VERSION:
        raise CheckpointError(f"{path} was written by a newer opvi. Install that (`pip install --upgrade opvi`).")
    return found


def fill(folder: Path, about: dict[str, Any], table: Table) -> None:
    """Put the saved models into an empty table."""
    if about["layout"] != _layout(table):
        there, here = (dict(layout) for layout in (about["layout"], _layout(table)))
        odd = next(name for name in {**there, **here} if there.get(name) != here.get(name))
        raise ValueError(
            f"{folder} holds models of another sampler: {odd} is {there.get(odd)} there, and {here.get(odd)} here. "
            "Make the sampler with the settings that it was saved with."
        )
    for part in about["parts"]:
        if not PART.fullmatch(part):
            raise CheckpointError(f"{folder / NAMES} names the file {part!r}, which no fleet would write.")
        found = load_file(folder / part)
        ids, arrays = found["ids"], found["records"]
        for begin in range(0, len(ids), table.hot):
            group = slice(begin, begin + table.hot)
            slots, _ = table.bring(ids[group])
            for name, values in arrays.items():
                table.records[name][slots] = values[group]
    if len(table.places) != about["models"]:
        raise CheckpointError(f"{folder} should hold {about['models']} models, but {len(table.places)} were found.")


def _layout(table: Table) -> list[list[str]]:
    """Return the fields of a record, in words."""
    fields = table.records.dtype.fields or {}
    return [[name, f"{kind.base.name} {kind.shape}"] for name, (kind, *_) in fields.items()]
