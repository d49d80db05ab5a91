"""`opvi serve` in this process: what it answers, what it learns, what survives, who may ask."""

import base64
import errno
import json
import os
import shutil
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra `serve`")
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import kills
from opvi.adapters._tables import open_source
from opvi.adapters._tables._jsonlines import BadLineError
from opvi.app import cli
from opvi.app.cli import _serve
from opvi.app.learn import RunDirectory, RunError, predict
from opvi.app.learn._predict import learnt
from opvi.app.learn._starting import Asked, ready
from opvi.app.learn._stopping import Stop
from opvi.app.serve import Options, _followed, _guard, _intake, _log, _service, _tickets, _writer
from opvi.app.serve._app import application
from opvi.app.serve._guard import Guard
from opvi.running import Checkpoints, _engine
from tests.app.asgi import Client
from tests.app.test_learning import SMALL

TOKEN = "a-token-of-plain-letters"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.csv"
    kills.write_table(path, 700)
    return path


@pytest.fixture(scope="module")
def begun(table, tmp_path_factory):
    """A run that has learnt the first 500 rows, and the other rows as JSON objects."""
    folder = tmp_path_factory.mktemp("begun")
    lines = table.read_text().splitlines()
    (folder / "first.csv").write_text("\n".join(lines[:501]) + "\n")
    run = RunDirectory(folder / "model.run")
    with run.checkpoints as kept:
        made = ready(run, kept, Asked(str(folder / "first.csv"), target="y", settings=SMALL), Stop())
        with made.source:
            made.learner.learn(made.source, made.first, Stop())
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[501:]]
    for row in rows:
        row["a"], row["y"] = float(row["a"]), float(row["y"])
    rows[7]["c"] = "broken"
    return run.path, rows


@pytest.fixture
def run(begun, tmp_path):
    return RunDirectory(shutil.copytree(begun[0], tmp_path / "model.run"))


