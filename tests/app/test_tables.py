"""Rows from files and pipes: what is read, what is rejected, and that blocks may be cut anywhere."""

import csv
import gzip
import io
import json
import os
import resource
import signal
import sys
import threading
import time
import tracemalloc
import zlib
from datetime import date, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from opvi.adapters._tables import Block, Encoded, Schema, TableError, infer_schema, open_source
from opvi.adapters._tables import _block as block
from opvi.adapters._tables import _lines as lines
from opvi.adapters._tables import _values as values
from opvi.adapters._tables._delimited import MISSING, Delimited
from opvi.adapters._tables._first import Reading
from opvi.adapters._tables._jsonlines import JsonLines
from opvi.app.learn import RunDirectory, Settings
from opvi.app.learn._learner import Stop
from opvi.app.learn._starting import Asked, alone

CSV = """weight,colour,flag,date,code,y
1.5,red,true,2024-01-01,10,0.1
,blue,False,2024-01-02T06:00:00,20,0.2
NA,,TRUE,,30,0.35
2.5,red,,2024-01-03,40,-4e-1
"""
WIDE = b"".join(b"c%d," % i for i in range(130)) + b"y\n"
WIDE += b"".join(b"".join(b"c%d," % i for _ in range(130)) + b"%d.5\n" % i for i in range(32))
FEATURES = [
    *("weight", "weight is missing", "colour=blue", "colour=red", "colour is missing", "flag", "flag is missing"),
    *("date: days", "date: hour sin", "date: hour cos", "date: weekday sin", "date: weekday cos"),
    *("date: year sin", "date: year cos", "date is missing", "code"),
]


class Pieces:
    """Stands for a file whose bytes come in any pieces."""

    name, share = "test", None


def written(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def blocks_of(path: Path | str, **options) -> list[Block]:
    with open_source(path, **options) as source:
        return list(source.blocks())


def learnt(path: Path | str, target: str = "y", **options) -> tuple[Schema, Encoded]:
    """The schema of a small source, and all of its rows."""
    blocks = blocks_of(path)
    schema = infer_schema(blocks, target, **options)
    return schema, joined([schema.encode(b) for b in blocks])


def joined(parts: list[Encoded]) -> Encoded:
    return Encoded(
        np.concatenate([part.x for part in parts]),
        np.concatenate([part.y for part in parts]),
        np.concatenate([part.row for part in parts]),
        [rejected for part in parts for rejected in part.rejected],
        sum(part.gaps for part in parts),
    )


def same(one: Encoded, other: Encoded) -> None:
    for a, b in zip(one, other, strict=True):
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def test_csv_becomes_the_numbers_it_means(tmp_path: Path) -> None:
    schema, out = learnt(written(tmp_path, "a.csv", CSV))
    assert (schema.task, schema.classes, schema.notes) == ("regression", [], [])
    assert schema.features == FEATURES
    assert schema.origin == [name.split(":")[0].split("=")[0].removesuffix(" is missing") for name in FEATURES]
    np.testing.assert_array_equal(out.y, np.float32([0.1, 0.2, 0.35, -0.4]))
    assert out.row.tolist() == [0, 1, 2, 3]
    table = dict(zip(FEATURES, out.x.T.tolist(), strict=True))
    assert table["weight"] == [1.5, 2.0, 2.0, 2.5]  # gaps filled with the mean
    assert table["weight is missing"] == [0, 1, 1, 0]
    assert table["colour=red"] == [1, 0, 0, 1]
    assert table["colour is missing"] == [0, 0, 1, 0]
    assert table["flag"] == pytest.approx([1, 0, 1, 2 / 3])
    assert table["date: days"] == [0, 0, 0, 0]  # until a year has passed
    assert table["date: hour sin"] == pytest.approx([0, 1, 0, 0])
    assert table["date: hour cos"] == pytest.approx([1, 0, 0, 1], abs=1e-6)
    assert table["date: weekday sin"] == pytest.approx([0, np.sin(2 * np.pi / 7), 0, np.sin(4 * np.pi / 7)])  # a Monday
    assert table["date: year cos"] == [0, 0, 0, 0]
    assert out.gaps.sum() == 2 + 1 + 1 + 1
    assert Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema


def test_every_format_gives_the_same_numbers(tmp_path: Path) -> None:
    """The same rows as text, with types, and compressed."""
    columns = {
        "weight": [1.5, None, None, 2.5],
        "colour": ["red", "blue", None, "red"],
        "flag": [True, False, True, None],
        "date": [datetime(2024, 1, 1), datetime(2024, 1, 2, 6), None, datetime(2024, 1, 3)],
        "code": [10, 20, 30, 40],
        "y": [0.1, 0.2, 0.35, -0.4],
    }
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    text = "\n".join(json.dumps({k: v for k, v in row.items() if v is not None}, default=str) for row in rows)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=3)
    dictionary = {**columns, "colour": pa.array(columns["colour"]).dictionary_encode()}
    pq.write_table(pa.table(dictionary), tmp_path / "b.pq")
    paths = [
        written(tmp_path, "a.csv", CSV),
        written(tmp_path, "crlf.csv", b"\xef\xbb\xbf" + CSV.replace("\n", "\r\n").encode().removesuffix(b"\r\n")),
        written(tmp_path, "blank.csv", "\n\n" + CSV.replace("\n", "\n\n")),
        written(tmp_path, "semicolon.csv", CSV.replace(",", ";")),
        written(tmp_path, "spaces.csv", CSV.replace(",", " ,  ")),
        written(
            tmp_path, "quotes.csv", "\n".join(",".join(f'"{f}"' for f in r.split(",")) for r in CSV.split("\n")[:-1])
        ),
        written(tmp_path, "a.tsv", CSV.replace(",", "\t")),
        written(tmp_path, "a.jsonl", text),
        written(tmp_path, "text.ndjson", text.replace("1.5", '"1.5"').replace("true", '"TRUE"')),
        written(tmp_path, "a.csv.gz", gzip.compress(CSV[:40].encode()) + gzip.compress(CSV[40:].encode()) + b"\0\0"),
        written(tmp_path, "a.csv.zst", zst(CSV[:40].encode()) + zst(CSV[40:].encode())),
        tmp_path / "a.parquet",
        tmp_path / "b.pq",
    ]
    expected_schema, expected = learnt(paths[0])
    for path in paths[1:]:
        schema, out = learnt(path)
        assert schema == expected_schema, path
        same(out, expected)


