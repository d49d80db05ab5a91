"""Malformed tables for the fuzz test and benchmark, and what must hold of whatever is read from them."""

import gzip
import io
import json
import random
import signal
import sys
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as reproduce
from hypothesis import strategies as st

from opvi.adapters._tables import Block, Schema, TableError, infer_schema, open_source
from opvi.types import LARGEST_VALUE

KINDS = ("csv", "jsonl", "parquet", "any")
TEXT = st.text(alphabet='01.,;"\n\r\t{}[]:\\uaeyNx-é\0 ', max_size=200)
ANYTHING = st.binary(max_size=300) | TEXT.map(str.encode) | st.text(max_size=200).map(lambda text: text.encode())
SECONDS = 20  # an input may take
SPICE = [
    *(
        b'"',
        b'""',
        b'"""',
        b",",
        b";",
        b"\t",
        b"\n",
        b"\r",
        b"\r\n",
        b"\0",
        b"\xff",
        b"\xc3",
        b"\xef\xbb\xbf",
        b"{",
        b"}",
    ),
    *(
        b"[",
        b"]",
        b":",
        b"\\",
        b"\\u",
        b"\\ud800",
        b"null",
        b"NaN",
        b"-Infinity",
        b"inf",
        b"1e999",
        b"-1e400",
        b"9" * 400,
    ),
    *(
        b"true",
        b"0x1F",
        b"1_000",
        b"+-3",
        b"2024-02-30",
        b"9999-12-31T23:59:59-12:00",
        b"<script>",
        "é".encode(),
        b"[" * 300,
    ),
    *(
        "٣".encode(),
        "\u2028".encode(),
        b" " * 50,
        b"a" * 5_000,
        b'{"y": 1}',
        b'{"a": {"b": [1]}}',
        b"PAR1",
        b"1" * 5_000,
    ),
]


def rows(rng: random.Random, count: int) -> list[dict]:
    """Rows of every type, some values missing."""
    out = []
    for i in range(count):
        row = {
            "number": round(rng.gauss(0, 10 ** rng.randint(0, 6)), rng.randint(0, 8)),
            "whole": rng.randint(-5, 10**6),
            "text": rng.choice(["red", "green", "blue", 'say "hi"', "two\nlines", "a,b", "ünï"]),
            "many": f"level {rng.randint(0, 60)}",
            "flag": rng.random() < 0.5,
            "date": f"20{i % 30:02}-{1 + i % 12:02}-{1 + i % 28:02}" + rng.choice(["", f"T{i % 24:02}:30:00"]),
            "y": rng.choice([0, 1]) if count % 2 else round(rng.gauss(0, 1), 4),
        }
        for name in ("number", "text", "date"):
            if rng.random() < 0.05:
                row[name] = None
        out.append(row)
    return out


def as_csv(table: list[dict]) -> bytes:
    def field(value: object) -> str:
        text = "" if value is None else str(value)
        return '"' + text.replace('"', '""') + '"' if any(c in text for c in ',"\n') else text

    lines = [",".join(table[0]), *(",".join(map(field, row.values())) for row in table)]
    return "\n".join(lines).encode() + b"\n"


def as_jsonl(table: list[dict]) -> bytes:
    return "\n".join(json.dumps(row) for row in table).encode() + b"\n"


def as_parquet(table: list[dict], rng: random.Random) -> bytes:
    out = io.BytesIO()
    columns = {name: [row[name] for row in table] for name in table[0]}
    columns["stamp"] = pa.array(np.arange(len(table)) * 10**12, pa.timestamp("us"))
    pq.write_table(
        pa.table(columns),
        out,
        row_group_size=rng.choice([7, 50, 1000]),
        compression=rng.choice(["none", "snappy", "zstd", "gzip"]),
        use_dictionary=rng.random() < 0.5,
        write_page_checksum=False,  # so that damage reaches the decoders
        data_page_version=rng.choice(["1.0", "2.0"]),
    )
    return out.getvalue()