class Served:
    """A server in this process; `with` starts and ends it."""

    def __init__(self, run, token=None, hosts=("127.0.0.1",), readonly=False, **options):
        self.options = Options("model", **{"save_every": 1e9, **options})
        self.context = _service.followed(run) if readonly else _service.written(run, self.options, lambda line: None)
        self.token, self.hosts = token, hosts

    def __enter__(self):
        self.made = self.context.__enter__()
        observers = []
        app = Guard(
            application(self.options, self.made, observers),
            self.hosts,
            self.token,
            lambda *told: [one(*told) for one in observers],
        )
        self.client = Client(app)
        self.client.__enter__()
        return self

    def __exit__(self, *error):
        self.client.__exit__(None, None, None)
        self.context.__exit__(*error)

    def post(self, path, content, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.request("POST", path, body, named)

    def get(self, path):
        return self.client.request("GET", path)

    def learnt_all(self):
        while self.made.unseen and not self.made.failed:
            time.sleep(0.005)
        assert not self.made.failed


def tree(path):
    found = learnt(RunDirectory(path)).tree
    return {name: part for name, part in found.items() if name != "saves"}


def same(a, b):
    pairs = zip(jax.tree.leaves(tree(a)), jax.tree.leaves(tree(b)), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


# --- answers ------------------------------------------------------------------------------------


def test_predictions_are_those_of_opvi_predict(run, begun, tmp_path):
    rows = [{name: value for name, value in row.items() if name != "y"} for row in begun[1][:20]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with open_source(tmp_path / "rows.jsonl") as source:
        (expected, _), *_ = predict(learnt(run), source, (0.1, 0.9))
    with Served(run) as server:
        said = server.post("/v1/predict?quantiles=0.1,0.9", rows)
        one = server.post("/v1/predict", rows[0]).json()
        nothing = server.post("/v1/predict", {"a": "x"})
        odd = [server.post(f"/v1/predict?quantiles={q}", rows[0]).status_code for q in ("0", "a", "0.1,2")]
    told = said.json()
    assert (said.status_code, told["target"], len(told["predictions"])) == (200, "y", 20)
    assert told["predictions"][7] is None
    assert told["rejected"] == [{"row": 7, "reason": "column 'c': 'broken' is not a number"}]
    for name in ("mean", "sd", "q0.1", "q0.9"):
        found = [row[name] if row else np.nan for row in told["predictions"]]
        np.testing.assert_array_equal(np.float32(found), np.float32(expected[name]))
    assert set(one["predictions"][0]) == {"mean", "sd", "q0.05", "q0.5", "q0.95"}
    assert nothing.status_code == 422
    assert odd == [400] * 3


def test_tensors_give_the_same_predictions(run, begun):
    rows = [row for row in begun[1][:8] if row["c"] != "broken"]
    columns = {"a": "FP64", "b": "FP64", "c": "FP64", "colour": "BYTES"}

    def tensors(shape):
        return [
            {
                "name": name,
                "datatype": kind,
                "shape": shape,
                "data": [row[name] if kind == "BYTES" else float(row[name] or "nan") for row in rows],
            }
            for name, kind in columns.items()
        ]

    with Served(run) as server:
        plain = server.post("/v1/predict", rows).json()["predictions"]
        about = server.get("/v2/models/model").json()
        for shape in ([7], [7, 1]):
            said = server.post("/v2/models/model/infer", {"id": "7", "inputs": tensors(shape)}).json()
            assert (said["id"], said["model_name"], said["model_version"]) == ("7", "model", "1")
            for output, promised in zip(said["outputs"], about["outputs"], strict=True):
                assert (output["name"], output["datatype"], output["shape"]) == (promised["name"], "FP64", [7])
                assert output["data"] == [row[output["name"]] for row in plain]
        assert [(one["name"], one["datatype"]) for one in about["inputs"]] == list(columns.items())
        some = server.post("/v2/models/model/infer", {"inputs": tensors([7]), "outputs": [{"name": "sd"}]}).json()
        assert [output["name"] for output in some["outputs"]] == ["sd"]
        wrong = {
            "a missing input": {"inputs": tensors([7])[1:]},
            "a shape that lies": {"inputs": tensors([6])},
            "an unknown output": {"inputs": tensors([7]), "outputs": [{"name": "median"}]},
            "a matrix": {"inputs": tensors([7, 2])},
            "no request": [1, 2],
        }
        for what, content in wrong.items():
            answer = server.post("/v2/models/model/infer", content)
            assert answer.status_code == 400, what
            assert answer.json()["error"], what
        statuses = [
            server.get(path).status_code
            for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/model/ready", "/v2/models/other")
        ]
        assert statuses == [200] * 4 + [404]


# --- learning -----------------------------------------------------------------------------------


def test_rows_are_learnt_as_from_a_file_once_whatever_the_cuts(run, begun, tmp_path):
    rows = begun[1]
    with Served(run) as server:
        server.post("/v1/learn", rows[0], Idempotency_Key="first")
        again = server.post("/v1/learn", rows[0], Idempotency_Key="first").json()
        other = server.post("/v1/learn", rows[1], Idempotency_Key="first")
        told = server.post("/v1/learn", rows[1:50]).json()
        assert (told["first"], told["rows"], told["rejected"]) == (1, 49, 1)
        assert told["reasons"] == [{"row": 6, "reason": "column 'c': 'broken' is not a number"}]
        for at in range(50, 200, 7):
            server.post("/v1/learn", rows[at : at + 7], Idempotency_Key=f"rows {at}")
        before = shutil.copytree(run.path, tmp_path / "killed.run")  # as a kill would leave it: nothing saved
    assert again == {"rows": 1, "first": 0, "repeated": True}
    assert other.status_code == 422
    done = learnt(run).tree
    assert done["rejected"]["count"] == 1
    assert int(done["state"].rows) + len(done["waiting"]["y"]) == 500 + len(rows) - 1

    shutil.rmtree(before / "checkpoints" / "lock", ignore_errors=True)
    with Served(RunDirectory(before)) as server:  # learns the log, and knows the keys
        assert server.post("/v1/learn", rows[0], Idempotency_Key="first").json()["repeated"]
        assert server.post("/v1/learn", rows[50:57], Idempotency_Key="rows 50").json() == {
            "rows": 7,
            "first": 50,
            "repeated": True,
        }
    assert same(run.path, before)
    assert (run.path / "rejected.jsonl").read_text() == (before / "rejected.jsonl").read_text()

    # The same rows from a file, by `opvi learn`; its end fills the last batch up, so it is compared before.
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    copy = RunDirectory(shutil.copytree(begun[0], tmp_path / "file.run"))
    with copy.checkpoints as kept, open_source(tmp_path / "more.jsonl") as source:
        made = ready(copy, kept, Asked(str(tmp_path / "more.jsonl"), resume=True), Stop())
        with made.source, made.learner.writing():
            for block in source.blocks():
                made.learner.take(block)
        for x, y in zip(jax.tree.leaves(made.learner.engine.state), jax.tree.leaves(done["state"]), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        np.testing.assert_array_equal(made.learner.waiting[0], done["waiting"]["x"])


def test_large_groups_are_cut(run, begun, monkeypatch):
    monkeypatch.setattr(_intake, "TOGETHER", 3000)
    monkeypatch.setattr(_writer, "TOGETHER", 30)
    rows = begun[1]
    with Served(run) as server, server.made.lock, ThreadPoolExecutor(8) as pool:
        sent = pool.map(lambda at: server.post("/v1/learn", rows[at : at + 10]).json(), range(0, 200, 10))
        firsts = sorted(said["first"] for said in sent)
    assert firsts == list(range(0, 200, 10))
    done = learnt(run).tree
    assert int(done["state"].rows) + len(done["waiting"]["y"]) == 500 + 199


def test_a_run_that_was_served_resumes_from_its_files(run, begun, capsys):
    with Served(run) as server:
        server.post("/v1/learn", begun[1][:5])
    assert cli.main(["learn", "--run", str(run.path), "--resume", "--target", "y"]) == 0
    places = learnt(run).tree["places"]
    assert (places[0]["name"], places[0]["row"]) == ("opvi serve", 5)
    with Served(run) as server:
        assert server.post("/v1/learn", begun[1][5]).json()["first"] == 5


def test_a_full_disk_refuses_rows_and_goes_on(run, begun, monkeypatch):
    rows, write, full = begun[1], os.pwrite, [True]

    def pwrite(file, data, at):
        if full[0]:
            write(file, data[:10], at)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, at)

    with Served(run) as server:
        monkeypatch.setattr(_log.os, "pwrite", pwrite)
        refused = server.post("/v1/learn", rows[:3])
        full[0] = False
        taken = server.post("/v1/learn", rows[3:5])

        def fails(file):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(_log.os, "fdatasync", fails)
        assert server.post("/v1/learn", rows[5:9]).status_code == 503
    assert (refused.status_code, "No space" in refused.json()["error"]) == (503, True)
    assert taken.json() == {"rows": 2, "first": 0, "repeated": False}
    assert [entry.rows for entry in _log.Log(run.path / "log", 0).after(0)] == [2]


def test_a_checkpoint_that_cannot_be_written_stops_nothing(run, begun, monkeypatch, capsys):
    def fails(self, *_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with Served(run, save_every=1e-9) as server:
        with monkeypatch.context() as full:
            full.setattr(Checkpoints, "save", fails)
            server.post("/v1/learn", begun[1][:50])
            server.learnt_all()
            said, deadline = "", time.monotonic() + 30
            while "Learning continues" not in said and time.monotonic() < deadline:
                said += capsys.readouterr().err
                time.sleep(0.01)
            assert "Learning continues" in said
        assert server.get("/v2/health/ready").status_code == 200
        server.post("/v1/learn", begun[1][50:60])
    done = learnt(run).tree
    assert int(done["state"].rows) + len(done["waiting"]["y"]) == 500 + 60 - 1


def test_too_many_waiting_rows_are_refused(run, begun):
    with Served(run, backlog=30) as server:
        with server.made.lock:  # learning stands still
            statuses = [server.post("/v1/learn", begun[1][:10]).status_code for _ in range(5)]
            late = server.post("/v1/learn", begun[1][:10])
            assert server.post("/v1/predict", begun[1][0]).status_code == 200  # does not wait for it
        server.learnt_all()
        assert server.post("/v1/learn", begun[1][:10]).status_code == 200
    assert statuses == [200] * 4 + [429]
    assert late.headers["retry-after"] == "1"


def test_a_label_that_comes_later_scores_the_prediction(run, begun):
    row = {**begun[1][0], "b": 0.25}
    label = row.pop("y")
    with Served(run) as server:
        asked = server.post("/v1/predict?ticket", row).json()
        said, ticket = asked["predictions"][0], asked["ticket"]
        told = server.post(f"/v1/learn?ticket={ticket}", {"y": label}).json()
        again = server.post(f"/v1/learn?ticket={ticket}", {"y": label}).json()
        gone = server.post("/v1/learn?ticket=unknown", {"y": label})
        names = {family.name: family for family in _families(server)}
    error = np.float32(label) - said["mean"]
    covered = said["q0.05"] <= np.float32(label) <= said["q0.95"]
    assert told["scored"] == [{"row": 0, "absolute_error": abs(error), "squared_error": error**2, "covered": covered}]
    assert (again["repeated"], again["first"]) == (True, told["first"])
    assert gone.status_code == 404
    assert names["opvi_tickets_scored"].samples[0].value == 1
    (entry,) = _log.Log(run.path / "log", 0).after(0)
    assert (json.loads(entry.asked), json.loads(entry.body)) == (row, {"y": label})  # the whole row is durable


def test_a_ticket_may_be_used_again_for_another_row(run, begun):
    rows = [{name: value for name, value in row.items() if name != "y"} for row in begun[1][:3]]
    with Served(run) as server:
        told = []
        for row in rows:
            server.post("/v1/predict?ticket=mine", row)
            told.append(server.post("/v1/learn?ticket=mine", {"y": 1.5}).json())
        again = server.post("/v1/learn?ticket=mine", {"y": 1.5}).json()
        other = server.post("/v1/learn?ticket=mine", {"y": 2.5})
        server.learnt_all()
        metrics = {family.name: family.samples[0].value for family in _families(server)}
    assert [one["repeated"] for one in told] == [False] * 3
    assert [one["first"] for one in told] == [0, 1, 2]
    assert (again["repeated"], again["first"]) == (True, 2)
    assert other.status_code == 422
    assert (metrics["opvi_tickets_scored"], metrics["opvi_tickets_waiting"]) == (3, 0)
    log = _log.Log(run.path / "log", 0)
    assert [entry.read()[0]["a"] for entry in log.after(0)] == [str(row["a"]) for row in rows]
    assert log.keys["ticket mine"].first == 2


def test_what_came_under_a_ticket_is_logged_byte_for_byte(run, begun):
    """`1.50` and `1e999` stay as they are, so that what is learnt after a kill is what was learnt before."""
    body, label = b'{"a": 1.50, "b": 1e999, "c": 1E0, "colour": "r\\u0065d"}', b'{"y": 2.500}'
    with Served(run) as server:
        server.post("/v1/predict?ticket=mine", body)
        server.post("/v1/learn?ticket=mine", label)
        server.post("/v1/predict?ticket=odd", body.replace(b"1e999", b"1.50"))
        server.post("/v1/learn?ticket=odd", label)
        server.learnt_all()
        rejected, waiting = server.made.learner.rejected, server.made.learner.waiting
    entries = list(_log.Log(run.path / "log", 0).after(0))
    assert [(entry.asked, entry.body) for entry in entries] == [(body, label), (body.replace(b"1e999", b"1.50"), label)]
    shutil.rmtree(run.path / "checkpoints")  # as after a kill: nothing but the log knows of them
    shutil.copytree(begun[0] / "checkpoints", run.path / "checkpoints")
    with Served(run) as server:
        assert server.made.learner.rejected == rejected == 1
        np.testing.assert_array_equal(server.made.learner.waiting[0], waiting[0])


@pytest.mark.parametrize(
    "shape",
    [
        [1, *[10**300] * 20_000],
        [1, *[1e308] * 20_000],
        [1, *[1] * 20_000],
        [True],
        [1.0],
        ["1"],
        {"0": 1},
        [[1]],
        [-1],
        [],
        [2, 2],
        [10**4000, 1],
    ],
    ids=lambda shape: str(shape)[:12],
)
def test_a_tensor_s_shape_is_looked_at_before_anything_is_multiplied(run, shape):
    column = {"name": "a", "shape": shape, "datatype": "FP64", "data": [1.0]}
    with Served(run) as server:
        began = time.perf_counter()
        said = server.post("/v2/models/model/infer", {"inputs": [column]})
        took = time.perf_counter() - began
    assert said.status_code == 400
    assert "[n] or [n, 1] is needed" in said.json()["error"] or "not an inference request" in said.json()["error"]
    assert len(said.content) < 1000
    assert took < 5  # not a measurement: to multiply these takes minutes


@pytest.mark.parametrize("size", [-5, "1", 10**30, 9, 1.5, True])
def test_the_size_of_a_binary_tensor_is_that_of_bytes_that_are_there(run, size):
    column = {"name": "a", "shape": [1], "datatype": "FP64", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [column]}).encode()
    with Served(run) as server:
        more = {"inference-header-content-length": str(len(head))}
        said = server.client.request("POST", "/v2/models/model/infer", head + bytes(8), more)
    assert (said.status_code, "`binary_data_size`" in said.json()["error"]) == (400, True)


@pytest.mark.parametrize("mark", [b"[", b"{", b",", b'{"a":'])
@pytest.mark.parametrize("path", ["/v1/learn", "/v1/predict", "/v2/models/model/infer"])
def test_json_of_too_many_values_is_not_read(run, path, mark):
    with Served(run) as server:
        said = server.post(path, b"[" + mark * 300_000)
    assert (said.status_code, "values, but at most" in said.json()["error"]) == (400, True)


def test_a_model_that_predicts_nothing_finite_is_not_ready(run, begun):
    row = begun[1][0]
    with Served(run) as server:
        before = server.get("/v2/health/ready").status_code
        made = server.made.learner.engine
        made.state = jax.tree.map(lambda leaf: leaf * np.nan if leaf.dtype.kind == "f" else leaf, made.state)
        server.post("/v1/learn", begun[1][:40])
        server.learnt_all()
        ready = [server.get(path) for path in ("/v2/health/ready", "/v2/models/model/ready")]
        said = server.post("/v1/predict", row)
        tensors = {
            "inputs": [
                {"name": name, "shape": [1], "datatype": "BYTES", "data": [str(value)]}
                for name, value in row.items()
                if name != "y"
            ]
        }
        infer = server.post("/v2/models/model/infer", tensors)
        names = {family.name: family.samples[0].value for family in _families(server)}
    assert before == 200
    assert [(one.status_code, one.json()["ready"]) for one in ready] == [(503, False)] * 2
    assert (said.status_code, said.json()["predictions"]) == (422, [None])
    assert said.json()["rejected"] == [{"row": 0, "reason": "its prediction is not a finite number"}]
    assert (infer.status_code, "finite" in infer.json()["error"]) == (400, True)
    assert names["opvi_predictions_not_finite"] >= 20
    assert names["opvi_answers_not_finite"] >= 3  # two requests, and a probe for each state that was published


def test_rows_that_do_not_fill_a_batch_are_in_the_predictions(run, begun, monkeypatch):
    """At once, and after the server has ended; what is learnt keeps the bits of full batches."""
    rows, asked = [dict(row) for row in begun[1][8:20]], {"a": 0.0, "b": 0.0, "c": 0.0}
    for row in rows:
        row["y"] += 50.0
    with Served(run) as server:
        before = server.post("/v1/predict", asked).json()["predictions"][0]["mean"]
        learnt_before = server.made.learner.rows
        with monkeypatch.context() as patched:
            real, go = _writer.with_waiting, threading.Event()
            patched.setattr(_writer, "with_waiting", lambda engine: (go.wait(30), real(engine))[1])
            server.post("/v1/learn", rows)
            while server.made.behind:
                time.sleep(0.005)
            metrics = {family.name: family.samples[0].value for family in _families(server)}
            assert metrics["opvi_queue_rows"] == 12  # they wait for a full batch
            go.set()
        server.learnt_all()
        after = server.post("/v1/predict", asked).json()["predictions"][0]["mean"]
        assert server.made.learner.rows == learnt_before
        assert len(server.made.learner.waiting[1]) == 12
        metrics = {family.name: family.samples[0].value for family in _families(server)}
        assert metrics["opvi_queue_rows"] == 0
    assert after > before + 1
    known = learnt(run)
    assert (len(known.tree["waiting"]["y"]), int(known.state().rows)) == (12, learnt_before + 12)
    for readonly in (True, False):
        with Served(run, readonly=readonly) as server:
            assert server.post("/v1/predict", asked).json()["predictions"][0]["mean"] == after


def test_fields_that_are_not_columns_are_named_and_columns_that_are_absent(run, begun):
    row = begun[1][0]
    wrong = {{"a": "A"}.get(name, name): value for name, value in row.items()}
    with Served(run) as server:
        right = [server.post(path, row).json() for path in ("/v1/predict", "/v1/learn")]
        said = [server.post(path, wrong).json() for path in ("/v1/predict", "/v1/learn")]
        many = server.post("/v1/predict", [row, wrong, {f"{place:03}" + "x" * 100: 1 for place in range(50)}]).json()
    assert all("ignored" not in one and "missing" not in one for one in right)
    assert [(one["ignored"], one["missing"]) for one in said] == [(["A"], ["a"])] * 2
    assert (len(many["ignored"]), max(map(len, many["ignored"])), "missing" in many) == (20, 60, False)


def test_bodies_that_are_not_whole_yet_are_bounded_together(run, monkeypatch):
    monkeypatch.setattr(_guard, "COMING", 100_000)
    monkeypatch.setattr(_guard, "PATIENCE", 2.0)
    body = b'{"a": 1}' + b" " * 90_000
    with Served(run) as server, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(server.client.request, "POST", "/v1/predict", [body[:90_000], None])  # never whole
        while not _guard._coming["bytes"]:
            time.sleep(0.005)
        assert server.post("/v1/predict", body).status_code == 429
        assert server.post("/v1/predict", b'{"a": 1}').status_code == 200
        monkeypatch.setattr(_guard, "COMING", 1_000_000)
        assert server.post("/v1/predict", body).status_code == 200
        assert waits.result(60).status_code == 408
        assert not _guard._coming["bytes"]


def test_other_quantiles_need_no_other_program(run, begun):
    programs = _engine.program(_engine.told, 2, False)
    with Served(run) as server:
        for levels in ("0.1", "0.2,0.3", "0.5,0.6,0.7,0.8"):  # few and many
            assert server.post(f"/v1/predict?quantiles={levels}", begun[1][0]).status_code == 200
        made = programs._cache_size()
        for place in range(30):
            levels = ",".join(f"{(1 + place + i) / 100:g}" for i in range(1 + place % 20))
            said = server.post(f"/v1/predict?quantiles={levels}", begun[1][0]).json()["predictions"][0]
            values = [said[f"q{(1 + place + i) / 100:g}"] for i in range(1 + place % 20)]
            assert values == sorted(values)
        tiny = [server.post(f"/v1/predict?quantiles={q}", begun[1][0]) for q in ("1e-300", "1e-7", "1", "nan", "1e-6")]
        assert programs._cache_size() == made
    assert [said.status_code for said in tiny] == [400] * 4 + [200]


def test_tickets_are_bounded_by_their_bytes(run, begun, monkeypatch):
    monkeypatch.setattr(_tickets, "MOST_BYTES", 10_000)
    row = {**begun[1][0], "colour": "x" * 3000}
    with Served(run) as server:
        for _ in range(10):
            server.post("/v1/predict?ticket", row)
        metrics = {family.name: family.samples[0].value for family in _families(server)}
        server.post("/v1/predict?ticket=huge", {**row, "colour": "x" * 20_000})
        assert server.post("/v1/learn?ticket=huge", {"y": 1}).status_code == 404
    assert (metrics["opvi_tickets_waiting"], metrics["opvi_tickets_given_up"]) == (2, 8)


def _families(server):
    return list(text_string_to_metric_families(server.get("/metrics").text))


def test_prometheus_reads_the_figures(run, begun):
    with Served(run) as server:
        server.post("/v1/learn", begun[1][:40])
        server.learnt_all()
        server.post("/v1/predict", b"{")
        found = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in _families(server)
            for sample in family.samples
        }
        summary = server.made.learner.summary()
    assert found["opvi_rows_learnt_total", ()] == int(learnt(run).state().rows) == 500 + 39
    assert learnt(run).tree["rows"] == 500 + 20  # 19 wait for a full batch
    assert found["opvi_rows_logged_total", ()] == 40
    assert found["opvi_rows_rejected_total", ()] == 1
    assert found["opvi_queue_rows", ()] == 0
    assert found["opvi_loss", ()] == pytest.approx(summary.total.loss)
    assert found["opvi_coverage_ratio", ()] == pytest.approx(summary.total.covered)
    assert found["opvi_requests_total", (("route", "predict"), ("status", "400"))] == 1
    assert found["opvi_request_seconds_count", (("route", "learn"),)] == 1


def test_the_report_is_the_page_of_opvi_report(run, begun):
    with Served(run) as server:
        server.post("/v1/learn", begun[1][:25])
        server.learnt_all()
        page = server.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert "Rows learnt" in page.text
    assert ">520<" in page.text


def test_a_follower_swaps_when_a_checkpoint_lands(run, begun, monkeypatch):
    monkeypatch.setattr(_followed, "LOOK", 0.02)
    row = begun[1][0]
    with Served(run, readonly=True) as reader:
        before = reader.post("/v1/predict", row).json()
        assert reader.post("/v1/learn", row).status_code == 403
        with Served(run) as writer:
            writer.post("/v1/learn", begun[1][:60])
            writer.learnt_all()
            now = writer.post("/v1/predict", row).json()
        deadline = time.monotonic() + 20
        while (after := reader.post("/v1/predict", row).json()) == before and time.monotonic() < deadline:
            time.sleep(0.02)
    assert after == now != before


@pytest.mark.slow
def test_classes_and_those_that_come_later(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    label = np.where(x[:, 0] > 0, "up", "down")
    lines = [f"{a:.4f},{b:.4f},{name}" for (a, b), name in zip(x, label, strict=True)]
    (tmp_path / "t.csv").write_text("a,b,kind\n" + "\n".join(lines) + "\n")
    run = RunDirectory(tmp_path / "model.run")
    with run.checkpoints as kept:
        made = ready(run, kept, Asked(str(tmp_path / "t.csv"), target="kind", settings=SMALL), Stop())
        with made.source:
            made.learner.learn(made.source, made.first, Stop())
    with Served(run) as server:
        said = server.post("/v1/predict?ticket=1", {"a": 2, "b": 0}).json()["predictions"][0]
        assert said["prediction"] == "up"
        assert sum(said["probabilities"].values()) == pytest.approx(1, abs=1e-6)
        scored = server.post("/v1/learn?ticket=1", {"kind": "down"}).json()["scored"][0]
        assert scored == {"row": 0, "loss": -np.log(said["probabilities"]["down"]), "wrong": True}
        tensors = [{"name": name, "datatype": "INT32", "shape": [1], "data": [2]} for name in "ab"]
        outputs = server.post("/v2/models/model/infer", {"inputs": tensors}).json()["outputs"]
        assert (outputs[0]["data"], outputs[1]["shape"]) == (["up"], [1, 2])
        server.post("/v1/learn", [{"a": 0, "b": 3, "kind": "new"}] * 40)
        server.learnt_all()
        assert set(server.post("/v1/predict", {"a": 0, "b": 3}).json()["predictions"][0]["probabilities"]) == {
            "up",
            "down",
            "new",
        }
    assert learnt(run).schema.classes == ["down", "up", "new"]


# --- the log ------------------------------------------------------------------------------------


def entries(first, *rows):
    out = []
    for count in rows:
        body = json.dumps([{"a": first + i} for i in range(count)]).encode()
        out.append(_log.Entry(f"key {first}", "digest", first, count, body))
        first += count
    return out


def test_a_torn_end_is_cut_off_and_damage_before_it_refused(tmp_path):
    log = _log.Log(tmp_path / "log", 0)
    log.append(entries(0, 3, 2))
    log.append(entries(5, 1))
    log.close()
    (path,) = (tmp_path / "log").iterdir()
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        again = _log.Log(tmp_path / "log", 0)
        expected = 6 if cut == len(whole) else 5 if cut >= whole.rindex(b"opvi") else 0
        assert again.rows == expected
        assert [entry.rows for entry in again.after(0)] == {0: [], 5: [3, 2], 6: [3, 2, 1]}[expected]
        again.close()
    for place in range(0, whole.rindex(b"opvi"), 3):  # acknowledged rows follow
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(_log.LogError, match=r"is damaged after 0 bytes, and rows that were acknowledged follow"):
            _log.Log(tmp_path / "log", 0)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b'{"key": 1, "digest": "", "rows": 1, "bytes": 2}',
        b'{"key": "", "digest": "", "rows": 1, "bytes": -2}',
        b'{"key": "", "digest": "", "rows": 1, "bytes": 900}',
        b'{"key": "", "digest": "", "rows": 2, "bytes": 2}',
        b'{"key": "", "digest": "", "rows": true, "bytes": 2}',
        b'{"key": "", "digest": "", "rows": 1, "bytes": 1, "asked": 1}',
        b'{"rows": 1, "bytes": 2}',
    ],
)
def test_a_forged_log_is_refused(tmp_path, line):
    """Under a right checksum."""
    data = line + b"\n{}\n"
    tail = _log.HEADER.pack(_log.MARK, 0, 0, 1, len(data))[8:]
    whole = _log.MARK + zlib.crc32(data, zlib.crc32(tail)).to_bytes(4, "little") + tail + data
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / f"{0:015d}.log").write_bytes(whole)
    with pytest.raises((_log.LogError, BadLineError), match=r"not a log that opvi wrote|rows were logged|invalid JSON"):
        _ = [entry.read() for entry in _log.Log(tmp_path / "log", 0).after(0)]