FIELDS = st.sampled_from(
    ["1", "2.5", "x", "", '"', '""', '"a"', '"b\nc"', '5" pipe', "\r", "é", "2024-01-01", "NA", "1e99"]
    + ['"a\rb"', '"a,b"', '"x""y"', '"\n\n"', '"1"']
)
SOUP = st.lists(FIELDS | st.sampled_from([",", ",", ",", "\n", "\n"]), max_size=60).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=SOUP, cuts=st.lists(st.integers(0, 200)), bad_byte=st.integers(0, 400))
@example(text='1,"a\n2,b\n3,"c\n4,d\n', cuts=[3, 5], bad_byte=400)
def test_csv_rows_do_not_depend_on_the_cuts(text: str, cuts: list[int], bad_byte: int) -> None:
    data = bytearray(("a,y\n1,0.5\n2,1.5\n3,0.25\n" + text).encode())
    if bad_byte in range(30, len(data)):
        data[bad_byte] = 0xFF
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "PIECE", 24)  # a record's most bytes
        patch.setattr(block, "SHOWN", 4)  # fewer than that, as it is
        whole = list(Delimited(Pieces(), iter([bytes(data)]), ",").blocks(0, None))
        patch.setattr(lines, "ROWS", 3)
        parts = list(Delimited(Pieces(), iter(pieces(bytes(data), cuts)), ",").blocks(0, None))
    agree(whole, parts)
    agree(whole, parts, rows=3)


WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.text(alphabet='ab",\n\r ', max_size=6)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(st.tuples(WORDS, WORDS), max_size=8), end=st.sampled_from(["\n", "\r\n"]), every=st.booleans())
def test_what_a_csv_writer_writes_is_read_back(rows: list[tuple[str, str]], end: str, every: bool) -> None:
    out = io.StringIO()
    bare = any("\r" in a + b for a, b in rows)  # the writer may not quote that by itself
    quoting = csv.QUOTE_ALL if every or bare else csv.QUOTE_MINIMAL
    csv.writer(out, lineterminator=end, quoting=quoting).writerows([("a", "y"), *rows])
    blocks = list(Delimited(Pieces(), iter([out.getvalue().encode()]), ",").blocks(0, None))
    assert [b.malformed for b in blocks if b.malformed] == []
    for place, name in enumerate("ay"):
        got = [value for b in blocks for value in b.columns[name].to_pylist()]
        texts = [row[place].replace("\r\n", "\n") for row in rows]
        assert got == [None if text.lower() in MISSING else text for text in texts]


ROWS = st.sampled_from(
    [
        '{"y": 1, "a": 2}',
        '{"y": 2, "b": "x"}',
        '{"y": 0.5, "a": [1]}',
        "{",
        "[]",
        "",
        '{"y": "é", "c": null}',
        '{"a":1,"a":2}',
    ]
)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROWS, max_size=20), cuts=st.lists(st.integers(0, 200)))
def test_json_rows_do_not_depend_on_the_cuts(rows: list[str], cuts: list[int]) -> None:
    data = "\n".join(['{"a": 1, "y": 1}', '{"a": 2, "y": 2.5}', *rows]).encode()
    whole = list(JsonLines(Pieces(), iter([data])).blocks(0, None))
    parts = list(JsonLines(Pieces(), iter(pieces(data, cuts))).blocks(0, None))
    agree(whole, parts)
    agree(whole, parts, rows=4)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def settled(blocks: list[Block], rows: int) -> Schema | str:
    try:
        return infer_schema(blocks, "y", rows=rows)
    except TableError as error:
        return str(error)