def damaged(data: bytes, rng: random.Random, harshness: int, in_place: bool = False) -> bytes:
    """Bytes flipped, cut out, doubled, moved, cut off, or spiced with what parsers trip over."""
    out = bytearray(data)
    footer = len(out) // 2 if in_place and rng.random() < 0.7 else len(out)  # of Parquet: mostly leave it whole
    for _ in range(harshness):
        at = rng.randrange(footer if in_place else len(out) + 1)
        match rng.randrange(2 if in_place else 7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                del out[at : at + rng.choice([1, 2, 5, 40])]
            case 3:
                out[at:at] = rng.choice(SPICE)
            case 4:
                piece = bytes(out[at : at + rng.randrange(200)])
                to = rng.randrange(len(out) + 1)
                out[to:to] = piece
            case 5 if rng.random() < 0.2:
                del out[at:]
            case _:
                out[at:at] = rng.randbytes(rng.randrange(8))
    return bytes(out)


def soup(rng: random.Random) -> bytes:
    """Not even close to a table."""
    return b"".join(rng.choice([*SPICE, b"a,y\n", b"1,2\n", rng.randbytes(3)]) for _ in range(rng.randrange(80)))


def hostile(seed: int, kind: str) -> tuple[str, bytes]:
    """One malformed input of a kind, and the ending of its file's name; the same for the same seed."""
    rng = random.Random(f"{kind} {seed}")
    if rng.random() < 0.1:
        return kind, (b"PAR1" if kind == "parquet" else b"") + soup(rng)
    table = rows(rng, rng.randrange(1, 60))
    data = as_parquet(table, rng) if kind == "parquet" else as_csv(table) if kind == "csv" else as_jsonl(table)
    if kind != "parquet" and rng.random() < 0.15:
        squeezed = gzip.compress(damaged(data, rng, rng.randrange(3)), 1)
        return f"{kind}.gz", damaged(squeezed, rng, rng.choice([0, 1, 3]))
    in_place = kind == "parquet" and rng.random() < 0.8
    return kind, damaged(data, rng, rng.choice([1, 1, 2, 4, 10, 40]), in_place)


def generated(first: int, last: int) -> list[tuple[str, bytes]]:
    """Bytes and text as hypothesis thinks of them, alone or after sound rows."""
    out: list[tuple[str, bytes]] = []

    @reproduce(first)
    @settings(
        max_examples=last - first,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(ANYTHING, st.sampled_from(["csv", "tsv", "jsonl", "parquet"]), st.booleans())
    def note(data: bytes, kind: str, after: bool) -> None:
        sound = b'{"a": 1, "y": 2.5}\n{"a": 2, "y": 4.5}\n' if kind == "jsonl" else b"a,y\n1,2.5\n3,4.5\n"
        out.append((kind, sound + data if after and kind != "parquet" else data))

    note()
    return out[: last - first]


def read(path: Path) -> tuple[int, int, str]:
    """Rows encoded, rows rejected, and the error that ended it; AssertionError where garbage was accepted."""
    blocks: list[Block] = []
    error = ""
    try:
        with open_source(path) as source:
            for block in source.blocks():  # hostile files are small
                assert block.first == sum(before.rows for before in blocks)
                assert block.rows > 0
                blocks.append(block)
    except TableError as why:
        error = str(why)
    try:
        schema = infer_schema(blocks, "y")
    except TableError as why:
        return 0, sum(block.rows for block in blocks), error or str(why)
    counts = [check(schema, block) for block in blocks]
    return sum(good for good, _ in counts), sum(bad for _, bad in counts), error


def check(schema: Schema, block: Block) -> tuple[int, int]:
    """Rows encoded and rejected, if every row is one or the other and every number is sound."""
    out = schema.encode(block)
    numbers = [*out.row.tolist(), *(rejected.row for rejected in out.rejected)]
    assert sorted(numbers) == list(range(block.first, block.first + block.rows))
    assert all(rejected.reason and len(rejected.text) <= 2_000 for rejected in out.rejected)
    assert out.x.dtype == np.float32
    assert out.x.shape == (len(out.row), len(schema.features))
    assert (np.abs(out.x) <= LARGEST_VALUE).all()  # False for NaN
    assert out.y is not None
    if schema.task == "classification":
        assert out.y.dtype == np.int32
        assert ((out.y >= 0) & (out.y < len(schema.classes))).all()
    else:
        assert out.y.dtype == np.float32
        assert (np.abs(out.y) <= LARGEST_VALUE).all()
    return len(out.row), len(out.rejected)


def worker() -> None:
    """Read inputs one after the other in a process of its own, which a fault in a decoder may end.

    Prints one line of JSON: what was counted. The file `progress` names the input being read, should the process die.
    """
    kind, first, last, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    signal.signal(signal.SIGALRM, _hang)
    counts: Counter[str] = Counter()
    failures = []
    before = 0.0
    inputs = generated(first, last) if kind == "any" else (hostile(seed, kind) for seed in range(first, last))
    for seed, (ending, data) in enumerate(inputs, first):
        path = folder / f"input.{ending}"
        path.write_bytes(data)
        (folder / "progress").write_text(str(seed))
        signal.alarm(SECONDS)
        try:
            encoded, rejected, error = read(path)
            counts.update(inputs=1, encoded=encoded, rejected=rejected, refused=bool(error))
        except BaseException as error:
            failures.append([seed, "".join(traceback.format_exception(error))[-2_000:]])
        signal.alarm(0)
        before = before or resident_mb()
    print(json.dumps({"counts": counts, "failures": failures, "grown_mb": resident_mb("VmHWM") - before}))


def resident_mb(which: str = "VmRSS") -> float:
    status = Path("/proc/self/status")
    text = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 / 1e6 for line in text if line.startswith(which)), 0.0)


def _hang(*_: object) -> None:
    raise TimeoutError(f"an input took more than {SECONDS} s")


if __name__ == "__main__":
    worker()
