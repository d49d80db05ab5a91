"""What reading and encoding a table costs per row, by format: `python -m benchmarks.tables`."""

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.machine import machine
from opvi.adapters._tables import infer_schema, open_source

COLUMNS = 10
TARGET = 3.0  # microseconds per row, numbers in CSV


def write(folder: Path, rows: int) -> dict[str, Path]:
    """The same kind of rows in each format."""
    rng = np.random.default_rng(0)
    names = [*(f"x{i}" for i in range(COLUMNS - 1)), "y"]
    paths = {name: folder / name for name in ("numbers.csv", "text.csv", "numbers.csv.gz", "numbers.csv.zst")}
    paths |= {name: folder / name for name in ("numbers.jsonl", "numbers.parquet")}
    table = rng.standard_normal((rows, COLUMNS)).astype(np.float32)
    np.savetxt(paths["numbers.csv"], table, "%.7g", ",", header=",".join(names), comments="")
    plain = paths["numbers.csv"].read_bytes()
    paths["numbers.csv.gz"].write_bytes(gzip.compress(plain, 1))
    with pa.OSFile(str(paths["numbers.csv.zst"]), "wb") as file, pa.CompressedOutputStream(file, "zstd") as stream:
        stream.write(plain)
    with paths["text.csv"].open("w") as file:
        file.write("colour,note,date,flag,y\n")
        for i, y in enumerate(table[:, 0].tolist()):
            file.write(
                f'{"rgb"[i % 3]},"one, ""two""",2024-01-{1 + i % 28:02}T{i % 24:02}:00:00,{i % 2 == 0},{y:.6g}\n'
            )
    with paths["numbers.jsonl"].open("w") as file:
        file.writelines(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in table.tolist())
    pq.write_table(pa.table(dict(zip(names, table.T, strict=True))), paths["numbers.parquet"])
    return paths


def measure(path: Path, clock: Callable[[], float]) -> dict[str, Any]:
    """Microseconds per row, of this process, for reading and for encoding."""
    reading = encoding = 0.0
    rows = 0
    with open_source(path) as source:
        blocks = source.blocks()
        schema = None
        while True:
            start = clock()
            block = next(blocks, None)
            reading += clock() - start
            if block is None:
                break
            start = clock()
            schema = schema or infer_schema([block], "y")
            rows += len(schema.encode(block).row)
            encoding += clock() - start
    found = {"reading_us": reading, "encoding_us": encoding, "together_us": reading + encoding}
    return {"rows": rows, **{what: 1e6 * seconds / rows for what, seconds in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, default=Path("bench-output"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        results = {name: measure(path, time.process_time) for name, path in write(Path(folder), options.rows).items()}
    report = {"machine": machine("python -m benchmarks.tables"), "target_us": TARGET, "results": results}
    (options.out / "tables.json").write_text(json.dumps(report, indent=1) + "\n")
    for name, result in results.items():
        parts = f"({result['reading_us']:.2f} reading, {result['encoding_us']:.2f} encoding)"
        print(f"{name}: {result['together_us']:.2f} µs per row of processor time {parts}")


if __name__ == "__main__":
    main()