def agree(whole: list[Block], parts: list[Block], rows: int = 1_000) -> None:
    """Both give one schema and the same rows, and every row is encoded or rejected."""
    schema = settled(whole, rows)
    assert settled(parts, rows) == schema
    if isinstance(schema, str):
        return
    one = joined([schema.encode(b) for b in whole])
    same(joined([schema.encode(b) for b in parts]), one)
    count = sum(b.rows for b in whole)
    assert sorted([*one.row.tolist(), *(r.row for r in one.rejected)]) == list(range(count))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"x,1,red", "'x' is not a number"),
        (b"inf,1,red", "inf is infinite or beyond 1e\\+18"),
        (b"-1e19,1,red", "-1e\\+19 is infinite or beyond 1e\\+18"),
        (b"1e400,1,red", "inf is infinite"),
        (b"1_000,1,red", "'1_000' is not a number"),
        (b"0x1F,1,red", "is not a number"),
        ("٣,1,red".encode(), "is not a number"),
        (b"nan(7),1,red", "is not a number"),
        (b"1,,red", "target 'y' is missing"),
        (b"1,N/A,red", "target 'y' is missing"),
        (b"1,2,red", "target 'y': '2' is none of the classes \\(0, 1\\)"),
        (b"1,a,red", "target 'y': 'a' is none of the classes"),
        (b"1,1", "2 fields, but the header has 3"),
        (b"1,1,red,4", "4 fields, but the header has 3"),
        (b"1,1,r\xff", "not UTF-8"),
        (b"1,1,r\rd", "a carriage return in the middle of a line"),
        (b'1,1,"red', "a quote that is opened and not closed"),
        (b'1,1,"red"x', "a quote in the wrong place"),
        (b"1,1," + b"r" * (1 << 20), "a line of more than 1,048,576 bytes"),
    ],
)
def test_a_bad_line_costs_one_row(tmp_path: Path, line: bytes, reason: str) -> None:
    good = b"".join(b"%d.5,%d,%s\n" % (i, i % 2, [b"red", b"blue"][i % 2]) for i in range(40))
    path = written(tmp_path, "a.csv", b"x,y,colour\n" + good + line + b"\n" + good)
    schema, out = learnt(path, rows=40)
    assert schema.classes == ["0", "1"]
    assert len(out.row) == 80
    (rejected,) = out.rejected
    assert rejected.row == 40
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(rejected.reason)
    assert 0 < len(rejected.text) <= 2_000


def test_quotes(tmp_path: Path) -> None:
    """Line breaks in quotes are read; a quote that nobody closes costs its own line, not the file."""
    text = 'text,y\n"two\nlines",1.5\n5" pipe,2.5\n"a ""b"", c",3.5\n"\n\n",4\n'
    text += '"never closed,4.5\nplain,5.5\n"even,6.5\nlast,7.5\n'
    blocks = blocks_of(written(tmp_path, "a.csv", text))
    texts = [value for b in blocks for value in b.columns["text"].to_pylist()]
    assert texts == ["two\nlines", '5" pipe', 'a "b", c', "\n\n", "plain", "last"]
    assert [value for b in blocks for value in b.columns["y"].to_pylist()] == ["1.5", "2.5", "3.5", "4", "5.5", "7.5"]
    assert [rejected.row for b in blocks for rejected in b.malformed] == [4, 6]
    stray = 'a,y\n1,2\n"x,3\n' + "1,2\n" * 300_000 + '3,4\n"y,5\n'
    blocks = blocks_of(written(tmp_path, "b.csv", stray))
    assert [r.row for b in blocks for r in b.malformed] == [1, 300_003]
    assert sum(len(b.numbers) for b in blocks) == 300_002
    assert max(b.rows for b in blocks) <= block.ROWS


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "invalid JSON"),
        ("[1, 2]", "not an object"),
        ('{"y": 1, "y": 2}', "'y' occurs twice"),
        ('{"y": 1, "x": "\\ud800"}', "lone surrogate"),
        ('{"y": 1, "x": [1]}', "column 'x': a list or an object"),
        ('{"y": {"z": 1}, "x": 1}', "column 'y': a list or an object"),
        ('{"y": 1, "x": "one"}', "'one' is not a number"),
        ('{"y": 1, "x": Infinity}', "inf is infinite"),
        ('{"y": 1, "x": true}', "'true' is not a number"),
        ('{"x": 1}', "target 'y' is missing"),
        ('{"y": NaN, "x": 1}', "target 'y' is missing"),
        ("[" * 100_000, "nested too deeply"),
        ('{"y": ' + "1" * 5_000 + "}", "inf is infinite"),
    ],
)
def test_a_bad_line_of_json_costs_one_row(tmp_path: Path, line: str, reason: str) -> None:
    good = "".join(f'{{"x": {i}.5, "y": "{i}.25", "list": [1], "new {i}": null}}\n' for i in range(30))
    schema, out = learnt(written(tmp_path, "a.jsonl", good + "  \n" + line + "\n" + good), rows=30)
    assert schema.features == ["x"]
    assert schema.notes == ["column 'list' left out: it holds lists, objects or a type that is not read"]
    assert len(out.row) == 60
    (rejected,) = out.rejected
    assert rejected.row == 30
    assert reason in rejected.reason