def test_a_sparse_segment_is_refused_at_once(tmp_path):
    (tmp_path / "log").mkdir()
    path = tmp_path / "log" / f"{0:015d}.log"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(_log.LogError, match="more than any part of a log"):
        _log.Log(tmp_path / "log", 0)


def test_segments_that_every_checkpoint_holds_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(_log, "SEGMENT", 10)
    log = _log.Log(tmp_path / "log", 0)
    for first in range(0, 20, 2):
        log.append(entries(first, 2))
    log.forget(9)  # in the middle of the fifth
    assert [int(path.stem) for path in sorted((tmp_path / "log").iterdir())] == [8, 10, 12, 14, 16, 18]
    log.forget(20)
    assert [int(path.stem) for path in sorted((tmp_path / "log").iterdir())] == [12, 14, 16, 18]
    assert set(log.keys) == {"key 12", "key 14", "key 16", "key 18"}
    log.close()
    assert [entry.first for entry in _log.Log(tmp_path / "log", 13).after(15)] == [14, 16, 18]
    with pytest.raises(_log.LogError, match="begins with row 12, but only 3 rows are learnt"):
        _log.Log(tmp_path / "log", 3)
    next((tmp_path / "log").glob("*14.log")).unlink()
    with pytest.raises(_log.LogError, match="lacks the rows from 14 to 16"):
        _log.Log(tmp_path / "log", 13)


# --- who may ask --------------------------------------------------------------------------------


def test_names_origins_and_tokens(run, begun):
    row = begun[1][0]
    basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    with Served(run, token=TOKEN, hosts=("127.0.0.1", "models.example")) as server:

        def status(path="/v1/predict", **headers):
            headers = {"Authorization": f"Bearer {TOKEN}", **headers}
            return server.post(path, row, **headers).status_code

        assert status() == status(Host="models.example:8000") == status(Authorization=f"Basic {basic}") == 200
        assert status(Host="evil.example") == status(Host="") == 421
        assert status(Origin="http://127.0.0.1") == 200
        assert status(Origin="http://evil.example") == status(Origin="null") == status(Origin="http://[") == 403
        for wrong in ("", "Bearer", f"Bearer {TOKEN}x", "Basic !!!", "Basic " + base64.b64encode(b"x").decode()):
            assert status(Authorization=wrong) == 401
        refused = server.get("/metrics")
        assert refused.headers["www-authenticate"].startswith("Basic")
        assert server.get("/v2/health/ready").status_code == 200


def test_bodies_are_bounded(run, begun, monkeypatch):
    monkeypatch.setattr(_guard, "PATIENCE", 0.2)
    with Served(run, most_bytes=1000) as server:
        assert server.post("/v1/predict", b" " * 1001).status_code == 413
        assert server.client.request("POST", "/v1/learn", [b" " * 400] * 3).status_code == 413
        assert server.client.request("POST", "/v1/learn", [b"{", None]).status_code == 408
        assert server.post("/v1/learn", b"{}", Content_Encoding="gzip").status_code == 415
        assert server.post("/v1/learn", b"[]").status_code == 400


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--host", "0.0.0.0"], "can be reached from other computers"),
        (["--token-file", "{run}/run.json"], "one word of at least 16"),
        (["--token-file", "{run}/none"], "cannot be read"),
        (["--ssl-certfile", "x"], "needs both"),
        (["--readonly", "--host", "256.1.1.1"], "can be reached"),
    ],
)
def test_mistakes_get_a_line_that_says_what_to_do(words, expected, run, capsys):
    assert cli.main(["serve", str(run.path), *(word.format(run=run.path) for word in words)]) == 1
    assert expected in capsys.readouterr().err


def test_without_the_extra_its_name_is_said(run, monkeypatch, capsys):
    monkeypatch.setattr(_serve, "find_spec", lambda name: None if name == "uvicorn" else object())
    assert cli.main(["serve", str(run.path)]) == 1
    assert "needs uvicorn, which is not installed: pip install 'opvi[serve]'" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="holds no run"), Served(RunDirectory(tmp_path)):
        pass


# --- malformed and hostile ----------------------------------------------------------------------


def test_hostile_requests_get_answers_without_a_traceback(run, begun):
    from benchmarks.hostile import hostile

    chance = np.random.default_rng(0)
    with Served(run) as server:
        for method, path, headers, body in hostile(chance, 400, begun[1]):
            said = server.client.request(method, path, body, headers)
            assert said.status_code < 500, (method, path, body[:200])
            assert "Traceback" not in said.text
            assert ".py" not in said.text
        assert server.post("/v1/predict", begun[1][0]).status_code == 200
        server.learnt_all()
        assert not server.made.failed