def test_text_columns(tmp_path: Path) -> None:
    """Few levels have columns, many are hashed, names and row numbers are left out."""
    head = "few,many,name,index,y\n"
    rows = [f"{'abc'[i % 3]},m{i % 40},name {i},{i},{i * i % 7}.5\n" for i in range(400)]
    path = written(tmp_path, "a.csv", head + "".join(rows) + "unheard of,m1000,x,400,1.5\nb,m3,x,401,2.5\n")
    schema, out = learnt(path, rows=400)
    assert schema.features == ["few=a", "few=b", "few=c", *(f"many: hash {i}" for i in range(1, 33))]
    assert schema.notes == [
        "column 'many' has 40 different strings: hashed into 32 columns",
        "column 'name' left out: every value differs",
        "column 'index' left out: it counts the rows",
    ]
    assert out.rejected == []
    assert out.x[400, :3].tolist() == [0, 0, 0]  # unknown, and no break of the schema
    assert (np.abs(out.x[:, 3:]).sum(1) == 1).all()
    np.testing.assert_array_equal(out.x[3, 3:], out.x[401, 3:])
    assert out.x[3, 3:].argmax() == 3  # by CRC-32: the same in every process and version
    schema, _ = learnt(
        path, leave_out=["few", "many"], rows=400, target="name", task="classification", classes=["a", "b"]
    )
    assert schema.features == ["y"]


@pytest.mark.parametrize(
    ("name", "rows", "kept"),
    [
        ("id", 200, False),
        ("customer_id", 200, False),
        ("orderId", 200, False),
        ("ID", 199, True),
        ("paid", 200, True),
        ("height", 200, True),
    ],
)
def test_whole_numbers_that_name_rows_are_left_out(tmp_path: Path, name: str, rows: int, kept: bool) -> None:
    """As IDs are called, and different in each of enough rows; one that repeats may say something about a row."""
    numbers = np.random.default_rng(0).permutation(rows) + 10_000_000
    lines = [f"{n},{i % 7}.5,{i % 11}.5\n" for i, n in enumerate(numbers)]
    schema, _ = learnt(written(tmp_path, "a.csv", f"{name},x,y\n" + "".join(lines)), rows=rows)
    assert schema.features == ([name, "x"] if kept else ["x"])
    said = f"column '{name}' left out: it is called an ID, and no two of the first rows have the same"
    assert schema.notes == ([] if kept else [said])
    lines[1] = lines[0]
    schema, _ = learnt(written(tmp_path, "b.csv", f"{name},x,y\n" + "".join(lines)), rows=rows)
    assert schema.features == [name, "x"]


def test_odd_column_names(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", "a\nb", "", "a=b", "a", '"', " y"]
    header = ",".join('"' + name.replace('"', '""') + '"' for name in names)
    schema, out = learnt(written(tmp_path, "a.csv", header + "\n1,2,3,4.5,b,6,0.5\n2,4,7,8.5,b,0,1.5\n"))
    assert schema.features == ["<script>alert(1)</script>", "a\nb", "column 3", "a=b", "a=b (2)", '"']
    assert schema.origin == ["<script>alert(1)</script>", "a\nb", "column 3", "a=b", "a", '"']
    assert len(out.row) == 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", b"", "is empty"),
        ("a.csv", b"\n\n", "is empty"),
        ("a.jsonl", b" \n", "is empty"),
        ("a.csv", b"a,y\n", "no row to learn from"),
        ("a.csv", b"a,y\n1\n", "The first was rejected: 1 fields, but the header has 2"),
        ("a.csv", b"1,2\n3,4\n", "begins with numbers"),
        ("a.csv", b"a,a,y\n1,2,3\n", "several columns named 'a'"),
        ("a.csv", b"a,b\n1,2\n", "no column 'y'. It has 'a', 'b'"),
        ("a.csv", b"a,y\n1,2\n3,2\n", "only the value '2'"),
        ("a.csv", b"y\n1\n2\n", "no column is left"),
        ("a.csv", b"a,y\n,1\n,2\n", "no column is left"),
        ("a.csv", b"a,y\n1,2024-01-01\n2,2024-01-02\n", "holds dates"),
        ("a.csv", b"\xff" * (3 << 20), "not a line of column names"),
        ("a.csv", b"a" * (3 << 20) + b"\n1\n", "not a line of column names"),
        ("a.csv.gz", b"a,y\n1,2\n", "does not begin like a .gz file"),
        ("a.txt", b"a,y\n1,2\n", "names no format"),
        ("a", b"a,y\n1,2\n", "names no format"),
        ("a.json", b'[{"y": 1}]', "one JSON array"),
        ("a.parquet", b"PAR1 this is none PAR1", "cannot be read as Parquet"),
        ("a.parquet", b"", "cannot be read as Parquet"),
        ("a.parquet", gzip.compress(b"x", mtime=0), "is a compressed Parquet file"),
        ("a.csv", b"a," + b",".join(b"c%d" % i for i in range(10_001)) + b"\n", "10,002 columns"),
        ("a.csv", WIDE, "4,160 numbers per row"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_learnt_from_is_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    with pytest.raises(TableError, match=message.replace("(", r"\(")):
        learnt(written(tmp_path, name, data))


def test_wrong_arguments(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "a,b,y\n1,2,red\n2,3,blue\n")
    for call, message in [
        (lambda: open_source(tmp_path / "none.csv"), "No such file"),
        (lambda: open_source(tmp_path), "is a directory"),
        (lambda: open_source(path, format="xls"), "'xls' is not known"),
        (lambda: open_source(path, columns=["z"]), "no column 'z'"),
        (lambda: learnt(path, task="regression"), "holds text, but regression needs numbers"),
        (lambda: learnt(path, task="ranking"), "'ranking' is not known"),
        (lambda: learnt(path, leave_out=["y"]), "cannot be left out"),
        (lambda: learnt(path, leave_out=["z"]), "no column 'z'"),
        (lambda: learnt(path, classes=["red"]), "at least 2"),
        (lambda: learnt(path, classes=["red", "red"]), "all different"),
        (lambda: Schema.from_json({}), "not a schema"),
    ]:
        with pytest.raises(TableError, match=message):
            call()


@pytest.mark.parametrize(
    ("labels", "task", "classes"),
    [
        (["b", "a", "b"], "classification", ["a", "b"]),
        (["True", "false", "true"], "classification", ["false", "true"]),
        (["2", "10", "1.0"], "classification", ["1", "2", "10"]),
        (["2", "10", "1.5"], "regression", []),
        ([str(i) for i in range(11)], "regression", []),
    ],
)
def test_the_target_tells_the_task(tmp_path: Path, labels: list[str], task: str, classes: list[str]) -> None:
    text = "x,y\n" + "".join(f"{i}.5,{label}\n" for i, label in enumerate(labels))
    schema, out = learnt(written(tmp_path, "a.csv", text))
    assert (schema.task, schema.classes) == (task, classes)
    if classes:
        names = [schema.classes[i] for i in out.y]
        assert names == [label.lower().removesuffix(".0") for label in labels]
        assert out.y.dtype == np.int32


def test_given_classes_may_come_later(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "x,y\n1,a\n2,a\n3,c\n4,b\n")
    schema, out = learnt(path, classes=["c", "b", "a"], rows=2)
    assert out.y.tolist() == [2, 2, 0, 1]
    _, out = learnt(path, classes=["a", "b"])
    assert [rejected.row for rejected in out.rejected] == [2]
    (one,) = blocks_of(written(tmp_path, "b.csv", "x\n1\n"))
    unlabelled = schema.encode(one, with_target=False)
    assert unlabelled.y is None
    assert unlabelled.x.tolist() == [[1.0]]
    assert schema.absent(["y"]) == ["x"]


def test_typed_columns_of_parquet(tmp_path: Path) -> None:
    """Each type becomes numbers or is left out; hostile values reject their row."""
    far = pa.array([0, 1, 2**31 - 1, None], pa.int32())
    columns = {
        "half": pa.array(np.float16([1.5, 2.5, 3.5, np.nan])),
        "decimal": pa.array([1, 2, 3, 4], pa.decimal128(10, 2)),
        "time": pa.array([0, 1_500, 2_000, 1], pa.time32("ms")),
        "span": pa.array([10**9, 0, 0, 5], pa.duration("ns")),
        "day": far.cast(pa.date32()),
        "stamp": pa.array([0, 2**62, 5, 7], pa.timestamp("ms")),
        "bytes": pa.array([b"a", b"b", b"a", b"\xff"]),
        "view": pa.array(["a", "b", "a", None], pa.string_view()),
        "list": pa.array([[1], [2], [], None]),
        "nothing": pa.nulls(4),
        "y": pa.array([1.5, 2.5, 3.5, 4.5]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    schema, out = learnt(tmp_path / "a.parquet")
    assert out.row.tolist() == [0]
    assert [r.row for r in out.rejected] == [1, 2, 3]
    assert "'stamp'" in out.rejected[0].reason
    assert "'day'" in out.rejected[1].reason
    assert "not UTF-8" in out.rejected[2].reason
    assert [note.split("'")[1] for note in schema.notes] == ["day", "stamp", "nothing", "list"]
    row = dict(zip(schema.features, out.x[0].tolist(), strict=True))
    assert (row["half"], row["decimal"], row["time"], row["span"], row["bytes=a"]) == (1.5, 1.0, 0.0, 1.0, 1.0)
    assert row["view=a"] == 1.0


def test_the_same_row_numbers_after_skipping(tmp_path: Path) -> None:
    text = "x,y\n" + "".join(f"{i},{i}.5\n" if i % 10 else f'"two\nlines",{i}.5\nbroken\n' for i in range(3_000))
    table = pa.table({"x": np.arange(3_000), "y": np.arange(3_000) + 0.5})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    rows = "".join(f'{{"y": {i}}}\n' if i % 7 else "{\n" for i in range(3_000))
    paths = [written(tmp_path, "a.csv", text), tmp_path / "a.parquet", written(tmp_path, "a.jsonl", rows)]
    paths.append(written(tmp_path, "a.csv.gz", gzip.compress(text.encode())))
    for path in paths:
        whole = flat(blocks_of(path))
        for skip in (1, 699, 700, 1_500, len(whole) - 1, len(whole), len(whole) + 5):
            assert flat(blocks_of(path, skip=skip)) == whole[skip:], (path, skip)
        assert {name for b in blocks_of(path, columns=["y"]) for name in b.columns} == {"y"}


def flat(blocks: list[Block]) -> list[tuple]:
    """Rows in the order of the source, as (number, target or reason)."""
    good = [
        row
        for b in blocks
        if len(b.numbers)
        for row in zip(b.numbers.tolist(), map(str, b.columns["y"].to_pylist()), strict=True)
    ]
    return sorted([*good, *((r.row, r.reason) for b in blocks for r in b.malformed)])


def test_the_fingerprint_knows_a_file_that_grew(tmp_path: Path) -> None:
    path = written(tmp_path, "a.csv", "x,y\n1,2\n")
    with open_source(path) as source:
        mark = source.fingerprint
        assert source.begins_like(mark)
    written(tmp_path, "a.csv", "x,y\n1,2\n" + "3,4\n" * 50_000)
    with open_source(path) as source:
        assert source.fingerprint != mark
        assert source.begins_like(mark)
        shares = [b.share for b in source.blocks()]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    written(tmp_path, "a.csv", "x,y\n1,3\n3,4\n")
    with open_source(path) as source:
        assert not source.begins_like(mark)
        assert not source.begins_like(None)


@pytest.mark.parametrize("packing", ["gz", "zst"])
def test_a_cut_off_file_gives_what_it_has(tmp_path: Path, packing: str) -> None:
    text = "x,y\n" + "".join(f"{i},{i * i}\n" for i in range(40_000))
    data = gzip.compress(text.encode()) if packing == "gz" else zst(text.encode())
    for path, message in [
        (written(tmp_path, f"a.csv.{packing}", data[: len(data) // 2]), "it was cut off"),
        (
            written(tmp_path, f"b.csv.{packing}", data[: len(data) // 2] + b"\xff" * 99 + data[len(data) // 2 :]),
            "is damaged",
        ),
    ]:
        rows = 0
        with open_source(path) as source:
            blocks = source.blocks()
            with pytest.raises(TableError, match=message):  # noqa: PT012
                for one in blocks:
                    rows += one.rows
        assert 1_000 < rows < 40_000


def test_a_bomb_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """64 MiB in one line, from a file a thousand times smaller."""
    path = written(tmp_path, "a.csv.gz", gzip.compress(b"x,y\n1,2\n" + b"0" * (64 << 20) + b"\n3,4\n"))
    tracemalloc.start()
    rows = flat(blocks_of(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [row for row, _ in rows] == [0, 1, 2]
    assert peak < 12 * block.PIECE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b'x,"y\n',
            "rows, up to row .* are all malformed, so reading stopped.*a quote that is opened and not closed",
        ),
        (b"lorem ipsum\n", "are all malformed, so reading stopped. The last one: 1 fields, but the header has 2"),
        (b"lorem ipsum " * 200 + b"\n", "are all malformed, so reading stopped"),
        (b"a" * 1024, "a line has more than 256 MiB"),
        (b'""' * 512, "a line has more than 256 MiB"),
    ],
)
def test_an_open_quote_and_bombs_are_refused_in_time_and_memory(tmp_path: Path, body: bytes, message: str) -> None:
    """300 MiB from a small file, after a quote that is never closed."""
    path = tmp_path / "a.csv.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b'a,y\n1,2\n2,3\n3,"4\n')
        for _ in range(300):
            file.write(body * ((1 << 20) // len(body)))
    peak, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    run = tmp_path / "run"
    asked = Asked(str(path), "y", settings=Settings(hidden=(), particles=2))
    with pytest.raises(TableError, match=message), alone(RunDirectory(run), asked, Stop()):
        pass
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 * 1024  # kB


def test_keys_without_end_are_read_in_bounded_memory(tmp_path: Path) -> None:
    """Every row of JSON brings keys of its own: rows × keys must not be held at once."""
    text = "".join(json.dumps({f"k{i}-{j}": 1 for j in range(20)}) + "\n" for i in range(500))
    sizes = [len(b.columns) * b.rows for b in blocks_of(written(tmp_path, "a.jsonl", text))]
    assert max(sizes) < 1.2 * block.CELLS
    wide = json.dumps({f"k{j}": 1 for j in range(10_001)})
    (one,) = blocks_of(written(tmp_path, "b.jsonl", '{"y": 1}\n' + wide + "\n"))
    assert one.malformed[0].reason == "10,001 keys, but a row has at most 10,000"


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_pipe_hands_out_rows_as_they_come(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Each row is there before the next is written, also while half of one is waiting."""
    row = b"1,2\n" if kind == "csv" else b'{"x": 1, "y": 2}\n'
    ours, theirs = os.pipe()
    with os.fdopen(ours) as end, os.fdopen(theirs, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", end)
        writer.write((b"x,y\n" if kind == "csv" else b"") + row)
        with open_source("-") as source:
            assert (source.columns, source.fingerprint) == (["x", "y"], None)
            blocks = source.blocks()
            assert next(blocks)[1:7] == (0, 1, [], None, {}, kind == "jsonl")
            writer.write(row + row + row[:2])
            assert next(blocks)[1:3] == (1, 2)
            writer.write(row[2:])
            assert next(blocks)[1:3] == (3, 1)
            writer.write(row[:-1])
            writer.close()
            assert next(blocks)[1:3] == (4, 1)  # the last line may lack its end
            assert next(blocks, None) is None


def test_a_compressed_pipe_hands_out_rows_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    pack = zlib.compressobj(wbits=31)
    with os.fdopen(ours) as end, os.fdopen(theirs, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", end)
        writer.write(pack.compress(b"x,y\n1,2\n") + pack.flush(zlib.Z_SYNC_FLUSH))
        with open_source("-") as source:
            blocks = source.blocks()
            assert next(blocks)[1:3] == (0, 1)
            writer.write(pack.compress(b"1,2\n1,2\n") + pack.flush(zlib.Z_SYNC_FLUSH))
            assert next(blocks)[1:3] == (1, 2)
            writer.write(pack.flush())
            writer.close()
            assert next(blocks, None) is None


@pytest.mark.parametrize("packing", ["", "gz", "zst"])
def test_a_waiting_read_ends_with_a_signal(monkeypatch: pytest.MonkeyPatch, packing: str) -> None:
    ours, theirs = os.pipe()
    with os.fdopen(ours) as end, os.fdopen(theirs, "wb") as writer:
        text = b"x,y\n" + b"1,2\n" * 10_000
        writer.write({"": text, "gz": gzip.compress(text)[:30], "zst": zst(text)[:30]}[packing])
        writer.flush()
        monkeypatch.setattr(sys, "stdin", end)
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt), open_source("-") as source:
                for _ in source.blocks():
                    pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_named_pipe_is_read_like_standard_input(tmp_path: Path) -> None:
    """What a shell gives for <(command). The format is told by the first bytes, compressed or not."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    out = pa.BufferOutputStream()
    pq.write_table(pa.table({"y": [1.5]}), out)
    for data, names in [
        (b"x\ty\n1\t2\n", ["x", "y"]),
        (b'{"y": 1}\n', ["y"]),
        (gzip.compress(b"a|y\n1|2\n", mtime=0), ["a", "y"]),
        (zst(b'\n{"y": 1}\n'), ["y"]),
        (out.getvalue().to_pybytes(), None),
        (gzip.compress(out.getvalue().to_pybytes()), None),
    ]:
        writer = threading.Thread(target=fifo.write_bytes, args=(data,), daemon=True)
        writer.start()
        if names is None:
            with pytest.raises(TableError, match="Save it first"):
                open_source(fifo)
        else:
            with open_source(fifo) as source:
                assert (source.columns, source.fingerprint) == (names, None)
                assert sum(len(b.numbers) for b in source.blocks()) == 1
        writer.join(5)


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.text(alphabet="0123456789+-.eEinfatyNIux_ ()", max_size=12), max_size=6))
@example(texts=["1", "nan(1)", "+inf", "1.", ".5e-3", " 7 ", "-0"])
def test_numbers_mean_the_same_alone_and_together(texts: list[str]) -> None:
    together = values.as_numbers(pa.array(texts, pa.string()))
    alone = [values.as_numbers(pa.array([text], pa.string())) for text in texts]
    for field in range(3):
        np.testing.assert_array_equal(together[field], [part[field][0] for part in alone])
    singly = values._singly(pa.array(texts, pa.string()), values._number, np.nan)
    for a, b in zip(together, singly, strict=True):
        np.testing.assert_array_equal(a, b)


STAMPS = st.from_regex(values.DATE, fullmatch=True) | st.text(alphabet="0123456789-:TZ+. ,", max_size=30)


@settings(max_examples=100, deadline=None)
@given(texts=st.lists(STAMPS | st.datetimes().map(str) | st.dates().map(str), min_size=1, max_size=3))
@example(texts=["0000-01-01"])
@example(texts=["9999-12-31T23:59:59-12:00"])
@example(texts=["2024-02-29T12:30:00.1234567+01:00", "2024-02-30"])
def test_dates_mean_the_same_alone_and_together(texts: list[str]) -> None:
    array = pa.array(texts, pa.string())
    for a, b in zip(values.as_dates(array), values._singly(array, values._date, 0), strict=True):
        np.testing.assert_array_equal(a, b)
    typed = [date(2024, 2, 29), date(1, 1, 1), date(9999, 12, 31)]
    days = values.as_dates(pa.array(typed)).data
    assert days.tolist() == values.as_dates(pa.array(list(map(str, typed)))).data.tolist()


def test_a_column_mostly_of_numbers_holds_numbers(tmp_path: Path) -> None:
    rows = [f"{'oops' if i == 7 else i * i},{i}.5\n" for i in range(100)]
    schema, out = learnt(written(tmp_path, "a.csv", "x,y\n" + "".join(rows)))
    assert schema.features == ["x"]
    assert schema.notes == [
        "column 'x' taken as numbers; 1 of the first rows hold something else, and such rows are rejected"
    ]
    assert [rejected.row for rejected in out.rejected] == [7]
    assert json.loads(out.rejected[0].text) == {"x": "oops", "y": "7.5"}


UNITS = "x,km,mass,y\n" + "".join(
    f'{i % 7},"1.{100 + i},{10 + i % 9} km",{i % 20} kg,{i + 0.5} kg\n' for i in range(60)
)


def test_numbers_with_a_unit_are_told(tmp_path: Path) -> None:
    """Inputs cost the column or become text with a hint; a target is refused, unless it has few values."""
    path = written(tmp_path, "a.csv", UNITS)
    schema, _ = learnt(path, task="classification", target="mass")
    assert "left out: every value differs: '1.100,10 km' and others look like numbers with the unit 'km'" in str(schema)
    assert "remove the unit to have them learnt so" in schema.notes[0]
    with pytest.raises(TableError, match=r"look like numbers with the unit 'kg'\. Remove the unit; or, .* task class"):
        learnt(path)
    with pytest.raises(TableError, match=r"holds numbers with the unit 'kg', such as .* Remove the unit"):
        learnt(path, task="regression")
    stars = written(tmp_path, "b.csv", "x,y\n" + "".join(f"{i}.5,{1 + i % 5} stars\n" for i in range(60)))
    schema, _ = learnt(stars)
    assert (len(schema.classes), "with the unit 'stars', taken as 5 classes" in schema.notes[0]) == (5, True)
    codes = written(tmp_path, "c.csv", "x,y\n" + "".join(f"{i}.5,{i % 20}{'AB'[i % 2]}\n" for i in range(60)))
    assert len(learnt(codes)[0].classes) == 20


def test_a_date_format_that_does_not_fit_is_told(tmp_path: Path) -> None:
    """With the one that fits, if there is one."""
    days = [f"{1 + i % 12}/{1 + i % 28}/2024" for i in range(60)]  # month first
    path = written(tmp_path, "a.csv", "x,day,y\n" + "".join(f"{i % 7},{day},{i}.5\n" for i, day in enumerate(days)))
    (note,) = learnt(path, reading=Reading(dates="dmy"))[0].notes
    assert "look like dates, but do not fit the date format given, 'dmy'; give the date format 'mdy' to" in note
    with pytest.raises(TableError, match=r"date format given, '%d\.%m\.%Y'\. Give the date format 'mdy'"):
        learnt(path, target="day", reading=Reading(dates="%d.%m.%Y"))
    assert "in 'day'" in learnt(path, reading=Reading(dates="mdy"))[0].notes[0]


def test_classes_that_differ_only_by_case_are_told(tmp_path: Path) -> None:
    rows = "".join(f"{i}.5,{('Yes', 'yes', 'Y', 'No', 'n')[i % 5]}\n" for i in range(60))
    path = written(tmp_path, "a.csv", f"x,y\n{rows}")
    (note,) = learnt(path)[0].notes
    assert "has 5 classes, of which some differ only by case" in note
    assert "'Y', 'Yes', 'yes'. To make them one: --fold-case" in note
    schema = infer_schema(open_source(path).blocks(), "y", reading=Reading(fold=True))
    assert (len(schema.classes), schema.notes) == (2, [])


def test_a_stray_quote_in_every_line_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking from every line for the quote that closes would take the square of the file's length."""
    looked, is_record = [], lines._is_record
    monkeypatch.setattr(lines, "_is_record", lambda text, *rest: looked.append(len(text)) or is_record(text, *rest))
    text = "a,y\n" + 'x","y\n' * 20_000 + '"open\n' * 20_000 + '"even\n' + '""""\n' * 10_000
    blocks = blocks_of(written(tmp_path, "a.csv", text))
    assert sum(len(b.malformed) for b in blocks) == sum(b.rows for b in blocks) == 50_001
    assert sum(looked) < 3 * len(text)


def test_texts_that_look_like_numbers_or_dates_are_told(tmp_path: Path) -> None:
    """Spellings that fit no rule remain text, but hardly on purpose."""
    path = tmp_path / "a.csv"
    days = [f"{1 + i % 28}/1/2024" if i % 2 else f"1/{13 + i % 15}/2024" for i in range(80)]  # day first, or month
    both = [f"{i},{i}" if i % 2 else f"{i}.{i}" for i in range(80)]
    rows = [f'{i % 7},"{both[i]}",{days[i]},{"ab"[i % 2]}{i % 40}' for i in range(80)]
    path.write_text("y,comma,day,code\n" + "\n".join(rows) + "\n")
    notes = infer_schema(open_source(path).blocks(), "y").notes
    told = {name: next((note for note in notes if repr(name) in note), "") for name in ("comma", "day", "code")}
    assert "look like numbers" in told["comma"]
    assert "look like dates" in told["day"]
    assert "look like" not in told["code"]
    with pytest.raises(TableError, match=r"look like numbers\. Write them like 1234\.5; or, .* task classification"):
        infer_schema(open_source(path).blocks(), "comma")


def test_given_classes_are_held_against_the_first_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,y\n" + "".join(f"{i},{'no' if i % 4 else 'yes'}\n" for i in range(0, 40, 2)))
    some = infer_schema(open_source(path).blocks(), "y", classes=["yes", "maybe"])
    assert "10 of the first rows hold none of the classes" in some.notes[0]
    assert not infer_schema(open_source(path).blocks(), "y", classes=["yes", "no"]).notes
